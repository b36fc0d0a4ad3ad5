"""Measurements as a real run would give, made from predictions with noise, where there is no GPU to run on."""

from __future__ import annotations

import random

from perfmodel.accuracy.cases import Pair
from perfmodel.hardware.measurement import Measurement, RankCommunication, RankSamples, StepMemory
from perfmodel.prediction.prediction import Prediction
from validate.cases import resolved_scenario

STEPS = 12


def measured(
    prediction: Prediction, noise: float, seed: int = 0, *, traced: bool = True, held_out: bool = False
) -> Pair:
    """The prediction beside a measurement that is off by ``noise`` (relative, one sigma) in time, and a tenth in memory."""
    draw = random.Random(seed)
    ranks = prediction.scenario.parallelism.dp
    step_s, steps = prediction.step_time_s * draw.gauss(1, noise), range(STEPS)
    times = tuple(step_s * draw.gauss(1, 0.005) for _ in steps)
    memories = [
        StepMemory(
            allocated_before_bytes=0,
            peak_allocated_bytes=round(each.peak_allocated_bytes * draw.gauss(1, noise / 10)),
            peak_reserved_bytes=round(each.peak_reserved_bytes * draw.gauss(1, noise / 10)),
        )
        for each in prediction.rank_memories
    ]
    samples = {"step_s": times, "synced_step_s": times, "phases_s": {"forward": times}}
    of_ranks = tuple(RankSamples(**samples, memory=(memory,) * 4) for memory in memories) if ranks > 1 else ()  # type: ignore[arg-type]
    exposed_s = prediction.timeline.exposed_communication_s * draw.gauss(1, 10 * noise) + 5e-4
    whole_s = prediction.timeline.communication_s
    communication = RankCommunication(
        communication_s=whole_s,
        exposed_s=exposed_s,
        overlap_ratio=0.9,
        since_last_arrival_s=whole_s,
        exposed_beyond_pauses_s=exposed_s,
    )
    found = Measurement(
        name=prediction.scenario.name,
        split="held-out" if held_out else "tuning",
        group="own",
        scenario=resolved_scenario(prediction.scenario),
        provenance={},
        warmup_steps=5,
        **samples,  # type: ignore[arg-type]
        memory=(memories[0],) * 4,
        ranks=of_ranks,
        communication=(communication,) * ranks if traced and ranks > 1 else (),
    )
    return Pair(found, prediction, None)
