"""The request by which the ranks of a machine measure an interconnect, and what they answer."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from calibrate.fit.couplings import fit_couplings, fit_message_couplings, fit_own_couplings, fit_own_message_couplings
from calibrate.interconnect.own_contention import OwnKernel, decode_own, encode_own
from calibrate.this_machine.wirings import backend_of, environment, nodes_of
from perfmodel.cost.piecewise import fit_curves
from perfmodel.errors import naming
from perfmodel.files.reading import read_json
from perfmodel.files.sections import Section
from perfmodel.files.validation import validated
from perfmodel.files.writing import write_atomically
from perfmodel.hardware.interconnect import Interconnect, TransferRecord
from perfmodel.hardware.quantities import NotNegativeSeconds, PositiveCount, Provenance
from perfmodel.program.program import Collective

ROOT = Path(__file__).resolve().parents[2]
REMEDY = "Delete it to measure all stages from their beginning."
OWN_BUDGET_S = 25.0  # about 35 kernels


@dataclass(frozen=True)
class Request:
    """The measurements that the ranks are asked for.

    Parameters
    ----------
    interconnect : str
        Its name.
    ranks : int
        How many there are.
    device : str
        ``cuda`` or ``cpu``.
    budget_s : float
        Seconds for timing collectives; sizes that do not fit in are left out.
    exact : tuple
        Further collectives: kind, dtype, size_bytes, ranks.
    stages : tuple of str
        Some of :data:`calibrate.stage_names.GENERAL`.
    reference_s : float, optional
        Seconds of a reference run on the profile's host.
    most_bytes : int, optional
        Size of the largest general collective, if not the usual one.
    passes : int
        How often all collectives are timed.
    nodes, rendezvous
        See :class:`~calibrate.this_machine.launcher.Launch`.
    own : tuple of OwnKernel
        Scenarios' kernels to be measured with collectives and receives that wait, the most important first; those of
        rank 0 count.
    own_budget_s : float
        Seconds for these.
    profile : str
        When the calibration of the profile that it is for began.
    """

    interconnect: str
    ranks: int
    device: str
    budget_s: float
    exact: tuple[tuple[str, str, int, int], ...] = ()
    stages: tuple[str, ...] = ("calls", "collectives", "contention")
    reference_s: float | None = None
    most_bytes: int | None = None
    passes: int = 2
    nodes: int = 1
    rendezvous: str | None = None
    own: tuple[OwnKernel, ...] = ()
    own_budget_s: float = OWN_BUDGET_S
    profile: str = ""

    def to_json(self) -> str:
        """Return the request as text for the ranks."""
        return json.dumps(asdict(replace(self, own=())) | {"own": encode_own(self.own)})

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Read a request; the inverse of :meth:`to_json`."""
        data = json.loads(text)
        exact = tuple(tuple(each) for each in data["exact"])
        return cls(**data | {"exact": exact, "stages": tuple(data["stages"]), "own": decode_own(data["own"])})


class Asked(Section):
    """The facts of a :class:`Request` by which what it measured goes into its profile."""

    profile: str
    ranks: PositiveCount
    nodes: PositiveCount
    stages: tuple[str, ...]


class Found(BaseModel):
    """The results of the stages so far, as plain data."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    collectives: dict[str, Any] = {}
    communicator_bytes: dict[str, int] = {}
    host: dict[str, Any] = {}
    contention: dict[str, Any] = {}
    own_contention: dict[str, dict[str, Any]] = {}
    messages_ahead: dict[int, int] = {}
    transfers: dict[str, TransferRecord] = {}
    provenance: Provenance = {}
    topology: str | None = None
    stages_s: dict[str, NotNegativeSeconds] = {}
    asked: Asked | None = None


@dataclass(frozen=True)
class Measured:
    """The results of all stages, for :func:`~calibrate.interconnect.merging.merged_run`.

    Parameters
    ----------
    interconnect : Interconnect
        With the fits of its records.
    transfers : dict
        Empty unless that stage was asked for.
    stages_s : dict
        Seconds by stage.
    topology : str, optional
        What ``nvidia-smi topo -m`` prints.
    """

    interconnect: Interconnect
    transfers: dict[str, TransferRecord]
    stages_s: dict[str, float]
    topology: str | None = None


def measure(request: Request, timeout_s: float, kept: Path | None = None) -> Measured | None:
    """Run the stages on the ranks of this machine, or of several that make the same request.

    Parameters
    ----------
    request : Request
    timeout_s : float
        Seconds after which all ranks are ended.
    kept : Path, optional
        A file that rank 0 writes after each stage, for :func:`measured_in`; it outlives whatever ends this. One that
        is there already is removed.

    Returns
    -------
    Measured or None
        None on a machine that rank 0 is not on.

    Raises
    ------
    PerfModelError
        If a rank fails, waits for another in vain, or all do not end within ``timeout_s``.
    """
    from calibrate.this_machine.launcher import Launch, run_ranks

    with tempfile.TemporaryDirectory(prefix="perfmodel-") as name:
        folder = Path(name)
        asked, answered = folder / "request.json", (kept or folder / "result.json").absolute()
        answered.unlink(missing_ok=True)
        write_atomically(asked, request.to_json(), None)
        search_path = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        program = ("-m", "calibrate.interconnect.worker", str(asked), str(answered), str(folder))
        launch = Launch(
            name=f"interconnect {request.interconnect}",
            program=program,
            ranks=request.ranks,
            device=request.device,
            folder=folder,
            timeout_s=timeout_s,
            environment=os.environ | {"PYTHONPATH": os.pathsep.join(search_path)},
            nodes=request.nodes,
            rendezvous=request.rendezvous,
        )
        run_ranks(launch)
        return measured_in(answered, request) if answered.exists() else None


def asked_in(path: Path) -> Asked | None:
    """Return what was asked of the run whose finished stages are in a file; None where an older version wrote it.

    Raises
    ------
    PerfModelError
        If the file is damaged.
    """
    return _found_in(path).asked


def measured_in(path: Path, request: Request) -> Measured:
    """Return what stages that ended have left in a file, also those of a run that was ended.

    Raises
    ------
    PerfModelError
        If the file is damaged.
    """
    found = _found_in(path)
    measured = {
        "backend": backend_of(request.device, request.interconnect),
        "environment": environment(request.interconnect, 0, request.ranks),
        "provenance": found.provenance,
        "nodes": max(nodes_of(request.interconnect), request.nodes),
        "collectives": found.collectives,
        "communicator_bytes": found.communicator_bytes,
        "host": found.host,
        "contention": found.contention,
        "own_contention": found.own_contention,
        "messages_ahead": found.messages_ahead,
    }
    with naming(path):
        known = validated(Interconnect, measured, "profile", REMEDY)
    fits = {
        "segments": fit_curves(known.collectives),
        "couplings": fit_couplings(known.contention),
        "message_couplings": fit_message_couplings(known.contention),
        "own_couplings": fit_own_couplings(known.own_contention),
        "own_message_couplings": fit_own_message_couplings(known.own_contention),
    }
    interconnect = Interconnect.model_validate(dict(known) | fits)
    return Measured(interconnect, found.transfers, found.stages_s, found.topology)


def _found_in(path: Path) -> Found:
    data = read_json(path, "an interconnect's finished stages", REMEDY)
    with naming(path):
        return validated(Found, data, "profile", REMEDY)


def exact_collectives(collectives: Sequence[Collective]) -> tuple[tuple[str, str, int, int], ...]:
    """Return what a request says of these, each once."""
    return tuple(dict.fromkeys((each.kind, each.dtype, each.size_bytes, each.ranks) for each in collectives))
