"""Samples, the limits that say when there are enough, and the stopwatch of a CPU.

The device's stopwatch is :mod:`calibrate.timing.cuda_stopwatch`."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from perfmodel.hardware.interconnect import CallRecord


@dataclass(frozen=True)
class Samples:
    """Seconds a call, each value the mean over ``calls`` calls in a row."""

    values_s: tuple[float, ...]
    calls: int

    @property
    def median_s(self) -> float:
        return statistics.median(self.values_s)

    @property
    def spread(self) -> float:
        """Standard deviation over median."""
        return relative_spread(self.values_s)


@dataclass(frozen=True)
class Limits:
    """When to stop. Calls over ``long_call_s`` are repeated less often; ``sample_s``: what one sample should last."""

    fewest: int = 5
    most: int = 9
    fewest_long: int = 3
    most_long: int = 5
    long_call_s: float = 5e-3
    enough_spread: float = 0.005
    enough_s: float = 0.06
    sample_s: float = 3e-3
    most_calls: int = 400


CUDA_LIMITS = Limits()
COLD_LIMITS = Limits(fewest=3, most=5, fewest_long=2, most_long=3, enough_s=0.02, enough_spread=0.01)
CPU_LIMITS = Limits(fewest=5, most=15, enough_spread=0.02, enough_s=0.06, sample_s=2e-3, most_calls=1000)


class Stopwatch(Protocol):
    """Measures how long one call takes."""

    def measure(self, call: Callable[[], object]) -> Samples: ...


def relative_spread(values: Sequence[float]) -> float:
    """Return the standard deviation over the median.

    It is 0 for fewer than two values and where nothing took any time (or, by noise, less).

    >>> relative_spread([1.0, 2.0, 3.0])
    0.5
    """
    median = statistics.median(values) if len(values) > 1 else 0.0
    return statistics.stdev(values) / median if median > 0 else 0.0


def call_record(values_s: Sequence[float]) -> CallRecord:
    """Return the record of a host call: the median of its samples, and their spread."""
    return CallRecord(time_s=statistics.median(values_s), spread=relative_spread(values_s), samples=len(values_s))


def calls_per_sample(call_s: float, limits: Limits) -> int:
    """Return how many calls in a row make one sample.

    >>> calls_per_sample(1e-3, Limits()), calls_per_sample(0.2, Limits()), calls_per_sample(1e-9, Limits())
    (3, 1, 400)
    """
    if call_s <= 0:
        return limits.most_calls
    return min(max(math.ceil(limits.sample_s / call_s - 1e-9), 1), limits.most_calls)


def is_enough(values_s: Sequence[float], spent_s: float, limits: Limits) -> bool:
    """Return whether sampling may stop, for agreement or time spent, but never before the fewest nor after the most
    samples.
    """
    is_long = bool(values_s) and statistics.median(values_s) > limits.long_call_s
    fewest, most = (limits.fewest_long, limits.most_long) if is_long else (limits.fewest, limits.most)
    if len(values_s) < fewest:
        return False
    return len(values_s) >= most or spent_s >= limits.enough_s or relative_spread(values_s) < limits.enough_spread


class CpuStopwatch:
    """Wall clock around calls in a row, after warm-up; on a CPU host and device are one clock."""

    def __init__(self, limits: Limits = CPU_LIMITS, clock: Callable[[], float] = time.perf_counter) -> None:
        self._limits = limits
        self._clock = clock

    def measure(self, call: Callable[[], object]) -> Samples:
        """Return samples of ``call``."""
        call()
        calls = calls_per_sample(self._sample(call, 1), self._limits)
        began_s = self._clock()
        values: list[float] = []
        while not is_enough(values, self._clock() - began_s, self._limits):
            values.append(self._sample(call, calls))
        return Samples(tuple(values), calls)

    def _sample(self, call: Callable[[], object], calls: int) -> float:
        began_s = self._clock()
        for _ in range(calls):
            call()
        return (self._clock() - began_s) / calls
