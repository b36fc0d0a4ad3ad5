"""What the host benchmarks make of samples, and what they run. No test asserts a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from calibrate.host import costs, optimizers
from calibrate.host import modules as host_modules
from calibrate.host import records as host_records
from calibrate.host import stubs as host_stubs
from calibrate.host.examples import Tensors, examples
from calibrate.host.records import Case, call_records, node_records
from calibrate.host.reference import HostReference
from calibrate.timing.host_stopwatch import OperatorTimes, Seen, Work, observe
from perfmodel.cost.host import host_costs, list_key
from perfmodel.hardware.profile import Device, HostRecord, Profile
from perfmodel.program.program import single_device_program
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.host_structure import structure_of
from perfmodel.trace.operation import TensorSpec
from perfmodel.trace.trace import Parameter, Trace
from perfmodel.tracing.step import trace_step

US = 1e-6
NO_OPERATORS = OperatorTimes("cuda", None)  # asks for no reference, since it times nothing


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def reference() -> HostReference:
    return HostReference("cpu")


@pytest.fixture
def few_samples(monkeypatch):
    """As little of everything as runs through all code."""
    for module in (costs, host_modules, optimizers):
        monkeypatch.setattr(module, "ROUNDS", 1)
    monkeypatch.setattr(costs, "SWEEPS", 1)
    monkeypatch.setattr(costs, "BACKWARD_ROUNDS", 1)
    monkeypatch.setattr(host_modules, "WARM_UP", 0)
    monkeypatch.setattr(optimizers, "WARM_UP", 0)
    monkeypatch.setattr(optimizers, "MOST_LAYERS", 1)
    monkeypatch.setattr(host_records, "SAMPLES", 2)


def work(*operators: str, views: int = 0) -> Work:
    return Work(list(operators), views, len(operators) + views)


def case(title: str, calls, nodes=(), forward_us: float = 0, backward_us: float = 0) -> Case:
    backward_s = [backward_us * US] * 3 if nodes else []
    return Case(title, [], Seen(calls=list(calls), nodes=list(nodes)), [forward_us * US] * 3, backward_s)


def microseconds(records: dict[str, HostRecord]) -> dict[str, float]:
    return {key: round(record.time_s / US, 3) for key, record in records.items()}


def test_calls_made_on_the_way_are_taken_off() -> None:
    cases = [
        case("view", [("Tensor.view", work(views=1))], forward_us=2),
        case("add", [("Tensor.add", work("add"))], forward_us=5),
        case("both", [("Tensor.view", work(views=1)), ("cat", work("cat"))], forward_us=9),
        case("cast", [("Tensor.to", work("_to_copy"))], forward_us=6),
    ]
    found = microseconds(call_records(cases, ("amp",), NO_OPERATORS))
    calls = {key: value for key, value in found.items() if key.startswith("call ") and "(" in key}
    assert calls == {
        "call Tensor.view() amp": 2,
        "call Tensor.add(add) amp": 5,
        "call cat(cat) amp": 7,
        "call Tensor.to(_to_copy) amp": 6,
    }
    assert list(found)[4:] == ["call amp", "launch amp", "view amp", "cast amp"]


def test_constants_of_calls_are_fitted() -> None:
    """call 1, launch 4, view 2, cast 8: exactly what four examples and a mixture of them say."""
    parts = [((), 1), (("a",), 2), (("_to_copy",), 0), (("a", "b"), 5), (("_to_copy", "a"), 1)]
    cases = [
        case(
            str(i),
            [(f"f{i}", work(*names, views=views))],
            forward_us=1 + 2 * views + sum(8 if "_" in n else 4 for n in names),
        )
        for i, (names, views) in enumerate(parts)
    ]
    found = microseconds(call_records(cases, (), NO_OPERATORS))
    assert {key: found[key] for key in ("call", "launch", "view", "cast")} == {
        "call": 1,
        "launch": 4,
        "view": 2,
        "cast": 8,
    }


def test_nodes_are_told_apart_by_calls_that_share_them(monkeypatch) -> None:
    """Root 3, view 1, accumulation 2, addition 4: every call is a sum of these."""
    monkeypatch.setattr(host_records, "PULL", 1e-6)
    view, grad, add = ("ViewBackward0", work()), ("AccumulateGrad", work()), ("AddBackward0", work())
    shapes = {"view": [view, grad], "views": [view, view, view, grad], "add": [add, grad, grad], "add one": [add, grad]}
    seconds = {"ViewBackward0": 1, "AccumulateGrad": 2, "AddBackward0": 4}
    cases = [
        case(title, [], nodes, backward_us=3 + sum(seconds[name] for name, _ in nodes))
        for title, nodes in shapes.items()
    ]
    found = microseconds(node_records(cases, NO_OPERATORS))
    assert {key: found[f"node {key}()"] for key in seconds} == pytest.approx(seconds, rel=1e-3)
    assert set(found) == {*(f"node {key}()" for key in seconds), "node", "node launch", "node view", "node cast"}


def test_calls_that_took_nothing_but_their_operators_leave_constants_of_zero() -> None:
    """As on a machine too busy for so few samples."""
    cases = [case("view", [("Tensor.view", work(views=1))], [("ViewBackward0", work())], forward_us=0, backward_us=0)]
    assert microseconds(call_records(cases, (), NO_OPERATORS)) == {
        "call Tensor.view()": 0,
        **dict.fromkeys(("call", "launch", "view", "cast"), 0),
    }
    assert set(microseconds(node_records(cases, NO_OPERATORS)).values()) == {0}


def test_every_example_makes_its_call_and_has_a_backward_that_runs() -> None:
    tensors = Tensors("cpu")
    seen = {example.title: observe(example.make(tensors)) for example in examples()}
    assert [title for title, each in seen.items() if not each.calls] == []
    without_backward = [title for title, each in seen.items() if not each.nodes]
    assert without_backward == ["detach", "arange", "ones", "zeros", "full", "triu", "invert", "and", "all", "cumsum"]
    names = {
        title: seen[title].calls[-1][0] for title in ("view", "add", "linear bias", "attention", "layer_norm", "add_")
    }
    assert names == {
        "view": "Tensor.view",
        "add": "Tensor.add",
        "linear bias": "linear",
        "attention": "scaled_dot_product_attention",
        "layer_norm": "layer_norm",
        "add_": "Tensor.add_",
    }


def test_observation_tells_calls_nodes_and_their_operators() -> None:
    x, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    seen = observe(lambda: nn.functional.linear(x, weight), keeps_calls=True)
    assert [(name, each.operators, each.views) for name, each in seen.calls] == [("linear", ["mm"], 3)]
    assert [(name, each.operators) for name, each in seen.nodes] == [
        ("UnsafeViewBackward0", []),
        ("MmBackward0", ["mm", "mm"]),
        ("ViewBackward0", []),
        ("AccumulateGrad", []),
        ("TBackward0", []),
        ("AccumulateGrad", []),
    ]
    assert [func.__name__ for func, _, _ in seen.calls[0][1].calls] == [
        "t.default",
        "view.default",
        "mm.default",
        "_unsafe_view.default",
    ]
    assert seen.launches == 3 + 1  # ones_like, the gradient to start from


def test_operator_times_are_counted_on_a_cpu_only(reference) -> None:
    seen = observe(lambda: torch.ones(8) + 1, keeps_calls=True)
    calls = [call for each in seen.works for call in each.calls]
    assert len(calls) == 2
    assert OperatorTimes("cpu", reference).total(calls) > 0
    assert OperatorTimes("cuda", reference).total(calls) == 0


class Container(nn.Module):
    """Adds to what an inner module made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).add(1.0)


