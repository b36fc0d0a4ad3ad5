"""What a copy between host and device, or between two devices, costs, and how we know.

Exact sizes first, then the alpha-beta curve of its direction and memory, fitted as those of collectives are.
Directions: ``h2d`` and ``d2h``, each alone; ``both``, at once and each of that size; ``p2p``, between two devices.
Memory of the host: ``pinned`` or ``pageable``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from perfmodel.cost.kernels.extrapolation import MARGIN_OCTAVES, extrapolated_spread, octaves_beyond
from perfmodel.cost.piecewise import Point, fit_segments, segment_time_s
from perfmodel.derived import Derived
from perfmodel.errors import PerfModelError, did_you_mean
from perfmodel.hardware.interconnect import CollectiveSegment, TransferRecord, transfer_key
from perfmodel.hardware.profile import Profile
from perfmodel.trace.operation import Operation

Direction = Literal["h2d", "d2h", "both", "p2p"]
Memory = Literal["pinned", "pageable"]
CURVE_SPREAD = 0.05  # relative; a prior, as for collectives

_DIRECTIONS: dict[tuple[str, str], Direction] = {("cpu", "cuda"): "h2d", ("cuda", "cpu"): "d2h"}

Curves = dict[str, tuple[CollectiveSegment, ...]]
_CURVES = Derived[Curves]()  # of profiles


class TransferCost(NamedTuple):
    """Seconds of a copy, and where they come from.

    Attributes
    ----------
    time_s : float
        Until the copy has ended, or both copies have.
    spread : float
        Relative standard deviation.
    source : str
        ``exact``, ``curve``, or ``extrapolated`` where the size is more than twice the largest that was measured (the
        smallest take what a copy costs to begin).
    bytes_per_s : float
        Of one direction.
    """

    time_s: float
    spread: float
    source: Literal["exact", "curve", "extrapolated"]
    bytes_per_s: float


def transfer_name(direction: str, memory: str | None) -> str:
    """Return what the key of a transfer begins with; no memory of the host takes part in p2p.

    Raises
    ------
    PerfModelError
        If there is no such direction or memory.

    Examples
    --------
    >>> transfer_name("h2d", "pinned"), transfer_name("p2p", None)
    ('h2d pinned', 'p2p')
    """
    for what, value, known in (("direction", direction, get_args(Direction)), ("memory", memory, get_args(Memory))):
        if value not in known and not (what == "memory" and direction == "p2p"):
            raise PerfModelError(
                f"the {what} of a transfer must be known (got {value!r}). {did_you_mean(str(value), known)}"
            )
    return direction if direction == "p2p" else f"{direction} {memory}"


def transfer_cost(direction: str, memory: str | None, size_bytes: int, profile: Profile) -> TransferCost:
    """Return what one copy costs; no bytes take no time.

    Parameters
    ----------
    direction : str
        ``h2d``, ``d2h``, ``both`` or ``p2p``.
    memory : str or None
        Of the host: ``pinned`` or ``pageable``; of no account for p2p.
    size_bytes : int
        Of each direction.
    profile : Profile
        Its ``transfers``; its curves are fitted once.

    Raises
    ------
    PerfModelError
        If the profile has no such transfer, or there is no such direction or memory.
    """
    name = transfer_name(direction, memory)
    if size_bytes == 0:
        return TransferCost(0.0, 0.0, "exact", 0.0)
    record = profile.transfers.get(transfer_key(name, size_bytes))
    if record is not None and record.time_s is not None:
        return TransferCost(record.time_s, record.spread, "exact", size_bytes / record.time_s)
    curves = _curves(profile)
    if name not in curves:
        raise PerfModelError(
            f"{profile.name}: the profile must have measured {name} transfers (it has {', '.join(curves) or 'none'})."
            " Measure it again with `perfmodel calibrate`."
        )
    curve = curves[name]
    time_s = segment_time_s(curve, size_bytes)
    octaves = float(octaves_beyond(size_bytes, 1, curve[-1].most_bytes)) - MARGIN_OCTAVES
    if octaves <= 0:
        return TransferCost(time_s, CURVE_SPREAD, "curve", size_bytes / time_s)
    return TransferCost(time_s, extrapolated_spread(CURVE_SPREAD, octaves), "extrapolated", size_bytes / time_s)


def has_transfers(direction: str, memory: str | None, profile: Profile) -> bool:
    """Return whether the profile has measured any transfer of this direction and memory."""
    return transfer_name(direction, memory) in _curves(profile)


def pinned_copy(operation: Operation) -> Direction | None:
    """The direction of a copy between host and device that the host does not wait for, which takes pinned memory; None
    for whatever else.

    >>> from perfmodel.trace.operation import TensorSpec
    >>> on_host, on_device = TensorSpec((8,), (1,), "float32", "cpu"), TensorSpec((8,), (1,), "float32")
    >>> keywords = (("device", "cuda"), ("non_blocking", True))
    >>> pinned_copy(Operation("aten._to_copy.default", (on_host,), keywords, (on_device,)))
    'h2d'
    """
    if operation.base_name != "_to_copy" or ("non_blocking", True) not in operation.keywords:
        return None
    devices = operation.input_tensors()[0].device, operation.outputs[0].device
    return _DIRECTIONS.get(devices)


def transfer_points(transfers: Mapping[str, TransferRecord]) -> dict[str, list[Point]]:
    """Return the measured sizes of each direction and memory (``h2d pinned``), ascending and without failures.

    Raises
    ------
    PerfModelError
        If a key does not end in a number of bytes.
    """
    found: dict[str, list[Point]] = {}
    for key, record in transfers.items():
        name, _, size_bytes = key.rpartition(" ")
        if not (size_bytes.isdecimal() and int(size_bytes) > 0):
            raise PerfModelError(
                f"the key of a transfer must end in bytes, as in 'h2d pinned 1024' (got {key!r})."
                " Measure it again with `perfmodel calibrate`."
            )
        if record.time_s is not None:
            found.setdefault(name, []).append(Point(int(size_bytes), record.time_s, record.spread))
    return {name: sorted(points) for name, points in sorted(found.items())}


def transfer_curves(transfers: Mapping[str, TransferRecord]) -> Curves:
    """Return the fitted curve of each direction and memory."""
    return {name: _curve(points) for name, points in transfer_points(transfers).items()}


def _curve(points: list[Point]) -> tuple[CollectiveSegment, ...]:
    """A single size, as nvbandwidth reports, says a bandwidth and nothing of what a copy costs to begin."""
    if len(points) > 1:
        return fit_segments(points)
    ((size_bytes, time_s, spread),) = points
    error = spread * time_s / size_bytes
    return (
        CollectiveSegment(
            least_bytes=size_bytes,
            most_bytes=size_bytes,
            alpha_s=0.0,
            beta_s_per_byte=time_s / size_bytes,
            beta_error_s_per_byte=error,
            points=1,
        ),
    )


def _curves(profile: Profile) -> Curves:
    return _CURVES.of(profile, lambda: transfer_curves(profile.transfers))
