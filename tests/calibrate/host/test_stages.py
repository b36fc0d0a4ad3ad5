"""Parts of pipelines alone: what is built of a workload, halves of a backward, and which host keys are measured."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from calibrate.host import costs, modules, optimizers
from calibrate.host.stages import StageStep, backward_input, build_stage, layers_around, stage_inputs, time_halves
from calibrate.opening import wanted_of
from perfmodel.cost.host import host_costs
from perfmodel.hardware.profile import Device, HostRecord, Profile
from perfmodel.program.program import single_device_program
from perfmodel.program.ranks import rank_programs
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.store import get_stage_trace
from perfmodel.trace.trace import Trace

US = 1e-6
KNOWN = {"reference": HostRecord(time_s=1e-3)}
ENGINE = {"node": HostRecord(time_s=US)}


@pytest.fixture(autouse=True)
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (modules, optimizers):
        monkeypatch.setattr(module, "ROUNDS", 1)
        monkeypatch.setattr(module, "WARM_UP", 0)
    monkeypatch.setattr(optimizers, "MOST_LAYERS", 1)


def pipeline(
    family: str = "gpt", precision: str = "fp32", training: dict[str, Any] | None = None, **pp: Any
) -> Scenario:
    model = {"family": family, "layers": 4, "width": 16, "heads": 2, "ffn_width": 32, "vocabulary": 32}
    return Scenario.model_validate(
        {
            "name": "cut",
            "model": model,
            "precision": precision,
            "training": training or {},
            "batch": {"size": 8, "sequence_length": 8},
            "parallelism": {"pp": {"stages": 2, "micro_batches": 4} | pp},
            "hardware": {"profile": "any", "gpus": 2},
        }
    )


@pytest.mark.parametrize(
    ("part", "checkpointing", "most", "expected"),
    [
        ({"blocks": [0, 5], "is_first": True, "is_last": False}, "none", None, (5, 1)),
        ({"blocks": [0, 5], "is_first": False, "is_last": False}, "full", 2, (1, 2, 1)),
        ({"blocks": [0, 5], "is_first": False, "is_last": True}, {"every": 3}, None, (3, 5)),
        ({"blocks": [2, 5], "is_first": False, "is_last": True}, {"every": 3}, 9, (2, 5)),
    ],
)
def test_what_is_around_a_part_makes_it_that_part(
    part: dict[str, Any], checkpointing: Any, most: int | None, expected: tuple[int, ...]
) -> None:
    """The first block's place among those of which every third is checkpointed stays."""
    assert layers_around(part, checkpointing, most) == expected


@pytest.mark.parametrize("number", [0, 1])
def test_the_part_that_is_built_is_the_one_that_was_traced(number: int) -> None:
    trace = get_stage_trace(pipeline("llama", "bf16", {"activation_checkpointing": {"every": 2}}), number)
    scenario = modules._built_scenario(trace, "bf16", "cpu", own_batch=True)
    part = build_stage(scenario, is_first=number == 0)
    assert {name: tuple(each.shape) for name, each in part.named_parameters()} == {
        each.name: each.tensor.shape for each in trace.parameters
    }
    assert [name for name, _ in part.named_modules()] == [name for name, _ in trace.modules]
    inputs = stage_inputs(part, scenario, "cpu")
    assert (set(inputs), inputs["x"].shape[0]) == ({"x"} | ({"labels"} if number else set()), 2)
    assert (inputs["x"].dtype, inputs["x"].requires_grad) == (
        (torch.bfloat16, True) if number else (torch.int64, False)
    )


def test_a_large_part_is_built_with_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = get_stage_trace(pipeline(), 1)
    monkeypatch.setattr(modules, "MODEL_BYTES", {"cpu": 10})
    monkeypatch.setattr(modules, "FEW_LAYERS", 1)
    scenario = modules._built_scenario(trace, "fp32", "cpu", own_batch=False)
    assert scenario.parallelism.pp is not None
    assert (scenario.parallelism.pp.layers, scenario.model.layers) == ((1, 1), 2)


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def test_two_halves_are_one_backward() -> None:
    torch.manual_seed(0)
    part = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    again = copy.deepcopy(part)
    x = torch.randn(3, 4, requires_grad=True)
    roots = [part(x).view(12)]  # a view cannot lose its history in place
    seconds = time_halves(roots, list(part.parameters()), "cpu")
    again(x).view(12).backward(torch.ones(12))
    assert len(gradients(part)) == 4
    assert all(map(torch.equal, gradients(part), gradients(again)))
    assert (list(seconds), min(seconds.values()) > 0, roots) == (["backward_input", "backward_weight"], True, [])


def test_a_module_that_only_hands_out_its_output_has_no_weights_beneath() -> None:
    leaf = nn.Parameter(torch.ones(2))
    assert backward_input([leaf], [torch.full((2,), 3.0)], [leaf], []) == []
    assert leaf.grad is not None
    assert (leaf.grad.tolist(), leaf.requires_grad) == ([3.0, 3.0], True)


