"""Data parallelism for real whose ranks each keep a share: of optimizer states, and of gradients and parameters too.

zero1 is DistributedDataParallel under torch's ZeroRedundancyOptimizer (:class:`ZeroBroadcast`) or the paper's
reduce-scatter and all-gather of one flat buffer (:class:`ZeroReduceScatter`); zero2 and zero3 are torch's fully_shard
(:class:`FullyShard`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from perfmodel.errors import PerfModelError
from perfmodel.models.build import repeated_blocks
from perfmodel.models.step import clip_shards, make_optimizer, optimizer_settings
from perfmodel.scenario.scenario import FsdpSection, MixedPrecisionSection, Scenario
from validate.strategies.data_parallel import ByHand, Ddp, Form

POLICY_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}

# torch 2.13 gave them these names
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ZeroBroadcast(Ddp):
    """DistributedDataParallel; the optimizer steps the whole parameters that fall to this rank, and then each rank
    broadcasts its own.
    """

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        _check_dtypes("ZeroRedundancyOptimizer", module.parameters())
        kind, settings = optimizer_settings(self.scenario)
        as_view = bool(self.scenario.parallelism.parameters_as_bucket_view)
        return ZeroRedundancyOptimizer(
            module.parameters(), optimizer_class=kind, parameters_as_bucket_view=as_view, **settings
        )


class FlatParameters:
    """Parameters of one dtype as views of one buffer, padded so that ranks have equal shards; the own one is stepped.

    shard: this rank's shard of the buffer as a parameter, whose gradient is its shard of all gradients.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        ranks = dist.get_world_size()
        self._parameters = parameters
        self._padding = parameters[0].new_zeros(-sum(each.numel() for each in parameters) % ranks)
        self._values = self._flatten([each.detach() for each in parameters])
        self.shard = nn.Parameter(self._values.chunk(ranks)[dist.get_rank()])
        ends = [0]
        for parameter in parameters:
            ends.append(ends[-1] + parameter.numel())
        for parameter, (start, end) in zip(parameters, pairwise(ends), strict=True):
            parameter.data = self._values[start:end].view_as(parameter)

    def _flatten(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        return torch.cat([*(tensor.flatten() for tensor in tensors), self._padding])

    def scatter_gradients(self, operation: Any) -> torch.Tensor:
        """Reduce all gradients, of which none is kept, to the shard's."""
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in self._parameters]
        whole = self._flatten(gradients)
        gradients.clear()
        for parameter in self._parameters:
            parameter.grad = None
        self.shard.grad = torch.empty_like(self.shard)
        reduce_scatter(self.shard.grad, whole, op=operation)
        return self.shard.grad

    def gather(self) -> None:
        """Put every rank's shard into the buffer."""
        all_gather(self._values, self.shard.detach())


class ZeroReduceScatter(ByHand):
    """After the last backward the gradients of a dtype are flattened and reduce-scattered; each rank steps its shard of
    the flat parameters, and then shards are gathered.
    """

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._flat: list[FlatParameters] = []

    def wrap(self, module: nn.Module) -> nn.Module:
        _check_contiguous("zero1_form: reduce-scatter", module.parameters())
        super().wrap(module)
        for dtype in dict.fromkeys(parameter.dtype for parameter in self._parameters):
            self._flat.append(FlatParameters([each for each in self._parameters if each.dtype == dtype]))
        return module

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(self._shards(), self.scenario)

    def after_backward(self) -> None:
        for flat in self._flat:
            self._divide(flat.scatter_gradients(self._operation))

    def clip(self, module: nn.Module, max_norm: float) -> None:
        """Clip by the norm of the ranks' norms, which is that of all gradients."""
        clip_shards(self._shards(), max_norm, dist.all_reduce)

    def after_step(self) -> None:
        for flat in self._flat:
            flat.gather()

    def _shards(self) -> list[nn.Parameter]:
        return [flat.shard for flat in self._flat]


