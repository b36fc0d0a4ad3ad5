"""How far the power limit lowers the clock in a step, and how much longer kernels take there.

Kernel keys are timed in bursts of milliseconds, at full clock. A step goes on for longer, and where it would draw more
than the device may, the device lowers its clock until it draws the limit. Work i, which takes t_i and draws P_i at full
clock, at the ratio r <= 1 of clocks takes and draws

    t_i(r) = t_i (1 + phi (1 / r - 1))
    P_i(r) = P_0 + (P_i - P_0) (1 - phi + phi r^3)

phi: the share of its kind's time that follows the clock, and of its draw; the rest is spent in memory, which has a
clock of its own. r^3: dynamic power is f V^2, with the voltage in proportion to the clock. P_0: an idle device's draw.
The ratio is the root of the step's average draw less the limit,

    sum_i P_i(r) t_i(r) + P_0 (step(r) - sum_i t_i(r)) = limit x step(r)

by bisection over sums by kind: the left side, per second of step, only falls with r. It goes no lower than loops were
seen to go, in proportion to the limit: work that does not follow the clock cannot be held by it. A product (or
attention, or a convolution) that reaches a smaller share of its arithmetic's peak than the measured one draws less
above P_0, in proportion. What works on memory draws the same whatever bytes a second it moves, as measurements have it.

A rank of a pipeline also waits for others, which idles its device. These bubbles hold the other ranks' kernels, which
the same limit slows: they keep their proportion to the time that the rank is busy, b seconds for each second of it,

    step(r) = (1 + b) sum_i t_i(r)          and no less than at full clock

Assumes: what counts is the average over a step; collectives draw no more than an idle device, and a step lasts no
longer than the longest of what device, host and links have to do. Not modelled: bubbles that wait for a host or a link,
which no clock lengthens; and that a rank whose clock is lowered less than others' waits longer for these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perfmodel.cost.contention import operator_kind
from perfmodel.cost.kernels.kernel_cost import KernelCost
from perfmodel.hardware.power import Power, PowerKind
from perfmodel.hardware.profile import Device, Profile
from perfmodel.trace.operation import Operation

EXPONENT = 3
LOWEST = 0.1  # ratio of clocks; no device goes lower
BISECTIONS = 40
PRODUCT = "gemm_bf16"  # the kind that makes a device hot


@dataclass(frozen=True)
class Load:
    """Work of one kind: device seconds at full clock, joules above idle in them, and the kind's clock_share."""

    busy_s: float
    above_idle_j: float
    clock_share: float


@dataclass(frozen=True)
class Clock:
    """A clock that the power limit has lowered.

    Parameters
    ----------
    ratio, full_hz : float
        The clock's ratio to the full one, and the full one.
    limit_w : float
        The power limit.
    factors : dict of str to float
        How many times as long the step's kinds of work take, that first which gains most seconds.
    factor : numpy.ndarray
        The same for each distinct operation.
    term_s : float
        Standard deviation of the device's seconds that comes with the lower clock.
    """

    ratio: float
    full_hz: float
    limit_w: float
    factors: dict[str, float]
    factor: np.ndarray
    term_s: float

    @property
    def hz(self) -> float:
        return self.ratio * self.full_hz


def lengthening(clock_share: float, ratio: float) -> float:
    """Return how many times as long as at full clock work takes: 1 + phi (1 / r - 1).

    >>> lengthening(0.5, 0.8)
    1.125
    """
    return 1 + clock_share * (1 / ratio - 1)


def draw_share(clock_share: float, ratio: float) -> float:
    """Return the share of the draw above idle that is left of that at full clock: 1 - phi + phi r^3.

    >>> draw_share(0.5, 0.5)
    0.5625
    """
    return 1 - clock_share + clock_share * ratio**EXPONENT


def clock_ratio(
    loads: Sequence[Load],
    idle_w: float,
    limit_w: float,
    waits_s: float = 0.0,
    least_s: float = 0.0,
    lowest: float = LOWEST,
    bubbles: float = 0.0,
) -> float:
    """Return the ratio of clocks at which the work draws the limit on average; 1 if it draws no more at full clock.

    Parameters
    ----------
    loads : sequence of Load
        The step's work by kind.
    idle_w, limit_w : float
        What an idle device draws, and the limit.
    waits_s : float
        Seconds in which the device has nothing to do, whatever the clock.
    least_s : float
        What the step takes at least.
    lowest : float
        The least ratio.
    bubbles : float
        Seconds of waiting for other ranks for each second that the device is busy.
    """

    def draws_more(ratio: float) -> bool:
        busy = [(load, lengthening(load.clock_share, ratio)) for load in loads]
        busy_s = sum(load.busy_s * factor for load, factor in busy)
        step_s = max(busy_s * (1 + bubbles) + waits_s, least_s)
        above_j = sum(load.above_idle_j * factor * draw_share(load.clock_share, ratio) for load, factor in busy)
        return above_j > (limit_w - idle_w) * step_s

    if not draws_more(1.0):
        return 1.0
    low, high = lowest, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if draws_more(middle) else (middle, high)
    return low


