"""One calibration at a time into one profile: each replaces the whole file with what it knows."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from perfmodel.errors import PerfModelError
from perfmodel.files.kinds import PROFILE
from perfmodel.files.writing import check_writable, failures_in_one_sentence

DIGITS = 20  # that the number of a process has at most
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems that have none: one goes on without


@contextmanager
def locked(output: Path, shared: bool = False) -> Iterator[Path]:
    """Hold the lock of the profile ``output``, in a hidden file in the same folder that is removed at the end.

    The system releases the lock of a process that is killed, so that a file left behind keeps nobody out.

    Parameters
    ----------
    output : Path
    shared : bool
        Keep out only calibrations that do not share: for one on several machines, which may see one file.

    Yields
    ------
    Path
        The file behind all symbolic links, beside which a calibration keeps its other files.

    Raises
    ------
    PerfModelError
        If another calibration holds it, the profile could not be written, or something else is in the lock's place,
        which then stays as it was.
    """
    check_writable(output, PROFILE)
    target = Path(os.path.realpath(output))
    path = target.with_name(f".{target.name}.perfmodel-lock")
    with failures_in_one_sentence(output):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle = _acquired(path, output, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    try:
        yield target
    finally:
        _release(path, handle)


def _acquired(path: Path, output: Path, way: int) -> int:
    while True:
        handle = _opened(path)
        try:
            _lock(handle, way)
        except BlockingIOError as error:
            number = os.pread(handle, DIGITS, 0).decode(errors="replace")
            holder = f"process {number}" if number else "another process"
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


def _opened(path: Path) -> int:
    """Return the lock's file, new or one that a calibration left; never the target of a link."""
    if path.is_symlink():
        raise _not_a_lock(path, "a symbolic link")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _not_a_lock(path, "no regular file")
    content = os.pread(handle, DIGITS + 1, 0)
    if content and not (content.isdigit() and len(content) <= DIGITS):
        os.close(handle)
        raise _not_a_lock(path, f"a file that begins with {content.decode(errors='replace')!r}")
    return handle


def _not_a_lock(path: Path, got: str) -> PerfModelError:
    return PerfModelError(
        f"{path}: must be a calibration's lock, empty or with the number of a process, or not exist (got {got}). Move "
        "it away, or choose another --output."
    )


def _lock(handle: int, way: int) -> None:
    try:
        fcntl.flock(handle, way | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(handle))
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
