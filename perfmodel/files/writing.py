"""Writing of files: regular files only, whole or not at all, and never in place of a file of another kind.

A symbolic link stays and its target is written. A new file gets the permissions of the umask, an existing one keeps its
own.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from perfmodel.errors import PerfModelError
from perfmodel.files.kinds import FileKind, described, head_of

TEMPORARY = ".perfmodel-"  # begins the names of files that are being written
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_REGULAR = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def write_atomically(path: Path, content: bytes | str, kind: FileKind | None) -> None:
    """Write ``path`` in one step: readers see the old file or the new one, never half of one.

    Parameters
    ----------
    path : Path
        Its folder is made if need be.
    content : bytes or str
    kind : FileKind or None
        What an existing file there must be to be replaced, unless it is empty; None where the folder is perfmodel's own
        and any regular file is replaced.

    Raises
    ------
    PerfModelError
        If something else is there, or the file cannot be written. What was there then stays as it was.
    """
    with replacing(path, kind) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, kind: FileKind | None) -> Iterator[Path]:
    """An empty temporary file, whose name ends as that of ``path`` does, that takes its place at the end.

    Parameters and errors are those of :func:`write_atomically`; after an exception inside nothing is left of it.
    """
    with failures_in_one_sentence(path):
        target = _target(path, kind)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = _new_file(target.parent, "".join(target.suffixes[-2:]))
        try:
            yield temporary
            _keep_permissions(target, temporary)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def check_writable(path: Path, kind: FileKind | None) -> None:
    """Refuse now what :func:`write_atomically` would refuse after the work: before long work begins.

    Nothing is changed: a temporary file is made in the folder (or the nearest that exists) and removed.

    Raises
    ------
    PerfModelError
        As :func:`write_atomically`.
    """
    with failures_in_one_sentence(path):
        _try_folder(_target(path, kind).parent)


def check_folder(path: Path) -> None:
    """Refuse a folder in which no files can be made, or which cannot be made itself; see :func:`check_writable`."""
    with failures_in_one_sentence(path):
        _try_folder(path)


def _try_folder(folder: Path) -> None:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    _new_file(folder).unlink()


@contextmanager
def failures_in_one_sentence(path: Path) -> Iterator[None]:
    """Turn what the system refuses inside into a sentence that begins with ``path``, the file to be written."""
    try:
        yield
    except OSError as error:
        remedy = "Free some space, or choose another place." if error.errno in FULL else "Choose another place."
        raise PerfModelError(f"{path}: must be writable (got: {error.strerror or error}). {remedy}") from error


def _target(path: Path, kind: FileKind | None) -> Path:
    """The file behind all symbolic links, which may be replaced or is not there."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return Path(os.path.realpath(path))
    if not stat.S_ISREG(found.st_mode):
        got = NOT_REGULAR.get(stat.S_IFMT(found.st_mode), "something else")
        raise PerfModelError(f"{path}: must be a regular file to be written (got {got}). Choose another place.")
    target = Path(os.path.realpath(path))
    if not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if kind is not None and found.st_size > 0 and not kind.matches(head := head_of(target)):
        raise PerfModelError(
            f"{path}: must be {kind.name} or not exist to be written (got {described(head)}). Choose another name."
        )
    return target


def _new_file(folder: Path, ending: str = "") -> Path:
    """An empty file with the permissions that the umask leaves."""
    path = folder / f"{TEMPORARY}{secrets.token_hex(6)}{ending}"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    return path


def _keep_permissions(target: Path, temporary: Path) -> None:
    try:
        before = target.stat()
    except FileNotFoundError:
        return
    with suppress(PermissionError):  # only root may give files away
        os.chown(temporary, before.st_uid, before.st_gid)
    os.chmod(temporary, stat.S_IMODE(before.st_mode))
