"""A device of two streams and the ranks that share it, for loops that run at the same time. Nothing takes any time."""

from __future__ import annotations

import contextlib

from calibrate.interconnect.concurrent_loops import LoopTimer


class Gpu:
    """Two streams on which calls end after what they take: ``slow`` times as long while the other stream is busy.

    Both loops are queued before either runs, so what a call takes is known when the whole queue is: marks are positions
    in it, and asking for the time between two runs it.
    """

    def __init__(self, slow=1.0, late=0):
        self.slow, self.late = slow, late
        self.queues, self.current, self.drains, self.emptied = {"main": [], "side": []}, "main", 0, 0
        self.held_aside_s = []

    def empty_cache(self):
        self.emptied += 1

    def hold(self, seconds):
        """Begin a new queue; on the side stream, keep it busy."""
        if self.current == "main":
            self.queues = {"main": [], "side": []}
        else:
            self.held_aside_s.append(seconds)
            self.call(seconds)()

    def drain(self):
        self.drains += 1

    def mark(self):
        return self.current, len(self.queues[self.current])

    def passed(self, mark):
        self.late -= 1
        return self.late >= 0

    def delay_side(self, mark):
        """Both begin when the device goes on."""

    def between_s(self, first, last):
        ends = self.run()
        return ends[last[0]][last[1]] - ends[first[0]][first[1]]

    def run(self):
        ends = {name: [0.0] for name in self.queues}
        left = {name: list(queue) for name, queue in self.queues.items()}
        now_s = 0.0
        while any(left.values()):
            busy = [name for name in left if left[name]]
            slow = self.slow if len(busy) == 2 else 1.0
            step_s = min(left[name][0] for name in busy)
            now_s += step_s * slow
            for name in busy:
                left[name][0] -= step_s
                if left[name][0] < 1e-12:
                    left[name].pop(0)
                    ends[name].append(now_s)
        return ends

    def call(self, seconds):
        return lambda: self.queues[self.current].append(seconds)

    def on_main(self):
        return self._on("main")

    def on_side(self):
        return self._on("side")

    @contextlib.contextmanager
    def _on(self, name):
        before, self.current = self.current, name
        yield
        self.current = before


class Ranks:
    """Two ranks, of which the other adds nothing: sums and largest values are this rank's own.

    collectives_s: seconds of collectives by their bytes.
    """

    size = 2

    def __init__(self, gpu, collectives_s=None, rank=0):
        self.gpu, self.collectives_s, self.rank = gpu, collectives_s or {}, rank

    def meet(self):
        """The other is always there."""

    def reduced(self, values, largest=False):
        return list(values) if largest else self.summed(list(values))

    def summed(self, values):
        return values

    def collective(self, wanted):
        return self.gpu.call(self.collectives_s[wanted.size_bytes])


def timer(gpu, ranks=None, repeats=3):
    return LoopTimer(gpu, ranks or Ranks(gpu), repeats)
