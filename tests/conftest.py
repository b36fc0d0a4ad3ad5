"""What holds for every test: the user's cache and home are neither read nor written, hypothesis has no deadlines,
torch takes one core, and nothing is said of progress, which depends on time.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections import OrderedDict
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
HOME = pytest.StashKey[Path]()

# How long an example takes says how busy the machine is. In CI, every run tries the same examples.
hypothesis.settings.register_profile("perfmodel", deadline=None)
hypothesis.settings.register_profile("perfmodel-ci", deadline=None, derandomize=True, database=None, print_blob=True)
hypothesis.settings.load_profile("perfmodel-ci" if "CI" in os.environ else "perfmodel")


def pytest_configure(config: pytest.Config) -> None:
    """A home of the tests' own, from before the first module is imported; what they start has it too."""
    config.stash[HOME] = home = Path(tempfile.mkdtemp(prefix="perfmodel-tests-"))
    os.environ |= {"HOME": str(home), "PERFMODEL_CACHE": str(home / "cache"), "PERFMODEL_PROGRESS": "off"}
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR"):
        os.environ.pop(name, None)


def pytest_collection_finish() -> None:
    """Leave torch, matplotlib and every test module out of garbage collection from here on.

    Each trace collects garbage before it begins, and looking at all of these took a third of a small one's time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def nothing_old_is_collected() -> None:
    """Leave out what the tests so far imported and cached, too; a calibration also ends what was left out before."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def empty_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No trace but the shipped ones is kept or remembered: for tests of what has none."""
    from perfmodel.trace import store

    monkeypatch.setenv("PERFMODEL_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(store, "_remembered", OrderedDict())


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[HOME], ignore_errors=True)
