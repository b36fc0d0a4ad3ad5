"""One case, run in this process: build it, warm it up, time it. ``python -m validate.worker REQUEST RESULT``.

Started by :mod:`validate.run`, which gives every case a process of its own, or one for each of its ranks. Ranks decide
together how many steps they run, and meet before each stretch of steps.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from calibrate.host.reference import HostReference
from calibrate.this_machine import nvml
from calibrate.this_machine.launcher import GROUP_TIMEOUT_S, Alone, Ranks, join, of_rank_path, telling
from perfmodel.errors import PerfModelError
from perfmodel.files.writing import write_atomically
from perfmodel.hardware.measurement import Measurement, PipelineAction, StepMemory
from perfmodel.models.build import replace_tensors
from perfmodel.models.own_code import out_of_memory_passes
from perfmodel.models.step import TrainingStep, build_module, make_inputs, make_optimizer, precision_switches
from perfmodel.program.strategies.ddp import REBUILD_STEP_OF_STATIC_GRAPH
from perfmodel.scenario.scenario import Scenario
from perfmodel.units import format_bytes
from validate.cases import resolved_scenario
from validate.clocks import Clock, CudaClock, HostClock, steps_of
from validate.machine import gpu_readings, machine
from validate.overlap import TRACED_STEPS
from validate.recording import AllocatorHistory, record_trace
from validate.strategies.data_parallel import Ddp
from validate.strategies.forms import make_form

MEMORY_STEPS = REBUILD_STEP_OF_STATIC_GRAPH + 1  # the last is steady, however DDP is asked to work
HISTORY_STEPS = 2
LEAD_IN_STEPS = 3
BLOCK_S = 0.5  # of steps between two looks at the host's speed
FEWEST_BLOCKS, LEAST_BLOCK_STEPS = 4, 4


@dataclass(frozen=True)
class Effort:
    """How long to measure: steps are added up to the seconds asked for, within the numbers given.

    The first steps, whose memory is read, count among the warm-up.
    """

    warmup_steps: int = 5
    warmup_s: float = 2.0
    steady_s: float = 3.0
    least_steps: int = 12
    most_steps: int = 60
    synced_s: float = 1.5
    least_synced_steps: int = 6

    def steady_steps(self, step_s: float) -> int:
        return min(max(math.ceil(self.steady_s / step_s), self.least_steps), self.most_steps)

    def synced_steps(self, step_s: float) -> int:
        return min(max(math.ceil(self.synced_s / step_s), self.least_synced_steps), self.most_steps)


@dataclass
class Steady:
    """The steady loop: seconds of steps and of their phases; steps in each block; and the host reference after it."""

    step_s: list[float] = field(default_factory=list)
    phases_s: dict[str, list[float]] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)
    host_reference_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes
    ----------
    scenario : dict
        A scenario as plain data.
    folder : str or None
        The folder of its file.
    trace, history : str or None
        Where to write recordings.
    ranks : int
        Processes that run it together, each with a GPU.
    group_timeout_s : float
        How long one rank waits for another, in seconds.
    """

    name: str
    split: str
    group: str
    scenario: dict[str, Any]
    device: str
    allow_import: bool = False
    folder: str | None = None
    trace: str | None = None
    history: str | None = None
    ranks: int = 1
    group_timeout_s: float = GROUP_TIMEOUT_S


def measure_here(request: Request, effort: Effort, ranks: Ranks | Alone | None = None) -> Measurement:
    """Run the case in this process; see :func:`validate.run.measure` for what is measured and how.

    ranks: the others that run it at the same time; None if there are none. The measurement is what this rank saw.

    Raises
    ------
    PerfModelError
        If the device is missing or too small, or steps were skipped by the gradient scaler.
    """
    scenario = Scenario.model_validate(request.scenario)
    if request.folder is not None:
        scenario = scenario.found_in(Path(request.folder))
    device = _device(request.device)
    torch.manual_seed(0)
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        with precision_switches(scenario), out_of_memory_passes() if device.type == "cuda" else nullcontext():
            return _measure(request, effort, scenario, device, ranks or Alone())
    except torch.OutOfMemoryError as error:
        if device.type != "cuda":  # then the model raised it, and has its traceback shown as for any other failure
            raise
        total_bytes = torch.cuda.mem_get_info()[1]
        raise PerfModelError(
            f"{request.name}: the step must fit the device's {format_bytes(total_bytes)} (it ran out of memory). "
            "Make batch.size smaller."
        ) from error


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise PerfModelError("--device cuda: torch must see a CUDA device (it sees none). Use --device cpu.")
    return torch.device(name)


