"""The one error a user is meant to read.

Everything the user can cause (a file, a scenario, a machine that lacks something) is raised as
:class:`PerfModelError` with one sentence: where, what must hold, the value got, what to do. The command line prints
it and exits with 1; any other exception is a defect of perfmodel and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

MOST_LISTED, MOST_CLOSEST = 20, 3  # names in one sentence


class PerfModelError(Exception):
    """A sentence for the user: where, the rule, the value, what to do."""


class Terminated(SystemExit):
    """SIGTERM was received: the process ends by an exception, so that what it was writing is removed."""


class PerfModelWarning(UserWarning):
    """A sentence for the user about what went on without something: the command line prints it on standard error."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The closing sentence of an error message: the known name that is meant, or all known, or some of very many.

    >>> did_you_mean("adamv", ["adamw", "sgd"])
    "Did you mean 'adamw'?"
    >>> did_you_mean("zzz", ["adamw", "sgd"])
    'Known: adamw, sgd.'
    >>> did_you_mean("zzz", [f"case-{number}" for number in range(44)])
    'There are 44, of which the closest are case-9, case-8 and case-7.'
    """
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    if near:
        return f"Did you mean {near[0]!r}?"
    if len(known) > MOST_LISTED:
        *others, last = difflib.get_close_matches(str(name), known, n=MOST_CLOSEST, cutoff=0.0)
        return f"There are {len(known)}, of which the closest are {', '.join(others)} and {last}."
    return f"Known: {', '.join(known)}."


@contextmanager
def naming(where: object) -> Iterator[None]:
    """Begin the sentence of a PerfModelError raised inside with ``where``, the file that the user gave."""
    try:
        yield
    except PerfModelError as error:
        raise PerfModelError(f"{where}: {error}") from error
