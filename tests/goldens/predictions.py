"""Predictions that a change of the code must not move: the questions, their figures, and what moved.

The questions are shipped scenarios with ``--set`` values, so that each can be asked again on the command line; they
take only shipped profiles and traces, and no torch. Figures are compared at a relative 1e-9: sums may be taken in
another order, and nothing else may change. Where a prediction is meant to change, ``python -m tests.goldens`` writes
the file anew, and its difference says by how much.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perfmodel.prediction.predict import predict
from perfmodel.prediction.prediction import Prediction
from perfmodel.scenario.yaml_file import load_question
from perfmodel.simulate.memory.walk import MemoryTimeline
from perfmodel.trace.store import only_kept_traces
from tests.places import ROOT

GOLDENS = Path(__file__).parent / "predictions.json"
RELATIVE = 1e-9
ABSOLUTE = 1e-12  # seconds and shares; what is left of a difference that should be zero

CPU = f"hardware.profile={Path(__file__).parent / 'cpu.json'}"
LARGE = ("model.size=large",)
MIXED_XL = ("model.size=xl", "batch.sequence_length=512")
MIXED = "mixed_precision: {param: bf16, reduce: fp32}"
TWO_STAGES = (*LARGE, "batch.sequence_length=512")
FOUR_STAGES = (
    *TWO_STAGES,
    "parallelism.pp.layers=[9, 9, 9, 9]",
    "parallelism.pp.virtual_stages=2",
)
X2 = ("hardware.profile=h200-sxm-x2", "hardware.gpus=2", "parallelism.dp=2")


class Question(NamedTuple):
    """What is asked of a prediction.

    Attributes
    ----------
    scenario : str
        File in ``scenarios/``, without its ending.
    settings : tuple of str
        Values of ``--set``.
    exact : bool
        False asks as ``--no-exact-keys`` does.
    """

    scenario: str
    settings: tuple[str, ...] = ()
    exact: bool = True


QUESTIONS: dict[str, Question] = {
    "one GPU, fp32": Question("gpt2.7b"),
    "one GPU, tf32": Question("gpt2.7b", (*LARGE, "precision=tf32")),
    "one GPU, amp-bf16": Question("gpt2.7b-amp"),
    "one GPU, amp-fp16": Question("gpt2.7b-amp", ("model.size=xl", "precision=amp-fp16")),
    "one GPU, clipping": Question("gpt2.7b-amp", (*LARGE, "optimizer.max_grad_norm=1.0")),
    "one GPU, bf16, fused": Question("llama1b-bf16"),
    "one GPU, checkpointing": Question("llama8b-checkpointing"),
    "one GPU, accumulation, clipping": Question("bert-large-accumulation"),
    "one GPU, bound by the host": Question("gpt2-batch1"),
    "one GPU, general grid only": Question("gpt2.7b", exact=False),
    "CPU": Question("tiny-cpu", (CPU,)),
    "CPU, ddp": Question("tiny-ddp-cpu", (CPU,)),
    "vision, channels_last": Question("resnet50-channels-last"),
    "what-if, another GPU": Question(
        "gpt2.7b",
        ("hardware.device.peak_flops_per_s.fp32=134e12", "hardware.device.peak_memory_bytes_per_s=8e12"),
    ),
    "what-if, a lower power limit": Question("gpt2.7b", ("hardware.device.power_limit_w=400",)),
    "does not fit": Question("gpt2.7b", ("hardware.device.memory_bytes=40e9",)),
    "does not fit, ddp": Question("gpt2.7b-ddp", ("hardware.device.memory_bytes=60e9",)),
    "naive": Question("gpt2.7b-naive"),
    "flat": Question("gpt2.7b-flat"),
    "overlap": Question("gpt2.7b-overlap"),
    "ddp": Question("gpt2.7b-ddp"),
    "ddp, host memory": Question("gpt-medium-ddp-host-memory"),
    "ddp, two nodes": Question("gpt-small-ddp-two-nodes"),
    "ddp, accumulation, amp-bf16": Question(
        "gpt2.7b-ddp",
        ("model.size=medium", "precision=amp-bf16", "training.gradient_accumulation=4"),
    ),
    "ddp, views, static graph, clipping": Question(
        "gpt2.7b-ddp",
        (
            *LARGE,
            "parallelism.dp=2",
            "hardware.gpus=2",
            "parallelism.gradient_as_bucket_view=true",
            "parallelism.static_graph=true",
            "optimizer.max_grad_norm=1.0",
        ),
    ),
    "zero1": Question("gpt2.7b-zero1"),
    "zero1, reduce-scatter": Question("gpt2.7b-zero1", (*LARGE, *X2, "parallelism.zero1_form=reduce-scatter")),
    "zero2, accumulation": Question(
        "gpt2.7b-zero3",
        (*LARGE, *X2, "parallelism.strategy=zero2", "training.gradient_accumulation=4"),
    ),
    "zero3": Question("gpt2.7b-zero3"),
    "zero3, clipping": Question("gpt2.7b-zero3", ("model.size=xl", *X2, "optimizer.max_grad_norm=1.0")),
    "zero3, mixed precision, resharding to 2": Question(
        "gpt2.7b-zero3",
        (*MIXED_XL, f"parallelism.fsdp={{{MIXED}, reshard_after_forward: 2}}"),
    ),
    "zero3, offload": Question(
        "gpt2.7b-zero3",
        ("model.size=medium", "batch.sequence_length=512", *X2, f"parallelism.fsdp={{{MIXED}, offload: true}}"),
    ),
    "hsdp": Question("gpt2.7b-zero3", (*MIXED_XL, f"parallelism.fsdp={{{MIXED}, replicate: 2}}")),
    "hsdp, two nodes": Question(
        "gpt-small-ddp-two-nodes",
        ("parallelism.strategy=zero3", "parallelism.fsdp={replicate: 2}"),
    ),
    "pipeline, 1f1b": Question("gpt2.7b-1f1b"),
    "pipeline, 1f1b, unequal stages": Question("gpt2.7b-1f1b", (*TWO_STAGES, "parallelism.pp.layers=[12, 24]")),
    "pipeline, gpipe, three stages": Question(
        "gpt2.7b-1f1b",
        (
            *TWO_STAGES,
            "batch.size=24",
            "hardware.gpus=3",
            "parallelism.pp={stages: 3, schedule: gpipe, micro_batches: 12, layers: [12, 12, 12]}",
        ),
    ),
    "pipeline, 1f1b, four stages, host memory": Question(
        "gpt2.7b-1f1b",
        (
            *TWO_STAGES,
            "batch.size=32",
            "hardware.gpus=4",
            "hardware.interconnect=host-memory",
            "parallelism.pp={stages: 4, micro_batches: 8, layers: [9, 9, 9, 9]}",
        ),
    ),
    "pipeline, looped-bfs": Question("gpt2.7b-1f1b", (*FOUR_STAGES, "parallelism.pp.schedule=looped-bfs")),
    "pipeline, interleaved-zero-bubble": Question(
        "gpt2.7b-1f1b",
        (*FOUR_STAGES, "parallelism.pp.schedule=interleaved-zero-bubble"),
    ),
    "pipeline, zbv-zero-bubble": Question("gpt2.7b-1f1b", (*FOUR_STAGES, "parallelism.pp.schedule=zbv-zero-bubble")),
    "pipeline, dualpipev": Question("gpt2.7b-1f1b", (*FOUR_STAGES, "parallelism.pp.schedule=dualpipev")),
    "pipeline, interleaved-1f1b, replicas": Question(
        "gpt2.7b-1f1b",
        (
            *FOUR_STAGES,
            "parallelism.pp.schedule=interleaved-1f1b",
            "parallelism.dp=2",
            "parallelism.strategy=ddp",
            "hardware.gpus=4",
        ),
    ),
}


def answer(name: str) -> Prediction:
    """The prediction that the question of that name asks for; a trace that is not at hand is an error."""
    question = QUESTIONS[name]
    scenario, profile = load_question(ROOT / "scenarios" / f"{question.scenario}.yaml", question.settings)
    with only_kept_traces():
        return predict(scenario, profile, exact=question.exact)


def figures(prediction: Prediction) -> dict[str, Any]:
    """All that is held of a prediction, as plain data: times in seconds, sizes in bytes."""
    low_s, high_s = prediction.interval_s
    clock = prediction.clock
    return {
        "step_time_s": prediction.step_time_s,
        "synced_step_time_s": prediction.timeline.synced_step_time_s,
        "interval_s": {"low": low_s, "high": high_s},
        "breakdown": dict(prediction.breakdown),
        "communication_bytes": dict(prediction.communication_bytes),
        "model_flops": prediction.model_flops,
        "clock_hz": None if clock is None else clock.hz,
        "kernels": {"distinct": len(prediction.kernels), "calls": sum(use.count for use in prediction.kernels)},
        "provenance": {**prediction.provenance, "scaled": prediction.scaled_share},
        "collective_provenance": dict(prediction.collective_provenance),
        "times": _distinct([_times(each) for each in prediction.by_rank]),
        "memory": _distinct([_memory(each) for each in prediction.rank_memories]),
    }


def _times(prediction: Prediction) -> dict[str, Any]:
    timeline = prediction.timeline
    return {
        "step_time_s": timeline.step_time_s,
        "busy_s": timeline.busy_s,
        "host_busy_s": timeline.host_busy_s,
        "communication_s": timeline.communication_s,
        "exposed_communication_s": timeline.exposed_communication_s,
        "bubble_s": timeline.bubble_s,
        "communications": len(timeline.communications),
    }


def _memory(memory: MemoryTimeline) -> dict[str, Any]:
    steps = {"first": memory.first, "rebuilding": memory.rebuilding, "steady": memory.steady}
    return {
        **{name: None if step is None else step.model_dump() for name, step in steps.items()},
        "device_bytes": memory.device_bytes,
        "needed_bytes": memory.needed_bytes,
        "fits": memory.fits,
        "retries": memory.retries,
    }


def _distinct(ranks: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Each distinct entry once, under the ranks that it holds for."""
    equal: dict[str, list[int]] = {}
    for rank, entry in enumerate(ranks):
        equal.setdefault(json.dumps(entry), []).append(rank)
    return {f"rank {', '.join(map(str, numbers))}": ranks[numbers[0]] for numbers in equal.values()}


