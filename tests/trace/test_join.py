"""Traces after each other: what each does is what it did, under other numbers."""

from __future__ import annotations

import numpy as np
import pytest

from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.join import join
from perfmodel.trace.store import get_stage_trace
from perfmodel.trace.trace import OPERATION_EVENTS, STORAGE_EVENTS, EventKind, StepEvents, Trace


@pytest.fixture(scope="module")
def stages() -> list[Trace]:
    """The first stage with its backward whole and split, and the last."""
    scenario = Scenario.model_validate(
        {
            "model": {
                "family": "gpt", "layers": 2, "width": 16, "heads": 2, "ffn_width": 32, "vocabulary": 50,
                "attention": "eager",
            },
            "batch": {"size": 4, "sequence_length": 8},
            "parallelism": {"pp": {"stages": 2, "schedule": "zbv-zero-bubble", "micro_batches": 2, "virtual_stages": 1}},
            "hardware": {"profile": "p", "gpus": 2},
        }
    )  # fmt: skip
    return [get_stage_trace(scenario, 0), get_stage_trace(scenario, 0, split=True), get_stage_trace(scenario, 1)]


def spelt(trace: Trace, events: StepEvents, start: int = 0, stop: int | None = None) -> list[tuple[object, ...]]:
    """Events with what they point to in place of numbers; storages by the order in which they first come."""
    order: dict[int, int] = {}
    found: list[tuple[object, ...]] = []
    within = slice(start, stop)
    for kind, a, b in zip(
        events.kind[within].tolist(), events.a[within].tolist(), events.b[within].tolist(), strict=True
    ):
        if kind in OPERATION_EVENTS:
            node = trace.nodes[b] if kind == EventKind.OP and b >= 0 else None
            found.append((kind, trace.operations[a], node))
        elif kind in STORAGE_EVENTS:
            found.append((kind, order.setdefault(a, len(order)), b))
        elif kind in (EventKind.MODULE_ENTER, EventKind.MODULE_EXIT, EventKind.BLOCK_ENTER, EventKind.BLOCK_EXIT):
            found.append((kind, trace.modules[a]))
        elif kind in (EventKind.CALL_ENTER, EventKind.CALL_EXIT):
            found.append((kind, trace.calls[a]))
        elif kind == EventKind.NODE:
            found.append((kind, trace.nodes[a]))
        else:
            found.append((kind, trace.parameters[a].name, trace.parameters[a].tensor))
    return found


def test_each_does_what_it_did(stages: list[Trace]) -> None:
    joined, made = join(stages, [0, 0, 2])
    for name in ("first", "steady"):
        whole, start = getattr(joined, name), 0
        assert whole.segments == tuple(
            type(each)(each.phase, each.micro_batch, each.start + offset, each.stop + offset)
            for trace, offset in zip(
                stages, np.cumsum([0, *(len(getattr(each, name).kind) for each in stages[:-1])]).tolist(), strict=True
            )
            for each in getattr(trace, name).segments
        )
        for trace, numbers in zip(stages, made, strict=True):
            events = getattr(trace, name)
            stop = start + len(events.kind)
            assert spelt(joined, whole, start, stop) == spelt(trace, events)
            touched = slice(whole.touch_offsets[start], whole.touch_offsets[stop])
            assert whole.touches[touched].tolist() == numbers.storages[events.touches].tolist()
            assert whole.touch_bytes[touched].tolist() == events.touch_bytes.tolist()
            start = stop


def test_stages_share_nothing_and_forms_of_one_stage_what_exists_before_the_first_step(stages: list[Trace]) -> None:
    joined, made = join(stages, [0, 0, 2])
    there = [
        {int(numbers.storages[each.id]) for each in trace.persistent}
        for trace, numbers in zip(stages, made, strict=True)
    ]
    assert there[0] == there[1]
    assert not there[0] & there[2]
    assert {each.id for each in joined.persistent} == there[0] | there[2]
    assert len(joined.persistent) == len(there[0]) + len(there[2])
    own = [set(numbers.storages.tolist()) - held for numbers, held in zip(made, there, strict=True)]
    assert not own[0] & own[1]
    assert not (own[0] | own[1]) & own[2]
    assert [each.name for each in joined.parameters] == [each.name for at in (0, 2) for each in stages[at].parameters]
    assert {each.storage for each in joined.parameters} <= {each.id for each in joined.persistent}
    assert len(joined.operations) == len(set(joined.operations))


def test_one_alone_stays_as_it_is(stages: list[Trace]) -> None:
    joined, _ = join(stages[:1], [0])
    assert spelt(joined, joined.steady) == spelt(stages[0], stages[0].steady)
    assert (joined.parameters, joined.persistent) == (stages[0].parameters, stages[0].persistent)