def zero1(scenario: Scenario) -> Form:
    """Return the form that ``zero1_form`` asks for."""
    form = ZeroReduceScatter if scenario.parallelism.zero1_form == "reduce-scatter" else ZeroBroadcast
    return form(scenario)


class FullyShard(Form):
    """torch's fully_shard of each block and of the rest (or of all at once): zero3, or zero2, where parameters stay
    gathered between forward and backward.

    With prefetching, a block's gather is followed by those of the next blocks, as in PyTorch's own examples; the root
    does as torch does by itself.
    """

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._section = scenario.parallelism.fsdp or FsdpSection()
        self._accumulates = scenario.training.gradient_accumulation > 1
        self._root: Any = None

    def wrap(self, module: nn.Module) -> nn.Module:
        blocks = repeated_blocks(module, self.scenario) if self._section.wrap == "blocks" else []
        _check_contiguous("fully_shard", module.parameters())
        _check_groups(module, blocks)
        super().wrap(module)
        options = self._options(next(module.parameters()).device.type)
        for submodule in (*blocks, module):
            fully_shard(submodule, **options)
        self._prefetch(blocks)
        self._root = module
        return module

    def _options(self, device_type: str) -> dict[str, Any]:
        section = self._section
        shards = dist.get_world_size() // section.replicate
        mesh = {"replicate": section.replicate, "shard": shards} if section.replicate > 1 else {"shard": shards}
        reshard = section.reshard_after_forward
        if reshard is None and self.scenario.parallelism.strategy == "zero2":
            reshard = False
        policy = section.mixed_precision or MixedPrecisionSection()
        options: dict[str, Any] = {}
        if section.offload:  # only memory of which a GPU makes copies can be pinned
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device_type != "cpu")
        return options | {
            "mesh": init_device_mesh(device_type, tuple(mesh.values()), mesh_dim_names=tuple(mesh)),
            "reshard_after_forward": reshard,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=POLICY_DTYPES[policy.param], reduce_dtype=POLICY_DTYPES[policy.reduce]
            ),
        }

    def _prefetch(self, blocks: Sequence[Any]) -> None:
        ahead, back = self._section.forward_prefetch or 0, self._section.backward_prefetch or 0
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(list(blocks[index + 1 : index + 1 + ahead]))
            block.set_modules_to_backward_prefetch(list(reversed(blocks[max(index - back, 0) : index])))

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        if self._accumulates:
            self._root.set_requires_gradient_sync(last)
        return nullcontext()


def _check_groups(module: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Refuse a group with several dtypes, or with a parameter of another group."""
    inside = {id(submodule) for block in blocks for submodule in block.modules()}
    rest = [submodule for submodule in module.modules() if id(submodule) not in inside]
    owners: dict[int, int] = {}
    for number, submodules in enumerate([*(list(block.modules()) for block in blocks), rest]):
        members = [each for submodule in submodules for each in submodule.parameters(recurse=False)]
        _check_dtypes("fully_shard", [each for each in members if each.requires_grad])
        if any(owners.setdefault(id(each), number) != number for each in members):
            raise PerfModelError(
                "fully_shard: blocks must not share parameters with each other or with the rest of the model (they "
                "do). Set parallelism.fsdp.wrap to root."
            )


def _check_dtypes(where: str, parameters: Iterable[nn.Parameter]) -> None:
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters})
    if len(dtypes) > 1:
        raise PerfModelError(
            f"{where}: the parameters of a group must have one dtype (got {', '.join(dtypes)}), or torch refuses them. "
            "Make them equal, or take another strategy."
        )


def _check_contiguous(where: str, parameters: Iterable[nn.Parameter]) -> None:
    if not all(parameter.is_contiguous() for parameter in parameters):
        raise PerfModelError(
            f"{where}: parameters must be contiguous to be sharded (some are not). "
            "Set training.memory_format to contiguous."
        )
