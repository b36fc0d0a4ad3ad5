"""Values that are kept as long as what they were worked out from."""

from __future__ import annotations

import gc

from perfmodel.derived import Derived


class Thing:
    """An object that is equal to all others of its kind and has no hash."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing)

    __hash__ = None  # type: ignore[assignment]


def test_a_value_is_worked_out_once_for_each_object() -> None:
    derived, things, calls = Derived[int](), [Thing(), Thing()], []
    for thing in (*things, *things):
        derived.of(thing, lambda: len(calls.append(1) or calls))
    assert len(calls) == len(derived) == 2
    assert [derived.of(thing, lambda: 0) for thing in things] == [1, 2]


def test_a_value_goes_with_its_object() -> None:
    derived, things = Derived[int](), [Thing(), Thing()]
    for number, thing in enumerate(things):
        derived.of(thing, lambda: number)  # noqa: B023
    del thing, things[0]
    gc.collect()
    assert len(derived) == 1
    assert derived.of(things[0], lambda: -1) == 1
