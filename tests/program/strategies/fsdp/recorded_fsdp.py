"""Training steps of a small model under torch's fully_shard, written down in the order in which the host issues them.

Tensors live on the CPU and the process group is torch's fake one, so nothing is sent and no GPU is needed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from torch.distributed.fsdp._fully_shard import _fsdp_param as fsdp_param
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group
from torch.distributed.fsdp._fully_shard import _fsdp_state as fsdp_state
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from perfmodel.tracing.fake_cuda import patched
from tests.program.strategies.fsdp.fsdp_recorder import DeviceHandle, Record, Recorder, Stream

VOCABULARY, WIDTH, INNER = 11, 6, 10
TOKENS = 4
ROOT = "root"  # the group of what no block holds; every other group is called as its module


@dataclass(frozen=True)
class Variant:
    """How the model is sharded and trained. ranks: all of them; replicas: of them so many copies (HSDP)."""

    ranks: int = 4
    rank: int = 0
    replicas: int = 1
    blocks: int = 3
    widening: int = 0  # so many rows more in each block than in the one before
    tied: bool = False  # the head uses the embedding's weight
    frozen: tuple[str, ...] = ()  # beginnings of names of parameters that take no gradient
    wrap_blocks: bool = True
    reshard_after_forward: bool | int | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    offload: bool = False
    micro_batches: int = 1
    sync_every: bool = False  # micro-batches but the last reduce their gradients too
    reshard_after_backward: bool = True  # of micro-batches but the last
    checkpoint: str = ""  # "inside" of the sharded blocks or "outside" of them
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    clip: bool = False
    scaled: bool = False  # by a gradient scaler, without autocast
    fused: bool = False  # optimizer


# The model


class Block(nn.Module):
    """A residual block; neither of its dimensions divides by four, so weights and biases are padded."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Embedding, blocks, head."""

    def __init__(
        self,
        blocks: int,
        checkpoint_blocks: bool,
        widening: int = 0,
        tied: bool = False,
        frozen: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(INNER + widening * index) for index in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self._checkpoint_blocks = checkpoint_blocks
        if tied:
            self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(tuple(frozen)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._checkpoint_blocks else block(x)
        return self.head(x)


# What torch is made to report


@contextmanager
def _torch_reports(recorder: Recorder, variant: Variant) -> Iterator[None]:
    handle, group = DeviceHandle(recorder), param_group.FSDPParamGroup
    roles = [
        (collectives.DefaultAllGather, "allocate", "all-gather output"),
        (collectives.DefaultReduceScatter, "allocate", "reduce-scatter"),
        (collectives, "_get_param_all_gather_inputs", "all-gather inputs"),
        (collectives, "_to_dtype_if_needed", "sharded gradient"),
        (fsdp_param.FSDPParam, "init_all_gather_outputs", "unsharded"),
        (fsdp_param.FSDPParam, "to_sharded_post_forward", "sharded post forward"),
        (fsdp_param.FSDPParam, "to_accumulated_grad_if_needed", "accumulated gradient"),
    ]
    hooks = ("unshard", "wait_for_unshard", "reshard", "post_backward", "finalize_backward")
    patches: list[tuple[Any, str, Any]] = [
        *((module, "_get_device_handle", lambda kind: handle) for module in (param_group, collectives, fsdp_state)),
        *((place, name, _with_role(recorder, getattr(place, name), role)) for place, name, role in roles),
        *((group, name, _within_group(recorder, getattr(group, name))) for name in hooks),
        (param_group.FSDPCommContext, "lazy_init", _naming_streams(param_group.FSDPCommContext.lazy_init)),
        (collectives, "_get_gradient_divide_factors", _reporting_reductions(recorder)),
        (torch.accelerator, "current_stream", lambda: recorder.current),
        (fsdp_param, "alloc_storage", lambda tensor: recorder.resize(tensor, tensor.numel())),
        (fsdp_param, "free_storage", lambda tensor: recorder.resize(tensor, 0)),
    ]
    if variant.offload:  # whatever is asked for pinned memory is pinned
        patches += [
            (torch.Tensor, "to", _copying(recorder)),
            (torch.Tensor, "pin_memory", lambda tensor: tensor),
            (torch.Tensor, "is_pinned", lambda tensor: True),
        ]
    with ExitStack() as stack:
        for place, name, value in patches:
            stack.enter_context(patched(place, name, value))
        yield


def _with_role(recorder: Recorder, inner: Callable[..., Any], role: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with recorder.at(role=role):
            return inner(*args, **kwargs)

    return call


def _within_group(recorder: Recorder, inner: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(inner)
    def method(group: Any, *args: Any) -> Any:
        with recorder.at(group=group._module_fqn or ROOT):
            if inner.__name__ == "post_backward":
                for parameter in group.fsdp_params:
                    if parameter.unsharded_param.grad is not None:
                        recorder.mark(parameter.unsharded_param.grad, "gradient")
            return inner(group, *args)

    return method


def _naming_streams(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Streams are called as the attributes of the communication context that hold them, less ``_stream``."""

    def lazy_init(context: Any, device: torch.device) -> None:
        inner(context, device)
        for name, value in vars(context).items():
            if isinstance(value, Stream):
                value.name = name.removesuffix("_stream")

    return lazy_init


def _reporting_reductions(recorder: Recorder) -> Callable[..., Any]:
    inner = collectives._get_gradient_divide_factors

    def factors(*args: Any) -> Any:
        found = inner(*args)
        recorder.reductions = tuple(str(getattr(op, "op", op)).rsplit(".", maxsplit=1)[-1].lower() for op in found[2:])
        return found

    return factors


def _copying(recorder: Recorder) -> Callable[..., Any]:
    """Tensor.to between host and device, which are one here, makes a copy."""
    inner = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if recorder.group is None or "non_blocking" not in kwargs:
            return inner(tensor, *args, **kwargs)
        to_host = recorder.current.name in ("reduce_scatter", "all_reduce")
        name = f"copy to {'host' if to_host else 'device'}{'' if kwargs['non_blocking'] else ' blocking'}"
        with recorder.at(transfer=name, role="host gradient" if to_host else recorder.role):
            return tensor.clone()

    return to


def _report_modules(model: nn.Module, recorder: Recorder) -> None:
    """Tell of every module's forward, inside of its hooks, and let its backward's nodes know whose they are."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | CheckpointWrapper):
            named = name.replace("._checkpoint_wrapped_module", "") or ROOT
            module.forward = _reported(module.forward, named, recorder)


def _reported(inner: Callable[..., Any], name: str, recorder: Recorder) -> Callable[..., Any]:
    def forward(*args: Any) -> Any:
        with recorder.at(module=name):
            recorder.add("begin", f"forward {name}")
            try:
                output = inner(*args)
                _name_nodes(output, args, name)
                return output
            finally:  # recomputation ends with an exception once it has made what is missing
                recorder.add("end", f"forward {name}")

    return forward


def _name_nodes(output: torch.Tensor, inputs: tuple[torch.Tensor, ...], name: str) -> None:
    seen = {None} | {tensor.grad_fn for tensor in inputs}
    stack = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            node.metadata.setdefault("module", name)
            stack += [following for following, _ in node.next_functions]


# A step


def record_steps(variant: Variant, steps: int = 3) -> list[list[Record]]:
    """The records of the first ``steps`` training steps of ``variant``, in a process group of their own."""
    dist.init_process_group("fake", rank=variant.rank, world_size=variant.ranks, store=FakeStore())
    collecting = gc.isenabled()
    gc.disable()  # memory is freed when the last reference goes, not when the collector comes by
    recorder = Recorder()
    try:
        with _torch_reports(recorder, variant):
            model = _sharded(variant, recorder)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=not variant.fused, fused=variant.fused)
            scaler = torch.amp.GradScaler("cpu", enabled=variant.scaled)
            with recorder:
                return [_step(model, optimizer, scaler, variant, recorder) for _ in range(steps)]
    finally:
        recorder.ledger.close()
        _clear_sharding_prop_cache()  # it has groups that are gone
        if collecting:
            gc.enable()
        dist.destroy_process_group()


def _sharded(variant: Variant, recorder: Recorder) -> nn.Module:
    model = Model(variant.blocks, variant.checkpoint == "outside", variant.widening, variant.tied, variant.frozen)
    if variant.checkpoint == "inside":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block)
    _report_modules(model, recorder)
    options: dict[str, Any] = {
        "mesh": _mesh(variant),
        "mp_policy": MixedPrecisionPolicy(variant.param_dtype, variant.reduce_dtype),
        "offload_policy": CPUOffloadPolicy() if variant.offload else OffloadPolicy(),
        "reshard_after_forward": variant.reshard_after_forward,
    }
    if variant.wrap_blocks:
        for block in model.blocks:
            fully_shard(block, **options)
    fully_shard(model, **options)
    for index, block in enumerate(model.blocks):
        after = model.blocks[index + 1 : index + 1 + variant.forward_prefetch]
        before = model.blocks[max(0, index - variant.backward_prefetch) : index]
        if variant.forward_prefetch and len(after):
            block.set_modules_to_forward_prefetch(list(after))
        if variant.backward_prefetch and len(before):
            block.set_modules_to_backward_prefetch(list(before)[::-1])
    return model


def _mesh(variant: Variant) -> DeviceMesh:
    if variant.replicas == 1:
        return init_device_mesh("cpu", (variant.ranks,))
    shape = (variant.replicas, variant.ranks // variant.replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _step(
    model: Any, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, variant: Variant, recorder: Recorder
) -> list[Record]:
    start = len(recorder.records)
    for micro_batch in range(variant.micro_batches):
        is_last = micro_batch == variant.micro_batches - 1
        if variant.micro_batches > 1:
            model.set_requires_gradient_sync(is_last or variant.sync_every)
            model.set_reshard_after_backward(is_last or variant.reshard_after_backward)
        recorder.phase = "forward"
        tokens = torch.arange(TOKENS)
        loss = model(tokens).sum()
        recorder.phase = "backward"
        scaler.scale(loss).backward()
        del loss
    if variant.clip:
        recorder.phase = "clip"
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    recorder.phase = "optimizer"
    scaler.step(optimizer)
    scaler.update()
    recorder.phase = "zero_grad"
    optimizer.zero_grad()
    recorder.phase = ""
    return recorder.records[start:]
