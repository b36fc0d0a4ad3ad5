"""The interconnects of a machine's ranks, as they were measured: collectives, host calls, transfers, contention.

Ranks of a machine may communicate in several ways (``nvlink`` as it is, ``host-memory`` without peer copies,
``two-nodes`` over loopback sockets, ``gloo`` on CPUs); a profile keeps each under its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Annotated, Literal, Protocol, TypeVar, get_args

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from perfmodel.files.sections import Section
from perfmodel.hardware.quantities import (
    MOST_BYTES,
    MOST_S,
    Bytes,
    Count,
    DifferenceSeconds,
    Factor,
    NotNegativeSeconds,
    PositiveBytes,
    PositiveCount,
    Provenance,
    Seconds,
    SecondsPerByte,
    Share,
    Spread,
    is_count,
)
from perfmodel.units import DTYPE_BYTES

LIBRARY = "library"  # among communicator_bytes
MESSAGES = ("send_recv", "exchange")  # between two ranks: one way; both ways at once, in one batch
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", *MESSAGES)
CHUNKED = ("all_gather", "reduce_scatter", "all_to_all")  # of whose size each rank has a part
Role = Literal["send", "receive", "wait"]  # of a rank in a message; wait: for one whose sender has not come
TRANSFERS = (*(f"{way} {memory}" for way in ("h2d", "d2h", "both") for memory in ("pinned", "pageable")), "p2p")
REFERENCE = "reference"  # among host records: the fixed work that tells the host's speed


def _refusal(rule: str) -> PydanticCustomError:
    return PydanticCustomError("key", f"Input should be {rule}")


def _of_communicator(key: str) -> str:
    if key != LIBRARY and not is_count(key):
        raise _refusal(f"of a number of ranks or {LIBRARY!r}")
    return key


def _is_curve(kind: str, ranks: str, kinds: Iterable[str] = COLLECTIVES) -> bool:
    return kind in kinds and is_count(ranks, least=2)


def _of_curve(key: str) -> str:
    kind, _, ranks = key.partition(" ")
    if not _is_curve(kind, ranks):
        raise _refusal("a collective and ranks, as in 'all_reduce 4'")
    return key


def _of_collective(key: str, kinds: Iterable[str] = COLLECTIVES) -> str:
    match key.split(" "):
        case [kind, ranks, dtype, size_bytes] if _is_curve(kind, ranks, kinds):
            if dtype in DTYPE_BYTES and is_count(size_bytes, most=MOST_BYTES):
                return key
    raise _refusal("a collective, ranks, a type and bytes, as in 'all_reduce 4 float32 26214400'")


def _of_pair(key: str) -> str:
    """kernel, and a collective or the role in a message."""
    kernel, _, collective = key.partition(" ")
    return f"{kernel} {_of_collective(collective, (*COLLECTIVES, *get_args(Role)))}"


def _of_own_pair(key: str) -> str:
    return _of_collective(key, (*COLLECTIVES, *get_args(Role)))


def _of_transfer(key: str) -> str:
    name, _, size_bytes = key.rpartition(" ")
    if name not in TRANSFERS or not is_count(size_bytes, most=MOST_BYTES):
        raise _refusal("a direction, memory and bytes, as in 'h2d pinned 1024' or 'p2p 1024'")
    return key


Communicator = Annotated[str, AfterValidator(_of_communicator)]
CurveKey = Annotated[str, AfterValidator(_of_curve)]
CollectiveKey = Annotated[str, AfterValidator(_of_collective)]
PairKey = Annotated[str, AfterValidator(_of_pair)]
OwnPairKey = Annotated[str, AfterValidator(_of_own_pair)]
TransferKey = Annotated[str, AfterValidator(_of_transfer)]


class CollectiveRecord(Section):
    """One collective of one size on an otherwise idle machine (keys: :func:`collective_key`).

    Attributes
    ----------
    time_s : float or None
        Median seconds from the last rank's arrival to its end; None if it failed.
    spread : float
        Standard deviation of the repeats over their median.
    samples : int
        Number of repeats.
    origin : {"grid", "scenario"}
        Which of them asked for this size.
    error : str or None
        Why there is no time.
    """

    time_s: Seconds | None = None
    spread: Spread = 0.0
    samples: Count = 0
    origin: Literal["grid", "scenario"] = "grid"
    error: str | None = None


class CollectiveSegment(Section):
    """A stretch of sizes that one protocol serves: seconds = alpha_s + beta_s_per_byte x bytes, with standard errors.

    Attributes
    ----------
    least_bytes, most_bytes : int
        The sizes it was fitted on; the first segment also serves smaller sizes, the last one larger.
    """

    least_bytes: PositiveBytes
    most_bytes: PositiveBytes
    alpha_s: Annotated[float, Field(ge=-MOST_S, le=MOST_S)]
    beta_s_per_byte: SecondsPerByte
    alpha_error_s: NotNegativeSeconds = 0.0
    beta_error_s_per_byte: SecondsPerByte = 0.0
    points: Count = 0

    @model_validator(mode="after")
    def _in_order(self) -> CollectiveSegment:
        if self.most_bytes < self.least_bytes:
            raise _refusal("a segment with most_bytes of at least least_bytes")
        return self


class CallRecord(Section):
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
        copy to device, copy to host           one of a parameter's shard, with the event that the host later waits for

    On a CPU, where a call lasts until its collective has ended, those of fully_shard and of clipping hold what comes on
    top of the collectives; the wait for a message lasts until that has come.
    """

    time_s: DifferenceSeconds
    spread: Spread = 0.0
    samples: Count = 0


