"""The program of each rank of a pipeline: forwards and backwards of its stages in the schedule's order, messages
between them, and at the end the scaling of gradients and the optimizer.

A batch of messages is one group of NCCL's, on the stream of the pipeline's communicator. A message posted alone has the
stream of a communicator of the two ranks, which both directions share. Either waits for what the compute stream was
given so far, and the compute stream waits for it where torch waits for its work.

Under data parallelism there are several such pipelines. Rank r of p x d ranks has the stages of rank r mod p of a
pipeline; the d ranks that have the same ones reduce gradients over a communicator of theirs, with one
DistributedDataParallel around each stage. torch runs all forwards of a stage, and all its backwards but the last,
under no_sync, and has the last one's gradients reduced, to which those of the others were added.

Sources: torch/distributed/pipelining/schedules.py, stage.py (``forward_maybe_with_nosync``,
``backward_maybe_with_nosync``), torch/distributed/distributed_c10d.py (``batch_isend_irecv``), ProcessGroupNCCL.cpp
(``pointToPoint``, ``endCoalescing``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from perfmodel.hardware import host_calls
from perfmodel.program.builder import COMMUNICATION, ProgramBuilder
from perfmodel.program.pipeline import schedules
from perfmodel.program.pipeline.schedules import Action, Await, Compute, Post
from perfmodel.program.pipeline.storages import in_flight, with_all_inputs
from perfmodel.program.program import (
    COLLECTIVE,
    HOST,
    PIPELINE,
    RECORD,
    REPLICATE,
    WAIT,
    Collective,
    Insertion,
    Instruction,
    Members,
    Message,
    PhaseRun,
    Program,
)
from perfmodel.program.size import within_limits
from perfmodel.program.strategies.ddp import WrappedModule, buffer_sizes, ddp
from perfmodel.scenario.scenario import Scenario
from perfmodel.scenario.stage_split import blocks_of_stages, pipeline_of
from perfmodel.trace.join import join
from perfmodel.trace.operation import TensorSpec
from perfmodel.trace.optimizer_share import with_optimizer
from perfmodel.trace.phases import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, OPTIMIZER, SCALE, ZERO_GRAD
from perfmodel.trace.store import get_optimizer_trace, get_stage_trace
from perfmodel.trace.trace import EventKind, Segment, Trace

PHASES = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD_INPUT, "W": BACKWARD_WEIGHT}


def pipeline_programs(scenario: Scenario, batches_all: bool) -> tuple[Program, ...]:
    """Return the program of each rank of one pipeline, in order; other replicas run the same.

    Parameters
    ----------
    scenario : Scenario
        With ``parallelism.pp``.
    batches_all : bool
        Whether messages are posted as torch before 2.12 does, see :mod:`perfmodel.program.pipeline.schedules`.

    Raises
    ------
    PerfModelError
        If the schedule cannot run so, or a trace is not at hand and cannot be made.
    """
    actions_of_ranks = _actions(scenario, batches_all)
    return within_limits(_program(scenario, rank, actions) for rank, actions in enumerate(actions_of_ranks))


class TracedStage(NamedTuple):
    """A stage of the model, traced with its backward whole or split."""

    stage: int
    is_split: bool


def stages_of_ranks(scenario: Scenario) -> list[list[TracedStage]]:
    """Return the traces that each rank of one pipeline takes, in order."""
    return [_traced_stages(actions) for actions in _actions(scenario, batches_all=False)]


def _actions(scenario: Scenario, batches_all: bool) -> tuple[tuple[Action, ...], ...]:
    section = pipeline_of(scenario)
    return schedules.rank_actions(
        section.schedule, section.stages, section.micro_batches, section.virtual_stages, batches_all=batches_all
    )


def _program(scenario: Scenario, rank: int, actions: Sequence[Action]) -> Program:
    traced = _traced_stages(actions)
    micro_batches = pipeline_of(scenario).micro_batches
    traces = [
        with_all_inputs(get_stage_trace(scenario, stage, split=is_split), micro_batches) for stage, is_split in traced
    ]
    stages = [each.stage for each in traced]
    joined, _ = join(traces, [stages.index(stage) for stage in stages])
    if len(set(stages)) > 1:
        joined = with_optimizer(
            joined,
            get_optimizer_trace(scenario, tuple(each.tensor for each in joined.parameters)),
            range(len(joined.parameters)),
        )
    steady, first = (_RankStep(rank, actions, traced, traces, joined, is_first) for is_first in (False, True))
    program = Program(
        joined,
        tuple(steady.runs),
        tuple(first.runs),
        tuple(steady.insertions),
        tuple(first.insertions),
        collectives=tuple(steady.collectives),
        exchanges=tuple(steady.exchanges),
        in_flight=in_flight(joined),
        stage_blocks=blocks_of_stages(scenario),
    )
    section = scenario.parallelism
    if section.dp == 1:
        return program
    builder = ProgramBuilder(program, Members(REPLICATE, section.dp), COMMUNICATION + 1 + pipeline_of(scenario).stages)
    return ddp(builder, scenario, _wrapped(steady, stages, traces))


def _wrapped(step: _RankStep, stages: Sequence[int], traces: Sequence[Trace]) -> list[WrappedModule]:
    """Return each stage as a wrapped module.

    A schedule that splits backwards is refused before: DistributedDataParallel does not see these.
    """
    stops = list(accumulate(len(trace.parameters) for trace in traces))
    return [
        WrappedModule(
            range(stop - len(trace.parameters), stop),
            buffer_sizes(trace),
            tuple(step.forwards[stage]),
            step.last_backward[stage],
            step.last_backward[stage],
            shares_buffers=False,
        )
        for stage, trace, stop in zip(stages, traces, stops, strict=True)
    ]


def _traced_stages(actions: Iterable[Action]) -> list[TracedStage]:
    backwards = (each for each in actions if isinstance(each, Compute) and each.kind in "BW")
    return list(dict.fromkeys(TracedStage(each.stage, each.kind == "W") for each in backwards))


class _RankStep:
    """The runs and insertions of one step of a rank.

    Attributes
    ----------
    runs : list of PhaseRun
    forwards : dict of int to list of int
        Runs, by stage.
    last_backward : dict of int to int
        The run, by stage.
    """

    def __init__(
        self,
        rank: int,
        actions: Sequence[Action],
        traced: Sequence[TracedStage],
        traces: Sequence[Trace],
        joined: Trace,
        is_first: bool,
    ) -> None:
        self._rank, self._traced = rank, {each: number for number, each in enumerate(traced)}
        self._boundaries = {each.stage: trace.boundary for each, trace in zip(traced, traces, strict=True)}
        events = self._events = joined.first if is_first else joined.steady
        counts = [len((trace.first if is_first else trace.steady).segments) for trace in traces]
        starts = [0, *accumulate(counts)]
        self._segments = [events.segments[start : start + count] for start, count in zip(starts, counts, strict=False)]
        backwards = [each for each in actions if isinstance(each, Compute) and each.kind in "BW"]
        self._split = {(each.stage, each.micro_batch) for each in backwards if each.kind == "W"}
        self._has_several = any(each.micro_batch > 0 for each in backwards)
        self._first_backward = {each.stage: each.micro_batch for each in reversed(backwards)}  # which makes gradients
        self.runs: list[PhaseRun] = []
        self.forwards: dict[int, list[int]] = {}
        self.last_backward: dict[int, int] = {}
        self.insertions: list[Insertion] = []
        self.collectives: dict[Collective, int] = {}
        self.exchanges: list[tuple[Message, ...]] = []
        self._pending: list[Instruction] = []
        self._ends: dict[int, list[tuple[int, str]]] = {}  # marks and calls, by post
        self._marks = 0
        self._fill(actions)

    def _fill(self, actions: Sequence[Action]) -> None:
        for stage in dict.fromkeys(each.stage for each in self._traced):
            self._run_once(stage, ZERO_GRAD)
        before: Action | None = None
        for action in actions:
            is_repeat = type(before) is type(action)
            if isinstance(action, Post):
                self._pending += self._post(action, is_repeat)
            elif isinstance(action, Await):
                ends = self._ends.pop(action.number)
                self._pending += [
                    Instruction(WAIT, mark, call=_named(host_calls.wait_for(call), is_repeat)) for mark, call in ends
                ]
            elif isinstance(action, Compute):
                self._compute(action)
            elif self._has_several:  # by whose number torch divides gradients
                self._run_once(action.stage, SCALE)
            before = action
        self._run(PhaseRun(OPTIMIZER, -1, self._segment(next(iter(self._traced)), OPTIMIZER, -1)))

    def _run_once(self, stage: int, phase: str) -> None:
        """Run a once-per-step phase of a stage that may be traced twice, with its backward whole and split.

        What either trace frees in that phase is freed.
        """
        (segment, *others) = (self._segment(each, phase, -1) for each in self._traced if each.stage == stage)
        self._run(PhaseRun(phase, -1, segment, stage))
        rows = [Instruction(EventKind.FREE, storage) for each in others for storage in self._freed_in(each)]
        if rows:
            self.insertions.append(Insertion(len(self.runs) - 1, segment.stop, tuple(rows)))

    def _freed_in(self, segment: Segment) -> list[int]:
        within = slice(segment.start, segment.stop)
        return [int(storage) for storage in self._events.a[within][self._events.kind[within] == EventKind.FREE]]

    def _segment(self, traced: TracedStage, phase: str, micro_batch: int) -> Segment:
        segments = self._segments[self._traced[traced]]
        return next(each for each in segments if (each.phase, each.micro_batch) == (phase, micro_batch))

    def _compute(self, action: Compute) -> None:
        traced = TracedStage(action.stage, (action.stage, action.micro_batch) in self._split)
        traced_micro_batch = 0 if action.micro_batch == self._first_backward[action.stage] else 1
        is_whole = action.kind == "W" and action.stage == 0  # its input has no gradient
        self._pending.append(
            Instruction(HOST, call=host_calls.pipeline_action(PHASES["B" if is_whole else action.kind]))
        )
        if action.kind == "F":
            self.forwards.setdefault(action.stage, []).append(len(self.runs))
        else:
            self.last_backward[action.stage] = len(self.runs)
        phase = PHASES[action.kind]
        segment = self._segment(traced, phase, traced_micro_batch)
        self._run(PhaseRun(phase, action.micro_batch, segment, action.stage))

    def _run(self, run: PhaseRun) -> None:
        """Append a run, with the instructions that are pending before its first event."""
        if self._pending:
            self.insertions.append(Insertion(len(self.runs), run.segment.start, tuple(self._pending)))
            self._pending = []
        self.runs.append(run)

    def _post(self, post: Post, is_repeat: bool) -> list[Instruction]:
        if post.is_batched:
            kind = "exchange" if len({each.is_send for each in post.messages}) == 2 else "send_recv"
            return self._together(
                post.number, post.messages, kind, PIPELINE, COMMUNICATION, host_calls.BATCH, is_repeat
            )
        rows = []
        for each in post.messages:
            pair = f"{PIPELINE} {min(each.peer, self._rank)}-{max(each.peer, self._rank)}"
            call = host_calls.ISEND if each.is_send else host_calls.IRECV
            rows += self._together(
                post.number, (each,), "send_recv", pair, COMMUNICATION + 1 + each.peer, call, is_repeat
            )
        return rows

    def _together(
        self,
        number: int,
        messages: Sequence[schedules.Message],
        kind: str,
        group: str,
        stream: int,
        call: str,
        is_repeat: bool,
    ) -> list[Instruction]:
        """Return the instructions that move these messages together."""
        largest = max((self._tensor(each) for each in messages), key=lambda tensor: tensor.bytes)
        roles = {each.is_send for each in messages}
        role = "send" if roles == {True} else "receive" if roles == {False} else "both"
        collective = Collective(kind, largest.dtype, largest.bytes, 2, group, role)
        index = self.collectives.setdefault(collective, len(self.collectives))
        self.exchanges.append(tuple(Message(_name(each), each.is_send, each.peer) for each in messages))
        start, end = self._marks, self._marks + 1
        self._marks += 2
        self._ends.setdefault(number, []).append((end, call))
        return [
            Instruction(RECORD, start),
            Instruction(WAIT, start, stream=stream),
            Instruction(COLLECTIVE, index, len(self.exchanges), stream=stream, call=_named(call, is_repeat)),
            Instruction(RECORD, end, stream=stream),
        ]

    def _tensor(self, message: schedules.Message) -> TensorSpec:
        boundary = self._boundaries[message.stage]
        assert boundary is not None
        end = {
            ("F", True): boundary.gives,
            ("F", False): boundary.takes,
            ("B", True): boundary.gives_gradient,
            ("B", False): boundary.takes_gradient,
        }[message.kind, message.is_send]
        assert end is not None
        return end.tensor


def _named(call: str, is_repeat: bool) -> str:
    return host_calls.repeated(call) if is_repeat else call


def _name(message: schedules.Message) -> str:
    """Return a name that is the same on both ranks: kind, micro-batch, and the border between stages."""
    is_of_earlier = (message.kind == "F") == message.is_send
    border = message.stage if is_of_earlier else message.stage - 1
    return f"{message.kind}{message.micro_batch} {border}"
