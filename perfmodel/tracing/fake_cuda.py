"""The illusion that fake CPU tensors live on ``cuda:0``, kept up towards Python code.

Fake tensors must be CPU tensors, since autograd needs a device that this build of torch has. Outside of operators
their ``device`` and ``is_cuda`` answer as CUDA tensors would; the function mode turns requests for ``cuda`` into CPU
ones and tells the recorder where the results of a call really live. Tensors that a CUDA step keeps on the host (the
step counts of AdamW, say) carry a mark. The mode also reports the calls in which operators run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

if TYPE_CHECKING:
    from perfmodel.tracing.recorder import Recorder

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")

_HOST_MARK = "_perfmodel_on_host"
_GETTER = "__get__"
_MOVES: dict[Any, str | None] = {torch.Tensor.cuda: "cuda", torch.Tensor.cpu: "cpu", torch.Tensor.to: None}


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether the tensor is one that a CUDA step keeps on the CPU."""
    return hasattr(tensor, _HOST_MARK)


def put_on_host(tensor: torch.Tensor) -> None:
    setattr(tensor, _HOST_MARK, True)


def _place_of(tensor: torch.Tensor) -> torch.device:
    if not isinstance(tensor, FakeTensor):
        return tensor.device
    return CPU if is_on_host(tensor) else CUDA


@contextmanager
def devices_answered(recorder: Recorder) -> Iterator[None]:
    """Let the ``device`` of fake tensors be where they live on a CUDA machine, except while operators run."""
    original = FakeTensor.device

    def device(self: FakeTensor) -> torch.device:
        if recorder.is_dispatching or self.fake_mode.in_kernel_invocation:
            return original.fget(self)
        return _place_of(self)

    with patched(FakeTensor, "device", property(device)):
        yield


_ANSWERS: dict[Any, Callable[[torch.Tensor], Any]] = {
    torch.Tensor.is_cuda.__get__: lambda tensor: _place_of(tensor).type == "cuda",
    torch.Tensor.is_cpu.__get__: lambda tensor: _place_of(tensor).type == "cpu",
    torch.Tensor.get_device: lambda tensor: 0 if _place_of(tensor).type == "cuda" else -1,
}


_DATA_READS = (torch.Tensor.numpy, torch.Tensor.__array__)  # item() and the like end in an operator
_ENGINE_CALLS = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class FakeCudaMode(TorchFunctionMode):
    """The mode that the module describes; it reports the place of results and the calls to ``recorder``."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._constructors: Any = _device_constructors()
        self._names: dict[Any, str | None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(args[0])
        if func in _DATA_READS:
            raise self._recorder.refused_read()
        kwargs = kwargs or {}
        if func in _ENGINE_CALLS:
            return func(*args, **kwargs)
        place = None
        name = self._call_name(func)
        if func in _MOVES:
            place, func, args, kwargs = _move(func, args, kwargs)
        elif kwargs.get("device") is not None:
            place = torch.device(kwargs["device"]).type
            kwargs = {**kwargs, "device": CPU} if place == "cuda" else kwargs
        elif func in self._constructors:
            place = "cpu"
        if name is None and place is None:
            return func(*args, **kwargs)
        with self._recorder.placing(place), self._recorder.calling(name):
            return func(*args, **kwargs)

    def _call_name(self, func: Any) -> str | None:
        if func not in self._names:
            self._names[func] = call_name(func)
        return self._names[func]


def _move(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[str | None, Any, Any, dict[str, Any]]:
    """Return ``to``, ``cuda`` and ``cpu`` as calls of ``to`` that copy where the place changes, and the new place."""
    tensor, *rest = args
    wanted, kwargs = _MOVES[func], dict(kwargs)
    if func is not torch.Tensor.to:
        kept = {name: value for name, value in kwargs.items() if name in ("non_blocking", "memory_format")}
        rest, kwargs = [CPU], kept
    for index, value in enumerate(rest):
        if isinstance(value, (str, torch.device)) and wanted is None:
            wanted, rest[index] = torch.device(value).type, CPU
        elif isinstance(value, torch.Tensor):
            wanted = _place_of(value).type
    if kwargs.get("device") is not None:
        wanted, kwargs["device"] = torch.device(kwargs["device"]).type, CPU
    if wanted is None or wanted == _place_of(tensor).type:
        return None, torch.Tensor.to, (tensor, *rest), kwargs
    return wanted, torch.Tensor.to, (tensor, *rest), {**kwargs, "copy": True}


@contextmanager
def illusion_kept(illusion: FakeCudaMode) -> Iterator[None]:
    """Switch the illusion on again inside a call that it handles, where torch has it off."""
    if illusion in torch.overrides._get_current_function_mode_stack():
        yield
    else:
        with illusion:
            yield


def call_name(func: Any) -> str | None:
    """Return ``Tensor.view`` for methods, ``linear`` for functions, ``Tensor.T`` for properties, None for setters."""
    name = getattr(func, "__name__", None)
    if name is None or name in ("__set__", "__delete__"):
        return None
    if name == _GETTER:
        return f"Tensor.{getattr(func.__self__, '__name__', 'property')}"
    qualified = getattr(func, "__qualname__", name)
    if qualified.startswith("Tensor.") or hasattr(func, "__objclass__"):
        return f"Tensor.{name}"
    return str(name)


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute and put the old one back."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
