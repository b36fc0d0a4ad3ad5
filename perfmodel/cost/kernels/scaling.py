"""What a kernel that was timed on one device takes on another, which differs in its datasheet alone.

    t' = t + l (R' / R - 1)      l = min(t - f, R / LIMITED)      R = max(FLOPs / (e_c u peak), bytes / (e_m bandwidth))

R, R': the roofline of the device that was measured and of the one that is asked about, without launches
(:func:`perfmodel.cost.kernels.roofline.busy_time_s`). f: the launches, which no peak shortens. l: the seconds that the
roofline limits. A kernel that comes within LIMITED of what well-tuned kernels sustain keeps its efficiency. Of a slower
kernel only as much time follows the roofline as it would take at LIMITED; the rest waits for something that no
datasheet names, and stays.

Bytes that a repeated call finds in the cache, a share h of them, count as CACHED of what the measured memory takes for
them, and never as more than the new memory takes: they do not gain from a faster memory before it is as fast as the
cache. A cache of another capacity holds another share.

Assumes: the same kernels, as many multiprocessors, and efficiencies that a changed peak leaves as they are. How much of
a kernel does follow is not known, whether much of it is scaled or little: the standard deviation of ln t' is
SCALED_SPREAD of |ln(R' / R)|. Source: GEMMs of the same shapes on H100 and B200, whose peaks differ 2.27 times, of
which 90 % (bf16) and 94 % (TF32) are within the 90 % interval that this makes; bf16 ones that took 50 us or more were
1.78 times as fast in the median, those under 20 us 1.19 times. LIMITED and CACHED are choices. Measured by: `python -m
bench.what_if.kernels` (bench/results/what-if-kernels.txt).
"""

from __future__ import annotations

from math import log

from perfmodel.cost.kernels.kernel_cost import KernelCost, ScaledTime, Scaling
from perfmodel.cost.kernels.roofline import LAUNCH_FLOOR_S, busy_time_s
from perfmodel.cost.kernels.work import footprint_bytes
from perfmodel.cost.l2_cache import held_share
from perfmodel.cost.transfers import pinned_copy
from perfmodel.hardware.profile import Profile
from perfmodel.trace.operation import Operation

LIMITED = 0.5  # of the rate that well-tuned kernels sustain
SCALED_SPREAD = 0.3  # standard deviation of the logarithm of a kernel's time, of that of its roofline's ratio
SHORTEST_S = 1e-9  # that a kernel takes without any gap
CACHED = 0.5  # of what a byte from memory takes, one from the cache: a guess, no measurement


def scaled_cost(
    cost: KernelCost, operation: Operation, measured: Profile, asked: Profile, matmul_tf32: bool
) -> KernelCost:
    """The cost of one call on the device that is asked about.

    Parameters
    ----------
    cost : KernelCost
        On the device that was measured.
    operation : Operation
        The call.
    measured, asked : Profile
        Profiles that differ in peaks, in the cache's capacity or in the gap between kernels.
    matmul_tf32 : bool
        Whether float32 GEMMs may use TF32.

    Returns
    -------
    KernelCost
        The same one where nothing changes for the call: where peaks are equal, or something else limits it.
    """
    if cost.kernels == 0 or pinned_copy(operation) is not None:  # nothing runs, or a copy engine does
        return cost
    cost, launches_s = _with_gaps(cost, measured, asked)

    def scaled(time_s: float, was_bytes: float, is_bytes: float) -> tuple[float, ScaledTime]:
        was_s = busy_time_s(operation, measured.device, matmul_tf32, was_bytes)
        is_s = busy_time_s(operation, asked.device, matmul_tf32, is_bytes)
        limited_s = min(max(time_s - launches_s, 0.0), was_s / LIMITED)
        if limited_s <= 0 or is_s == was_s:
            return time_s, ScaledTime(time_s, 0.0, 0.0)
        return time_s + limited_s * (is_s / was_s - 1), ScaledTime(time_s, limited_s, log(is_s / was_s))

    held, will_be_held = (_held(cost, operation, each) for each in (measured, asked))
    was, is_now = (each.device.peak_memory_bytes_per_s or 1.0 for each in (measured, asked))
    was_bytes = _memory_bytes(cost, held, 1.0)
    same_cache_s, _ = scaled(cost.time_s, was_bytes, _memory_bytes(cost, held, is_now / was))
    warm_s, warm = scaled(cost.time_s, was_bytes, _memory_bytes(cost, will_be_held, is_now / was))
    cold_s, cold = scaled(cost.cold_time_s, cost.bytes, cost.bytes)
    cold_s = max(cold_s, same_cache_s)
    warm_s = min(warm_s, cold_s)
    if (warm_s, cold_s) == (cost.time_s, cost.cold_time_s):
        return cost
    return cost._replace(time_s=warm_s, cold_time_s=cold_s, scaling=Scaling(warm, cold))


