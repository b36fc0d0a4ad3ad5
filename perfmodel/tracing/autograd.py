"""What the autograd engine does between operators: which node runs, and when a parameter's gradient is complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves

from perfmodel.trace.trace import EventKind, StorageKind
from perfmodel.tracing.fake_cuda import FakeCudaMode, illusion_kept, patched
from perfmodel.tracing.recorder import Recorder
from perfmodel.tracing.storages import StorageLedger

ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"


@contextmanager
def nodes_reported(recorder: Recorder, illusion: FakeCudaMode) -> Iterator[None]:
    """Tell ``recorder`` as every node of every backward pass starts and ends, also those that run no operator.

    Recomputation runs model code inside backward, so ``illusion`` is kept up there.
    """
    run_engine = torch.autograd._engine_run_backward

    def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
        handles = [handle for node in _reachable(roots) for handle in _watch(node, recorder)]
        try:
            with illusion_kept(illusion):
                return run_engine(roots, *args, **kwargs)
        finally:
            recorder.engine_ends()
            for handle in handles:
                handle.remove()

    with patched(torch.autograd, "_engine_run_backward", run):
        yield


def _reachable(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes that are reached from the roots, which are tensors or edges of the graph."""
    found = [root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots]
    stack = [node for node in found if node is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def _watch(node: Any, recorder: Recorder) -> list[Any]:
    name = node.name()
    borders = tuple(recorder.borders.get(node, ()))
    handles = [node.register_prehook(lambda gradients: recorder.node_starts(name, borders))]
    if name != ACCUMULATE_GRAD:  # a second hook there would make it copy the gradient instead of taking it
        handles.append(node.register_hook(lambda made, given: recorder.node_ends()))
    return handles


@contextmanager
def gradients_reported(parameters: list[nn.Parameter], recorder: Recorder, ledger: StorageLedger) -> Iterator[None]:
    """Tell ``recorder`` as gradients become ready, and ``ledger`` that their storages hold gradients."""

    def hook_of(index: int) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                ledger.mark(parameter.grad, StorageKind.GRADIENT)
            recorder.gradient_ready(index)

        return hook

    handles = [
        parameter.register_post_accumulate_grad_hook(hook_of(index))
        for index, parameter in enumerate(parameters)
        if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def modules_reported(module: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Tell ``recorder`` as submodules are entered and left, in ``named_modules`` order of numbers."""
    numbers = {submodule: index for index, (_, submodule) in enumerate(module.named_modules())}

    def enter(submodule: nn.Module, args: Any) -> None:
        if submodule in numbers:
            recorder.enter_module(numbers[submodule])

    def leave(submodule: nn.Module, args: Any, result: Any) -> None:
        if submodule in numbers:
            recorder.exit_module(numbers[submodule])

    handles = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def blocks_reported(module: nn.Module, blocks: list[nn.Module], recorder: Recorder) -> Iterator[None]:
    """Tell ``recorder`` in which nodes the backward of each block, or of the whole module, begins and has ended: those
    that made its output and its inputs.
    """
    numbers = {submodule: index for index, (_, submodule) in enumerate(module.named_modules())}

    def note(kind: EventKind, submodule: nn.Module, values: Any) -> None:
        for value in tree_leaves(values):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                recorder.block_borders(value.grad_fn, kind, numbers[submodule])

    handles = []
    for block in blocks:
        handles.append(
            block.register_forward_pre_hook(
                lambda submodule, args, named: note(EventKind.BLOCK_EXIT, submodule, (args, tuple(named.values()))),
                with_kwargs=True,
            )
        )
        handles.append(
            block.register_forward_hook(lambda submodule, args, made: note(EventKind.BLOCK_ENTER, submodule, made))
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
