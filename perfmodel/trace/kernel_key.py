"""Kernel keys: the text under which a profile stores what one operator call was measured to cost.

Two calls share a key exactly if they run the same kernels on equally laid out data: operator, shapes, strides, dtypes,
the scalars that choose a kernel, and whether TF32 may be used. The text is readable and greppable:

    aten.mm.default(float32[2048,2560], float32[2560,10240]{1,2560})
    aten.mm.default(float32[2048,2560], float32[2560,10240]{1,2560}) tf32
    aten._foreach_sqrt.default([260 float32 2568276480 5f3a9c01])
    aten.mul.Tensor(float32[8,8], float32[8,8]) same=1:0
    aten._foreach_addcmul_.Scalar([260 ...], [260 ...], [260 ...], float) same=520:260x260

Long tensor lists (over 4) are written as count, dtype, total elements and a digest of all their texts. ``same`` says
which tensor arguments (counted from 0, lists flattened) are the same tensor as an earlier one: 520:260x260 reads
"argument 520 is argument 260, and so on for 260 arguments"; many such runs are written as a digest.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

from perfmodel.trace.operation import Argument, Operation, TensorSpec, repeated_runs

LONGEST_SPELT_LIST = 4

# Operators whose float32 form may run on tensor cores when TF32 is allowed.
MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_addmm_activation", "addmv", "mv"})
CONVOLUTIONS = frozenset({"convolution", "convolution_backward", "cudnn_convolution"})


@lru_cache(maxsize=65536)
def kernel_key(operation: Operation, matmul_tf32: bool = False, convolution_tf32: bool = True) -> str:
    """Return the key of ``operation`` under the given TF32 switches (torch's defaults: off for GEMMs, on for cuDNN).

    >>> from perfmodel.trace.operation import TensorSpec
    >>> t = TensorSpec.parse("float32[8,8]")
    >>> kernel_key(Operation("aten.mm.default", (t, t), (), (t,)))
    'aten.mm.default(float32[8,8], float32[8,8])'
    """
    scalars_matter = not operation.base_name.startswith(("_foreach_", "_fused_"))
    arguments = [_text(argument, scalars_matter) for argument in operation.inputs]
    arguments += [f"{name}={_text(value, scalars_matter)}" for name, value in operation.keywords]
    suffix = " tf32" if uses_tf32(operation, matmul_tf32, convolution_tf32) else ""
    return f"{operation.name}({', '.join(arguments)}){suffix}{_same_text(operation)}"


def uses_tf32(operation: Operation, matmul_tf32: bool, convolution_tf32: bool) -> bool:
    """Return whether TF32 may be used in the operation: in float32 GEMMs and convolutions only."""
    allowed = (operation.base_name in MATMULS and matmul_tf32) or (
        operation.base_name in CONVOLUTIONS and convolution_tf32
    )
    return allowed and any(spec.dtype == "float32" for spec in operation.input_tensors())


def _same_text(operation: Operation) -> str:
    runs = repeated_runs(operation.same)
    if not runs:
        return ""
    text = ",".join(f"{position}:{first}" + (f"x{count}" if count > 1 else "") for position, first, count in runs)
    if len(runs) > LONGEST_SPELT_LIST:
        text = f"{len(runs)} {hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return f" same={text}"


def _text(argument: Argument, scalars_matter: bool) -> str:
    if isinstance(argument, TensorSpec):
        return argument.text
    if isinstance(argument, tuple):
        return _list_text(argument, scalars_matter)
    if isinstance(argument, float) and not scalars_matter:
        return "float"
    return str(argument)


def _list_text(items: tuple[Argument, ...], scalars_matter: bool) -> str:
    if len(items) <= LONGEST_SPELT_LIST or not isinstance(items[0], (TensorSpec, float)):
        return f"[{', '.join(_text(item, scalars_matter) for item in items)}]"
    if isinstance(items[0], float):
        return f"[{len(items)} float]"
    tensors = [item for item in items if isinstance(item, TensorSpec)]
    digest = hashlib.sha256(" ".join(tensor.text for tensor in tensors).encode()).hexdigest()[:8]
    total = sum(tensor.numel for tensor in tensors)
    place = "" if tensors[0].device == "cuda" else f"@{tensors[0].device}"
    return f"[{len(items)} {tensors[0].dtype}{place} {total} {digest}]"


def optimizer_prefix(workload: dict[str, Any]) -> str:
    """Return what the host keys of a workload's optimizer begin with, such as ``optimizer adamw foreach``.

    With momentum it is ``optimizer sgd-momentum fused``.
    """
    section = workload.get("optimizer", {})
    momentum = "-momentum" if section.get("momentum") else ""
    return f"optimizer {section.get('name', 'adamw')}{momentum} {section.get('implementation', 'foreach')}"
