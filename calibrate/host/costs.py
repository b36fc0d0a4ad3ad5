"""Host costs by microbenchmark: what :mod:`perfmodel.cost.host` looks up, in general and for one trace."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from calibrate.host.examples import Example, Tensors, examples
from calibrate.host.modules import measure_pieces
from calibrate.host.optimizers import list_prefixes, measure_list, measure_trace_lists
from calibrate.host.pieces import HostPieces
from calibrate.host.records import Case, call_records, module_records, node_records
from calibrate.host.reference import HostReference, at_speed, synchronize
from calibrate.timing.host_stopwatch import (
    OperatorTimes,
    autocast,
    differentiable,
    no_collection,
    observe,
    time_backward,
    timed,
)
from perfmodel.cost.host import AMP, NO_GRAD
from perfmodel.hardware.interconnect import REFERENCE
from perfmodel.hardware.profile import HostRecord
from perfmodel.trace.trace import Trace

Progress = Callable[[str, int, int], None]

OPERATOR_PIECES = 8  # in which the operators of the example calls are timed on a CPU
SWEEPS, ROUNDS, BACKWARD_ROUNDS = 6, 7, 4
GROUP = 12  # calls in turn: a transformer block or two of them
FORWARD_COPIES, BACKWARD_COPIES = 2, 6
FLAGS: tuple[tuple[str, ...], ...] = ((), (AMP,), (NO_GRAD,), (AMP, NO_GRAD))


def measure_host(
    device: str,
    progress: Progress | None = None,
    kept: HostPieces | None = None,
    is_late: Callable[[], bool] = lambda: False,
) -> dict[str, HostRecord]:
    """Return the general host records of this machine, all at the median speed its host had meanwhile (key
    ``reference``).

    Parameters
    ----------
    device : str
        ``cuda`` or ``cpu``.
    progress : callable, optional
        Is given what is being measured, how much is done, and of how much.
    kept : HostPieces, optional
        What an earlier run measured, which is not measured again; it is saved after each piece, and in the end says how
        many were left out.
    is_late : callable, optional
        Asked before each piece: whether no further one is to be begun. Only finished ones give records.
    """
    report = progress or (lambda what, done, total: None)
    kept = HostPieces() if kept is None else kept
    with no_collection():
        reference = kept.reference(device)
        pieces = _pieces(device, reference, kept)
        for done, (name, title, work) in enumerate(pieces):
            if name not in kept.finished and is_late():
                kept.left_out = sum(name not in kept.finished for name, _, _ in pieces)
                break
            report(f"host: {title}", done, len(pieces))
            kept.measure(name, work)
        else:
            report("host", len(pieces), len(pieces))
    if not kept.records:
        return {}
    found = reference.record()
    return at_speed(kept.records, found.time_s / reference.reference_s) | {REFERENCE: found}


def _pieces(device: str, reference: HostReference, kept: HostPieces) -> list[tuple[str, str, Callable[[], None]]]:
    """Name, title and work of each, in the order in which they are measured: later ones need earlier ones' records."""
    calls = ExampleCalls(device, reference, kept)

    def note(measure: Callable[[], dict[str, HostRecord]]) -> Callable[[], None]:
        return lambda: kept.records.update(measure())

    found: list[tuple[str, str, Callable[[], None]]] = []
    for flags in FLAGS:
        title = " ".join(("calls", *flags))
        sweep = partial(calls.sweep, flags)
        found += [(f"{title}, sweep {number + 1}", title, sweep) for number in range(SWEEPS)]
        for number in range(OPERATOR_PIECES if calls.times.is_needed else 0):
            found.append((f"{title}, operators {number + 1}", title, partial(calls.time_operators, flags, number)))
        found.append((f"{title}, records", title, note(partial(calls.records, flags))))
    modules = partial(module_records, device, kept.records, reference)
    found.append(("modules", "modules and engine", note(modules)))
    for prefix in list_prefixes():
        found.append((prefix, prefix, note(partial(measure_list, prefix, device, calls.times, reference))))
    return found


def measure_host_keys(
    trace: Trace,
    precision: str,
    device: str,
    known: dict[str, HostRecord],
    allow_import: bool = False,
    own_batch: bool = False,
) -> dict[str, HostRecord]:
    """Return host records of the trace's own modules and optimizer that are not ``known`` yet.

    Each module class that runs as a whole (a transformer block, say) is timed alone, forward and backward, on few
    samples or on its own batch; what contains such modules is timed with them replaced by their results, never the
    model as a whole. Times are at the speed of the known reference; where there is none, at the speed of the host now,
    which is then a record.

    Raises
    ------
    PerfModelError
        If the model is a target that may not be imported.
    """
    with no_collection():
        reference = HostReference(device, known[REFERENCE].time_s if REFERENCE in known else None)
        times = OperatorTimes(device, reference)
        found = measure_trace_lists(trace, device, known, times, reference)
        found |= measure_pieces(trace, precision, device, known, times, reference, allow_import, own_batch)
        if REFERENCE in known or not found:
            return found
        return found | {REFERENCE: reference.record().model_copy(update={"time_s": reference.reference_s})}


