"""What `import perfmodel` offers: lazily, with the same answers as the command line, and documented by code that runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import perfmodel
from perfmodel.scenario.yaml_file import load_question
from tests.places import ROOT
from tests.refusals import refused

SCENARIO = ROOT / "scenarios/gpt2.7b.yaml"


def run_fresh(code: str) -> str:
    """What a fresh interpreter prints."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_perfmodel_loads_neither_numpy_nor_any_of_its_modules() -> None:
    names = json.loads(run_fresh("import json, sys, perfmodel; print(json.dumps(sorted(sys.modules)))"))
    assert [name for name in names if name.partition(".")[0] in ("numpy", "pydantic", "yaml", "click", "torch")] == []
    assert [name for name in names if name.startswith("perfmodel.")] == []


def test_every_public_name_is_there() -> None:
    assert run_fresh(
        "import perfmodel\nfor name in perfmodel.__all__: print(name, getattr(perfmodel, name).__name__)"
    ).splitlines() == [f"{name} {name}" for name in perfmodel.__all__]
    assert set(perfmodel.__all__) <= set(dir(perfmodel))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'forecast'"):
        _ = perfmodel.forecast  # type: ignore[attr-defined]


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "perfmodel/py.typed").is_file()


def test_a_path_and_what_stands_in_it_are_the_same_question() -> None:
    by_path = perfmodel.predict(str(SCENARIO), set=["precision=amp-bf16", "hardware.device.memory_bytes=100e9"])
    scenario, profile = load_question(SCENARIO, ["precision=amp-bf16", "hardware.device.memory_bytes=100e9"])
    by_objects = perfmodel.predict(scenario, profile)
    assert by_path.scenario == by_objects.scenario
    assert (by_path.step_time_s, by_path.interval_s) == (by_objects.step_time_s, by_objects.interval_s)
    assert by_path.profile.device.memory_bytes == 100e9


def test_values_change_a_loaded_scenario_as_they_change_a_file() -> None:
    changes = {"batch.size": 2, "training.activation_checkpointing": "full"}
    scenario = perfmodel.load_scenario(SCENARIO)
    changed, _ = load_question(scenario, changes)
    assert changed == perfmodel.load_scenario(SCENARIO, changes) != scenario


def test_a_profile_by_name_replaces_that_of_the_scenario() -> None:
    assert load_question(SCENARIO, profile="h200-sxm-x2")[1].gpus == 2 != load_question(SCENARIO)[1].gpus


def test_a_refusal_names_the_file_and_the_key() -> None:
    with refused(SCENARIO):  # all that stands before the rule
        perfmodel.predict(SCENARIO, set={"batch.size": -1})
    with refused("batch.size", -1):
        perfmodel.predict(SCENARIO, set={"batch.size": -1})


def test_a_sweep_of_a_loaded_scenario_is_that_of_its_file() -> None:
    vary = {"hardware.device.peak_memory_bytes_per_s": [4.8e12, 8e12]}
    of_file = perfmodel.sweep(SCENARIO, vary)
    assert perfmodel.sweep(perfmodel.load_scenario(SCENARIO), vary) == of_file
    assert [*of_file.ranked[0].values.values()] == [8e12]


def test_the_code_of_the_page_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```python\n(.*?)```", Path("docs/python.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d\.\d{3} s, between \d\.\d{3} and \d\.\d{3} s", lines[0])
    assert lines[1].startswith("the device: ")
    assert "batch.size" in lines[-1]
