"""Where the host works for fully_shard and for DTensors: calls in programs of zero2 and zero3."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from perfmodel.program.builder import ProgramBuilder
from perfmodel.program.program import COLLECTIVE, HOST, Members, Program, single_device_program
from perfmodel.program.strategies.fsdp.dtensor_overhead import add_dtensor_calls
from perfmodel.trace.operation import TensorSpec
from perfmodel.trace.trace import EventKind, Parameter
from tests.program.forms import trace
from tests.program.strategies.fsdp.fsdp_scripts import program
from tests.program.strategies.fsdp.recorded_fsdp import Variant


def shares(made: Program, phase: str | None = None) -> Counter[str]:
    """How often each call of the host alone is done."""
    columns = made.instructions
    found: Counter[str] = Counter()
    for position in np.flatnonzero(columns.kind == HOST).tolist():
        if phase is None or made.runs[columns.run[position]].phase == phase:
            found[columns.calls[columns.call[position]]] += columns.share[position]
    return found


def parameters_of(made: Program, module: str) -> int:
    return sum(parameter.name.startswith(module) for parameter in made.trace.parameters)


@pytest.mark.parametrize(("reshards", "gathered"), [(None, 3), (True, 4), (False, 0)])
def test_groups_cost_the_host_where_they_are_gathered_and_reduced(reshards: bool | None, gathered: int) -> None:
    made = program(Variant(blocks=3, reshard_after_forward=reshards))
    count, in_blocks = len(made.trace.parameters), parameters_of(made, "blocks.")
    assert shares(made, "forward") == {"fsdp forward group": 4, "fsdp forward parameter": count}
    again = {"fsdp gather group": gathered, "fsdp gather parameter": count if reshards else in_blocks}
    wanted = {"fsdp reduce group": 4, "fsdp reduce parameter": count}
    assert shares(made, "backward") == wanted | (again if gathered else {})


def test_parameters_that_are_whole_cost_nothing_more() -> None:
    """In the second micro-batch of a model that keeps them until backward: nothing is reduced in the first."""
    made = program(Variant(blocks=2, reshard_after_forward=None, micro_batches=2))
    assert shares(made)["fsdp reduce group"] == 3
    assert shares(made)["fsdp forward group"] == 2 * 3


def test_the_hosts_calls_contain_those_of_launches_and_collectives() -> None:
    made = program(Variant())
    columns = made.instructions
    inserted = (columns.event < 0) & np.isin(columns.kind, (COLLECTIVE, EventKind.OP))
    assert inserted.any()
    assert set(columns.call[inserted].tolist()) == {-1}


def test_dtensors_cost_an_optimizer_a_and_b_a_parameter() -> None:
    plain = program(Variant())
    prefix = "dtensor optimizer adamw foreach"
    found = shares(plain, "optimizer")
    assert plain.trace.optimized is not None
    assert found == pytest.approx({prefix: 1.0, f"{prefix} parameter": len(plain.trace.optimized)})
    columns = plain.instructions
    hosts = np.flatnonzero(
        (columns.kind == HOST) & np.array([plain.runs[run].phase == "optimizer" for run in columns.run])
    )
    assert set(columns.kind[hosts[1::2] + 1].tolist()) == {EventKind.OP}


def test_a_phase_without_operators_costs_it_at_its_end() -> None:
    known = trace()
    frozen = Parameter("frozen", TensorSpec.parse("float32[4]"), 9, requires_grad=False)
    known = replace(known, parameters=(*known.parameters, frozen))
    empty = replace(known.steady.segments[-1], phase="zero_grad", start=known.steady.segments[-1].stop)
    steady = replace(known.steady, segments=(*known.steady.segments, empty))
    builder = ProgramBuilder(single_device_program(replace(known, steady=steady)), Members("dp", 2))
    add_dtensor_calls(builder, "zero_grad", "zero_grad")
    made = builder.finish()
    assert shares(made) == {"dtensor zero_grad": 1, "dtensor zero_grad parameter": 3}
    assert made.instructions.kind[-2:].tolist() == [HOST, HOST]
