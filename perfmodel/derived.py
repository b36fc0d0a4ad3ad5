"""What is worked out from objects that never change, kept as long as they live."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Derived(Generic[Value]):
    """One value for each object that was asked about; it goes when its object does.

    Objects are told apart by identity: hashing a profile or a trace would take longer than the value saves. They must
    not change, and the value must not refer to its object, which would then live for ever.

    Examples
    --------
    >>> lengths = Derived[int]()
    >>> words = frozenset(("a", "b"))
    >>> lengths.of(words, lambda: len(words)), lengths.of(words, lambda: 0), len(lengths)
    (2, 2, 1)
    """

    def __init__(self) -> None:
        self._values: dict[int, Value] = {}

    def of(self, source: object, derive: Callable[[], Value]) -> Value:
        """Return the value for ``source``, which ``derive`` works out the first time."""
        key = id(source)
        if key not in self._values:
            self._values[key] = derive()
            weakref.finalize(source, self._values.pop, key, None)
        return self._values[key]

    def __len__(self) -> int:
        return len(self._values)
