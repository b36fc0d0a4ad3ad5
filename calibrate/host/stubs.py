"""What modules were called with and returned, and stubs that return it again without computing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map


@dataclass
class Captured:
    """A module's (arguments, keywords) and result, cut from their graphs."""

    given: tuple[Any, Any]
    result: Any = None


def cut(value: Any) -> Any:
    """Return the same value with tensors that have no history; they still say whether they want gradients."""

    def cut_one(item: Any) -> Any:
        return item.detach().requires_grad_(item.requires_grad) if isinstance(item, torch.Tensor) else item

    return tree_map(cut_one, value)


def fresh(value: Any) -> Any:
    """Return the same with new tensors where a gradient is wanted: no leaves, so that they may be changed in place."""

    def copy_one(item: Any) -> Any:
        if isinstance(item, torch.Tensor) and item.requires_grad:
            with torch.enable_grad():
                return item.detach().requires_grad_().clone()
        return item

    return tree_map(copy_one, value)


def capture(model: nn.Module, names: set[str], run: Callable[[], Any]) -> dict[str, Captured]:
    """Call ``run`` and return what the submodules of these names (those that exist) were given and returned."""
    found: dict[str, Captured] = {}
    handles = []
    for name, module in model.named_modules():
        if name in names:
            handles.append(module.register_forward_pre_hook(_note_given(found, name), with_kwargs=True))
            handles.append(module.register_forward_hook(_note_result(found, name)))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return found


def _note_given(found: dict[str, Captured], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: Any, keywords: Any) -> None:
        found[name] = Captured(cut((arguments, keywords)))

    return hook


def _note_result(found: dict[str, Captured], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, arguments: Any, result: Any) -> None:
        found[name].result = cut(result)

    return hook


class Stubs:
    """Inside the context, the submodules of these names return these results and run nothing."""

    def __init__(self, model: nn.Module, results: dict[str, Any]) -> None:
        self._results = results
        self._fresh: dict[str, Any] = {}
        self._called: list[nn.Module] = []
        self._modules = [(name, model.get_submodule(name)) for name in results]
        self._before: list[Any] = []

    def __enter__(self) -> Stubs:
        self._before = [module.__dict__.get("forward") for _, module in self._modules]
        for name, module in self._modules:
            module.forward = self._forward_of(name, module)
        self.renew()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for (_, module), forward in zip(self._modules, self._before, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward

    def _forward_of(self, name: str, module: nn.Module) -> Callable[..., Any]:
        def forward(*arguments: Any, **keywords: Any) -> Any:
            self._called.append(module)
            return self._fresh[name]

        return forward

    def renew(self) -> None:
        """Make the results of the next run, and forget which stubs were called."""
        self._fresh = {name: fresh(result) for name, result in self._results.items()}
        self._called = []

    def repeat_calls(self) -> None:
        """Call again the stubs that were called since :meth:`renew`, for their share of the time."""
        for module in list(self._called):
            module()


class StubModel(nn.Module):
    """Hands out one result whenever it is called; what wants a gradient there is a parameter of it."""

    def __init__(self, result: Any, device: str) -> None:
        super().__init__()
        self._leaves = nn.ParameterList([nn.Parameter(torch.zeros((), device=device))])
        self._result = tree_map(self._own, result)

    def _own(self, item: Any) -> Any:
        if not (isinstance(item, torch.Tensor) and item.requires_grad):
            return item
        dtype = torch.bfloat16 if item.dtype == torch.float16 else item.dtype  # a scaler takes no float16 parameters
        self._leaves.append(nn.Parameter(item.detach().clone().to(dtype)))
        return self._leaves[-1]

    def forward(self, **inputs: Any) -> Any:
        return self._result


def separate(modules: list[nn.Module], given: list[Any], before: Callable[[], None]) -> Callable[[], list[Any]]:
    """Call each module with its own arguments, and ``before`` before each."""

    def run() -> list[Any]:
        results = []
        for module, (arguments, keywords) in zip(modules, given, strict=True):
            before()
            results.append(module(*arguments, **keywords))
        return results

    return run


def is_chainable(captured: Captured) -> bool:
    """Return whether the module's first argument and its first result could stand for each other."""
    given, result = captured.given[0][:1], first_tensor(captured.result)
    if not given or not isinstance(given[0], torch.Tensor) or result is None:
        return False
    return bool(given[0].shape == result.shape and given[0].dtype == result.dtype)


def first_tensor(result: Any) -> torch.Tensor | None:
    """Return the result itself, or the first of a tuple."""
    if isinstance(result, (tuple, list)) and result:
        result = result[0]
    return result if isinstance(result, torch.Tensor) else None


def chained(modules: list[nn.Module], given: list[Any], before: Callable[[], None]) -> Callable[[], list[Any]]:
    """Call each module with what the one before returned for its first argument, and ``before`` before each."""
    arguments, keywords = given[0]

    def run() -> list[Any]:
        x = arguments[0]
        for module in modules:
            before()
            x = module(x, *arguments[1:], **keywords)
            x = x if isinstance(x, torch.Tensor) else x[0]
        return [x]

    return run


def borrowed_leaves(roots: list[torch.Tensor]) -> list[torch.Tensor]:
    """Leaves below these that are no parameters: results of stubs, and arguments."""
    found: list[torch.Tensor] = []
    pending = [root.grad_fn for root in roots if root.grad_fn is not None]
    known = set(pending)
    while pending:
        node: Any = pending.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and not isinstance(variable, nn.Parameter):
            found.append(variable)
        following = [edge for edge, _ in node.next_functions if edge is not None and edge not in known]
        known.update(following)
        pending += following
    return found
