"""A profile in the making: valid at every moment, written every few seconds, with raw samples in a file beside it."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from calibrate.jobs import Job
from calibrate.timing.samples import Samples
from perfmodel.errors import PerfModelError, naming
from perfmodel.files.kinds import SAMPLES
from perfmodel.files.reading import read_json
from perfmodel.files.sections import Section
from perfmodel.files.validation import validated
from perfmodel.files.versions import upgrade
from perfmodel.files.writing import check_writable, write_atomically
from perfmodel.hardware.profile import KernelRecord, Profile, load_profile, save_profile
from perfmodel.hardware.quantities import Count, DifferenceSeconds
from perfmodel.trace.operation import Operation, decode_operation, encode_operation
from perfmodel.trace.trace import MALFORMED

# Format history of the samples file
# 1  first
# 2  when the profile that it belongs to was measured; before, it was known by its name alone
SAMPLES_VERSION = 2
CHECKPOINT_S = 5.0
UNSTABLE_SPREAD = {"cuda": 0.03, "cpu": 0.15}  # relative: standard deviation over median
SAMPLES_REMEDY = "Delete it; the keys it describes can then only be repeated with their scenario."


@dataclass
class Draft:
    """profile: so far. jobs: every job measured for it. samples: raw, by key. stages_s: complete ones, with seconds."""

    path: Path
    profile: Profile
    jobs: dict[str, Job] = field(default_factory=dict)
    samples: dict[str, Samples] = field(default_factory=dict)
    kernels: dict[str, KernelRecord] = field(default_factory=dict)
    stages_s: dict[str, float] = field(default_factory=dict)
    _written_s: float = field(default_factory=time.monotonic)

    @classmethod
    def new(cls, path: Path, profile: Profile, kernels: Mapping[str, KernelRecord] | None = None) -> Draft:
        """Begin a profile file that has these kernels; samples of another profile may not be beside it."""
        draft = cls(path, profile, kernels=dict(kernels or {}))
        check_writable(draft.samples_path, SAMPLES)
        draft._read_samples()
        return draft

    @classmethod
    def load(cls, path: Path) -> Draft:
        """Go on from a profile file and the samples beside it (which may be missing)."""
        profile = load_profile(path)
        draft = cls(path, profile, kernels=dict(profile.kernels), stages_s=dict(profile.provenance.get("stages_s", {})))
        draft._read_samples()
        return draft

    @property
    def measured_at(self) -> str:
        """When the calibration of the profile began, by which the files beside it know that they belong to it."""
        return str(self.profile.provenance.get("measured_at"))

    @property
    def samples_path(self) -> Path:
        return self.path.with_name(f"{self.path.name.removesuffix('.json')}.samples.json.gz")

    @property
    def host_pieces_path(self) -> Path:
        return self.path.with_name(f"{self.path.name.removesuffix('.json')}.host-pieces.json")

    def record(self, job: Job, record: KernelRecord, samples: Samples | None) -> None:
        """Keep the outcome of a job, and write everything down if that was long ago."""
        self.jobs[job.key] = job
        self.kernels[job.key] = record
        if samples is not None:
            self.samples[job.key] = samples
        if time.monotonic() - self._written_s > CHECKPOINT_S:
            self.write()

    def update(self, **sections: Any) -> None:
        """Replace sections of the profile."""
        self.profile = self.profile.model_copy(update=sections)

    def complete(self, stage: str, seconds: float) -> None:
        """Mark a stage as done and write everything down."""
        self.stages_s[stage] = round(seconds, 3)
        self.write()

    def unstable(self) -> tuple[str, ...]:
        limit = UNSTABLE_SPREAD[self.profile.device.kind]
        return tuple(sorted(key for key, record in self.kernels.items() if record.spread > limit))

    def failed(self) -> dict[str, str]:
        """Return keys without a time, and why."""
        return {key: record.error for key, record in self.kernels.items() if record.error is not None}

    def write(self) -> Profile:
        """Write the samples, then the profile."""
        provenance = self.profile.provenance | {"stages_s": dict(self.stages_s)}
        self.update(kernels=dict(sorted(self.kernels.items())), provenance=provenance, unstable=self.unstable())
        write_atomically(self.samples_path, self._encoded_samples(), SAMPLES)
        save_profile(self.profile, self.path)
        self._written_s = time.monotonic()
        return self.profile

    def _encoded_samples(self) -> bytes:
        rows = {
            key: {
                "operation": encode_operation(job.operation),
                "tf32": job.tf32,
                "origin": job.origin,
                "calls": self.samples[key].calls if key in self.samples else 0,
                "values_s": list(self.samples[key].values_s) if key in self.samples else [],
            }
            for key, job in sorted(self.jobs.items())
        }
        content = {"version": SAMPLES_VERSION, "kernels": rows, "profile": self.measured_at}
        text = json.dumps(content, separators=(",", ":"))
        return gzip.compress(text.encode(), compresslevel=1, mtime=0)

    def _read_samples(self) -> None:
        if not self.samples_path.exists():
            return
        data = read_json(self.samples_path, "raw samples", SAMPLES_REMEDY)
        of_older = {"profile": self.measured_at if self.path.exists() else None}
        data = upgrade(self.samples_path, data, SAMPLES_VERSION, {2: lambda older: older | of_older}, SAMPLES_REMEDY)
        with naming(self.samples_path):
            found = validated(_SamplesFile, data, "samples", SAMPLES_REMEDY)
            if found.kernels:
                check_belongs(found.profile, self.measured_at)
            for key, row in found.kernels.items():
                self.jobs[key] = Job(key, _decoded(key, row.operation), row.tf32, row.origin)
                if row.values_s:
                    self.samples[key] = Samples(row.values_s, row.calls)


def check_belongs(profile: str | None, measured_at: str) -> None:
    """Refuse the content of a file that belongs to the profile of that time, unless that is the one to be written."""
    if profile != measured_at:
        profile = profile or "an unknown time"
        raise PerfModelError(
            f"must belong to the profile that is to be written (got measurements for a profile of {profile}). Move it "
            "away, or choose another --output."
        )


def _taken_in_calls(values_s: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
    if values_s and info.data.get("calls") == 0:
        raise PydanticCustomError("samples", "Input should be empty where calls are 0")
    return values_s


class _SamplesRow(Section):
    """What the file says of one kernel key."""

    operation: Annotated[list[Any], Field(min_length=6, max_length=6)]
    tf32: bool
    origin: Literal["grid", "scenario"]
    calls: Count
    # A separator's time is taken off, which noise may make the longer of the two.
    values_s: Annotated[tuple[DifferenceSeconds, ...], AfterValidator(_taken_in_calls)]


class _SamplesFile(Section):
    version: Literal[2]
    kernels: dict[str, _SamplesRow]
    profile: str | None


def _decoded(key: str, row: list[Any]) -> Operation:
    try:
        return decode_operation(row)
    except MALFORMED as error:
        raise PerfModelError(
            f"kernels.{key:.80} must hold an operator call ({str(error)[:120]}). {SAMPLES_REMEDY}"
        ) from error
