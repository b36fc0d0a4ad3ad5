"""Shards, their gradients and optimizer states in pinned host memory: fully_shard's CPUOffloadPolicy.

    before a gather     each parameter's shard is copied to the device, and there cast to what is sent
    after a reduction   each parameter's shard of the gradient is copied to the host
    backward's end      the host waits for these copies, group by group
    optimizer           runs on the host, at

        seconds = a + b n + c s        n parameters of this rank, of s MiB together

The device's copy engines do the copies, one after another on a stream: they take no multiprocessors, and the two
directions do not slow each other. (Both at once take H200s 10 % longer than either alone.)

Sources: torch/distributed/fsdp/_fully_shard (``_fsdp_param.py``: ``all_gather_inputs``, ``_fsdp_collectives.py``:
``foreach_reduce``, ``_fsdp_param_group.py``: ``finalize_backward``), as recorded in docs/fsdp2.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from perfmodel.hardware import host_calls
from perfmodel.program.builder import ProgramBuilder
from perfmodel.program.program import BY_HOST, HOST, RECORD, WAIT, Instruction
from perfmodel.trace.kernel_key import optimizer_prefix
from perfmodel.trace.operation import Operation, TensorSpec
from perfmodel.trace.phases import OPTIMIZER
from perfmodel.trace.trace import EventKind, StorageKind
from perfmodel.units import MIB


class Copies:
    """The copies of one step between the host and the device."""

    def __init__(self, builder: ProgramBuilder) -> None:
        self._builder = builder
        self._shards = {each.name: each.tensor for each in builder.trace.optimized or ()}
        self._marks: dict[int, list[int]] = {}  # by module: what backward's end awaits

    def to_device(
        self, kept: Sequence[TensorSpec], sent: Sequence[TensorSpec], stream: int
    ) -> tuple[list[Instruction], list[Instruction]]:
        """Return copies of the shards to the device, and the frees of what they allocate.

        Each is copied as it is kept, and then cast to what is sent, if that is another dtype.
        """
        rows: list[Instruction] = []
        ends: list[Instruction] = []
        for shard, wanted in zip(kept, sent, strict=True):
            copied, end = self._storage(shard, stream)
            rows += [
                self._builder.launch(_copy(shard, "cpu", "cuda"), host_calls.COPY_TO_DEVICE, stream=stream),
                copied,
            ]
            if wanted.dtype != shard.dtype:
                cast = Operation("aten._to_copy.default", (shard,), (("dtype", f"torch.{wanted.dtype}"),), (wanted,))
                copy_end = end
                copied, end = self._storage(wanted, stream)
                rows += [self._builder.launch(cast, host_calls.LAUNCH, stream=stream), copied, copy_end]
            ends.append(end)
        return rows, ends[::-1]  # a list is cleared from its end

    def _storage(self, tensor: TensorSpec, stream: int) -> tuple[Instruction, Instruction]:
        """Return the allocation of a tensor's storage, and its free."""
        storage, kind = self._builder.new_storage(), StorageKind.PARAMETER
        return (
            Instruction(EventKind.ALLOC, storage, tensor.bytes, stream=stream, holds=kind),
            Instruction(EventKind.FREE, storage, stream=stream, holds=kind),
        )

    def to_host(self, module: int, parameters: Sequence[int], stream: int) -> list[Instruction]:
        """Return copies of this rank's gradient shards to the host; an empty one is awaited too, and takes no time."""
        rows: list[Instruction] = []
        marks = self._marks[module] = [self._builder.mark() for _ in parameters]
        for index, mark in zip(parameters, marks, strict=True):
            shard = self._shards.get(self._builder.trace.parameters[index].name)
            if shard is not None:
                rows.append(self._builder.launch(_copy(shard, "cuda", "cpu"), host_calls.COPY_TO_HOST, stream=stream))
            rows.append(Instruction(RECORD, mark, stream=stream))
        return rows

    def awaited(self, module: int) -> list[Instruction]:
        """Return the host's waits for the gradients of the module's group."""
        return [Instruction(WAIT, mark, stream=BY_HOST) for mark in self._marks.pop(module, [])]


def _copy(tensor: TensorSpec, source: str, target: str) -> Operation:
    """Return a copy that the host does not wait for."""
    keywords = (("device", target), ("non_blocking", True))
    return Operation(
        "aten._to_copy.default", (tensor._replace(device=source),), keywords, (tensor._replace(device=target),)
    )


def step_on_host(builder: ProgramBuilder) -> None:
    """Put the optimizer's step over this rank's shards into its phase, as work of the host."""
    shards, call = builder.trace.optimized or (), host_calls.on_host(optimizer_prefix(builder.trace.workload))
    number = builder.last(OPTIMIZER)
    builder.insert(
        number,
        builder.program.runs[number].segment.stop,
        Instruction(HOST, call=call),
        Instruction(HOST, call=host_calls.per_parameter(call), share=float(len(shards))),
        Instruction(HOST, call=host_calls.per_mib(call), share=sum(each.tensor.bytes for each in shards) / MIB),
    )
