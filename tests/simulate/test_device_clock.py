"""The device's passes against a naive simulation, event by event."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.contention import Slowdown
from perfmodel.hardware.profile import Launch
from perfmodel.simulate.device_clock import DeviceClock
from perfmodel.simulate.rendezvous import run_alone
from perfmodel.simulate.tasks import StreamTask

from .naive_device import Entry, NaiveDevice
from .streams import INF

KINDS = 2
LANES = 3


@dataclass(frozen=True)
class Case:
    launch: Launch
    slowdowns: list[Slowdown]
    entries: list[Entry]
    items: list[StreamTask]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Times come from a generator of their own: hypothesis prefers round ones, which coincide."""
    random = draw(st.randoms(use_true_random=True))
    entries = _entries(random, draw(st.integers(1, 6)))
    items = _items(random, draw(st.integers(0, 7)), len(entries))
    gaps_s = draw(st.sampled_from([(), (0.0, 0.7), (0.4,), (0.3, 0.8, 1.1)]))
    slowdowns = [_slowdown(random, entries) for _ in range(KINDS)]
    return Case(Launch(latency_s=0.0, waiting_gap_s=gaps_s), slowdowns, _with_waits(random, entries, items), items)


def _entries(random: Random, count: int) -> list[Entry]:
    made, ready_s = [], 0.0
    for _ in range(count):
        ready_s += _or_zero(random, 0.4, 4.0)
        duration_s = _or_zero(random, 0.85, 10.0)
        made.append(Entry(ready_s, duration_s, random.randint(1, 3) if duration_s > 0 else 0))
    return made


def _or_zero(random: Random, share: float, most: float) -> float:
    """share: of the values, which are not zero."""
    return random.uniform(most / 10, most) if random.random() < share else 0.0


def _items(random: Random, count: int, entries: int) -> list[StreamTask]:
    """Of no kind are only items that wait for nothing, and only the first of a lane waits for one of them.

    Elsewhere the device does not see exactly how long they wait, or are waited for.
    """
    made: list[StreamTask] = []
    ready_s = 0.0
    for _ in range(count):
        ready_s += _or_zero(random, 0.6, 5.0)
        item = StreamTask(random.randint(1, LANES), _or_zero(random, 0.9, 8.0), random.randrange(KINDS), ready_s)
        is_first = all(each.stream != item.stream for each in made)
        others = [each for each in made if each.stream != item.stream and (is_first or each.slowdown >= 0)]
        if is_first and random.random() < 0.3:
            item.slowdown = -1
        else:
            item.after_entry = random.choice([-1, random.randrange(entries)])
            item.after_tasks = tuple(random.sample(others, min(len(others), random.choice([0, 0, 1, 2]))))
        made.append(item)
    return made


def _slowdown(random: Random, entries: list[Entry]) -> Slowdown:
    def column(of_entry) -> np.ndarray:
        return np.array([of_entry(entry.duration_s) for entry in entries])

    return Slowdown(
        compute_factor=column(lambda _: 1 + _or_zero(random, 0.8, 1.0)),
        communication_factor=column(lambda _: 1 + _or_zero(random, 0.8, 1.0)),
        tail_s=column(lambda duration_s: random.choice([INF, random.random() * duration_s])),
        wave_s=column(lambda duration_s: _or_zero(random, 0.9, 1.0) * duration_s) if random.random() < 0.8 else None,
    )


def _with_waits(random: Random, entries: list[Entry], items: list[StreamTask]) -> list[Entry]:
    """Entries wait only for what needs no later entry."""
    needed: list[int] = []  # the last entry that each item needs, itself or by what it follows
    for number, item in enumerate(items):
        followed = [needed[other] for other in range(number) if _follows(item, items[other])]
        needed.append(max([item.after_entry, *followed]))
    made = []
    for index, entry in enumerate(entries):
        possible = [number for number, last in enumerate(needed) if last < index]
        made.append(
            replace(entry, awaited=tuple(random.sample(possible, min(len(possible), random.choice([0, 0, 1])))))
        )
    return made


def _follows(item: StreamTask, other: StreamTask) -> bool:
    return item.stream == other.stream or any(each is other for each in item.after_tasks)


def _naive(case: Case) -> tuple[list[float], list[StreamTask]]:
    items = deepcopy(case.items)
    device = NaiveDevice(case.launch, case.slowdowns, case.entries, items)
    device.run()
    return device.entry_end_s, items


def _in_passes(case: Case) -> tuple[list[float], list[StreamTask]]:
    items = deepcopy(case.items)
    kernels = np.array([entry.kernels for entry in case.entries])
    device = DeviceClock(case.launch, case.slowdowns, len(case.entries), kernels)
    device.reserve(len(case.entries))
    for entry in case.entries:
        if entry.awaited:
            device.wait(tuple(items[number] for number in entry.awaited))
        device.issue(np.array([entry.ready_s]), np.array([entry.duration_s]))
    for item in items:
        device.add(item)
    run_alone(device.run_all())
    return device.end_s.tolist(), items


@settings(max_examples=300)
@given(cases())
def test_passes_agree_with_a_simulation_event_by_event(case: Case) -> None:
    expected_s, expected = _naive(case)
    end_s, items = _in_passes(case)
    assert end_s == pytest.approx(expected_s, abs=1e-6)
    for field in ("start_s", "end_s"):
        assert [getattr(item, field) for item in items] == pytest.approx(
            [getattr(item, field) for item in expected], abs=1e-6
        )
