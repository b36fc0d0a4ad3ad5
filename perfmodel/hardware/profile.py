"""A hardware profile: everything that was measured on a machine, and nothing about any workload.

JSON, machine-written by ``perfmodel calibrate``. Raw samples are kept apart in ``<name>.samples.json.gz`` so that
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
from perfmodel.hardware.power import Power
from perfmodel.hardware.quantities import (
    MOST_BYTES,
    MOST_COUNT,
    Bytes,
    Coordinate,
    Count,
    DifferenceSeconds,
    FittedBytes,
    NotNegativeSeconds,
    PerSecond,
    PositiveBytes,
    PositiveCount,
    Provenance,
    Seconds,
    SecondsPerByte,
    Spread,
    Watts,
)

# Format history
# 1  first
PROFILE_VERSION = 1
CATALOG = Path(__file__).parent / "catalog"
DEFAULT_CPU_PROFILE = "cpu.json"
PROFILE_KEY = "hardware.profile"  # of a scenario
USUAL_CAPACITY = 0.7  # of the cache's size; addresses are hashed over its parts


class Device(Section):
    """One accelerator (or the CPU), from its driver and its datasheet.

    Attributes
    ----------
    peak_flops_per_s : dict of str to float
        The datasheet's peaks by arithmetic kind: fp32, tf32, bf16, fp16.
    peak_memory_bytes_per_s : float or None
        The datasheet's memory bandwidth.
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
    """Constants of the device clock, measured with kernels that do nothing.

    Attributes
    ----------
    latency_s : float
        From the return of the host's launch call to the start of the kernel on an idle stream.
    gap_s : float
        Between the end of one kernel and the start of another in a busy stream (contained in kernel times).
    queue_depth : int
        Launches by which the host may lead the device before it is held back.
    synchronize_s : float
        From the last kernel's end until the host continues after it waited for it.
    waiting_gap_s : tuple of float
        By how much a kernel of a busy stream is delayed while one, two, ... other streams wait for an event; the last
        value holds for more of them. Empty if not measured.
    """

    latency_s: NotNegativeSeconds = 0.0
    gap_s: NotNegativeSeconds = 0.0
    queue_depth: PositiveCount = 1024
    synchronize_s: NotNegativeSeconds = 0.0
    waiting_gap_s: tuple[NotNegativeSeconds, ...] = ()

    def gap_beside_s(self, waiting: int) -> float:
        """Return by how much a kernel is delayed while that many other streams wait."""
        known = min(waiting, len(self.waiting_gap_s))
        return self.waiting_gap_s[known - 1] if known else 0.0


class Cache(Section):
    """The last-level cache, measured by streaming over ever larger buffers, and by small kernels after one.

    Attributes
    ----------
    capacity_bytes : float or None
        What stays cached, in the sense of :mod:`perfmodel.cost.l2_cache`; None if not measured.
    miss_s_per_byte : float or None
        Seconds more for a byte that comes from memory and not from the cache.
    code_miss_s : float or None
        Seconds more for a call whose kernel's code comes from memory.
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

    Attributes
    ----------
    time_s : float or None
        Median time that one call adds to a busy stream of changing kernels, warm: its kernels and the gaps around them;
        None if it failed.
    cold_time_s : float or None
        The same if nothing it touches is in the cache; None if not measured.
    spread : float
        Standard deviation of the repeats over their median.
    samples : int
        Number of repeats.
    kernels : int or None
        Device launches of one call.
    memory_script : tuple of int
        Requests of the call to the caching allocator, in order: +n allocates n bytes, -k frees the script's k-th
        allocation (from 1); allocations that are never freed are its outputs.
    origin : {"grid", "scenario"}
        General calibration, or asked for by a scenario.
    error : str or None
        Why there is no time.
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
    """Host seconds of one occurrence of a host key (keys: see :mod:`perfmodel.cost.host`).

    All records are at one speed of the host, at which the fixed work of the key ``reference`` takes that record's
    seconds; the spread of that record says how far the speed drifted.

    Attributes
    ----------
    cold_s : float
        By how much the first of several in a row take longer, all together.
    """

    time_s: DifferenceSeconds
    cold_s: NotNegativeSeconds = 0.0
    spread: Spread = 0.0
    samples: Count = 0


class CurveRecord(Section):
    """A fitted cost curve: its form (a function of :mod:`perfmodel.cost.kernels`), parameters and errors.

    Attributes
    ----------
    leave_one_out : dict of str to float
        Relative errors of predicting each grid point from the others: median, p90, worst, bias.
    ranges : dict
        Least and most of each coordinate of the calls it was fitted on; empty in older profiles.
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

    Attributes
    ----------
    context_bytes : int
        What a process with torch and its kernels loaded holds before the allocator's first segment.
    cublas_workspace_bytes : int
        Taken from the allocator once per host thread that runs GEMMs.
    cublaslt_workspace_bytes : int
        Likewise for GEMMs with an epilogue.
    """

    context_bytes: Bytes = 0
    cublas_workspace_bytes: Bytes = 0
    cublaslt_workspace_bytes: Bytes = 0


class Profile(Section):
    """Everything that was measured on a machine; see the module.

    Attributes
    ----------
    name : str
        What reports call it.
    base : str or None
        A profile of the catalog, measured on another machine with the same devices. It gives every section that the
        file leaves out, and kernels that the file does not have.
    provenance : dict
        Machine, driver, library versions, environment, when and how long it was measured.
    interconnects : dict of str to Interconnect
        By name.
    interconnect : str or None
        Name of the machine's own interconnect.
    topology : str or None
        What ``nvidia-smi topo -m`` printed.
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
        """The profile as its file has it, without the values that ``--set`` gave; itself if none were given."""
        return self if self._original is None else self._original

    @property
    def as_measured(self) -> Profile | None:
        """The same profile with the datasheet, the cache and the gaps that its kernels were timed with.

        None if these are its own, so that no time is to be scaled (:mod:`perfmodel.cost.kernels.scaling`).
        """
        return self._as_measured

    def changed_from(self, original: Profile, as_measured: Profile | None) -> Profile:
        """A copy that knows from which profile it was made; see :attr:`original` and :attr:`as_measured`."""
        changed = self.model_copy()
        changed._original, changed._as_measured = original, as_measured
        return changed

    @property
    def cache_capacity_bytes(self) -> float:
        """Bytes that stay in the last-level cache: measured, or else the usual share of its size; 0 without a cache."""
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


def load_profile(profile: str | PathLike[str], key: str = PROFILE_KEY) -> Profile:
    """Read and check one profile.

    Parameters
    ----------
    profile : str or path
        A name of the catalog or a file, as in :func:`find_profile`; a path object is always a file.
    key : str
        What named it, for the sentence of an unknown name.

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
    path = find_profile(profile, key) if isinstance(profile, str) else Path(profile)
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
    """Say how the profile of a file that cannot be used is measured."""
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


def find_profile(name: str, key: str = PROFILE_KEY) -> Path:
    """Return the file of a profile given by catalog name or by path.

    Parameters
    ----------
    name : str
        A name of the catalog, or a path that has a slash or ends in ".json".
    key : str
        What named it, for the sentence.

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
    if os.path.isfile(file):
        advice = f"Did you mean the file '{file}'?"
    else:
        advice = _remedy(file) if file.name == DEFAULT_CPU_PROFILE else did_you_mean(name, catalog_names())
    raise PerfModelError(f"{key} must be a file or a catalog name (got {name!r}). {advice}")
