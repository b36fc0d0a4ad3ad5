"""Fit curves, power and couplings of the shipped profiles again from their own records, as `perfmodel calibrate` does;
no GPU.

A profile that builds on another has that one's curves and power, and couplings of its own.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

from calibrate.draft import Draft
from calibrate.fit.couplings import fit_couplings, fit_message_couplings, fit_own_couplings, fit_own_message_couplings
from calibrate.fit.kernels import fit_curves
from calibrate.fit.power import fitted
from perfmodel.hardware.interconnect import Interconnect
from perfmodel.hardware.profile import CATALOG, load_profile, save_profile


def coupled(interconnect: Interconnect) -> Interconnect:
    """With what its pairs say."""
    found = {
        "couplings": fit_couplings(interconnect.contention),
        "message_couplings": fit_message_couplings(interconnect.contention),
        "own_couplings": fit_own_couplings(interconnect.own_contention),
        "own_message_couplings": fit_own_message_couplings(interconnect.own_contention),
    }
    return interconnect.model_copy(update=found)


def main() -> None:
    with ProcessPoolExecutor() as pool:
        for path in sorted(path for path in CATALOG.glob("*.json")):
            profile = load_profile(path)
            wires = profile.interconnects
            found = dict(zip(wires, pool.map(coupled, wires.values()), strict=True))
            if profile.base is None:
                draft = Draft.load(path)
                operations = {key: job.operation for key, job in sorted(draft.jobs.items())}
                draft.update(curves=fit_curves(draft.kernels, operations, profile.device), power=fitted(profile.power))
                draft.update(interconnects=found)
                draft.write()
            else:
                save_profile(profile.model_copy(update={"interconnects": found}), path)
            print(f"{path.name}: {len(profile.curves)} curves, {len(wires)} interconnects")


if __name__ == "__main__":
    main()
