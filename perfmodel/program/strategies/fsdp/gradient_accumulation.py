"""Gradients that fully_shard adds up over micro-batches in the dtype in which it reduces them, where it computes them
in another: each is cast after the first backward and added to after every other one, parameter by parameter.

Autograd then finds no gradient to add to: every backward is as the first of a step.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (``to_accumulated_grad_if_needed``,
``accumulate_unsharded_grad_if_needed``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from perfmodel.hardware import host_calls
from perfmodel.program.builder import ProgramBuilder
from perfmodel.program.program import Instruction, PhaseRun, Program
from perfmodel.program.sharding import in_dtype
from perfmodel.trace.operation import Operation, TensorSpec
from perfmodel.trace.phases import BACKWARD
from perfmodel.trace.trace import EventKind


def kept_dtype(builder: ProgramBuilder, reduced: str | None) -> str | None:
    """Return the dtype in which gradients are kept from one micro-batch to the next.

    None stands for the one in which backward makes them, or for a step of one micro-batch. ``reduced`` is the dtype
    in which they are reduced; None for the one in which they are computed.
    """
    backwards = sum(run.phase == BACKWARD for run in builder.program.runs)
    computed = {builder.trace.parameters[index].tensor.dtype for index in builder.gradients}
    return None if backwards == 1 or computed <= {reduced} else reduced


def with_fresh_gradients(program: Program) -> Program:
    """Return the program whose micro-batches all run what the first one does."""
    return replace(program, runs=_as_the_first(program.runs), first_runs=_as_the_first(program.first_runs))


def _as_the_first(runs: Sequence[PhaseRun]) -> tuple[PhaseRun, ...]:
    first = {run.phase: run.segment for run in runs if run.micro_batch == 0}
    return tuple(replace(run, segment=first[run.phase]) if run.micro_batch > 0 else run for run in runs)


@dataclass
class Accumulation:
    """The accumulated gradients of one step.

    Attributes
    ----------
    builder : ProgramBuilder
    storages : mapping of int to int
        Of the gradients that backward makes, by parameter.
    dtype : str or None
        See :func:`kept_dtype`.
    """

    builder: ProgramBuilder
    storages: Mapping[int, int]
    dtype: str | None
    _kept: dict[int, int] = field(default_factory=dict)  # storages of sums, by parameter

    def add(self, parameters: Sequence[int]) -> list[Instruction]:
        """Add gradients to what earlier micro-batches left; this precedes the free of the unsharded parameters."""
        rows = []
        for index in parameters:
            if index in self._kept:
                computed = self._tensor(index)
                total = in_dtype(computed, self.dtype)
                addition = Operation("aten.add_.Tensor", (total, computed), outputs=(total,))
                rows += [self.builder.launch(addition, host_calls.LAUNCH), *self._free(index)]
        return rows

    def keep(self, parameters: Sequence[int]) -> list[Instruction]:
        """Keep what a micro-batch made that does not reduce, if nothing was kept before.

        This follows the free of the unsharded parameters.
        """
        rows = []
        for index in parameters:
            if self.dtype is not None and index not in self._kept:
                computed, storage = self._tensor(index), self.builder.new_storage()
                total = in_dtype(computed, self.dtype)
                cast = Operation("aten._to_copy.default", (computed,), (("dtype", f"torch.{self.dtype}"),), (total,))
                self._kept[index] = storage
                rows += [
                    self.builder.launch(cast, host_calls.LAUNCH),
                    Instruction(EventKind.ALLOC, storage, total.bytes),
                    *self._free(index),
                ]
        return rows

    def take(self, parameters: Sequence[int]) -> tuple[tuple[TensorSpec, ...], list[int]]:
        """Return the gradients that are reduced, and the storages that are then freed."""
        tensors = tuple(in_dtype(self._tensor(i), self.dtype if i in self._kept else None) for i in parameters)
        storages = [self._kept.pop(i, self.storages.get(i)) for i in parameters]
        return tensors, [storage for storage in storages if storage is not None]

    def _free(self, index: int) -> list[Instruction]:
        return [Instruction(EventKind.FREE, self.storages[index])] if index in self.storages else []

    def _tensor(self, index: int) -> TensorSpec:
        return self.builder.trace.parameters[index].tensor
