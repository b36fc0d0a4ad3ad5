"""Processes that end with the one that started them, however it ends: also by a signal that it cannot handle.

``python child_process.py COMMAND ...`` becomes COMMAND, which Linux then kills when its parent dies.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux, which outlives an exec
STARTER = "PERFMODEL_STARTED_BY"  # environment: the process that a child is to end with


def ending_with(process: int, command: Sequence[str], environment: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Return the command and environment of a child that ends with ``process``, which starts it."""
    return [sys.executable, "-IS", __file__, *command], environment | {STARTER: str(process)}


def end_with_parent() -> None:
    """Ask Linux to kill this process when its parent dies, and end now if it is dead already.

    A child in a session of its own is reached by no signal to its parent's.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    starter = os.environ.get(STARTER)
    if starter is not None and os.getppid() != int(starter):
        os._exit(1)


if __name__ == "__main__":
    end_with_parent()
    os.execve(sys.argv[1], sys.argv[1:], os.environ | {STARTER: str(os.getpid())})
