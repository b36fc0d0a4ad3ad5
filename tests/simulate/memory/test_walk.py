"""The memory interpreter: hand-made steps with closed answers, and recorded processes run through it again."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace

import pytest

from perfmodel.hardware.profile import KernelRecord, Profile
from perfmodel.program.program import Insertion, Instruction, Program, Rebuild
from perfmodel.simulate.memory.requests import Actions, with_inserted
from perfmodel.simulate.memory.walk import MemoryTimeline, simulate_memory
from perfmodel.trace.kernel_key import kernel_key
from perfmodel.trace.operation import Operation
from perfmodel.trace.trace import EventKind, StorageKind
from tests.builders import Phase, step_events
from tests.places import TESTS
from tests.simulate.memory.steps import ALLOC, F32, FREE, MIB, OP, POINTWISE, profile_of, program_of, training_program

RECORDINGS = TESTS / "data" / "cuda_steps"
CASES = sorted(path.name.removesuffix(".json.gz") for path in RECORDINGS.glob("*.json.gz"))


def measured(operation: Operation, *script: int) -> dict[str, KernelRecord]:
    return {kernel_key(operation): KernelRecord(time_s=1.0, memory_script=script)}


def forward(*events: tuple[EventKind, int, int]) -> Phase:
    return ("forward", 0, list(events))


def simulate_forward(*events: tuple[EventKind, int, int], profile: Profile | None = None) -> MemoryTimeline:
    step = step_events(forward(*events))
    return simulate_memory(program_of(step, step), profile or profile_of())


def test_training_step_in_closed_form() -> None:
    timeline = simulate_memory(training_program(), profile_of(context_bytes=100 * MIB))
    parameter, gradient, state, activation, loss = 16 * MIB, 16 * MIB, 32 * MIB, 4 * MIB, 512
    assert timeline.first.model_dump() == {
        "allocated_before_bytes": parameter,
        "peak_allocated_bytes": parameter + gradient + state + loss,
        "peak_reserved_bytes": 16 * MIB + 20 * MIB + 2 * MIB + 32 * MIB,  # the gradient fits behind the activation,
    }
    assert timeline.steady.model_dump() == {
        "allocated_before_bytes": parameter + gradient + state + loss,
        "peak_allocated_bytes": parameter + gradient + state + activation + loss,
        "peak_reserved_bytes": 70 * MIB,
    }
    assert timeline.event.tolist() == [0, 0, 2, 4, 5, 7, 8]
    held = parameter + state
    assert timeline.allocated_bytes.tolist() == [
        held + gradient + loss, held + loss, held + activation + loss, held + activation + 2 * loss,
        held + activation + loss, held + gradient + activation + loss, held + gradient + loss,
    ]  # fmt: skip
    assert timeline.reserved_bytes.tolist() == [70 * MIB] * 7
    assert {kind: size for kind, size in timeline.peak_kind_bytes.items() if size} == {
        StorageKind.PARAMETER: parameter,
        StorageKind.GRADIENT: gradient,
        StorageKind.OPTIMIZER_STATE: state,
        StorageKind.ACTIVATION: activation,
        StorageKind.TEMPORARY: loss,
    }
    assert timeline.kind_bytes.sum(axis=0).tolist() == timeline.allocated_bytes.tolist()
    assert (timeline.device_bytes, timeline.fits, timeline.retries) == (170 * MIB, True, 0)
    assert [part for part, _ in timeline.history] == ["model", "first", "steady", "steady"]


def rebuilding_program(step: int) -> Program:
    """A buffer of 16 MiB, which one of 14 MiB replaces before the forward of that step."""
    program = training_program()
    kept, rebuilt = Instruction(ALLOC, 90, 16 * MIB), Instruction(ALLOC, 91, 14 * MIB)
    run = next(index for index, each in enumerate(program.runs) if each.phase == "forward")
    made = Insertion(run, program.runs[run].segment.start, (rebuilt,))
    return replace(program, setup=(kept,), rebuild=Rebuild(step, (made,), (Instruction(FREE, kept.a),)))


@pytest.mark.parametrize("step", [2, 3, 4])
def test_what_is_rebuilt_is_there_twice_in_the_step_that_rebuilds_it(step: int) -> None:
    plain = simulate_memory(training_program(), profile_of())
    timeline = simulate_memory(rebuilding_program(step), profile_of())
    assert timeline.first.peak_allocated_bytes == plain.first.peak_allocated_bytes + 16 * MIB
    assert timeline.rebuild_step == step
    assert timeline.rebuilding is not None
    assert timeline.rebuilding.allocated_before_bytes == plain.steady.allocated_before_bytes + 16 * MIB
    assert timeline.rebuilding.peak_allocated_bytes == plain.peak_allocated_bytes + 30 * MIB
    assert timeline.peak_allocated_bytes == plain.peak_allocated_bytes + 14 * MIB
    assert timeline.device_bytes == timeline.rebuilding.peak_reserved_bytes
    assert timeline.allocated_bytes[-1] == timeline.allocated_bytes[0]
    steps = [part for part, _ in timeline.history if part not in ("model", "wrapping")]
    assert steps[: step + 1] == ["first", *["early"] * (step - 2), "rebuilding", "steady"]


def test_gradients_are_given_up_before_anything_is_rebuilt() -> None:
    """It is made in forward, after zero_grad."""
    timeline = simulate_memory(rebuilding_program(2), profile_of())
    rebuilding = next(columns for part, columns in timeline.history if part == "rebuilding")
    assert rebuilding.request_bytes[:3].tolist() == [0, 14 * MIB, 4 * MIB]
    held = timeline.rebuilding
    assert held is not None
    assert rebuilding.allocated_bytes[0] == held.allocated_before_bytes - 16 * MIB


def test_what_is_rebuilt_may_not_fit_beside_what_it_replaces() -> None:
    timeline = simulate_memory(rebuilding_program(3), profile_of(memory_bytes=90 * MIB))
    assert (timeline.fits, timeline.stopped_in, timeline.rebuild_step) == (False, "rebuilding", 3)


def test_communicators_take_memory_from_the_allocator() -> None:
    constants = {"memory_bytes": 170 * MIB, "context_bytes": 100 * MIB}
    alone = simulate_memory(training_program(), profile_of(**constants))
    beside = simulate_memory(training_program(), profile_of(**constants), communicators_bytes=30 * MIB)
    assert (alone.fits, alone.outside_bytes, alone.device_bytes) == (True, 100 * MIB, 170 * MIB)
    assert (beside.fits, beside.outside_bytes) == (False, 130 * MIB)


def test_what_a_strategy_asks_for_lies_between_the_traces_own_requests() -> None:
    own = Actions([4, 0, 8], [1, 1, 2], [5, 5, 5], [0, 2, 2], [0, 0, 0])
    made = (Instruction(ALLOC, 7, 16, stream=2), Instruction(EventKind.OP, 3))
    assert with_inserted(own, [Insertion(0, 12, made), Insertion(0, 13, (Instruction(FREE, 7),))], 10) == Actions(
        [4, 16, 0, 8, 0], [1, 7, 1, 2, 7], [5, 3, 5, 5, 3], [0, 1, 2, 2, 2], [0, 2, 0, 0, 0]
    )
    assert with_inserted(own, [Insertion(0, 12, (Instruction(EventKind.OP, 3),))], 10) is own


def test_what_inserted_operators_give_back_themselves() -> None:
    """A measured table of 2 MiB, beside an output that the strategy asks for; on the operator's own stream."""
    step = step_events(forward((OP, 0, -1), (ALLOC, 0, 4 * MIB), (FREE, 0, 0)))
    rows = (Instruction(ALLOC, 7, 3 * MIB, stream=2), Instruction(OP, 3, stream=2), Instruction(FREE, 7))
    joined = Operation("aten.cat.default", ((F32, F32),), (), (F32,))
    program = replace(program_of(step, step), insertions=(Insertion(0, 3, rows),), extra_operations=(joined,))
    timeline = simulate_memory(program, profile_of(kernels=measured(joined, 3 * MIB, 2 * MIB, -2)))
    columns = timeline.history[-1][1]
    assert columns.request_bytes.tolist() == [4 * MIB, 0, 3 * MIB, 2 * MIB, 0, 0]
    assert columns.stream.tolist()[2:4] == [2, 2]
    assert timeline.peak_allocated_bytes == 5 * MIB
    assert timeline.peak_kind_bytes[StorageKind.TEMPORARY] == 2 * MIB


