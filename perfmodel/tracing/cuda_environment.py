"""Python-level switches that make torch and its users take the branches they take on a CUDA machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _foreach_utils

from perfmodel.tracing.fake_cuda import patched


def _as_cpu(device_type: Any) -> Any:
    return "cpu" if device_type == "cuda" else device_type


def _with_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a device type that, asked about CUDA, answers for the CPU key that stands in for it."""

    def call(device_type: Any = "cuda", *args: Any) -> Any:
        return function(_as_cpu(device_type), *args)

    return call


@contextmanager
def cuda_autocast(on_cache_cleared: Callable[[], None]) -> Iterator[None]:
    """Let ``torch.autocast("cuda")`` switch the CPU's autocast on, with float16 as its default dtype."""
    original = torch.amp.autocast_mode.autocast.__init__
    clear_cache = torch.clear_autocast_cache
    cpu_dtype, cuda_dtype = torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")

    def initialise(
        self: Any, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        original(self, _as_cpu(device_type), dtype, enabled, cache_enabled)

    def clear() -> None:
        clear_cache()
        on_cache_cleared()

    with ExitStack() as stack:
        stack.enter_context(patched(torch.amp.autocast_mode.autocast, "__init__", initialise))
        stack.enter_context(patched(torch, "clear_autocast_cache", clear))
        for name in ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype"):
            stack.enter_context(patched(torch, name, _with_cpu(getattr(torch, name))))
        torch.set_autocast_dtype("cpu", cuda_dtype)
        stack.callback(torch.set_autocast_dtype, "cpu", cpu_dtype)
        yield


def _grouping_as_cuda() -> Callable[..., Any]:
    """Correct the devices of groups of tensors, which optimizers and clipping make by device in compiled code."""
    group = torch._C._group_tensors_by_device_and_dtype

    def call(tensor_lists: Any, with_indices: bool = False) -> Any:
        groups = group(tensor_lists, with_indices)
        return {(found[0][0][0].device, dtype): found for (_, dtype), found in groups.items()}

    return call


@contextmanager
def cuda_defaults() -> Iterator[None]:
    """Provide foreach optimizers and clipping, a GradScaler that works, and Hugging Face code blind to fake tensors."""
    with ExitStack() as stack:
        types = [*_foreach_utils._foreach_supported_types, FakeTensor]
        _foreach_utils._foreach_supported_types[:], before = types, list(_foreach_utils._foreach_supported_types)
        stack.callback(_foreach_utils._foreach_supported_types.__setitem__, slice(None), before)
        stack.enter_context(patched(torch._C, "_group_tensors_by_device_and_dtype", _grouping_as_cuda()))
        stack.enter_context(patched(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False))
        hugging_face = sys.modules.get("transformers.utils.import_utils")
        if hugging_face is not None and hasattr(hugging_face, "is_fake_tensor"):
            stack.enter_context(patched(hugging_face, "is_fake_tensor", lambda tensor: False))
        yield
