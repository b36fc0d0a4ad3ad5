"""gpt: the known parameter counts, and operator for operator what a GPU recorded (float32 differs nowhere from CPU)."""

import gzip
import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from perfmodel.models.families.gpt import GPT, RMSNorm
from perfmodel.models.step import TrainingStep, build_module, make_inputs, make_optimizer
from perfmodel.scenario.scenario import Scenario
from tests.places import TESTS

RECORDED = TESTS / "data" / "cuda_steps" / "gpt-small2-fp32.json.gz"


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.phase = None
        self.calls = []

    def mark(self, phase, micro_batch):
        self.phase = phase

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        output = operator(*arguments, **(keywords or {}))
        if str(operator).startswith("aten."):
            self.calls.append((self.phase, str(operator), shapes(arguments), shapes(output)))
        return output


def shapes(value):
    """Shapes of the tensors in nested lists, whether real tensors or recorded ones."""
    if isinstance(value, torch.Tensor):
        return [list(value.shape)]
    if isinstance(value, dict):
        return [value["shape"]] if "shape" in value else []
    if isinstance(value, (list, tuple)):
        return [shape for part in value for shape in shapes(part)]
    return []


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("small", 100_412_160),
        ("medium", 322_651_136),
        ("large", 733_646_080),
        ("xl", 1_506_920_000),
        ("2.7b", 2_568_276_480),
    ],
)
def test_parameter_counts_are_those_of_the_report(size, count):
    scenario = Scenario(
        model={"family": "gpt", "size": size}, batch={"size": 16, "sequence_length": 128}, hardware={"profile": "none"}
    )
    with torch.device("meta"):
        module = build_module(scenario)
    assert sum(parameter.numel() for parameter in module.parameters()) == count


def test_runs_the_operators_a_gpu_recorded_in_their_order():
    recorded = json.loads(gzip.decompress(RECORDED.read_bytes()))
    scenario = Scenario(
        model={"family": "gpt", "layers": 2, "width": 768, "heads": 12, "ffn_width": 3072},
        batch={"size": 4, "sequence_length": 128},
        hardware={"profile": "none"},
    )
    module = build_module(scenario)
    named = [[name, list(p.shape), str(p.dtype).removeprefix("torch.")] for name, p in module.named_parameters()]
    assert named == recorded["parameters"]

    ready = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    step = TrainingStep(module, make_inputs(scenario, "cpu"), make_optimizer(module.parameters(), scenario), scenario)
    step.run()
    assert ready == recorded["gradient_ready_order"]

    with Recorder() as recorder:
        step.run(recorder.mark)
    expected = [
        (op["phase"], op["op"], shapes(op["in"]), shapes(op["out"]))
        for op in recorded["ops"]
        if op["op"].startswith("aten.")
    ]
    assert recorder.calls == expected


def test_rms_norm_by_hand():
    norm = RMSNorm(2, eps=0.0)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, 2.0]))
    assert norm(torch.tensor([3.0, 4.0])).tolist() == pytest.approx([3 / 12.5**0.5, 8 / 12.5**0.5])


def test_both_attentions_compute_the_same_and_look_only_back():
    torch.manual_seed(0)
    dimensions = {"layers": 1, "width": 16, "heads": 2, "ffn_width": 32, "vocabulary": 11, "context": 6}
    eager, fused = GPT(**dimensions, attention="eager"), GPT(**dimensions, attention="sdpa")
    fused.load_state_dict(eager.state_dict())
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6]])
    torch.testing.assert_close(eager(tokens), fused(tokens))
    changed = eager(torch.tensor([[1, 2, 3, 9, 9, 9]]))
    torch.testing.assert_close(changed[:, :3], eager(tokens)[:, :3])
    assert not torch.allclose(changed[:, 3:], eager(tokens)[:, 3:])
