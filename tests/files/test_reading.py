"""Reading: what is no regular file, too large, too deep, damaged or ambiguous is one sentence with the file's name."""

from __future__ import annotations

import gzip
import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from perfmodel.errors import PerfModelError
from perfmodel.files import reading
from perfmodel.files.reading import read_bytes, read_foreign_json, read_json, read_text

WHAT, REMEDY = "a profile", "Measure it again."
Reader = Callable[[Path, str, str], object]


def written(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "file.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def sentence(read: Reader, path: Path) -> str:
    """What the reader says of the file: one line that begins with its name and ends with the remedy."""
    with pytest.raises(PerfModelError) as raised:
        read(path, WHAT, REMEDY)
    text = str(raised.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    return text


@pytest.mark.parametrize("read", [read_bytes, read_text, read_json, read_foreign_json])
def test_only_regular_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Reader) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    os.mkfifo(pipe)  # opening it would wait for a writer for ever
    link.symlink_to(pipe)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        assert "must be a regular file (got a socket)" in sentence(read, tmp_path / "socket")
    assert "must be a regular file (got a pipe)" in sentence(read, pipe)
    assert "must be a regular file (got a pipe)" in sentence(read, link)
    assert "must be a regular file (got a directory)" in sentence(read, tmp_path)
    assert "must be a regular file (got a device)" in sentence(read, Path("/dev/zero"))


def test_a_pipe_in_place_of_the_file_that_was_looked_at_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(reading, "regular_file", lambda *_: None)
    assert "must be a regular file (got a pipe)" in sentence(read_bytes, tmp_path / "pipe")


def test_a_file_that_says_it_is_regular_and_gives_nothing_yet_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /proc/kmsg, which only root may read."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(stat, "S_ISREG", lambda mode: True)
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        assert "must be a readable file (Resource temp" in sentence(read_bytes, tmp_path / "pipe")
    finally:
        os.close(writer)


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    assert "a profile must be a readable file (No such file" in sentence(read_json, tmp_path / "absent")
    assert "must be a readable file (File name too long)" in sentence(read_json, tmp_path / ("n" * 5000))
    with pytest.raises(PerfModelError, match="must be a readable file"):
        read_json(Path("zero\0byte"), WHAT, REMEDY)


def test_a_link_to_a_regular_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(written(tmp_path, '{"a": 1}'))
    assert read_json(tmp_path / "link", WHAT, REMEDY) == {"a": 1}


def test_the_limit_holds_for_what_was_compressed(tmp_path: Path) -> None:
    bomb = gzip.compress(b"0" * (3 * reading.MIB))
    assert len(bomb) < 10_000
    path = written(tmp_path, bomb)
    with pytest.raises(PerfModelError, match="must hold at most 2 MiB"):
        read_bytes(path, WHAT, REMEDY, 2 * reading.MIB)
    assert len(read_bytes(path, WHAT, REMEDY, 3 * reading.MIB)) == 3 * reading.MIB
    with pytest.raises(PerfModelError, match="must hold at most 1 MiB"):
        read_bytes(written(tmp_path, b" " * (reading.MIB + 1)), WHAT, REMEDY, reading.MIB)


def test_no_more_than_the_limit_is_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Counting(gzip.GzipFile):
        def read(self, size: int | None = -1) -> bytes:
            asked.append(-1 if size is None else size)
            return super().read(size)

    monkeypatch.setattr(gzip, "GzipFile", Counting)
    with pytest.raises(PerfModelError):
        read_bytes(written(tmp_path, gzip.compress(b"0" * (3 * reading.MIB))), WHAT, REMEDY, reading.MIB)
    assert asked == [reading.MIB + 1]


def test_damaged_gzip(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"a": 1}')
    assert "must be whole gzip" in sentence(read_json, written(tmp_path, whole[:-4]))
    assert "must be whole gzip" in sentence(read_json, written(tmp_path, whole[:12] + b"\xff\xff" + whole[14:]))
    assert read_json(written(tmp_path, whole), WHAT, REMEDY) == {"a": 1}
    assert read_json(written(tmp_path, whole + gzip.compress(b" ")), WHAT, REMEDY) == {"a": 1}


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "must be whole JSON (EOF"),
        ('{"a": 1', "must be whole JSON (EOF while parsing an object at line 1 column 7)"),
        ('{"a": 1} 2', "must be whole JSON (trailing characters"),
        (b"\xff\xfe{", "must be whole JSON"),
        ("[" * 100_000, "must be whole JSON (more than 200 levels at line 1 column"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "must be whole JSON (more than 200 levels at line 1 column"),
        ('{"a": ' + "1" * 5000 + "}", "must be whole JSON (number out of range"),
        ("[1]", "must be a JSON object (got list)"),
        ("null", "must be a JSON object (got NoneType)"),
        ('{"host": {"call": {"time_s": NaN}}}', "host.call.time_s must be a finite number (got nan)"),
        ('{"a": [1, {"b": -Infinity}]}', "a.1.b must be a finite number (got -inf)"),
        ('{"a": 1e999}', "a must be a finite number (got inf)"),
        ('{"a": {"b": 1, "c": 2, "b": 1}}', "must give each key once (got 'b' twice)"),
        ('{"a":1,"a" :2}', "must give each key once (got 'a' twice)"),
        ('{"a":1,"a"\n:2}', "must give each key once (got 'a' twice)"),
        ('{"a": ":", "b": 1, "b": 2}', "must give each key once (got 'b' twice)"),
        ('{"b": 1, "\\u0062": 2}', "must give each key once (got 'b' twice)"),
    ],
)
def test_json_of_our_own_is_whole_finite_and_says_things_once(tmp_path: Path, content: str, part: str) -> None:
    assert part in sentence(read_json, written(tmp_path, content))


def test_json_that_only_looks_as_if_it_said_things_twice(tmp_path: Path) -> None:
    data = {'a":': 1, "b": '":":', "": ["c", {"c": ":", ' "d" :': "\\"}]}
    for text in (json.dumps(data), json.dumps(data, indent=1), json.dumps(data, separators=(" ,", " : "))):
        assert read_json(written(tmp_path, text), WHAT, REMEDY) == data
    assert read_json(written(tmp_path, b"\xef\xbb\xbf{}"), WHAT, REMEDY) == {}


def test_other_tools_may_repeat_themselves(tmp_path: Path) -> None:
    found = read_foreign_json(written(tmp_path, '[{"a": NaN, "a": Infinity}]'), WHAT, REMEDY)
    assert found == [{"a": float("inf")}]
    assert "more than 200 levels" in sentence(read_foreign_json, written(tmp_path, "[" * 100_000))
    assert "must be whole JSON" in sentence(read_foreign_json, written(tmp_path, "[1,"))


def test_text_that_is_not_utf8_is_text_all_the_same(tmp_path: Path) -> None:
    assert read_text(written(tmp_path, b"\xef\xbb\xbfa\xff"), WHAT, REMEDY) == "a\N{REPLACEMENT CHARACTER}"
