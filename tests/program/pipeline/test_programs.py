"""Programs of ranks: what they run, send and reduce, and that the engine ends each action when a plain execution does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from perfmodel.hardware.profile import Launch
from perfmodel.program.pipeline import programs
from perfmodel.program.pipeline.programs import pipeline_programs
from perfmodel.program.pipeline.schedules import Compute, rank_actions
from perfmodel.program.program import COLLECTIVE, HOST, RECORD, Collective, Instruction, Program
from perfmodel.program.ranks import rank_programs
from perfmodel.scenario.scenario import Scenario
from perfmodel.simulate import engine
from perfmodel.simulate.timed_step import timed_step
from perfmodel.trace.operation import TensorSpec
from perfmodel.trace.trace import (
    Boundary,
    BoundaryTensor,
    EventKind,
    Parameter,
    Storage,
    StorageKind,
    Trace,
)
from tests.builders import ops, program_of, step_events
from tests.program.forms import spelt

from . import executor

FORWARD, BACKWARD, INPUT, WEIGHT, REST = range(5)  # operators of a stage
SIZES, READY = (100, 300), (1, 0)  # elements of a stage's parameters; in which order their gradients are ready
LASTS = {"F": FORWARD, "B": BACKWARD, "I": INPUT, "W": WEIGHT}
HOST_S = 1e-7


def scenario(
    schedule: str, ranks: int, micro_batches: int, virtual_stages: int = 1, dp: int = 1, **parallelism: Any
) -> Scenario:
    section = {"stages": ranks, "schedule": schedule, "micro_batches": micro_batches, "virtual_stages": virtual_stages}
    return Scenario.model_validate(
        {
            "model": {"family": "gpt", "size": "small"},
            "batch": {"size": micro_batches, "sequence_length": 8},
            "parallelism": {"dp": dp, "strategy": "none" if dp == 1 else "ddp", "pp": section, **parallelism},
            "hardware": {"profile": "p", "gpus": ranks * dp, "interconnect": "nvlink"},
        }
    )


def traced_stage(is_first: bool, is_last: bool, split: bool) -> Trace:
    """One operator a phase, and in a whole backward one more behind the gradient of each parameter."""
    phases: list[tuple[str, int, list[Any]]] = [("zero_grad", -1, [])]
    for micro_batch in range(2):
        phases.append(("forward", micro_batch, ops(FORWARD)))
        ready = [row for index in READY for row in ((EventKind.GRAD_READY, index), *ops(REST))]
        whole = [("backward", [*ops(BACKWARD), *ready])]
        backwards = [("backward_input", ops(INPUT)), ("backward_weight", ops(WEIGHT))] if split else whole
        phases += [(phase, micro_batch, rows) for phase, rows in backwards]
    phases += [("scale", -1, []), ("optimizer", -1, ops(REST))]
    trace = program_of(*phases).trace
    message = BoundaryTensor(TensorSpec((4,), (1,), "float32"), (), ())
    boundary = Boundary(
        takes=None if is_first else message,
        gives=None if is_last else message,
        takes_gradient=None if is_last else message,
        gives_gradient=None if is_first else message,
        output=message,
    )
    parameters = tuple(
        Parameter(f"p{index}", TensorSpec.parse(f"float32[{size}]"), index) for index, size in enumerate(SIZES)
    )
    persistent = (
        *(Storage(each.storage, each.tensor.bytes, StorageKind.PARAMETER) for each in parameters),
        Storage(len(parameters), 64, StorageKind.BUFFER),
    )
    return replace(trace, boundary=boundary, parameters=parameters, persistent=persistent)


@pytest.fixture(autouse=True)
def stages(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_stage_trace(asked: Scenario, number: int, split: bool = False) -> Trace:
        section = asked.parallelism.pp
        assert section is not None
        return traced_stage(number == 0, number == section.stages * section.virtual_stages - 1, split)

    def get_optimizer_trace(asked: Scenario, tensors: tuple[TensorSpec, ...]) -> Trace:
        step = step_events(("optimizer", -1, []))
        return replace(traced_stage(True, True, False), operations=(), first=step, steady=step)

    monkeypatch.setattr(programs, "get_stage_trace", get_stage_trace)
    monkeypatch.setattr(programs, "get_optimizer_trace", get_optimizer_trace)
    monkeypatch.setattr(programs, "with_optimizer", _without_optimizer)


def _without_optimizer(trace: Trace, share: Trace, owners: range) -> Trace:
    return trace


def ends(made: tuple[Program, ...], lasts: dict[str, float]) -> list[list[tuple[str, int, float, float]]]:
    """By rank: kind, micro-batch, start and end of each action in the order in which it runs, from idle clocks."""
    works = []
    for program in made:
        operators = program.operations
        seconds = {f"aten.op{operator}.default": lasts[kind] for kind, operator in LASTS.items()}
        duration_s = np.array([seconds.get(each.name, 0.0) for each in operators])
        kernels = (duration_s > 0).astype(int)
        launched = program.instructions.a[program.instructions.launches]
        works.append(
            timed_step(
                program,
                duration_s[launched][kernels[launched] > 0],
                kernels,
                np.full(len(program.instructions.kind), HOST_S),
                np.zeros(len(program.collectives)),
            )
        )
    together = engine._RankGroup(made, works, Launch(latency_s=0.0, queue_depth=1000), 1)
    together.run(wait=True)
    names = {phase: kind for kind, phase in programs.PHASES.items()}
    found = []
    for program, work, rank in zip(made, works, together.ranks, strict=True):
        runs = [program.runs[index] for index in program.instructions.run[work.position[work.launches]].tolist()]
        times_s = [column[work.launches].tolist() for column in (rank.device.start_s, rank.device.end_s)]
        found.append(
            [
                (names[run.phase], run.micro_batch, start, end)
                for run, start, end in zip(runs, *times_s, strict=True)
                if run.phase in names
            ]
        )
    return found


CASES = [
    ("gpipe", 3, 5, 1),
    ("1f1b", 2, 4, 1),
    ("1f1b", 4, 6, 1),
    ("interleaved-1f1b", 2, 4, 2),
    ("interleaved-1f1b", 4, 8, 2),
    ("looped-bfs", 3, 4, 2),
    ("interleaved-zero-bubble", 2, 4, 2),
    ("zbv-zero-bubble", 2, 4, 2),
    ("zbv-zero-bubble", 4, 8, 2),
    ("dualpipev", 2, 4, 2),
    ("dualpipev", 4, 9, 2),
]


@pytest.mark.parametrize("batches_all", [False, True])
@pytest.mark.parametrize(("schedule", "ranks", "micro_batches", "virtual_stages"), CASES)
def test_every_action_starts_and_ends_when_a_plain_execution_says(
    schedule: str, ranks: int, micro_batches: int, virtual_stages: int, batches_all: bool
) -> None:
    asked = (schedule, ranks, micro_batches, virtual_stages)
    lasts = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    expected: list[list[tuple[str, int, float, float]]] = [[] for _ in range(ranks)]
    for span in executor.run(rank_actions(*asked, batches_all=batches_all), lasts):
        expected[span.rank].append((span.compute.kind, span.compute.micro_batch, span.start, span.end))
    assert ends(pipeline_programs(scenario(*asked), batches_all), lasts) == [
        [
            (kind, batch, pytest.approx(start, abs=0.01), pytest.approx(end, abs=0.01))
            for kind, batch, start, end in rank
        ]
        for rank in expected
    ]


@pytest.mark.parametrize(("schedule", "ranks", "micro_batches", "virtual_stages"), CASES)
def test_messages_have_the_same_names_on_both_sides(
    schedule: str, ranks: int, micro_batches: int, virtual_stages: int
) -> None:
    made = pipeline_programs(scenario(schedule, ranks, micro_batches, virtual_stages), False)
    sent, received = (
        sorted(
            message.name for program in made for each in program.exchanges for message in each if message.is_send is way
        )
        for way in (True, False)
    )
    assert sent == received
    assert len(set(sent)) == len(sent)
    actions = rank_actions(schedule, ranks, micro_batches, virtual_stages)
    for program, rank in zip(made, actions, strict=True):
        kinds = [each.kind for each in rank if isinstance(each, Compute)]
        names = {phase: kind for kind, phase in programs.PHASES.items()}
        computing = [run for run in program.runs if run.phase in names]
        assert [names[run.phase] for run in computing] == kinds
        assert [run.stage for run in computing] == [each.stage for each in rank if isinstance(each, Compute)]
        once = sorted((run.phase, run.stage) for run in program.runs if run.phase not in names)
        phases = ["zero_grad"] if micro_batches == 1 else ["scale", "zero_grad"]
        held = sorted({each.stage for each in rank if isinstance(each, Compute)})
        assert once == [("optimizer", -1), *((phase, stage) for phase in phases for stage in held)]
        assert (len(program.stage_blocks), sum(program.stage_blocks)) == (ranks * virtual_stages, 12)
        posts = np.flatnonzero(program.instructions.kind == COLLECTIVE)
        assert program.instructions.b[posts].tolist() == list(range(1, len(program.exchanges) + 1))


@pytest.mark.parametrize(("micro_batches", "expected"), [(1, []), (2, ["scale"])])
def test_gradients_are_divided_where_there_are_several_micro_batches(micro_batches: int, expected: list[str]) -> None:
    made = pipeline_programs(scenario("gpipe", 2, micro_batches), False)
    for program in made:
        assert [run.phase for run in program.runs if run.phase == "scale"] == expected
        assert [run.phase for run in program.runs][-1] == "optimizer"


def test_the_host_is_taken_by_what_torch_adds_to_each_action() -> None:
    """The first stage's input has no gradient: the second half of its backward is a whole one."""
    of_first, of_last = pipeline_programs(scenario("interleaved-zero-bubble", 2, 2, 2), False)
    for program, first in ((of_first, "pp backward"), (of_last, "pp backward_weight")):
        columns = program.instructions
        at = np.flatnonzero(columns.kind == HOST)
        found = [(columns.calls[columns.call[index]], program.runs[columns.run[index]].phase) for index in at.tolist()]
        computing = [run.phase for run in program.runs if run.phase in programs.PHASES.values()]
        assert [phase for _, phase in found] == computing
        assert {call for call, phase in found if phase == "backward_weight"} == {first, "pp backward_weight"}
        assert all(call == f"pp {phase}" for call, phase in found if phase != "backward_weight")


