"""CUDA's autocast policy, laid over the CPU autocast key under which fake tensors are dispatched.

CUDA and CPU autocast cast different operators. The CPU build registers both sets of kernels, so the dispatcher itself
says which operators each set holds; how CUDA casts them is torch's ``ATen/autocast_mode.h``, spelt in the tables below.
Operators in the lower-precision list of both keep torch's own kernel and with it the cache of cast weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from perfmodel.tracing.dispatcher import dispatcher_overrides

LOWER_PRECISION = frozenset(
    (
        "_convolution", "_convolution.deprecated", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
        "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "cudnn_convolution",
        "cudnn_convolution_transpose", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv",
        "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
        "_thnn_fused_lstm_cell",
        "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
        "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
    )
)  # fmt: skip
SET_DTYPE = frozenset(
    (
        "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
        "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
    )
)  # fmt: skip
APPEND_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
PROMOTE = frozenset(
    (
        "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
        "scatter_add",
    )
)  # fmt: skip
BANNED = frozenset(("binary_cross_entropy",))

_AUTOCAST_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_PRECISION_ORDER = (torch.float16, torch.bfloat16, torch.float32)

Kernel = Callable[..., Any]


def _registered(key: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")}


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _is_eligible(value: Any) -> bool:
    """Return whether CUDA autocast casts it: floating-point device tensors other than doubles."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


class CudaAutocastPolicy:
    """Installs the policy under AutocastCPU; leave the context to restore the CPU's own."""

    def __init__(self) -> None:
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        cuda, cpu = _registered("AutocastCUDA"), _registered("AutocastCPU")
        kernels = {name: self._kernel(name, name in cuda, name in cpu) for name in sorted(cuda | cpu)}
        try:
            with dispatcher_overrides((name, "AutocastCPU", kernel) for name, kernel in kernels.items() if kernel):
                yield
        finally:
            self.clear_cache()

    def clear_cache(self) -> None:
        self._cache.clear()

    def _kernel(self, name: str, in_cuda: bool, in_cpu: bool) -> Kernel | None:
        """Return the kernel that replaces CPU's; None keeps torch's own."""
        if not in_cuda:
            return torch.library.fallthrough_kernel  # type: ignore[no-any-return]
        if name in LOWER_PRECISION:
            return None if in_cpu else self._casting(_overload(name), self._to_lower_precision)
        if name in APPEND_DTYPE:
            return self._appending_dtype(_overload(name), _overload(APPEND_DTYPE[name]))
        if name in BANNED:
            return _refuse_banned
        makers = ((SET_DTYPE, self._setting_dtype), (PROMOTE, self._promoting))
        make = next((maker for names, maker in makers if name in names), None)
        return make(_overload(name)) if make else self._casting(_overload(name), _to_float32)

    def _casting(self, op: Any, cast: Callable[[Any], Any]) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = _cast_arguments(args, kwargs, cast)
            with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU):
                return op(*args, **kwargs)

        return kernel

    def _setting_dtype(self, op: Any) -> Kernel:
        position = [argument.name for argument in op._schema.arguments].index("dtype")
        keyword_only = op._schema.arguments[position].kwarg_only

        def kernel(*args: Any, **kwargs: Any) -> Any:
            given = kwargs.get("dtype") if keyword_only or len(args) <= position else args[position]
            if given is None and _is_float(args[0]):
                args = args[:position]
                kwargs["dtype"] = torch.float32
            with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU):
                return op(*args, **kwargs)

        return kernel

    def _appending_dtype(self, op: Any, with_dtype: Any) -> Kernel:
        names = [argument.name for argument in op._schema.arguments]
        defaults = {
            argument.name: argument.default_value for argument in op._schema.arguments if argument.has_default_value()
        }

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU):
                if not _is_float(args[0]):
                    return op(*args, **kwargs)
                values = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
                dtype = torch.float64 if args[0].dtype == torch.float64 else torch.float32
                return with_dtype(*(values[name] for name in names), dtype=dtype)

        return kernel

    def _promoting(self, op: Any) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            found = {value.dtype for value in _flat((args, tuple(kwargs.values()))) if _is_eligible(value)}
            lower = torch.get_autocast_dtype("cpu")
            widest = max(found | {lower}, key=_PRECISION_ORDER.index)
            args, kwargs = _cast_arguments(args, kwargs, lambda t: t if t.dtype == widest else t.to(widest))
            with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CPU):
                return op(*args, **kwargs)

        return kernel

    def _to_lower_precision(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = torch.get_autocast_dtype("cpu")
        if tensor.dtype == dtype:
            return tensor
        is_weight = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        if not (is_weight and torch.is_autocast_cache_enabled()):
            return tensor.to(dtype)
        if id(tensor) not in self._cache:
            self._cache[id(tensor)] = (tensor, tensor.to(dtype))
        return self._cache[id(tensor)][1]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float32 else tensor.to(torch.float32)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _cast_arguments(args: Any, kwargs: dict[str, Any], cast: Callable[[Any], Any]) -> tuple[Any, dict[str, Any]]:
    """Cast eligible tensors from the last argument to the first, as the compiled kernels do; lists front to back."""

    def cast_one(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [cast_one(item) for item in value]
        return cast(value) if _is_eligible(value) else value

    kwargs = {name: cast_one(value) for name, value in reversed(kwargs.items())}
    return tuple(reversed([cast_one(value) for value in reversed(args)])), kwargs


def _refuse_banned(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("binary_cross_entropy is unsafe under autocast. Use binary_cross_entropy_with_logits.")
