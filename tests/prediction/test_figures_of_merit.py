"""Throughput and MFU worked out by hand."""

from __future__ import annotations

import pytest

from perfmodel.prediction.figures_of_merit import mfu, peak_flops_per_s, samples_per_step, throughput_samples_per_s
from tests.report.synthetic import prediction, scenario


def test_throughput_counts_every_micro_batch() -> None:
    accumulating = scenario(training={"gradient_accumulation": 3})
    assert samples_per_step(prediction()) == 4
    assert samples_per_step(prediction(scenario=accumulating)) == 12
    assert throughput_samples_per_s(prediction(scenario=accumulating)) == pytest.approx(12 / 38e-6)


def test_forward_only_has_no_accumulation() -> None:
    forward = scenario(mode="forward", training={"gradient_accumulation": 3})
    assert samples_per_step(prediction(scenario=forward)) == 4


def test_mfu() -> None:
    assert mfu(prediction()) == pytest.approx(3264 / 38e-6 / 1e9)


def test_mfu_is_unknown_without_a_datasheet_peak() -> None:
    assert peak_flops_per_s(prediction(scenario=scenario(precision="amp-bf16"))) is None
    assert mfu(prediction("cpu")) is None