def test_stubs_return_what_was_captured_and_compute_nothing() -> None:
    model = Container()
    x = torch.randn(2, 4)
    captured = host_stubs.capture(model, {"", "inner", "missing"}, lambda: model(x))
    assert sorted(captured) == ["", "inner"]
    expected = model(x)
    with host_stubs.Stubs(model, {"inner": captured["inner"].result}) as stubs:
        other = torch.full_like(x, math.nan)
        seen = observe(lambda: model(other))
        assert [(name, each.operators) for name, each in seen.calls] == [("Tensor.add", ["add"])]
        stubs.renew()
        assert torch.equal(model(other), expected)
    assert torch.equal(model(x), expected)
    assert "forward" not in vars(model.inner)


def test_captured_tensors_keep_only_that_they_want_a_gradient() -> None:
    given = ({"x": torch.ones(2, requires_grad=True) * 2, "mask": torch.ones(2)}, 3)
    values, number = host_stubs.fresh(host_stubs.cut(given))
    assert number == 3
    assert values["x"].grad_fn.name() == "CloneBackward0"
    assert values["mask"] is given[0]["mask"] or not values["mask"].requires_grad
    values["x"].add_(1)  # no leaf
    assert given[0]["x"].tolist() == [2, 2]


def test_equal_modules_are_chained() -> None:
    parts = [nn.Linear(3, 3, bias=False) for _ in range(2)]
    x = torch.randn(1, 3)
    given = [((x,), {}), ((torch.zeros(1, 3),), {})]
    captured = host_stubs.Captured(((x,), {}), parts[0](x))
    assert host_stubs.is_chainable(captured)
    before: list[str] = []
    chain = host_stubs.chained(parts, given, lambda: before.append("chained"))
    row = host_stubs.separate(parts, given, lambda: before.append("separate"))
    assert torch.equal(chain()[0], parts[1](parts[0](x)))
    assert [y.tolist() for y in row()] == [parts[0](x).tolist(), [[0, 0, 0]]]
    assert before == ["chained", "chained", "separate", "separate"]