def power_kind(cost: KernelCost, operation: Operation, kinds: Mapping[str, PowerKind]) -> str | None:
    """The measured kind that draws what the operator does: its cost class, or else what contention is measured for.

    A convolution is a GEMM where convolutions were not measured, and any GEMM one of :data:`PRODUCT` where those
    of its own arithmetic were not.
    """
    is_list = operation.base_name.startswith(("_foreach_", "_fused_"))
    kind = operator_kind(cost, is_list)
    nearest = [cost.kind, kind]
    if kind == "convolution":
        nearest.append(operator_kind(cost._replace(kind="gemm"), is_list))
    if kind == "convolution" or kind.startswith("gemm"):
        nearest.append(PRODUCT)
    return next((name for name in nearest if name in kinds), None)


def above_idle_w(cost: KernelCost, time_s: float, kind: PowerKind, idle_w: float, device: Device) -> float:
    """Return what work that takes ``time_s`` at full clock draws there, less what an idle device draws."""
    most_w = kind.draw_w - idle_w
    if kind.flops_per_s is None or time_s <= 0:
        return most_w
    peaks = device.peak_flops_per_s
    share = cost.flops / time_s / kind.flops_per_s
    if kind.arithmetic in peaks and cost.arithmetic in peaks:
        share *= peaks[kind.arithmetic] / peaks[cost.arithmetic]
    return min(share, 1.0) * most_w


def _lowest_ratio(power: Power, limit_w: float) -> float:
    seen_hz = [loop.clock_hz for reading in power.readings.values() for loop in reading.loops]
    if not seen_hz or power.full_clock_hz is None or power.limit_w is None:
        return LOWEST
    return max(min(seen_hz) / power.full_clock_hz * min(limit_w / power.limit_w, 1.0), LOWEST)


def lowered_clock(
    operations: Sequence[Operation],
    costs: Sequence[KernelCost],
    calls: np.ndarray,
    total_s: np.ndarray,
    profile: Profile,
    waits_s: float = 0.0,
    least_s: float = 0.0,
    bubbles: float = 0.0,
) -> Clock | None:
    """The clock of a step in which the device would draw more than its limit; None where it keeps the full one, or
    nobody measured what work draws.

    Parameters
    ----------
    operations, costs, calls, total_s
        By distinct operation: how often the step runs it, and seconds of all these runs at full clock.
    profile
        Whose power section and power limit count.
    waits_s, least_s, bubbles
        See :func:`clock_ratio`.
    """
    power, limit_w = profile.power, profile.device.power_limit_w
    if not power.kinds or power.full_clock_hz is None or limit_w is None:
        return None
    kinds = [power_kind(cost, operation, power.kinds) for cost, operation in zip(costs, operations, strict=True)]
    busy_s, above_j = dict.fromkeys(power.kinds, 0.0), dict.fromkeys(power.kinds, 0.0)
    for name, cost, times, seconds in zip(kinds, costs, calls.tolist(), total_s.tolist(), strict=True):
        if name is not None and times:
            draw_w = above_idle_w(cost, seconds / times, power.kinds[name], power.idle_w, profile.device)
            busy_s[name] += seconds
            above_j[name] += seconds * draw_w
    loads = [Load(busy_s[name], above_j[name], kind.clock_share) for name, kind in power.kinds.items()]
    rest_s = float(total_s.sum()) - sum(busy_s.values())
    lowest = _lowest_ratio(power, limit_w)
    ratio = clock_ratio(loads, power.idle_w, limit_w, waits_s + rest_s * (1 + bubbles), least_s, lowest, bubbles)
    if ratio == 1:
        return None
    factors = {name: lengthening(kind.clock_share, ratio) for name, kind in power.kinds.items()}
    factor = np.array([1.0 if name is None else factors[name] for name in kinds])
    slowed_s = sum(busy_s[name] * each for name, each in factors.items() if each > 1)
    gained_s = {name: seconds * (factors[name] - 1) for name, seconds in busy_s.items() if seconds > 0}
    present = {name: factors[name] for name in sorted(gained_s, key=lambda name: -gained_s[name])}
    return Clock(ratio, power.full_clock_hz, limit_w, present, factor, power.spread * slowed_s)
