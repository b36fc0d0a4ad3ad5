"""What of the general host costs is measured already, in a file written after each piece and removed at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from calibrate.host_records import Case
from calibrate.host_reference import HostReference
from perfmodel.errors import PerfModelError
from perfmodel.file_kinds import HOST_PIECES
from perfmodel.hardware.profile import HostRecord
from perfmodel.reading import read_json
from perfmodel.writing import write_atomically

REMEDY = "Delete it to measure the host's costs from their beginning."
CHECKPOINT_S = 3.0  # between two writes within a piece

Seconds = Annotated[float, Field(allow_inf_nan=False)]


class HostPieces(BaseModel):
    """profile: when the calibration that it belongs to began. reference_s: of the reference run to whose speed samples
    are brought; runs_s: of all reference runs. samples: seconds forward and backward by flags and title of a call.
    operators_s: of operators by themselves. records: at the speed of ``reference_s``. finished: names of pieces.
    left_out: how many pieces there was no time for.
    """

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    profile: str = ""
    reference_s: Seconds | None = None
    runs_s: list[Seconds] = []
    samples: dict[str, dict[str, tuple[list[Seconds], list[Seconds]]]] = {}
    operators_s: dict[str, Seconds] = {}
    records: dict[str, HostRecord] = {}
    finished: list[str] = []
    left_out: int = 0
    _path: Path | None = PrivateAttr(default=None)
    _written_s: float = PrivateAttr(default_factory=time.monotonic)

    @classmethod
    def kept_in(cls, path: Path, profile: str) -> HostPieces:
        """What the file holds if it belongs to this profile, or nothing yet; it is saved there.

        Raises
        ------
        PerfModelError
            If the file is damaged.
        """
        found = cls(profile=profile)
        if path.exists():
            try:
                earlier = cls.model_validate(read_json(path, "what was measured of the host", REMEDY))
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                raise PerfModelError(f"{path}: {where}: {first['msg']}. {REMEDY}") from error
            found = earlier if earlier.profile == profile else found
        found._path, found.left_out = path, 0
        return found

    def reference(self, device: str) -> HostReference:
        """The reference in whose measure all pieces are; its runs are kept here."""
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
