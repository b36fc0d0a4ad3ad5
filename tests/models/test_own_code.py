"""Models of the user's own that fail: one sentence with module, input and the user's own frames, whatever they raise."""

import io
import os
import subprocess
import sys
import textwrap
from contextlib import redirect_stdout

import pytest
import torch

from perfmodel.errors import PerfModelError, Terminated
from perfmodel.models.own_code import importing_from, out_of_memory_passes, own_code
from perfmodel.models.target import load_callable
from perfmodel.scenario.scenario import Scenario
from perfmodel.scenario.yaml_file import load_scenario
from perfmodel.trace.store import get_trace
from perfmodel.tracing.step import trace_step
from tests.places import ROOT

SOURCE = """
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width))
    def forward(self, x):
        return self.change(self.inner(x))
    def change(self, y):
        return y

class Narrow(Net):
    def forward(self, x):
        return self.inner(x[:, :3])

class Reads(Net):
    def change(self, y):
        return y * 2 if y.sum().item() > 0 else y

class Numpy(Net):
    def change(self, y):
        return y + torch.from_numpy(y.detach().cpu().numpy())

class Selects(Net):
    def change(self, y):
        return y[y[:, 0] > 0]

class Raises(Net):
    def change(self, y):
        raise ValueError("wrong\\nweather")

class Exits(Net):
    def change(self, y):
        sys.exit(3)

class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no text")

class RaisesSilent(Net):
    def change(self, y):
        raise Silent()

class Ends(BaseException):
    pass

class RaisesEnds(Net):
    def change(self, y):
        raise Ends("the end")

class BuildsEnds(Net):
    def __init__(self):
        raise Ends("the end")

class Full(Net):
    def change(self, y):
        raise torch.OutOfMemoryError("full")

class Closes(Net):
    def change(self, y):
        import io
        sys.stdout.close()
        sys.stderr.close()
        io.TextIOWrapper(sys.stdout.buffer).close()
        with sys.stderr:
            return y

class Prints(Net):
    def change(self, y):
        print("hello")
        return y

class Twice(torch.autograd.Function):
    @staticmethod
    def forward(context, y):
        return y * 2
    @staticmethod
    def backward(context, gradient):
        raise ValueError("no way back")

class NoWayBack(Net):
    def change(self, y):
        return Twice.apply(y)

@torch.library.custom_op("perfmodel_tests::unknown", mutates_args=())
def unknown(y: torch.Tensor) -> torch.Tensor:
    return y.clone()

class Unknown(Net):
    def change(self, y):
        return unknown(y.detach()) + y

class Pair(Net):
    def change(self, y):
        return y, y

class Compiled(Net):
    def __init__(self):
        super().__init__()
        self.inner = torch.compile(self.inner, backend="eager")

@torch.compile(backend="eager")
def doubled(y):
    return y * 2

class CallsCompiled(Net):
    def change(self, y):
        return doubled(y)

class Empty(nn.Module):
    def forward(self, x):
        return x

class OnCuda(Net):
    def __init__(self):
        super().__init__()
        self.inner.cuda()

def exits():
    sys.exit(3)

def total(module, inputs):
    return module(inputs["x"]).sum()

def unreduced(module, inputs):
    return module(inputs["x"])

def number(module, inputs):
    return 3

def detached(module, inputs):
    return module(inputs["x"]).sum().detach()

def one_argument(outputs):
    return outputs.sum()
"""
LINES = {line.strip(): number for number, line in enumerate(SOURCE.splitlines(), start=1)}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own_failing.py").write_text(SOURCE)
    yield tmp_path
    sys.modules.pop("own_failing", None)


def scenario(folder, target, loss="own_failing:total", inputs=None, **keys):
    model = {"target": f"own_failing:{target}", "loss": loss, "inputs": inputs or {"x": {"shape": ["batch", 8]}}}
    return Scenario(model=model, batch={"size": 2}, hardware={"profile": "none"}, **keys).found_in(folder)