def measure_host_lists(trace: Trace, device: str, known: dict[str, HostRecord]) -> dict[str, HostRecord]:
    """Return host records of the trace's loops over parameters alone, at the speed of the known reference.

    A rank with several stages of a pipeline runs them over all its stages, whose modules are measured stage by stage.
    """
    with no_collection():
        reference = HostReference(device, known[REFERENCE].time_s if REFERENCE in known else None)
        return measure_trace_lists(trace, device, known, OperatorTimes(device, reference), reference)


class ExampleCalls:
    """Times the example calls."""

    def __init__(
        self,
        device: str,
        reference: HostReference,
        kept: HostPieces,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device, self.reference, self.kept, self._clock = device, reference, kept, clock
        self.times = OperatorTimes(device, reference, kept.operators_s, kept.note_operator)
        self._made: tuple[tuple[str, ...], list[Case]] | None = None

    def sweep(self, flags: tuple[str, ...]) -> None:
        """Time every example, a few different ones in turn, other ones together in every sweep."""
        cases = list(self._cases(flags))
        random.shuffle(cases)
        with self._mode(flags):
            for start in range(0, len(cases), GROUP):
                self.sample_forward(cases[start : start + GROUP])
                if NO_GRAD not in flags:
                    self.sample_backward(cases[start : start + GROUP])
        self.kept.keep(" ".join(flags), cases)

    def time_operators(self, flags: tuple[str, ...], number: int) -> None:
        """Time by themselves the operators whose time records leave out, for one in so many examples."""
        cases = self._cases(flags)[number::OPERATOR_PIECES]
        with self._mode(flags):
            for case in cases:
                seen = case.seen
                for work in [seen.loose, *(each for _, each in seen.calls)] if flags else seen.works:
                    self.times.total(work.calls)

    def records(self, flags: tuple[str, ...]) -> dict[str, HostRecord]:
        """Return the records of all sweeps."""
        cases = self._cases(flags)
        with self._mode(flags):
            found = call_records(cases, flags, self.times)
            return found if flags else found | node_records(cases, self.times)

    @contextmanager
    def _mode(self, flags: tuple[str, ...]) -> Iterator[None]:
        with torch.set_grad_enabled(NO_GRAD not in flags), autocast(self.device, AMP in flags):
            yield

    def _cases(self, flags: tuple[str, ...]) -> list[Case]:
        """Return the examples under these flags, with the samples taken so far."""
        if self._made is None or self._made[0] != flags:
            with self._mode(flags):
                cases = [self._make(each, NO_GRAD not in flags) for each in examples()]
            self.kept.restore(" ".join(flags), cases)
            self._made = (flags, cases)
        return self._made[1]

    def _make(self, example: Example, with_grad: bool) -> Case:
        tensors = Tensors(self.device)
        copies = [example.make(tensors) for _ in range(BACKWARD_COPIES)]
        copies[0]()
        return Case(example.title, copies, observe(copies[0], with_grad, self.times.is_needed))

    def sample_forward(self, cases: list[Case]) -> None:
        """Time forward calls. The first round brings the code into the caches, as the first block of a model does.

        All rounds lie between two reference runs: these few milliseconds have one speed, and a run in between would
        push the code out again.
        """
        self.reference.beat()
        for index in range(1 + ROUNDS):
            for case in cases:
                synchronize(self.device)
                forward = case.copies[:FORWARD_COPIES]
                seconds, _ = timed(lambda: [call() for call in forward], self._clock)  # noqa: B023
                if index > 0:
                    self.reference.note(case.forward_s, seconds / len(forward))
        self.reference.beat()

    def sample_backward(self, cases: list[Case]) -> None:
        """Time backward calls. All graphs are made before: a step does not alternate with forward either."""
        cases = [case for case in cases if case.seen.nodes]
        graphs = [
            [[differentiable(call())[0] for call in case.copies] for case in cases] for _ in range(1 + BACKWARD_ROUNDS)
        ]
        self.reference.beat()
        for index, roots in enumerate(graphs):
            for case, made in zip(cases, roots, strict=True):
                seconds = time_backward(made, self.device) / len(case.copies)
                if index > 0:
                    self.reference.note(case.backward_s, seconds)
        self.reference.beat()
