"""One program on several ranks of this machine, through torch's elastic launcher: a process a GPU, and a time limit.

The side of the launching process is :func:`run_ranks`; a rank takes its place among the others with :func:`join`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from calibrate.this_machine.child_process import end_with_parent, ending_with
from calibrate.this_machine.wirings import backend_of, environment
from perfmodel.errors import PerfModelError
from perfmodel.files.writing import write_atomically

GROUP_TIMEOUT_S = 120.0  # for the others, of a rank that waits in a collective
LONGEST_CAUSE = 200
ENDINGS = (".trace.json.gz", ".trace.json", ".json.gz", ".json")
ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*: (?P<rank>\d+).*?exitcode\s*: (?P<code>-?\d+)", re.DOTALL)  # elastic's
SIGNS_OF_WAITING = ("timed out", "timeout", "connection closed by peer", "connection reset")


class Alone:
    """The only rank."""

    rank, size = 0, 1

    def largest(self, value: float) -> float:
        return value

    def together(self) -> None:
        """Nobody is to be waited for."""


class Ranks:
    """This rank among others, and how they agree outside of what is measured: through the launcher's store."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store = store
        self._round = 0

    def largest(self, value: float) -> float:
        """Return the largest value that any rank gives; every rank must ask, in the same order."""
        self._round += 1
        self._store.set(f"{self._round}/{self.rank}", repr(value))
        return max(float(self._store.get(f"{self._round}/{rank}")) for rank in range(self.size))

    def together(self) -> None:
        """Wait until every rank is here."""
        self.largest(0.0)


