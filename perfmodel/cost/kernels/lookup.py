"""Seconds of operator calls on the device: exact key, else fitted curve, else roofline, and always said which."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

from perfmodel.cost.kernels.classify import classify
from perfmodel.cost.kernels.compound import kernels_of
from perfmodel.cost.kernels.curves import CurveTime, predict_times_s
from perfmodel.cost.kernels.dependent_steps import dependent_steps_s
from perfmodel.cost.kernels.estimates import FACTORS, factor_spread
from perfmodel.cost.kernels.kernel_cost import CurveSource, KernelCost, Source
from perfmodel.cost.kernels.roofline import ROOFLINE_SPREAD, roofline_time_s
from perfmodel.cost.kernels.scaling import scaled_cost
from perfmodel.cost.kernels.torch_kernels import optimizer_launches
from perfmodel.cost.kernels.work import arithmetic_kind, footprint_bytes, least_bytes, physical_flops
from perfmodel.cost.l2_cache import held_share
from perfmodel.cost.transfers import TransferCost, has_transfers, pinned_copy, transfer_cost
from perfmodel.derived import Derived
from perfmodel.hardware.profile import Device, KernelRecord, Profile
from perfmodel.trace.kernel_key import kernel_key
from perfmodel.trace.operation import Operation

WORSE: tuple[CurveSource, ...] = ("curve", "extrapolated", "estimated")
Known = dict[Operation, KernelCost]
_COSTS = Derived[dict[tuple[bool, bool], Known]]()  # of profiles, by TF32 and exactness


def kernel_costs(
    operations: Sequence[Operation], profile: Profile, matmul_tf32: bool, exact: bool = True
) -> list[KernelCost]:
    """Return what one call of each operation costs; remembered as long as the profile lives.

    Parameters
    ----------
    matmul_tf32
        Whether float32 GEMMs may use TF32.
    exact
        Use times that were measured for a scenario. Without, only what the general grid tells: its own keys, where one
        coincides, and the curves fitted to it.

    Raises
    ------
    PerfModelError
        If neither a measured key, a curve nor a datasheet peak covers an operation.
    """
    known = _COSTS.of(profile, dict).setdefault((matmul_tf32, exact), {})
    missing = list(dict.fromkeys(operation for operation in operations if operation not in known))
    if missing:
        known.update(zip(missing, _costs(missing, profile, matmul_tf32, exact), strict=True))
    return [known[operation] for operation in operations]


def _costs(operations: list[Operation], profile: Profile, matmul_tf32: bool, exact: bool) -> list[KernelCost]:
    """Return costs on the device that was measured, scaled where the profile has another datasheet."""
    if profile.as_measured is None:
        return _work_out(operations, profile, matmul_tf32, exact)
    measured = kernel_costs(operations, profile.as_measured, matmul_tf32, exact)
    return [
        scaled_cost(cost, operation, profile.as_measured, profile, matmul_tf32)
        for cost, operation in zip(measured, operations, strict=True)
    ]


def _work_out(operations: list[Operation], profile: Profile, matmul_tf32: bool, exact: bool) -> list[KernelCost]:
    records = [_record(operation, profile, matmul_tf32, exact) for operation in operations]
    unmeasured = [
        op
        for op, record in zip(operations, records, strict=True)
        if op.runs_on_device and record is None and _copied(op, profile) is None
    ]
    predicted = _predicted(unmeasured, profile, matmul_tf32)
    return [
        _cost(operation, record, predicted.get(operation), profile, matmul_tf32)
        for operation, record in zip(operations, records, strict=True)
    ]


def _predicted(operations: list[Operation], profile: Profile, matmul_tf32: bool) -> dict[Operation, CurveTime]:
    """Return times by curves, or by the kind of operator where it is known to be slow; times of several kernels are
    added.
    """
    kernels = {operation: kernels_of(operation) for operation in operations}
    distinct = list(dict.fromkeys(chain.from_iterable(kernels.values())))
    times = predict_times_s(distinct, profile.device, profile.curves, matmul_tf32)
    found = dict(zip(distinct, times, strict=True))
    return {
        operation: time
        for operation, calls in kernels.items()
        if (time := _together([found[call] or _factorisation(call, profile.device) for call in calls])) is not None
    }


def _factorisation(operation: Operation, device: Device) -> CurveTime | None:
    if classify(operation) != "linear_algebra" or not (time_s := dependent_steps_s(operation, device)):
        return None
    return CurveTime(time_s, factor_spread("linear_algebra", device), "estimated")


def _together(times: Sequence[CurveTime | None]) -> CurveTime | None:
    """Return the time of kernels one after the other, with the source of the worst known; None if one is not known."""
    known = [time for time in times if time is not None]
    if len(known) < len(times):
        return None
    if len(known) == 1:
        return known[0]
    time_s = sum(each.time_s for each in known)
    spread = math.hypot(*(each.time_s * each.spread for each in known)) / time_s
    return CurveTime(time_s, spread, max((each.source for each in known), key=WORSE.index))


def _record(operation: Operation, profile: Profile, matmul_tf32: bool, exact: bool) -> KernelRecord | None:
    """Return the measurement under the call's own key, if it has a time and may be used."""
    if not operation.runs_on_device:
        return None
    record = profile.kernels.get(kernel_key(operation, matmul_tf32))
    if record is None or record.time_s is None or not (exact or record.origin == "grid"):
        return None
    return record


