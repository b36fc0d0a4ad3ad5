"""What a kernel of a busy CUDA stream takes more while other streams wait for an event.

Processes differ in it, and by 3 % in how closely kernels follow each other at all. (On H200s it is nothing with
one stream, and with two 1.0 to 1.1 us in the six processes of h200-sxm-x4, see its provenance.) So several tell, one
after the other.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.this_machine.child_process import ending_with
from perfmodel.errors import PerfModelError

if TYPE_CHECKING:
    import torch

    from calibrate.timing.cuda_stopwatch import Stream

ROOT = Path(__file__).resolve().parents[2]
PROCESSES, TIMEOUT_S = 6, 90.0
MOST_WAITING = 4  # streams
ROUNDS = 15
KERNELS, HOLD_S = 400, 0.02
TOKENS, WIDTH = 256, 1024  # of the layer whose kernels are spaced


def waiting_spacings_s(advance: Callable[[], None]) -> list[list[float]]:
    """Return, by process, seconds from kernel to kernel while 0 to :data:`MOST_WAITING` streams wait.

    Parameters
    ----------
    advance : callable
        Is called after each process.

    Raises
    ------
    PerfModelError
        If a process fails or does not end in time.
    """
    search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    found = []
    for _ in range(PROCESSES):
        found.append(_of_a_process(os.environ | {"PYTHONPATH": search_path}))
        advance()
    return found


def waiting_gaps_s(spacings_s: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return what a kernel takes more while one stream waits, two, ...: the mean over the processes.

    >>> waiting_gaps_s([[2.0, 2.0, 3.0], [2.0, 1.5, 4.0]])
    (0.0, 1.5)
    """
    alone_s, *beside_s = map(statistics.fmean, zip(*spacings_s, strict=True))
    return tuple(max(each_s - alone_s, 0.0) for each_s in beside_s)


def _of_a_process(environment: dict[str, str]) -> list[float]:
    command, environment = ending_with(
        os.getpid(), [sys.executable, "-m", "calibrate.device.waiting_streams"], environment
    )
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        said = error.stderr or b""
        last = (said if isinstance(said, str) else said.decode()).strip().splitlines()[-1:] or [str(error)]
        raise PerfModelError(
            f"calibrate: a process that times kernels beside waiting streams must end (got: {last[0]}). Run it again."
        ) from error
    return [float(each) for each in json.loads(done.stdout)]


# in each process


def _spacings_s() -> list[float]:
    import torch

    from calibrate.timing.cuda_stopwatch import CudaStream

    stream, calls = CudaStream(), _layer()
    found_s: list[list[float]] = [[] for _ in range(MOST_WAITING + 1)]
    for _ in range(ROUNDS):  # in turns: what else changes with time meets all equally
        for waiting, samples_s in enumerate(found_s):
            others = [torch.cuda.Stream() for _ in range(waiting)]
            samples_s.append(_spacing_s(stream, calls, others))
    return [statistics.median(samples_s) for samples_s in found_s]


def _layer() -> list[Callable[[], object]]:
    """Small kernels of a transformer's layer, one of each kind."""
    import torch

    x, weight = (torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16) for rows in (TOKENS, WIDTH))
    return [
        lambda: torch.nn.functional.layer_norm(x, (WIDTH,)),
        lambda: torch.mm(x, weight),
        lambda: torch.nn.functional.gelu(x),
        lambda: torch.add(x, x),
    ]


def _spacing_s(stream: Stream, calls: Sequence[Callable[[], object]], others: Sequence[torch.cuda.Stream]) -> float:
    """Return seconds from kernel to kernel of a stream whose end the others wait for."""
    import torch

    stream.drain()
    stream.hold(HOLD_S)
    first = stream.mark()
    for index in range(KERNELS):
        calls[index % len(calls)]()
    last = stream.mark()
    for each in others:
        each.wait_event(last)
        with torch.cuda.stream(each):
            calls[-1]()
    spacing_s = stream.between_s(first, last) / KERNELS
    stream.drain()
    return spacing_s


if __name__ == "__main__":
    print(json.dumps(_spacings_s()))
