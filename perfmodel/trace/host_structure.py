"""The Python calls, modules and autograd nodes that events of a trace belong to: where host time goes, not how much.

The structure is found once a trace; :mod:`perfmodel.cost.host` puts seconds on it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from perfmodel.derived import Derived
from perfmodel.trace.kernel_key import kernel_key
from perfmodel.trace.phases import BACKWARD, BACKWARD_WEIGHT, BACKWARDS, FORWARD
from perfmodel.trace.trace import EventKind, Segment, Trace

UNIT_CALLS = 120  # a module with more calls inside is a container: its submodules are measured one by one
OUTSIDE = "step"  # class name of what runs around the model: autocast, loss

# Where in a call, node or module its host time passes: the rest passes before the launches.
_AFTER_CALL, _BEFORE_NODE, _MODULE_ENTER = 0.25, 0.3, 0.6

_OP, _MODULE_IN, _MODULE_OUT = int(EventKind.OP), int(EventKind.MODULE_ENTER), int(EventKind.MODULE_EXIT)
_CALL_IN, _CALL_OUT, _NODE = int(EventKind.CALL_ENTER), int(EventKind.CALL_EXIT), int(EventKind.NODE)


class Thing(NamedTuple):
    """Something that costs host time whenever it occurs.

    Attributes
    ----------
    kind : str
        ``op`` is an operator outside any call and node.
    name : str
    operators : tuple of str
        Base names of what it launches, in order.
    views : int
        Operators in it that launch nothing.
    """

    kind: Literal["call", "node", "module", "op"]
    name: str
    operators: tuple[str, ...] = ()
    views: int = 0


class Piece(NamedTuple):
    """A module that runs as a whole (unit), or what a container, or the step around the model, runs itself (own).

    Attributes
    ----------
    kind : str
    class_name : str
    digest : str
        Of its calls.
    shapes : str
        Digest of the operators in it, with the shapes and types of what they work on.
    module : int
        Index into the trace's modules; -1 for the step.
    segment : int
        Index into the step's segments.
    first : int
        Its first event.
    """

    kind: Literal["unit", "own"]
    class_name: str
    digest: str
    shapes: str
    module: int
    segment: int
    first: int

    def text(self, with_shapes: bool = False) -> str:
        return " ".join((self.class_name, self.digest, *([self.shapes] if with_shapes else [])))


@dataclass(frozen=True)
class Structure:
    """Columns with one entry an event of the steady step, and the tables that they point into.

    Attributes
    ----------
    segments : tuple of Segment
    thing : ndarray of int
        The thing whose host time passes before this event; -1 for none.
    share : ndarray of float
        How much of that thing's host time does.
    piece : ndarray of int
        The piece of a forward segment that the event belongs to; else -1.
    things : tuple of Thing
    pieces : tuple of Piece
    """

    segments: tuple[Segment, ...]
    thing: np.ndarray
    share: np.ndarray
    piece: np.ndarray
    things: tuple[Thing, ...]
    pieces: tuple[Piece, ...]

    def forward_of(self, segment: int) -> int:
        """Return the forward segment that ``segment``, a whole or half backward, follows."""
        while segment >= 0 and self.segments[segment].phase in BACKWARDS:
            segment -= 1
        return segment

    def direction(self, segment: int) -> str:
        """Return what a segment of backward computes: ``backward`` for all gradients, or the half that it is.

        A model's first stage has no gradient of its input: it computes all gradients where others compute the weights'.
        """
        phase = self.segments[segment].phase
        return BACKWARD if phase == BACKWARD_WEIGHT and not self._runs(segment - 1) else phase

    def directions(self, forward: int) -> tuple[str, ...]:
        """Return the directions of the backward segments that follow a segment of forward and run anything."""
        directions = []
        for segment in range(forward + 1, len(self.segments)):
            if self.segments[segment].phase not in BACKWARDS:
                break
            if self._runs(segment):
                directions.append(self.direction(segment))
        return tuple(directions)

    def _runs(self, segment: int) -> bool:
        start, stop = self.segments[segment].start, self.segments[segment].stop
        return bool((self.thing[start:stop] >= 0).any())


_STRUCTURES = Derived[Structure]()  # of steady steps, which traces with other parameters share


def structure_of(trace: Trace) -> Structure:
    """Return the structure of the trace's steady step, worked out on the first call."""
    return _STRUCTURES.of(trace.steady, lambda: _Finder(trace).find())


@dataclass
class _Frame:
    """A module call: its events from start to stop (exclusive), texts of what runs in it, and the calls inside."""

    class_name: str
    module: int
    start: int
    stop: int = -1
    texts: list[str] = field(default_factory=list)
    children: list[_Frame] = field(default_factory=list)
    calls: int = 0
    digest: str = ""


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(texts).encode()).hexdigest()[:8]


