"""What connects the ranks of a machine, as it was measured: collectives, host calls, transfers, contention.

A machine may be wired in several ways (``nvlink`` as it is, ``host-memory`` without peer copies, ``two-nodes``
over loopback sockets, ``gloo`` on CPUs); a profile keeps each under its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

LIBRARY = "library"  # among communicator_bytes


def _of_communicator(key: str) -> str:
    """A key of communicator_bytes."""
    if key != LIBRARY and not (key.isdecimal() and key.isascii() and int(key) > 0):
        raise PydanticCustomError("communicator", f"Input should be of a number of ranks or {LIBRARY!r}")
    return key


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
Communicator = Annotated[str, AfterValidator(_of_communicator)]

MESSAGES = ("send_recv", "exchange")  # between two ranks: one way; both ways at once, in one batch
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", *MESSAGES)
CHUNKED = ("all_gather", "reduce_scatter", "all_to_all")  # of whose size each rank has a part
Role = Literal["send", "receive", "wait"]  # of a rank in a message; wait: for one whose sender has not come


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CollectiveRecord(_Section):
    """One collective of one size on an otherwise idle machine (keys: :func:`collective_key`).

    time_s: median seconds from the last rank's arrival to its end; None where it failed. spread: relative. origin:
    ``grid`` or ``scenario``, which asked for just this size. error: why there is no time.
    """

    time_s: Positive | None = None
    spread: NotNegative = 0.0
    samples: int = 0
    origin: Literal["grid", "scenario"] = "grid"
    error: str | None = None


class CollectiveSegment(_Section):
    """A stretch of sizes that one protocol serves: seconds = alpha_s + beta_s_per_byte x bytes, with standard errors.

    least_bytes, most_bytes: the sizes it was fitted on; the first segment also serves smaller ones, the last larger.
    """

    least_bytes: int
    most_bytes: int
    alpha_s: float
    beta_s_per_byte: NotNegative
    alpha_error_s: NotNegative = 0.0
    beta_error_s_per_byte: NotNegative = 0.0
    points: int = 0


class CallRecord(_Section):
    """Host seconds of one call, at the speed of the profile's host key ``reference``; what goes under ``reference``
    here is that work's own time, as it was.

        all_reduce, all_reduce async, wait     likewise all_gather, reduce_scatter, broadcast
        broadcast async again, wait again      right after one like it, as in a row of them
        isend, irecv, batch_isend_irecv        of a batch of one each; the making of their P2POp included; ``... wait``:
                                               for what it began; ``... again``, ``... wait again``: likewise
        pp forward, pp backward                what torch's stage and schedule add to a micro-batch, its messages apart;
                                               also pp backward_input, pp backward_weight
        ddp forward, ddp parameter, ddp bucket what DDP adds to a step, for each parameter, for each bucket
        fsdp forward group                     what fully_shard adds to the forward of a group that it gathers, its
                                               launches and collective included; ``... parameter``: for each of these
        fsdp gather group, fsdp reduce group   likewise to the backward of a group that it gathers, and reduces
        dtensor optimizer adamw foreach        what a step takes more over DTensors; ``... parameter``: for each
        dtensor clip, dtensor zero_grad        likewise; clipping's all_reduce included
        cpu optimizer adamw foreach            a step over DTensors in host memory; ``... parameter``: for each of
                                               these; ``... MiB``: for each MiB of them, in float32,
                                               which is as it was, since memory paces it
        copy to device, copy to host           one of a parameter's part, with the event that the host later waits for

    On a CPU, where a call lasts until its collective has ended, those of fully_shard and of clipping hold what comes on
    top of the collectives; the wait for a message lasts until that has come.
    """

    time_s: float
    spread: NotNegative = 0.0
    samples: int = 0


class TransferRecord(_Section):
    """A copy between host and device, or two devices, of one size: ``h2d pinned 1048576``, ``d2h pageable ...``, ``both
    pinned ...`` (h2d and d2h at once, each of that size), ``p2p 1048576``. time_s: seconds until it, or both, ended.
    """

    time_s: Positive | None = None
    spread: NotNegative = 0.0
    samples: int = 0
    error: str | None = None


class ContentionRecord(_Section):
    """A kernel and a collective running at once, each repeated without pause
    (``gemm_fp32_4096 all_reduce 4 float32 26214400``).

    Of a message between two ranks the kernel is on one of them, whose role the key tells: ``send``, ``receive``, or
    ``wait``, beside one receive of that size whose sender has not come (nothing moves, so communication_factor is 1).
    compute_factor: time of the kernel beside the collective over its time alone. communication_factor: likewise the
    collective's. compute_s, communication_s: times alone. spread: the larger relative one.
    """

    compute_factor: Positive
    communication_factor: Positive
    compute_s: Positive
    communication_s: Positive
    spread: NotNegative = 0.0
    samples: int = 0


class Coupling(_Section):
    """How operators of one kind, or one kernel, and collectives slow each other while both run; fitted to pairs.

    compute_factor, communication_factor: see :class:`~perfmodel.cost.contention.Slowdown`. tail_share: of an operator's
    time alone, the last part, in which a collective that arrives finds room. kernel_s: of the kernel that was measured,
    alone. fitted_error, held_out_error: mean
    relative error of the slowed times, of the pairs it was fitted to and of the others.
    """

    compute_factor: Annotated[float, Field(ge=1)]
    communication_factor: Annotated[float, Field(ge=1)]
    tail_share: Annotated[float, Field(gt=0, le=1)]
    kernel_s: Positive = 1.0
    fitted_error: NotNegative = 0.0
    held_out_error: NotNegative | None = None
    pairs: int = 0


class Interconnect(_Section):
    """One way in which the ranks of the machine are wired.

    environment: the variables that make it so. provenance: the machine and libraries that it was measured with, and
    when. nodes: as the library sees it. collectives: by key. segments: by
    ``"all_reduce 4"`` (kind and ranks), ascending in size, without gaps. communicator_bytes: device memory outside the
    allocator that one rank's communicator takes, by number of ranks; ``library``: what the first one of a process takes
    beyond that. host: by call; ``reference``: what the fixed work of the profile's host key took while all ranks did
    it, the speed of the host that they share. contention: pairs of a kernel and a collective that ran at once.
    couplings: by kind of operator, fitted to these. message_couplings: likewise beside messages, by role.
    own_contention: by kernel key of a scenario, pairs by collective key, or by ``wait 2 float32 67108864`` beside a
    receive that waits; own_couplings: by kernel key, fitted to these; own_message_couplings: likewise beside messages.
    messages_ahead: by bytes of a message, how many sends in a row ended while their receiver had not come; a
    lower bound where all of the row did.
    rerun_spread: relative, of all collectives alike: how far calibrations differ. bandwidth_factor: never measured; 2
    asks what links twice as fast would give.
    """

    backend: Literal["nccl", "gloo"]
    environment: dict[str, str] = {}
    provenance: dict[str, Any] = {}
    nodes: Annotated[int, Field(ge=1)] = 1
    collectives: dict[str, CollectiveRecord] = {}
    segments: dict[str, tuple[CollectiveSegment, ...]] = {}
    communicator_bytes: dict[Communicator, Bytes] = {}
    host: dict[str, CallRecord] = {}
    contention: dict[str, ContentionRecord] = {}
    couplings: dict[str, Coupling] = {}
    message_couplings: dict[Role, dict[str, Coupling]] = {}
    own_contention: dict[str, dict[str, ContentionRecord]] = {}
    own_couplings: dict[str, Coupling] = {}
    own_message_couplings: dict[Role, dict[str, Coupling]] = {}
    messages_ahead: dict[Bytes, Count] = {}
    rerun_spread: NotNegative | None = None
    bandwidth_factor: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0


def communicators_bytes(groups: Iterable[tuple[int, Interconnect]]) -> int:
    """Device memory outside the allocator that a rank's communicators take, and once what the library takes with the
    first.

    groups: ranks in each, and what joins them. One of a size that was not measured takes what the nearest larger one
    does, or else the largest.

    >>> wires = Interconnect(backend="nccl", communicator_bytes={"library": 100, "2": 20, "4": 40})
    >>> communicators_bytes([]), communicators_bytes([(2, wires)]), communicators_bytes([(3, wires), (8, wires)])
    (0, 120, 180)
    """
    library_bytes, own_bytes = 0, 0
    for size, interconnect in groups:
        known = {int(ranks): taken for ranks, taken in interconnect.communicator_bytes.items() if ranks != LIBRARY}
        if known:
            own_bytes += known[min((ranks for ranks in known if ranks >= size), default=max(known))]
            library_bytes = max(library_bytes, interconnect.communicator_bytes.get(LIBRARY, 0))
    return library_bytes + own_bytes


def collective_key(kind: str, ranks: int, dtype: str, size_bytes: int) -> str:
    """The text under which an :class:`Interconnect` keeps a collective.

    size_bytes is what nccl-tests calls size: the tensor for all_reduce and broadcast, the whole output of all_gather,
    the whole input of reduce_scatter and of all_to_all on one rank, the message of send_recv, that of each direction of
    exchange.

    >>> collective_key("all_reduce", 4, "float32", 26214400)
    'all_reduce 4 float32 26214400'
    """
    return f"{kind} {ranks} {dtype} {size_bytes}"


def transfer_key(kind: str, size_bytes: int) -> str:
    """The text under which a profile keeps a :class:`TransferRecord`.

    >>> transfer_key("h2d pinned", 1048576)
    'h2d pinned 1048576'
    """
    return f"{kind} {size_bytes}"


def busbw_factor(kind: str, ranks: int) -> float:
    """busbw / algbw, as nccl-tests defines them: what a ring would need of a link for one byte a second of size, in
    each direction.

    >>> busbw_factor("all_reduce", 4), busbw_factor("all_gather", 4), busbw_factor("exchange", 2)
    (1.5, 0.75, 1.0)
    """
    share = (ranks - 1) / ranks
    return 2 * share if kind == "all_reduce" else share if kind in CHUNKED else 1.0
