"""Differences of a prediction from a real profiler trace: operator by operator, summed up by class.

The two operator sequences, each as the host launched it, are aligned by name (longest matching blocks), so an operator
that only one of them has is named as such and does not shift the rest. The rows add up to the difference of the step
times. A prediction that is compared with its own trace differs nowhere: both sides are in the trace's whole
nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.prediction.prediction import Prediction
from perfmodel.report.operators import use_by_operation
from perfmodel.report.traces.chrome import host_calls, start_and_duration_us
from perfmodel.report.traces.profiler import RecordedStep, load_step
from perfmodel.simulate.timeline import merged
from perfmodel.units import US

WAITING = "device waits"
WAITING_OR_NCCL = "device waits, or communicates alone"
CONCURRENT = "counted twice: streams ran at once"
LEAST_S = 0.5e-9  # traces are written in nanoseconds

# Name, predicted seconds, measured seconds; None on the side that lacks the operator.
AlignedCall = tuple[str, float | None, float | None]


@dataclass
class DiffRow:
    """One class of operators: calls that both sides have and calls of only one, with the seconds of each side."""

    name: str
    matched: int = 0
    only_predicted: int = 0
    only_measured: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0

    @property
    def difference_s(self) -> float:
        """Predicted less measured, to a tenth of a nanosecond: traces are written in nanoseconds."""
        return round(self.predicted_s - self.measured_s, 10) + 0.0  # never -0.0


@dataclass(frozen=True)
class Diff:
    """A prediction and a recorded step, compared operator by operator.

    Both tables add up to predicted_step_s - measured_step_s.

    Attributes
    ----------
    kinds : tuple of DiffRow
        By class of operators, the largest difference first. The last row is the time in which the device waits. The one
        before it, if several streams ran operators at once, holds the seconds (below 0) that the rows above count more
        than once.
    operators : tuple of DiffRow
        The same by operator name.
    on_device : bool
        Whether the trace has kernels of a device; otherwise it has a CPU's operators.
    rank : int or None
        The rank of a pipeline whose step it is; None without a pipeline, where all ranks run the same step.
    is_predicted : bool
        Whether the trace is a prediction of perfmodel's as well.
    """

    predicted_step_s: float
    measured_step_s: float
    kinds: tuple[DiffRow, ...]
    operators: tuple[DiffRow, ...]
    on_device: bool
    rank: int | None = None
    is_predicted: bool = False

    @property
    def difference_s(self) -> float:
        return self.predicted_step_s - self.measured_step_s


@dataclass(frozen=True)
class _PredictedOperator:
    name: str
    kind: str
    start_s: float
    busy_s: float

    @property
    def ran_s(self) -> tuple[float, float]:
        return self.start_s, self.start_s + self.busy_s


def diff_with_trace(prediction: Prediction, path: Path) -> Diff:
    """Align ``prediction`` with the last whole step of the profiler trace in ``path``: of a pipeline that rank's which
    the trace is of.

    Raises
    ------
    PerfModelError
        If the file is not a profiler trace; or, of a pipeline, does not say of which of its ranks it is.

    Notes
    -----
    The profiler slows the host: read the class of the waiting time with that in mind, the kernels' times hold. NCCL's
    kernels are in no class, on either side: what they take alone is in the waiting time.
    """
    names = {op.base_name for each in prediction.by_rank for op in each.program.operations}
    measured = load_step(path, names)
    rank = _rank(prediction, measured, path)
    prediction = prediction.by_rank[rank or 0]
    predicted = _predicted_operators(prediction)
    kind_of = {operator.name: operator.kind for operator in predicted}
    aligned = _aligned(predicted, measured)
    by_kind = _rows((kind_of.get(name, name), left_s, right_s) for name, left_s, right_s in aligned)
    rest = _rest(prediction, predicted, measured)
    rows = ((*by_kind, *rest), (*_rows(aligned), *rest))
    return Diff(prediction.step_time_s, measured.step_s, *rows, measured.on_device, rank, measured.is_predicted)


def _rest(prediction: Prediction, predicted: list[_PredictedOperator], measured: RecordedStep) -> tuple[DiffRow, ...]:
    """Make the rows that complete the operators' to the step: time in which several ran, and time in which none did."""
    covered_s = float(np.sum(np.diff(merged(operator.ran_s for operator in predicted))))
    concurrent = DiffRow(
        CONCURRENT,
        predicted_s=_seconds(covered_s - sum(operator.busy_s for operator in predicted)),
        measured_s=_seconds(measured.covered_s - measured.busy_s),
    )
    waiting = DiffRow(
        WAITING_OR_NCCL if measured.communicates or prediction.timeline.communications else WAITING,
        predicted_s=_seconds(prediction.step_time_s - covered_s),
        measured_s=_seconds(measured.step_s - measured.covered_s),
    )
    return (concurrent, waiting) if concurrent.predicted_s or concurrent.measured_s else (waiting,)


