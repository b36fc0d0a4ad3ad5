"""Writers leave alone what is not theirs, keep links and permissions, and leave nothing half-written."""

from __future__ import annotations

import os
import re
import resource
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perfmodel.errors import PerfModelError
from perfmodel.files import writing
from perfmodel.files.kinds import CHROME_TRACE
from perfmodel.files.writing import check_folder, check_writable, replacing, write_atomically
from tests.refusals import refused

TRACE = '{"traceEvents": []}'
NEWER = '{"traceEvents": [1]}'
FOREIGN = "name: gpt2.7b\n"


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_has_the_permissions_of_the_umask_and_an_old_one_its_own(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "t.json"
    write_atomically(path, TRACE, CHROME_TRACE)
    assert (path.read_text(), mode(path), mode(path.parent)) == (TRACE, 0o640, 0o750)
    path.chmod(0o600)
    write_atomically(path, NEWER.encode(), CHROME_TRACE)
    assert (path.read_text(), mode(path)) == (NEWER, 0o600)
    assert os.listdir(path.parent) == ["t.json"]


def test_a_symbolic_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    target, link = tmp_path / "data" / "t.json", tmp_path / "link.json"
    link.symlink_to(Path("data") / "t.json")
    for content in (TRACE, NEWER):  # at first it leads nowhere
        write_atomically(link, content, CHROME_TRACE)
        assert link.is_symlink()
        assert target.read_text() == content
    target.write_text(FOREIGN)
    with pytest.raises(PerfModelError, match="must be a profiler trace or not exist"):
        write_atomically(link, TRACE, CHROME_TRACE)
    assert (link.is_symlink(), target.read_text()) == (True, FOREIGN)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def below_a_file(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text(FOREIGN)


WAYS: dict[str, tuple[Callable[[Path], object], str]] = {
    "directory": (Path.mkdir, "must be a regular file to be written (got a directory)"),
    "pipe": (os.mkfifo, "must be a regular file to be written (got a pipe)"),
    "socket": (make_socket, "must be a regular file to be written (got a socket)"),
    "device": (lambda path: path.symlink_to("/dev/full"), "must be a regular file to be written (got a device)"),
    "loop": (loop, "must be writable (got: Too many levels of symbolic links)"),
    "foreign": (
        lambda path: path.write_text(FOREIGN),
        "must be a profiler trace or not exist to be written (got a file that begins with 'name: gpt2.7b')",
    ),
    "below a file": (below_a_file, "must be writable (got: Not a directory)"),
}


@pytest.mark.parametrize(("make", "sentence"), WAYS.values(), ids=WAYS)
def test_what_is_there_is_refused_in_one_sentence_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("in") / "t.json"
    path.parent.mkdir()
    if make is make_socket:  # whose paths are short
        monkeypatch.chdir(path.parent)
        path = Path("t.json")
    make(path)
    before = [(each.name, os.lstat(each)) for each in sorted(tmp_path.rglob("*"))]
    for attempt in (lambda: check_writable(path, CHROME_TRACE), lambda: write_atomically(path, TRACE, CHROME_TRACE)):
        with pytest.raises(PerfModelError, match=f"^{re.escape(f'{path}: {sentence}')}") as refused:
            attempt()
        assert "\n" not in str(refused.value)
    after = [(each.name, os.lstat(each)) for each in sorted(tmp_path.rglob("*"))]
    assert [(name, was.st_mode, was.st_ino, was.st_size) for name, was in before] == [
        (name, now.st_mode, now.st_ino, now.st_size) for name, now in after
    ]


def test_an_empty_file_and_one_of_the_same_kind_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for content in ("", TRACE):
        path.write_text(content)
        check_writable(path, CHROME_TRACE)
        assert path.read_text() == content
        write_atomically(path, NEWER, CHROME_TRACE)
        assert path.read_text() == NEWER


def test_in_folders_of_perfmodel_s_own_any_regular_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(FOREIGN)
    write_atomically(path, TRACE, None)
    assert path.read_text() == TRACE


def test_a_write_that_ends_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    """The system's own limit for files stands in for a full disk."""
    path = tmp_path / "t.json"
    write_atomically(path, TRACE, CHROME_TRACE)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with refused("t.json", "File too large"):
            write_atomically(path, TRACE + " " * 100_000, CHROME_TRACE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (path.read_text(), os.listdir(tmp_path)) == (TRACE, ["t.json"])


def test_an_exception_inside_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "t.trace.json.gz", CHROME_TRACE) as temporary:
        assert temporary.name.endswith(".json.gz")
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_a_file_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everything, so that it is not asked here."""
    path = tmp_path / "t.json"
    path.write_text(TRACE)
    monkeypatch.setattr(writing.os, "access", lambda path, wanted: False)
    with pytest.raises(PerfModelError, match=r"must be writable \(got: Permission denied\)"):
        write_atomically(path, NEWER, CHROME_TRACE)
    assert path.read_text() == TRACE


def test_checks_look_at_the_nearest_folder_and_make_none(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b" / "t.json", CHROME_TRACE)
    check_folder(tmp_path / "a" / "b")
    assert os.listdir(tmp_path) == []
    (tmp_path / "a").write_text(FOREIGN)
    for check in (
        lambda: check_writable(tmp_path / "a" / "t.json", CHROME_TRACE),
        lambda: check_folder(tmp_path / "a"),
    ):
        with pytest.raises(PerfModelError, match="Not a directory"):
            check()
    with pytest.raises(PerfModelError, match=r"/proc/1/x: must be writable"):
        check_folder(Path("/proc/1/x"))


def test_a_file_keeps_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system lets one: only root may give files away, and others' files are written all the same."""
    path, given = tmp_path / "t.json", list[tuple[int, int]]()
    write_atomically(path, TRACE, CHROME_TRACE)
    if os.getuid() == 0:
        os.chown(path, 12345, 12345)
    before = path.stat()
    chown = os.chown

    def recorded(file: Path, uid: int, gid: int) -> None:
        given.append((uid, gid))
        if len(given) > 1:
            raise PermissionError
        chown(file, uid, gid)

    monkeypatch.setattr(os, "chown", recorded)
    for number in (1, 2):
        write_atomically(path, NEWER, CHROME_TRACE)
        assert (path.read_text(), given) == (NEWER, [(before.st_uid, before.st_gid)] * number)
        if number == 1:
            assert (path.stat().st_uid, path.stat().st_gid) == (before.st_uid, before.st_gid)
