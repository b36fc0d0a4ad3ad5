"""What a prediction amounts to in the field's own measures: throughput and model FLOPs utilisation."""

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
    """dp x batch.size x gradient_accumulation."""
    scenario = prediction.scenario
    accumulation = scenario.training.gradient_accumulation if scenario.mode == "train" else 1
    return scenario.parallelism.dp * scenario.batch.size * accumulation


def throughput_samples_per_s(prediction: Prediction) -> float:
    """Samples that the whole machine finishes in a second of steady training."""
    return samples_per_step(prediction) / prediction.step_time_s


def peak_flops_per_s(prediction: Prediction) -> float | None:
    """The datasheet's dense peak of one device in what the scenario computes in; None where the profile knows none."""
    section = prediction.scenario.parallelism.fsdp
    policy = None if section is None else section.mixed_precision
    own = ARITHMETIC_OF_PRECISION[prediction.scenario.precision]
    return prediction.profile.device.peak_flops_per_s.get((policy.param if policy else None) or own)


def mfu(prediction: Prediction) -> float | None:
    """Model FLOPs utilisation: model FLOPs of a rank's step, in the mean over a pipeline's, over what its device could
    do in that time.

    None where the profile has no datasheet peak. Recomputation (activation checkpointing) is not in the model FLOPs.
    Source: Chowdhery et al. 2022, PaLM, appendix B.
    """
    peak = peak_flops_per_s(prediction)
    return None if peak is None else prediction.model_flops / (prediction.step_time_s * peak)
