"""Build a scenario's module and its inputs, in the one order in which their tensors are placed in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from perfmodel.errors import PerfModelError
from perfmodel.limits import MOST_MODULES
from perfmodel.models.family import torch_family
from perfmodel.models.precision import HALF
from perfmodel.models.target import build_target, make_target_inputs
from perfmodel.progress import doing
from perfmodel.scenario.families import FAMILIES

if TYPE_CHECKING:
    from perfmodel.scenario.scenario import Scenario


def build_module(scenario: Scenario, allow_import: bool = False) -> nn.Module:
    """Return the scenario's module with random weights, on the default device of the context it is called in.

    Parameters are float32, or under precision bf16 and fp16 of that type (buffers too); four-dimensional ones follow
    ``training.memory_format``. Repeated blocks are wrapped for activation checkpointing. ``mode: train`` gives a module
    in training mode; ``mode: forward`` one in evaluation mode (no dropout, running batch statistics).

    Raises
    ------
    PerfModelError
        If a target may not be imported or is not a module, if a package is missing, or if ``model.blocks`` of a target
        that is checkpointed names a submodule without children.
    """
    with doing("building the model"):
        module = build_target(scenario, allow_import) if scenario.model.target is not None else _build_family(scenario)
    _check_size(module)
    if scenario.precision in HALF:
        module = module.to(HALF[scenario.precision])
    if scenario.training.memory_format == "channels_last":
        module = module.to(memory_format=torch.channels_last)
    if scenario.mode == "forward":
        return module.eval()
    module.train()
    _checkpoint_blocks(module, scenario)
    return module


def _check_size(module: nn.Module) -> None:
    modules = sum(1 for _ in module.modules())
    if modules > MOST_MODULES:
        raise PerfModelError(
            f"model: there must be at most {MOST_MODULES:,} modules in it (got {modules:,}): what each runs is traced. "
            "Build fewer layers, from which more follow: time and memory grow by the same with each."
        )


def _build_family(scenario: Scenario) -> nn.Module:
    family = torch_family(scenario.model.family or "")
    return family.build(scenario.model.resolved(), scenario.batch.sequence_length or 0)


def make_inputs(
    scenario: Scenario, device: torch.device | str, generator: torch.Generator | None = None
) -> dict[str, torch.Tensor]:
    """Return one micro-batch on ``device``: keyword arguments of forward, and ``labels`` when the step has a loss.

    Tokens, classes and pixels are uniform random numbers. Families whose forward computes the loss take the tokens
    themselves as labels (the same tensor; their losses shift it), others take labels of their own.
    """
    device = torch.device(device)
    if scenario.model.target is not None:
        return make_target_inputs(scenario, device, generator)
    model: Any = scenario.model.resolved()
    batch, length = scenario.batch.size, scenario.batch.sequence_length
    if length is None:
        images = _make_images(scenario, (batch, 3, model.image_size, model.image_size), device, generator)
        inputs, classes, shape = {"images": images}, model.classes, [batch]
    else:
        shape, classes = [batch, length], model.vocabulary
        inputs = {"input_ids": torch.randint(classes, shape, device=device, generator=generator)}
    if scenario.mode == "forward":
        return inputs
    if torch_family(model.family).has_loss:
        return inputs | {"labels": inputs["input_ids"]}
    return inputs | {"labels": torch.randint(classes, shape, device=device, generator=generator)}


def _make_images(
    scenario: Scenario, shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None
) -> torch.Tensor:
    dtype = HALF.get(scenario.precision, torch.float32)
    channels_last = scenario.training.memory_format == "channels_last"
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device=device, memory_format=memory_format).uniform_(generator=generator)


def repeated_blocks(module: nn.Module, scenario: Scenario) -> list[nn.Module]:
    """Return the blocks of the model, in order: what checkpointing wraps.

    Raises
    ------
    PerfModelError
        If ``model.blocks`` of a target names no submodule.
    """
    family, given = scenario.model.family, scenario.model.blocks
    names = FAMILIES[family].blocks if family is not None else tuple(filter(None, [given]))
    found: list[nn.Module] = []
    for name in names:
        try:
            found += module.get_submodule(name).children()
        except AttributeError as error:
            raise PerfModelError(
                f"model.blocks must name a submodule of the target (got {name!r}). "
                "Use a dotted name such as transformer.h."
            ) from error
    return found


def _checkpoint_blocks(module: nn.Module, scenario: Scenario) -> None:
    """Recompute the chosen blocks in backward: their forward is called through torch's non-reentrant checkpoint."""
    from torch.utils.checkpoint import checkpoint

    wanted = scenario.training.activation_checkpointing
    if wanted == "none":
        return
    blocks = repeated_blocks(module, scenario)
    if not blocks:
        raise PerfModelError(
            f"model.blocks must name a submodule with children to checkpoint (got {scenario.model.blocks!r}, which has "
            "none). Name the list of repeated blocks."
        )
    every = 1 if isinstance(wanted, str) else wanted.every
    options: dict[str, Any] = {"use_reentrant": False}
    if wanted == "selective":
        options["context_fn"] = _selective_contexts
    for block in blocks[::every]:
        block.forward = partial(checkpoint, block.forward, **options)


def _selective_contexts() -> Any:
    """Keep what GEMMs, convolutions and attention return; recompute the rest."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in SAVED_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _saved_operators() -> frozenset[Any]:
    aten = torch.ops.aten
    names = (
        "mm", "addmm", "bmm", "baddbmm", "convolution",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
    )  # fmt: skip
    return frozenset(getattr(aten, name).default for name in names)


SAVED_OPERATORS = _saved_operators()


def replace_tensors(module: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put ``make(tensor)`` in the place of every tensor the module holds, each tensor once.

    ``make`` is called on parameters in ``named_parameters`` order, then on buffers, then on tensors kept as plain
    attributes; where two names share a tensor they go on sharing it. So a module is moved to a device, or turned into
    fake tensors, with one known order of allocations.
    """
    made: dict[int, torch.Tensor] = {}
    held: list[torch.Tensor] = []  # ids stay unique as long as the originals live
    for tensor in _held_tensors(module):
        if id(tensor) in made:
            continue
        held.append(tensor)
        new = make(tensor.detach())
        if isinstance(tensor, nn.Parameter):
            attributes = tensor.__dict__
            new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            new.__dict__.update(attributes)
        made[id(tensor)] = new
    for submodule in module.modules():
        tables: tuple[dict[str, Any], ...] = (submodule._parameters, submodule._buffers, submodule.__dict__)
        for slots in tables:
            for name, value in slots.items():
                if isinstance(value, torch.Tensor):
                    slots[name] = made[id(value)]


def _held_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
    for submodule in module.modules():
        yield from (value for value in submodule.__dict__.values() if isinstance(value, torch.Tensor))
