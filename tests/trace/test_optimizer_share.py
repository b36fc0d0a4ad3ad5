"""A trace whose optimizer steps over a share of the parameters."""

from __future__ import annotations

import numpy as np
import pytest

from perfmodel.hardware.profile import find_profile, load_profile
from perfmodel.program.program import single_device_program
from perfmodel.scenario.yaml_file import load_scenario
from perfmodel.simulate.memory.walk import simulate_memory
from perfmodel.trace.optimizer_share import OptimizerShare, with_optimizer
from perfmodel.trace.store import get_trace
from perfmodel.trace.trace import EventKind, StepEvents, Trace
from perfmodel.tracing.optimizer import trace_optimizer
from tests.places import ROOT


def launched(trace: Trace, events: StepEvents) -> list[tuple[str, str]]:
    """Operators by phase, as text."""
    return [
        (segment.phase, str(trace.operations[events.a[at]]))
        for segment in events.segments
        for at in range(segment.start, segment.stop)
        if events.kind[at] == EventKind.OP
    ]


@pytest.mark.parametrize("implementation", ["foreach", "fused", "for-loop"])
def test_a_share_of_all_is_the_trace_itself(implementation: str) -> None:
    scenario = load_scenario(ROOT / "scenarios" / "tiny-cpu.yaml", [f"optimizer.implementation={implementation}"])
    trace = get_trace(scenario)
    parameters = trace.parameters
    share = trace_optimizer(scenario, [parameter.tensor for parameter in parameters])
    whole = with_optimizer(trace, share, range(len(parameters)))
    profile = load_profile(find_profile("h200-sxm-x4"))
    for name in ("first", "steady"):
        ours, theirs = getattr(whole, name), getattr(trace, name)
        assert launched(whole, ours) == launched(trace, theirs)
        assert ours.segments == theirs.segments
        assert np.array_equal(ours.touch_bytes, theirs.touch_bytes)
        assert np.array_equal(ours.touch_offsets, theirs.touch_offsets)
    before, after = (simulate_memory(single_device_program(each), profile) for each in (trace, whole))
    assert np.array_equal(before.allocated_bytes, after.allocated_bytes)
    assert np.array_equal(before.kind_bytes, after.kind_bytes)
    assert before.steady == after.steady


def test_half_the_parameters_have_half_the_states() -> None:
    scenario = load_scenario(ROOT / "scenarios" / "tiny-cpu.yaml")
    trace = get_trace(scenario)
    owners = range(0, len(trace.parameters), 2)
    tensors = [trace.parameters[index].tensor for index in owners]
    half = with_optimizer(trace, trace_optimizer(scenario, tensors), list(owners))
    assert [parameter.tensor for parameter in half.optimized or ()] == tensors
    profile = load_profile(find_profile("h200-sxm-x4"))
    whole_bytes, half_bytes = (
        simulate_memory(single_device_program(each), profile).steady.allocated_before_bytes for each in (trace, half)
    )
    rounded = sum(2 * -(-trace.parameters[i].tensor.bytes // 512) * 512 for i in range(1, len(trace.parameters), 2))
    assert whole_bytes - half_bytes == rounded


@pytest.mark.parametrize("are_dtensors", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "amp-fp16"])
def test_clipping_of_parts_takes_the_place_of_that_of_all(are_dtensors: bool, precision: str) -> None:
    """Segments stay one behind the other, and only those two have other operators."""
    changed = ["optimizer.max_grad_norm=1.0", f"precision={precision}"]
    scenario = load_scenario(ROOT / "scenarios" / "tiny-cpu.yaml", changed)
    trace = get_trace(scenario)
    tensors = [parameter.tensor for parameter in trace.parameters[::2]]
    clipped = OptimizerShare(are_dtensors, absent=3 if are_dtensors else 0, are_scaled=precision == "amp-fp16")
    made = with_optimizer(trace, trace_optimizer(scenario, tensors, clipped), [None] * len(tensors))
    for before, after in ((trace.first, made.first), (trace.steady, made.steady)):
        assert [segment.phase for segment in after.segments] == [segment.phase for segment in before.segments]
        assert [segment.start for segment in after.segments[1:]] == [segment.stop for segment in after.segments[:-1]]
        assert after.segments[-1].stop == len(after.kind)
        kept = [
            [row for row in launched(*of) if row[0] not in ("clip", "optimizer")]
            for of in ((trace, before), (made, after))
        ]
        assert kept[0] == kept[1]
        (stack,) = (
            made.operations[a]
            for kind, a in zip(after.kind, after.a, strict=True)
            if kind == EventKind.OP and made.operations[a].name == "aten.stack.default"
        )
        assert len(stack.input_tensors()) == len(tensors) + clipped.absent
