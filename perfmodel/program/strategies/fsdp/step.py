"""torch's fully_shard (FSDP2): ZeRO stages 2 and 3. Every rank keeps a shard of each parameter, gathers them group by
group before they are used, and reduces and scatters gradients as each group's backward ends.

A group is a repeated block, or what no block holds (the root). Stage 3 frees the unsharded parameters after forward and
gathers them anew for backward, but for the root's; stage 2 keeps them until backward is done with them. Between these,
fewer ranks may share them (``reshard_after_forward`` of so many), each with a larger shard.

    streams    compute     copy-out, chunk_cat, and all the model runs
               copy-in     copies a rank's shard into the buffer that is gathered
               gather      all-gathers                       } of one communicator, in the order of the host
               scatter     reduce-scatters                   }
               reduce      all-reduces of their results among replicas, where there are several (HSDP)

Sources: torch/distributed/fsdp/_fully_shard (``_fsdp_state.py``, ``_fsdp_param_group.py``, ``_fsdp_collectives.py``),
as recorded in docs/fsdp2.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from perfmodel.hardware import host_calls
from perfmodel.hardware.host_calls import FsdpHook
from perfmodel.program.builder import ProgramBuilder, vector
from perfmodel.program.gradient_clipping import clip_dtensors, share_infinities
from perfmodel.program.program import HOST, RECORD, WAIT, Insertion, Instruction, Members, PhaseRun, Program
from perfmodel.program.sharding import in_dtype
from perfmodel.program.strategies.fsdp.dtensor_overhead import add_dtensor_calls
from perfmodel.program.strategies.fsdp.gradient_accumulation import Accumulation, kept_dtype, with_fresh_gradients
from perfmodel.program.strategies.fsdp.gradient_divisor import divided, divisors
from perfmodel.program.strategies.fsdp.groups import ROOT, Group, Plan, Sizes, plan_of, wrapping
from perfmodel.program.strategies.fsdp.offload import Copies, step_on_host
from perfmodel.program.strategies.fsdp.operators import chunk_cat, foreach_copy, split_copy
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.kernel_key import optimizer_prefix
from perfmodel.trace.operation import Operation, TensorSpec
from perfmodel.trace.phases import BACKWARD, FORWARD, OPTIMIZER, ZERO_GRAD
from perfmodel.trace.trace import EventKind, StepEvents, StorageKind, gradient_storages

COPY_IN, GATHER, SCATTER, REDUCE = 2, 3, 4, 5  # streams


def fsdp(builder: ProgramBuilder, scenario: Scenario) -> Program:
    """Return the program of ``zero2`` and ``zero3``, see :mod:`perfmodel.program.strategies.data_parallel`."""
    plan, trace = plan_of(builder, scenario), builder.trace
    kept = kept_dtype(builder, plan.dtypes.reduced)
    if kept is not None:
        builder.program = with_fresh_gradients(builder.program)
    program = builder.program
    for insertion in _Step(builder, plan, trace.first, program.first_runs, kept).insertions():
        builder.insert_first(insertion.run, insertion.event, *insertion.instructions)
    for insertion in _Step(builder, plan, trace.steady, program.runs, kept).insertions():
        builder.insert(insertion.run, insertion.event, *insertion.instructions)
    share_infinities(builder)
    clip_dtensors(builder)
    add_dtensor_calls(builder, ZERO_GRAD, host_calls.ZERO_GRAD)
    if plan.offloads:
        step_on_host(builder)
    else:
        add_dtensor_calls(builder, OPTIMIZER, optimizer_prefix(trace.workload))
        zero_grad = builder.last(ZERO_GRAD)
        freed = [each for group in plan.groups for each in _gradients_of(group)]
        cleared = (Instruction(EventKind.FREE, each, stream=SCATTER) for each in freed)
        builder.insert(zero_grad, program.runs[zero_grad].segment.stop, *cleared)
    return replace(builder.finish(), setup=tuple(wrapping(builder, plan)))


def _gradients_of(group: Group) -> tuple[int, int]:
    """Return the storages that may hold the rank's shard of the gradients."""
    return group.storages.scattered, group.storages.gradient


