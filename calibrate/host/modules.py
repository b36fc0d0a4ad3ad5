"""Host cost of a workload's own modules, each alone: exact host keys.

A unit (a transformer block, say) is called on inputs like those it gets in the model, all units of a kind in a row,
forward and backward. A container (the model around the blocks) is called with its submodules replaced by stubs that
hand out what they returned before, so that only its own Python and operators are timed; likewise the training step
around the model.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from calibrate.host.reference import HostReference, synchronize
from calibrate.host.stages import StageStep, build_stage, layers_around, observe_halves, stage_inputs, time_halves
from calibrate.host.stubs import StubModel, Stubs, borrowed_leaves, capture, chained, fresh, is_chainable, separate
from calibrate.timing.host_stopwatch import (
    MOST_LAUNCHES,
    WARM_UP,
    OperatorTimes,
    Seen,
    Work,
    autocast,
    differentiable,
    observe,
    record,
    time_backward,
    timed,
)
from perfmodel.cost.host import AMP, NO_GRAD, key_flags, piece_key
from perfmodel.hardware.profile import HostRecord
from perfmodel.models.build import build_module, make_inputs
from perfmodel.models.own_code import out_of_memory_passes
from perfmodel.models.step import TrainingStep, precision_switches
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.host_structure import Piece, structure_of
from perfmodel.trace.phases import BACKWARD, BACKWARD_INPUT
from perfmodel.trace.trace import Trace

SWEEPS, ROUNDS = 3, 5  # over all pieces in turn: a host's speed wanders within seconds
MODEL_BYTES = {"cuda": 24 << 30, "cpu": 1 << 30}  # of parameters; larger models are built with fewer layers
FEW_LAYERS = 2
TARGET_KEYS = ("target", "arguments", "inputs", "loss", "blocks")
FORWARD = "forward"
FEW_SAMPLES = 2  # of a batch that keeps the device busy for longer than the host
COLD_UNITS = 4  # at the start of a row, until the code is in the processor's caches


def measure_pieces(
    trace: Trace,
    precision: str,
    device: str,
    known: dict[str, HostRecord],
    times: OperatorTimes,
    reference: HostReference,
    allow_import: bool,
    own_batch: bool,
) -> dict[str, HostRecord]:
    """Return forward and backward records of every distinct unit and container of the trace that has none.

    own_batch: on the trace's batch, and under keys that say so, since libraries choose other kernels for few samples;
    else on few.
    """
    wanted = _wanted(trace, key_flags(trace.workload, precision), known, own_batch)
    if not wanted:
        return {}
    found: dict[str, HostRecord] = {}
    with suppress(torch.OutOfMemoryError), ExitStack() as stack:  # what does not fit stays estimated from its calls
        scenario = _built_scenario(trace, precision, device, own_batch)
        stack.enter_context(precision_switches(scenario))
        stack.enter_context(out_of_memory_passes())
        bench = ModuleBench(trace, scenario, device, times, reference, allow_import, own_batch)
        for (piece, accumulates), records in zip(wanted, bench.measure(wanted), strict=True):
            for direction, value in records.items():
                key = piece_key(direction, piece, trace.workload, bench.flags, accumulates, own_batch)
                if key not in known:
                    found.setdefault(key, value)
    return found


Wanted = list[tuple[Piece, bool]]


def _wanted(trace: Trace, flags: tuple[str, ...], known: dict[str, HostRecord], own_batch: bool) -> Wanted:
    """Return one piece of each kind, and whether its gradients are added to those of an earlier micro-batch."""
    structure = structure_of(trace)
    found: dict[str, tuple[Piece, bool]] = {}
    for piece in structure.pieces:
        accumulates = structure.segments[piece.segment].micro_batch > 0
        directions = (FORWARD, *structure.directions(piece.segment))
        keys = [piece_key(direction, piece, trace.workload, flags, accumulates, own_batch) for direction in directions]
        if any(key not in known for key in keys):
            found.setdefault(keys[-1], (piece, accumulates))
    return list(found.values())


def _built_scenario(trace: Trace, precision: str, device: str, own_batch: bool) -> Scenario:
    """Return the trace's scenario in this precision (TF32 is traced as fp32), on few samples or its own batch, and with
    few layers where it is large. A stage of a pipeline gets the neighbours that make it that stage.
    """
    section = trace.workload["model"]
    if section.get("family") is not None:
        section = {name: value for name, value in section.items() if name not in TARGET_KEYS}
    given = {**trace.workload, "model": section, "precision": precision, "hardware": {"profile": "any"}}
    stage, is_large = given.pop("part", None), _parameter_bytes(trace) > MODEL_BYTES[device]
    if stage is not None:
        checkpointing = trace.workload["training"]["activation_checkpointing"]
        layers = layers_around(stage, checkpointing, FEW_LAYERS if is_large else None)
        given["model"] = section | {"layers": sum(layers)}
        given["parallelism"] = {"pp": {"stages": len(layers), "micro_batches": 1, "layers": layers}}
    scenario = Scenario.model_validate(given)
    samples = scenario.batch.size if own_batch else min(scenario.batch.size, FEW_SAMPLES)
    batch = scenario.batch.model_copy(update={"size": samples})
    model = scenario.model
    if is_large and stage is None and model.layers is not None:
        model = model.model_copy(update={"layers": min(model.layers, FEW_LAYERS)})
    return scenario.model_copy(update={"batch": batch, "model": model})


def _parameter_bytes(trace: Trace) -> int:
    return sum(parameter.tensor.bytes for parameter in trace.parameters)


@dataclass
class _Samples:
    """Seconds of one forward, and what the first ones of a row took longer, all together; of one backward, or each
    half of it, with what surrounds it; of what surrounds it alone.
    """

    forward_s: list[float] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)
    backward_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    around_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def records(self, work: _Work, times: OperatorTimes) -> dict[str, HostRecord]:
        """Return records by direction, less the operators' own seconds where these are counted elsewhere."""
        outside = [work.seen.loose, *(each for _, each in work.seen.calls)]
        forward = record(self.forward_s, sum(times.total(each.calls) for each in outside))
        cold_s = max(statistics.median(self.cold_s), 0.0) if self.cold_s else 0.0
        found = {FORWARD: forward.model_copy(update={"cold_s": cold_s})}
        for direction, nodes in work.nodes.items():
            found[direction] = HostRecord(time_s=0.0)
            if self.backward_s[direction]:
                operators_s = sum(times.total(each.calls) for each in nodes)
                around = record(self.around_s[direction])
                found[direction] = record(self.backward_s[direction], around.time_s + operators_s)
        return found