def refusal(asked):
    with pytest.raises(PerfModelError) as caught:
        trace_step(asked, allow_import=True)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("Narrow", ["forward", "inner.0 (Linear)", "x float32[2, 8]", "[2, 3] X [8, 8]", "in forward"]),
        ("Reads", ["the model (Reads)", "item()", "in change"]),
        ("Numpy", ["the model (Numpy)", "numpy()", "in change"]),
        ("Selects", ["the model (Selects)", "shape depends on data", "in change"]),
        ("Raises", ["the model (Raises)", "ValueError: wrong weather", "in change"]),
        ("Exits", ["the model (Exits)", "SystemExit: 3", "in change"]),
        ("NoWayBack", ["backward", "ValueError: no way back", "in backward"]),
        ("Unknown", ["perfmodel_tests", "register_fake", "in change"]),
        ("Compiled", ["torch.compile", "TORCH_COMPILE_DISABLE", "in forward"]),
        ("CallsCompiled", ["torch.compile", "in change"]),
        ("Empty", ["own_failing:Empty must have parameters"]),
        ("OnCuda", ["without .cuda()", f"own_failing.py:{LINES['self.inner.cuda()']} in __init__"]),
        ("RaisesSilent", ["the model (RaisesSilent)", "got Silent", "in change"]),
        ("RaisesEnds", ["the model (RaisesEnds)", "Ends: the end", "in change"]),
        ("BuildsEnds", ["must build", "Ends: the end", "in __init__"]),
        ("Full", ["the model (Full)", "OutOfMemoryError: full", "in change"]),
        ("exits", ["own_failing:exits must build", "SystemExit: 3", "in exits"]),
    ],
)
def test_what_fails_is_said_with_the_users_frames_alone(folder, target, said):
    text = refusal(scenario(folder, target))
    assert [part for part in said if part not in text] == []
    assert "perfmodel/" not in text and "torch/" not in text


def test_frames_are_named_from_the_innermost_out(folder):
    text = refusal(scenario(folder, "Raises"))
    lines = [LINES['raise ValueError("wrong\\nweather")'], LINES["return self.change(self.inner(x))"]]
    file = folder / "own_failing.py"
    assert f"at {file}:{lines[0]} in change, from {file}:{lines[1]} in forward, from {file}:" in text


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"y": {"shape": ["batch", 8]}}, ["unexpected keyword argument 'y'", "forward does: x."]),
        ({"x": {"shape": ["batch", 7]}}, ["x float32[2, 7]", "inner.0 (Linear)"]),
        ({"x": {"shape": ["batch", 8], "dtype": "int64", "high": 5}}, ["x int64[2, 8]", "float32 and int64"]),
        ({"x": {"shape": ["batch", 10**12, 10**12]}}, ["model.inputs.x.shape", str(10**12)]),
    ],
)
def test_inputs_that_forward_does_not_take(folder, inputs, said):
    text = refusal(scenario(folder, "Net", "output.loss", inputs))
    assert [part for part in said if part not in text] == []


@pytest.mark.parametrize(
    ("target", "loss", "said"),
    [
        ("Net", "output.loss", ["model.loss: output.loss", "own_failing:Net", "float32[2, 8]"]),
        ("Pair", "output.loss", ["model.loss: output.loss", "own_failing:Pair", "got tuple"]),
        ("Net", "cross_entropy", ["model.inputs must have labels", "got x"]),
        ("Net", "own_failing:unreduced", ["must give one number", "float32[2, 8]"]),
        ("Net", "own_failing:number", ["must give one number", "got int"]),
        ("Net", "own_failing:detached", ["must depend on parameters"]),
        (
            "Net",
            "own_failing:one_argument",
            ["own_failing:one_argument must take the module and its inputs", "outputs"],
        ),
    ],
)
def test_losses_that_backward_cannot_begin_with(folder, target, loss, said):
    text = refusal(scenario(folder, target, loss))
    assert [part for part in said if part not in text] == []


def test_cross_entropy_of_a_tuple_is_refused(folder):
    inputs = {"x": {"shape": ["batch", 8]}, "labels": {"shape": ["batch"], "dtype": "int64", "high": 8}}
    text = refusal(scenario(folder, "Pair", "cross_entropy", inputs))
    assert "cross_entropy" in text and "got tuple" in text


@pytest.mark.parametrize("way", ["stance", "TORCH_COMPILE_DISABLE"])
@pytest.mark.parametrize("target", ["CallsCompiled", "Compiled"])
def test_what_torch_runs_eagerly_is_traced_as_eager(folder, way, target):
    off = torch.compiler.set_stance("force_eager") if way == "stance" else torch._dynamo.config.patch(disable=True)
    with off:  # the variable sets that value where torch is imported
        traced = trace_step(scenario(folder, target), allow_import=True)
    eager = trace_step(scenario(folder, "Net"), allow_import=True)
    more = 0 if target == "Compiled" else 1  # the product of CallsCompiled
    assert len(traced.operations) >= len(eager.operations) + more


