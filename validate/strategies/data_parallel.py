"""Data parallelism for real, in the forms people write: each makes gradients the ranks' mean before the optimizer runs.

Here every rank holds all parameters, gradients and optimizer states; the forms that shard are in
``validate.strategies.fsdp``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

from perfmodel.hardware.measurement import BucketLayout
from perfmodel.models.step import Reducer, make_optimizer
from perfmodel.scenario.scenario import Scenario


class Form(Reducer):
    """How several ranks train one model: what a step calls, and what is done to module and optimizer before it."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario

    def wrap(self, module: nn.Module) -> nn.Module:
        """Make all ranks' parameters and buffers those of rank 0 and return the module to train."""
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)
        return module

    def make_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of what ``wrap`` returned."""
        return make_optimizer(module.parameters(), self.scenario)


class ByHand(Form):
    """The base of strategies without a wrapper of torch's; ``phase`` is that of communication after backward."""

    phase: str | None = "reduce"

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._parameters: list[nn.Parameter] = []
        self._operation: Any = None
        self._divisor = 1

    def wrap(self, module: nn.Module) -> nn.Module:
        if dist.get_backend() == "nccl":
            self._operation = dist.ReduceOp.AVG
        else:  # gloo only adds
            self._operation, self._divisor = dist.ReduceOp.SUM, dist.get_world_size()
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return super().wrap(module)

    def _average(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by the ranks' mean."""
        dist.all_reduce(tensor, op=self._operation)
        self._divide(tensor)

    def _divide(self, tensor: torch.Tensor) -> None:
        if self._divisor > 1:
            tensor.div_(self._divisor)

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]


class Naive(ByHand):
    """After the last backward, one all-reduce after another, a gradient each."""

    def after_backward(self) -> None:
        for gradient in self._gradients():
            self._average(gradient)


class Flat(ByHand):
    """After the last backward, all gradients of a dtype copied into one buffer, reduced, and copied back."""

    def after_backward(self) -> None:
        gradients = self._gradients()
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            members = [gradient for gradient in gradients if gradient.dtype == dtype]
            buffer = _flatten_dense_tensors(members)
            self._average(buffer)
            torch._foreach_copy_(members, _unflatten_dense_tensors(buffer, members))


class Overlap(ByHand):
    """Each gradient is sent off as soon as the last backward has it ready; all are awaited at its end."""

    phase: str | None = None

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._last = False
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def wrap(self, module: nn.Module) -> nn.Module:
        super().wrap(module)
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)
        return module

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self._last = last
        yield

    def _ready(self, parameter: torch.Tensor) -> None:
        if self._last and parameter.grad is not None:
            work = dist.all_reduce(parameter.grad, op=self._operation, async_op=True)
            self._sent.append((work, parameter.grad))

    def after_backward(self) -> None:
        for work, gradient in self._sent:
            work.wait()
            self._divide(gradient)
        self._sent.clear()


class Ddp(Form):
    """torch's DistributedDataParallel, whose own hooks do the work; earlier micro-batches run under its no_sync.

    group: the ranks that hold the same module; by default all.
    """

    def __init__(self, scenario: Scenario, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(scenario)
        section = scenario.parallelism
        self._options: dict[str, Any] = {
            "gradient_as_bucket_view": section.gradient_as_bucket_view,
            "static_graph": section.static_graph,
            "process_group": group,
        }
        if section.bucket_cap_mb is not None:
            self._options["bucket_cap_mb"] = section.bucket_cap_mb
        self._ddp: Any = None

    def wrap(self, module: nn.Module) -> nn.Module:
        device = next(module.parameters()).device
        devices = [torch.cuda.current_device()] if device.type == "cuda" else None
        self._ddp = DistributedDataParallel(module, device_ids=devices, **self._options)
        return self._ddp

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = nullcontext() if last else self._ddp.no_sync()
        return context

    def buckets(self) -> BucketLayout:
        """Return what DistributedDataParallel reports of its buckets; rebuilt ones exist from the third step on."""
        logged = self._ddp._get_ddp_logging_data()
        return BucketLayout(
            initial_bytes=_sizes(logged.get("bucket_sizes", "")),
            rebuilt_bytes=_sizes(logged.get("rebuilt_bucket_sizes", "")),
            rebuilt=bool(logged.get("has_rebuilt_buckets", 0)),
        )


def _sizes(text: str) -> tuple[int, ...]:
    """Return the numbers of a text that has commas between them.

    >>> _sizes("1048576, 26214400"), _sizes("")
    ((1048576, 26214400), ())
    """
    return tuple(int(part) for part in str(text).split(",") if part.strip())
