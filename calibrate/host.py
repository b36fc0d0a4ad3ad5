"""Host costs by microbenchmark: what :mod:`perfmodel.cost.host` looks up, in general and for one trace."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from calibrate.host_calls import Example, Tensors, examples
from calibrate.host_modules import measure_pieces
from calibrate.host_optimizers import measure_lists, measure_trace_lists
from calibrate.host_records import Case, call_records, module_records, node_records
from calibrate.host_timing import (
    OperatorTimes,
    autocast,
    differentiable,
    no_collection,
    observe,
    synchronize,
    time_backward,
    timed,
)
from perfmodel.cost.host import AMP, NO_GRAD
from perfmodel.hardware.profile import HostRecord
from perfmodel.workload.trace_file import Trace

Progress = Callable[[str, int, int], None]

SWEEPS, ROUNDS, BACKWARD_ROUNDS = 6, 7, 4
GROUP = 12  # calls in turn: a transformer block or two of them
FORWARD_COPIES, BACKWARD_COPIES = 2, 6
FLAGS: tuple[tuple[str, ...], ...] = ((), (AMP,), (NO_GRAD,), (AMP, NO_GRAD))


def measure_host(device: str, progress: Progress | None = None) -> dict[str, HostRecord]:
    """The general host records of this machine.

    Parameters
    ----------
    device : str
        ``cuda`` or ``cpu``.
    progress : callable, optional
        Told what is being measured, how much is done, and of how much.
    """
    report = progress or (lambda what, done, total: None)
    records: dict[str, HostRecord] = {}
    times = OperatorTimes(device)
    total = len(FLAGS) * SWEEPS + 2
    with no_collection():
        for index, flags in enumerate(FLAGS):
            what, before = " ".join(("host: calls", *flags)), index * SWEEPS
            records |= _measure_calls(device, flags, times, lambda done: report(what, before + done, total))  # noqa: B023
        report("host: modules and engine", total - 2, total)
        records |= module_records(device, records)
        report("host: optimizers", total - 1, total)
        records |= measure_lists(device, times)
    report("host", total, total)
    return records


def measure_host_keys(
    trace: Trace, device: str, known: dict[str, HostRecord], allow_import: bool = False
) -> dict[str, HostRecord]:
    """Host records of the trace's own modules and optimizer that are not ``known`` yet.

    Each module class that runs as a whole (a transformer block, say) is timed alone, forward and backward, on few
    samples; what contains such modules is timed with them replaced by their results, never the model as a whole.

    Raises
    ------
    PerfModelError
        If the model is a target that may not be imported.
    """
    times = OperatorTimes(device)
    with no_collection():
        found = measure_trace_lists(trace, device, known, times)
        return found | measure_pieces(trace, device, known, times, allow_import)


def _measure_calls(
    device: str, flags: tuple[str, ...], times: OperatorTimes, progress: Callable[[int], None]
) -> dict[str, HostRecord]:
    """Every example, a few different ones in turn, other ones together in every sweep."""
    with_grad = NO_GRAD not in flags
    with torch.set_grad_enabled(with_grad), autocast(device, AMP in flags):
        cases = [_make_case(order, each, device, with_grad, times) for order, each in enumerate(examples())]
        for done in range(SWEEPS):
            progress(done)
            random.shuffle(cases)
            for start in range(0, len(cases), GROUP):
                _sample_forward(cases[start : start + GROUP], device)
                if with_grad:
                    _sample_backward(cases[start : start + GROUP], device)
        cases.sort(key=lambda case: case.order)
        found = call_records(cases, flags, times)
        return found if flags else found | node_records(cases, times)


def _make_case(order: int, example: Example, device: str, with_grad: bool, times: OperatorTimes) -> Case:
    tensors = Tensors(device)
    copies = [example.make(tensors) for _ in range(BACKWARD_COPIES)]
    copies[0]()
    return Case(order, example.title, copies, observe(copies[0], with_grad, times.is_needed))


def _sample_forward(cases: list[Case], device: str) -> None:
    """The first round brings the code into the caches, as the first block of a model does."""
    for index in range(1 + ROUNDS):
        for case in cases:
            synchronize(device)
            forward = case.copies[:FORWARD_COPIES]
            seconds, _ = timed(lambda: [call() for call in forward])  # noqa: B023
            if index > 0:
                case.forward_s.append(seconds / len(forward))


def _sample_backward(cases: list[Case], device: str) -> None:
    """All graphs are made before: a step does not alternate between forward and backward either."""
    cases = [case for case in cases if case.seen.nodes]
    graphs = [
        [[differentiable(call())[0] for call in case.copies] for case in cases] for _ in range(1 + BACKWARD_ROUNDS)
    ]
    for index, roots in enumerate(graphs):
        for case, made in zip(cases, roots, strict=True):
            seconds = time_backward(made, device) / len(case.copies)
            if index > 0:
                case.backward_s.append(seconds)