def _cost(
    operation: Operation,
    record: KernelRecord | None,
    predicted: CurveTime | None,
    profile: Profile,
    matmul_tf32: bool,
) -> KernelCost:
    kind = classify(operation)
    source: Source
    if not operation.runs_on_device:
        return KernelCost(0.0, 0.0, "none", kind, 0.0, 0.0, "fp32", 0, 0.0)
    copied = _copied(operation, profile)
    if record is None and copied is not None:
        return KernelCost(
            copied.time_s, copied.spread, copied.source, kind, 0.0, float(operation.outputs[0].bytes), "fp32", 1,
            copied.time_s,
        )  # fmt: skip
    if record is not None and record.time_s is not None:
        time_s, spread, source = record.time_s, record.spread, "exact"
    elif predicted is not None:
        time_s, spread, source = predicted
    else:
        time_s, spread, source = roofline_time_s(operation, profile.device, matmul_tf32), ROOFLINE_SPREAD, "roofline"
        if kind in FACTORS:
            time_s += dependent_steps_s(operation, profile.device)
            spread, source = factor_spread(kind, profile.device), "estimated"
    kernels = record.kernels if record is not None and record.kernels is not None else _launches(operation, kind)
    return KernelCost(
        time_s, spread, source, kind, physical_flops(operation), least_bytes(operation),
        arithmetic_kind(operation, matmul_tf32), kernels, _cold_time_s(operation, time_s, record, source, profile),
    )  # fmt: skip


def _copied(operation: Operation, profile: Profile) -> TransferCost | None:
    """Return what a copy engine, which no cache precedes, takes for a pinned copy; None if that was not measured."""
    direction = pinned_copy(operation) if operation.runs_on_device else None
    if direction is None or not has_transfers(direction, "pinned", profile):
        return None
    return transfer_cost(direction, "pinned", operation.outputs[0].bytes, profile)


def _cold_time_s(
    operation: Operation, time_s: float, record: KernelRecord | None, source: Source, profile: Profile
) -> float:
    """Return the seconds of a call that finds nothing in the cache: as measured, and never below the warm time.

    Where they were not measured: t + hits x (what a miss adds for a byte), if that is known. hits: bytes that a
    repeated call finds in the cache. A roofline takes all bytes from memory already.
    """
    if record is not None and record.cold_time_s is not None:
        return max(record.cold_time_s, time_s)
    miss_s_per_byte, capacity_bytes = profile.cache.miss_s_per_byte, profile.cache_capacity_bytes
    if source == "roofline" or miss_s_per_byte is None or capacity_bytes <= 0:
        return time_s
    hits = least_bytes(operation) * float(held_share(footprint_bytes(operation), capacity_bytes))
    return time_s + hits * miss_s_per_byte


# Device launches of one call where they were not counted, by class; what is not here launches one kernel.
_LAUNCHES = {"convolution_backward": 2, "embedding_backward": 4, "attention_backward": 3}


def _launches(operation: Operation, kind: str) -> int:
    if kind == "optimizer":
        return max(len(optimizer_launches(operation)), 1)
    return _LAUNCHES.get(kind, len(kernels_of(operation)))