def moved(held: Mapping[str, Any], found: Mapping[str, Any], where: str = "") -> list[str]:
    """A line for each figure that is not as it was held: its key, the old value and the new one."""
    lines: list[str] = []
    for key in dict.fromkeys([*held, *found]):
        old, new, name = held.get(key, "nothing"), found.get(key, "nothing"), f"{where}{key}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += moved(old, new, f"{name} > ")
        elif not _equal(old, new):
            lines.append(f"{name}: {old} -> {new}{_change(old, new)}")
    return lines


def _equal(old: object, new: object) -> bool:
    """Counts and sizes are equal or not; only what was calculated in floating point has a tolerance."""
    if isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return old == new and isinstance(old, bool) == isinstance(new, bool)


def _change(old: object, new: object) -> str:
    numbers = [each for each in (old, new) if isinstance(each, (int, float)) and not isinstance(each, bool)]
    return f" ({numbers[1] / numbers[0] - 1:+.2e})" if len(numbers) == 2 and numbers[0] else ""


def load() -> dict[str, Any]:
    """The figures as they are held."""
    held: dict[str, Any] = json.loads(GOLDENS.read_text())
    return held


def save(found: Mapping[str, Any]) -> None:
    """Hold these figures from now on."""
    GOLDENS.write_text(json.dumps(found, indent=1) + "\n")
