"""Host costs by microbenchmark: what :mod:`perfmodel.cost.host` looks up, in general and for one trace."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from calibrate.host_calls import Example, Tensors, examples
from calibrate.host_modules import measure_pieces
from calibrate.host_optimizers import measure_lists, measure_trace_lists
from calibrate.host_records import Case, call_records, module_records, node_records
from calibrate.host_reference import HostReference, at_speed, synchronize
from calibrate.host_timing import (
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
from perfmodel.workload.trace_file import Trace

Progress = Callable[[str, int, int], None]

SWEEPS, ROUNDS, BACKWARD_ROUNDS = 6, 7, 4
GROUP = 12  # calls in turn: a transformer block or two of them
FORWARD_COPIES, BACKWARD_COPIES = 2, 6
FLAGS: tuple[tuple[str, ...], ...] = ((), (AMP,), (NO_GRAD,), (AMP, NO_GRAD))


def measure_host(device: str, progress: Progress | None = None) -> dict[str, HostRecord]:
    """The general host records of this machine, all at the median speed its host had meanwhile (key ``reference``).

    Parameters
    ----------
    device : str
        ``cuda`` or ``cpu``.
    progress : callable, optional
        Told what is being measured, how much is done, and of how much.
    """
    report = progress or (lambda what, done, total: None)
    records: dict[str, HostRecord] = {}
    total = len(FLAGS) * SWEEPS + 2
    with no_collection():
        reference = HostReference(device)
        calls = _Calls(device, reference)
        for index, flags in enumerate(FLAGS):
            what, before = " ".join(("host: calls", *flags)), index * SWEEPS
            records |= calls.measure(flags, lambda done: report(what, before + done, total))  # noqa: B023
        report("host: modules and engine", total - 2, total)
        records |= module_records(device, records, reference)
        report("host: optimizers", total - 1, total)
        records |= measure_lists(device, calls.times, reference)
    report("host", total, total)
    found = reference.record()
    return at_speed(records, found.time_s / reference.reference_s) | {REFERENCE: found}


def measure_host_keys(
    trace: Trace,
    precision: str,
    device: str,
    known: dict[str, HostRecord],
    allow_import: bool = False,
    own_batch: bool = False,
) -> dict[str, HostRecord]:
    """Host records of the trace's own modules and optimizer that are not ``known`` yet.

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
    """Host records of the trace's loops over parameters alone, at the speed of the known reference. For what a rank
    with several parts of a pipeline runs over all of them, the modules of each of which are measured by themselves.
    """
    with no_collection():
        reference = HostReference(device, known[REFERENCE].time_s)
        return measure_trace_lists(trace, device, known, OperatorTimes(device, reference), reference)


class _Calls:
    """Times the example calls."""

    def __init__(self, device: str, reference: HostReference) -> None:
        self.device, self.reference = device, reference
        self.times = OperatorTimes(device, reference)

    def measure(self, flags: tuple[str, ...], progress: Callable[[int], None]) -> dict[str, HostRecord]:
        """Every example, a few different ones in turn, other ones together in every sweep."""
        with_grad = NO_GRAD not in flags
        with torch.set_grad_enabled(with_grad), autocast(self.device, AMP in flags):
            cases = [self._make(order, each, with_grad) for order, each in enumerate(examples())]
            for done in range(SWEEPS):
                progress(done)
                random.shuffle(cases)
                for start in range(0, len(cases), GROUP):
                    self._sample_forward(cases[start : start + GROUP])
                    if with_grad:
                        self._sample_backward(cases[start : start + GROUP])
            cases.sort(key=lambda case: case.order)
            found = call_records(cases, flags, self.times)
            return found if flags else found | node_records(cases, self.times)

    def _make(self, order: int, example: Example, with_grad: bool) -> Case:
        tensors = Tensors(self.device)
        copies = [example.make(tensors) for _ in range(BACKWARD_COPIES)]
        copies[0]()
        return Case(order, example.title, copies, observe(copies[0], with_grad, self.times.is_needed))

    def _sample_forward(self, cases: list[Case]) -> None:
        """The first round brings the code into the caches, as the first block of a model does.

        All rounds lie between two reference runs: these few milliseconds have one speed, and a run in between would
        push the code out again.
        """
        self.reference.beat()
        for index in range(1 + ROUNDS):
            for case in cases:
                synchronize(self.device)
                forward = case.copies[:FORWARD_COPIES]
                seconds, _ = timed(lambda: [call() for call in forward])  # noqa: B023
                if index > 0:
                    self.reference.note(case.forward_s, seconds / len(forward))
        self.reference.beat()

    def _sample_backward(self, cases: list[Case]) -> None:
        """All graphs are made before: a step does not alternate between forward and backward either."""
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