def gathering_program(stream: int) -> Program:
    """Two layers of 12 MiB of activations; before each, 16 and then 14 MiB are gathered on that stream and copied into
    16 MiB of parameters, which its end gives up.
    """
    layers = [[(OP, 0, -1), (ALLOC, activation, 12 * MIB), (FREE, activation, 0)] for activation in (5, 6)]
    step = step_events(forward(*layers[0], *layers[1]))

    def gathered(size_bytes: int) -> tuple[Instruction, ...]:
        made = (Instruction(ALLOC, 90, size_bytes, stream=stream), Instruction(ALLOC, 91, 16 * MIB))
        return (*made, Instruction(FREE, 90))

    given_up = Instruction(FREE, 91)
    insertions = (
        Insertion(0, 0, gathered(16 * MIB)),
        Insertion(0, 3, (given_up, *gathered(14 * MIB))),
        Insertion(0, 6, (given_up,)),
    )
    return replace(program_of(step, step), insertions=insertions, first_insertions=insertions)


def test_blocks_of_another_stream_are_its_own() -> None:
    """On one stream the activation fits into what was gathered; on two the second layer finds only its stream's."""
    together, apart = (simulate_memory(gathering_program(stream), profile_of()) for stream in (0, 1))
    assert together.peak_reserved_bytes == (16 + 16) * MIB
    assert apart.peak_reserved_bytes == (16 + 16 + 12) * MIB
    held = [n * MIB for n in (0, 16, 32, 16, 28, 16, 0, 14, 30, 16, 28, 16, 0)]
    assert together.allocated_bytes.tolist() == apart.allocated_bytes.tolist() == held
    steady = apart.history[-1][1]
    assert steady.stream.tolist() == [1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    gathered = steady.address[steady.stream == 1]
    assert gathered[0] == gathered[1]
    assert gathered[0] not in steady.address[(steady.stream == 0) & (steady.request_bytes > 0)]


def test_what_comes_before_a_steps_first_event_belongs_to_that() -> None:
    program = gathering_program(1)
    timeline = simulate_memory(program, profile_of())
    assert program.instructions.event[timeline.event[1:]].tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2, 4, 5, 5]


