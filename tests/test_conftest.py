"""No test depends on the user's home and cache, nor on how busy the machine is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from perfmodel.trace.store import cache_directory
from tests.places import TESTS

SHIPPED = TESTS.parent / "scenarios" / "gpt2-batch1.yaml"


def test_home_and_cache_are_the_tests_own() -> None:
    for path in (Path.home(), cache_directory()):
        assert path.is_relative_to(tempfile.gettempdir())


def test_what_a_test_starts_has_them_too() -> None:
    command = "from perfmodel.trace.store import cache_directory; print(cache_directory())"
    shown = subprocess.run(
        [sys.executable, "-c", command], cwd=TESTS.parent, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == str(cache_directory())


def test_no_example_has_a_deadline() -> None:
    assert settings().deadline is None
    own = [path for path in TESTS.rglob("test_*.py") if re.search(r"\bdeadline=", path.read_text())]
    assert own == [], "the profile of conftest.py has none; a test gives none of its own"


@pytest.mark.parametrize("ci", [{"CI": "true"}, {}], ids=["ci", "by hand"])
def test_ci_tries_the_same_examples_every_time(ci: dict[str, str]) -> None:
    code = "import tests.conftest, hypothesis; print(hypothesis.settings().derandomize)"
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | ci
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == str(bool(ci))


@pytest.mark.parametrize("home", ["", "/nonexistent", "/dev/null", None], ids=str)
def test_a_shipped_scenario_needs_no_home(home: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "PERFMODEL_CACHE")}
    environment |= {} if home is None else {"HOME": home}
    command = [sys.executable, str(TESTS.parent / "cli.py"), "predict", str(SHIPPED), "--json"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