def before_scaling(cost: KernelCost, mean_s: float) -> ScaledTime:
    """A call that takes ``mean_s`` in a step, as it was before scaling: between warm and cold as its time now is.

    A call that takes longer in a step than alone (a lowered clock, a collective at the same time) is taken to have done
    so before. Where warm and cold ones take the same by now, it was a cold one.

    >>> scaling = Scaling(ScaledTime(4e-6, 0.0, 0.0), ScaledTime(8e-6, 6e-6, -0.7))
    >>> cost = KernelCost(4e-6, 0, "exact", "copy", 0, 1, "fp32", 1, 5e-6, scaling)
    >>> before_scaling(cost, 4.5e-6).following_s
    3e-06
    """
    if cost.scaling is None:
        return ScaledTime(mean_s, 0.0, 0.0)
    range_s = cost.cold_time_s - cost.time_s
    coldness = min(max((mean_s - cost.time_s) / range_s, 0.0), 1.0) if range_s > 0 else 1.0
    times = zip(*cost.scaling, strict=True)
    before_s, following_s, log_ratio = (warm + coldness * (cold - warm) for warm, cold in times)
    longer = mean_s / (cost.time_s + coldness * range_s)
    return ScaledTime(longer * before_s, longer * following_s, log_ratio)


def scaling_spread(cost: KernelCost, mean_s: float) -> float:
    """The relative standard deviation that scaling adds to a call that takes ``mean_s`` in a step."""
    return SCALED_SPREAD * abs(before_scaling(cost, mean_s).log_ratio)


def _with_gaps(cost: KernelCost, measured: Profile, asked: Profile) -> tuple[KernelCost, float]:
    """The cost with the gaps that are asked for, which its times contain, and the seconds of its launches."""
    launches_s, device = cost.kernels * LAUNCH_FLOOR_S[measured.device.kind], measured.device
    longer_s = cost.kernels * (asked.launch.gap_s - measured.launch.gap_s) if device.kind == "cuda" else 0.0
    if longer_s == 0:
        return cost, launches_s
    warm_s, cold_s = (max(time_s + longer_s, SHORTEST_S) for time_s in (cost.time_s, cost.cold_time_s))
    return cost._replace(time_s=warm_s, cold_time_s=cold_s), max(launches_s + longer_s, 0.0)


def _held(cost: KernelCost, operation: Operation, profile: Profile) -> float:
    """The share of its bytes that a repeated call finds in the cache; a roofline takes all from memory."""
    capacity_bytes = profile.cache_capacity_bytes
    if capacity_bytes <= 0 or cost.source == "roofline":
        return 0.0
    return float(held_share(footprint_bytes(operation), capacity_bytes))


def _memory_bytes(cost: KernelCost, held: float, faster: float) -> float:
    """Bytes that a memory so many times as fast takes as long for as a call does that finds a share in the cache."""
    return cost.bytes * (1 - held + held * min(CACHED * faster, 1.0))
