"""What a host issues while torch's fully_shard trains on the CPU: records, and the mode and stand-ins that write them.

Where FSDP asks for its device's streams and events it is given stand-ins that write down what is done with them: the CPU
has none of its own, and FSDP's code is otherwise the same as on CUDA. What differs on the CPU is kept out of the records:
operators on scalars that live on the host (Adam's step counts), and propagation of shardings on fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from perfmodel.trace.trace import EventKind
from perfmodel.tracing.interning import flat
from perfmodel.tracing.recorder import Traits
from perfmodel.tracing.storages import StorageLedger

COMPUTE = "compute"


@dataclass(frozen=True)
class Record:
    """One thing that the host issues.

    kind: collective, op, switch (of the current stream, to ``stream``), record, wait (``stream`` waits for ``event`` of
    ``source``; stream ``host``: the host blocks), begin and end (of a label of the profiler or a module's forward),
    alloc and free (of ``storage``; name: what it holds). stream: the current one, which a storage that is allocated now
    belongs to. group: the parameter group whose hook is at work. module: whose
    forward or backward an operator belongs to. size_bytes: of a collective the whole output of an all-gather, the whole
    input of a reduce-scatter; of alloc and free the storage's. inputs, outputs: ``float32[4, 6]``.
    """

    kind: str
    name: str
    stream: str
    phase: str
    group: str | None = None
    module: str | None = None
    event: int = -1
    source: str = ""
    storage: int = -1
    size_bytes: int = 0
    dtype: str = ""
    ranks: int = 0
    op: str = ""
    is_async: bool = False
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line, for reading and comparing: ``all_gather float32 1008 [blocks.0] @all_gather``."""
        where = (
            f"{'' if self.group is None else f' [{self.group}]'}{'' if self.stream == COMPUTE else f' @{self.stream}'}"
        )
        if self.kind == "collective":
            return f"{self.name} {self.dtype} {self.size_bytes}{' async' if self.is_async else ''}{where}"
        if self.kind == "op":
            return f"{self.name}{'' if self.module is None else f' <{self.module}>'}{where}"
        if self.kind == "record":
            return f"record {self.event} @{self.stream}"
        if self.kind == "wait":
            return f"{self.stream} waits {self.event} of {self.source}"
        if self.kind in ("alloc", "free"):
            return f"{self.kind} {self.name} {self.size_bytes}{where}"
        return f"{self.kind} {self.name or self.stream}"


# Stand-ins for a device's streams


class Event:
    """A recorded event knows its number and on which stream it was recorded last."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.number, self.stream = -1, ""

    def record(self, stream: Stream | None = None) -> None:
        self.number, self.stream = self._recorder.next_event(), (stream or self._recorder.current).name
        self._recorder.add("record", stream=self.stream, event=self.number)

    def synchronize(self) -> None:
        self._recorder.add("wait", stream="host", event=self.number, source=self.stream)


class Stream:
    """Does with events what torch.cuda.Stream does: waiting for a stream is waiting for an event recorded on it."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self.name = recorder, name

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._recorder)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self._recorder.add("wait", stream=self.name, event=event.number, source=event.stream)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class DeviceHandle:
    """What FSDP takes for its device's module (torch.cuda)."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def Stream(self, priority: int = 0) -> Stream:  # noqa: N802  (torch's name)
        return Stream(self._recorder, "unnamed")

    def Event(self) -> Event:  # noqa: N802  (torch's name)
        return Event(self._recorder)

    def current_stream(self) -> Stream:
        return self._recorder.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self._recorder.current
        self._recorder.switch(stream)
        try:
            yield
        finally:
            self._recorder.switch(before)


# The recorder


class Recorder(TorchDispatchMode):
    """Writes the records; the rest of this module reports to it.

    phase, group, module: what is at work now. role: what the storages that are made now hold. transfer: what copies that
    are made now are called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Record] = []
        self.current = Stream(self, COMPUTE)
        self.phase, self.role, self.transfer = "", "", ""
        self.group: str | None = None
        self.module: str | None = None
        self.reductions: tuple[str, ...] = ("", "")  # of reduce-scatter and all-reduce
        self._events = 0
        self._labels: list[str] = []
        self._host: WeakSet[Any] = WeakSet()
        self._contents: dict[int, tuple[str, str | None, int]] = {}  # of storages: role, group, bytes
        self.ledger = StorageLedger(self._changed)

    def add(self, kind: str, name: str = "", stream: str | None = None, **more: Any) -> None:
        if self.phase:
            self.records.append(
                Record(kind, name, stream or self.current.name, self.phase, **{"group": self.group} | more)
            )

    def next_event(self) -> int:
        self._events += 1
        return self._events

    def switch(self, stream: Stream) -> None:
        self.current = stream
        self.add("switch")

    @contextmanager
    def at(self, **state: Any) -> Iterator[None]:
        """Be in ``state`` inside."""
        before = {name: getattr(self, name) for name in state}
        self.__dict__.update(state)
        try:
            yield
        finally:
            self.__dict__.update(before)

    # Memory

    def _changed(self, kind: EventKind, number: int, size: int = 0) -> None:
        if kind == EventKind.ALLOC:
            role = self.role
            if role == "reduce-scatter":
                role += " input" if self.current.name == COMPUTE else " output"
            self._contents[number] = (role, self.group, size)
        self._report("alloc" if kind == EventKind.ALLOC else "free", number)

    def _report(self, kind: str, number: int) -> None:
        role, group, size = self._contents[number]
        self.add(kind, role, storage=number, size_bytes=size, group=group)

    def resize(self, tensor: torch.Tensor, numel: int) -> None:
        """Give a storage memory for ``numel`` elements, or take it, and report that."""
        storage, size = tensor.untyped_storage(), numel * tensor.element_size()
        if storage.size() != size:
            storage.resize_(size)
            self._report("alloc" if size else "free", self.ledger.find(tensor))

    def mark(self, tensor: torch.Tensor, role: str) -> None:
        """Say what a storage holds, from its allocation on."""
        number = self.ledger.find(tensor)
        if number is None:
            return
        self._contents[number] = (role, self.group, self._contents[number][2])
        for index, record in enumerate(self.records):
            if record.storage == number:
                self.records[index] = replace(record, name=role, group=self.group)

    # Operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # what it does with its local tensors is what comes here then
        result = func(*args, **(kwargs or {}))
        if func.namespace == "profiler":
            self._label(func, args)
        elif func.namespace in ("c10d", "_c10d_functional"):
            self._collective(func, args, result)
        elif func.namespace != "prim":
            self._operator(func, args, kwargs or {}, result)
        return result

    def _label(self, func: Any, args: Any) -> None:
        if "enter" in str(func):
            self._labels.append(args[0])
            self.add("begin", args[0])
        else:
            self.add("end", self._labels.pop())

    def _collective(self, func: Any, args: Any, result: Any) -> None:
        name = func._schema.name.split("::")[1]
        if name == "wait_tensor":
            self.add("wait", name, source="communicator")
        elif func.namespace == "_c10d_functional" and name != "_wrap_tensor_autograd":
            self.ledger.note_output(result, False)
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            self._add_collective(name, args[0], group, args[1], True)
        elif name == "_allgather_base_":
            self._add_collective("all_gather", args[0], dist.ProcessGroup.unbox(args[2]), "", args[3])
        elif name == "_reduce_scatter_base_":
            self._add_collective(
                "reduce_scatter", args[1], dist.ProcessGroup.unbox(args[2]), self.reductions[0], args[4]
            )
        elif name == "allreduce_":
            self._add_collective(
                "all_reduce", args[0][0], dist.ProcessGroup.unbox(args[1]), self.reductions[1], args[4]
            )

    def _add_collective(self, kind: str, tensor: torch.Tensor, group: Any, op: str, is_async: bool) -> None:
        size, dtype = tensor.numel() * tensor.element_size(), _dtype(tensor)
        self.add("collective", kind, size_bytes=size, dtype=dtype, ranks=group.size(), op=op, is_async=is_async)

    def _operator(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        inputs = [item for item in flat((args, tuple(kwargs.values()))) if isinstance(item, torch.Tensor)]
        outputs = [item for item in flat(result) if isinstance(item, torch.Tensor)]
        if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in inputs + outputs):
            return
        traits = Traits(func)
        if traits.is_lift or (inputs and all(tensor.untyped_storage() in self._host for tensor in inputs)):
            self._host.update(tensor.untyped_storage() for tensor in outputs)
            return
        if traits.launches:
            name = self.transfer or traits.name.removeprefix("aten.").removesuffix(".default")
            spelt = [tuple(f"{_dtype(tensor)}{list(tensor.shape)}" for tensor in group) for group in (inputs, outputs)]
            self.add("op", name, module=self._module_at_work(), inputs=spelt[0], outputs=spelt[1])
        for tensor in outputs:
            self.ledger.note_output(tensor, False)

    def _module_at_work(self) -> str | None:
        if self.group is not None or self.module is not None:
            return self.module if self.group is None else None
        node = torch._C._current_autograd_node()
        return None if node is None else node.metadata.get("module")


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
