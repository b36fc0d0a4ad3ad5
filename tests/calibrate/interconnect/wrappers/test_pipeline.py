"""What torch's stage adds to what its module computes. No test asserts more of a time than its sign."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from calibrate.host.reference import HostReference
from calibrate.interconnect.wrappers import pipeline
from calibrate.interconnect.wrappers.pipeline import PAIRS, StageBench, added, pipeline_records

NAMES = ("forward", "backward", "backward_input", "backward_weight")


def test_all_actions_are_measured() -> None:
    found = pipeline_records("cpu", HostReference("cpu"))
    assert set(found) == {f"pp {name}" for name in NAMES}
    assert all(record.time_s >= 0 and record.samples == PAIRS for record in found.values())


class Still:
    """A host of one speed."""

    def beat(self) -> None:
        """Nothing runs."""

    def disturb(self, layers: int) -> None:
        """Nothing runs."""

    def note(self, samples_s: list[float], seconds: float) -> None:
        samples_s.append(seconds)


@pytest.mark.parametrize(("own_s", "expected_s"), [(3e-6, 4e-6), (9e-6, 0.0)])
def test_what_the_module_computes_is_taken_off(own_s: float, expected_s: float) -> None:
    def stopwatch(action: Callable[[], Any]) -> tuple[float, Any]:
        is_whole = isinstance(action, partial)
        return (7e-6 if is_whole else own_s), action()

    found = pipeline_records("cpu", Still(), stopwatch)  # type: ignore[arg-type]
    assert [record.time_s for record in found.values()] == pytest.approx([expected_s] * len(NAMES))


def gradients(module: Any) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters()]


def test_stage_and_module_compute_the_same() -> None:
    bench = StageBench("cpu")
    bench.module.load_state_dict(bench.stage.submod.state_dict())
    bench.gradient = bench.stage.grad_recv_info[0][0].buffer
    x = bench.stage.args_recv_info[0][0].buffer
    bench.stage.args_recv_info[1][0].buffer.data.copy_(x)
    bench.stage.grad_recv_info[1][0].buffer.copy_(bench.gradient)
    for pairs in (bench.whole_backward, bench.split_backward):
        for pair in pairs(x.detach().requires_grad_()):
            pair.whole()
            pair.own()
        assert len(gradients(bench.module)) == pipeline.LAYERS
        for own, staged in zip(gradients(bench.module), gradients(bench.stage.submod), strict=True):
            assert torch.equal(own, staged)


def test_added_is_the_middle_of_the_differences() -> None:
    """Not the difference of the middles: the host's speed wanders from pair to pair."""
    record = added([3.0, 9.0, 5.0], [2.0, 5.0, 4.5])
    assert record.time_s == 1.0
    assert record.samples == 3
