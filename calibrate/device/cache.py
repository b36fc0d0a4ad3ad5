"""What stays in the device's cache, and what misses cost: of data, by sums of vectors over ever more buffers; of code,
by a row of small kernels behind one that passes more bytes than the cache holds. CUDA only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import torch

from calibrate.timing.cuda_stopwatch import CudaStopwatch
from calibrate.timing.samples import Limits, Stopwatch
from perfmodel.hardware.profile import Cache

VECTOR_BYTES = 2 * 2**20
CALL_BYTES = 3 * VECTOR_BYTES  # two vectors are read and one is written
SETS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 20, 24, 32, 40)  # 6 to 250 MB
PLATEAU = 3  # sets at either end that are surely warm or cold
LEAST_DIFFERENCE = 0.05  # relative; below it the cache cannot be seen
LIMITS = Limits(fewest=5, most=9, enough_s=0.1)
FLUSH_BYTES = 256 * 2**20
SHAPE = (64, 64)  # of what small kernels run over
# The linear fall-off of perfmodel.cost.l2_cache is half way down where D + own is so many capacities.
HALF_WAY = 1.5


def measure_cache(stopwatch: CudaStopwatch) -> Cache:
    """Return capacity and costs of misses; capacity and that of data are None where the cache cannot be told from the
    memory behind it.
    """
    quick = stopwatch.limited(LIMITS)
    times_s = [quick.measure(_rotating(_sets(count))).median_s for count in SETS]
    cache = cache_from_ladder([count * CALL_BYTES for count in SETS], times_s, CALL_BYTES)
    return cache.model_copy(update={"code_miss_s": measure_code_miss(quick)})


def measure_code_miss(stopwatch: Stopwatch, device: str = "cuda", flush_bytes: int = FLUSH_BYTES) -> float:
    """Return seconds that a call of one kernel takes more when its code is no longer cached: the mean over different
    ones,

    (flush, touch and row - flush and touch - row) / calls of the row

    flush: reads so many bytes. touch: brings back what the row computes with, and where it writes.

    Assumes: kernels of attention, embeddings and convolutions, which are not in the row, take as much; what is read
    again besides code (translations of addresses) ages alike.
    """
    flush, touch, row = _flush(device, flush_bytes), *_small_kernels(device)
    before_s, after_s, row_s = (
        stopwatch.measure(partial(_all, calls)).median_s for calls in ((flush, touch), (flush, touch, *row), row)
    )
    return max(after_s - before_s - row_s, 0.0) / len(row)


def _all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _flush(device: str, flush_bytes: int) -> Callable[[], object]:
    numbers, total = torch.zeros(flush_bytes // 4, device=device), torch.zeros((), device=device)
    return lambda: torch.sum(numbers, 0, out=total)


def _small_kernels(device: str) -> tuple[Callable[[], object], list[Callable[[], object]]]:
    """Return a call that reads and writes all that the others do, and the others, no two of which share code."""
    numbers = torch.rand((4, *SHAPE), device=device)
    x, y, out, (sums, mean, deviation, *_) = numbers
    normal = torch.ops.aten.native_layer_norm.out
    return numbers.sigmoid_, [
        lambda: torch.add(x, y, out=out),
        lambda: torch.mul(x, y, out=out),
        lambda: torch.div(x, 3.0, out=out),
        lambda: torch.pow(x, 2, out=out),
        lambda: torch.rsqrt(x, out=out),
        lambda: torch.erf(x, out=out),
        lambda: torch.mean(x, -1, out=sums),
        lambda: torch.amax(x, 0, out=sums),
        lambda: torch.softmax(x, -1, out=out),
        lambda: normal(x, SHAPE[1:], None, None, 1e-5, out0=out, out1=mean[:, None], out2=deviation[:, None]),
        lambda: out.copy_(x.t()),
        lambda: torch.mm(x, y, out=out),
    ]


def cache_from_ladder(footprints_bytes: Sequence[float], times_s: Sequence[float], call_bytes: float) -> Cache:
    """Cache of a ladder of times of calls that move ``call_bytes`` each, in turn over so many bytes.

    miss = (cold - warm) / call_bytes, between the medians of both ends; capacity = footprint half way between / 1.5,
    as the model's linear fall-off has it.

    >>> cache_from_ladder([10, 20, 30, 60, 90, 120, 150, 180], [1, 1, 1, 1, 2, 3, 3, 3], 2.0)
    Cache(capacity_bytes=60.0, miss_s_per_byte=1.0, code_miss_s=None)
    """
    warm_s, cold_s = float(np.median(times_s[:PLATEAU])), float(np.median(times_s[-PLATEAU:]))
    if cold_s - warm_s < LEAST_DIFFERENCE * warm_s:
        return Cache()
    half_s = (warm_s + cold_s) / 2
    below = max(i for i, time_s in enumerate(times_s) if time_s < half_s)
    half_bytes = np.interp(half_s, times_s[below : below + 2], footprints_bytes[below : below + 2])
    return Cache(capacity_bytes=float(half_bytes) / HALF_WAY, miss_s_per_byte=(cold_s - warm_s) / call_bytes)


def _sets(count: int) -> list[tuple[torch.Tensor, ...]]:
    elements = VECTOR_BYTES // 4
    return [tuple(torch.randn(elements, device="cuda") for _ in range(3)) for _ in range(count)]


def _rotating(sets: Sequence[tuple[Any, ...]]) -> Callable[[], object]:
    turns = cycle(sets)

    def call() -> object:
        left, right, out = next(turns)
        return torch.add(left, right, out=out)

    return call
