"""The kinds of files that perfmodel writes, each recognised by how it begins, so that no other file is replaced."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HEAD_BYTES = 1 << 18  # of a file, uncompressed, that are looked at
GZIP, PICKLE = b"\x1f\x8b", b"\x80"
TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]:]')
LONGEST_QUOTE = 40
SOFTWARE = "perfmodel"
PNG, PNG_MARK = b"\x89PNG\r\n", b"tEXtSoftware\0" + SOFTWARE.encode()
PREDICTED_BY = "predictedBy"  # the key that tells perfmodel's own traces from those that were recorded


class FileKind(NamedTuple):
    """A kind of file that perfmodel writes.

    Attributes
    ----------
    name : str
        What a user calls such a file, with its article.
    matches : callable
        Returns whether a file with this beginning is one.
    """

    name: str
    matches: Callable[[bytes], bool]


def head_of(path: Path) -> bytes:
    """The first bytes of a regular file, unpacked if it is compressed, as far as that goes in a damaged one."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if not head.startswith(GZIP):
        return head
    try:
        return zlib.decompressobj(wbits=31).decompress(head, HEAD_BYTES)
    except zlib.error:
        return head


def top_level_keys(head: bytes) -> list[str]:
    """The keys of a JSON object of which only the beginning may be there.

    >>> top_level_keys(b'{"version": 1, "device": {"name": "H100"}, "host": {"ca')
    ['version', 'device', 'host']
    """
    if not head.lstrip().startswith(b"{"):
        return []
    depth, last, keys = 0, b"", list[str]()
    for token in TOKEN.findall(head):
        if token in (b"{", b"["):
            depth += 1
        elif token in (b"}", b"]"):
            depth -= 1
        elif token == b":" and depth == 1:
            keys.append(last[1:-1].decode(errors="replace"))
        else:
            last = token
    return keys


def _has(*wanted: str) -> Callable[[bytes], bool]:
    return lambda head: set(wanted) <= set(top_level_keys(head))


def _begins_with(key: str) -> Callable[[bytes], bool]:
    """Match files whose first value may be longer than the head."""
    return lambda head: top_level_keys(head)[:1] == [key]


def _is_profile(head: bytes) -> bool:
    keys = set(top_level_keys(head))
    return {"version", "name"} <= keys and not keys.isdisjoint({"device", "base"})


def _is_samples(head: bytes) -> bool:
    return top_level_keys(head)[:2] == ["version", "kernels"]


def _is_recorded_trace(head: bytes) -> bool:
    keys = top_level_keys(head)
    return "traceEvents" in keys and PREDICTED_BY not in keys


def _is_picture(head: bytes) -> bool:
    """Match pictures; of PNG only those that say so, as vector formats say it too far behind the beginning."""
    if head.startswith(PNG):
        return PNG_MARK in head
    return head.startswith((b"%PDF-", b"<svg")) or (head.startswith(b"<?xml") and b"<svg" in head)


PROFILE = FileKind("a profile", _is_profile)
SAMPLES = FileKind("a calibration's samples", _is_samples)
STAGES = FileKind("an interconnect's finished stages", _begins_with("collectives"))
HOST_PIECES = FileKind("pieces of a calibration's host costs", _has("version", "profile", "reference_s"))
MEASUREMENT = FileKind("a measurement", _has("version", "name", "split"))
CHROME_TRACE = FileKind("a profiler trace", _is_recorded_trace)
PREDICTED_TRACE = FileKind("a predicted trace", _has(PREDICTED_BY, "traceEvents"))
ALLOCATOR_HISTORY = FileKind("an allocator's history", _begins_with("events"))
MEMORY_SNAPSHOT = FileKind("a memory snapshot", lambda head: head.startswith(PICKLE) and b"segments" in head[:4096])
CARD = FileKind("an accuracy card", lambda head: head.startswith(b"# Accuracy"))
CARD_NUMBERS = FileKind("an accuracy card's numbers", _has("version", "summary"))
PICTURE = FileKind("a picture by perfmodel", _is_picture)
OTHER_PICTURE = FileKind("another program's picture", lambda head: head.startswith(PNG) and PNG_MARK not in head)
KINDS = (
    PROFILE,
    SAMPLES,
    STAGES,
    HOST_PIECES,
    MEASUREMENT,
    CHROME_TRACE,
    PREDICTED_TRACE,
    ALLOCATOR_HISTORY,
    MEMORY_SNAPSHOT,
    CARD,
    CARD_NUMBERS,
    PICTURE,
    OTHER_PICTURE,
)


def described(head: bytes) -> str:
    """Describe a file with this beginning in a few words.

    >>> described(b"name: gpt2.7b\\nmodel:")
    "a file that begins with 'name: gpt2.7b'"
    """
    known = next((kind.name for kind in KINDS if kind.matches(head)), None)
    if known is not None:
        return known
    if head.startswith((PICKLE, GZIP)):
        return "a pickle" if head.startswith(PICKLE) else "a compressed file"
    first = head.lstrip().split(b"\n", 1)[0].decode(errors="replace").rstrip()
    return f"a file that begins with {first[:LONGEST_QUOTE]!r}"
