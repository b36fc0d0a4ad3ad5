"""A pipeline small enough to work out by hand: GPipe of two ranks and two micro-batches, in microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from perfmodel.hardware.measurement import Measurement, PipelineAction, RankSamples
from perfmodel.prediction.prediction import Prediction
from perfmodel.program.program import Collective, Message
from perfmodel.simulate.memory.walk import simulate_memory
from perfmodel.simulate.timeline import Communication, PhaseSpan, Timeline
from perfmodel.units import US
from tests.report.synthetic import MIB, prediction, scenario

PIPELINE = {"stages": 2, "schedule": "gpipe", "micro_batches": 2}
PHASES = (
    ("zero_grad", -1),
    ("forward", 0),
    ("forward", 1),
    ("backward", 0),
    ("backward", 1),
    ("scale", -1),
    ("optimizer", -1),
)
COMPUTING = range(1, 5)  # of the phases, those of a stage
ONE_STAGE = ((0, 0, 0, 0), (1, 1, 1, 1))  # of these, by rank
TWO_STAGES = ((0, 2, 2, 0), (1, 3, 3, 1))
# Of each rank since its host began: run, start, end of each operator; the first mark; the step's end.
FIRST = ([(1, 1, 2), (1, 3, 4), (2, 4, 6), (3, 12, 16), (4, 18, 22), (5, 22, 23), (6, 23, 25)], 1, 26)
LAST = ([(1, 8, 11), (2, 11, 14), (3, 14, 18), (4, 18, 22), (6, 24, 26)], 2, 27)
STEP_S = 25 * US
MESSAGES = (
    # of the first rank: run, start, end, how long it waits, index of the exchange
    ((2, 6, 7, 0, 0), (3, 7, 12, 4, 1)),
    ((1, 2, 7, 4, 0), (4, 22, 24, 1, 1)),
)
EXCHANGES = (
    ((Message("F0 0", True, 1),), (Message("B0 0", False, 1), Message("F1 0", True, 1))),
    ((Message("F0 0", False, 0),), (Message("B0 0", True, 0), Message("F1 0", False, 0))),
)


def timeline(rank: int, began_us: float, stages: Sequence[int]) -> Timeline:
    rows, mark, end = (FIRST, LAST)[rank]
    run, start, stop = np.array(rows, dtype=float).T
    starts = [mark, *(min((row[1] for row in rows if row[0] >= number), default=end) for number in range(1, 7)), end]
    stage_of = dict(zip(COMPUTING, stages, strict=True))
    spans = tuple(
        PhaseSpan(*phase, begins * US, ends * US, stage_of.get(number, -1))
        for number, (phase, begins, ends) in enumerate(zip(PHASES, starts, starts[1:], strict=False))
    )
    return Timeline(
        operation=np.zeros(len(rows), dtype=np.int64),
        run=run.astype(np.int64),
        module=np.full(len(rows), -1),
        stream=np.zeros(len(rows), dtype=np.int64),
        host_start_s=start * US - US,
        issue_s=start * US - US / 2,
        start_s=start * US,
        end_s=stop * US,
        phases=spans,
        host_spans=tuple(span.shifted(-US) for span in spans),
        step_time_s=STEP_S,
        synced_step_time_s=STEP_S,
        host_busy_s=0.0,
        communications=tuple(
            Communication(0, number, 8, begins * US, begins * US, ends * US, waits * US, exchange)
            for number, begins, ends, waits, exchange in MESSAGES[rank]
        ),
        began_s=began_us * US,
    )


def pipeline(
    began_us: Sequence[float] = (3, 0),
    computed_stages: Sequence[Sequence[int]] = ONE_STAGE,
    stage_blocks: tuple[int, ...] = (1, 1),
    **changes: object,
) -> Prediction:
    """The first rank is the slowest's; the last rank's host begins first. changes: of ``parallelism.pp``."""
    known = prediction()
    collectives = (Collective("exchange", "float32", 64, 2, "pp", "both"),)
    programs = tuple(
        replace(known.program, collectives=collectives, exchanges=each, stage_blocks=stage_blocks) for each in EXCHANGES
    )
    assert known.memory is not None
    steady = known.memory.steady.model_copy(update={"peak_allocated_bytes": MIB})
    smaller = replace(known.memory, steady=steady)
    return replace(
        known,
        scenario=scenario(
            parallelism={"pp": PIPELINE | changes},
            hardware={"profile": "toy-gpu", "gpus": 2, "interconnect": "nvlink"},
        ),
        program=programs[0],
        timeline=timeline(0, began_us[0], computed_stages[0]),
        shown_rank=0,
        rank_memories=(known.memory, smaller),
        rank_timelines=tuple(timeline(rank, each, computed_stages[rank]) for rank, each in enumerate(began_us)),
        rank_programs=programs,
        rank_kernels=(known.kernels, known.kernels),
    )


def measured_pipeline(name: str = "toy", actions: bool = True, **columns: object) -> Measurement:
    """Two ranks of a step of 30 us, with an optimizer of 2 us."""
    first = [("F", 0, 4, 6), ("F", 1, 6, 8), ("B", 0, 14, 18), ("B", 1, 20, 24)]
    last = [("F", 0, 7, 10), ("F", 1, 10, 13), ("B", 0, 13, 17), ("B", 1, 17, 21)]
    times = (30 * US,) * 8
    shared = {"step_s": times, "synced_step_s": times, "phases_s": {"optimizer": (2 * US,) * 8}}
    ranks = tuple(
        RankSamples(
            **shared,
            actions=tuple(
                PipelineAction(
                    kind=kind,
                    stage=stage,
                    micro_batch=number,
                    start_s=start * US,
                    end_s=end * US,
                )
                for kind, number, start, end in rows
            )
            if actions
            else (),
        )
        for stage, rows in enumerate((first, last))
    )
    known = {"split": "tuning", "group": "pp", "scenario": {}, "provenance": {}, "warmup_steps": 5}
    return Measurement(name=name, **known | shared | {"ranks": ranks} | columns)


def with_larger_last() -> Prediction:
    """Whose last rank takes 3 MiB more beside its allocator than the first, which is shown."""
    known = pipeline()
    larger = simulate_memory(known.program, known.profile, communicators_bytes=3 * MIB)
    return replace(known, rank_memories=(known.rank_memories[0], larger))