def _host_calls(hook: FsdpHook, parameters: int) -> list[Instruction]:
    """Return the host's work for a group.

    It contains the launches and the collective that follow, whose calls are empty. Launches of a policy (casts,
    divisions) come on top.
    """
    return [
        Instruction(HOST, call=host_calls.fsdp_group(hook)),
        Instruction(HOST, call=host_calls.fsdp_parameter(hook), share=float(parameters)),
    ]


class _Step:
    """The instructions that fully_shard inserts into one step, in the order of the host."""

    def __init__(
        self,
        builder: ProgramBuilder,
        plan: Plan,
        events: StepEvents,
        runs: Sequence[PhaseRun],
        kept_dtype: str | None,
    ) -> None:
        self.builder, self.plan, self.events, self.runs = builder, plan, events, runs
        self.groups, self.dtypes, self.sizes = plan.groups, plan.dtypes, Sizes(builder.trace, builder.ranks)
        self.by_module = {group.module: group for group in plan.groups}
        self._gradients = Accumulation(builder, gradient_storages(builder.trace, events), kept_dtype)
        self._ready = set(events.a[events.kind == EventKind.GRAD_READY].tolist())  # parameters that take a gradient
        self._entered = set(events.a[events.kind == EventKind.BLOCK_ENTER].tolist())  # modules that backward comes to
        self._last_backward = max((i for i, run in enumerate(runs) if run.phase == BACKWARD), default=-1)
        self._insertions: list[Insertion] = []
        self._gathers: dict[int, int] = {}  # by module, of those begun and not yet copied out: the mark of the end
        self._whole: set[int] = set()  # modules whose parameters are unsharded
        self._resharded: dict[int, int] = {}  # by module, of those that fewer ranks share: the mark from which they do
        self._kept: tuple[Group, int] | None = None  # whose gathered buffer lives on, and the mark of its copy-out
        self._reducing: tuple[Group, int] | None = None  # whose reduced buffer lives on, and the mark of the end
        self._scattering: int | None = None  # the mark of the last end that backward's end has not awaited
        self._replicated: set[int] = set()  # modules whose scattered buffer lives until then
        self._copies = Copies(builder)

    def insertions(self) -> list[Insertion]:
        for number, run in enumerate(self.runs):
            if run.phase == FORWARD:
                self._forward(number, run)
            elif run.phase == BACKWARD:
                self._backward(number, run)
        return self._insertions

    def _borders(self, run: PhaseRun, kinds: tuple[EventKind, ...]) -> list[tuple[int, int, int]]:
        """Return position, kind and module of the run's events that enter or leave a group."""
        within = slice(run.segment.start, run.segment.stop)
        at = run.segment.start + np.flatnonzero(np.isin(self.events.kind[within], kinds))
        borders = ((int(i), int(self.events.kind[i]), int(self.events.a[i])) for i in at.tolist())
        return [border for border in borders if border[2] in self.by_module or border[2] == ROOT]

    def _put(self, run: int, event: int, rows: Sequence[Instruction]) -> None:
        if rows:
            self._insertions.append(Insertion(run, event, tuple(rows)))

    # forward

    def _forward(self, number: int, run: PhaseRun) -> None:
        for at, kind, module in self._borders(run, (EventKind.MODULE_ENTER, EventKind.MODULE_EXIT)):
            group = self.by_module.get(module)
            if kind == EventKind.MODULE_ENTER:
                rows = self._after_the_optimizer() if module == ROOT else []
                if group is not None:
                    rows += self._host(group, "forward") + self._gather(group) + self._copy_out(group)
                    rows += self._prefetch(group.prefetched_in_forward)
                self._put(number, at, rows)
            else:
                rows = self._reshard_after_forward(group) if group is not None and group.reshards else []
                self._put(number, at + 1, rows + (self._end_of_forward() if module == ROOT else []))

    def _after_the_optimizer(self) -> list[Instruction]:
        rows = []
        for stream in (COPY_IN, GATHER):
            mark = self.builder.mark()
            rows += [Instruction(RECORD, mark), Instruction(WAIT, mark, stream=stream)]
        return rows

    def _host(self, group: Group, hook: FsdpHook) -> list[Instruction]:
        """Return the host's work where a group is copied out, its gather included, wherever that began."""
        return [] if group.module in self._whole else _host_calls(hook, len(group.parameters))

    def _gather(self, group: Group) -> list[Instruction]:
        """Begin the all-gather, unless it was prefetched or the parameters are unsharded already."""
        if group.module in self._gathers or group.module in self._whole:
            return []
        members = self._sharing(group)
        shards = tuple(self.sizes.shard(index, members.ranks) for index in group.parameters)
        whole = self.sizes.buffer(group.parameters)
        copied, gathered = self.builder.mark(), self.builder.mark()
        self._gathers[group.module] = gathered
        kind = StorageKind.PARAMETER
        cast, uncast = self._cast(group, shards)
        return [
            *(self._copies_wait(self._resharded[group.module]) if group.module in self._resharded else []),
            *cast,
            Instruction(EventKind.ALLOC, group.storages.gathered, whole.bytes, stream=COPY_IN, holds=kind),
            self.builder.launch(foreach_copy(shards, shards), "", stream=COPY_IN),
            Instruction(RECORD, copied, stream=COPY_IN),
            Instruction(WAIT, copied, stream=GATHER),
            self.builder.blocking("all_gather", whole, GATHER, call="", members=members),
            Instruction(RECORD, gathered, stream=GATHER),
            *uncast,
        ]

    def _sharing(self, group: Group) -> Members:
        """Return the ranks that now share the group's parameters."""
        fewer = self.plan.resharing if group.module in self._resharded else None
        return fewer or self.builder.members

    def _prefetch(self, modules: Sequence[int]) -> list[Instruction]:
        """Begin to gather these modules' groups, one after another."""
        return [row for module in modules if module in self.by_module for row in self._gather(self.by_module[module])]

    def _cast(self, group: Group, shards: tuple[TensorSpec, ...]) -> tuple[list[Instruction], list[Instruction]]:
        """Return what brings shards to the device (CPU offload) and into the sent dtype, and the frees after it.

        torch casts wherever that dtype is not the one that is kept, shards that are in it already included.
        """
        if self.plan.offloads:
            kept = tuple(in_dtype(shard, self.dtypes.kept) for shard in shards)
            return self._copies.to_device(kept, shards, COPY_IN) if group.module not in self._resharded else ([], [])
        if self.dtypes.kept is None:
            return [], []
        kind, size_bytes = StorageKind.PARAMETER, sum(shard.bytes for shard in shards)
        from_dtype = None if group.module in self._resharded else self.dtypes.kept
        kept = tuple(in_dtype(shard, from_dtype) for shard in shards)
        begin = [
            Instruction(EventKind.ALLOC, group.storages.cast, size_bytes, stream=COPY_IN, holds=kind),
            self.builder.launch(foreach_copy(shards, kept), host_calls.LAUNCH, stream=COPY_IN),
        ]
        return begin, [Instruction(EventKind.FREE, group.storages.cast, stream=COPY_IN, holds=kind)]

    def _copy_out(self, group: Group, in_forward: bool = True) -> list[Instruction]:
        """Wait for the gathered parameters and copy them into the unsharded ones."""
        if group.module in self._whole:
            return []
        self._whole.add(group.module)
        kind = StorageKind.PARAMETER
        before = self._kept
        rows = self._copies_wait(before[1]) if in_forward and before is not None else []
        rows.append(Instruction(WAIT, self._gathers.pop(group.module)))
        unsharded = tuple(self.sizes.unsharded(index) for index in group.parameters)
        for storage, tensor in zip(group.unsharded, unsharded, strict=True):
            rows.append(Instruction(EventKind.ALLOC, storage, tensor.bytes, holds=kind))
        copy = split_copy(self.sizes.buffer(group.parameters), unsharded, self._sharing(group).ranks)
        copied = self.builder.mark()
        rows.append(self.builder.launch(copy, ""))
        if self._resharded.pop(group.module, None) is not None:
            rows += self._free_resharded(group)
        rows.append(Instruction(RECORD, copied))
        if in_forward:
            if before is not None:
                rows.append(self._free_gathered(before[0]))
            self._kept = (group, copied)
            return rows
        return [*rows, *self._copies_wait(copied), self._free_gathered(group)]

    def _copies_wait(self, mark: int) -> list[Instruction]:
        return [Instruction(WAIT, mark, stream=stream) for stream in (COPY_IN, GATHER)]

    def _free_gathered(self, group: Group) -> Instruction:
        return Instruction(EventKind.FREE, group.storages.gathered, stream=COPY_IN, holds=StorageKind.PARAMETER)

    def _reshard(self, group: Group) -> list[Instruction]:
        if group.module not in self._whole:
            return []
        self._whole.discard(group.module)
        return [Instruction(EventKind.FREE, storage, holds=StorageKind.PARAMETER) for storage in group.unsharded]

    def _reshard_after_forward(self, group: Group) -> list[Instruction]:
        """Free the unsharded parameters after forward.

        Where fewer ranks share them until backward, keep this rank's larger shard.
        """
        members = self.plan.resharing
        if members is None:
            return self._reshard(group)
        # What no backward came for, torch frees as it is replaced.
        rows = self._free_resharded(group) if group.module not in self._entered else []
        for storage, index, freed in zip(group.resharded, group.parameters, self._reshard(group), strict=True):
            own = self.sizes.shard(index, members.ranks)
            rows += [
                self.builder.launch(Operation("aten.clone.default", (own,), outputs=(own,)), host_calls.LAUNCH),
                Instruction(EventKind.ALLOC, storage, own.bytes, holds=StorageKind.PARAMETER),
                freed,
            ]
        mark = self._resharded[group.module] = self.builder.mark()
        return [*rows, Instruction(RECORD, mark)]

    def _free_resharded(self, group: Group) -> list[Instruction]:
        return [Instruction(EventKind.FREE, storage, holds=StorageKind.PARAMETER) for storage in group.resharded]

    def _end_of_forward(self) -> list[Instruction]:
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

    def _end_of_backward(self, done: set[int], is_last: bool) -> list[Instruction]:
        """Return what torch does when backward has ended.

        It comes to the groups whose input takes no gradient, the root first, and frees what was gathered for a backward
        that did not come.
        """
        rows = []
        for group in sorted(self.groups, key=lambda each: each.module != ROOT):
            if group.module not in done:
                rows += self._after_backward(group, is_last)
            if self._scattering is not None:
                rows.append(Instruction(WAIT, self._scattering))
                self._scattering = None
            if group.module in self._replicated:
                rows.append(Instruction(EventKind.FREE, group.storages.scattered, stream=SCATTER))
            rows += self._copies.awaited(group.module)
            if group.module in self._gathers:
                rows += [Instruction(WAIT, self._gathers.pop(group.module)), self._free_gathered(group)]
        return rows + self._await_reduction()

    def _before_backward(self, group: Group) -> list[Instruction]:
        """Gather, unless that was prefetched; then begin to gather the group whose backward comes next."""
        rows = self._host(group, "gather") + self._gather(group) + self._copy_out(group, in_forward=False)
        if group.prefetched_in_backward:
            return rows + self._prefetch(group.prefetched_in_backward)
        before = self.groups.index(group)  # the root's backward is the first, and it is the last of them
        return rows + (self._gather(self.groups[before - 1]) if before else [])

    def _after_backward(self, group: Group, reduces: bool) -> list[Instruction]:
        """Free the unsharded parameters; in the last micro-batch, reduce the gradients, if any, and free them too.

        The buffer that is reduced lives until the next group's turn.
        """
        parameters = [index for index in group.parameters if index in self._ready]
        rows = self._gradients.add(parameters) + self._reshard(group)
        self._resharded.pop(group.module, None)
        if not reduces:
            return rows + self._gradients.keep(parameters)
        rows += self._await_reduction()
        if not parameters:
            return rows
        whole = in_dtype(self.sizes.buffer(parameters), self.dtypes.reduced)
        tensors, storages = self._gradients.take(parameters)
        freed = [Instruction(EventKind.FREE, storage) for storage in storages]
        ready, reduced = self.builder.mark(), self.builder.mark()
        join = chunk_cat(tensors, whole, self.builder.ranks)
        self._reducing = (group, reduced)
        shard = vector(whole.numel // self.builder.ranks, whole.dtype)
        return [
            *rows,
            *_host_calls("reduce", len(parameters)),
            Instruction(EventKind.ALLOC, group.storages.reduced, whole.bytes),
            self.builder.launch(join, ""),
            *freed[-2::-1],  # the list is cleared from its end; the last is held by a loop's variable
            Instruction(RECORD, ready),
            Instruction(WAIT, ready, stream=SCATTER),
            Instruction(EventKind.ALLOC, group.storages.scattered, shard.bytes, stream=SCATTER),
            *divided(self.builder, whole, self._divisors(whole.dtype)[0], SCATTER),
            self.builder.blocking("reduce_scatter", whole, SCATTER, call=""),
            Instruction(RECORD, reduced, stream=SCATTER),
            *self._finish_reduction(group, shard, reduced, parameters),
            *freed[-1:],
            *self._free_sent_gradients(group, shard),
        ]

    def _finish_reduction(
        self, group: Group, shard: TensorSpec, reduced: int, parameters: Sequence[int]
    ) -> list[Instruction]:
        """Return what follows the reduce-scatter of a gradient shard.

        It is reduced over the replicas, if there are several, on a stream of its own; on that stream, or else where it
        was scattered, it is divided, cast and copied to the host. The last mark is awaited at the end of backward.
        """
        stream, rows, replicas = SCATTER, list[Instruction](), self.plan.replicas
        kept, is_cast = in_dtype(shard, self._kept_dtype(group)), self._is_cast(group, shard)
        self._scattering = reduced
        if replicas is not None:
            scattered, self._scattering, stream = self.builder.mark(), self.builder.mark(), REDUCE
            rows += [
                Instruction(RECORD, scattered, stream=SCATTER),
                Instruction(WAIT, scattered, stream=REDUCE),
                self.builder.blocking("all_reduce", shard, REDUCE, members=replicas),
                Instruction(RECORD, self._scattering, stream=REDUCE),
            ]
            if is_cast or self.plan.offloads:
                self._replicated.add(group.module)
        more = divided(self.builder, shard, self._divisors(shard.dtype)[1], stream)
        if is_cast:
            cast = Operation("aten._to_copy.default", (shard,), (("dtype", f"torch.{kept.dtype}"),), (kept,))
            more += [
                self.builder.launch(cast, host_calls.LAUNCH, stream=stream),
                Instruction(EventKind.ALLOC, group.storages.gradient, kept.bytes, stream=stream),
            ]
            if replicas is None:
                more.append(Instruction(EventKind.FREE, group.storages.scattered, stream=SCATTER))
        if self.plan.offloads:
            more += self._copies.to_host(group.module, parameters, stream)
        if more:
            self._scattering = self.builder.mark()
            more.append(Instruction(RECORD, self._scattering, stream=stream))
        return rows + more

    def _free_sent_gradients(self, group: Group, shard: TensorSpec) -> list[Instruction]:
        """Free the gradient shard as soon as its copies to the host have been issued."""
        is_cast = self._is_cast(group, shard)
        if not self.plan.offloads or (self.plan.replicas is not None and not is_cast):
            return []
        return [Instruction(EventKind.FREE, group.storages.gradient if is_cast else group.storages.scattered)]

    def _kept_dtype(self, group: Group) -> str:
        return self.dtypes.kept or self.sizes.tensor(group.parameters[0]).dtype

    def _is_cast(self, group: Group, shard: TensorSpec) -> bool:
        return self._kept_dtype(group) != shard.dtype

    def _divisors(self, dtype: str) -> tuple[float, float]:
        copies = 1 if self.plan.replicas is None else self.plan.replicas.ranks
        return divisors(dtype, copies * self.builder.ranks)

    def _await_reduction(self) -> list[Instruction]:
        if self._reducing is None:
            return []
        group, mark = self._reducing
        self._reducing = None
        return [Instruction(WAIT, mark), Instruction(EventKind.FREE, group.storages.reduced)]