@dataclass
class _Work:
    """What one forward and backward do. nodes: works of the nodes, by direction."""

    seen: Seen
    nodes: dict[str, list[Work]]


@dataclass
class _Timer:
    """One piece under measurement. run: one forward and backward of it, timed into the samples that it is given."""

    work: _Work
    run: Callable[[_Samples], None]
    samples: _Samples = field(default_factory=_Samples)

    def sweep(self) -> None:
        for index in range(WARM_UP + ROUNDS):
            self.run(self.samples if index >= WARM_UP else _Samples())


class ModuleBench:
    """The trace's model on the device, and what its modules were called with."""

    def __init__(
        self,
        trace: Trace,
        scenario: Scenario,
        device: str,
        times: OperatorTimes,
        reference: HostReference,
        allow_import: bool,
        own_batch: bool,
    ) -> None:
        self.trace, self.device, self.times, self.allow_import = trace, device, times, allow_import
        self.reference, self.own_batch = reference, own_batch
        self.scenario = scenario
        self.flags = key_flags(trace.workload, scenario.precision)
        self.with_grad = NO_GRAD not in self.flags
        structure = structure_of(trace)
        self.directions = structure.directions(structure.pieces[0].segment)
        stage = trace.workload.get("part")
        with torch.device(device):
            if stage is None:
                self.model = build_module(self.scenario, allow_import)
            else:
                self.model = build_stage(self.scenario, stage["is_first"])
        self.inputs = (
            make_inputs(self.scenario, device) if stage is None else stage_inputs(self.model, scenario, device)
        )
        pieces = [piece for piece in structure.pieces if piece.module >= 0]
        names = {trace.modules[piece.module][0] for piece in pieces}
        step = self._step(self.model, None)
        with self._mode():
            self.captured = capture(self.model, names, lambda: self._call(step))
        self._around = self._largest_unit([trace.modules[piece.module][0] for piece in pieces if piece.kind == "unit"])
        self.occurrences: dict[str, dict[str, None]] = {}  # each name once, though every micro-batch calls it
        for piece in pieces:
            self.occurrences.setdefault(piece.text(own_batch), {})[trace.modules[piece.module][0]] = None

    @contextmanager
    def _mode(self) -> Iterator[None]:
        dtype = torch.float16 if self.scenario.precision == "amp-fp16" else torch.bfloat16
        with torch.set_grad_enabled(self.with_grad), autocast(self.device, AMP in self.flags, dtype):
            yield

    def _step(self, model: Any, optimizer: torch.optim.Optimizer | None) -> TrainingStep:
        if "part" in self.trace.workload:
            return StageStep(model, self.inputs, optimizer, self.scenario, halves=BACKWARD_INPUT in self.directions)
        return TrainingStep(model, self.inputs, optimizer, self.scenario, self.allow_import)

    def _call(self, step: TrainingStep) -> Any:
        return step.module(**self.inputs) if step.loss is None else step.loss(step.module, self.inputs)

    def _largest_unit(self, names: list[str]) -> Callable[[], list[torch.Tensor]]:
        """Return a forward of (a copy of) the unit with the most modules, which surrounds most other code."""
        known = [name for name in names if name in self.captured]
        if not known:
            return lambda: []
        name = max(known, key=lambda name: len(list(self.model.get_submodule(name).modules())))
        module, captured = copy.deepcopy(self.model.get_submodule(name)), self.captured[name]

        def forward() -> list[torch.Tensor]:
            module.zero_grad()
            with self._mode():
                arguments, keywords = fresh(captured.given)
                return differentiable(module(*arguments, **keywords))[:1]

        return forward

    def _prepare(self, direction: str) -> None:
        """Run the reference, then other code of the model, as a step has run it when it gets here."""
        self.reference.beat()
        roots = self._around()
        if direction != FORWARD and roots:
            self._run_backward(roots, [])

    def measure(self, wanted: Wanted) -> list[dict[str, HostRecord]]:
        """Records by direction of each; none for a module that a smaller model lacks or that returned nothing."""
        timers = [self._timer(piece, accumulates) for piece, accumulates in wanted]
        for _ in range(SWEEPS):
            for timer in timers:
                if timer is not None:
                    timer.sweep()
                    self.reference.beat()
                    self.model.zero_grad()
        return [{} if timer is None else timer.samples.records(timer.work, self.times) for timer in timers]

    def _timer(self, piece: Piece, accumulates: bool) -> _Timer | None:
        if piece.module < 0:
            return self._step_timer()
        name = self.trace.modules[piece.module][0]
        if name not in self.captured:
            return None
        if piece.kind == "unit":
            equal = [each for each in self.occurrences[piece.text(self.own_batch)] if each in self.captured]
            return self._unit_timer(equal, accumulates)
        return self._own_timer(name)

    def _observe(self, name: str) -> _Work:
        module, (arguments, keywords) = self.model.get_submodule(name), fresh(self.captured[name].given)
        with self._mode():
            return self._seen(lambda: module(*arguments, **keywords), module, one_root=False)

    def _seen(self, function: Callable[[], Any], module: torch.nn.Module, one_root: bool) -> _Work:
        keeps = self.times.is_needed
        if BACKWARD_INPUT in self.directions:
            return _Work(*observe_halves(function, list(module.parameters()), keeps))
        seen = observe(function, self.with_grad, keeps, one_root)
        return _Work(seen, {BACKWARD: [work for _, work in seen.nodes]} if self.with_grad else {})

    def _run_backward(self, roots: list[torch.Tensor], parameters: list[torch.nn.Parameter]) -> dict[str, float]:
        """Run backward, and return its seconds by direction."""
        if BACKWARD_INPUT in self.directions:
            return time_halves(roots, parameters, self.device)
        return {BACKWARD: time_backward(roots, self.device)}

    def _unit_timer(self, names: list[str], accumulates: bool) -> _Timer:
        """Return the timer of all modules of one kind, as many as the launch queue takes."""
        work = self._observe(names[0])
        backward = sum(len(each.operators) for nodes in work.nodes.values() for each in nodes)
        names = names[: max(1, MOST_LAUNCHES // max(1, work.seen.launches - backward, backward))]
        return _Timer(work, lambda samples: self._run_unit(names, accumulates, samples))

    def _run_unit(self, names: list[str], accumulates: bool, samples: _Samples) -> None:
        """Run modules as a chain if each takes what the one before returned, as blocks do; else one after another."""
        modules = [self.model.get_submodule(name) for name in names]
        given = [fresh(self.captured[name].given) for name in names]
        for module in modules:
            for parameter in module.parameters():
                parameter.grad = torch.zeros_like(parameter) if accumulates and parameter.requires_grad else None
        is_chain = all(is_chainable(self.captured[name]) for name in names)
        began_s: list[float] = []  # of each module
        row = (chained if is_chain else separate)(modules, given, lambda: began_s.append(time.perf_counter()))
        forward_s = self._time_forward(row, samples, began_s)
        parameters = [each for module in modules for each in module.parameters()]
        self._time_backward(forward_s, parameters, len(modules), samples)

    def _time_forward(self, forward: Callable[[], list[Any]], samples: _Samples, began_s: list[float]) -> list[Any]:
        """Run a row of modules, and return their results."""
        self._prepare("forward")
        with self._mode():
            synchronize(self.device)
            results = forward()
            each_s = np.diff([*began_s, time.perf_counter()])
        steady_s = float(np.median(each_s[min(COLD_UNITS, len(each_s) // 2) :]))
        self.reference.note(samples.forward_s, steady_s)
        self.reference.note(samples.cold_s, float(each_s.sum()) - len(each_s) * steady_s)
        return results

    def _time_backward(
        self, results: list[Any], parameters: list[torch.nn.Parameter], count: int, samples: _Samples
    ) -> None:
        """Time the backward of ``count`` modules together, which have these parameters."""
        roots = [tensor for result in results for tensor in differentiable(result)[:1]]
        results.clear()
        if not roots:
            return
        borrowed = borrowed_leaves(roots)
        if count == 1:
            self._prepare("backward")
        else:
            self.reference.beat()
        for direction, seconds in self._run_backward(roots, parameters).items():
            self.reference.note(samples.backward_s[direction], seconds / count)
        self._prepare("backward")
        around = fresh(borrowed) or fresh([torch.zeros((), device=self.device, requires_grad=True)])
        for direction, seconds in self._run_backward(around, []).items():
            self.reference.note(samples.around_s[direction], seconds / count)

    def _stubs(self, name: str) -> Stubs:
        return Stubs(
            self.model, {other: seen.result for other, seen in self.captured.items() if _is_inside(other, name)}
        )

    def _own_parameters(self, name: str) -> list[torch.nn.Parameter]:
        """Return the parameters of a container that are in no submodule that is measured by itself."""
        inside = [self.model.get_submodule(other) for other in self.captured if _is_inside(other, name)]
        others = {id(each) for module in inside for each in module.parameters()}
        return [each for each in self.model.get_submodule(name).parameters() if id(each) not in others]

    def _own_timer(self, name: str) -> _Timer:
        with self._stubs(name):
            work = self._observe(name)
        return _Timer(work, lambda samples: self._run_own(name, samples))

    def _run_own(self, name: str, samples: _Samples) -> None:
        """Run a container without what its submodules cost."""
        module, captured = self.model.get_submodule(name), self.captured[name]
        with self._stubs(name) as stubs:
            arguments, keywords = fresh(captured.given)
            self._prepare("forward")
            with self._mode():
                synchronize(self.device)
                seconds, result = timed(lambda: module(*arguments, **keywords))
                self.reference.note(samples.forward_s, seconds - timed(stubs.repeat_calls)[0])
            self._time_backward([result], self._own_parameters(name), 1, samples)

    def _step_timer(self) -> _Timer:
        """Autocast, loss, and calling the engine, around a model that hands out what the real one returned."""
        model = StubModel(self.captured[""].result, self.device)
        optimizer = torch.optim.SGD(model.parameters()) if self.with_grad else None
        step = self._step(model, optimizer)
        with self._mode():
            work = self._seen(lambda: self._call(step), model, one_root=True)

        def run(samples: _Samples) -> None:
            self._prepare("forward")
            synchronize(self.device)
            seconds = _run_step(step)
            self.reference.note(samples.forward_s, seconds.pop(FORWARD) - timed(model)[0])
            for direction in self.directions:
                self.reference.note(samples.backward_s[direction], seconds[direction])
                samples.around_s[direction].append(0.0)

        return _Timer(work, run)


def _run_step(step: TrainingStep) -> dict[str, float]:
    """Return host seconds of the first forward, and of what follows it, by phase."""
    phases: list[str] = []
    marks_s: list[float] = []

    def mark(phase: str, micro_batch: int) -> None:
        phases.append(phase)
        marks_s.append(time.perf_counter())

    step.run(mark)
    first = phases.index(FORWARD)
    found: dict[str, float] = {}
    for phase, seconds in zip(phases[first:], np.diff(marks_s[first:]).tolist(), strict=False):
        found.setdefault(phase, seconds)
    return found


def _is_inside(name: str, container: str) -> bool:
    return name != container and (not container or name.startswith(f"{container}."))
