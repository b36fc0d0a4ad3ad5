"""The host clock: how long Python and the dispatcher take to enqueue each operator, from host keys of a profile.

A host key is the text under which :class:`~perfmodel.hardware.profile.HostRecord` keeps what a microbenchmark found:

    call linear(addmm) amp          one call from Python, with the operators it launches
    node AddmmBackward0(mm,mm,sum)  one autograd node, with the operators it launches
    launch, view, cast              one operator more inside a call; ``node launch``, ``node view`` inside a node
    call, node                      what a call costs without its operators, and a node
    module, glue                    nn.Module.__call__, and the Python of a module around each call
    forward GPT2Block 5f3a9c01      a module, run alone, whose calls have that digest; also ``backward``
    forward Block 0c41 77ab02fe     the same on tensors of just these shapes and types, which goes before
    forward-own GPT2Model 0b1c2d3e  its own calls, its submodules replaced by their results; also ``backward-own``
    backward_input, backward_weight in place of backward where a pipeline computes these gradients apart
    optimizer adamw foreach         a step with no parameters; ``... parameter``: each; ``... 148 1a2b3c4d``: just these
    zero_grad, clip, scaler, scale  likewise; scale: dividing each gradient by the number of micro-batches
    backward, autocast              Tensor.backward() around its nodes; entering and leaving autocast
    reference                       the fixed work by whose speed on this host all of these were measured

`` amp`` ends a key measured under autocast, `` tf32`` one measured with TF32 GEMMs, `` no-grad`` one measured
without recording for backward. On a CPU, where operator times contain their dispatch, every key holds what comes on top
of its operators.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable
from typing import Any

import numpy as np

from perfmodel.derived import Derived
from perfmodel.errors import PerfModelError
from perfmodel.hardware import host_calls
from perfmodel.hardware.interconnect import REFERENCE, Interconnect
from perfmodel.hardware.profile import HostRecord, Profile
from perfmodel.program.program import Program
from perfmodel.program.sharding import offloads
from perfmodel.scenario.scenario import Scenario, workload_of
from perfmodel.trace.host_structure import Piece, Structure, Thing, structure_of
from perfmodel.trace.kernel_key import optimizer_prefix
from perfmodel.trace.phases import BACKWARD, BACKWARD_WEIGHT, BACKWARDS, CLIP, OPTIMIZER, SCALE, ZERO_GRAD
from perfmodel.trace.trace import EventKind, Parameter, Segment

CAST = "_to_copy"
AMP, TF32, NO_GRAD = "amp", "tf32", "no-grad"
LEAST_SPREAD = 0.05  # of a host's speed, relative
GENERAL = ("call", "launch", "module", "node")  # what each step makes use of, whatever its model


def host_costs(
    program: Program, profile: Profile, precision: str, interconnect: Interconnect | None = None
) -> np.ndarray:
    """Host seconds that pass before each instruction of the steady step since the one before.

    Every call, module and autograd node has a cost of its own; where the profile has measured the module around them
    alone, they are scaled so that together they cost what it cost. Optimizer, clipping and zero_grad are spread evenly.

    Parameters
    ----------
    program : Program
    profile : Profile
        Its ``host`` records; a program of things it has no records for costs nothing.
    precision : str
        Of the scenario: the amp precisions run forward under autocast.
    interconnect : Interconnect, optional
        What communication calls cost the host there.

    Returns
    -------
    np.ndarray
        Seconds, one entry an instruction, at the host speed of the profile (see :func:`host_slowness`).

    Raises
    ------
    PerfModelError
        If the program runs an optimizer on the host that the interconnect was not measured with.

    Notes
    -----
    Assumes: one host thread at a time (the engine's thread runs while the main one waits), no profiler, no garbage
    collection. Not modelled: time lost to other processes.
    """
    structure = structure_of(program.trace)
    costs = _Costs(program.trace.workload, profile, precision)
    event_s = _event_seconds(structure, costs)
    _add_phases(event_s, program, structure, costs)
    columns = program.instructions
    found = np.where(columns.event >= 0, np.append(event_s, 0.0)[columns.event], 0.0)
    inserted = np.flatnonzero(columns.call >= 0)
    calls_s = np.array([_call_seconds(call, costs, interconnect) for call in columns.calls])
    found[inserted] += calls_s[columns.call[inserted]] * columns.share[inserted] if len(inserted) else 0.0
    return found


# What a call that was not measured is taken to consist of, where that is not one launch.
_CONSISTS_OF: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(host_calls.DTENSOR_CALLS, ()),  # nothing is known of them
    **dict.fromkeys(map(host_calls.fsdp_parameter, host_calls.FSDP_HOOKS), ()),
    host_calls.fsdp_group("forward"): ("all_gather", host_calls.LAUNCH, host_calls.LAUNCH),
    host_calls.fsdp_group("gather"): ("all_gather", host_calls.LAUNCH, host_calls.LAUNCH),
    host_calls.fsdp_group("reduce"): ("reduce_scatter", host_calls.LAUNCH),
    host_calls.over_dtensors(host_calls.CLIP): (
        host_calls.LAUNCH,
        host_calls.asynchronous("all_reduce"),
        host_calls.WAIT,
    ),
}


def _call_seconds(call: str, costs: _Costs, interconnect: Interconnect | None) -> float:
    """Return the host seconds of a call that a strategy inserts.

    They are what was measured over this interconnect; else, for a repeated call, those of the first one; else the sum
    of what the call consists of; else those of one call of one launch.

    Raises
    ------
    PerfModelError
        If the call is an optimizer's on the host and was not measured.
    ValueError
        If no host call has that name.
    """
    if call not in host_calls.NAMES:
        raise ValueError(f"a host call must have a name of perfmodel.hardware.host_calls (got {call!r})")
    if interconnect is not None and call in interconnect.host:
        return interconnect.host[call].time_s
    if call in host_calls.HOST_OPTIMIZER_CALLS:
        raise PerfModelError(
            f"the interconnect must have been measured for {call!r}, what the optimizer takes the host with "
            "parallelism.fsdp.offload (it was not). Measure it again with `perfmodel calibrate --interconnect`."
        )
    if (first := host_calls.first_of(call)) != call:
        return _call_seconds(first, costs, interconnect)
    if call in _CONSISTS_OF:
        return sum(_call_seconds(inner, costs, interconnect) for inner in _CONSISTS_OF[call])
    return costs.seconds("call") + costs.seconds("launch")


def missing_host_costs(profile: Profile, scenario: Scenario) -> list[str]:
    """Return the general host records that a step of the scenario looks up and the profile lacks; they count as 0 s."""
    needed = list(GENERAL)
    if scenario.mode == "train":
        needed.append("zero_grad")
        if not offloads(scenario.parallelism):
            needed.append(optimizer_prefix(workload_of(scenario)))
    return [key for key in needed if key not in profile.host]


def paced_by_host(program: Program) -> np.ndarray:
    """Return for each instruction whether its host seconds grow on a slower host.

    Memory paces what counts MiB: an optimizer over 600 MiB of shards took 0.82 and 0.81 s where the reference took 3.1
    and 2.5 ms (results/second-two-gpu-node and third-two-gpu-node, gpt-medium-mixed-offload-nvlink2-zero3).
    """
    columns = program.instructions
    by_host = np.array([call not in host_calls.PACED_BY_MEMORY for call in (*columns.calls, "")])
    return np.asarray(by_host[columns.call])


def host_slowness(profile: Profile, host_reference_s: float | None, talks: bool = False) -> float:
    """Return how many times as long as in the profile host costs take on the host that runs the step.

    slowness = host_reference_s / reference_s of the profile; 1 where either is unknown.

    Parameters
    ----------
    profile : Profile
        Its host record ``reference``.
    host_reference_s : float or None
        What the reference takes on the host that runs the step. By default, if the rank communicates, the host is as
        fast as it was while all ranks of an interconnect ran the reference, in the median of the profile's
        interconnects: ranks share it, whatever the interconnect, and the profile's own may have been measured by one
        process alone, or on another machine of the kind.
    talks : bool
        Whether the rank communicates with others.
    """
    known = profile.host.get(REFERENCE)
    if host_reference_s is None and talks:
        together = [each.host[REFERENCE].time_s for each in profile.interconnects.values() if REFERENCE in each.host]
        host_reference_s = statistics.median(together) if together else None
    return 1.0 if known is None or host_reference_s is None else host_reference_s / known.time_s


def host_spread(profile: Profile) -> float:
    """Return the relative spread of the host speed: how far the profile's reference wandered, at least LEAST_SPREAD."""
    known = profile.host.get(REFERENCE)
    return LEAST_SPREAD if known is None else max(known.spread, LEAST_SPREAD)


def key_flags(workload: dict[str, Any], precision: str) -> tuple[str, ...]:
    """Return what ends the keys of this workload's forward.

    >>> key_flags({"mode": "forward"}, "amp-bf16")
    ('amp', 'no-grad')
    """
    kind = (AMP,) if precision.startswith("amp") else (TF32,) if precision == "tf32" else ()
    return kind + ((NO_GRAD,) if workload.get("mode") == "forward" else ())


def call_key(name: str, operators: Iterable[str], flags: tuple[str, ...] = ()) -> str:
    """Return the key of one call from Python.

    >>> call_key("linear", ["_to_copy", "addmm"], ("amp",))
    'call linear(_to_copy,addmm) amp'
    """
    return " ".join((f"call {name}({','.join(operators)})", *flags))


def node_key(name: str, operators: Iterable[str]) -> str:
    """Return the key of one autograd node."""
    return f"node {name}({','.join(operators)})"


def piece_key(
    direction: str,
    piece: Piece,
    workload: dict[str, Any],
    flags: tuple[str, ...],
    accumulates: bool = False,
    with_shapes: bool = False,
) -> str:
    """Return the key of a module measured alone.

    Checkpointed modules are other modules, and so are those whose backward adds to earlier gradients.

    Parameters
    ----------
    direction : str
        ``forward``, ``backward``, or a half of backward.
    piece : Piece
        The module.
    workload : dict
        Of the trace.
    flags : tuple of str
        :func:`key_flags`.
    accumulates : bool
        Whether backward adds to gradients of an earlier micro-batch.
    with_shapes : bool
        Whether the key is for just the shapes of this workload's batch.
    """
    own = "-own" if piece.kind == "own" else ""
    if accumulates and direction in (BACKWARD, BACKWARD_WEIGHT):
        flags = (*flags, "accumulate")
    checkpointing = str(workload.get("training", {}).get("activation_checkpointing", "none"))
    suffix = () if checkpointing == "none" else (f"checkpoint-{_word(checkpointing)}",)
    return " ".join((f"{direction}{own}", piece.text(with_shapes), *flags, *suffix))


def _word(text: str) -> str:
    return "".join(character for character in text if character.isalnum())


def list_key(prefix: str, parameters: Iterable[Parameter]) -> str:
    """Return the key of a loop over just these parameters: ``prefix`` with their count and a digest of their sizes."""
    sizes = [str(parameter.tensor.numel) for parameter in parameters if parameter.requires_grad]
    return f"{prefix} {len(sizes)} {hashlib.sha256(' '.join(sizes).encode()).hexdigest()[:8]}"


class _CallTable:
    """Calls or nodes of a profile by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, dict[tuple[str, ...], float]] = {}

    def add(self, text: str, time_s: float) -> None:
        name, _, operators = text.removesuffix(")").partition("(")
        self.by_name.setdefault(name, {})[tuple(operators.split(",")) if operators else ()] = time_s


_TABLES = Derived[dict[tuple[str, ...], tuple[_CallTable, _CallTable]]]()  # of profiles, by flags


def _tables(profile: Profile, flags: tuple[str, ...]) -> tuple[_CallTable, _CallTable]:
    """Return the calls measured under these flags, which go before those measured without; and the nodes."""
    calls, nodes = _CallTable(), _CallTable()
    suffixes = ["", " " + " ".join(flags)] if flags else [""]
    for suffix in suffixes:
        for key, record in profile.host.items():
            if key.startswith("call ") and key.endswith(")" + suffix):
                calls.add(key.removesuffix(suffix)[5:] if suffix else key[5:], record.time_s)
    for key, record in profile.host.items():
        if key.startswith("node ") and key.endswith(")"):
            nodes.add(key[5:], record.time_s)
    return calls, nodes


class _Costs:
    """Looks a thing up among the host records: as it is, by its name, or by its operators."""

    def __init__(self, workload: dict[str, Any], profile: Profile, precision: str) -> None:
        self.workload = workload
        self.records = profile.host
        self.flags = key_flags(workload, precision)
        self.precision = precision
        tables = _TABLES.of(profile, dict)
        if self.flags not in tables:
            tables[self.flags] = _tables(profile, self.flags)
        self.calls, self.nodes = tables[self.flags]

    def seconds(self, key: str) -> float:
        """Return the record under the key with this workload's flags, else without; 0 where there is none."""
        record = self.records.get(" ".join((key, *self.flags))) or self.records.get(key)
        return 0.0 if record is None else record.time_s

    def exact(self, key: str) -> float | None:
        record: HostRecord | None = self.records.get(key)
        return None if record is None else record.time_s

    def piece(self, direction: str, piece: Piece, accumulates: bool = False) -> HostRecord | None:
        for with_shapes in (True, False):
            found = self.records.get(piece_key(direction, piece, self.workload, self.flags, accumulates, with_shapes))
            if found is not None:
                return found
        return None

    def thing(self, thing: Thing) -> float:
        if thing.kind == "module":
            return self.seconds("module")
        if thing.kind == "node":
            return self._called(self.nodes, thing, "node", "node ")
        if thing.kind == "call":
            return self._called(self.calls, thing, "call", "") + self.seconds("glue")
        return self.seconds("call") + self._operators(thing.operators, thing.views, "")

    def _called(self, table: _CallTable, thing: Thing, base: str, prefix: str) -> float:
        known = table.by_name.get(thing.name)
        if not known:
            return self.seconds(base) + self._operators(thing.operators, thing.views, prefix)
        exact = known.get(thing.operators)
        if exact is not None:
            return exact
        nearest = min(known, key=lambda operators: _distance(operators, thing.operators))
        missing = self._operators(thing.operators, 0, prefix) - self._operators(nearest, 0, prefix)
        return max(known[nearest] + missing, known[nearest] / 2)

    def _operators(self, operators: tuple[str, ...], views: int, prefix: str) -> float:
        casts = operators.count(CAST)
        launches = len(operators) - casts
        cast_s = self.seconds(f"{prefix}cast") if f"{prefix}cast" in self.records else self.seconds(f"{prefix}launch")
        return casts * cast_s + launches * self.seconds(f"{prefix}launch") + views * self.seconds(f"{prefix}view")

    def per_parameter(self, prefix: str, parameters: tuple[Parameter, ...]) -> float:
        """Return a + b n for n parameters, or what was measured for just these."""
        exact = self.exact(list_key(prefix, parameters))
        if exact is not None:
            return exact
        count = sum(parameter.requires_grad for parameter in parameters)
        return (self.exact(prefix) or 0.0) + count * (self.exact(f"{prefix} parameter") or 0.0)


def _distance(known: tuple[str, ...], wanted: tuple[str, ...]) -> tuple[int, int]:
    return len(set(known) ^ set(wanted)), abs(len(known) - len(wanted))


def _event_seconds(structure: Structure, costs: _Costs) -> np.ndarray:
    """Return the host seconds of forward and backward: calls and nodes by their own records, scaled to measured
    modules.
    """
    thing_s = np.maximum([*map(costs.thing, structure.things), 0.0], 0.0)
    event_s: np.ndarray = thing_s[structure.thing] * structure.share
    if structure.pieces:
        _scale_forward(event_s, structure, costs)
    for index, segment in enumerate(structure.segments):
        if segment.phase in BACKWARDS:
            _scale_backward(event_s, structure, costs, index)
    return event_s


def _scale_forward(event_s: np.ndarray, structure: Structure, costs: _Costs) -> None:
    pieces = structure.pieces
    estimated_s = np.bincount(structure.piece + 1, weights=event_s, minlength=len(pieces) + 1)[1:]
    scale = np.ones(len(pieces) + 1)  # the last one is for events of no piece
    warm: set[tuple[int, str]] = set()
    for index, piece in enumerate(pieces):
        record = costs.piece("forward", piece)
        if record is None:
            if piece.module < 0 and "amp" in costs.flags:
                event_s[piece.first] += costs.seconds("autocast")
            continue
        is_first = (piece.segment, piece.text()) not in warm
        warm.add((piece.segment, piece.text()))
        seconds = record.time_s + (record.cold_s if is_first else 0.0)
        if estimated_s[index] > 0:
            scale[index] = max(seconds, 0.0) / estimated_s[index]
        else:
            event_s[piece.first] += max(seconds, 0.0)
    event_s *= scale[structure.piece]


def _scale_backward(event_s: np.ndarray, structure: Structure, costs: _Costs, index: int) -> None:
    """The backward of a micro-batch, or a half of it, costs what its modules' cost, if all were measured."""
    segment = structure.segments[index]
    if segment.start == segment.stop:
        return
    part = event_s[segment.start : segment.stop]
    direction, forward = structure.direction(index), structure.forward_of(index)
    backward = [
        costs.piece(direction, piece, segment.micro_batch > 0) for piece in structure.pieces if piece.segment == forward
    ]
    estimated_s = float(part.sum())
    if not backward or None in backward or estimated_s == 0:
        part[0] += costs.seconds("backward")
        return
    part *= max(sum(record.time_s for record in backward if record is not None), 0.0) / estimated_s


_LISTS = (ZERO_GRAD, CLIP, SCALE)


def _phase_seconds(segment: Segment, program: Program, costs: _Costs) -> float:
    parameters = program.trace.parameters
    if segment.phase in _LISTS:  # of a rank with several parts of the model, a share for each
        runs = sum(run.phase == segment.phase for run in program.runs)
        return costs.per_parameter(segment.phase, parameters) / max(runs, 1)
    if segment.phase != OPTIMIZER:
        return 0.0
    scaler_s = costs.per_parameter("scaler", parameters) if costs.precision == "amp-fp16" else 0.0
    optimized = parameters if program.trace.optimized is None else program.trace.optimized
    if any(parameter.tensor.device == "cpu" for parameter in optimized):
        return 0.0  # the program says what the host does then
    return scaler_s + costs.per_parameter(optimizer_prefix(program.trace.workload), optimized)


def _add_phases(event_s: np.ndarray, program: Program, structure: Structure, costs: _Costs) -> None:
    """Spread zero_grad, clip and optimizer evenly over their operators; a phase without events passes its time on."""
    kind = program.trace.steady.kind
    carried_s = 0.0
    for segment in structure.segments:
        seconds = _phase_seconds(segment, program, costs)
        if segment.start == segment.stop:
            carried_s += seconds
            continue
        event_s[segment.start] += carried_s
        carried_s = 0.0
        if seconds:
            events = np.arange(segment.start, segment.stop)
            operators = events[kind[segment.start : segment.stop] == EventKind.OP]
            chosen = operators if len(operators) else events
            event_s[chosen] += seconds / len(chosen)
