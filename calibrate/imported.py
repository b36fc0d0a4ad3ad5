"""`perfmodel profile import`: measurements of other tools in a profile, where they stand beside its own."""

from __future__ import annotations

from pathlib import Path

from calibrate.output_lock import locked
from perfmodel.cost.piecewise import fit_curves
from perfmodel.errors import PerfModelError, naming
from perfmodel.files.validation import validated
from perfmodel.hardware.imports import import_nccl_tests, import_nvbandwidth, is_nvbandwidth
from perfmodel.hardware.interconnect import Interconnect
from perfmodel.hardware.profile import Profile, load_profile, save_profile


def import_measurements(output: Path, file: Path, interconnect: str | None = None) -> Profile:
    """Put what nccl-tests or nvbandwidth measured into the profile ``output``.

    Sizes that it had already are replaced; curves are fitted again.

    Parameters
    ----------
    output : Path
        A profile of the machine that was measured.
    file : Path
        What a program of nccl-tests printed (or wrote with ``-J``), or what ``nvbandwidth -j`` printed.
    interconnect : str, optional
        The name under which collectives go; by default, the machine's own.

    Raises
    ------
    PerfModelError
        If either file cannot be read, collectives have no name to go under or are of another number of nodes than those
        under that name, or a calibration is writing the profile, which then stays as it is.
    """
    load_profile(output)  # a lock is only for what is a profile
    with locked(output):
        profile = load_profile(output)
        if is_nvbandwidth(file):
            changed = profile.model_copy(update={"transfers": profile.transfers | import_nvbandwidth(file)})
        else:
            changed = _with_collectives(profile, file, interconnect or profile.interconnect, output)
        with naming(file):  # copies are not validated, and what is written must be read again
            changed = validated(Profile, changed.model_dump(), "profile")
        save_profile(changed, output)
    return changed


def _with_collectives(profile: Profile, file: Path, name: str | None, output: Path) -> Profile:
    if name is None:
        raise PerfModelError(
            f"{output}: collectives must go under the name of an interconnect (the profile has none). Give "
            "--interconnect, for example nvlink."
        )
    found = import_nccl_tests(file)
    before = profile.interconnects.get(name) or Interconnect(backend="nccl", nodes=found.nodes)
    if before.collectives and before.nodes != found.nodes:
        raise PerfModelError(
            f"{file}: collectives of interconnect {name} must be of ranks on {_counted(before.nodes)} (got "
            f"{_counted(found.nodes)}). Import them under another --interconnect."
        )
    records = before.collectives | found.collectives
    imported = [*before.provenance.get("imported", []), file.name]
    made = before.model_copy(
        update={
            "nodes": found.nodes,
            "collectives": records,
            "segments": fit_curves(records),
            "provenance": before.provenance | {"imported": imported},
        }
    )
    ranks = max(int(key.split()[1]) for key in found.collectives)
    return profile.model_copy(
        update={
            "interconnects": profile.interconnects | {name: made},
            "interconnect": profile.interconnect or name,
            "gpus": max(profile.gpus, ranks),
        }
    )


def _counted(nodes: int) -> str:
    return f"{nodes} node" if nodes == 1 else f"{nodes} nodes"
