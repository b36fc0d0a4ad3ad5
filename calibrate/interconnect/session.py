"""`perfmodel calibrate --interconnect`: what one wiring of the ranks adds to a profile that is there already."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from calibrate.draft import check_belongs
from calibrate.interconnect.merging import has_all, merged, merged_run, repeated
from calibrate.interconnect.plan import InterconnectOptions, check_options, request_of, usual_timeout_s
from calibrate.interconnect.request import Measured, Request, asked_in, measure, measured_in
from calibrate.output_lock import locked
from calibrate.stage_names import GENERAL
from perfmodel.errors import naming
from perfmodel.files.kinds import STAGES
from perfmodel.files.writing import check_writable
from perfmodel.hardware.profile import Profile, load_profile, save_profile
from perfmodel.units import format_seconds

Measure = Callable[[Request, float, Path], Measured | None]


def calibrate_interconnect(
    output: Path, options: InterconnectOptions, timeout_s: float | None = None, measure: Measure = measure
) -> Profile | None:
    """Measure an interconnect into the profile ``output``.

    Parameters
    ----------
    output : Path
        A profile that `perfmodel calibrate` made on this machine.
    options : InterconnectOptions
        What to measure, and how.
    timeout_s : float, optional
        Seconds after which all ranks are ended; if left out, :data:`~calibrate.interconnect.plan.TIMEOUT_S` and what
        the budget is above the usual.
    measure : callable, optional
        Runs the ranks, as :func:`calibrate.interconnect.request.measure` does.

    Returns
    -------
    Profile or None
        None on a machine that rank 0 is not on, which wrote nothing.

    Raises
    ------
    PerfModelError
        If there is no profile there, a name is unknown, nothing is to be measured, a rank fails, or time is up. The
        profile then keeps what it had, and gains what finished stages measured; after a kill it gains that at the next
        start. Also if another profile's finished stages are in the file that such stages are kept in.
    """
    check_options(options)
    load_profile(output)  # only what is a profile is locked
    with locked(output, shared=options.nodes > 1) as target:
        kept = target.with_suffix(f".{options.name}.partial.json")
        check_writable(kept, STAGES)
        _recover(target, options.name, options.device, kept)
        profile = load_profile(target)
        request = request_of(options, profile)
        try:
            found = measure(request, usual_timeout_s(request) if timeout_s is None else timeout_s, kept)
        except BaseException:  # Ctrl-C too
            _recover(target, options.name, options.device, kept)
            raise
        if found is None:  # rank 0, which writes the profile, is on another machine
            return None
        profile = merged_run(profile, request, found, options.only)
        save_profile(profile, target)
        kept.unlink()
        spent = format_seconds(sum(profile.provenance["interconnects_s"][options.name].values()))
        count = len(found.interconnect.collectives)
        print(f"{target}: {options.name}: {count} collectives in {spent}", file=sys.stderr)
        return profile


def _recover(output: Path, name: str, device: str, kept: Path) -> None:
    """Put the stages that a run of the profile finished before it was ended into it, if there are any."""
    if not kept.exists():
        return
    profile, asked = load_profile(output), asked_in(kept)
    with naming(kept):
        check_belongs(None if asked is None else asked.profile, str(profile.provenance.get("measured_at")))
    assert asked is not None
    found = measured_in(kept, Request(name, asked.ranks, device, 0.0, nodes=asked.nodes))
    before = profile.interconnects.get(name)
    if before is None or not has_all(before, found.interconnect):
        only = () if asked.stages == GENERAL else asked.stages
        save_profile(merged(profile, name, repeated(before, found, only), found.transfers), output)
    kept.unlink()
    print(f"{output}: {name}: has what an interrupted run measured: {', '.join(found.stages_s)}", file=sys.stderr)
