"""Models of the user's own: imported only when allowed, inputs and losses as asked for, errors in one sentence."""

import re
import sys

import pytest
import torch

from perfmodel.errors import PerfModelError
from perfmodel.models.step import TrainingStep, build_module, make_inputs, make_optimizer
from perfmodel.scenario.scenario import Scenario

SOURCE = """
import torch
from types import SimpleNamespace

class Classifier(torch.nn.Module):
    def __init__(self, width=4, classes=3):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(2))
        self.head = torch.nn.Linear(width, classes)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

class WithLoss(Classifier):
    def forward(self, x, labels):
        return SimpleNamespace(loss=super().forward(x).sum() + 0 * labels.sum())

def summed(module, inputs):
    return module(inputs["x"]).sum()

def number(**arguments):
    return 3

constant = 5
"""

INPUTS = {
    "x": {"shape": ["batch", "sequence", 4], "dtype": "float32"},
    "labels": {"shape": ["batch", "sequence"], "dtype": "int64", "high": 3},
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "own_model.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("own_model", None)


def scenario(target, **keys):
    model = {"target": target, "inputs": INPUTS, **keys}
    return Scenario(model=model, batch={"size": 2, "sequence_length": 5}, hardware={"profile": "none"})


@pytest.mark.parametrize(
    ("target", "loss"),
    [
        ("own_model:Classifier", "cross_entropy"),
        ("own_model:WithLoss", "output.loss"),
        ("own_model:Classifier", "own_model:summed"),
    ],
)
def test_a_step_with_each_kind_of_loss_gives_gradients(package, target, loss):
    asked = scenario(target, loss=loss, arguments={"classes": 3})
    module = build_module(asked, allow_import=True)
    optimizer = make_optimizer(module.parameters(), asked)
    TrainingStep(module, make_inputs(asked, "cpu"), optimizer, asked, allow_import=True).run()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_inputs_have_the_shapes_and_ranges_asked_for():
    inputs = make_inputs(scenario("own_model:Classifier"), "cpu", torch.Generator().manual_seed(1))
    assert {name: (tuple(t.shape), t.dtype) for name, t in inputs.items()} == {
        "x": ((2, 5, 4), torch.float32),
        "labels": ((2, 5), torch.int64),
    }
    assert inputs["x"].min() >= 0 and inputs["x"].max() < 1
    assert set(inputs["labels"].flatten().tolist()) <= {0, 1, 2}


def test_blocks_of_a_target_can_be_checkpointed(package):
    data = scenario("own_model:Classifier", loss="cross_entropy", blocks="blocks").model_dump(exclude_unset=True)
    asked = Scenario.model_validate(data | {"training": {"activation_checkpointing": "full"}})
    module = build_module(asked, allow_import=True)
    assert [block.forward.func.__name__ for block in module.blocks] == ["checkpoint", "checkpoint"]


@pytest.mark.parametrize(
    ("target", "arguments", "allow", "sentence"),
    [
        ("own_model:Classifier", {}, False, "own_model:Classifier runs code of your own, which must be allowed"),
        ("own_model.Classifier", {}, True, "must read package.module:callable (got 'own_model.Classifier')"),
        ("no_such_module:f", {}, True, "no_such_module must import (got ModuleNotFoundError"),
        ("own_model:Clasifier", {}, True, "must define Clasifier (it does not). Did you mean 'Classifier'?"),
        ("own_model:constant", {}, True, "own_model:constant must be callable (got int)"),
        ("own_model:number", {}, True, "must return an nn.Module (got int)"),
        ("own_model:Classifier", {"depth": 2}, True, "must build with model.arguments depth=2 (got TypeError"),
        ("own_model:Classifier", {"depth": 2}, True, "It takes width=4, classes=3."),
    ],
)
def test_refusals(package, target, arguments, allow, sentence):
    with pytest.raises(PerfModelError, match=re.escape(sentence)):
        build_module(scenario(target, arguments=arguments), allow_import=allow)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"shape": ["batch"], "dtype": "int46", "high": 3},
            "must be a torch dtype (got 'int46'). Did you mean 'int64'?",
        ),
        ({"shape": ["batch"], "dtype": "int64"}, "model.inputs.x.high must be given for dtype int64"),
    ],
)
def test_refused_inputs(given, sentence):
    with pytest.raises(PerfModelError, match=re.escape(sentence)):
        make_inputs(scenario("own_model:Classifier", inputs={"x": given}), "cpu")