def _measure(
    request: Request, effort: Effort, scenario: Scenario, device: torch.device, ranks: Ranks | Alone
) -> Measurement:
    history = AllocatorHistory() if request.history and device.type == "cuda" else None
    step = _build(request, scenario, device, history, ranks)
    memory = _first_steps(step, history, request.history)
    step_s, warmup_steps = _warm_up(step, effort, ranks)
    readings = gpu_readings(nvml.current_device()) if device.type == "cuda" and ranks.rank == 0 else {}
    if ranks.size > 1:
        memory += _memory_of_one(step)
    scale = _scale(step)
    used_bytes, device_bytes = _device_memory(device)
    reference = HostReference(device.type)
    steady = _steady(step, _blocks(effort.steady_steps(step_s), step_s), reference, ranks)
    ranks.together()
    synced_s = _synced(step, effort.synced_steps(step_s))
    actions = _actions(step, ranks)
    if _scale(step) < scale:
        raise PerfModelError(
            f"{request.name}: every step must run its optimizer (the loss scale fell from {scale}, so some were "
            "skipped). Measure again with a longer warm-up."
        )
    if request.trace is not None:
        ranks.together()
        record_trace(step, Path(request.trace), steps=1 if ranks.size == 1 else TRACED_STEPS)
    return Measurement.model_validate(
        {
            "name": request.name,
            "split": request.split,
            "group": request.group,
            "scenario": resolved_scenario(scenario),
            "provenance": machine(device) | ({"nvidia_smi": readings} if readings else {}),
            "warmup_steps": warmup_steps,
            "synced_step_s": synced_s,
            **asdict(steady),
            "memory": memory,
            "device_used_bytes": used_bytes,
            "device_bytes": device_bytes,
            "ddp_buckets": step.reducer.buckets() if isinstance(step.reducer, Ddp) else None,
            "actions": actions,
        }
    )


def _build(
    request: Request,
    scenario: Scenario,
    device: torch.device,
    history: AllocatorHistory | None,
    ranks: Ranks | Alone,
) -> TrainingStep:
    """Return module, inputs and optimizer on the device, in an allocator that has held nothing else.

    Building and casting on the device leaves freed blocks behind, so on CUDA the module goes through the host and comes
    back tensor by tensor in the order :func:`replace_tensors` promises. Ranks build the same module and then draw
    samples of their own; in a pipeline, each keeps its share of it.
    """
    allow_import = request.allow_import
    is_pipeline = scenario.parallelism.pp is not None
    if is_pipeline:
        from validate.strategies import pipeline

        module: nn.Module = pipeline.own_stages(scenario, ranks.rank, device)
    else:
        with torch.device(device):
            module = build_module(scenario, allow_import)
    if device.type == "cuda":
        replace_tensors(module, lambda tensor: tensor.to("cpu"))
        gc.collect()
        torch.cuda.empty_cache()
        if history is not None:
            history.start()
        replace_tensors(module, lambda tensor: tensor.to(device))
    if is_pipeline:
        return pipeline.PipelineStep(module, scenario, device, request.group_timeout_s)
    if ranks.size > 1:
        form = make_form(scenario)
        module = form.wrap(module)
        torch.manual_seed(ranks.rank)
        inputs = make_inputs(scenario, device)
        return TrainingStep(module, inputs, form.make_optimizer(module), scenario, allow_import, form)
    inputs = make_inputs(scenario, device)
    optimizer = make_optimizer(module.parameters(), scenario) if scenario.mode == "train" else None
    return TrainingStep(module, inputs, optimizer, scenario, allow_import)


def _first_steps(step: TrainingStep, history: AllocatorHistory | None, path: str | None) -> list[StepMemory]:
    """Run MEMORY_STEPS; return what each found and reached in the allocator. The first two go into the history."""
    found = []
    for index in range(MEMORY_STEPS):
        if history is not None and path is not None:
            if index < HISTORY_STEPS:
                history.step_starts_here()
            elif index == HISTORY_STEPS:
                history.finish(Path(path))
        found += _memory_of_one(step)
    return found


def _memory_of_one(step: TrainingStep) -> list[StepMemory]:
    """Run a step; empty where there is no allocator to look at."""
    if step.device_type != "cuda":
        step.run()
        return []
    allocated_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step.run()
    torch.cuda.synchronize()
    peaks = {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }
    return [StepMemory(allocated_before_bytes=allocated_bytes, **peaks)]


