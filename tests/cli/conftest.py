"""A working folder for commands, and predictions that answer their questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import perfmodel.prediction.sweep  # noqa: F401  # before a test replaces what it imports
from perfmodel.hardware.profile import Device, Profile, save_profile
from perfmodel.prediction.prediction import Prediction
from perfmodel.scenario.scenario import Scenario
from perfmodel.scenario.yaml_file import Assignments, load_question
from tests.cli.commands import TINY, Asked
from tests.report.synthetic import prediction


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a scenario and the profile it names."""
    monkeypatch.chdir(tmp_path)
    Path("toy.yaml").write_text(TINY)
    device = Device(
        kind="cuda",
        name="Toy GPU",
        memory_bytes=2**36,
        peak_flops_per_s={"fp32": 67e12},
        peak_memory_bytes_per_s=4.8e12,
    )
    save_profile(Profile(name="toy", device=device), Path("toy.json"))
    return tmp_path


@pytest.fixture
def asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The questions that commands ask, all answered with the same prediction."""
    questions: Asked = []

    def answer(
        scenario: Scenario | Path,
        profile: Profile | None = None,
        *,
        set: Assignments = (),
        device: str | None = None,
        **options: Any,
    ) -> Prediction:
        questions.append((*load_question(scenario, set, device, profile=profile), options))
        return prediction()

    monkeypatch.setattr("perfmodel.prediction.predict.predict", answer)
    monkeypatch.setattr("perfmodel.accuracy.comparison.predict", answer)
    return questions
