"""Fit curves and power of the shipped profiles again from their own records, as `perfmodel calibrate` does; no GPU.

A profile that builds on another has that one's.
"""

from __future__ import annotations

from calibrate.draft import Draft
from calibrate.fit import fit_curves
from calibrate.power_fit import fitted
from perfmodel.hardware.profile import CATALOG


def main() -> None:
    for path in sorted(path for path in CATALOG.glob("*.json")):
        draft = Draft.load(path)
        if draft.profile.base is not None:
            continue
        operations = {key: job.operation for key, job in sorted(draft.jobs.items())}
        draft.update(curves=fit_curves(draft.kernels, operations, draft.profile.device))
        draft.update(power=fitted(draft.profile.power))
        draft.write()
        print(f"{path.name}: {len(draft.profile.curves)} curves")


if __name__ == "__main__":
    main()