class _Finder:
    """A walk over the events that fills the structure's columns."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.kind, self.a = trace.steady.kind.tolist(), trace.steady.a.tolist()
        count = len(self.kind)
        self.thing = np.full(count, -1, dtype=np.int64)
        self.share = np.zeros(count)
        self.piece = np.full(count, -1, dtype=np.int64)
        self.things: dict[Thing, int] = {}
        self.pieces: list[Piece] = []
        self.launches = [operation.runs_on_device for operation in trace.operations]
        self.names = [operation.base_name for operation in trace.operations]
        self.keys = [kernel_key(operation) for operation in trace.operations]

    def find(self) -> Structure:
        for index, segment in enumerate(self.trace.steady.segments):
            if segment.phase == FORWARD or segment.phase in BACKWARDS:
                root = self._walk(segment)
                if segment.phase == FORWARD and segment.start < segment.stop:
                    self._cut(root, index)
        return Structure(
            self.trace.steady.segments,
            self.thing,
            self.share,
            self.piece,
            tuple(self.things),
            tuple(self.pieces),
        )

    def _number(self, thing: Thing) -> int:
        return self.things.setdefault(thing, len(self.things))

    def _walk(self, segment: Segment) -> _Frame:
        """Note every call, node and module of a segment, and return the frame around all."""
        root = _Frame(OUTSIDE, -1, segment.start, segment.stop)
        stack = [root]
        call, node = -1, -1  # the events that opened them
        in_call: list[int] = []
        in_node: list[int] = []
        for event in range(segment.start, segment.stop):
            kind = self.kind[event]
            if kind == _OP:
                if call >= 0:
                    in_call.append(event)
                elif node >= 0:
                    in_node.append(event)
                else:
                    stack[-1].texts.append(self._note_loose(event))
            elif kind == _CALL_IN:
                call, in_call = event, []
            elif kind == _CALL_OUT:
                stack[-1].texts.append(self._note_call(event, in_call))
                stack[-1].calls += 1
                call = -1
            elif kind == _NODE:
                self._note_node(node, in_node)
                node, in_node = event, []
            elif kind == _MODULE_IN:
                stack.append(self._enter(event))
            elif kind == _MODULE_OUT and len(stack) > 1:
                self._leave(event, stack)
        self._note_node(node, in_node)
        while len(stack) > 1:  # a module left by an exception, or by ending recomputation early
            self._leave(segment.stop - 1, stack)
        root.digest = _digest(root.texts)
        return root

    def _enter(self, event: int) -> _Frame:
        module = self.a[event]
        thing = self._number(Thing("module", ""))
        self._put(event, thing, _MODULE_ENTER)
        return _Frame(self.trace.modules[module][1], module, event)

    def _leave(self, event: int, stack: list[_Frame]) -> None:
        frame = stack.pop()
        if self.kind[event] == _MODULE_OUT:
            self._put(event, self._number(Thing("module", "")), 1 - _MODULE_ENTER)
        frame.stop = event + 1
        frame.digest = _digest(frame.texts)
        parent = stack[-1]
        parent.texts.append(f"{frame.class_name}:{frame.digest}")
        parent.children.append(frame)
        parent.calls += frame.calls

    def _put(self, event: int, thing: int, share: float) -> None:
        self.thing[event], self.share[event] = thing, share

    def _split(self, events: list[int]) -> tuple[list[int], tuple[str, ...]]:
        launching = [event for event in events if self.launches[self.a[event]]]
        return launching, tuple(self.names[self.a[event]] for event in launching)

    def _note_call(self, leaving: int, events: list[int]) -> str:
        launching, names = self._split(events)
        name = self.trace.calls[self.a[leaving]]
        thing = self._number(Thing("call", name, names, len(events) - len(launching)))
        after = _AFTER_CALL if launching else 1.0
        self._put(leaving, thing, after)
        for event in launching:
            self._put(event, thing, (1 - after) / len(launching))
        return f"{name}({','.join(names)})"

    def _note_node(self, node: int, events: list[int]) -> None:
        if node < 0:
            return
        launching, names = self._split(events)
        name = self.trace.nodes[self.a[node]].rpartition("::")[2]
        thing = self._number(Thing("node", name, names, len(events) - len(launching)))
        before = _BEFORE_NODE if launching else 1.0
        self._put(node, thing, before)
        for event in launching:
            self._put(event, thing, (1 - before) / len(launching))

    def _note_loose(self, event: int) -> str:
        launching, names = self._split([event])
        self._put(event, self._number(Thing("op", "", names, 1 - len(launching))), 1.0)
        return str(self.names[self.a[event]])

    def _cut(self, root: _Frame, segment: int) -> None:
        """Assign every event of a forward segment to a unit, or to what a container or the step runs itself."""
        self._own(root, segment)
        for model in root.children:
            self._own(model, segment)
        pending = [child for model in root.children for child in model.children]
        while pending:
            frame = pending.pop(0)
            if frame.calls > UNIT_CALLS:
                self._own(frame, segment)
                pending = frame.children + pending
            else:
                self._claim("unit", frame, frame.digest, segment)

    def _own(self, frame: _Frame, segment: int) -> None:
        """Claim a container's events; this precedes what lies inside, which then claims its events for itself."""
        classes = Counter(child.class_name for child in frame.children)
        own = [text for text in frame.texts if text.partition(":")[0] not in classes]
        children = [f"{count}x{name}" for name, count in sorted(classes.items())]
        self._claim("own", frame, _digest([*own, *children]), segment)

    def _claim(self, kind: Literal["unit", "own"], frame: _Frame, digest: str, segment: int) -> None:
        self.piece[frame.start : frame.stop] = len(self.pieces)
        shapes = self._shapes(frame.start, frame.stop)
        self.pieces.append(Piece(kind, frame.class_name, digest, shapes, frame.module, segment, frame.start))

    def _shapes(self, start: int, stop: int) -> str:
        operators = self.trace.steady.kind[start:stop] == EventKind.OP
        numbers = np.unique(self.trace.steady.a[start:stop][operators])
        return _digest(sorted(self.keys[number] for number in numbers.tolist()))
