"""Traces against live steps on a CUDA device, with the installed torch. Run with -m gpu."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from perfmodel.models.build import build_module, make_inputs, replace_tensors
from perfmodel.models.step import TrainingStep, make_optimizer, precision_switches
from tests.tracing.recordings import comparable, traced_requests
from tests.tracing.variants import VARIANTS, traced_variant, variant

pytestmark = pytest.mark.gpu


def live_step(scenario):
    with torch.device("meta"):
        module = build_module(scenario)
    replace_tensors(module, lambda tensor: torch.zeros_like(tensor, device="cuda"))
    optimizer = make_optimizer(module.parameters(), scenario) if scenario.mode == "train" else None
    return TrainingStep(module, make_inputs(scenario, "cuda"), optimizer, scenario)


class LiveOperators(TorchDispatchMode):
    """Writes operators down as the recordings have them."""

    def __init__(self):
        super().__init__()
        self.ops, self.phase = [], ""

    def mark(self, phase, micro_batch):
        self.phase = phase

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [self._described(value) for value in _flat((args, tuple((kwargs or {}).values())))]
        made = [self._described(value) for value in _flat(result) if isinstance(value, torch.Tensor)]
        self.ops.append({"phase": self.phase, "op": str(func), "in": given, "out": made})
        return result

    @staticmethod
    def _described(value):
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            layout = {"shape": list(value.shape), "stride": list(value.stride())}
            return {**layout, "dtype": dtype, "device": value.device.type}
        return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _flat(value):
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


@pytest.mark.parametrize("name", VARIANTS)
def test_operators_equal_a_live_step(name):
    scenario = variant(name)
    with precision_switches(scenario):
        step, live = live_step(scenario), LiveOperators()
        step.run()
        with live:
            step.run(live.mark)
    mine, theirs = comparable(traced_variant(name), live.ops)
    assert mine == theirs


@pytest.mark.parametrize("name", VARIANTS)
def test_allocations_are_among_those_of_a_live_step(name):
    scenario = variant(name)
    step = live_step(scenario)
    step.run()
    torch.cuda.synchronize()
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, context=None)
    step.run()
    torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    live = Counter(event["size"] for event in events if event["action"] == "alloc")
    mine = Counter(size for action, size in traced_requests(traced_variant(name), "steady") if action == "alloc")
    assert mine - live == Counter()
