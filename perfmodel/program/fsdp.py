"""torch's fully_shard (FSDP2): ZeRO stages 2 and 3. Every rank keeps a part of each parameter, gathers them group by
group before they are used, and reduces and scatters gradients as each group's backward ends.

A group is a repeated block, or what no block holds (the root). Stage 3 gives parameters up after forward and gathers
them again for backward, but for the root's; stage 2 keeps them until backward is done with them.

    streams    compute     copy-out, chunk_cat, and all the model runs
               copy-in     copies a rank's part into the buffer that is gathered
               gather      all-gathers                       } of one communicator, in the order of the host
               scatter     reduce-scatters                   }

Sources: torch/distributed/fsdp/_fully_shard (``_fsdp_state.py``, ``_fsdp_param_group.py``, ``_fsdp_collectives.py``),
as recorded in docs/fsdp2.md. Assumes that gradients are reduced as an average (no division kernels; fp16 has some).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from perfmodel.program.editor import Editor, vector
from perfmodel.program.program import RECORD, WAIT, Edit, Inserted, PhaseRun, Program
from perfmodel.program.shards import Dtypes, in_dtype, padded_shard_of
from perfmodel.workload.ops import Operation, TensorSpec
from perfmodel.workload.scenario import Scenario
from perfmodel.workload.trace_file import EventKind, StepEvents, StorageKind, Trace, gradient_storages

COPY_IN, GATHER, SCATTER = 2, 3, 4  # streams
ROOT = 0  # the module that all others are in


class Storages(NamedTuple):
    """Of a group. cast: the part in the dtype it is sent in. gathered: all parts. reduced: whole gradients. scattered:
    the part of these. gradient: that in the dtype of the parameters.
    """

    cast: int
    gathered: int
    reduced: int
    scattered: int
    gradient: int


@dataclass(frozen=True)
class Group:
    """Parameters (indices) that are gathered together. module: index of the block, or ROOT. reshards: whether they are
    given up after forward. unsharded: storages of the whole parameters.
    """

    module: int
    parameters: tuple[int, ...]
    reshards: bool
    storages: Storages
    unsharded: tuple[int, ...]


def fsdp(editor: Editor, scenario: Scenario) -> Program:
    """The forms ``zero2`` and ``zero3`` of :mod:`perfmodel.program.data_parallel`."""
    groups, dtypes = _groups(editor, scenario), Dtypes.of(scenario)
    trace, program = editor.trace, editor.program
    for edit in _Step(editor, groups, dtypes, trace.first, program.first_runs).edits():
        editor.edit_first(edit.run, edit.event, *edit.instructions)
    for edit in _Step(editor, groups, dtypes, trace.steady, program.runs).edits():
        editor.edit(edit.run, edit.event, *edit.instructions)
    zero_grad = editor.last("zero_grad")
    cleared = [Inserted(EventKind.FREE, each, stream=SCATTER) for group in groups for each in _gradients_of(group)]
    editor.edit(zero_grad, program.runs[zero_grad].segment.stop, *cleared)
    return replace(editor.finish(), setup=tuple(_wrapping(editor, groups, dtypes)))


def _gradients_of(group: Group) -> tuple[int, int]:
    """Where the part of the gradients may be."""
    return group.storages.scattered, group.storages.gradient


def blocks_of(trace: Trace) -> list[int]:
    """The repeated blocks (modules), in the order in which forward enters them: those that backward runs through, and
    the other children of the modules that these are in, which may be frozen.
    """
    events = trace.steady
    parents = [name.rpartition(".")[0] for name, _ in trace.modules]
    reached = set(events.a[events.kind == EventKind.BLOCK_ENTER].tolist()) - {ROOT}
    around = {parents[module] for module in reached}
    entered = events.a[events.kind == EventKind.MODULE_ENTER].tolist()
    return [module for module in dict.fromkeys(entered) if module != ROOT and parents[module] in around]


def _groups(editor: Editor, scenario: Scenario) -> list[Group]:
    """Blocks in the order of forward, and the root last, in which order they are wrapped."""
    section, trace = scenario.parallelism.fsdp, editor.trace
    blocks = [] if section is not None and section.wrap == "root" else blocks_of(trace)
    reshards = scenario.parallelism.strategy == "zero3"
    asked = None if section is None else section.reshard_after_forward
    owner = {}
    for index, parameter in enumerate(trace.parameters):
        inside = [block for block in blocks if parameter.name.startswith(f"{trace.modules[block][0]}.")]
        owner[index] = inside[0] if inside else ROOT
    found = []
    for module in [*blocks, ROOT]:
        members = tuple(index for index, block in owner.items() if block == module)
        if members:
            default = reshards and module != ROOT
            gives_up = default if asked is None else bool(asked)
            storages = Storages(*(editor.new_storage() for _ in Storages._fields))
            unsharded = tuple(editor.new_storage() for _ in members)
            found.append(Group(module, members, gives_up, storages, unsharded))
    return found


def _wrapping(editor: Editor, groups: Sequence[Group], dtypes: Dtypes) -> list[Inserted]:
    """Each group's parts are made while its parameters are still whole."""
    rows: list[Inserted] = []
    kind = StorageKind.PARAMETER
    for group in groups:
        parameters = [editor.trace.parameters[index] for index in group.parameters]
        for each in parameters:
            size_bytes = in_dtype(padded_shard_of(each.tensor, editor.ranks), dtypes.kept).bytes
            rows.append(Inserted(EventKind.ALLOC, editor.new_storage(), size_bytes, holds=kind))
        rows += [Inserted(EventKind.FREE, each.storage, holds=kind) for each in parameters]
    return rows