@pytest.mark.parametrize(("number", "halves"), [(0, False), (1, False), (1, True)])
def test_a_step_of_a_part_computes_what_its_stage_does_of_two_micro_batches(number: int, halves: bool) -> None:
    scenario = modules._built_scenario(get_stage_trace(pipeline(), number), "fp32", "cpu", own_batch=False)
    part = build_stage(scenario, is_first=number == 0)
    again = copy.deepcopy(part)
    inputs = stage_inputs(part, scenario, "cpu")
    optimizer = torch.optim.SGD(part.parameters(), lr=0.0)
    phases: list[str] = []
    StageStep(part, inputs, optimizer, scenario, halves).run(lambda phase, _: phases.append(phase))
    backward = ["backward_input", "backward_weight"] if halves else ["backward"]
    assert phases == ["zero_grad", *2 * ["forward", *backward], "optimizer", "end"]
    output = again(inputs["x"])
    if number:
        nn.functional.cross_entropy(output.flatten(0, 1), inputs["labels"].flatten()).backward()
    else:
        output.backward(torch.ones_like(output))
    assert len(gradients(part)) == len(list(part.parameters()))
    assert all(torch.allclose(a, 2 * b) for a, b in zip(gradients(part), gradients(again), strict=True))


def measured(trace: Trace, precision: str = "fp32") -> dict[str, HostRecord]:
    return costs.measure_host_keys(trace, precision, "cpu", KNOWN)


@pytest.mark.parametrize(
    ("number", "split", "directions"),
    [
        (0, False, {"backward"}),
        (1, False, {"backward"}),
        (0, True, {"backward"}),  # all of it where others compute the weights'
        (1, True, {"backward_input", "backward_weight"}),
    ],
)
def test_every_module_of_a_part_is_measured_in_the_directions_that_it_runs(
    number: int, split: bool, directions: set[str]
) -> None:
    trace = get_stage_trace(pipeline(), number, split)
    found = measured(trace)
    assert costs.measure_host_keys(trace, "fp32", "cpu", KNOWN | found) == {}
    words = [key.split() for key in found]
    classes = {("forward-own", "_Gpt"), ("forward-own", "step"), ("forward", "Block")}
    classes |= {("forward", each) for each in (("Linear", "RMSNorm") if number else ("Embedding",))}
    assert {tuple(each[:2]) for each in words if each[0].startswith("forward")} == classes
    backwards = {(kind.replace("forward", way), name) for kind, name in classes for way in directions}
    assert {tuple(each[:2]) for each in words if each[0].startswith("backward")} == backwards
    later = {each[0].removesuffix("-own") for each in words if each[-1] == "accumulate"}
    assert later == directions - {"backward_input"}
    assert {each[0] for each in words} >= {"zero_grad", "scale", "optimizer"}


def test_what_was_measured_is_what_a_part_costs() -> None:
    """Of each phase the sum over modules: two blocks, the norm, the head, the part's own and the step's."""
    trace = get_stage_trace(pipeline(), 1, split=True)
    records = {key: HostRecord(time_s=US) for key in measured(trace)}
    for direction, us in (("backward_input", 10), ("backward_weight", 100)):
        for end in ("", " accumulate"):
            keys = [key for key in records if key.startswith(f"{direction} Block") and key.endswith(end)]
            records |= {key: HostRecord(time_s=us * US) for key in keys}
    profile = Profile(name="p", device=Device(kind="cuda", name="gpu", memory_bytes=1), host=records | ENGINE)
    program = single_device_program(trace)
    seconds = host_costs(program, profile, "fp32")
    totals = [float(seconds[program.instructions.run == index].sum() / US) for index in range(len(program.runs))]
    found = {(run.phase, run.micro_batch): value for run, value in zip(program.runs, totals, strict=True)}
    for micro_batch in (0, 1):
        assert found["forward", micro_batch] == pytest.approx(6)
        assert found["backward_input", micro_batch] == pytest.approx(2 * 10 + 4)
        assert found["backward_weight", micro_batch] == pytest.approx(2 * 100 + 4)
    assert [found[phase, -1] for phase in ("zero_grad", "scale", "optimizer")] == pytest.approx([1, 1, 1])


@pytest.mark.parametrize("precision", ["fp32", "amp-bf16"])
def test_ranks_of_several_parts_find_all_that_was_measured(precision: str) -> None:
    """Loops over the parameters of all parts: a share of zero_grad and scale is each part's."""
    scenario = pipeline(precision=precision, schedule="zbv-zero-bubble", virtual_stages=2)
    wanted = wanted_of(scenario, False)
    assert len(wanted.traces) == 3  # the two in the middle are alike
    known = dict(KNOWN)
    for trace in wanted.traces:
        known |= costs.measure_host_keys(trace, precision, "cpu", known)
    for trace in wanted.ranks:
        found = costs.measure_host_lists(trace, "cpu", known)
        assert sorted(key.rsplit(" ", 2)[0] for key in found) == ["optimizer adamw foreach", "scale", "zero_grad"]
        known |= found
    flat = {key: HostRecord(time_s=US) for key in known} | ENGINE
    profile = Profile(name="p", device=Device(kind="cuda", name="gpu", memory_bytes=1), host=flat)
    for each in rank_programs(scenario):
        program = each.program
        seconds = host_costs(program, profile, precision) / US
        of_run = [float(seconds[program.instructions.run == index].sum()) for index in range(len(program.runs))]
        for phase in ("zero_grad", "scale", "optimizer"):
            assert sum(us for run, us in zip(program.runs, of_run, strict=True) if run.phase == phase) == pytest.approx(
                1
            ), phase
