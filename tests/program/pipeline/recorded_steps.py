"""What torch's own schedules do: ranks of gloo that run every case, and write down the second step of each."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from perfmodel.program.pipeline.schedules import Action, Await, Compute, Message, Post, Reduce, stages_of
from perfmodel.scenario.scenario import Schedule

TORCH_NAMES: dict[Schedule, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved-1f1b": "Interleaved1F1B",
    "looped-bfs": "LoopedBFS",
    "interleaved-zero-bubble": "InterleavedZeroBubble",
    "zbv-zero-bubble": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
WIDTH = 3


class Case(NamedTuple):
    """What :func:`rank_actions` takes."""

    schedule: Schedule
    ranks: int
    micro_batches: int
    virtual_stages: int = 1


def torch_schedule(case: Case) -> Any:
    """torch's own, over no stages that could run: it raises a ValueError if it refuses the numbers."""
    stages = [
        SimpleNamespace(group_rank=0, group_size=case.ranks, num_stages=case.ranks * case.virtual_stages, submod=None)
        for _ in range(case.virtual_stages)
    ]
    schedule = torch_schedules.get_schedule_class(TORCH_NAMES[case.schedule])
    is_single = issubclass(schedule, torch_schedules.PipelineScheduleSingle)
    return schedule(stages[0] if is_single else stages, case.micro_batches)


def record(cases: Sequence[Case], folder: Path, timeout_s: float) -> dict[Case, tuple[tuple[Action, ...], ...]]:
    """The actions of each rank of each case; the processes are ended after ``timeout_s``."""
    world = max(case.ranks for case in cases)
    context = multiprocessing.spawn(_run_rank, (world, tuple(cases), folder), nprocs=world, join=False)
    try:
        _join(context, time.monotonic() + timeout_s)
    finally:
        for process in context.processes:
            process.kill()
    recorded = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(world)]
    return {case: tuple(recorded[rank][case] for rank in range(case.ranks)) for case in cases}


def _join(context: Any, until: float) -> None:
    while not context.join(timeout=max(0.0, until - time.monotonic())):
        if time.monotonic() >= until:
            raise TimeoutError("the ranks did not finish in time")


def _run_rank(rank: int, world: int, cases: Sequence[Case], folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    try:
        groups = {size: dist.new_group(list(range(size))) for size in sorted({case.ranks for case in cases})}
        found = {case: _second_step(case, rank, groups[case.ranks]) for case in cases if rank < case.ranks}
        (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _second_step(case: Case, rank: int, group: dist.ProcessGroup) -> tuple[Action, ...]:
    count = case.ranks * case.virtual_stages
    stages = [
        PipelineStage(torch.nn.Linear(WIDTH, WIDTH), stage, count, torch.device("cpu"), group=group)
        for stage in stages_of(case.schedule, case.ranks, case.virtual_stages)[rank]
    ]
    schedule_class = torch_schedules.get_schedule_class(TORCH_NAMES[case.schedule])
    is_single = issubclass(schedule_class, torch_schedules.PipelineScheduleSingle)
    schedule = schedule_class(
        stages[0] if is_single else stages, case.micro_batches, loss_fn=torch.nn.functional.mse_loss
    )
    batch = torch.ones(case.micro_batches, WIDTH)
    inputs = (batch,) if stages[0].is_first else ()
    target = batch if stages[-1].is_last else None
    schedule.step(*inputs, target=target)
    with _recording() as recorder:
        schedule.step(*inputs, target=target)
    return recorder.finished()


class _Recorder:
    """Stands in for what stages and torch.distributed do, does it, and writes it down."""

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self._batch: list[Message] | None = None
        self._posts = 0
        self._running: dict[int, int] = {}  # works that were not waited for, by post

    def finished(self) -> tuple[Action, ...]:
        assert not self._running
        return tuple(self._actions)

    def compute(self, method: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def run(stage: Any, micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            found = "I" if kind == "B" and not kwargs.get("full_backward", True) else kind
            self._actions.append(Compute(found, stage.stage_index, micro_batch))
            return method(stage, micro_batch, *args, **kwargs)

        return run

    def reduce(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(stage: Any, *args: Any) -> None:
            self._actions.append(Reduce(stage.stage_index))
            method(stage, *args)

        return run

    def messages(self, method: Callable[..., Any], is_send: bool, kind: str) -> Callable[..., Any]:
        """Labels the tensors that a stage is about to send or receive."""

        def run(stage: Any, micro_batch: int) -> Any:
            operations = method(stage, micro_batch)
            for operation in operations:
                operation.tensor.label = (is_send, kind, stage.stage_index, micro_batch)
            return operations

        return run

    def alone(self, function: Callable[..., Any], is_send: bool) -> Callable[..., Any]:
        def run(tensor: torch.Tensor, **kwargs: Any) -> Any:
            assert tensor.label[0] == is_send
            message = Message(*tensor.label, peer=kwargs["group_dst" if is_send else "group_src"])
            work = function(tensor, **kwargs)
            if self._batch is not None:
                self._batch.append(message)
                return work
            (waited,) = self._posted((message,), [work], is_batched=False)
            return waited

        return run

    def batched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(operations: Any) -> Any:
            self._batch = []
            works = function(operations)
            messages, self._batch = tuple(self._batch), None
            return self._posted(messages, works, is_batched=True)

        return run

    def _posted(self, messages: tuple[Message, ...], works: Sequence[Any], is_batched: bool) -> list[Any]:
        number, self._posts = self._posts, self._posts + 1
        self._actions.append(Post(number, messages, is_batched))
        self._running[number] = len(works)
        return [SimpleNamespace(wait=lambda work=work: self._wait(work, number)) for work in works]

    def _wait(self, work: Any, number: int) -> None:
        if self._running[number] == 1:
            del self._running[number]
            self._actions.append(Await(number))
        else:
            self._running[number] -= 1
        work.wait()


@contextmanager
def _recording() -> Iterator[_Recorder]:
    recorder, stage = _Recorder(), _PipelineStageBase
    isend, irecv = recorder.alone(dist.isend, True), recorder.alone(dist.irecv, False)
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (stage, "forward_one_chunk", recorder.compute(stage.forward_one_chunk, "F")),
        (stage, "backward_one_chunk", recorder.compute(stage.backward_one_chunk, "B")),
        (stage, "backward_weight_one_chunk", recorder.compute(stage.backward_weight_one_chunk, "W")),
        (stage, "perform_reduce_grad", recorder.reduce(stage.perform_reduce_grad)),
        (stage, "get_fwd_send_ops", recorder.messages(stage.get_fwd_send_ops, True, "F")),
        (stage, "get_bwd_send_ops", recorder.messages(stage.get_bwd_send_ops, True, "B")),
        (stage, "get_fwd_recv_ops", recorder.messages(stage.get_fwd_recv_ops, False, "F")),
        (stage, "get_bwd_recv_ops", recorder.messages(stage.get_bwd_recv_ops, False, "B")),
        *((module, "isend", isend) for module in (dist, distributed_c10d)),
        *((module, "irecv", irecv) for module in (dist, distributed_c10d)),
        (dist, "batch_isend_irecv", recorder.batched(dist.batch_isend_irecv)),
    ]
    with ExitStack() as stack:
        for owner, name, function in replaced:
            stack.enter_context(patch.object(owner, name, function))
        yield recorder
