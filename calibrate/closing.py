"""What `perfmodel calibrate` says at its end."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from calibrate.draft import Draft
from calibrate.kernels import drift
from calibrate.kernels.bench import OUT_OF_MEMORY
from perfmodel.units import format_seconds

LISTED = 20


def closing_report(draft: Draft, lines: Sequence[str], spent_s: float) -> list[str]:
    """Return what was measured."""
    origins = [record.origin for record in draft.kernels.values() if record.error is None]
    return [
        f"{draft.path}: {origins.count('grid')} grid keys, {origins.count('scenario')} scenario keys,"
        f" {len(draft.profile.curves)} curves, {len(draft.profile.host)} host costs, in {format_seconds(spent_s)}",
        *lines,
    ]


def closing_warnings(draft: Draft, left_out: Sequence[str]) -> list[str]:
    """Return what could not be measured, what there was no time for, what is not to be trusted, and the command to run
    next.

    left_out: each as the beginning of a sentence.
    """
    device = "" if draft.profile.device.kind == "cuda" else f" --device {draft.profile.device.kind}"
    command = f"perfmodel calibrate{device} --output {shlex.quote(str(draft.path))}"
    failed = draft.failed()
    memory = [key for key, reason in failed.items() if reason == OUT_OF_MEMORY]
    found = _listed("ran out of memory", memory)
    found += _listed("not measured", [f"{key}: {reason}" for key, reason in failed.items() if reason != OUT_OF_MEMORY])
    found += [f"{what} left out for time. Go on with: {command} --resume" for what in left_out]
    found += drift.drift_lines(draft.profile)
    unstable = draft.unstable()
    found += _listed("unstable", [f"{command} --only {shlex.quote(key)}" for key in unstable])
    return found


def _listed(title: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    more = [f"  and {len(items) - LISTED} more, in the profile"] if len(items) > LISTED else []
    return [f"{title}: {len(items)}", *(f"  {item}" for item in items[:LISTED]), *more]
