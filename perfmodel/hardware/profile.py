"""A hardware profile: everything that was measured on a machine, and nothing about any workload.

JSON, machine-written by ``perfmodel calibrate``. Raw samples lie beside it in ``<name>.samples.json.gz`` so that
loading stays fast. Every time is seconds, every size bytes, every spread relative (standard deviation of the repeats
over their median).
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from perfmodel.errors import PerfModelError, did_you_mean, naming
from perfmodel.files.kinds import PROFILE
from perfmodel.files.reading import read_json, regular_file
from perfmodel.files.sections import Section
from perfmodel.files.validation import validated
from perfmodel.files.versions import upgrade
from perfmodel.files.writing import write_atomically
from perfmodel.hardware.curve_forms import LAYOUTS, broken_rule
from perfmodel.hardware.interconnect import Interconnect, TransferKey, TransferRecord, with_positive_reference
from perfmodel.hardware.quantities import (
    MOST_BYTES,
    MOST_COUNT,
    Bytes,
    Coordinate,
    Count,
    DifferenceSeconds,
    FittedBytes,
    Flops,
    NotNegativeSeconds,
    PerSecond,
    PositiveBytes,
    PositiveCount,
    Provenance,
    Seconds,
    SecondsPerByte,
    Share,
    Spread,
    Watts,
)

# Format history
# 1  first
PROFILE_VERSION = 1
CATALOG = Path(__file__).parent / "catalog"
DEFAULT_CPU_PROFILE = "cpu.json"
USUAL_CAPACITY = 0.7  # of the cache's size; addresses are hashed over its parts


class Device(Section):
    """One accelerator (or the CPU), from its driver and its datasheet; ``peak_`` numbers are the datasheet's.

    peak_flops_per_s: by arithmetic kind: fp32, tf32, bf16, fp16.
    """

    kind: Literal["cuda", "cpu"]
    name: str
    memory_bytes: PositiveBytes
    multiprocessors: PositiveCount = 1
    l2_bytes: Bytes = 0
    compute_capability: tuple[Count, Count] | None = None
    power_limit_w: Watts | None = None
    peak_flops_per_s: dict[str, PerSecond] = {}
    peak_memory_bytes_per_s: PerSecond | None = None


class Launch(Section):
    """The device clock's own constants, measured with kernels that do nothing.

    latency_s: from the host's launch call returning to the kernel starting on an idle stream.
    gap_s: between the end of one kernel and the start of another in a busy stream (contained in kernel times).
    queue_depth: launches a host may run ahead of the device before it is held back.
    synchronize_s: from the last kernel's end to the host going on after it waited for it.
    waiting_gap_s: what a kernel of a busy stream takes more while one, two, ... other streams wait for an event; the
    last holds for more of them. Empty where not measured.
    """

    latency_s: NotNegativeSeconds = 0.0
    gap_s: NotNegativeSeconds = 0.0
    queue_depth: PositiveCount = 1024
    synchronize_s: NotNegativeSeconds = 0.0
    waiting_gap_s: tuple[NotNegativeSeconds, ...] = ()

    def gap_beside_s(self, waiting: int) -> float:
        """What a kernel takes more while so many other streams wait."""
        known = min(waiting, len(self.waiting_gap_s))
        return self.waiting_gap_s[known - 1] if known else 0.0


class Cache(Section):
    """What the last-level cache does, measured by streaming over ever larger buffers, and by small kernels behind one.

    capacity_bytes: what stays cached, in the sense of :mod:`perfmodel.cost.l2_cache`. miss_s_per_byte: what a byte
    costs more when it comes from memory and not from the cache. code_miss_s: what a call takes more whose kernel's code
    does. None where not measured.
    """

    capacity_bytes: FittedBytes | None = None
    miss_s_per_byte: SecondsPerByte | None = None
    code_miss_s: NotNegativeSeconds | None = None


def _frees_what_it_has(script: tuple[int, ...]) -> tuple[int, ...]:
    held: set[int] = set()
    made = 0
    for step in script:
        if 0 < step <= MOST_BYTES:
            made += 1
            held.add(made)
        elif -step in held:
            held.remove(-step)
        else:
            raise PydanticCustomError("memory_script", "Input should be of bytes, or of -k to free the k-th allocation")
    return script


class KernelRecord(Section):
    """One operator call, measured alone under its kernel key.

    time_s: median time one call adds to a busy stream of changing kernels, warm: its kernels and the gaps around them;
    None where it failed.
    cold_time_s: the same when nothing it touches is in the cache; None where not measured.
    kernels: device launches of one call. memory_script: what the call asks the caching allocator for, in order: +n
    allocates n bytes, -k frees the script's k-th allocation (from 1); what is never freed are its outputs.
    origin: ``grid`` (general calibration) or ``scenario`` (asked for by one). error: why there is no time.
    """

    time_s: Seconds | None = None
    cold_time_s: Seconds | None = None
    spread: Spread = 0.0
    samples: Count = 0
    kernels: Count | None = None
    memory_script: Annotated[tuple[int, ...], AfterValidator(_frees_what_it_has)] = ()
    origin: Literal["grid", "scenario"] = "scenario"
    error: str | None = None


class HostRecord(Section):
    """Host seconds one occurrence of a host key costs (keys: see :mod:`perfmodel.cost.host`).

    All are at the one speed of the host at which the fixed work of the key ``reference`` takes that record's
    seconds; its spread says how far the speed wandered. cold_s: what the first of several in a row take longer, all
    together.
    """

    time_s: DifferenceSeconds
    cold_s: NotNegativeSeconds = 0.0
    spread: Spread = 0.0
    samples: Count = 0


class CurveRecord(Section):
    """A fitted cost curve: its form (a function of :mod:`perfmodel.cost.kernels`), parameters and how well it holds.

    leave_one_out: relative errors of predicting each grid point from the others: median, p90, worst, bias. ranges:
    least and most of each number that places a call among those it was fitted on; empty in older profiles.
    """

    form: str
    parameters: dict[str, Annotated[float, Field(ge=-1e30, le=1e30)]]
    standard_errors: dict[str, float] = {}
    points: Count = 0
    leave_one_out: dict[str, Annotated[float, Field(ge=-MOST_COUNT, le=MOST_COUNT)]] = {}
    ranges: dict[str, tuple[Coordinate, Coordinate]] = {}

    @model_validator(mode="after")
    def _whole(self) -> CurveRecord:
        if self.form not in LAYOUTS:
            rule = f"of form {', '.join(LAYOUTS)}, not {self.form!r:.40}"
        else:
            rule = broken_rule(self.form, self.parameters, self.ranges) or ""
        if rule:
            raise PydanticCustomError("curve", f"Input should be a curve {rule}")
        return self


class MemoryConstants(Section):
    """Device memory outside any tensor.

    context_bytes: what a process with torch and its kernels loaded holds before the allocator's first segment.
    cublas_workspace_bytes: taken from the allocator once per host thread that multiplies; cublaslt: likewise for
    products with an epilogue.
    """

    context_bytes: Bytes = 0
    cublas_workspace_bytes: Bytes = 0
    cublaslt_workspace_bytes: Bytes = 0


class PowerLoop(Section):
    """One kind of work repeated without pause, or in turns with matrix products that make the device hot.

    products, calls: of one round. time_s: of a call, product_s: of a product. clock_hz, draw_w: once it has settled.
    """

    products: Count = 0
    calls: PositiveCount = 1
    time_s: Seconds
    product_s: Seconds | None = None
    clock_hz: PerSecond
    draw_w: Watts | None = None


class PowerReading(Section):
    """What was read of one kind of work.

    alone_s: a call as kernel keys are timed. flops: of a call, where the kind is there for them; arithmetic: their
    unit.
    """

    alone_s: Seconds
    flops: Flops | None = None
    arithmetic: str | None = None
    loops: tuple[PowerLoop, ...]


class PowerKind(Section):
    """A kind of work as :mod:`perfmodel.cost.power` takes it.

    draw_w: at full clock, hot. clock_share: of its time, what follows the clock. flops_per_s: with which it draws that,
    where the kind is there for FLOPs; arithmetic: their unit.
    """

    draw_w: Watts
    clock_share: Share
    flops_per_s: PerSecond | None = None
    arithmetic: str | None = None


class Power(Section):
    """What work draws, and what its power limit does to the device's clock; empty where unread.

    idle_w: draw between kernels. limit_w, full_clock_hz: when this was measured. kinds: by kind of work
    (:func:`perfmodel.cost.power.power_kind`), fitted to the readings; spread: relative, root mean square of the times
    of their loops against the fit. draw_w, clock_hz: sustained, by kind of work, in profiles that have no readings.
    """

    draw_w: dict[str, Watts] = {}
    clock_hz: dict[str, PerSecond] = {}
    idle_w: Watts = 0.0
    limit_w: Annotated[Watts, Field(gt=0)] | None = None
    full_clock_hz: PerSecond | None = None
    kinds: dict[str, PowerKind] = {}
    spread: Spread = 0.0
    readings: dict[str, PowerReading] = {}


class Profile(Section):
    """See the module. provenance: machine, driver, library versions, environment, when and how long it was measured.

    interconnects: by name. interconnect: the name of the machine's own. topology: what ``nvidia-smi topo -m`` prints.
    base: a profile of the catalog, measured on another machine with the same devices: whatever section the file leaves
    out is that one's, and so are kernels that it does not have.
    """

    version: Literal[1] = 1
    name: str
    base: str | None = None
    provenance: Provenance = {}
    device: Device
    gpus: PositiveCount = 1
    launch: Launch = Launch()
    cache: Cache = Cache()
    kernels: dict[str, KernelRecord] = {}
    host: Annotated[dict[str, HostRecord], AfterValidator(with_positive_reference)] = {}
    curves: dict[str, CurveRecord] = {}
    memory: MemoryConstants = MemoryConstants()
    power: Power = Power()
    interconnects: dict[str, Interconnect] = {}
    interconnect: str | None = None
    transfers: dict[TransferKey, TransferRecord] = {}
    topology: str | None = None
    unstable: tuple[str, ...] = ()
    _original: Profile | None = PrivateAttr(default=None)
    _as_measured: Profile | None = PrivateAttr(default=None)

    @property
    def original(self) -> Profile:
        """The profile as its file has it, without the values that ``--set`` gave; itself where none were given."""
        return self if self._original is None else self._original

    @property
    def as_measured(self) -> Profile | None:
        """The same with the datasheet, the cache and the gaps that its kernels were timed with; None where
        these are its own, so that no time is to be scaled (:mod:`perfmodel.cost.kernels.scaling`).
        """
        return self._as_measured

    def changed_from(self, original: Profile, as_measured: Profile | None) -> Profile:
        """A copy that knows from which profile it was made; see :attr:`original` and :attr:`as_measured`."""
        changed = self.model_copy()
        changed._original, changed._as_measured = original, as_measured
        return changed

    @property
    def cache_capacity_bytes(self) -> float:
        """What stays in the last-level cache: measured, or else the usual share of its size; 0 without one."""
        if self.cache.capacity_bytes is not None:
            return self.cache.capacity_bytes
        return USUAL_CAPACITY * self.device.l2_bytes


def save_profile(profile: Profile, path: Path) -> None:
    """Write the profile atomically, keys sorted, one key a line so that versions can be compared; of one with a base,
    only the sections and the kernels in which it differs.
    """
    if profile.base is None:
        data = profile.model_dump_json(indent=1, exclude_defaults=False, exclude_none=True)
    else:
        base = find_base(profile.base, path)
        shared = _shared(profile, base)
        kernels = {key: each for key, each in profile.kernels.items() if base.kernels.get(key) != each}
        profile = profile.model_copy(update={"kernels": kernels})
        own = json.loads(profile.model_dump_json(exclude=shared, exclude_none=True))
        absent = {name: None for name in Profile.model_fields if name not in shared and name not in own}
        data = json.dumps(own | absent, indent=1)
    write_atomically(path, data + "\n", PROFILE)


def _shared(profile: Profile, base: Profile) -> set[str]:
    own = {"version", "name", "base"}
    return {name for name in Profile.model_fields if getattr(profile, name) == getattr(base, name)} - own


def load_profile(profile: str | PathLike[str]) -> Profile:
    """Read and check one profile.

    Parameters
    ----------
    profile : str or path
        A name of the catalog or a file, as in :func:`find_profile`; a path object is always a file.

    Raises
    ------
    PerfModelError
        If it is unknown, unreadable, truncated, newer than this perfmodel, or breaks a rule (the sentence names the
        key), or its base is not in the catalog or has a base itself.

    Examples
    --------
    >>> load_profile("h200-sxm-x4").device.name
    'NVIDIA H200'
    """
    path = find_profile(profile) if isinstance(profile, str) else Path(profile)
    found = regular_file(path, "a profile", _remedy(path))
    return _load_cached(path, (found.st_mtime_ns, found.st_size))


@lru_cache(maxsize=8)
def _load_cached(path: Path, _stat: tuple[int, int]) -> Profile:
    remedy = _remedy(path)
    data = upgrade(path, read_json(path, "a profile", remedy), PROFILE_VERSION, {}, remedy)
    base = None if data.get("base") is None else find_base(str(data["base"]), path)
    with naming(path):
        if base is None:
            return validated(Profile, data, "profile")
        own = validated(Profile, {"device": base.device} | data, "profile")
    sections = {name: getattr(own, name) for name in data}
    return base.model_copy(update=sections | {"kernels": base.kernels | own.kernels})


def _remedy(path: Path) -> str:
    """How the profile of a file that cannot be used is measured."""
    device = " --device cpu" if path.name == DEFAULT_CPU_PROFILE else ""
    return f"Measure it{' again' if os.path.exists(path) else ''} with `perfmodel calibrate{device}`."


def find_base(name: str, path: Path) -> Profile:
    """The profile of the catalog on which that of the file ``path`` builds.

    Raises
    ------
    PerfModelError
        If the catalog has no such profile, it has a base itself, or it is that file.
    """
    if name not in catalog_names():
        raise PerfModelError(
            f"{path}: base must be a profile of the catalog (got {name!r}). {did_you_mean(name, catalog_names())}"
        )
    known = CATALOG / f"{name}.json"
    base = load_profile(known) if known.resolve() != path.resolve() else None
    if base is None or base.base is not None:
        raise PerfModelError(f"{path}: base must be another profile, without a base (got {name!r}). Name that one's.")
    return base


def catalog_names() -> list[str]:
    """Names of the shipped profiles."""
    return sorted(path.stem for path in CATALOG.glob("*.json"))


def find_profile(name: str) -> Path:
    """The file of a profile given by catalog name or by path.

    Raises
    ------
    PerfModelError
        If neither a catalog entry nor a file has that name; the sentence says what is known.
    """
    if name in catalog_names():
        return CATALOG / f"{name}.json"
    if Path(name).suffix == ".json" or "/" in name:
        return Path(name)
    file = Path(f"{name}.json")
    meant = f"Did you mean the file '{file}'?" if os.path.isfile(file) else did_you_mean(name, catalog_names())
    raise PerfModelError(f"hardware.profile must be a file or a catalog name (got {name!r}). {meant}")
