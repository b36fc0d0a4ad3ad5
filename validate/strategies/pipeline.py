"""A pipeline for real: this rank's stages of the model under a schedule of torch.distributed.pipelining.

Under data parallelism the pipeline has replicas, which stand one after another among the ranks; each stage is wrapped
by DistributedDataParallel over the ranks that hold the same one, and torch's stages tell it when to reduce.

A message of another shape or type than its receiver expects hangs without a word under NCCL. So ranks tell each other
through the store what each stage takes and gives before anything is sent, and every output is looked at before it is.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from calibrate.this_machine.launcher import GROUP_TIMEOUT_S, Alone, Ranks
from perfmodel.errors import PerfModelError
from perfmodel.hardware.measurement import PipelineAction
from perfmodel.models.stages import boundary_tensors, cut, loss_of
from perfmodel.models.step import Mark, TrainingStep, build_module, make_inputs, make_optimizer, update
from perfmodel.program.pipeline.orders import stages_of
from perfmodel.scenario.scenario import ONE_STAGE, Scenario
from perfmodel.scenario.stage_split import pipeline_of
from perfmodel.units import MS
from validate.strategies.data_parallel import Ddp

SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved-1f1b": pipelining.ScheduleInterleaved1F1B,
    "looped-bfs": pipelining.ScheduleLoopedBFS,
    "interleaved-zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv-zero-bubble": pipelining.ScheduleZBVZeroBubble,
    "dualpipev": pipelining.ScheduleDualPipeV,
}
SEED = 0  # of the first replica's batch, which all its ranks draw: the first stage has its tokens, the last its labels
LEAD_IN_STEPS = 2  # before the one whose computing is written down

_made = itertools.count()  # pipelines of this process; every rank makes the same ones in the same order


def own_stages(scenario: Scenario, rank: int, device: torch.device) -> nn.ModuleDict:
    """Return the rank's stages of the model, by number, on a device that holds the whole model for a moment.

    All ranks' random numbers must be in the same state.
    """
    section = pipeline_of(scenario)
    with device:
        modules = cut(build_module(scenario), scenario)
    numbers = stages_of(section.schedule, section.stages, section.virtual_stages)[rank % section.stages]
    return nn.ModuleDict({str(number): modules[number] for number in numbers})


class Replica(NamedTuple):
    """The replica of a pipeline that this rank is in.

    Attributes
    ----------
    number : int
    pipeline : ProcessGroup or None
        The ranks of the replica; None if they are all ranks.
    peers : ProcessGroup or None
        The ranks of all replicas that hold the same stages; None if there is one replica.
    """

    number: int = 0
    pipeline: dist.ProcessGroup | None = None
    peers: dist.ProcessGroup | None = None


def own_replica(scenario: Scenario, timeout_s: float = GROUP_TIMEOUT_S) -> Replica:
    """Return this rank's replica; every rank must ask.

    Parameters
    ----------
    scenario : Scenario
    timeout_s : float
        How long a rank waits for another of a group that is made here, in seconds.
    """
    stages, dp = pipeline_of(scenario).stages, scenario.parallelism.dp
    if dp == 1:
        return Replica()
    number, place = divmod(dist.get_rank(), stages)
    timeout = timedelta(seconds=timeout_s)
    ranks = [list(range(first, first + stages)) for first in range(0, dp * stages, stages)]
    pipelines = [dist.new_group(each, timeout=timeout) for each in ranks]
    peers = [dist.new_group(list(each), timeout=timeout) for each in zip(*ranks, strict=True)]
    return Replica(number, pipelines[number], peers[place])


class ActionLog:
    """When each stage of this rank computed: by CUDA events in the stream that computes, else by the host's clock.

    The host's clock is that of all processes of a machine; that of events is laid on it where the device is idle.
    """

    def __init__(self, device_type: str) -> None:
        self._is_cuda = device_type == "cuda"
        self._computed: list[tuple[str, int, int, Any, Any]] = []
        self._step_began: Any = None
        if self._is_cuda:
            torch.cuda.synchronize()
        self._origin = self._now()
        if self._is_cuda:
            torch.cuda.synchronize()
        self._origin_s = time.perf_counter()

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin_step(self) -> None:
        self._step_began = self._now()

    @contextmanager
    def computing(self, kind: str, stage: int, micro_batch: int) -> Iterator[None]:
        start = self._now()
        yield
        self._computed.append((kind, stage, micro_batch, start, self._now()))

    def extend_last(self) -> None:
        """End here what was computed last."""
        self._computed[-1] = (*self._computed[-1][:-1], self._now())

    def actions(self, ranks: Ranks | Alone) -> tuple[PipelineAction, ...]:
        """Wait for the device; return its actions, in seconds since the first rank began. All ranks must ask."""
        if self._is_cuda:
            torch.cuda.synchronize()
        zero_s = -ranks.largest(-self._host_s(self._step_began))
        return tuple(
            PipelineAction(
                kind=kind,
                stage=stage,
                micro_batch=micro_batch,
                start_s=self._host_s(start) - zero_s,
                end_s=self._host_s(end) - zero_s,
            )
            for kind, stage, micro_batch, start, end in self._computed
        )

    def _host_s(self, at: Any) -> float:
        return self._origin_s + self._origin.elapsed_time(at) * MS if self._is_cuda else float(at)


class Stage(pipelining.PipelineStage):
    """torch's stage, with what it takes and gives known in advance; ``log`` notes when it computes, unless None.

    Were it not known, torch would try each stage outside of no_sync, and DistributedDataParallel would then reduce in
    the first backward as well.
    """

    def __init__(
        self, module: nn.Module, number: int, scenario: Scenario, device: torch.device, replica: Replica
    ) -> None:
        self.takes, self.gives = boundary_tensors(module, scenario)
        count = pipeline_of(scenario).number_of_stages
        module = module if replica.peers is None else Ddp(scenario, replica.peers).wrap(module)
        known = {"input_args": self.takes, "output_args": self.gives}
        super().__init__(module, number, count, device, group=replica.pipeline, **known)
        self.scenario_name = scenario.name
        self.log: ActionLog | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        with self._computing("F", fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        if not self.is_last and (output.shape, output.dtype) != (self.gives.shape, self.gives.dtype):
            raise PerfModelError(
                f"{self.scenario_name}: stage {self.stage_index} must give {_shown(self.gives)}, which stage "
                f"{self.stage_index + 1} expects (it gave {_shown(output)}). Cast it at the end of the stage's forward."
            )
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self._computing("B" if full_backward else "I", bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._computing("W", bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    @contextmanager
    def _computing(self, kind: str, micro_batch: int) -> Iterator[None]:
        if self.log is None:
            yield
        else:
            with self.log.computing(kind, self.stage_index, micro_batch):
                yield


def _shown(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def check_boundaries(stages: Sequence[Stage], replica: int = 0) -> None:
    """Refuse a stage that does not give what the next takes.

    All ranks of a replica compare all stages, so that none goes on alone.

    Raises
    ------
    PerfModelError
        On every rank, before any message between stages.
    """
    store = dist.PrefixStore(f"pipeline/{next(_made)}/{replica}", dist.distributed_c10d._get_default_store())
    for stage in stages:
        store.set(str(stage.stage_index), json.dumps([_shown(stage.takes), _shown(stage.gives)]))
    reported = [json.loads(store.get(str(number))) for number in range(stages[0].num_stages)]
    for number, ((_, gives), (takes, _)) in enumerate(itertools.pairwise(reported)):
        if gives != takes:
            raise PerfModelError(
                f"{stages[0].scenario_name}: stage {number} must give what stage {number + 1} takes (it gives {gives}, "
                f"where {takes} is taken). Cast it at the end of the stage's forward."
            )


class PipelineStep(TrainingStep):
    """One step after another of a whole pipeline, of which this rank has some stages.

    Gradients are the mean of the micro-batches'. Phases, each -1: zero_grad, pipeline (forward and backward of all
    micro-batches, with messages and waiting between), optimizer.

    Parameters
    ----------
    modules : nn.ModuleDict
        As :func:`own_stages` gives, on the device.
    scenario : Scenario
        With a pipeline, or replicas of one, over all ranks of the default process group.
    device : torch.device
    timeout_s : float
        How long a rank waits for another of its replica, or of those that hold the same stages, where there are several
        replicas.

    Raises
    ------
    PerfModelError
        If a stage does not give what the next takes.
    """

    def __init__(
        self,
        modules: nn.ModuleDict,
        scenario: Scenario,
        device: torch.device,
        timeout_s: float = GROUP_TIMEOUT_S,
    ) -> None:
        replica = own_replica(scenario, timeout_s)
        self._stages = [Stage(module, int(number), scenario, device, replica) for number, module in modules.items()]
        check_boundaries(self._stages, replica.number)
        inputs = _own_inputs(self._stages, scenario, device, SEED + replica.number)
        super().__init__(modules, inputs, make_optimizer(modules.parameters(), scenario), scenario)
        self._log: ActionLog | None = None
        self._criterion = loss_of(scenario)
        self._schedule = self._make_schedule()

    def _make_schedule(self) -> Any:
        section = pipeline_of(self.scenario)
        stages: Any = self._stages[0] if section.schedule in ONE_STAGE else self._stages
        return SCHEDULES[section.schedule](stages, section.micro_batches, loss_fn=self._loss_of_micro_batch)

    def _loss_of_micro_batch(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with self._autocast():
            loss = self._criterion(logits, labels)
        if self._log is not None:
            self._log.extend_last()  # the loss belongs to the last stage's forward
        return loss

    def run(self, mark: Mark = lambda phase, micro_batch: None) -> None:
        """Run one whole step; see :meth:`TrainingStep.run`. Ranks must run as many."""
        assert self.optimizer is not None
        mark("zero_grad", -1)
        self.optimizer.zero_grad(set_to_none=True)
        mark("pipeline", -1)
        tokens = (self.inputs["input_ids"],) if "input_ids" in self.inputs else ()
        self._schedule.step(*tokens, target=self.inputs.get("labels"), return_outputs=False)
        update(self.optimizer, None, None, mark)
        mark("end", -1)

    def record_actions(self, ranks: Ranks | Alone) -> tuple[PipelineAction, ...]:
        """Return when each stage of this rank computed what in a step that follows others; every rank must ask."""
        ranks.together()
        log = ActionLog(self.device_type)
        for _ in range(LEAD_IN_STEPS):
            self.run()
        log.begin_step()
        self._write_to(log)
        self.run()
        self._write_to(None)
        return log.actions(ranks)

    def _write_to(self, log: ActionLog | None) -> None:
        self._log = log
        for stage in self._stages:
            stage.log = log


def _own_inputs(
    stages: Sequence[Stage], scenario: Scenario, device: torch.device, seed: int
) -> dict[str, torch.Tensor]:
    """Return tokens for the first stage and labels for the last, of one batch of all ranks of the pipeline."""
    batch: Mapping[str, torch.Tensor] = make_inputs(scenario, "cpu", torch.Generator().manual_seed(seed))
    wanted = {"input_ids": any(stage.is_first for stage in stages), "labels": any(stage.is_last for stage in stages)}
    return {name: batch[name].to(device) for name, is_wanted in wanted.items() if is_wanted}