def test_the_first_units_of_a_row_are_cold(monkeypatch, reference) -> None:
    """Seconds 9 7 5 3 of the cold ones and 1 1 1 of the others: 1 each, and 8 + 6 + 4 + 2 more for all together."""
    began_s = [0.0, 9.0, 16.0, 21.0, 24.0, 25.0, 26.0]
    monkeypatch.setattr(host_modules.time, "perf_counter", lambda: 27.0)
    monkeypatch.setattr(reference, "beat", lambda: None)
    noted: list[float] = []
    monkeypatch.setattr(reference, "note", lambda samples_s, seconds: noted.append(seconds))
    bench = host_modules.ModuleBench(trace_step(tiny()), tiny(), "cpu", NO_OPERATORS, reference, False, own_batch=False)
    monkeypatch.setattr(bench, "_prepare", lambda direction: None)
    assert bench._time_forward(lambda: ["result"], host_modules._Samples(), began_s) == ["result"]
    assert noted == [1.0, 20.0]


@pytest.mark.parametrize("result", [torch.zeros(1, 4), torch.zeros(1, 3, dtype=torch.int64), None, ()])
def test_modules_that_change_shape_are_not(result) -> None:
    assert not host_stubs.is_chainable(host_stubs.Captured(((torch.zeros(1, 3),), {}), result))


def test_leaves_that_are_no_parameters_are_borrowed() -> None:
    part, x = nn.Linear(3, 3), torch.randn(1, 3, requires_grad=True)
    assert [leaf is x for leaf in host_stubs.borrowed_leaves([part(x.clone())])] == [True]
    assert host_stubs.borrowed_leaves([part(torch.randn(1, 3))]) == []


def test_loops_over_parameters_are_lines(monkeypatch) -> None:
    bench = optimizers.LoopBench("cpu", NO_OPERATORS, None, 1)
    monkeypatch.setattr(bench, "time", lambda prefix, shapes: ([(7 + 2 * len(shapes)) * US] * 3, 1 * US))
    found = microseconds(optimizers._measure_line("clip", bench))
    assert found == {"clip": pytest.approx(6), "clip parameter": pytest.approx(2)}


@pytest.mark.parametrize("prefix", ["zero_grad", "clip", "scaler", *optimizers.IMPLEMENTATIONS])
def test_every_loop_runs_on_parameters_with_gradients(prefix: str, few_samples, reference) -> None:
    bench = optimizers.LoopBench("cpu", OperatorTimes("cpu", reference), reference, 1)
    values_s, operators_s = bench.time(prefix, [((3,), torch.float32)] * 2)
    assert len(values_s) == 1
    assert values_s[0] > 0
    assert operators_s >= 0


