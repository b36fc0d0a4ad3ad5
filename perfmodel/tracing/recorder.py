"""The dispatch mode that writes a trace: every operator that fake tensors run, in order, and the storages it makes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode

from perfmodel.errors import PerfModelError
from perfmodel.limits import MOST_TRACED_OPERATORS
from perfmodel.trace.phases import BACKWARDS, FORWARD
from perfmodel.trace.trace import EventKind, Segment, StepEvents
from perfmodel.tracing.fake_cuda import CPU, is_on_host, put_on_host
from perfmodel.tracing.interning import OperationTable, Table, flat
from perfmodel.tracing.known_values import Shadows, refused_read
from perfmodel.tracing.storages import ALLOCATION_ORDER, StorageLedger, Touches, has_one_owner, is_dense, touched_bytes

aten = torch.ops.aten

# Operators that launch nothing although they are no views by their schema.
_BOOKKEEPING = frozenset(
    (
        "_unsafe_view",
        "detach_",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "set_",
    )
)
_CALLING_PHASES = (FORWARD, *BACKWARDS)
_COMPUTE_LOGSUMEXP = 4  # cuDNN's attention makes no log-sum-exp unless this argument asks for it
_IGNORED_NAMESPACES = frozenset(("prim", "profiler"))
# Whose tensors must have one dtype, which fake tensors do not ask for.
_OF_ONE_DTYPE = frozenset(
    getattr(aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "convolution")
)
# Outputs that CUDA returns on the host: the random seed and offset.
_HOST_OUTPUTS: dict[str, tuple[int, ...]] = {"_scaled_dot_product_efficient_attention": (2, 3)}
# Where CPU keeps statistics in the input's dtype and CUDA in float32: outputs 1 and 2.
_FLOAT32_STATISTICS = frozenset(
    (aten.native_batch_norm.default, aten.native_layer_norm.default, aten.cudnn_batch_norm.default)
)


class Traits:
    """The facts that the schema of an operator states, looked up once."""

    def __init__(self, func: Any) -> None:
        self.name = str(func)
        self.base_name = self.name.split(".")[1]
        self.is_lift = self.base_name == "lift_fresh"
        self.transfers = self.is_lift or self.base_name in ("_to_copy", "copy_")
        self.is_recorded = func.namespace not in _IGNORED_NAMESPACES
        is_view = func.is_view or torch.Tag.inplace_view in func.tags
        self.launches = not is_view and self.base_name not in _BOOKKEEPING
        self.allocation_order = ALLOCATION_ORDER.get(self.base_name)
        self.host_outputs = _HOST_OUTPUTS.get(self.base_name, ())


class Recorder(TorchDispatchMode):
    """Collects the events of one step after another.

    Others report through ``begin_segment``, ``calling``, ``enter_module``, ``exit_module``, ``node_starts``,
    ``node_ends`` and ``gradient_ready``; ``take_step`` hands out what one step recorded.
    """

    def __init__(self, modules: tuple[tuple[str, str], ...]) -> None:
        super().__init__()
        self.modules = modules
        self._module_stack: list[int] = []
        self.table = OperationTable()
        self.calls: Table[str] = Table()
        self.nodes: Table[str] = Table()
        self.ledger = StorageLedger(self._emit)
        self._shadows = Shadows()
        self._traits: dict[Any, Traits] = {}
        self._place: str | None = None
        self._engine_accumulates = False
        self._uses_by_one_owner: int | None = None
        self._node = -1
        self.is_dispatching = False
        self.borders: dict[Any, list[tuple[EventKind, int]]] = {}
        self._reset()

    @property
    def is_recording(self) -> bool:
        return self.phase not in ("", "end")

    def _reset(self) -> None:
        self._kind, self._a, self._b = array("b"), array("q"), array("q")
        self._touches = Touches()
        self._segments: list[tuple[str, int, int]] = []
        self._operators = 0
        self.phase = ""

    def _emit(self, kind: EventKind, a: int, b: int = 0) -> None:
        self._kind.append(kind)
        self._a.append(a)
        self._b.append(b)

    # Reported by others

    def begin_segment(self, phase: str, micro_batch: int) -> None:
        if self.phase == FORWARD:
            self.ledger.end_forward()
        self.phase, self._node, self._engine_accumulates = phase, -1, False
        self._segments.append((phase, micro_batch, len(self._kind)))

    def take_step(self) -> StepEvents:
        starts = [start for _, _, start in self._segments] + [len(self._kind)]
        segments = [
            Segment(phase, micro_batch, start, stop)
            for (phase, micro_batch, start), stop in zip(self._segments, starts[1:], strict=True)
            if phase != "end"
        ]
        columns = [np.array(column, dtype=np.int64) for column in (self._kind, self._a, self._b)]
        touched = self._touches.columns(len(self._kind))
        self._reset()
        return StepEvents(columns[0], columns[1], columns[2], tuple(segments), *touched)

    @contextmanager
    def placing(self, place: str | None) -> Iterator[None]:
        """Put tensors made inside on ``place`` (``cuda`` or ``cpu``); None puts them with their inputs."""
        before, self._place = self._place, place
        try:
            yield
        finally:
            self._place = before

    @contextmanager
    def calling(self, name: str | None) -> Iterator[None]:
        """Report a call from Python, if any operator runs inside it."""
        if name is None or self.phase not in _CALLING_PHASES:
            yield
            return
        start = len(self._kind)
        self._emit(EventKind.CALL_ENTER, -1)
        try:
            yield
        finally:  # recomputation is stopped by an exception once it has made what was missing
            if EventKind.OP in self._kind[start:]:
                self._a[start] = self.calls.add(name)
                self._emit(EventKind.CALL_EXIT, self._a[start])
            else:
                del self._kind[start], self._a[start], self._b[start]

    def enter_module(self, index: int) -> None:
        self._module_stack.append(index)
        self._emit(EventKind.MODULE_ENTER, index)

    def exit_module(self, index: int) -> None:
        self._module_stack.pop()
        self._emit(EventKind.MODULE_EXIT, index)

    def block_borders(self, node: Any, kind: EventKind, index: int) -> None:
        """Note that where this node starts, a block's backward begins (BLOCK_ENTER) or has ended (BLOCK_EXIT)."""
        self.borders.setdefault(node, []).append((kind, index))

    def node_starts(self, name: str, borders: Iterable[tuple[EventKind, int]] = ()) -> None:
        self._engine_accumulates = False
        if self.is_recording:
            for kind, index in sorted(borders, key=lambda border: -border[0]):  # one block ends where another begins
                self._emit(kind, index)
            self._node = self.nodes.add(name)
            self._emit(EventKind.NODE, self._node)

    def node_ends(self) -> None:
        self._engine_accumulates = True

    def engine_ends(self) -> None:
        self.borders.clear()
        self._node, self._engine_accumulates = -1, False

    def gradient_ready(self, index: int) -> None:
        self._emit(EventKind.GRAD_READY, index)

    def _where(self) -> str:
        """Return the innermost module at work, for error messages."""
        if not self._module_stack:
            return f"its {self.phase} phase"
        name, kind = self.modules[self._module_stack[-1]]
        return f"{name or 'the model'} ({kind})"

    def refused_read(self) -> PerfModelError:
        """Return the error of reading values that depend on data in the module at work."""
        return refused_read(self._where())

    def learn_reference_counts(self) -> None:
        """See how often a gradient is referenced here that only the engine holds: let it sum two such gradients."""
        leaf = torch.zeros(1, device="cuda", requires_grad=True)
        made = [leaf.tanh(), leaf.sigmoid()]
        torch.autograd.backward(made, [torch.ones_like(tensor) for tensor in made])

    # Operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        was_dispatching, self.is_dispatching = self.is_dispatching, True
        try:
            with torch._C.DisableTorchFunction():
                return self._run(func, args, kwargs or {})
        finally:
            self.is_dispatching = was_dispatching

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":
            kwargs = kwargs | {"device": CPU}
        traits = self._traits.get(func)
        if traits is None:
            traits = self._traits[func] = Traits(func)
        if not (traits.is_recorded and self.is_recording):
            if self._uses_by_one_owner is None and func is aten.add.Tensor:
                self._uses_by_one_owner = args[0]._use_count()
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self._run_read(traits, args)
        if func in _OF_ONE_DTYPE:
            _check_one_dtype(traits, args)
        if func is aten.add.Tensor and self._adds_in_place(args, kwargs):
            func = aten.add_.Tensor
            traits = self._traits.setdefault(func, Traits(func))
        try:
            result = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise PerfModelError(
                f"model: {self._where()} must not make tensors whose shape depends on data "
                f"(it calls {traits.base_name}). Use masks of fixed shape, or another model."
            ) from error
        if func in _FLOAT32_STATISTICS:
            result = (result[0], *(statistic.to(torch.float32) for statistic in result[1:3]), *result[3:])
        elif func is aten._scaled_dot_product_cudnn_attention.default and not args[_COMPUTE_LOGSUMEXP]:
            result = (result[0], None, *result[2:])
        self._shadows.follow(func, args, kwargs, result)
        self._record(traits, args, kwargs, result)
        return result

    def _run_read(self, traits: Traits, args: Any) -> Any:
        """Record the reading of one element: the host waits for the device, unless the tensor lives on the host."""
        on_host = is_on_host(args[0])
        value = aten._local_scalar_dense.default(*args) if on_host else self._shadows.read(args[0], self._where())
        number = self.table.add(traits.name, args, {}, (), on_host, not on_host)
        self._emit(EventKind.OP, number, self._node)
        if not on_host:
            self._emit(EventKind.SYNC, number)
        return value

    def _adds_in_place(self, args: Any, kwargs: Any) -> bool:
        """Whether the autograd engine, which cannot do so under a mode, would sum two gradients in place."""
        if not self._engine_accumulates or kwargs or len(args) != 2:
            return False
        first, second = args
        return (
            isinstance(second, torch.Tensor)
            and first.shape == second.shape
            and first.dtype == second.dtype
            and is_dense(first)
            and has_one_owner(first)
            and first._use_count() == self._uses_by_one_owner
        )

    def _record(self, traits: Traits, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        outputs = [item for item in flat(result) if isinstance(item, torch.Tensor)]
        inputs = [item for item in flat((args, tuple(kwargs.values()))) if isinstance(item, torch.Tensor)]
        places = {True} if traits.is_lift else {is_on_host(tensor) for tensor in inputs}
        on_host = places == {True} if self._place is None else self._place == "cpu"
        if traits.is_lift and on_host:
            put_on_host(inputs[0])
        if on_host:
            for tensor in outputs:
                put_on_host(tensor)
        else:
            for index in traits.host_outputs:
                put_on_host(outputs[index])
        is_host_work = on_host and False not in places
        is_empty = bool(outputs) and not any(tensor.numel() for tensor in outputs)
        launches = (traits.launches or traits.is_lift) and not is_host_work and not is_empty
        number = self.table.add(traits.name, args, kwargs, outputs, on_host, launches)
        self._operators += 1
        if self._operators > MOST_TRACED_OPERATORS:
            raise PerfModelError(
                f"model: a step must run at most {MOST_TRACED_OPERATORS:,} operators to be traced (it runs more, "
                f"{self._where()} at work). Ask for fewer layers or a shorter loop, from which more follow."
            )
        event = len(self._kind)
        self._emit(EventKind.OP, number, self._node)
        if not on_host:
            self._note_outputs(traits, list(flat(result)))  # by contract after their OP: temporaries come in between
        if launches:
            self._touches.add(event, touched_bytes([*inputs, *outputs], self.ledger.find))
        if launches and traits.transfers and len(places | {on_host}) == 2 and not kwargs.get("non_blocking"):
            self._emit(EventKind.SYNC, number)

    def _note_outputs(self, traits: Traits, outputs: list[Any]) -> None:
        in_forward = self.phase == FORWARD
        if traits.allocation_order is not None:
            outputs = [outputs[index] for index in traits.allocation_order]
        for tensor in outputs:
            if isinstance(tensor, torch.Tensor) and not is_on_host(tensor):
                self.ledger.note_output(tensor, in_forward)


def _check_one_dtype(traits: Traits, args: Any) -> None:
    """Refuse what CUDA would refuse, in its kind of error."""
    dtypes = {tensor.dtype for tensor in args if isinstance(tensor, torch.Tensor)}
    if len(dtypes) > 1 or not all(dtype.is_floating_point or dtype.is_complex for dtype in dtypes):
        names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise RuntimeError(f"{traits.base_name} needs tensors of one floating-point dtype, but got {names}")