@contextlib.contextmanager
def join(device: str, interconnect: str | None, timeout_s: float = GROUP_TIMEOUT_S) -> Iterator[Ranks]:
    """Make the process group that torch's launcher started this process for, and leave it at the end.

    Parameters
    ----------
    device : str
        ``cuda``: the rank gets the GPU of its local number, and NCCL. ``cpu``: gloo.
    interconnect : str or None
        Its environment variables are set before CUDA or NCCL start; None leaves the machine as it is.
    timeout_s : float
        Seconds after which a rank that waits for another gives up.

    Raises
    ------
    PerfModelError
        If the interconnect is not known, or there are fewer GPUs than ranks.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    end_with_parent()
    os.environ.update(_environment(interconnect, rank, size))
    import torch
    import torch.distributed as dist

    if device == "cuda":
        _take_gpu(int(os.environ["LOCAL_RANK"]), torch.cuda.device_count())
    timeout = timedelta(seconds=timeout_s)
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    dist.init_process_group(
        backend_of(device, interconnect),
        store=dist.PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    ranks = Ranks(dist.PrefixStore("agree", store), rank, size)
    yield ranks
    ranks.together()
    dist.destroy_process_group()


def _take_gpu(number: int, gpus: int) -> None:
    if number >= gpus:
        raise PerfModelError(
            f"--device cuda: every rank must have a GPU of its own (rank {number} finds {gpus}). Use fewer ranks."
        )
    import torch

    torch.cuda.set_device(number)


def _environment(interconnect: str | None, rank: int, size: int) -> dict[str, str]:
    return {} if interconnect is None else environment(interconnect, rank, size)


def of_rank_path(path: Path, rank: int) -> Path:
    """Return the file of a rank beside rank 0's, whose name stays.

    >>> of_rank_path(Path("gpt-2.7b.trace.json.gz"), 1).name, of_rank_path(Path("result.json"), 0).name
    ('gpt-2.7b.rank1.trace.json.gz', 'result.json')
    """
    if rank == 0:
        return path
    ending = next((each for each in ENDINGS if path.name.endswith(each)), "")
    return path.with_name(f"{path.name.removesuffix(ending)}.rank{rank}{ending}")


@contextlib.contextmanager
def telling(folder: Path, rank: int) -> Iterator[None]:
    """Write down what ends this rank early, for :func:`run_ranks`, and end the process with it."""
    try:
        yield
    except BaseException as error:
        report = {"error": str(error), "kind": type(error).__name__, "rank": rank, "at_s": time.time()}
        write_atomically(_failure(folder, rank), json.dumps(report), None)
        raise


def _failure(folder: Path, rank: int) -> Path:
    return folder / f"failure.{rank}.json"


@dataclass(frozen=True)
class Launch:
    """What to run on the ranks. program: after ``python``: a file, or ``-m`` and a module, and its arguments. folder:
    for the ranks to write to, and for what went wrong. name: what errors begin with. environment: of the launcher.
    nodes, rendezvous: with several machines the same launch is made on each, for ranks / nodes processes; they meet at
    ``host:port`` of one of them.
    """

    name: str
    program: Sequence[str]
    ranks: int
    device: str
    folder: Path
    timeout_s: float
    environment: dict[str, str]
    nodes: int = 1
    rendezvous: str | None = None


def check_nodes(ranks: int, nodes: int, rendezvous: str | None) -> None:
    """Refuse what no launch can be made of.

    Raises
    ------
    PerfModelError
        If the ranks do not divide among the nodes, or several nodes do not know where to meet.
    """
    if nodes < 1 or ranks % nodes:
        raise PerfModelError(f"--nnodes must divide the ranks (got {ranks} ranks on {nodes}). Change one of them.")
    if (nodes > 1) != (rendezvous is not None):
        raise PerfModelError(
            f"--rdzv must be given if and only if there are several nodes (got {rendezvous} for {nodes}). "
            "Give host:port of one of them, the same on all."
        )
    if rendezvous is not None and not re.fullmatch(r".+:\d+", rendezvous):
        raise PerfModelError(f"--rdzv must be host:port (got {rendezvous!r}). Give the same on all nodes.")


def run_ranks(launch: Launch) -> None:
    """Run the program once on every rank of this machine and wait for all.

    One rank that fails ends all; so does the time limit, and so does the end of this process.

    Raises
    ------
    PerfModelError
        The first that a rank raised inside :func:`telling`; or naming the rank and the error that ended the run; or
        that time was up; or that the ranks do not divide among the nodes.
    """
    check_nodes(launch.ranks, launch.nodes, launch.rendezvous)
    log = launch.folder / "log"
    try:
        code = run_within(launch.timeout_s, _command(launch), log, launch.environment)
    except subprocess.TimeoutExpired as error:
        raise _time_is_up(launch) from error
    if code != 0:
        raise _first_failure(launch, log.read_text(errors="replace"))


def run_within(timeout_s: float, command: Sequence[str], log: Path, environment: dict[str, str]) -> int:
    """Return the exit code of a command that writes what it says to ``log``.

    Its processes end at the latest with this call, or with this process.

    Raises
    ------
    subprocess.TimeoutExpired
        If it did not end within ``timeout_s``.
    """
    with log.open("wb") as output:
        command, environment = ending_with(os.getpid(), command, environment)
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            return process.wait(timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # ranks end with their launcher
                process.wait()


def _command(launch: Launch) -> list[str]:
    endpoint = launch.rendezvous or "127.0.0.1:0"
    address = () if launch.rendezvous else ("--local-addr=127.0.0.1",)
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"),
        *(f"--nnodes={launch.nodes}", f"--nproc-per-node={launch.ranks // launch.nodes}", *address),
        *("--max-restarts=0", *launch.program),
    ]


def _time_is_up(launch: Launch) -> PerfModelError:
    return PerfModelError(
        f"{launch.name}: the run on {launch.ranks} ranks must end within {launch.timeout_s:g} s (it did not, and every "
        "rank was ended). Allow more with --timeout, or make it smaller."
    )


def _first_failure(launch: Launch, log: str) -> PerfModelError:
    failures = [json.loads(path.read_text()) for path in launch.folder.glob("failure.*.json")]
    sentences = [report for report in failures if report["kind"] == PerfModelError.__name__]
    if sentences:
        return PerfModelError(_earliest(sentences)["error"])
    print(log, file=sys.stderr, end="")
    failures += _vanished(failures, log)
    causes = [report for report in failures if not _gave_up(report)]
    if causes or not failures:
        cause = _described(_earliest(causes)) if causes else "no rank said why"
        return PerfModelError(
            f"{launch.name}: the step must run on {launch.ranks} ranks of {launch.device} ({cause}). "
            "The whole message is above."
        )
    return PerfModelError(
        f"{launch.name}: every rank must take part in every collective in time (one did not: "
        f"{_described(_earliest(failures))}). The whole message is above; see which rank did not come."
    )


def _vanished(failures: list[dict[str, Any]], log: str) -> list[dict[str, Any]]:
    """Return what the log says of a rank that ended without a word, as NCCL's watchdog ends one that waits too long."""
    for line in log.splitlines():
        if not failures and "caught collective operation timeout" in line:
            return [{"error": line.rpartition("] ")[2], "kind": "NCCL", "rank": "?", "at_s": 0.0}]
    found = ROOT_CAUSE.search(log)
    if found is None or int(found["rank"]) in [report["rank"] for report in failures]:
        return []
    return [{"error": found["code"], "kind": "exit code", "rank": int(found["rank"]), "at_s": 0.0}]


def _gave_up(report: dict[str, Any]) -> bool:
    """Return whether the rank was waiting for another."""
    return any(sign in report["error"].lower() for sign in SIGNS_OF_WAITING)


def _earliest(failures: list[dict[str, Any]]) -> dict[str, Any]:
    return min(failures, key=lambda report: float(report["at_s"]))


def _described(report: dict[str, Any]) -> str:
    lines = report["error"].strip().splitlines()
    return f"rank {report['rank']}: {report['kind']}: {lines[0] if lines else ''}"[:LONGEST_CAUSE]
