"""The device clock's own constants and the memory outside tensors, from work that does almost nothing. CUDA only."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from calibrate.kernels.profiled import observe
from calibrate.timing.cuda_stopwatch import CudaStopwatch, Stream
from perfmodel.hardware.profile import Launch, MemoryConstants

TRIALS = 200
PROFILED = 9
QUEUE_HOLD_S = 0.1
QUEUE_MOST = 5000
BLOCKED_LAUNCH_S = 1e-3  # a launch that takes longer was held back


def empty_kernel_s(stopwatch: CudaStopwatch) -> float:
    """Return what a kernel that does nothing adds to a busy stream: its own time and the gap after it."""
    return stopwatch.measure(_empty_kernel).median_s


def launch_constants(stopwatch: CudaStopwatch, spacing_s: float) -> Launch:
    """Latency of a launch on an idle stream, depth of the launch queue, cost of synchronising.

    spacing_s: of :func:`empty_kernel_s`.
    """
    finished_s, synchronized_s = _round_trips()
    return Launch(
        latency_s=max(finished_s - spacing_s, 0.0),
        queue_depth=queue_depth(stopwatch.stream),
        synchronize_s=max(synchronized_s - finished_s, 0.0),
    )


def gap_s(spacing_s: float) -> float:
    """Return the gap between kernels: spacing of empty kernels in a busy stream less the time that one runs.

    The profiler says how long one runs. It slows later launches down, so this comes after all timing.
    """
    seen = [activity.busy_s for activity in observe([lambda: _empty_kernel] * PROFILED, lambda _: None) if activity]
    return max(spacing_s - statistics.median(seen), 0.0) if seen else 0.0


def _empty_kernel() -> None:
    torch.cuda._sleep(0)


def _round_trips() -> tuple[float, float]:
    """Return median seconds until an empty kernel, once launched, is seen to end, by polling and by waiting."""
    polled, synchronized = [], []
    for _ in range(TRIALS):
        polled.append(_after_launch(_poll))
        synchronized.append(_after_launch(torch.cuda.Event.synchronize))
    return statistics.median(polled), statistics.median(synchronized)


def _after_launch(wait: Callable[[torch.cuda.Event], object]) -> float:
    event = torch.cuda.Event()
    torch.cuda.synchronize()
    _empty_kernel()
    launched_s = time.perf_counter()
    event.record()
    wait(event)
    return time.perf_counter() - launched_s


def _poll(event: torch.cuda.Event) -> None:
    while not event.query():
        pass


def queue_depth(stream: Stream) -> int:
    """Launches that fit into the queue of a held stream before the host is held back too."""
    torch.cuda.synchronize()
    stream.hold(QUEUE_HOLD_S)
    depth = QUEUE_MOST
    for launched in range(1, QUEUE_MOST):
        began_s = time.perf_counter()
        _empty_kernel()
        if time.perf_counter() - began_s > BLOCKED_LAUNCH_S:
            depth = launched
            break
    torch.cuda.synchronize()
    return depth


def memory_constants() -> MemoryConstants:
    """Return what a process holds before its first tensor, and what the first GEMMs take from the allocator.

    Must run before anything else multiplied in this process: workspaces are allocated once.
    """
    torch.cuda.init()
    plain_bytes = _growth(lambda: torch.mm(_ones(256, 256), _ones(256, 256)))
    epilogue_bytes = _growth(lambda: torch.addmm(_ones(256), _ones(256, 256), _ones(256, 256).t()))
    _usual_kernels()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return MemoryConstants(
        context_bytes=max(total - free - torch.cuda.memory_reserved(), 0),
        cublas_workspace_bytes=plain_bytes,
        cublaslt_workspace_bytes=epilogue_bytes,
    )


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="cuda", dtype=torch.bfloat16)


def _growth(work: Callable[[], object]) -> int:
    before = int(torch.cuda.memory_allocated())
    work()
    torch.cuda.synchronize()
    return max(int(torch.cuda.memory_allocated()) - before, 0)


def _usual_kernels() -> None:
    """Run one kernel of each kind that any training step loads: their modules stay in device memory once used."""
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)
    y = torch.nn.functional.layer_norm(torch.nn.functional.gelu(x @ weight), (64,)).softmax(-1)
    torch.nn.functional.cross_entropy(y, torch.zeros(64, dtype=torch.long, device="cuda")).backward()
    torch.optim.AdamW([x, weight]).step()
