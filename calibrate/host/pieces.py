"""What of the general host costs is measured already, in a file written after each piece and removed at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, PrivateAttr

from calibrate.draft import check_belongs
from calibrate.host.records import Case
from calibrate.host.reference import HostReference
from perfmodel.errors import naming
from perfmodel.files.kinds import HOST_PIECES
from perfmodel.files.reading import read_json
from perfmodel.files.validation import validated
from perfmodel.files.writing import write_atomically
from perfmodel.hardware.profile import HostRecord
from perfmodel.hardware.quantities import Count, DifferenceSeconds, Seconds

REMEDY = "Delete it to measure the host's costs from their beginning."
CHECKPOINT_S = 3.0  # between two writes within a piece


class HostPieces(BaseModel):
    """profile: when the calibration that it belongs to began. reference_s: of the reference run to whose speed samples
    are brought; runs_s: of all reference runs. samples: seconds forward and backward by flags and title of a call.
    operators_s: of operators by themselves. records: at the speed of ``reference_s``. finished: names of pieces.
    left_out: how many pieces there was no time for.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    version: Literal[1] = 1
    profile: str = ""
    reference_s: Seconds | None = None
    runs_s: list[Seconds] = []
    samples: dict[str, dict[str, tuple[list[DifferenceSeconds], list[DifferenceSeconds]]]] = {}
    operators_s: dict[str, DifferenceSeconds] = {}
    records: dict[str, HostRecord] = {}
    finished: list[str] = []
    left_out: Count = 0
    _path: Path | None = PrivateAttr(default=None)
    _written_s: float = PrivateAttr(default_factory=time.monotonic)

    @classmethod
    def kept_in(cls, path: Path, profile: str) -> HostPieces:
        """Read what the file holds of this profile, which may be nothing yet; it is saved there.

        Parameters
        ----------
        path : Path
        profile : str
            When the calibration of the profile began.

        Raises
        ------
        PerfModelError
            If the file is damaged, or holds what was measured for another profile.
        """
        found = cls(profile=profile)
        if path.exists():
            data = read_json(path, "what was measured of the host", REMEDY)
            with naming(path):
                earlier = validated(cls, data, "host costs", REMEDY)
                if earlier._holds_any():
                    check_belongs(earlier.profile, profile)
                    found = earlier
        found._path, found.left_out = path, 0
        return found

    def _holds_any(self) -> bool:
        return bool(self.finished or self.samples or self.operators_s or self.records)

    def reference(self, device: str) -> HostReference:
        """Return the reference in whose measure all pieces are; its runs are kept here."""
        made = HostReference(device, self.reference_s)
        self.reference_s, made.runs_s = made.reference_s, self.runs_s
        return made

    def measure(self, name: str, work: Callable[[], None]) -> None:
        """Do the work of a piece, unless it is done, and save."""
        if name not in self.finished:
            work()
            self.finished.append(name)
            self.save()

    def restore(self, flags: str, cases: list[Case]) -> None:
        """Give the cases the samples that were taken of them."""
        for case in cases:
            forward_s, backward_s = self.samples.get(flags, {}).get(case.title, ([], []))
            case.forward_s, case.backward_s = list(forward_s), list(backward_s)

    def keep(self, flags: str, cases: list[Case]) -> None:
        self.samples[flags] = {case.title: (list(case.forward_s), list(case.backward_s)) for case in cases}

    def note_operator(self, key: str, seconds: float) -> None:
        """Keep the seconds of an operator, and save if that was long ago."""
        self.operators_s[key] = seconds
        if time.monotonic() - self._written_s > CHECKPOINT_S:
            self.save()

    def save(self) -> None:
        if self._path is not None:
            write_atomically(self._path, self.model_dump_json(), HOST_PIECES)
        self._written_s = time.monotonic()

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
