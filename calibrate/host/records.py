"""Turn samples of example calls into host records: what each call, autograd node and module costs by itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from calibrate.host.examples import CLASSES, WIDTH, Tensors
from calibrate.host.reference import HostReference, synchronize
from calibrate.timing.host_stopwatch import OperatorTimes, Seen, Work, autocast, record, timed
from calibrate.timing.samples import relative_spread
from perfmodel.cost.host import CAST, call_key, node_key
from perfmodel.hardware.profile import HostRecord

SAMPLES, AT_ONCE = 60, 12  # so many rounds between two reference runs
PULL = 0.1
NODE_CONSTANTS = ("node", "node launch", "node view", "node cast")


@dataclass
class Case:
    """An example under measurement: copies of its call, what one does, and seconds of one, forward and backward."""

    title: str
    copies: list[Callable[[], Any]]
    seen: Seen
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)


def call_records(cases: list[Case], flags: tuple[str, ...], times: OperatorTimes) -> dict[str, HostRecord]:
    """Return one record a distinct call, and the constants that stand in for calls nobody measured."""
    found: dict[str, HostRecord] = {}
    rows: list[tuple[Work, float]] = []
    for case in cases:
        if not case.seen.calls:
            continue
        *before, (name, work) = case.seen.calls
        earlier_s = sum(_known(found, call_key(*_named(call), flags)) for call in before)
        operators_s = sum(times.total(each.calls) for each in (case.seen.loose, *(work for _, work in case.seen.calls)))
        measured = record(case.forward_s, earlier_s + operators_s)
        found.setdefault(call_key(name, work.operators, flags), measured)
        rows.append((work, measured.time_s))
    return found | _constants(rows, ("call", "launch", "view", "cast"), flags)


def _named(call: tuple[str, Work]) -> tuple[str, list[str]]:
    return call[0], call[1].operators


def _known(found: dict[str, HostRecord], key: str) -> float:
    return found[key].time_s if key in found else 0.0


def _constants(
    rows: list[tuple[Work, float]], names: tuple[str, str, str, str], flags: tuple[str, ...]
) -> dict[str, HostRecord]:
    """seconds = base + a per launch + b per view + c per cast, over all measured calls."""
    rows = [(work, seconds) for work, seconds in rows if seconds > 0]
    counts = np.array([_counts(work) for work, _ in rows], dtype=float).reshape(len(rows), len(names))
    fitted, residual = _fit(counts, np.array([seconds for _, seconds in rows]))
    return {
        " ".join((name, *flags)): HostRecord(time_s=float(value), spread=residual, samples=len(rows))
        for name, value in zip(names, fitted, strict=True)
    }


def _counts(work: Work) -> tuple[int, int, int, int]:
    casts = work.operators.count(CAST)
    return 1, len(work.operators) - casts, work.views, casts


def node_records(cases: list[Case], times: OperatorTimes) -> dict[str, HostRecord]:
    """Return one record a distinct autograd node, and constants for other nodes.

    The backward of a call is the engine's cost of a root and that of each of its nodes; all calls together say which is
    which: non-negative least squares of relative error, drawn towards what a node of so many operators costs on average
    where calls do not tell nodes apart.
    """
    cases = [case for case in cases if case.backward_s]
    seconds = np.array([_net_backward(case, times) for case in cases])
    cases = [case for case, value in zip(cases, seconds, strict=True) if value > 0]
    seconds = seconds[seconds > 0]
    if not cases:  # samples were too few for the noise
        return {name: HostRecord(time_s=0.0) for name in NODE_CONSTANTS}
    nodes: dict[str, Work] = {}
    for case in cases:
        nodes |= {node_key(name, work.operators): work for name, work in case.seen.nodes}
    counts = np.zeros((len(cases), len(nodes)))
    column = {key: index for index, key in enumerate(nodes)}
    for row, case in enumerate(cases):
        for name, work in case.seen.nodes:
            counts[row, column[node_key(name, work.operators)]] += 1
    shapes = np.array([_counts(work) for work in nodes.values()], dtype=float)
    constants, residual = _fit(np.hstack([np.ones((len(cases), 1)), counts @ shapes]), seconds)
    typical = np.maximum(shapes @ constants[1:], constants[1:].max() / 10)
    fitted, _ = _fit(np.hstack([np.ones((len(cases), 1)), counts]), seconds, np.concatenate([[0.0], typical]))
    samples = len(cases[0].backward_s)
    spread = {key: relative_spread(case.backward_s) for case in cases for key in _keys(case)}
    found = {
        key: HostRecord(time_s=float(value), spread=spread[key], samples=samples)
        for key, value in zip(nodes, fitted[1:], strict=True)
    }
    return found | {
        name: HostRecord(time_s=float(value), spread=residual, samples=len(cases))
        for name, value in zip(NODE_CONSTANTS, constants[1:], strict=True)
    }


def _keys(case: Case) -> list[str]:
    return [node_key(name, work.operators) for name, work in case.seen.nodes]


def _fit(counts: np.ndarray, seconds: np.ndarray, towards: np.ndarray | None = None) -> tuple[np.ndarray, float]:
    """Non-negative x with counts @ x = seconds, least squares of relative error; and the median relative error left.

    towards: typical values; unknowns are drawn to them as if by one measurement of relative weight ``PULL``.
    """
    from scipy.optimize import nnls

    if counts.size == 0:  # which makes scipy end the process
        return np.zeros(counts.shape[1]), 0.0
    rows, wanted = counts / seconds[:, None], np.ones(len(seconds))
    if towards is not None:
        pulled = np.flatnonzero(towards)
        pull = np.zeros((len(pulled), counts.shape[1]))
        pull[np.arange(len(pulled)), pulled] = PULL / towards[pulled]
        rows, wanted = np.vstack([rows, pull]), np.concatenate([wanted, np.full(len(pulled), PULL)])
    fitted, _ = nnls(rows, wanted)
    return fitted, float(np.median(np.abs(counts @ fitted / seconds - 1)))


def _net_backward(case: Case, times: OperatorTimes) -> float:
    operators_s = sum(times.total(work.calls) for _, work in case.seen.nodes)
    return statistics.median(case.backward_s) - operators_s


class _Empty(nn.Module):
    """A module that does nothing, so that calling it is all it costs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def module_records(device: str, known: dict[str, HostRecord], reference: HostReference) -> dict[str, HostRecord]:
    """nn.Module.__call__, the Python around a call inside a module, autocast, and Tensor.backward()."""
    tensors = Tensors(device)
    x, indices, empty = tensors.rows(), tensors.integers(CLASSES, 4, 4), _Empty()
    linear, norm = nn.Linear(WIDTH, WIDTH, device=device), nn.LayerNorm(WIDTH, device=device)
    table, dropout = nn.Embedding(CLASSES, WIDTH, device=device), nn.Dropout(0.1)
    pairs: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
        (lambda: linear(x), lambda: functional.linear(x, linear.weight, linear.bias)),
        (lambda: norm(x), lambda: functional.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)),
        (lambda: table(indices), lambda: functional.embedding(indices, table.weight)),
        (lambda: dropout(x), lambda: functional.dropout(x, 0.1, True)),
    ]
    nothing_s, empty_s, autocast_s, *pairs_s = interleaved(
        [lambda: None, lambda: empty(x), lambda: _enter_autocast(device), *(each for pair in pairs for each in pair)],
        device,
        reference,
    )
    medians_s = [statistics.median(seconds) for seconds in pairs_s]
    module = record(empty_s, statistics.median(nothing_s))
    around_s = statistics.median(a - b for a, b in zip(medians_s[::2], medians_s[1::2], strict=True))
    scalar = tensors.leaf()
    (backward_s,) = in_turn([lambda: _time_scalar_backward(scalar, device)], reference)
    one_node_s = _known(known, node_key("ViewBackward0", ())) + _known(known, node_key("AccumulateGrad", ()))
    return {
        "module": module,
        "glue": HostRecord(time_s=max(around_s - module.time_s, 0.0), spread=module.spread, samples=len(pairs)),
        "autocast": record(autocast_s),
        "backward": record(backward_s, one_node_s),
    }


def _enter_autocast(device: str) -> None:
    with autocast(device, True):
        pass


def _time_scalar_backward(leaf: torch.Tensor, device: str) -> float:
    loss = leaf.view(())
    leaf.grad = None
    synchronize(device)
    return timed(loss.backward)[0]


def interleaved(functions: Iterable[Callable[[], Any]], device: str, reference: HostReference) -> list[list[float]]:
    """Return seconds of each function, called in turn."""

    def stopwatch(function: Callable[[], Any]) -> Callable[[], float]:
        def run() -> float:
            synchronize(device)
            return timed(function)[0]

        return run

    return in_turn([stopwatch(function) for function in functions], reference)


def in_turn(stopwatches: list[Callable[[], float]], reference: HostReference) -> list[list[float]]:
    """Return samples of each stopwatch, a few rounds of all of them between two reference runs."""
    found: list[list[float]] = [[] for _ in stopwatches]
    for index in range(SAMPLES):
        if index % AT_ONCE == 0:
            reference.beat()
        for samples_s, stopwatch in zip(found, stopwatches, strict=True):
            reference.note(samples_s, stopwatch())
    reference.beat()
    return found
