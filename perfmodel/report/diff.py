"""Where a prediction and a real profiler trace differ: operator by operator, summed up by class.

The two operator sequences are aligned by name (longest matching blocks), so an operator that only one of them has is
named as such and does not shift the rest. The rows add up to the difference of the step times.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from perfmodel.errors import PerfModelError
from perfmodel.report.operators import use_by_operation
from perfmodel.report.pipeline_ranks import of_rank
from perfmodel.report.profiler_trace import RecordedStep, load_step
from perfmodel.simulate.prediction import Prediction

WAITING = "device waits"
WAITING_OR_NCCL = "device waits, or communicates alone"

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
    """kinds: largest difference first, the last row being the time in which the device waits. operators: the same by
    operator name. Both sum up to predicted_step_s - measured_step_s. on_device: whether the trace has kernels of a
    device, or a CPU's operators. rank: of a pipeline, whose step it is; None of others, whose ranks run alike.
    """

    predicted_step_s: float
    measured_step_s: float
    kinds: tuple[DiffRow, ...]
    operators: tuple[DiffRow, ...]
    on_device: bool
    rank: int | None = None

    @property
    def difference_s(self) -> float:
        return self.predicted_step_s - self.measured_step_s


@dataclass(frozen=True)
class _PredictedOperator:
    name: str
    kind: str
    busy_s: float


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
    prediction = prediction if rank is None else of_rank(prediction, rank)
    predicted = _predicted_operators(prediction)
    kind_of = {operator.name: operator.kind for operator in predicted}
    aligned = _aligned(predicted, measured)
    by_kind = _rows((kind_of.get(name, name), left_s, right_s) for name, left_s, right_s in aligned)
    by_name = _rows(aligned)
    waiting = DiffRow(
        WAITING_OR_NCCL if measured.communicates or prediction.timeline.communications else WAITING,
        predicted_s=prediction.step_time_s - sum(row.predicted_s for row in by_kind),
        measured_s=measured.step_s - sum(row.measured_s for row in by_kind),
    )
    rows = ((*by_kind, waiting), (*by_name, waiting))
    return Diff(prediction.step_time_s, measured.step_s, *rows, measured.on_device, rank)


def _rank(prediction: Prediction, measured: RecordedStep, path: Path) -> int | None:
    """Of a pipeline, that whose step was recorded."""
    ranks = len(prediction.rank_timelines)
    if ranks and (measured.rank is None or not 0 <= measured.rank < ranks):
        raise PerfModelError(
            f"{path}: a trace of a pipeline must name its rank, from 0 to {ranks - 1}, under distributedInfo (got "
            f"{'none' if measured.rank is None else measured.rank}). Record one while torch.distributed is in use."
        )
    return measured.rank if ranks else None


def _predicted_operators(prediction: Prediction) -> list[_PredictedOperator]:
    timeline, operations = prediction.timeline, prediction.program.operations
    uses = use_by_operation(prediction)
    durations_s = (timeline.end_s - timeline.start_s).tolist()
    return [
        _PredictedOperator(operations[operation].base_name, uses[operation].cost.kind, duration_s)
        for operation, duration_s in zip(timeline.operation.tolist(), durations_s, strict=True)
    ]


def _aligned(predicted: list[_PredictedOperator], measured: RecordedStep) -> list[AlignedCall]:
    left, right = predicted, measured.operators
    matcher = SequenceMatcher(None, [op.name for op in left], [op.name for op in right], autojunk=False)
    pairs: list[AlignedCall] = []
    for tag, left_start, left_stop, right_start, right_stop in matcher.get_opcodes():
        if tag == "equal":
            both = zip(left[left_start:left_stop], right[right_start:right_stop], strict=True)
            pairs += [(mine.name, mine.busy_s, theirs.busy_s) for mine, theirs in both]
        else:
            pairs += [(mine.name, mine.busy_s, None) for mine in left[left_start:left_stop]]
            pairs += [(theirs.name, None, theirs.busy_s) for theirs in right[right_start:right_stop]]
    return pairs


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
