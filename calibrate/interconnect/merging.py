"""A measured interconnect is merged into a profile, where it adds to or replaces what was known of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from calibrate.interconnect.request import Measured, Request
from calibrate.stage_names import GROUP
from perfmodel.cost.piecewise import fit_curves
from perfmodel.hardware.interconnect import (
    MESSAGES,
    CollectiveRecord,
    ContentionRecord,
    Coupling,
    Interconnect,
    Role,
    TransferRecord,
)
from perfmodel.hardware.profile import Profile

Record = TypeVar("Record", CollectiveRecord, TransferRecord)

NORMAL_QUARTILE = 0.6745  # of the standard normal distribution: half of it lies within


def merged(
    profile: Profile, name: str, interconnect: Interconnect, transfers: Mapping[str, TransferRecord] | None = None
) -> Profile:
    """Return the profile with this interconnect and these transfers of the machine.

    What it had before and was not measured again, or not with success, stays.
    """
    before = profile.interconnects.get(name)
    if before is not None:
        records = before.collectives | _better(before.collectives, interconnect.collectives)
        apart = rerun_spread(before.collectives, interconnect.collectives)
        interconnect = interconnect.model_copy(
            update={
                "collectives": records,
                "segments": fit_curves(records),
                "communicator_bytes": before.communicator_bytes | interconnect.communicator_bytes,
                "host": before.host | interconnect.host,
                "contention": before.contention | interconnect.contention,
                "couplings": before.couplings | interconnect.couplings,
                "message_couplings": _by_role(before.message_couplings, interconnect.message_couplings),
                "own_contention": _by_kernel(before.own_contention, interconnect.own_contention),
                "own_couplings": before.own_couplings | interconnect.own_couplings,
                "own_message_couplings": _by_role(before.own_message_couplings, interconnect.own_message_couplings),
                "messages_ahead": interconnect.messages_ahead or before.messages_ahead,
                "rerun_spread": before.rerun_spread if apart is None else apart,
            }
        )
    known = profile.interconnects | {name: interconnect}
    copied = profile.transfers | _better(profile.transfers, transfers or {})
    return profile.model_copy(
        update={"interconnects": known, "interconnect": profile.interconnect or name, "transfers": copied}
    )


def merged_run(profile: Profile, request: Request, found: Measured, only: Sequence[str]) -> Profile:
    """Return the profile with all that a run measured, and how long its stages took.

    Parameters
    ----------
    only : sequence of str
        Stages that were repeated; of others, what the profile has stays. Empty for a run of all.
    """
    name = request.interconnect
    earlier_s = profile.provenance.get("interconnects_s", {})
    stages_s = (earlier_s.get(name, {}) if only else {}) | _asked_s(found, only)
    provenance = profile.provenance | {"interconnects_s": earlier_s | {name: stages_s}}
    update: dict[str, Any] = {"gpus": max(profile.gpus, request.ranks), "provenance": provenance}
    if found.topology is not None and not only:
        update["topology"] = found.topology
    interconnect = repeated(profile.interconnects.get(name), found, only)
    return merged(profile, name, interconnect, found.transfers).model_copy(update=update)


def repeated(before: Interconnect | None, found: Measured, only: Sequence[str]) -> Interconnect:
    """Return what was measured, for single stages under the provenance of the rest and with when they were repeated."""
    now = found.interconnect
    if before is None or not only:
        return now
    again = {stage: {"again_at": now.provenance.get("measured_at")} for stage in only if _has_run(stage, found)}
    kept = ("environment", "nodes", "communicator_bytes")
    return now.model_copy(
        update={name: getattr(before, name) for name in kept} | {"provenance": before.provenance | again}
    )


def has_all(before: Interconnect, now: Interconnect) -> bool:
    """Return whether the collectives were merged before, in which case they are no second run to compare with."""
    return bool(now.collectives) and all(before.collectives.get(key) == now.collectives[key] for key in now.collectives)


def _has_run(stage: str, found: Measured) -> bool:
    """Return whether the stage was measured. Collectives are timed group by group."""
    return any(name.startswith(GROUP) for name in found.stages_s) if stage == "collectives" else stage in found.stages_s


def _asked_s(found: Measured, only: Sequence[str]) -> dict[str, float]:
    """Return the seconds of stages, without those that only connected groups for one that was asked for alone."""
    connects = bool(only) and "collectives" not in only
    return {name: each_s for name, each_s in found.stages_s.items() if not (connects and name.startswith(GROUP))}


def rerun_spread(before: Mapping[str, CollectiveRecord], now: Mapping[str, CollectiveRecord]) -> float | None:
    """Return how far calibrations differ: median |log(now / before)| / (0.6745 sqrt 2) of the collectives that both
    measured, the standard deviation of one if they are normal, which does not feel a stray size; None where there are
    none.

    Messages, which may be measured without the rest, do not count.

    >>> times_s = {"all_reduce 2 float32 8": 1.0, "broadcast 2 float32 8": 2.0}
    >>> rerun_spread(*({key: CollectiveRecord(time_s=value) for key, value in times_s.items()} for _ in range(2)))
    0.0
    """
    known = [key for key in before if key.split()[0] not in MESSAGES]
    pairs = [(before[key].time_s, record.time_s) for key, record in now.items() if key in known]
    logs = [math.log(new_s / old_s) for old_s, new_s in pairs if old_s is not None and new_s is not None]
    return statistics.median(map(abs, logs)) / (NORMAL_QUARTILE * math.sqrt(2)) if logs else None


def _by_role(
    before: Mapping[Role, Mapping[str, Coupling]], now: Mapping[Role, Mapping[str, Coupling]]
) -> dict[Role, dict[str, Coupling]]:
    return {role: {**before.get(role, {}), **now.get(role, {})} for role in {**before, **now}}


def _by_kernel(
    before: Mapping[str, Mapping[str, ContentionRecord]], now: Mapping[str, Mapping[str, ContentionRecord]]
) -> dict[str, dict[str, ContentionRecord]]:
    return {key: {**before.get(key, {}), **now.get(key, {})} for key in {**before, **now}}


def _better(before: Mapping[str, Record], now: Mapping[str, Record]) -> dict[str, Record]:
    """Return what was measured now, without failures at what succeeded before."""
    return {
        key: record
        for key, record in now.items()
        if record.time_s is not None or key not in before or before[key].time_s is None
    }