def tiny(**more) -> Scenario:
    model = {"family": "gpt", "layers": 2, "width": 16, "heads": 2, "ffn_width": 32, "vocabulary": 32}
    fields = {"model": model, "batch": {"size": 1, "sequence_length": 8}, "hardware": {"profile": "any"}}
    return Scenario.model_validate(fields | more)


def classes_of(records: dict[str, HostRecord]) -> list[str]:
    """Keys without digests."""
    return sorted(
        " ".join(word for word in key.split() if not (len(word) == 8 and set(word) <= set("0123456789abcdef")))
        for key in records
    )


def measured(trace: Trace) -> dict[str, HostRecord]:
    return costs.measure_host_keys(
        trace, str(trace.workload["precision"]), "cpu", {"reference": HostRecord(time_s=1e-3)}
    )


def test_a_trace_s_modules_and_loops_are_measured_once(few_samples) -> None:
    scenario = tiny(optimizer={"max_grad_norm": 1.0}, training={"gradient_accumulation": 2}, precision="amp-bf16")
    trace = trace_step(scenario)
    records = measured(trace)
    modules = ("Block amp", "Embedding amp", "Linear amp", "RMSNorm amp")
    directions = [(f"{direction} {module}") for module in modules for direction in ("forward", "backward")]
    own = [f"{direction}-own {part}" for part in ("GPT amp", "step amp") for direction in ("forward", "backward")]
    later = [f"{key} accumulate" for key in (*directions, *own) if key.startswith("backward")]
    count = len(trace.parameters)
    loops = [f"{prefix} {count}" for prefix in ("zero_grad", "clip", "optimizer adamw foreach")]
    assert classes_of(records) == sorted([*directions, *own, *later, *loops])
    assert all(math.isfinite(record.time_s) for record in records.values())
    again = costs.measure_host_keys(trace, str(trace.workload["precision"]), "cpu", {})
    assert again.keys() == records.keys() | {"reference"}
    assert costs.measure_host_keys(trace, str(trace.workload["precision"]), "cpu", again) == {}


def test_what_was_measured_is_what_the_step_costs(few_samples) -> None:
    """The sum over instructions is the sum over modules, twice the block's for two blocks."""
    trace = trace_step(tiny())
    records = {key: HostRecord(time_s=US) for key in measured(trace)}
    blocks = next(key for key in records if key.startswith("forward Block"))
    records[blocks] = HostRecord(time_s=100 * US)
    profile = Profile(
        name="test",
        device=Device(kind="cuda", name="gpu", memory_bytes=1),
        host=records | {"node": HostRecord(time_s=US)},
    )
    program = single_device_program(trace)
    seconds = host_costs(program, profile, "fp32")
    totals = {
        run.phase: round(float(seconds[program.instructions.run == index].sum() / US), 3)
        for index, run in enumerate(program.runs)
    }
    # forward: two blocks, two embeddings, norm, head, the model's own and the step's; zero_grad's second is carried on
    assert totals["forward"] + totals["zero_grad"] == pytest.approx(2 * 100 + 2 + 1 + 1 + 1 + 1 + 1)
    assert totals["backward"] == pytest.approx(2 + 2 + 1 + 1 + 1 + 1)
    assert totals["optimizer"] == pytest.approx(1)


def test_a_forward_only_trace_has_no_backward(few_samples) -> None:
    found = classes_of(measured(trace_step(tiny(mode="forward"))))
    modules = ("Block", "Embedding", "Linear", "RMSNorm")
    assert found == sorted(
        [*(f"forward {module} no-grad" for module in modules), "forward-own GPT no-grad", "forward-own step no-grad"]
    )


def test_checkpointed_modules_have_keys_of_their_own(few_samples) -> None:
    found = classes_of(measured(trace_step(tiny(training={"activation_checkpointing": "full"}))))
    assert {"forward Block checkpoint-full", "backward Block checkpoint-full"} <= set(found)


