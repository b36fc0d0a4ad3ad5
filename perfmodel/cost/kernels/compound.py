"""Operators that run several kernels, one after the other: the calls whose times add up to theirs.

Losses over two tensors work element by element and then reduce what they found; so do counts and log-sum-exp. The
calls stand for kernels of their kind, not for operators that are dispatched.
"""

from __future__ import annotations

from collections.abc import Callable

from perfmodel.trace.operation import Argument, Operation, TensorSpec, contiguous_stride

MEAN, SUM = 1, 2  # at::Reduction; 0: none

# By operator: what it computes element by element before it reduces, and the position of its ``reduction`` argument.
_LOSSES: dict[str, tuple[tuple[str, ...], int]] = {
    "mse_loss": (("sub",), 2),
    "smooth_l1_loss": (("sub",), 2),
    "huber_loss": (("sub",), 2),
    "soft_margin_loss": (("mul",), 2),
    "binary_cross_entropy": (("log",), 3),
    "binary_cross_entropy_with_logits": (("rsub", "mul", "log_sigmoid_forward", "sub"), 4),
}
_TWO_OPERANDS = frozenset({"sub", "mul"})


def kernels_of(operation: Operation) -> tuple[Operation, ...]:
    """The calls that an operator's kernels amount to; the operator alone where it is one kernel, or not known.

    >>> x, value = TensorSpec.parse("float32[8,8]"), TensorSpec.parse("float32[]")
    >>> [each.name for each in kernels_of(Operation("aten.mse_loss.default", (x, x), (), (value,)))]
    ['aten.sub', 'aten.mean']
    """
    x = operation.inputs[0] if operation.inputs else None
    build = _BUILDERS.get(operation.base_name)
    return (operation,) if build is None or not isinstance(x, TensorSpec) else build(operation, x)


def _loss(operation: Operation, x: TensorSpec) -> tuple[Operation, ...]:
    steps, position = _LOSSES[operation.base_name]
    named = dict(operation.keywords).get("reduction", MEAN)
    reduction = operation.inputs[position] if len(operation.inputs) > position else named
    y = operation.inputs[1] if len(operation.inputs) > 1 else x
    found = tuple(_call(name, (x, y) if name in _TWO_OPERANDS or i == 0 else (x,), x) for i, name in enumerate(steps))
    if reduction not in (MEAN, SUM):
        return found
    return (*found, _reduced("mean" if reduction == MEAN else "sum", x, operation))


def _log_sum_exp(operation: Operation, x: TensorSpec) -> tuple[Operation, ...]:
    """The largest is subtracted before the exponentials, and what is few afterwards."""
    few = operation.outputs[0]
    inner = (_call("sub", (x,), x), _call("exp", (x,), x))
    ends = (_call("log", (few,), few), _call("add", (few, few), few))
    return (_reduced("amax", x, operation), *inner, _reduced("sum", x, operation), *ends)


def _count(operation: Operation, x: TensorSpec) -> tuple[Operation, ...]:
    flags = TensorSpec(x.shape, contiguous_stride(x.shape), "bool")
    return (_call("ne", (x,), flags), _reduced("sum", flags, operation))


def _equal(operation: Operation, x: TensorSpec) -> tuple[Operation, ...]:
    flags = TensorSpec(x.shape, contiguous_stride(x.shape), "bool")
    return (_call("eq", operation.inputs[:2], flags), _call("all", (flags,), TensorSpec((), (), "bool")))


def _call(name: str, inputs: tuple[Argument, ...], out: TensorSpec) -> Operation:
    return Operation(f"aten.{name}", inputs, (), (out,))


def _reduced(name: str, x: TensorSpec, operation: Operation) -> Operation:
    """Return the reduction of ``x`` to what the operator returns, over the dimensions that it names or over all."""
    dims = operation.inputs[1] if len(operation.inputs) > 1 else None
    over = dims if isinstance(dims, tuple) and not isinstance(dims, TensorSpec) else None
    return _call(name, (x,) if over is None else (x, over), operation.outputs[0])


_BUILDERS: dict[str, Callable[[Operation, TensorSpec], tuple[Operation, ...]]] = {
    **dict.fromkeys(_LOSSES, _loss),
    "logsumexp": _log_sum_exp,
    "count_nonzero": _count,
    "equal": _equal,
}
