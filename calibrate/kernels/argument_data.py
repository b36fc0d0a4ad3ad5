"""What random data an operator's argument holds: realistic, in range, and finite after hundreds of repeats.

Rules go by operator and by argument name, as the operator's schema spells it; what no rule names is normal noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from perfmodel.trace.operation import Argument, TensorSpec

Fill = Callable[[torch.Tensor], object]
Arguments = Mapping[str, Argument]

NEUTRAL = 0.9999  # a factor that neither overflows nor dies out when it is applied a thousand times
WEIGHT_SCALE = 0.02
TOKEN_TYPES = 2  # rows of an embedding of token types: workloads that do not set them use row 0 only
ANY_INTEGER = 1000


def normal(scale: float = 1.0) -> Fill:
    """Noise around zero; integers are uniform below 1000, booleans fair coins."""

    def fill(flat: torch.Tensor) -> object:
        if flat.dtype == torch.bool:
            return flat.bernoulli_(0.5)
        if flat.is_floating_point() and flat.element_size() == 1:
            return flat.copy_(torch.randn(flat.shape, device=flat.device))
        if flat.is_floating_point() or flat.is_complex():
            return flat.normal_(0, scale)
        return flat.random_(0, min(ANY_INTEGER, torch.iinfo(flat.dtype).max))

    return fill


def uniform(low: float, high: float) -> Fill:
    """Evenly between two numbers (integers: from 1 to 8)."""
    return lambda flat: flat.uniform_(low, high) if flat.is_floating_point() else flat.random_(1, 8)


def below(limit: int) -> Fill:
    """Valid indices into a dimension of ``limit`` elements."""
    return lambda flat: flat.random_(0, max(limit, 1))


def counting(limit: int) -> Fill:
    """0, 1, 2, ... round and round below ``limit``: positions."""
    return lambda flat: flat.copy_(torch.arange(flat.numel(), device=flat.device) % max(limit, 1))


def constant(value: float) -> Fill:
    return lambda flat: flat.fill_(value)


POSITIVE = uniform(0.5, 1.5)

BY_NAME: dict[str, Fill] = {
    "running_var": POSITIVE,
    "save_var": POSITIVE,
    "save_invstd": POSITIVE,
    "invstd": POSITIVE,
    "rstd": POSITIVE,
    "exp_avg_sqs": POSITIVE,
    "max_exp_avg_sqs": POSITIVE,
    "state_steps": constant(10),
    "total_weight": constant(100),
    "found_inf": constant(0),
    "growth_tracker": constant(0),
    "inv_scale": constant(NEUTRAL),
    "grad_scale": constant(1),
    "weight": normal(WEIGHT_SCALE),
    "mat2": normal(WEIGHT_SCALE),
}

# (operator without leading _foreach_ and trailing _, argument)
BY_OPERATOR: dict[tuple[str, str], Fill] = {
    **{(name, "self"): POSITIVE for name in ("sqrt", "rsqrt", "log", "log2", "log1p", "reciprocal", "pow")},
    **{(name, argument): POSITIVE for name in ("addcdiv",) for argument in ("tensor2", "tensors2")},
    ("div", "other"): POSITIVE,
    ("_amp_update_scale", "self"): constant(65536),
}

SCALED_IN_PLACE = frozenset({"mul", "div"})
_SCALARS = frozenset({"other", "scalar", "scalars"})


def plain_name(base_name: str) -> str:
    """Return the arithmetic an operator does, whatever form it comes in.

    >>> plain_name("_foreach_addcdiv_"), plain_name("mm")
    ('addcdiv', 'mm')
    """
    return base_name.removeprefix("_foreach_").removesuffix("_")


def is_in_place(base_name: str) -> bool:
    return base_name.endswith("_") and not base_name.endswith("__")


def fill_for(base_name: str, argument: str, position: int, arguments: Arguments) -> Fill:
    """Return the data of one tensor: of ``argument``, or of its ``position``-th element where that is a list."""
    index = _index_limit(base_name, argument, position, arguments)
    if index is not None:
        return index
    name = plain_name(base_name)
    if is_in_place(base_name) and name in SCALED_IN_PLACE and argument in _SCALARS:
        return uniform(0.9995, 1.0)
    if argument == "output" and base_name in ("_softmax_backward_data", "_log_softmax_backward_data"):
        return _probabilities(arguments, logarithms=base_name.startswith("_log"))
    return BY_OPERATOR.get((name, argument)) or BY_NAME.get(argument) or normal()


def scalar_for(base_name: str, argument: str, value: Any, arguments: Arguments) -> Any:
    """Return the scalar to pass: factors applied in place are near one (no kernel depends on their value)."""
    if not (is_in_place(base_name) and plain_name(base_name) in SCALED_IN_PLACE and argument in _SCALARS):
        return value
    target = arguments.get("self")
    first = target[0] if isinstance(target, tuple) and target and not isinstance(target, TensorSpec) else target
    if not (isinstance(first, TensorSpec) and "float" in first.dtype):
        return value
    return [NEUTRAL] * len(value) if isinstance(value, list) else NEUTRAL


def _index_limit(base_name: str, argument: str, position: int, arguments: Arguments) -> Fill | None:
    if base_name == "embedding" and argument == "indices":
        return _rows(_shape(arguments, "weight")[0], arguments)
    if base_name == "embedding_dense_backward" and argument == "indices":
        return _rows(int(arguments["num_weights"]), arguments)  # type: ignore[arg-type]
    if base_name.startswith("nll_loss") and argument == "target":
        shape = _shape(arguments, "self")
        return below(shape[1] if len(shape) > 1 else shape[0])
    if argument == "index" and "dim" in arguments:
        shape = _shape(arguments, "self")
        return below(shape[int(arguments["dim"])] if shape else 1)  # type: ignore[arg-type]
    if argument == "indices" and plain_name(base_name) in ("index", "index_put", "_index_put_impl", "_unsafe_index"):
        return _indexed_dimension(position, arguments)
    return None


def _rows(rows: int, arguments: Arguments) -> Fill:
    """Tokens are random; one row of indices for the whole batch is positions (or token types, where there are two)."""
    indices = _spec(arguments, "indices")
    shared = len(indices.shape) == 1 or indices.shape[:1] == (1,) or indices.stride[:1] == (0,)
    if rows <= TOKEN_TYPES:
        return constant(0)
    return counting(rows) if shared else below(rows)


def _indexed_dimension(position: int, arguments: Arguments) -> Fill | None:
    given = arguments["indices"]
    assert isinstance(given, tuple)
    dimension = 0
    for index in given[:position]:
        dimension += len(index.shape) if isinstance(index, TensorSpec) and index.dtype == "bool" else 1
    here = given[position]
    if isinstance(here, TensorSpec) and here.dtype == "bool":
        return None
    return below(_shape(arguments, "self")[dimension])


def _probabilities(arguments: Arguments, logarithms: bool) -> Fill:
    shape = _shape(arguments, "output")
    classes = shape[int(arguments["dim"])] if shape else 1  # type: ignore[arg-type]
    if logarithms:
        return uniform(-math.log(classes) - 1, -math.log(classes))
    return uniform(0, 2 / max(classes, 1))


def _spec(arguments: Arguments, name: str) -> TensorSpec:
    spec = arguments[name]
    assert isinstance(spec, TensorSpec)
    return spec


def _shape(arguments: Arguments, name: str) -> tuple[int, ...]:
    return _spec(arguments, name).shape
