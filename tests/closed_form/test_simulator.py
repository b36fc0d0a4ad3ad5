"""The closed forms held against the simulator, which walks the instructions that each form of data parallelism issues."""

from __future__ import annotations

import numpy as np
import pytest

from perfmodel.closed_form.formulas import lambdified
from perfmodel.hardware.profile import Launch
from perfmodel.program.program import Program
from perfmodel.program.strategies.data_parallel import data_parallel_program
from perfmodel.simulate.engine import simulate
from perfmodel.simulate.timed_step import launched_positions, timed_step
from perfmodel.simulate.timeline import Timeline
from perfmodel.trace.trace import Trace
from tests.builders import backward_of, ops, parameters_of, step_events, tiny_scenario, trace_of

PARAMETERS, ELEMENTS = 48, 2**18  # of 1 MiB each
GRADIENT_BYTES = PARAMETERS * 4 * ELEMENTS
BACKWARD_S, HOST_S = 48e-3, 1e-12
FAST = Launch(latency_s=0.0, queue_depth=100)
# algbw and cost a call: the wire far too fast, near the boundary, too slow; cheap calls and dear ones
WIRES = [(1e11, 1e-5), (2e9, 1e-4), (1.2e9, 1e-3), (5e8, 1e-5), (5e8, 2e-3)]


def trace() -> Trace:
    """Forward and optimizer take 10 ms each, and backward 1 ms a parameter, the last parameter first."""
    phases = (
        ("forward", 0, ops(0)),
        ("backward", 0, backward_of(range(PARAMETERS - 1, -1, -1))),
        ("optimizer", -1, ops(2)),
    )
    return trace_of(step_events(*phases), parameters=parameters_of(*[ELEMENTS] * PARAMETERS))


def program(strategy: str, bucket_cap_mb: float | None = None) -> Program:
    section = {"dp": 2, "strategy": strategy, "bucket_cap_mb": bucket_cap_mb}
    asked = tiny_scenario(parallelism=section, hardware={"profile": "any", "gpus": 2})
    return data_parallel_program(asked, trace())


def timeline(made: Program, bandwidth_bytes_per_s: float, call_s: float, memory_bytes_per_s: float | None) -> Timeline:
    """Copies take no time unless a memory bandwidth is given."""
    usual_s = [10e-3, BACKWARD_S / PARAMETERS, 10e-3]
    more = len(made.operations) - len(usual_s)
    copy_s = 0.0 if memory_bytes_per_s is None else 2 * GRADIENT_BYTES / memory_bytes_per_s
    device_s = np.array([*usual_s, *[copy_s] * more])
    launched = (device_s > 0).astype(int)
    operation = made.instructions.a[launched_positions(made, launched)]
    collective_s = np.array([call_s + each.size_bytes / bandwidth_bytes_per_s for each in made.collectives])
    host_s = np.full(len(made.instructions.kind), HOST_S)
    return simulate(made, timed_step(made, device_s[operation], launched, host_s, collective_s), FAST)


def added_s(found: Timeline) -> float:
    return found.step_time_s - 20e-3 - BACKWARD_S


@pytest.mark.parametrize("buckets", [1, 2, 6, 12, 24, 48])
@pytest.mark.parametrize("wire", WIRES)
def test_ddp(wire: tuple[float, float], buckets: int) -> None:
    made = program("ddp", PARAMETERS / buckets)
    found = timeline(made, *wire, None)
    assert len(found.communications) == buckets
    expected_s = lambdified("ddp_exposed_s")(
        gradient_bytes=GRADIENT_BYTES,
        bandwidth_bytes_per_s=wire[0],
        call_s=wire[1],
        backward_s=BACKWARD_S,
        buckets=buckets,
    )
    assert added_s(found) == pytest.approx(expected_s, abs=1e-8)
    assert found.exposed_communication_s == pytest.approx(expected_s, abs=1e-8)


@pytest.mark.parametrize("wire", WIRES)
def test_the_best_bucket_size_is_the_simulator_s(wire: tuple[float, float]) -> None:
    """Of the sizes that divide the gradients evenly, those next to the closed form's best are."""
    best_bytes = lambdified("ddp_best_bucket_bytes")(
        gradient_bytes=GRADIENT_BYTES, bandwidth_bytes_per_s=wire[0], call_s=wire[1], backward_s=BACKWARD_S
    )
    sizes_mb = [size for size in range(1, PARAMETERS + 1) if PARAMETERS % size == 0]
    steps_s = {size: timeline(program("ddp", size), *wire, None).step_time_s for size in sizes_mb}
    below = max([size for size in sizes_mb if size * 2**20 <= best_bytes * (1 + 1e-9)], default=sizes_mb[0])
    above = min(size for size in sizes_mb if size * 2**20 >= best_bytes * (1 - 1e-9))
    assert min(steps_s[below], steps_s[above]) == pytest.approx(min(steps_s.values()), abs=1e-8)


@pytest.mark.parametrize("wire", WIRES)
def test_overlap(wire: tuple[float, float]) -> None:
    expected_s = lambdified("overlap_exposed_s")(
        gradient_bytes=GRADIENT_BYTES,
        bandwidth_bytes_per_s=wire[0],
        call_s=wire[1],
        backward_s=BACKWARD_S,
        parameters=PARAMETERS,
    )
    assert added_s(timeline(program("overlap"), *wire, None)) == pytest.approx(expected_s, abs=1e-8)


@pytest.mark.parametrize("wire", WIRES)
def test_naive_and_flat(wire: tuple[float, float]) -> None:
    after = {"gradient_bytes": GRADIENT_BYTES, "bandwidth_bytes_per_s": wire[0], "call_s": wire[1]}
    naive_s = lambdified("naive_overhead_s")(**after, parameters=PARAMETERS)
    assert added_s(timeline(program("naive"), *wire, None)) == pytest.approx(naive_s, abs=1e-8)
    flat_s = lambdified("flat_overhead_s")(**after, memory_bytes_per_s=1e12)
    assert added_s(timeline(program("flat"), *wire, 1e12)) == pytest.approx(flat_s, abs=1e-8)