def test_device_full_of_another_streams_blocks_takes_them_back() -> None:
    timeline = simulate_memory(gathering_program(1), profile_of(memory_bytes=40 * MIB))
    assert timeline.fits
    assert timeline.retries > 0
    assert timeline.peak_reserved_bytes <= 40 * MIB


def test_strategy_frees_what_the_trace_made_before_the_trace_does() -> None:
    events = [(OP, 0, -1), (ALLOC, 5, 4 * MIB), (OP, 0, -1), (ALLOC, 6, 4 * MIB), (FREE, 5, 0), (FREE, 6, 0)]
    step = step_events(forward(*events))
    early = (Insertion(0, 2, (Instruction(FREE, 5, holds=StorageKind.TEMPORARY),)),)
    timeline = simulate_memory(replace(program_of(step, step), insertions=early, first_insertions=early), profile_of())
    assert timeline.allocated_bytes.tolist() == [n * MIB for n in (0, 4, 0, 4, 4, 0)]
    assert timeline.kind_bytes[StorageKind.TEMPORARY].tolist() == timeline.allocated_bytes.tolist()
    made = timeline.history[-1][1]
    assert made.address[0] == made.address[2]


@pytest.mark.parametrize("accumulation", [2, 3, 7])
def test_repeated_micro_batches_and_steps_leave_nothing_behind(accumulation: int) -> None:
    timeline = simulate_memory(training_program(accumulation), profile_of())
    parameter, gradient, state, activation, loss = 16 * MIB, 16 * MIB, 32 * MIB, 4 * MIB, 512
    assert timeline.steady.allocated_before_bytes == parameter + gradient + state + loss
    assert timeline.allocated_bytes[-1] == timeline.allocated_bytes[0]
    assert timeline.peak_allocated_bytes == parameter + 2 * gradient + state + activation + loss
    last_micro_batch = 9 + 9 * (accumulation - 2)
    assert (timeline.event[timeline.event >= last_micro_batch] - last_micro_batch).tolist() == [1, 3, 4, 6, 7, 8]


def test_measured_script_adds_temporaries_before_and_after_the_output() -> None:
    kernels = measured(POINTWISE, 8 * MIB, 4 * MIB, 6 * MIB, -3, -1)
    timeline = simulate_forward((OP, 0, -1), (ALLOC, 5, 4 * MIB), (FREE, 5, 0), profile=profile_of(kernels=kernels))
    assert timeline.allocated_bytes.tolist() == [n * MIB for n in (0, 8, 12, 18, 12, 4, 0)]
    assert timeline.event.tolist() == [0, 0, 0, 0, 0, 0, 2]


def test_outputs_are_recognised_by_size_and_others_follow() -> None:
    """Kept allocations in another order than the trace names them; an output the script does not know comes last."""
    kernels = measured(POINTWISE, 2 * MIB, 4 * MIB)
    events = [(OP, 0, -1), (ALLOC, 5, 4 * MIB), (ALLOC, 6, 2 * MIB), (ALLOC, 7, 3 * MIB), (FREE, 6, 0)]
    events += [(FREE, 5, 0), (FREE, 7, 0)]
    timeline = simulate_forward(*events, profile=profile_of(kernels=kernels))
    assert timeline.allocated_bytes.tolist() == [n * MIB for n in (0, 2, 6, 9, 7, 3, 0)]


