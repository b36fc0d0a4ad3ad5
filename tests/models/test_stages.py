"""Parts one after another against the whole module: logits bit for bit, names, counts, losses."""

import pytest
import torch

from perfmodel.models.build import build_module, make_inputs
from perfmodel.models.stages import cut, loss_of
from perfmodel.scenario.families import CUT_FAMILIES, FAMILIES
from perfmodel.scenario.parameter_counts import ParameterCounts
from perfmodel.scenario.scenario import Scenario
from perfmodel.scenario.stage_split import parameter_counts

SMALL = {"layers": 5, "width": 16, "heads": 2, "ffn_width": 32, "vocabulary": 50}
NO_DROPOUT = {"gpt": {}, "gpt2": {"dropout": 0.0}, "llama": {"kv_heads": 1}, "bert": {"dropout": 0.0}}
TIED = {"gpt2": "lm_head.weight", "bert": "cls.predictions.decoder.weight"}


def asked(family, precision="fp32", model=None, training=None, **pipeline):
    return Scenario.model_validate(
        {
            "model": {"family": family, **SMALL, **NO_DROPOUT[family], **(model or {})},
            "batch": {"size": 4, "sequence_length": 8},
            "precision": precision,
            "training": training or {},
            "parallelism": {"pp": {"stages": 3, "micro_batches": 2, **pipeline}},
            "hardware": {"profile": "none"},
        }
    )


def made(scenario):
    """The module, its inputs, and its logits and loss under the scenario's precision."""
    torch.manual_seed(0)
    module = build_module(scenario)
    inputs = make_inputs(scenario, "cpu", torch.Generator().manual_seed(0))
    tokens = {"input_ids": inputs["input_ids"]}
    with torch.autocast("cpu", torch.bfloat16, enabled=scenario.precision == "amp-bf16"):
        output = module(**(tokens if scenario.model.family == "gpt" else inputs))
    return module, inputs, output


def composed(parts, tokens):
    """What each part gives."""
    found = [tokens]
    for part in parts:
        found.append(part(found[-1]))
    return found[1:]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp-bf16"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", NO_DROPOUT)
def test_parts_one_after_another_are_the_whole_module(family, attention, precision):
    scenario = asked(family, precision, {"attention": attention})
    module, inputs, output = made(scenario)
    *hidden, logits = composed(cut(module, scenario), inputs["input_ids"])
    assert torch.equal(logits, getattr(output, "logits", output))
    expected = torch.bfloat16 if precision == "bf16" else torch.float32
    assert [(each.shape, each.dtype) for each in hidden] == [((4, 8, 16), expected)] * 2
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp-bf16"):
        loss = loss_of(scenario)(logits, inputs["labels"])
        own = (
            torch.nn.functional.cross_entropy(output.flatten(0, 1), inputs["labels"].flatten())
            if family == "gpt"
            else 0
        )
    assert torch.equal(loss, own if family == "gpt" else output.loss)


@pytest.mark.parametrize("family", NO_DROPOUT)
def test_parameters_keep_names_and_only_a_shared_matrix_comes_twice(family):
    scenario = asked(family, layers=[2, 1, 2])
    module, _, _ = made(scenario)
    whole = {name: parameter.detach().clone() for name, parameter in module.named_parameters(remove_duplicate=False)}
    listed = [name for name, _ in module.named_parameters()]
    named = [each for part in cut(module, scenario) for each in part.named_parameters()]
    names = [name for name, _ in named]
    assert len(set(names)) == len(names)
    assert [name for name in names if name in listed] == listed
    assert set(names) - set(listed) == ({TIED[family]} if family in TIED else set())
    assert all(torch.equal(parameter, whole[name]) for name, parameter in named)
    assert len({parameter.data_ptr() for _, parameter in named}) == len(named)


def test_every_part_has_its_blocks():
    scenario = asked("llama", layers=[2, 1, 2])
    parts = cut(made(scenario)[0], scenario)
    blocks = [{name.split(".")[2] for name, _ in part.named_parameters() if ".layers." in name} for part in parts]
    assert blocks == [{"0", "1"}, {"2"}, {"3", "4"}]


MORE_POSITIONS = 5000  # than any family has by default
SIZES = [(family, size) for family in CUT_FAMILIES for size in (None, *FAMILIES[family].sizes)]


@pytest.mark.parametrize("length", [8, MORE_POSITIONS])
@pytest.mark.parametrize(("family", "size"), SIZES)
def test_parameters_counted_in_closed_form_are_those_of_the_modules(family, size, length):
    model = {**SMALL, **NO_DROPOUT[family]} if size is None else {"size": size}
    scenario = Scenario.model_validate(
        {
            "model": {"family": family, **model, "layers": 3},
            "batch": {"size": 4, "sequence_length": length},
            "parallelism": {"pp": {"stages": 3, "micro_batches": 2}},
            "hardware": {"profile": "none"},
        }
    )
    with torch.device("meta"):
        stages = cut(build_module(scenario), scenario)
    first, block, last = [sum(each.numel() for each in stage.parameters()) for stage in stages]
    assert parameter_counts(scenario) == ParameterCounts(embeddings=first - block, block=block, head=last - block)


def test_parts_can_be_made_without_data():
    scenario = asked("bert")
    with torch.device("meta"):
        parts = cut(build_module(scenario), scenario)
    assert all(parameter.is_meta for part in parts for parameter in part.parameters())


def test_checkpointed_blocks_stay_so():
    scenario = asked("gpt", training={"activation_checkpointing": "full"})
    module, inputs, output = made(scenario)
    parts = cut(module, scenario)
    calls = []
    parts[1].get_submodule("layers.1.ffn").register_forward_pre_hook(lambda *_: calls.append(1))
    logits = composed(parts, inputs["input_ids"])[-1]
    logits.sum().backward()
    assert torch.equal(logits, output)
    assert len(calls) == 2