def _warm_up(step: TrainingStep, effort: Effort, ranks: Ranks | Alone) -> tuple[float, int]:
    """Run on until the seconds and steps asked for, all ranks as often.

    Returns the median of the later half's seconds a step, and how many steps have run since the process started.
    """
    started_s = time.perf_counter()
    durations_s: list[float] = []
    least = max(effort.warmup_steps - MEMORY_STEPS, 1)
    while len(durations_s) < least or ranks.largest(time.perf_counter() - started_s) < effort.warmup_s:
        durations_s += _synced(step, 1)
    step_s = ranks.largest(statistics.median(durations_s[len(durations_s) // 2 :]))
    return step_s, MEMORY_STEPS + len(durations_s)


def _blocks(count: int, step_s: float) -> list[int]:
    """Divide ``count`` steps evenly into blocks of about ``BLOCK_S``; none has fewer than the least, but at the end.

    >>> _blocks(60, 0.03), _blocks(12, 2.0), _blocks(5, 0.01)
    ([15, 15, 15, 15], [4, 4, 4], [3, 2])
    """
    wanted = max(min(math.ceil(BLOCK_S / step_s), math.ceil(count / FEWEST_BLOCKS)), LEAST_BLOCK_STEPS)
    blocks = math.ceil(count / wanted)
    return [count // blocks + (index < count % blocks) for index in range(blocks)]


def _steady(step: TrainingStep, blocks: list[int], reference: HostReference, ranks: Ranks | Alone) -> Steady:
    """Time blocks of steps without synchronisation, after each of which the host's speed is measured."""
    found = Steady(blocks=blocks)
    gc.collect()
    gc.freeze()  # else a collection walks every object of every library in the middle of a step
    for count in blocks:
        ranks.together()
        step_s, phases_s = steps_of(_block(step, count))
        found.host_reference_s.append(reference.sample())
        found.step_s += step_s
        for phase, samples_s in phases_s.items():
            found.phases_s.setdefault(phase, []).extend(samples_s)
    gc.unfreeze()
    return found


def _block(step: TrainingStep, count: int) -> list[tuple[str, int, float]]:
    """Return intervals of ``count`` steps one after another, behind a few that let the host run ahead."""
    _synchronize(step)
    most_marks = 4 + 2 * step.scenario.training.gradient_accumulation
    clock: Clock = CudaClock(count * most_marks) if step.device_type == "cuda" else HostClock()
    for _ in range(LEAD_IN_STEPS):
        step.run()
    for _ in range(count):
        step.run(clock.mark)
    clock.stop()
    return clock.intervals()


def _synced(step: TrainingStep, count: int) -> tuple[float, ...]:
    """Return host seconds of steps that each end with a synchronisation."""
    _synchronize(step)
    durations_s = []
    for _ in range(count):
        started_s = time.perf_counter()
        step.run()
        _synchronize(step)
        durations_s.append(time.perf_counter() - started_s)
    return tuple(durations_s)


def _synchronize(step: TrainingStep) -> None:
    if step.device_type == "cuda":
        torch.cuda.synchronize()


def _actions(step: TrainingStep, ranks: Ranks | Alone) -> tuple[PipelineAction, ...]:
    """Return what each stage of this rank computed in one step of a pipeline; nothing without a pipeline."""
    if step.scenario.parallelism.pp is None:
        return ()
    from validate.strategies import pipeline

    assert isinstance(step, pipeline.PipelineStep)
    return step.record_actions(ranks)


def _scale(step: TrainingStep) -> float:
    return float(step.scaler.get_scale()) if step.scaler is not None else 1.0


def _device_memory(device: torch.device) -> tuple[int | None, int | None]:
    """Return bytes in use on the device (context and modules included), and bytes it has."""
    if device.type != "cuda":
        return None, None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes, total_bytes


def main(request_path: str, result_path: str) -> None:
    """Measure what the request file asks for; the result file holds the measurement or the sentence of an error.

    On several ranks it holds what this rank measured, and its name bears the rank's number.
    """
    data = json.loads(Path(request_path).read_text())
    request, effort = Request(**data["request"]), Effort(**data["effort"])
    if request.ranks > 1:
        _main_of_rank(request, effort, Path(result_path))
        return
    try:
        result: dict[str, Any] = _result(measure_here(request, effort))
    except PerfModelError as error:
        result = {"error": str(error)}
    write_atomically(Path(result_path), json.dumps(result), None)


def _main_of_rank(request: Request, effort: Effort, path: Path) -> None:
    number = int(os.environ["RANK"])
    interconnect = request.scenario["hardware"].get("interconnect")
    with telling(path.parent, number), join(request.device, interconnect, request.group_timeout_s) as ranks:
        measured = measure_here(of_rank(request, number), effort, ranks)
        write_atomically(of_rank_path(path, number), json.dumps(_result(measured)), None)


def of_rank(request: Request, rank: int) -> Request:
    """Return what one rank records: each its own trace, and rank 0 the allocator's history."""
    trace = None if request.trace is None else str(of_rank_path(Path(request.trace), rank))
    return replace(request, trace=trace, history=request.history if rank == 0 else None)


def _result(measurement: Measurement) -> dict[str, Any]:
    return {"measurement": measurement.model_dump(mode="json", exclude_none=True)}


if __name__ == "__main__":
    main(*sys.argv[1:])