def _seconds(difference_s: float) -> float:
    """A difference of sums, or 0 where it is no more than their rounding."""
    return difference_s if abs(difference_s) > LEAST_S else 0.0


def _rank(prediction: Prediction, measured: RecordedStep, path: Path) -> int | None:
    """Return the rank of a pipeline whose step was recorded."""
    ranks = len(prediction.rank_timelines)
    if ranks and (measured.rank is None or not 0 <= measured.rank < ranks):
        raise PerfModelError(
            f"{path}: a trace of a pipeline must name its rank, from 0 to {ranks - 1}, under distributedInfo (got "
            f"{'none' if measured.rank is None else measured.rank}). Record one while torch.distributed is in use."
        )
    return measured.rank if ranks else None


def _predicted_operators(prediction: Prediction) -> list[_PredictedOperator]:
    """Return operators of all streams in the order in which the host launches them, at the times of their trace."""
    operations, uses = prediction.program.operations, use_by_operation(prediction)
    found = []
    for launched, *_ in host_calls(prediction.timeline):
        start_us, duration_us = start_and_duration_us(launched.start_s, launched.end_s)
        name, kind = operations[launched.operation].base_name, uses[launched.operation].cost.kind
        found.append(_PredictedOperator(name, kind, start_us * US, duration_us * US))
    return found


def _aligned(predicted: list[_PredictedOperator], measured: RecordedStep) -> list[AlignedCall]:
    left, right = [op.name for op in predicted], [op.name for op in measured.operators]
    pairs: list[AlignedCall] = []
    for tag, left_start, left_stop, right_start, right_stop in _blocks(left, right):
        mine, theirs = predicted[left_start:left_stop], measured.operators[right_start:right_stop]
        if tag == "equal":
            pairs += [(one.name, one.busy_s, other.busy_s) for one, other in zip(mine, theirs, strict=True)]
        else:
            pairs += [(one.name, one.busy_s, None) for one in mine]
            pairs += [(other.name, None, other.busy_s) for other in theirs]
    return pairs


def _blocks(left: list[str], right: list[str]) -> Iterator[tuple[str, int, int, int, int]]:
    """Return opcodes like ``SequenceMatcher.get_opcodes``.

    A common beginning is matched without a search, which takes half a minute for a step of 10,000 operators.
    """
    same = next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    yield "equal", 0, same, 0, same
    for tag, *ends in SequenceMatcher(None, left[same:], right[same:], autojunk=False).get_opcodes():
        left_start, left_stop, right_start, right_stop = (same + end for end in ends)
        yield tag, left_start, left_stop, right_start, right_stop


def _rows(aligned: Iterable[AlignedCall]) -> list[DiffRow]:
    rows: dict[str, DiffRow] = {}
    for name, predicted_s, measured_s in aligned:
        row = rows.setdefault(name, DiffRow(name))
        row.matched += predicted_s is not None and measured_s is not None
        row.only_predicted += measured_s is None
        row.only_measured += predicted_s is None
        row.predicted_s += predicted_s or 0.0
        row.measured_s += measured_s or 0.0
    return sorted(rows.values(), key=lambda row: (-abs(row.difference_s), row.name))
