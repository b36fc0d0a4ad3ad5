"""Real values of small integer and boolean tensors, so that code which reads them on the host can be traced.

Hugging Face models, for one, look at the mask of every batch. Such tensors come from ``arange`` and ``ones`` and not
from data, so their operators are run for real in addition to the fake ones. Whoever reads a value that depends on data
gets a :class:`PerfModelError`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from perfmodel.errors import PerfModelError

LARGEST_ELEMENTS = 2**20

_SHADOW = "_perfmodel_value"
aten = torch.ops.aten


class Shadows:
    """Follows operators and answers reads."""

    def __init__(self) -> None:
        self._random: dict[Any, bool] = {}

    def follow(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Compute the values of ``result``, if it is small, integer and made of known values only."""
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            with unset_fake_temporarily():
                _attach(args[1], torch.zeros(()))  # nothing overflows: the optimizer runs
            return
        if not isinstance(result, torch.Tensor) or result.is_floating_point() or result.numel() > LARGEST_ELEMENTS:
            return
        if self._is_random(func):
            return
        known = True

        def value_of(argument: Any) -> Any:
            nonlocal known
            if isinstance(argument, torch.Tensor):
                value = getattr(argument, _SHADOW, None)
                known = known and value is not None
                return value
            if isinstance(argument, (list, tuple)):
                return [value_of(item) for item in argument]
            return argument

        values, named = value_of(list(args)), {name: value_of(item) for name, item in kwargs.items()}
        if known:
            with unset_fake_temporarily():
                _attach(result, func(*values, **named))

    def read(self, tensor: torch.Tensor, where: str) -> Any:
        """Return the value of a one-element tensor.

        Raises
        ------
        PerfModelError
            If it depends on data; ``where`` names the module that asks.
        """
        value = getattr(tensor, _SHADOW, None)
        if value is None:
            raise refused_read(where)
        with unset_fake_temporarily():
            return value.item()

    def _is_random(self, func: Any) -> bool:
        if func not in self._random:
            self._random[func] = torch.Tag.nondeterministic_seeded in func.tags or func.name().startswith("aten::empty")
        return self._random[func]


def refused_read(where: str) -> PerfModelError:
    """Return the error of reading values that depend on data; ``where`` names the module that asks."""
    return PerfModelError(
        f"model: {where} must not read tensor values that depend on data (it calls item(), bool(), numpy() or the like)"
        ". Keep such values on the device, or use another model."
    )


def _attach(tensor: torch.Tensor, value: torch.Tensor) -> None:
    setattr(tensor, _SHADOW, value)
