"""A fixed piece of host work by which the speed of the host is known at any moment, and times in its measure.

Cores of a virtual machine are shared: the same code may take twice as long a few seconds later. Whatever is timed is
therefore divided by reference runs right before and after it, and all times of one profile are those of a host on which
one reference run takes ``reference_s``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from calibrate.timing.samples import relative_spread
from perfmodel.hardware.interconnect import REFERENCE
from perfmodel.hardware.profile import HostRecord

WARM_UP, LEAD_IN = 5, 2
RUNS = 5  # in a row make one sample of the speed: their median
FEW_LAYERS = 4
ROWS, LENGTH, WIDTH, HEADS = 2, 16, 64, 4


def synchronize(device: str) -> None:
    """Wait until the device has nothing left to do."""
    if device == "cuda":
        torch.cuda.synchronize()


class HostReference:
    """Forward, backward and optimizer step of one small transformer layer, and samples in relation to it.

    sample_s = seconds * reference_s / mean(reference run before, reference run after)

    Parameters
    ----------
    device : str
        ``cuda`` or ``cpu``.
    reference_s : float, optional
        Seconds of a run at the speed that samples are brought to; by default, what a run takes now.
    clock : callable
        Returns the host's time in seconds.
    work : callable, optional
        Does the work of one run; by default the layer's step.
    """

    def __init__(
        self,
        device: str,
        reference_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        work: Callable[[], None] | None = None,
    ) -> None:
        self._device = device
        self._clock = clock
        self._work = work or self._step
        self._layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True, device=device)
        self._x = torch.randn(ROWS, LENGTH, WIDTH, device=device, requires_grad=True)
        self._gradient = torch.randn(ROWS, LENGTH, WIDTH, device=device)
        self._optimizer = torch.optim.AdamW(self._layer.parameters(), lr=0.0, foreach=True)
        self.runs_s: list[float] = []
        self._last_s: float | None = None
        self._waiting: list[tuple[list[float], float]] = []
        self.run(WARM_UP)
        self.reference_s = self.sample() if reference_s is None else reference_s

    def run(self, runs: int = 1) -> list[float]:
        """Return host seconds of so many runs, the device being idle at the start of each.

        Others come first: after other code a run may take twice as long, until its own is back in the caches.
        """
        found: list[float] = []
        with torch.enable_grad(), torch.autocast(self._device, enabled=False):
            for _ in range(LEAD_IN + runs):
                synchronize(self._device)
                began_s = self._clock()
                self._work()
                found.append(self._clock() - began_s)
        return found[LEAD_IN:]

    def sample(self) -> float:
        """Return the median seconds of a few runs."""
        return statistics.median(self.run(RUNS))

    def disturb(self, layers: int = FEW_LAYERS) -> None:
        """Run forward and backward of so many layers, as a step does other work before code that it runs once.

        Timed repeatedly by itself, such code is 10 to 20 % faster than in a step, whose other code pushes it and its
        data out of the processor's caches.
        """
        with torch.enable_grad(), torch.autocast(self._device, enabled=False):
            for _ in range(layers):
                self._forward_and_backward()

    def beat(self) -> None:
        """Run once, and convert what was noted since the run before."""
        (now_s,) = self.run()
        self.runs_s.append(now_s)
        for samples_s, seconds in self._waiting:
            samples_s.append(seconds * self.reference_s / statistics.fmean((self._last_s or now_s, now_s)))
        self._waiting = []
        self._last_s = now_s

    def note(self, samples_s: list[float], seconds: float) -> None:
        """Append ``seconds`` to ``samples_s`` at the next beat, at the reference's speed; they were timed since the
        last.
        """
        self._waiting.append((samples_s, seconds))

    def record(self) -> HostRecord:
        """Return the record of all beats: their median, and how far the host's speed wandered."""
        return HostRecord(time_s=statistics.median(self.runs_s), spread=wander(self.runs_s), samples=len(self.runs_s))

    def _step(self) -> None:
        self._forward_and_backward()
        self._optimizer.step()

    def _forward_and_backward(self) -> None:
        self._layer.zero_grad()
        self._layer(self._x).backward(self._gradient)


def wander(runs_s: Sequence[float]) -> float:
    """Spread of medians of ``RUNS`` runs in a row each, which a single run that was interrupted does not move.

    >>> wander([1.0, 1.0, 9.0, 1.0, 1.0] + [3.0] * 5 + [2.0] * 5)
    0.5
    """
    groups = [runs_s[start : start + RUNS] for start in range(0, len(runs_s), RUNS)]
    return relative_spread([statistics.median(group) for group in groups])


def at_speed(records: dict[str, HostRecord], factor: float) -> dict[str, HostRecord]:
    """Return the records of a host that takes ``factor`` times as long."""
    return {key: record.model_copy(update={"time_s": record.time_s * factor}) for key, record in records.items()}


def with_general(before: dict[str, HostRecord], general: dict[str, HostRecord]) -> dict[str, HostRecord]:
    """General records and, at their speed, those of scenarios that were measured before.

    >>> def took(time_s): return HostRecord(time_s=time_s)
    >>> found = with_general({"reference": took(1.0), "own": took(3.0)}, {"reference": took(2.0), "call": took(1.0)})
    >>> {key: record.time_s for key, record in found.items()}
    {'own': 6.0, 'reference': 2.0, 'call': 1.0}
    """
    others = {key: record for key, record in before.items() if key not in general}
    if REFERENCE in before and REFERENCE in general:
        others = at_speed(others, general[REFERENCE].time_s / before[REFERENCE].time_s)
    return others | general
