"""Children that end with the process that started them, killed for real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from calibrate.this_machine.child_process import STARTER, ending_with
from tests.places import ROOT

PARENT = """
    import os, sys
    from pathlib import Path
    from calibrate.this_machine.launcher import Launch, run_ranks, run_within
    folder, program, ranks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    environment = dict(os.environ)
    if ranks == 1:
        run_within(600, [sys.executable, program, str(folder)], folder / "log", environment)
    else:
        run_ranks(Launch("x", [program, str(folder)], ranks, "cpu", folder, 600, environment))
"""
CHILD = """
    import os, sys, time
    from pathlib import Path
    from calibrate.this_machine.launcher import join
    folder = Path(sys.argv[1])
    def sleep(rank):
        (folder / f"{rank}.part").write_text(str(os.getpid()))
        (folder / f"{rank}.part").rename(folder / f"{rank}.pid")
        time.sleep(600)
    if "RANK" in os.environ:
        with join("cpu", "gloo") as ranks:
            sleep(ranks.rank)
    sleep("alone")
"""
PATIENCE_S = 100.0  # a busy machine's; nothing is waited for once it is there


def wait_for(condition) -> bool:
    give_up_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_s:
        if condition():
            return True
        time.sleep(0.05)
    return False


def is_gone(pid: int) -> bool:
    """Or only waits to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("names", [("alone",), ("0", "1")], ids=["a case", "ranks"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_workers_end_with_their_parent_however_it_ends(tmp_path: Path, number: int, names: tuple[str, ...]) -> None:
    for name, code in (("parent.py", PARENT), ("child.py", CHILD)):
        (tmp_path / name).write_text(textwrap.dedent(code))
    arguments = (str(tmp_path), str(tmp_path / "child.py"), str(len(names)))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, str(tmp_path / "parent.py"), *arguments], env=environment)
    try:
        written = [tmp_path / f"{name}.pid" for name in names]
        assert wait_for(lambda: all(path.exists() for path in written)), (tmp_path / "log").read_text()
    finally:
        parent.send_signal(number)
        parent.wait()
    pids = [int(path.read_text()) for path in written]
    assert wait_for(lambda: all(map(is_gone, pids)))


def test_a_child_whose_parent_is_dead_already_does_not_begin(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    command, environment = ending_with(1, [sys.executable, "-c", f"open({str(begun)!r}, 'w')"], dict(os.environ))
    assert subprocess.run(command, env=environment, check=False).returncode == 1
    assert not begun.exists()


def test_a_child_knows_its_arguments_and_its_own_children_whom_to_end_with() -> None:
    code = f"import os, sys; print(os.environ[{STARTER!r}] == str(os.getpid()), sys.argv[1:])"
    command, environment = ending_with(os.getpid(), [sys.executable, "-c", code, "-m", "a b"], dict(os.environ))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True ['-m', 'a b']\n"