BACKWARDS = ["op1", "grad_ready 1", "op4", "grad_ready 0", "op4"]
CAP_MB = 1200 / 2**20  # either parameter of a stage has a bucket, the larger one, ready first, the first


def test_replicas_reduce_in_the_last_backward_what_is_ready() -> None:
    """The last of two ranks, whose messages go alone: what is received is awaited, what is sent at the end."""
    _, program = pipeline_programs(scenario("gpipe", 2, 2, dp=2, bucket_cap_mb=CAP_MB), False)
    words = spelt(program)
    receive = ["record {}", "@wait {}", "@reduce 16 <irecv>", "@record {}", "wait {} <irecv wait>"]
    send = ["record {}", "@wait {}", "@reduce 16 <isend>", "@record {}"]

    def marked(rows: list[str], *marks: int) -> list[str]:
        return [row.format(mark) for row, mark in zip(rows, marks, strict=True)]

    assert words == [
        *marked(receive, 0, 0, 0, 1, 1),
        "host 0 <pp forward>",
        "host 0 <ddp forward>",
        "op0",
        *marked(receive, 2, 2, 0, 3, 3),
        "host 0 <pp forward>",
        "host 0 <ddp forward>",
        "op0",
        "host 0 <pp backward>",
        *BACKWARDS,
        *marked(send, 4, 4, 0, 5),
        "host 0 <pp backward>",
        *BACKWARDS[:2],
        "mul <ddp parameter>",
        *("record 8", "@wait 8", "@reduce 1200 <ddp bucket>", "@record 9"),
        *BACKWARDS[2:4],
        "mul <ddp parameter>",
        *("record 10", "@wait 10", "@reduce 400 <ddp bucket>", "@record 11"),
        *BACKWARDS[4:],
        *("wait 9 <wait>", "copy_ <ddp parameter>", "wait 11 <wait>", "copy_ <ddp parameter>"),
        *marked(send, 6, 6, 0, 7),
        *("wait 5 <isend wait>", "wait 7 <isend wait again>"),
        "op4",
    ]