class HasTime(Protocol):
    """A record of a host."""

    @property
    def time_s(self) -> float: ...


Records = TypeVar("Records", bound=Mapping[str, HasTime])


def with_positive_reference(records: Records) -> Records:
    """Host records, whose reference must have taken time: others' times are held against it."""
    if REFERENCE in records and records[REFERENCE].time_s <= 0:
        raise _refusal(f"above 0 s for the host's {REFERENCE}")
    return records


def _ascending(segments: tuple[CollectiveSegment, ...]) -> tuple[CollectiveSegment, ...]:
    if any(later.least_bytes <= before.most_bytes for before, later in pairwise(segments)):
        raise _refusal("segments that ascend in size and do not overlap")
    if segments and (segments[0].alpha_s < 0 or segments[0].alpha_s + segments[0].beta_s_per_byte == 0):
        raise _refusal("segments of which the first takes time and has alpha_s of at least 0")
    return segments


class TransferRecord(Section):
    """A copy of one size between host and device, or between two devices.

    Keys are ``h2d pinned 1048576``, ``d2h pageable ...``, ``both pinned ...`` (h2d and d2h at once, each of that size)
    and ``p2p 1048576``.

    Attributes
    ----------
    time_s : float or None
        Seconds until the copy, or both, ended; None if it failed.
    spread : float
        Standard deviation of the repeats over their median.
    samples : int
        Number of repeats.
    error : str or None
        Why there is no time.
    """

    time_s: Seconds | None = None
    spread: Spread = 0.0
    samples: Count = 0
    error: str | None = None


class ContentionRecord(Section):
    """A kernel and a collective that run at once, each repeated without pause.

    Keys are such as ``gemm_fp32_4096 all_reduce 4 float32 26214400``. If a message between two ranks takes the place of
    the collective, the kernel is on one of them, whose role the key names: ``send``, ``receive``, or ``wait`` during
    one receive of that size whose sender has not come (nothing moves, so communication_factor is 1).

    Attributes
    ----------
    compute_factor : float
        Time of the kernel during the collective over its time alone.
    communication_factor : float
        Time of the collective while the kernel runs over its time alone.
    compute_s, communication_s : float
        Seconds of the kernel and the collective alone.
    spread : float
        The larger of both relative spreads.
    """

    compute_factor: Factor
    communication_factor: Factor
    compute_s: Seconds
    communication_s: Seconds
    spread: Spread = 0.0
    samples: Count = 0


