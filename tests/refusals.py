"""What a test asks of a sentence that refuses something: what it is about and what it names, in whatever words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from perfmodel.errors import PerfModelError


def names(text: str, wanted: object) -> bool:
    """Whether the text holds this as a whole word, not within a longer key or number.

    >>> names("hardware.nodes must be 2 (got 16).", 2), names("hardware.nodes must be 2 (got 16).", 1)
    (True, False)
    """
    return re.search(rf"(?<![\w.]){re.escape(str(wanted))}(?![\w]|\.\w)", text) is not None


@contextmanager
def refused(key: object, *named: object) -> Iterator[None]:
    """Check that the block is refused by a PerfModelError of the form ``key must ... (got ...). What to do.``

    Parameters
    ----------
    key : object
        What the rule is about; the sentence names it before "must".
    *named : object
        What the sentence names after that: the values got and those to use, other keys, the next command.
    """
    with pytest.raises(PerfModelError) as caught:
        yield
    about, must, rest = str(caught.value).partition(" must ")
    assert must, f"the sentence says no rule: {about}"
    assert names(about, key), f"the sentence is not about {key}: {caught.value}"
    missing = [each for each in named if not names(rest, each)]
    assert not missing, f"the sentence does not name {missing}: {caught.value}"
