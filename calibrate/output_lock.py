"""One calibration at a time into one profile: each replaces the whole file with what it knows."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from perfmodel.errors import PerfModelError
from perfmodel.file_kinds import PROFILE
from perfmodel.writing import check_writable, failures_in_one_sentence

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems that have none: one goes on without


@contextmanager
def locked(output: Path, shared: bool = False) -> Iterator[None]:
    """Hold the lock of the profile ``output``, in a hidden file in the same folder that is removed at the end.

    The system releases the lock of a process that is killed, so that a file left behind keeps nobody out.

    Parameters
    ----------
    output : Path
    shared : bool
        Keep out only calibrations that do not share: for one on several machines, which may see one file.

    Raises
    ------
    PerfModelError
        If another calibration holds it, or the profile could not be written.
    """
    check_writable(output, PROFILE)
    target = Path(os.path.realpath(output))
    path = target.with_name(f".{target.name}.perfmodel-lock")
    with failures_in_one_sentence(output):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = _acquired(path, output, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    try:
        yield
    finally:
        _release(path, handle)


def _acquired(path: Path, output: Path, way: int) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(handle, way)
        except BlockingIOError as error:
            number = os.read(handle, 20).decode(errors="replace")
            holder = f"process {number}" if number.isdecimal() else "another process"
            os.close(handle)
            raise PerfModelError(
                f"{output}: one calibration at a time must write it ({holder} does). Wait for its end, or "
                "choose another --output."
            ) from error
        if _is_at(path, handle):
            break
        os.close(handle)  # whoever held it has removed it meanwhile
    with suppress(OSError):  # on a full disk nobody is told who holds it
        os.truncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}".encode(), 0)
    return handle


def _lock(handle: int, way: int) -> None:
    try:
        fcntl.flock(handle, way | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _release(path: Path, handle: int) -> None:
    try:
        _lock(handle, fcntl.LOCK_EX)
        path.unlink(missing_ok=True)
    except BlockingIOError:  # others share it still
        pass
    finally:
        os.close(handle)