def test_kept_allocation_unknown_to_the_trace_lives_with_the_last_output() -> None:
    kernels = measured(POINTWISE, 8, 4 * MIB)
    events = [(OP, 0, -1), (ALLOC, 5, 4 * MIB), (FREE, 5, 0)]
    timeline = simulate_forward(*events, profile=profile_of(kernels=kernels))
    assert timeline.allocated_bytes.tolist() == [0, 512, 512 + 4 * MIB, 512, 0]


def test_operator_that_writes_in_place_makes_no_output() -> None:
    kernels = measured(POINTWISE, 4 * MIB, 6 * MIB, -2)
    timeline = simulate_forward((OP, 0, -1), profile=profile_of(kernels=kernels))
    assert timeline.allocated_bytes.tolist() == [0, 6 * MIB, 0]


def test_workspaces_are_taken_once_a_host_thread_after_the_first_products_output_and_kept() -> None:
    products = [(OP, 1, -1), (ALLOC, 5, 4 * MIB), (OP, 2, -1), (ALLOC, 6, 4 * MIB), (OP, 2, -1), (ALLOC, 7, 4 * MIB)]
    frees = [(FREE, 5, 0), (FREE, 6, 0), (FREE, 7, 0)]
    step = step_events(("forward", 0, products + frees), ("backward", 0, products + frees))
    profile = profile_of(cublas_workspace_bytes=32 * MIB, cublaslt_workspace_bytes=MIB)
    timeline = simulate_memory(program_of(step, step), profile)
    part, first = timeline.history[1]
    assert part == "first"
    assert first.allocated_bytes.tolist() == [
        n * MIB for n in (4, 36, 40, 41, 45, 41, 37, 33, 37, 69, 73, 74, 78, 74, 70, 66)
    ]
    assert timeline.steady.allocated_before_bytes == 66 * MIB
    assert timeline.peak_allocated_bytes == 78 * MIB


def test_storage_of_no_bytes_is_not_allocated() -> None:
    assert simulate_forward((OP, 0, -1), (ALLOC, 5, 0), (FREE, 5, 0)).allocated_bytes.tolist() == [0, 0]


def test_step_that_does_not_fit_says_where_and_what() -> None:
    program = training_program()
    timeline = simulate_memory(program, profile_of(memory_bytes=160 * MIB, context_bytes=100 * MIB))
    error = timeline.out_of_memory
    assert error is not None
    assert (error.requested_bytes, error.limit_bytes) == (32 * MIB, 60 * MIB)
    assert (timeline.fits, timeline.stopped_in) == (False, "first")
    assert timeline.allocated_bytes[-1] == error.allocated_bytes
    model = simulate_memory(program, profile_of(memory_bytes=10 * MIB))
    assert (model.stopped_in, model.peak_allocated_bytes, model.allocated_bytes.tolist()) == ("model", 0, [0])


def test_retry_gives_cached_memory_back() -> None:
    events = [(OP, 0, -1), (ALLOC, 5, 30 * MIB), (FREE, 5, 0), (OP, 0, -1), (ALLOC, 6, 40 * MIB), (FREE, 6, 0)]
    timeline = simulate_forward(*events, profile=profile_of(memory_bytes=50 * MIB))
    assert timeline.fits
    assert timeline.retries > 0
    assert timeline.peak_reserved_bytes == 40 * MIB


def recorded_program(memory: dict) -> Program:
    """What the process asked for before the first step, in it and in the second, as a program without operators."""
    starts = memory["step_starts_at_event"]
    names: dict[int, int] = {}
    columns: list[list[tuple[EventKind, int, int]]] = [[], [], []]
    persistent, made = [], 0
    for index, (action, address, size, _) in enumerate(memory["events"][: starts[2]]):
        part = columns[sum(index >= start for start in starts[:2])]
        if action == "alloc":
            names[address] = made
            part.append((ALLOC, made, size))
            made += 1
        elif action == "free_requested":
            part.append((FREE, names.pop(address), 0))
    building, first, steady = columns
    return program_of(step_events(forward(*building, *first)), step_events(forward(*steady)), tuple(persistent))


@pytest.mark.parametrize("case", CASES)
def test_recorded_process_goes_on_as_it_did(case: str) -> None:
    """Repeating the second step gives the recorded third and fourth, whose tensors have other names."""
    memory = json.loads(gzip.decompress((RECORDINGS / f"{case}.json.gz").read_bytes()))["memory"]
    timeline = simulate_memory(recorded_program(memory), profile_of())
    recorded = memory["peaks_of_step"][3]
    assert timeline.steady.allocated_before_bytes == pytest.approx(recorded["allocated_before_bytes"], rel=3e-3)
    assert timeline.peak_allocated_bytes == pytest.approx(recorded["peak_allocated_bytes"], rel=3e-3)
    assert timeline.peak_reserved_bytes == recorded["peak_reserved_bytes"]
