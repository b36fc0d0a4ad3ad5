"""The measuring loop of the host clock: rounds of timed calls, each round between two runs of the host reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from calibrate.host.reference import HostReference, synchronize
from calibrate.timing.host_stopwatch import timed

Timings = Iterable[tuple[str, float]]
HostStopwatch = Callable[[Callable[[], Any]], tuple[float, Any]]


def paired_samples(
    reference: HostReference,
    one_round: Callable[[], Timings],
    *,
    rounds: int,
    warm_up: int,
    as_timed: bool = False,
) -> dict[str, list[float]]:
    """Return samples of everything that a round times, at the speed of the reference.

    Parameters
    ----------
    reference : HostReference
        Runs before every round and after the last.
    one_round : callable
        Begins a round and returns its timings, as pairs of a name and seconds. What it does before it returns comes
        before the reference run; an iterator times after it. A round that lasts long may run the reference between
        its own timings.
    rounds : int
        How many rounds count.
    warm_up : int
        How many rounds come before these.
    as_timed : bool
        Keep seconds as they were timed, for work that does not slow down when the host does.

    Returns
    -------
    dict of str to list of float
        Seconds by name, one sample for each time that a round gave the name.
    """
    samples_s: dict[str, list[float]] = {}
    for index in range(warm_up + rounds):
        timings = one_round()
        reference.beat()
        for name, seconds in timings:
            if index < warm_up:
                continue
            values_s = samples_s.setdefault(name, [])
            if as_timed:
                values_s.append(seconds)
            else:
                reference.note(values_s, seconds)
    reference.beat()
    return samples_s


def timed_after_work(
    call: Callable[[], Any], reference: HostReference, device: str, stopwatch: HostStopwatch = timed
) -> tuple[float, Any]:
    """Time a call as a step makes it: after other work on the host, with the device idle.

    A call that follows itself finds all it needs in the processor's caches, which in a step it does not.

    Returns
    -------
    float
        Host seconds.
    object
        What the call returned.
    """
    reference.disturb(1)
    synchronize(device)
    return stopwatch(call)
