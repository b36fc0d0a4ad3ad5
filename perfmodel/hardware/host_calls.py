"""Names of the host calls that strategies insert into a step, under which interconnects keep what each takes the host.

One table for three users: programs insert these names, calibration measures what they take
(:class:`~perfmodel.hardware.interconnect.CallRecord`) and costs look them up. A lookup refuses a name that is not in
the table, so that a misspelt one cannot pass for a cheap call.

    all_reduce, all_gather, reduce_scatter, broadcast    a collective that the caller waits for, by its kind
    all_reduce async, ... ; wait                         one that runs on; the wait for its end
    isend, irecv, batch_isend_irecv; ... wait            messages of a pipeline; the wait for their end
    pp forward, pp backward, ...                         what torch's stage and schedule add to a micro-batch
    ddp forward, ddp parameter, ddp bucket               what DistributedDataParallel adds to a step
    fsdp forward group, fsdp forward parameter           what fully_shard adds to a group, and to each parameter in it
    dtensor clip, dtensor zero_grad, dtensor optimizer ...   what a loop over DTensors takes more than over tensors
    cpu optimizer ...                                    an optimizer's step in host memory
    copy to device, copy to host                         a copy of one parameter's shard
    launch, flatten, unflatten, copy                     a kernel's launch, which the profile itself has measured

`` again`` ends the name of a call right after an equal one, `` parameter`` a loop's cost for each parameter, `` MiB``
its cost for each MiB of them.
"""

from __future__ import annotations

from typing import Literal

_REPEAT = " again"

FsdpHook = Literal["forward", "gather", "reduce"]  # before a group's forward, before its backward, after its backward
FSDP_HOOKS: tuple[FsdpHook, ...] = ("forward", "gather", "reduce")
PipelineAction = Literal["forward", "backward", "backward_input", "backward_weight"]
PIPELINE_ACTIONS: tuple[PipelineAction, ...] = ("forward", "backward", "backward_input", "backward_weight")

LAUNCH, FLATTEN, UNFLATTEN, COPY = "launch", "flatten", "unflatten", "copy"
WAIT = "wait"
MESSAGES = ISEND, IRECV, BATCH = "isend", "irecv", "batch_isend_irecv"
DDP_FORWARD, DDP_PARAMETER, DDP_BUCKET = "ddp forward", "ddp parameter", "ddp bucket"
COPY_TO_DEVICE, COPY_TO_HOST = "copy to device", "copy to host"

CLIP, ZERO_GRAD = "clip", "zero_grad"
OPTIMIZERS = tuple(
    f"optimizer {name} {implementation}"
    for name in ("adamw", "sgd", "sgd-momentum")
    for implementation in ("for-loop", "foreach", "fused")
)
NOT_OVER_DTENSORS = ("optimizer sgd fused", "optimizer sgd-momentum fused")  # torch 2.13 has no rule for them
OPTIMIZERS_OVER_DTENSORS = tuple(name for name in OPTIMIZERS if name not in NOT_OVER_DTENSORS)


def asynchronous(collective: str) -> str:
    """Name the call that begins a collective and does not wait for it.

    >>> asynchronous("broadcast")
    'broadcast async'
    """
    return f"{collective} async"


def wait_for(call: str) -> str:
    """Name the wait for the message that ``call`` began.

    >>> wait_for(ISEND)
    'isend wait'
    """
    return f"{call} wait"


def repeated(call: str) -> str:
    """Name the same call right after an equal one.

    >>> repeated(WAIT)
    'wait again'
    """
    return f"{call}{_REPEAT}"


def first_of(call: str) -> str:
    """Name the call that a repeated one repeats; itself for one that is not repeated.

    >>> first_of("wait again"), first_of("wait")
    ('wait', 'wait')
    """
    return call.removesuffix(_REPEAT)


def per_parameter(call: str) -> str:
    """Name what each parameter adds to a loop over parameters."""
    return f"{call} parameter"


def per_mib(call: str) -> str:
    """Name what each MiB of parameters adds to a loop over parameters."""
    return f"{call} MiB"


def pipeline_action(action: str) -> str:
    """Name what torch's stage and schedule add to one action of a micro-batch."""
    return f"pp {action}"


def fsdp_group(hook: FsdpHook) -> str:
    """Name what fully_shard's hook takes for a group of parameters, its launches and its collective included."""
    return f"fsdp {hook} group"


def fsdp_parameter(hook: FsdpHook) -> str:
    """Name what fully_shard's hook takes more for each parameter of a group."""
    return f"fsdp {hook} parameter"


def over_dtensors(loop: str) -> str:
    """Name what a loop over parameters takes more over DTensors than over plain tensors."""
    return f"dtensor {loop}"


def on_host(optimizer: str) -> str:
    """Name an optimizer's step over shards in host memory."""
    return f"cpu {optimizer}"


def _with_parameters(*calls: str) -> frozenset[str]:
    return frozenset((*calls, *map(per_parameter, calls)))


def _with_repeats(*calls: str) -> frozenset[str]:
    return frozenset((*calls, *map(repeated, calls)))


_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")

COLLECTIVE_CALLS = frozenset(
    (*_KINDS, *map(asynchronous, _KINDS), repeated(asynchronous("broadcast")))
) | _with_repeats(WAIT)
MESSAGE_CALLS = _with_repeats(*MESSAGES, *map(wait_for, MESSAGES))
PIPELINE_CALLS = frozenset(map(pipeline_action, PIPELINE_ACTIONS))
DDP_CALLS = frozenset((DDP_FORWARD, DDP_PARAMETER, DDP_BUCKET))
FSDP_CALLS = frozenset((*map(fsdp_group, FSDP_HOOKS), *map(fsdp_parameter, FSDP_HOOKS)))
DTENSOR_CALLS = _with_parameters(*map(over_dtensors, (CLIP, ZERO_GRAD, *OPTIMIZERS_OVER_DTENSORS)))
_ON_HOST = tuple(map(on_host, OPTIMIZERS_OVER_DTENSORS))
PACED_BY_MEMORY = frozenset(map(per_mib, _ON_HOST))
HOST_OPTIMIZER_CALLS = _with_parameters(*_ON_HOST) | PACED_BY_MEMORY
COPY_CALLS = frozenset((COPY_TO_DEVICE, COPY_TO_HOST))

MEASURED = (  # by calibration, over each interconnect
    COLLECTIVE_CALLS
    | MESSAGE_CALLS
    | PIPELINE_CALLS
    | DDP_CALLS
    | FSDP_CALLS
    | DTENSOR_CALLS
    | HOST_OPTIMIZER_CALLS
    | COPY_CALLS
)
LAUNCHES = frozenset((LAUNCH, FLATTEN, UNFLATTEN, COPY))
NAMES = MEASURED | LAUNCHES