def _foreach_copy(into: tuple[TensorSpec, ...], tensors: tuple[TensorSpec, ...]) -> Operation:
    return Operation("aten._foreach_copy_.default", (into, tensors), outputs=())


class _Step:
    """What is put into one step, in the order of the host."""

    def __init__(
        self,
        editor: Editor,
        groups: Sequence[Group],
        dtypes: Dtypes,
        events: StepEvents,
        runs: Sequence[PhaseRun],
    ) -> None:
        self.editor, self.groups, self.dtypes, self.events, self.runs = editor, groups, dtypes, events, runs
        self.by_module = {group.module: group for group in groups}
        self._gradients = gradient_storages(editor.trace, events)
        self._ready = set(events.a[events.kind == EventKind.GRAD_READY].tolist())  # parameters that take a gradient
        self._last_backward = max((i for i, run in enumerate(runs) if run.phase == "backward"), default=-1)
        self._edits: list[Edit] = []
        self._gathers: dict[int, int] = {}  # by module, of those begun and not yet copied out: the mark of the end
        self._whole: set[int] = set()  # modules whose parameters are unsharded
        self._kept: tuple[Group, int] | None = None  # whose gathered buffer lives on, and the mark of its copy-out
        self._reducing: tuple[Group, int] | None = None  # whose reduced buffer lives on, and the mark of the end
        self._scattering: int | None = None  # the mark of the last end that backward's end has not awaited

    def edits(self) -> list[Edit]:
        for number, run in enumerate(self.runs):
            if run.phase == "forward":
                self._forward(number, run)
            elif run.phase == "backward":
                self._backward(number, run)
        return self._edits

    def _borders(self, run: PhaseRun, kinds: tuple[EventKind, ...]) -> list[tuple[int, int, int]]:
        """Position, kind and module of events in the run that enter or leave a group."""
        part = slice(run.segment.start, run.segment.stop)
        at = run.segment.start + np.flatnonzero(np.isin(self.events.kind[part], kinds))
        found = ((int(i), int(self.events.kind[i]), int(self.events.a[i])) for i in at.tolist())
        return [border for border in found if border[2] in self.by_module or border[2] == ROOT]

    def _put(self, run: int, event: int, rows: Sequence[Inserted]) -> None:
        if rows:
            self._edits.append(Edit(run, event, tuple(rows)))

    # forward

    def _forward(self, number: int, run: PhaseRun) -> None:
        for at, kind, module in self._borders(run, (EventKind.MODULE_ENTER, EventKind.MODULE_EXIT)):
            group = self.by_module.get(module)
            if kind == EventKind.MODULE_ENTER:
                rows = self._after_the_optimizer() if module == ROOT else []
                if group is not None:
                    rows += self._gather(group) + self._copy_out(group)
                self._put(number, at, rows)
            else:
                rows = self._give_up(group) if group is not None and group.reshards else []
                self._put(number, at + 1, rows + (self._end_of_forward() if module == ROOT else []))

    def _after_the_optimizer(self) -> list[Inserted]:
        rows = []
        for stream in (COPY_IN, GATHER):
            mark = self.editor.mark()
            rows += [Inserted(RECORD, mark), Inserted(WAIT, mark, stream=stream)]
        return rows

    def _gather(self, group: Group) -> list[Inserted]:
        """Begin to gather, unless that was begun ahead or the parameters are there."""
        if group.module in self._gathers or group.module in self._whole:
            return []
        shards = tuple(padded_shard_of(self._tensor(index), self.editor.ranks) for index in group.parameters)
        whole = self._buffer(group.parameters)
        copied, gathered = self.editor.mark(), self.editor.mark()
        self._gathers[group.module] = gathered
        kind = StorageKind.PARAMETER
        cast, uncast = self._cast(group, shards)
        return [
            *cast,
            Inserted(EventKind.ALLOC, group.storages.gathered, whole.bytes, stream=COPY_IN, holds=kind),
            self.editor.launch(_foreach_copy(shards, shards), "launch", stream=COPY_IN),
            Inserted(RECORD, copied, stream=COPY_IN),
            Inserted(WAIT, copied, stream=GATHER),
            self.editor.blocking("all_gather", whole, GATHER),
            Inserted(RECORD, gathered, stream=GATHER),
            *uncast,
        ]

    def _cast(self, group: Group, shards: tuple[TensorSpec, ...]) -> tuple[list[Inserted], list[Inserted]]:
        """Into the dtype that is sent, where it is not the one that is kept; and the end of that."""
        if self.dtypes.kept is None:
            return [], []
        kind, size_bytes = StorageKind.PARAMETER, sum(shard.bytes for shard in shards)
        kept = tuple(in_dtype(shard, self.dtypes.kept) for shard in shards)
        begin = [
            Inserted(EventKind.ALLOC, group.storages.cast, size_bytes, stream=COPY_IN, holds=kind),
            self.editor.launch(_foreach_copy(shards, kept), "launch", stream=COPY_IN),
        ]
        return begin, [Inserted(EventKind.FREE, group.storages.cast, stream=COPY_IN, holds=kind)]

    def _copy_out(self, group: Group, in_forward: bool = True) -> list[Inserted]:
        """Wait for the gathered parameters and put them where they are used."""
        if group.module in self._whole:
            return []
        self._whole.add(group.module)
        kind = StorageKind.PARAMETER
        before = self._kept
        rows = self._copies_wait(before[1]) if in_forward and before is not None else []
        rows.append(Inserted(WAIT, self._gathers.pop(group.module)))
        parts = tuple(self._unsharded(index) for index in group.parameters)
        for storage, part in zip(group.unsharded, parts, strict=True):
            rows.append(Inserted(EventKind.ALLOC, storage, part.bytes, holds=kind))
        copy = Operation("aten.split_with_sizes_copy.out", (self._buffer(group.parameters),), (("out", parts),), ())
        copied = self.editor.mark()
        rows += [self.editor.launch(copy, "launch"), Inserted(RECORD, copied)]
        if in_forward:
            if before is not None:
                rows.append(self._free_gathered(before[0]))
            self._kept = (group, copied)
            return rows
        return [*rows, *self._copies_wait(copied), self._free_gathered(group)]

    def _copies_wait(self, mark: int) -> list[Inserted]:
        return [Inserted(WAIT, mark, stream=stream) for stream in (COPY_IN, GATHER)]

    def _free_gathered(self, group: Group) -> Inserted:
        return Inserted(EventKind.FREE, group.storages.gathered, stream=COPY_IN, holds=StorageKind.PARAMETER)

    def _give_up(self, group: Group) -> list[Inserted]:
        if group.module not in self._whole:
            return []
        self._whole.discard(group.module)
        return [Inserted(EventKind.FREE, storage, holds=StorageKind.PARAMETER) for storage in group.unsharded]

    def _end_of_forward(self) -> list[Inserted]:
        if self._kept is None:
            return []
        group, copied = self._kept
        self._kept = None
        return [*self._copies_wait(copied), self._free_gathered(group)]

    # backward

    def _backward(self, number: int, run: PhaseRun) -> None:
        is_last = number == self._last_backward
        done: set[int] = set()
        for at, kind, module in self._borders(run, (EventKind.BLOCK_ENTER, EventKind.BLOCK_EXIT)):
            group = self.by_module.get(module)
            if group is None:  # the root, all of whose parameters blocks hold
                continue
            if kind == EventKind.BLOCK_ENTER:
                self._put(number, at, self._before_backward(group))
            elif module != ROOT and module not in done:  # a block may have several inputs
                done.add(module)
                self._put(number, at, self._after_backward(group, is_last))
        self._put(number, run.segment.stop, self._end_of_backward(done, is_last))

    def _end_of_backward(self, done: set[int], is_last: bool) -> list[Inserted]:
        """The turn of groups whose input takes no gradient, of which the root is the first; and what was gathered for
        a backward that did not come is given up.
        """
        rows = []
        for group in sorted(self.groups, key=lambda each: each.module != ROOT):
            if group.module not in done:
                rows += self._after_backward(group, is_last)
            if self._scattering is not None:
                rows.append(Inserted(WAIT, self._scattering))
                self._scattering = None
            if group.module in self._gathers:
                rows += [Inserted(WAIT, self._gathers.pop(group.module)), self._free_gathered(group)]
        return rows + self._await_reduction()

    def _before_backward(self, group: Group) -> list[Inserted]:
        """Gather, if that was not begun ahead; then begin with the group whose backward comes next."""
        rows = self._gather(group) + self._copy_out(group, in_forward=False)
        before = self.groups.index(group)  # the root's backward is the first, and it is the last of them
        return rows + (self._gather(self.groups[before - 1]) if before else [])

    def _after_backward(self, group: Group, reduces: bool) -> list[Inserted]:
        """Give the parameters up; in the last micro-batch, reduce the gradients, if any, and give them up too. The
        buffer that is reduced lives until the next group's turn.
        """
        rows = self._give_up(group)
        if not reduces:
            return rows
        rows += self._await_reduction()
        parameters = [index for index in group.parameters if index in self._ready]
        if not parameters:
            return rows
        whole = in_dtype(self._buffer(parameters), self.dtypes.reduced)
        gradients = [self._gradients[index] for index in parameters if index in self._gradients]
        freed = [Inserted(EventKind.FREE, storage) for storage in gradients]
        tensors = tuple(self._tensor(index) for index in parameters)
        ready, reduced = self.editor.mark(), self.editor.mark()
        join = Operation("aten._chunk_cat.out", (tensors, 0, self.editor.ranks), (("out", whole),), (whole,))
        self._reducing = (group, reduced)
        shard = vector(whole.numel // self.editor.ranks, whole.dtype)
        return [
            *rows,
            Inserted(EventKind.ALLOC, group.storages.reduced, whole.bytes),
            self.editor.launch(join, "launch"),
            *freed[-2::-1],  # the list is cleared from its end; the last is held by a loop's variable
            Inserted(RECORD, ready),
            Inserted(WAIT, ready, stream=SCATTER),
            Inserted(EventKind.ALLOC, group.storages.scattered, shard.bytes, stream=SCATTER),
            self.editor.blocking("reduce_scatter", whole, SCATTER),
            Inserted(RECORD, reduced, stream=SCATTER),
            *self._cast_back(group, shard, reduced),
            *freed[-1:],
        ]

    def _cast_back(self, group: Group, shard: TensorSpec, reduced: int) -> list[Inserted]:
        """Into the dtype of the parameters, where gradients were reduced in another. The last mark is awaited at the
        end of backward.
        """
        kept = in_dtype(shard, self.dtypes.kept or self._tensor(group.parameters[0]).dtype)
        self._scattering = reduced
        if kept.dtype == shard.dtype:
            return []
        self._scattering = self.editor.mark()
        cast = Operation("aten._to_copy.default", (shard,), (("dtype", f"torch.{kept.dtype}"),), (kept,))
        return [
            self.editor.launch(cast, "launch", stream=SCATTER),
            Inserted(EventKind.ALLOC, group.storages.gradient, kept.bytes, stream=SCATTER),
            Inserted(EventKind.FREE, group.storages.scattered, stream=SCATTER),
            Inserted(RECORD, self._scattering, stream=SCATTER),
        ]

    def _await_reduction(self) -> list[Inserted]:
        if self._reducing is None:
            return []
        group, mark = self._reducing
        self._reducing = None
        return [Inserted(WAIT, mark), Inserted(EventKind.FREE, group.storages.reduced)]

    # sizes

    def _tensor(self, index: int) -> TensorSpec:
        return self.editor.trace.parameters[index].tensor

    def _unsharded(self, index: int) -> TensorSpec:
        """With the padding: parameters are views of this."""
        shard = padded_shard_of(self._tensor(index), self.editor.ranks)
        return vector(shard.numel * self.editor.ranks, shard.dtype)

    def _buffer(self, parameters: Sequence[int]) -> TensorSpec:
        """All parts of these."""
        elements = sum(self._unsharded(index).numel for index in parameters)
        return vector(elements, self._tensor(parameters[0]).dtype)
