"""Constants of launching, from readings that are told."""

from __future__ import annotations

import pytest
import torch

from calibrate import constants


def test_gaps_by_streams_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    spacing_us = (2.0, 1.9, 3.0, 3.5, 3.5)  # by number of streams; one that waits must not shorten anything
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(constants, "_spacing_s", lambda stream, beside: spacing_us[len(beside)] * 1e-6)
    assert constants.waiting_gaps_s(None) == pytest.approx([0.0, 1e-6, 1.5e-6, 1.5e-6])  # type: ignore[arg-type]
