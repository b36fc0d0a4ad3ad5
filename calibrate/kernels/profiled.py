"""What single calls launch and allocate, many calls in one profiler session: launches, device time, memory script."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from calibrate.kernels.memory_scripts import recorded_history, run_marked, scripts

LABEL = "perfmodel call "
WAITS = (" Sync", " Wait Event")  # how the profiler names waiting, which is no work


Maker = Callable[[], Callable[[], object]]  # makes a call


class Activity(NamedTuple):
    """The launches and allocations of one call.

    Parameters
    ----------
    launches : int
        Kernels, copies and fills.
    busy_s : float
        Seconds for which the device worked.
    memory_script
        See :class:`~perfmodel.hardware.profile.KernelRecord`.
    """

    launches: int
    busy_s: float
    memory_script: tuple[int, ...]


class Interval(NamedTuple):
    name: str
    on_device: bool
    start_ns: int
    duration_ns: int


def assign(intervals: Iterable[Interval], count: int) -> list[tuple[int, float]]:
    """Launches and busy seconds of each labelled call: the device intervals that start inside its label.

    >>> assign([Interval("perfmodel call 0", False, 100, 50), Interval("kernel", True, 120, 7)], 1)
    [(1, 7e-09)]
    """
    intervals = list(intervals)
    windows: dict[int, tuple[int, int]] = {}
    for item in intervals:
        if item.name.startswith(LABEL) and not item.on_device:
            windows[int(item.name.removeprefix(LABEL))] = (item.start_ns, item.start_ns + item.duration_ns)
    work = sorted((i.start_ns, i.duration_ns) for i in intervals if i.on_device and _is_work(i.name))
    starts = [start for start, _ in work]
    found = []
    for index in range(count):
        start, stop = windows.get(index, (0, 0))
        inside = [duration for _, duration in work[bisect_left(starts, start) : bisect_left(starts, stop)]]
        found.append((len(inside), sum(inside) / 1e9))
    return found


def _is_work(name: str) -> bool:
    return not name.startswith(LABEL) and not name.endswith(WAITS)


def observe(makers: Iterable[Maker], report: Callable[[int], None]) -> list[Activity | None]:
    """Activity of one warm call from each maker; None where making or running it failed (it was measured before).

    Every call runs with the device idle before and after. CUDA only.
    """
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA],
        acc_events=True,  # without, torch warns of events of earlier cycles, of which there are none
    )
    outcomes: list[bool | None] = []
    with recorded_history() as history, profiler:
        for index, maker in enumerate(makers):
            outcomes.append(_run(maker, index))
            report(index)
        entries = history()
    counts = assign(_intervals(profiler), len(outcomes))
    memory = iter(scripts(entries))
    found: list[Activity | None] = []
    for outcome, count in zip(outcomes, counts, strict=True):
        script = () if outcome is None else next(memory)
        found.append(Activity(*count, script) if outcome else None)
    return found


def _run(maker: Maker, index: int) -> bool | None:
    """Return whether the marked call succeeded; None where it never came to one."""
    try:
        call = maker()
        call()
        torch.cuda.synchronize()
    except RuntimeError:
        return None
    try:
        with torch.profiler.record_function(f"{LABEL}{index}"):
            run_marked(call)
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _intervals(profiler: Any) -> Iterator[Interval]:
    for event in profiler.profiler.kineto_results.events():
        on_device = event.device_type() == torch.autograd.DeviceType.CUDA
        yield Interval(event.name(), on_device, event.start_ns(), event.duration_ns())
