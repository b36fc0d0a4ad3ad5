"""Two calibrations into one file: the second is refused, and nothing that was killed keeps others out."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from calibrate import imported, output_lock, session
from calibrate.interconnect.plan import InterconnectOptions
from calibrate.interconnect.session import calibrate_interconnect
from calibrate.output_lock import locked
from perfmodel.errors import PerfModelError
from perfmodel.hardware.profile import Device, Profile, save_profile
from tests.places import ROOT

HOLDER = """
import sys, time
from pathlib import Path
from calibrate.output_lock import locked
with locked(Path(sys.argv[1]), shared=sys.argv[2] == "shared"):
    print("locked", flush=True)
    time.sleep(600)
"""


def holder(path: Path, how: str = "alone") -> subprocess.Popen[str]:
    """Another process that holds the lock."""
    command = [sys.executable, "-c", HOLDER, str(path), how]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "p.json"
    save_profile(Profile(name="p", device=Device(kind="cpu", name="CPU", memory_bytes=1)), path)
    return path


WRITERS: dict[str, Any] = {
    "calibrate": lambda path: session.calibrate(path, "cpu", resume=True, progress=False),
    "interconnect": lambda path: calibrate_interconnect(path, InterconnectOptions("gloo", "cpu", 2)),
    "import": lambda path: imported.import_measurements(path, path),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_a_second_writer_is_refused_until_the_first_is_killed(profile: Path, tmp_path: Path, write: Any) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(profile.name)
    before, process = profile.read_text(), holder(profile)
    try:
        for path in (profile, link):
            sentence = rf"{path.name}: one calibration at a time must write it \(process {process.pid} does\)\. Wait"
            with pytest.raises(PerfModelError, match=sentence):
                write(path)
    finally:
        end(process)
    assert profile.read_text() == before
    with locked(profile):
        pass
    assert sorted(os.listdir(tmp_path)) == ["link.json", "p.json"]


def test_machines_of_one_launch_share_a_lock(profile: Path, tmp_path: Path) -> None:
    process = holder(profile, "shared")
    try:
        with locked(profile, shared=True):
            pass
        with pytest.raises(PerfModelError, match="one calibration at a time"), locked(profile):
            pass
    finally:
        end(process)
    with locked(profile):
        assert len(os.listdir(tmp_path)) == 2
    assert os.listdir(tmp_path) == ["p.json"]


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(
    profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    lock = output_lock._lock

    def slow(handle: int, way: int) -> None:
        lock(handle, way)
        if not opened:
            opened.append(tmp_path / ".p.json.perfmodel-lock")
            opened[0].unlink()

    monkeypatch.setattr(output_lock, "_lock", slow)
    with locked(profile):
        process = subprocess.run(
            [sys.executable, "-c", HOLDER, str(profile), "alone"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert f"(process {os.getpid()} does)" in process.stderr


def test_a_file_system_without_locks_is_no_obstacle(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(handle: int, way: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(output_lock.fcntl, "flock", none)
    with locked(profile):
        pass


def test_a_full_disk_keeps_nobody_out(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, content: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(output_lock.os, "pwrite", full)
    with locked(profile):  # noqa: SIM117
        with pytest.raises(PerfModelError, match=r"\(another process does\)"), locked(profile):
            pass


def test_a_lock_that_cannot_be_made_is_one_sentence(profile: Path) -> None:
    (profile.parent / ".p.json.perfmodel-lock").mkdir()
    with pytest.raises(PerfModelError, match=r"p\.json: must be writable \(got: Is a directory\)"), locked(profile):
        pass


def test_what_is_no_profile_is_not_locked(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("notes")
    with pytest.raises(PerfModelError, match="must be a profile or not exist"), locked(tmp_path / "p.json"):
        pass
    assert os.listdir(tmp_path) == ["p.json"]


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "notes"])
def test_what_is_no_lock_stays_as_it_was(profile: Path, tmp_path: Path, kind: str) -> None:
    place, notes = tmp_path / ".p.json.perfmodel-lock", tmp_path / "notes"
    notes.write_text("all of them")
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "notes":
        os.link(notes, place)
    else:
        place.symlink_to(notes.name if kind == "link" else "nothing")
    before = place.lstat()
    with (
        pytest.raises(PerfModelError, match=r"\.p\.json\.perfmodel-lock: must be a calibration's lock"),
        locked(profile),
    ):
        pass
    assert notes.read_text() == "all of them"
    assert os.path.samestat(place.lstat(), before)
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("content", ["", "4711"])
def test_a_lock_that_was_left_behind_is_taken(profile: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / ".p.json.perfmodel-lock").write_text(content)
    with locked(profile):
        assert (tmp_path / ".p.json.perfmodel-lock").read_text() == str(os.getpid())
    assert os.listdir(tmp_path) == ["p.json"]
