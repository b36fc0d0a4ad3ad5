"""Where traces are found, made and kept."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perfmodel.errors import PerfModelError, PerfModelWarning
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace import store
from perfmodel.trace.operation import TensorSpec
from perfmodel.trace.store import find_trace, get_optimizer_trace, get_trace, optimizer_trace_name, trace_name
from perfmodel.trace.trace import save_trace


@pytest.fixture
def scenario():
    return Scenario(
        model={"family": "gpt", "size": "tiny"}, batch={"size": 2, "sequence_length": 8}, hardware={"profile": "none"}
    )


@pytest.fixture(autouse=True)
def empty_store(tmp_path, monkeypatch):
    monkeypatch.setenv("PERFMODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(store, "_remembered", store.OrderedDict())
    return tmp_path


def test_names_tell_workloads_apart_and_nothing_else(scenario):
    assert trace_name(scenario).startswith("gpt-")
    assert trace_name(scenario) == trace_name(scenario.model_copy(update={"name": "another"}))
    assert trace_name(scenario) != trace_name(scenario.model_copy(update={"precision": "amp-bf16"}))


def test_a_trace_is_made_once_then_cached_then_remembered(scenario, empty_store, monkeypatch):
    assert find_trace(trace_name(scenario)) is None
    made = get_trace(scenario)
    path = find_trace(trace_name(scenario))
    assert path.parent == empty_store / "cache" / "traces"
    assert path.name.startswith(trace_name(scenario))
    assert get_trace(scenario) is made
    store._remembered.clear()
    monkeypatch.setattr("perfmodel.tracing.step.trace_step", None)
    assert get_trace(scenario).operations == made.operations


def test_the_cache_names_the_versions_of_torch_and_transformers(scenario):
    import torch
    import transformers

    get_trace(scenario)
    assert (
        find_trace(trace_name(scenario)).name
        == f"{trace_name(scenario)}-{torch.__version__}-{transformers.__version__}.json.gz"
    )


def test_shipped_traces_come_first(scenario, empty_store):
    made = get_trace(scenario)
    shipped = empty_store / "shipped" / f"{trace_name(scenario)}.json.gz"
    save_trace(made, shipped)
    assert find_trace(trace_name(scenario)) == shipped


def test_a_damaged_cache_is_made_again_but_a_damaged_shipped_trace_is_an_error(scenario, empty_store):
    get_trace(scenario)
    find_trace(trace_name(scenario)).write_bytes(b"not a trace")
    store._remembered.clear()
    assert get_trace(scenario).operations
    shipped = empty_store / "shipped" / f"{trace_name(scenario)}.json.gz"
    shipped.parent.mkdir()
    shipped.write_bytes(b"not a trace")
    store._remembered.clear()
    with pytest.raises(PerfModelError, match="a trace must be whole JSON"):
        get_trace(scenario)


def test_a_cache_that_cannot_be_written_is_a_warning(scenario, empty_store):
    """A folder of that name cannot be made, whoever asks."""
    (empty_store / "cache").write_text("in the way")
    with pytest.warns(
        PerfModelWarning, match=r"cache/traces: the trace was not kept.*Not a directory.*PERFMODEL_CACHE"
    ):
        assert get_trace(scenario).operations


def test_a_cached_trace_that_is_no_file_is_left_alone(scenario, empty_store):
    get_trace(scenario)
    path = find_trace(trace_name(scenario))
    path.unlink()
    os.mkfifo(path)
    store._remembered.clear()
    with pytest.warns(PerfModelWarning, match=r"the trace was not kept.*must be a regular file.*a pipe"):
        assert get_trace(scenario).operations
    assert path.is_fifo()


def test_without_a_home_the_cache_is_at_the_root(monkeypatch):
    monkeypatch.delenv("PERFMODEL_CACHE")
    monkeypatch.setattr(store.os.path, "expanduser", lambda path: path)
    assert store.cache_directory() == Path("/.cache/perfmodel/traces")
    monkeypatch.setattr(store.os.path, "expanduser", lambda path: path.replace("~", "/home/a~b"))
    assert store.cache_directory() == Path("/home/a~b/.cache/perfmodel/traces")


def test_targets_are_neither_found_nor_cached(empty_store):
    target = Scenario(
        model={
            "target": "torch.nn:Linear",
            "arguments": {"in_features": 4, "out_features": 2},
            "inputs": {
                "input": {"shape": ["batch", 4]},
                "labels": {"shape": ["batch"], "dtype": "int64", "high": 2},
            },
            "loss": "cross_entropy",
        },
        batch={"size": 2},
        hardware={"profile": "none"},
    )
    with pytest.raises(PerfModelError, match="allow-import"):
        get_trace(target)
    assert get_trace(target, allow_import=True).operations
    assert find_trace(trace_name(target)) is None
    assert not (empty_store / "cache").exists()


def test_only_few_traces_are_remembered(scenario, monkeypatch):
    monkeypatch.setattr("perfmodel.tracing.step.trace_step", lambda scenario, allow_import: object())
    monkeypatch.setattr(store, "save_trace", lambda trace, path: None)
    for size in range(1, store.REMEMBERED_TRACES + 4):
        get_trace(scenario.model_copy(update={"batch": scenario.batch.model_copy(update={"size": size})}))
    assert len(store._remembered) == store.REMEMBERED_TRACES


def test_without_torch_the_sentence_says_what_to_install(empty_store):
    program = """
import sys
sys.modules["torch"] = None
from perfmodel.errors import PerfModelError, PerfModelWarning
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.store import get_trace
scenario = Scenario(name="mine", model={"family": "gpt", "size": "tiny"}, batch={"size": 3, "sequence_length": 8},
                    hardware={"profile": "none"})
try:
    get_trace(scenario)
except PerfModelError as error:
    print(error)
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("mine: tracing this scenario needs torch")
    assert "pip install .[torch]" in printed


def test_an_optimizer_alone_is_made_once_then_cached_then_remembered(scenario, monkeypatch):
    tensors = [TensorSpec((4, 8), (8, 1), "float32"), TensorSpec((8,), (1,), "float32")]
    made = get_optimizer_trace(scenario, tensors)
    assert [segment.phase for segment in made.steady.segments] == ["optimizer"]
    assert find_trace(optimizer_trace_name(scenario, tensors)).name.startswith("optimizer-")
    monkeypatch.setattr("perfmodel.tracing.optimizer.trace_optimizer", None)
    assert get_optimizer_trace(scenario, tensors) is made
    store._remembered.clear()
    assert get_optimizer_trace(scenario, tensors).operations == made.operations
    assert optimizer_trace_name(scenario, tensors[:1]) != optimizer_trace_name(scenario, tensors)
