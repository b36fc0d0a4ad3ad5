"""Temporary kernels in torch's dispatcher."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Operator, dispatch key, kernel.
Override = tuple[str, str, Callable[..., Any]]


@contextmanager
def dispatcher_overrides(overrides: Iterable[Override]) -> Iterator[None]:
    """Install kernels over aten's own; on leaving, aten's own are back.

    They hold for the whole process. Torch warns once about overriding; here it is the purpose.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
            for name, key, kernel in overrides:
                library.impl(name, kernel, key)
        yield
    finally:
        library._destroy()


def composite(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the compiled kernel that writes ``op`` in terms of others (``decompose`` may run a Python one instead)."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
