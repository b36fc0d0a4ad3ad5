"""A step that does not fit: where it stops, how much it would need, and a verdict for every capacity."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.hardware.profile import Device, MemoryConstants, Profile
from perfmodel.program.program import Insertion, Instruction, Program, single_device_program
from perfmodel.scenario.yaml_file import load_scenario
from perfmodel.simulate.memory.allocator import segment_bytes
from perfmodel.simulate.memory.request_place import RequestPlace
from perfmodel.simulate.memory.walk import MemoryTimeline, simulate_memory
from perfmodel.trace.store import get_trace
from perfmodel.trace.trace import EventKind, StorageKind
from tests.builders import step_events
from tests.places import ROOT
from tests.simulate.memory.steps import MIB, PLENTY_BYTES, profile_of, program_of, training_program

TINY = ROOT / "scenarios" / "tiny-cpu.yaml"
CONTEXT_BYTES = 500 * MIB


@cache
def tiny_program() -> Program:
    return single_device_program(get_trace(load_scenario(TINY)))


@cache
def walked(memory_bytes: int) -> MemoryTimeline:
    device = Device(kind="cuda", name="test", memory_bytes=memory_bytes, multiprocessors=132)
    profile = Profile(name="test", device=device, memory=MemoryConstants(context_bytes=CONTEXT_BYTES))
    return simulate_memory(tiny_program(), profile)


@given(st.data())
def test_every_capacity_has_a_verdict_and_more_memory_never_hurts(data: st.DataObject) -> None:
    needed_bytes = walked(PLENTY_BYTES).device_bytes
    capacities = st.one_of(st.integers(1, 2 * needed_bytes), st.integers(CONTEXT_BYTES, needed_bytes))
    low, high = sorted((data.draw(capacities), data.draw(capacities)))
    smaller, larger = walked(low), walked(high)
    assert smaller.fits <= larger.fits
    for capacity_bytes, found in ((low, smaller), (high, larger)):
        assert found.fits or capacity_bytes < found.needed_bytes <= needed_bytes
        assert found.fits or found.missing_bytes == found.needed_bytes - capacity_bytes
        if capacity_bytes >= needed_bytes:
            assert (found.fits, found.retries) == (True, 0)
        if capacity_bytes < walked(PLENTY_BYTES).first.peak_allocated_bytes + CONTEXT_BYTES:
            assert not found.fits
        if not found.fits:
            assert found.place is not None
            assert bool(found.place.phase) == (found.place.step > 0)
            assert len(found.event) == len(found.allocated_bytes) == found.kind_bytes.shape[1]


@given(st.integers(1, 2**31))
def test_what_is_needed_fits_and_a_segment_less_does_not(memory_bytes: int) -> None:
    found = walked(memory_bytes)
    if found.fits:
        return
    assert walked(found.needed_bytes).fits
    assert not walked(found.needed_bytes - 1).fits
    assert walked(found.needed_bytes).device_bytes <= found.needed_bytes


def test_cached_segments_that_can_be_given_back_are_not_needed() -> None:
    """Without a limit, three segments of 24 MiB stay cached while two of 40 MiB are in use, 152 MiB; 80 are enough."""
    cached = [(EventKind.ALLOC, storage, 24 * MIB) for storage in range(1, 4)]
    released = [(EventKind.FREE, storage, 0) for storage in range(1, 4)]
    large = [(EventKind.ALLOC, storage, 40 * MIB) for storage in (4, 5)]
    freed = [(EventKind.FREE, storage, 0) for storage in (4, 5)]
    first = step_events(("forward", 0, [*cached, *released, *large]), ("optimizer", -1, freed))
    program = program_of(first, step_events(("forward", 0, [(EventKind.OP, 0, -1)])))
    found = simulate_memory(program, profile_of(memory_bytes=78 * MIB))
    assert found.unlimited is not None
    assert (found.needed_bytes, found.missing_bytes) == (80 * MIB, 2 * MIB)
    assert found.unlimited.device_bytes == 152 * MIB
    assert simulate_memory(program, profile_of(memory_bytes=80 * MIB)).retries > 0


def test_first_step_that_runs_out_behind_all_that_a_later_step_does() -> None:
    """The optimizer makes its states in the first step alone, after as many events as a steady step has."""
    program = training_program()
    timeline = simulate_memory(program, profile_of(memory_bytes=60 * MIB))
    assert timeline.place == RequestPlace(
        1, "optimizer", -1, "aten.add.Tensor", "", StorageKind.OPTIMIZER_STATE, is_inserted=False
    )
    whole = simulate_memory(program, profile_of())
    assert timeline.unlimited is not None
    assert (timeline.needed_bytes, timeline.missing_bytes) == (whole.device_bytes, whole.device_bytes - 60 * MIB)
    assert timeline.unlimited.allocated_bytes.tolist() == whole.allocated_bytes.tolist()
    last = program.first_instructions
    assert (last.kind[timeline.event[-1]], timeline.event[-1]) == (EventKind.FREE, 6)


def test_longer_first_step() -> None:
    """Its index is not one of the steady step, which is shorter."""
    release = [(EventKind.FREE, storage, 0) for storage in range(1, 5)]
    made = [(EventKind.ALLOC, storage, 12 * MIB) for storage in range(1, 5)]
    first = step_events(
        ("forward", 0, [(EventKind.OP, 0, -1), *made[:2]]), ("backward", 0, made[2:]), ("optimizer", -1, release)
    )
    steady = step_events(("forward", 0, [(EventKind.OP, 0, -1)]))
    timeline = simulate_memory(program_of(first, steady), profile_of(memory_bytes=40 * MIB))
    assert timeline.place is not None
    assert (timeline.place.step, timeline.place.phase, timeline.place.operator) == (1, "backward", "")
    assert timeline.event.tolist() == [0, 1, 2, 3]
    assert timeline.missing_bytes == 4 * segment_bytes(12 * MIB) - 40 * MIB


def test_later_step_and_micro_batch_are_named() -> None:
    """The second step has the state already when micro-batch 2 makes another gradient."""
    timeline = simulate_memory(training_program(3), profile_of(memory_bytes=86 * MIB))
    assert timeline.fits
    timeline = simulate_memory(training_program(3), profile_of(memory_bytes=85 * MIB))
    assert timeline.place is not None
    assert (timeline.place.step, timeline.place.phase, timeline.place.micro_batch) == (2, "backward", 1)


def test_what_a_strategy_asks_for_is_its_own() -> None:
    program = training_program()
    kept = Instruction(EventKind.ALLOC, 90, 40 * MIB, holds=StorageKind.GRADIENT)
    run = next(index for index, each in enumerate(program.first_runs) if each.phase == "backward")
    at = program.first_runs[run].segment.start + 1
    insertions = (Insertion(run, at, (kept, Instruction(EventKind.FREE, 90))),)
    timeline = simulate_memory(replace(program, first_insertions=insertions), profile_of(memory_bytes=70 * MIB))
    assert timeline.place is not None
    assert (timeline.place.phase, timeline.place.holds, timeline.place.is_inserted) == (
        "backward",
        StorageKind.GRADIENT,
        True,
    )
    wrapped = replace(program, setup=(kept,))
    found = simulate_memory(wrapped, profile_of(memory_bytes=50 * MIB))
    assert (found.stopped_in, found.place and found.place.step, found.event.tolist()) == ("wrapping", 0, [0])


@pytest.mark.parametrize("memory_bytes", [1, 100 * MIB])
def test_device_too_small_for_its_own_context(memory_bytes: int) -> None:
    timeline = simulate_memory(training_program(), profile_of(memory_bytes=memory_bytes, context_bytes=200 * MIB))
    assert (timeline.fits, timeline.stopped_in) == (False, "model")
    assert timeline.missing_bytes == timeline.needed_bytes - memory_bytes