class Coupling(Section):
    """How much operators of one kind, or one kernel, and collectives slow each other while both run; fitted to pairs.

    Attributes
    ----------
    compute_factor, communication_factor : float
        See :class:`~perfmodel.cost.contention.Slowdown`.
    tail_share : float
        Final fraction of the kernel's runtime alone in which SMs are already free, so that an arriving collective can
        start.
    kernel_s : float
        Seconds of the measured kernel alone.
    fitted_error, held_out_error : float
        Mean relative error of the slowed times, of the pairs it was fitted to and of the others.
    pairs : int
        Number of pairs it was fitted to.
    """

    compute_factor: Annotated[Factor, Field(ge=1)]
    communication_factor: Annotated[Factor, Field(ge=1)]
    tail_share: Annotated[Share, Field(ge=1e-6)]
    kernel_s: Seconds = 1.0
    fitted_error: Spread = 0.0
    held_out_error: Spread | None = None
    pairs: Count = 0


class Interconnect(Section):
    """One way in which the ranks of the machine communicate.

    Attributes
    ----------
    backend : {"nccl", "gloo"}
        The communication library.
    environment : dict of str to str
        Environment variables that select this way.
    provenance : dict
        The machine and libraries that it was measured with, and when.
    nodes : int
        Number of nodes as the library sees it.
    collectives : dict
        Measured collectives by key.
    segments : dict
        Fitted curves by kind and ranks (``"all_reduce 4"``), ascending in size, without gaps.
    communicator_bytes : dict
        Device memory outside the allocator that one rank's communicator takes, by number of ranks; ``library`` is what
        the first one of a process takes in addition.
    host : dict
        Host costs by call; ``reference`` is what the fixed work of the profile's host key took while all ranks did it,
        the speed of the host that they share.
    contention : dict
        Pairs of a kernel and a collective that ran at once.
    couplings : dict
        Couplings by kind of operator, fitted to ``contention``.
    message_couplings : dict
        Couplings with messages, by role and kind.
    own_contention : dict
        Pairs by kernel key of a scenario, and by collective key, or by ``wait 2 float32 67108864`` during a receive
        that waits.
    own_couplings : dict
        Couplings by kernel key, fitted to ``own_contention``.
    own_message_couplings : dict
        Couplings with messages by role and kernel key.
    messages_ahead : dict
        Eager sends: by bytes of a message, how many sends in a row ended before their receiver had come; a lower bound
        if all of the row did.
    rerun_spread : float or None
        Relative spread of all collectives between calibrations.
    bandwidth_factor : float
        Never measured; 2 asks what links twice as fast would give.
    """

    backend: Literal["nccl", "gloo"]
    environment: dict[str, str] = {}
    provenance: Provenance = {}
    nodes: PositiveCount = 1
    collectives: dict[CollectiveKey, CollectiveRecord] = {}
    segments: dict[CurveKey, Annotated[tuple[CollectiveSegment, ...], AfterValidator(_ascending)]] = {}
    communicator_bytes: dict[Communicator, Bytes] = {}
    host: Annotated[dict[str, CallRecord], AfterValidator(with_positive_reference)] = {}
    contention: dict[PairKey, ContentionRecord] = {}
    couplings: dict[str, Coupling] = {}
    message_couplings: dict[Role, dict[str, Coupling]] = {}
    own_contention: dict[str, dict[OwnPairKey, ContentionRecord]] = {}
    own_couplings: dict[str, Coupling] = {}
    own_message_couplings: dict[Role, dict[str, Coupling]] = {}
    messages_ahead: dict[Bytes, Count] = {}
    rerun_spread: Spread | None = None
    bandwidth_factor: Annotated[float, Field(ge=1e-3, le=1e3)] = 1.0


def communicators_bytes(groups: Iterable[tuple[int, Interconnect]]) -> int:
    """Return device memory outside the allocator that a rank's communicators take, the library's own once included.

    Parameters
    ----------
    groups
        Number of ranks of each group, and its interconnect. A number that was not measured takes as much as the next
        larger one that was, or else as the largest.

    Examples
    --------
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
