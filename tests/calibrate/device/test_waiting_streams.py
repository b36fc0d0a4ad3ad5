"""Gaps beside waiting streams, from readings that are told."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from calibrate.device import waiting_streams
from tests.refusals import refused


def test_gaps_are_means_over_processes_and_never_negative() -> None:
    told_us = [[2.0, 1.9, 3.0, 3.6], [2.2, 2.1, 3.8, 3.6]]  # one stream that waits must not shorten anything
    found = waiting_streams.waiting_gaps_s([[each * 1e-6 for each in row] for row in told_us])
    assert found == pytest.approx([0.0, 1.3e-6, 1.5e-6])


def test_each_process_tells_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        assert options["timeout"] == waiting_streams.TIMEOUT_S
        return subprocess.CompletedProcess(command, 0, f"[{len(ran)}.0, 2.0]\n")

    monkeypatch.setattr(subprocess, "run", run)
    ticks: list[None] = []
    found = waiting_streams.waiting_spacings_s(lambda: ticks.append(None))
    assert found == [[float(number), 2.0] for number in range(1, waiting_streams.PROCESSES + 1)]
    assert len(ticks) == waiting_streams.PROCESSES
    assert ran[0][-3:] == [sys.executable, "-m", "calibrate.device.waiting_streams"]


def test_a_process_that_fails_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="Traceback\nRuntimeError: no GPU\n")

    monkeypatch.setattr(subprocess, "run", run)
    with refused("waiting streams", "RuntimeError: no GPU"):
        waiting_streams.waiting_spacings_s(lambda: None)
