"""Throughput and model FLOPs utilisation of a prediction."""

from __future__ import annotations

from perfmodel.prediction.prediction import Prediction

# The arithmetic whose datasheet peak a precision is held against.
ARITHMETIC_OF_PRECISION = {
    "fp32": "fp32",
    "tf32": "tf32",
    "bf16": "bf16",
    "fp16": "fp16",
    "amp-bf16": "bf16",
    "amp-fp16": "fp16",
}


def samples_per_step(prediction: Prediction) -> int:
    """Return dp x batch.size x gradient_accumulation, the samples of one step over all ranks."""
    scenario = prediction.scenario
    accumulation = scenario.training.gradient_accumulation if scenario.mode == "train" else 1
    return scenario.parallelism.dp * scenario.batch.size * accumulation


def throughput_samples_per_s(prediction: Prediction) -> float:
    """Return the samples that the whole machine finishes in a second of steady training."""
    return samples_per_step(prediction) / prediction.step_time_s


def peak_flops_per_s(prediction: Prediction) -> float | None:
    """Return the datasheet's dense peak of one device for the scenario's precision; None if the profile has none."""
    section = prediction.scenario.parallelism.fsdp
    policy = None if section is None else section.mixed_precision
    own = ARITHMETIC_OF_PRECISION[prediction.scenario.precision]
    return prediction.profile.device.peak_flops_per_s.get((policy.param if policy else None) or own)


def mfu(prediction: Prediction) -> float | None:
    """Return the model FLOPs utilisation: model FLOPs of a rank's step over what its device could do in that time.

    MFU = model FLOPs / (step time x peak FLOP/s)

    Returns
    -------
    float or None
        None if the profile has no datasheet peak.

    Notes
    -----
    In a pipeline, model FLOPs are the mean over ranks. Recomputation (activation checkpointing) is not counted.
    Source: Chowdhery et al. 2022, PaLM, appendix B.
    """
    peak = peak_flops_per_s(prediction)
    return None if peak is None else prediction.model_flops / (prediction.step_time_s * peak)