@pytest.mark.parametrize("batches_all", [False, True])
@pytest.mark.parametrize(
    ("schedule", "virtual_stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("looped-bfs", 2)]
)
def test_every_stage_is_reduced_once_over_its_own_communicator(
    schedule: str, virtual_stages: int, batches_all: bool
) -> None:
    """Buffers are not sent: torch runs forwards under no_sync."""
    plain, made = (pipeline_programs(scenario(schedule, 2, 4, virtual_stages, dp=dp), batches_all) for dp in (1, 3))
    for rank, (one, program) in enumerate(zip(plain, made, strict=True)):
        columns = program.instructions
        at = np.flatnonzero(columns.kind == COLLECTIVE)
        groups = [program.collectives[number].group for number in columns.a[at].tolist()]
        reductions = at[[group == "replicate" for group in groups]]
        assert {program.collectives[number] for number in columns.a[reductions].tolist()} == {
            Collective("all_reduce", "float32", 1600, 3, "replicate")
        }
        backwards = [number for number, run in enumerate(program.runs) if run.phase == "backward"]
        actions = rank_actions(schedule, 2, 4, virtual_stages)[rank]
        stages = [each.stage for each in actions if isinstance(each, Compute) and each.kind == "B"]
        last = dict(zip(stages, backwards, strict=True))
        assert columns.run[reductions].tolist() == sorted(last.values())
        others = set(columns.stream[np.setdiff1d(at, reductions)].tolist())
        assert not set(columns.stream[reductions].tolist()) & {0, *others}
        marks = columns.a[columns.kind == RECORD].tolist()
        assert len(set(marks)) == len(marks)
        assert one.exchanges == program.exchanges
        assert [run.phase for run in one.runs] == [run.phase for run in program.runs]


def test_each_stage_of_a_rank_has_buckets_which_are_rebuilt_before_its_second_step_begins() -> None:
    """Four stages of 1600 bytes and a buffer of 64, of which a rank has two: in the first step one bucket each, then two
    each.
    """
    for program in pipeline_programs(scenario("interleaved-1f1b", 2, 4, 2, dp=2, bucket_cap_mb=CAP_MB), False):
        made = [row for row in program.setup if row.kind == EventKind.ALLOC]
        assert [row.b for row in made] == [1664, 1600] * 2  # sent when it is wrapped; the bucket
        buckets = [made[1].a, made[3].a]
        assert [row.a for row in program.setup if row.kind == EventKind.FREE] == [made[0].a, made[2].a]
        assert program.rebuild is not None
        assert program.rebuild.step == 2
        assert program.rebuild.replaced == tuple(Instruction(EventKind.FREE, number) for number in buckets)
        forwards = [number for number, run in enumerate(program.runs) if run.phase == "forward"]
        assert [insertion.run for insertion in program.rebuild.made] == [
            forwards[0],
            forwards[2],
        ]  # the third is of the other
        for insertion in program.rebuild.made:
            assert insertion.event == program.runs[insertion.run].segment.start
            assert [row.b for row in insertion.instructions] == [1200, 400]


def test_ranks_of_the_same_stages_are_alike() -> None:
    found = rank_programs(scenario("1f1b", 2, 4, dp=3))
    assert [each.ranks for each in found] == [(0, 2, 4), (1, 3, 5)]