def test_a_large_model_is_built_with_few_layers(monkeypatch) -> None:
    trace = trace_step(tiny(batch={"size": 5, "sequence_length": 8}))
    assert host_modules._built_scenario(trace, "fp32", "cpu", own_batch=False).batch.size == 2
    assert host_modules._built_scenario(trace, "fp32", "cpu", own_batch=False).model.layers == 2
    monkeypatch.setattr(host_modules, "MODEL_BYTES", {"cpu": 10})
    monkeypatch.setattr(host_modules, "FEW_LAYERS", 1)
    assert host_modules._built_scenario(trace, "fp32", "cpu", own_batch=False).model.layers == 1


def test_a_batch_of_its_own_is_in_the_keys(few_samples) -> None:
    trace = trace_step(tiny(batch={"size": 3, "sequence_length": 8}))
    assert host_modules._built_scenario(trace, "fp32", "cpu", own_batch=True).batch.size == 3
    known = {"reference": HostRecord(time_s=1e-3)}
    found = costs.measure_host_keys(trace, str(trace.workload["precision"]), "cpu", known, own_batch=True)
    modules = [key for key in found if key.startswith(("forward", "backward"))]
    plain = costs.measure_host_keys(trace, str(trace.workload["precision"]), "cpu", known | found)
    assert {key for key in plain if key.startswith("forward ")} == {
        f"forward {piece.text()}" for piece in structure_of(trace).pieces if piece.kind == "unit"
    }
    assert {key for key in modules if key.startswith("forward ")} == {
        f"forward {piece.text(with_shapes=True)}" for piece in structure_of(trace).pieces if piece.kind == "unit"
    }


def test_float16_under_a_scaler_is_measured(few_samples) -> None:
    found = classes_of(measured(trace_step(tiny(precision="amp-fp16"))))
    assert {"forward Block amp", "backward Block amp", "backward-own step amp"} <= set(found)


def test_tf32_is_measured_as_such_though_traced_as_fp32(few_samples) -> None:
    found = costs.measure_host_keys(trace_step(tiny()), "tf32", "cpu", {"reference": HostRecord(time_s=1e-3)})
    assert "forward Block tf32" in classes_of(found)


def test_the_general_calibration_reports_its_progress_and_measures_every_kind(few_samples, monkeypatch) -> None:
    monkeypatch.setattr(optimizers, "COUNTS", (1, 2))
    monkeypatch.setattr(optimizers, "IMPLEMENTATIONS", {})
    monkeypatch.setattr(costs, "OPERATOR_PIECES", 1)
    told: list[tuple[str, int, int]] = []
    calls = ("calls", "calls amp", "calls no-grad", "calls amp no-grad")
    records = costs.measure_host("cpu", lambda *row: told.append(row))
    assert told == [
        *((f"host: {title}", 3 * index + more, 17) for index, title in enumerate(calls) for more in (0, 1, 2)),
        ("host: modules and engine", 12, 17),
        *((f"host: {loop}", 13 + index, 17) for index, loop in enumerate(("zero_grad", "clip", "scaler", "scale"))),
        ("host", 17, 17),
    ]
    kinds = {
        "reference",
        "module",
        "glue",
        "autocast",
        "backward",
        "call",
        "launch",
        "view",
        "cast",
        "node",
        "node launch",
        "node view",
    }
    kinds |= {"call amp", "launch no-grad", "cast amp no-grad", "clip", "clip parameter", "zero_grad", "scaler"}
    kinds |= {
        "call linear(mm)",
        "call linear(addmm) no-grad",
        "call layer_norm(native_layer_norm) amp",
        "node AccumulateGrad()",
    }
    assert kinds - records.keys() == set()
    assert all(np.isfinite(record.time_s) for record in records.values())


def test_just_these_parameters_are_named_by_count_and_sizes() -> None:
    def parameters(*sizes: int) -> tuple[Parameter, ...]:
        return tuple(Parameter(str(i), TensorSpec.parse(f"float32[{size}]"), i) for i, size in enumerate(sizes))

    assert list_key("clip", parameters(2, 3)).startswith("clip 2 ")
    assert list_key("clip", parameters(2, 3)) == list_key("clip", parameters(2, 3))
    assert list_key("clip", parameters(2, 3)) != list_key("clip", parameters(2, 4))