def test_what_the_model_prints_stays_off_stdout(folder, capsys):
    out = io.StringIO()
    with redirect_stdout(out):
        trace_step(scenario(folder, "Prints"), allow_import=True)
    assert out.getvalue() == ""
    assert "hello" in capsys.readouterr().err


def test_streams_that_the_model_closes_stay_open(folder):
    (folder / "question.yaml").write_text(
        "model: {target: 'own_failing:Closes', loss: 'own_failing:total', inputs: {x: {shape: [batch, 8]}}}\n"
        "batch: {size: 2}\nhardware: {profile: none}\n"
    )
    code = """
        import sys
        from pathlib import Path
        from perfmodel.scenario.yaml_file import load_scenario
        from perfmodel.tracing.step import trace_step
        trace_step(load_scenario(Path("question.yaml")), allow_import=True)
        print("out")
        print("err", file=sys.stderr)
    """
    command, environment = [sys.executable, "-c", textwrap.dedent(code)], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 0)


def test_running_out_of_device_memory_passes_only_where_steps_run_on_the_device():
    with pytest.raises(PerfModelError, match="OutOfMemoryError: full"), own_code(lambda: "", lambda error: ""):
        raise torch.OutOfMemoryError("full")
    with pytest.raises(torch.OutOfMemoryError), out_of_memory_passes(), own_code(lambda: "", lambda error: ""):
        raise torch.OutOfMemoryError("full")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Terminated])
def test_what_ends_the_process_passes(kind):
    with pytest.raises(kind), own_code(lambda: "", lambda error: ""):
        raise kind


def test_a_scenario_finds_the_modules_beside_its_file(folder):
    text = "model: {target: 'own_failing:Net', loss: 'own_failing:total', inputs: {x: {shape: [batch, 8]}}}\n"
    path = folder / "question.yaml"
    path.write_text(text + "batch: {size: 2}\nhardware: {profile: none}\n")
    before = list(sys.path)
    assert get_trace(load_scenario(path), allow_import=True).parameters[0].name == "inner.0.weight"
    assert sys.path == before


def test_modules_of_other_folders_are_told_apart(folder, tmp_path_factory):
    """The same reference in another folder is other code: neither its module nor its trace is taken for the first."""
    get_trace(scenario(folder, "Net"), allow_import=True)
    other = tmp_path_factory.mktemp("other")
    (other / "own_failing.py").write_text(SOURCE)
    with pytest.raises(PerfModelError, match="own_failing must be the one in") as caught:
        get_trace(scenario(other, "Net"), allow_import=True)
    assert str(other) in str(caught.value) and str(folder / "own_failing.py") in str(caught.value)


def test_where_a_module_was_looked_for_is_said(folder):
    with pytest.raises(PerfModelError, match=r"no_such_module must import") as caught:
        load_callable("model.target", "no_such_module:f", True, folder)
    assert f"looked for in {folder}" in str(caught.value)


def test_a_module_that_lacks_another_says_which(folder):
    (folder / "own_lacking.py").write_text("import no_such_package\n")
    with pytest.raises(PerfModelError, match=r"Install no_such_package") as caught:
        load_callable("model.target", "own_lacking:f", True, folder)
    assert "own_lacking.py:1" in str(caught.value)


def test_the_path_is_as_before_even_when_the_import_fails(folder):
    before = list(sys.path)
    with pytest.raises(ZeroDivisionError), importing_from(folder):
        assert sys.path[0] == str(folder)
        raise ZeroDivisionError
    assert sys.path == before


def test_a_loop_over_too_many_operators_is_cut_short(folder, monkeypatch):
    monkeypatch.setattr("perfmodel.tracing.recorder.MOST_TRACED_OPERATORS", 10)
    text = refusal(scenario(folder, "Net"))
    assert "at most 10 operators" in text


def test_models_of_too_many_modules_are_not_traced(folder, monkeypatch):
    monkeypatch.setattr("perfmodel.models.build.MOST_MODULES", 2)
    text = refusal(scenario(folder, "Net"))
    assert "at most 2 modules" in text and "got 3" in text
