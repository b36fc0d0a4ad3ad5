"""Reading of files: regular ones only, of a stated size, as plain data, and never executing what they hold.

Every file that a user gives is read here, so that a pipe, a device, a gzip bomb, nesting without end or a number that
is not finite ends in one sentence with the file's name.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import math
import os
import re
import stat
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pydantic_core

from perfmodel.errors import PerfModelError, naming
from perfmodel.files.kinds import GZIP
from perfmodel.files.writing import NOT_REGULAR
from perfmodel.limits import LARGEST_FILE_BYTES
from perfmodel.units import MIB

UTF8_MARK = b"\xef\xbb\xbf"


def read_bytes(
    path: Path, what: str, remedy: str, largest_bytes: int = LARGEST_FILE_BYTES, make_smaller: str = ""
) -> bytes:
    """The content of a regular file; gzip is decompressed, but no further than the limit.

    Parameters
    ----------
    path : Path
    what : str
        What the file should be, for the sentence: ``a profile``.
    remedy : str
        What the sentence ends with.
    largest_bytes : int
        How large the content may be, once decompressed.
    make_smaller : str
        What the sentence ends with where the content is larger; ``remedy`` if empty.

    Raises
    ------
    PerfModelError
        If the path is no regular file (it is then not opened), cannot be read, or holds too much or damaged gzip.
    """
    regular_file(path, what, remedy)
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            _refuse_others(path, os.fstat(file.fileno()), what, remedy)
            content = _limited(path, file, what, make_smaller or remedy, largest_bytes)
    except OSError as error:
        raise _unreadable(path, what, remedy, error) from error
    if not content.startswith(GZIP):
        return content
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            return _limited(path, file, what, make_smaller or remedy, largest_bytes)
    except (OSError, EOFError, zlib.error) as error:
        raise PerfModelError(f"{path}: {what} must be whole gzip ({error}). {remedy}") from error


def regular_file(path: Path, what: str, remedy: str) -> os.stat_result:
    """Return what the system says of a regular file, or of the one that a link leads to; nothing is opened.

    Raises
    ------
    PerfModelError
        If there is none.
    """
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise _unreadable(path, what, remedy, error) from error
    _refuse_others(path, found, what, remedy)
    return found


def _refuse_others(path: Path, found: os.stat_result, what: str, remedy: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        got = NOT_REGULAR.get(stat.S_IFMT(found.st_mode), "something else")
        raise PerfModelError(f"{path}: {what} must be a regular file (got {got}). {remedy}")


def _open_at_once(path: str, flags: int) -> int:
    """Neither opening nor reading waits: for a pipe that has taken the file's place, or for the kernel's messages."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _unreadable(path: Path, what: str, remedy: str, error: Exception) -> PerfModelError:
    reason = getattr(error, "strerror", None) or error
    return PerfModelError(f"{path}: {what} must be a readable file ({reason}). {remedy}")


def _limited(path: Path, file: io.BufferedIOBase, what: str, remedy: str, largest_bytes: int) -> bytes:
    content: bytes | None = file.read(largest_bytes + 1)
    if content is None:  # reading would wait
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    if len(content) > largest_bytes:
        raise PerfModelError(f"{path}: {what} must hold at most {largest_bytes // MIB} MiB (got more). {remedy}")
    return content


def read_text(path: Path, what: str, remedy: str, largest_bytes: int = LARGEST_FILE_BYTES) -> str:
    """The text of a file as :func:`read_bytes` reads it; bytes that are not UTF-8 are replaced."""
    return read_bytes(path, what, remedy, largest_bytes).decode("utf-8-sig", errors="replace")


def read_json(path: Path, what: str, remedy: str, largest_bytes: int = LARGEST_FILE_BYTES) -> dict[str, Any]:
    """The JSON object in a file of perfmodel's own: every key given once, every number finite.

    Raises
    ------
    PerfModelError
        If the file cannot be read (:func:`read_bytes`), is not whole JSON of at most 200 levels, is not an object,
        gives a key twice, or holds a number that is not finite.
    """
    content = read_bytes(path, what, remedy, largest_bytes).removeprefix(UTF8_MARK)
    data = _parsed(path, content, what, remedy)
    if not isinstance(data, dict):
        raise PerfModelError(f"{path}: {what} must be a JSON object (got {type(data).__name__}). {remedy}")
    keys = _keys_of_finite(data)
    if keys is None:
        refuse_not_finite(data, str(path), remedy)
    elif _may_repeat(content, keys):
        with naming(path):
            json.loads(content, object_pairs_hook=lambda pairs: _once(pairs, what, remedy))
    return data


def read_foreign_json(
    path: Path, what: str, remedy: str, largest_bytes: int = LARGEST_FILE_BYTES, make_smaller: str = ""
) -> Any:
    """The JSON value in a file that another tool wrote, which may repeat keys and write NaN; its reader checks what it
    uses.

    Raises
    ------
    PerfModelError
        If the file cannot be read (:func:`read_bytes`) or is not whole JSON of at most 200 levels.
    """
    content = read_bytes(path, what, remedy, largest_bytes, make_smaller).removeprefix(UTF8_MARK)
    return _parsed(path, content, what, remedy)


def refuse_not_finite(value: Any, where: str, remedy: str, key: str = "") -> None:
    """Refuse plain data that hold a number that is not finite; the sentence names its key.

    Raises
    ------
    PerfModelError
        If there is one.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise PerfModelError(f"{where}: {key} must be a finite number (got {value}). {remedy}")
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        refuse_not_finite(item, where, remedy, f"{key}.{name}" if key else str(name))


def _parsed(path: Path, content: bytes, what: str, remedy: str) -> Any:
    try:
        return pydantic_core.from_json(content)
    except ValueError as error:
        reason = str(error).replace("recursion limit exceeded", "more than 200 levels")
        raise PerfModelError(f"{path}: {what} must be whole JSON ({reason}). {remedy}") from error


def _keys_of_finite(data: dict[str, Any]) -> int | None:
    """Count the keys that all objects in it have together; None if a number is not finite."""
    count = 0
    waiting: list[Any] = [data]
    while waiting:
        here = waiting.pop()
        values = here
        if type(here) is dict:
            count += len(here)
            values = here.values()
        for value in values:
            kind = type(value)
            if kind is dict or kind is list:
                waiting.append(value)
            elif kind is float and not math.isfinite(value):
                return None
    return count


def _may_repeat(content: bytes, keys: int) -> bool:
    """Return whether JSON, of which parsing kept ``keys`` keys, may give one twice.

    It never does if as many quotes have a colon right after them, as each key has that perfmodel writes, and no other
    quote has one after a space.
    """
    return content.count(b'":') != keys or re.search(rb'"[ \t\r\n]+:', content) is not None


def _once(pairs: list[tuple[str, Any]], what: str, remedy: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise PerfModelError(f"{what} must give each key once (got {twice!r:.60} twice). {remedy}")
    return found
