"""``perfmodel predict --json``: the answer as plain data, seconds and bytes, keys as contracted."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from perfmodel.cost.power import Clock
from perfmodel.hardware.measurement import StepMemory
from perfmodel.prediction.figures_of_merit import mfu, throughput_samples_per_s
from perfmodel.prediction.pipeline_ranks import bubble_share, largest_rank, rank_shares
from perfmodel.prediction.prediction import Prediction
from perfmodel.simulate.memory.walk import MemoryTimeline

if TYPE_CHECKING:
    from perfmodel.prediction.fitting import Fitting

# Format history
# 1  first
# 2  memory.rebuild_step, which says which step it is, in place of memory.second_step
REPORT_VERSION = 2


def json_report(prediction: Prediction, fitting: Fitting | None = None) -> dict[str, Any]:
    """Return everything that `perfmodel predict --json` prints.

    Parameters
    ----------
    prediction : Prediction
        The answer.
    fitting : Fitting, optional
        What is known about settings with which the step would fit.

    Notes
    -----
    ``mfu``
        null if the profile has no datasheet peak.
    ``clock``
        null at full clock; otherwise both clocks, and how many times as long kinds of kernels take, which all times
        contain.
    ``memory``, ``fits``
        null if memory is not predicted (on a CPU). Keys of ``memory`` are of the rank that needs most (``rank``; null
        if all need the same). ``ranks`` has one entry for each distinct rank, ``first_step`` creates the optimizer
        states, and ``rebuild_step`` is the step in which DDP rebuilds its buckets (``step``, counted from 1) and what
        it may reach (null if nothing is rebuilt). If the step does not fit, these peaks are those reached before.
    ``memory.out_of_memory``
        The smallest device memory in which the step fits (``needed_bytes``), how much of that is missing, what a device
        without a limit would have in use (``unlimited_bytes``), and which request is refused: ``step`` (from 1; 0 while
        the model is built), ``phase``, ``operator``, and what it ``holds``.
    ``memory.retries``, ``memory.step_retries``
        Allocator retries of all steps until then, and of each later step, whose time is predicted without them.
    ``what_fits``
        The fitting: what the device has in use apart from activations (``fixed_bytes``), and settings with what they
        need (null if their trace is not stored); null if the step fits.
    ``pipeline``
        null without a pipeline; its ``blocks`` are the repeated blocks of each stage, and its ``bubble_share`` is over
        all ``ranks``. ``breakdown`` and ``kernels`` are of ``shown_rank``.
    ``provenance``
        Shares of kernels' time by source (``exact`` keys, fitted ``curve``, ``extrapolated`` beyond a curve's shapes,
        ``estimated`` without a measurement of the kind, ``roofline``), the share of it, before scaling, that follows
        changed values of the datasheet (``scaled``), shares of ``collectives``, and ``assumptions`` in words.
    """
    memory = prediction.largest_memory
    return {
        "version": REPORT_VERSION,
        "scenario": prediction.scenario.model_dump(mode="json", exclude_none=True),
        "profile": {"name": prediction.profile.name, "device": prediction.profile.device.name},
        "step_time_s": prediction.step_time_s,
        "step_time_interval_s": list(prediction.interval_s),
        "synced_step_time_s": prediction.timeline.synced_step_time_s,
        "throughput_samples_per_s": throughput_samples_per_s(prediction),
        "mfu": mfu(prediction),
        "clock": None if prediction.clock is None else _clock(prediction.clock),
        "memory": None if memory is None else _memory(prediction, memory),
        "fits": prediction.fits,
        "what_fits": None if fitting is None else asdict(fitting),
        "breakdown": prediction.breakdown,
        "pipeline": _pipeline(prediction) if prediction.rank_timelines else None,
        "communication_bytes": prediction.communication_bytes,
        "bottleneck": prediction.bottleneck,
        "provenance": {
            **prediction.provenance,
            "scaled": prediction.scaled_share,
            "collectives": prediction.collective_provenance,
            "assumptions": list(prediction.assumptions),
        },
        "kernels": [
            {
                "key": use.key,
                "kind": use.cost.kind,
                "count": use.count,
                "total_s": use.total_s,
                "source": use.cost.source,
            }
            for use in prediction.kernels
        ],
        "warnings": list(prediction.warnings),
    }


def _clock(clock: Clock) -> dict[str, Any]:
    return {"hz": clock.hz, "full_hz": clock.full_hz, "power_limit_w": clock.limit_w, "time_factors": clock.factors}


def _pipeline(prediction: Prediction) -> dict[str, Any]:
    lists = ("stages", "blocks")
    ranks = [asdict(each) | {name: list(getattr(each, name)) for name in lists} for each in rank_shares(prediction)]
    return {
        "blocks": list(prediction.program.stage_blocks),
        "bubble_share": bubble_share(prediction),
        "shown_rank": prediction.shown_rank,
        "ranks": ranks,
    }


def _memory(prediction: Prediction, memory: MemoryTimeline) -> dict[str, Any]:
    rebuilding, ranks = memory.rebuilding, prediction.rank_memories or (memory,)
    distinct = {id(each): (rank, each) for rank, each in reversed(list(enumerate(ranks)))}
    return {
        "rank": largest_rank(prediction),
        **_rank(memory),
        "allocated_at_peak_bytes": {kind.name.lower(): held for kind, held in memory.peak_kind_bytes.items()},
        "retries": memory.retries,
        "step_retries": memory.step_retries,
        "out_of_memory": None if memory.fits else _out_of_memory(memory),
        "first_step": _peaks(memory.first),
        "rebuild_step": None if rebuilding is None else {"step": memory.rebuild_step, **_peaks(rebuilding)},
        "ranks": [{"rank": rank, **_rank(each)} for rank, each in sorted(distinct.values(), key=lambda row: row[0])],
    }


def _out_of_memory(memory: MemoryTimeline) -> dict[str, Any]:
    refused, place = memory.out_of_memory, memory.place
    assert refused is not None
    assert place is not None
    return {
        "needed_bytes": memory.needed_bytes,
        "missing_bytes": memory.missing_bytes,
        "unlimited_bytes": memory.unlimited and memory.unlimited.device_bytes,
        **asdict(place),
        "holds": place.holds.name.lower(),
        "requested_bytes": refused.requested_bytes,
        "allocated_bytes": refused.allocated_bytes,
        "reserved_bytes": refused.reserved_bytes,
        "limit_bytes": refused.limit_bytes,
    }


def _rank(memory: MemoryTimeline) -> dict[str, int]:
    return {**_peaks(memory.steady), "device_bytes": memory.device_bytes}


def _peaks(step: StepMemory) -> dict[str, int]:
    return {"peak_allocated_bytes": step.peak_allocated_bytes, "peak_reserved_bytes": step.peak_reserved_bytes}
