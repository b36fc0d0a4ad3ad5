"""What `perfmodel calibrate` says at its end."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from calibrate import sentinels
from calibrate.draft import Draft
from calibrate.measuring import OUT_OF_MEMORY
from perfmodel.units import format_seconds

LISTED = 20


def closing_report(draft: Draft, lines: Sequence[str], left_out: int, spent_s: float) -> list[str]:
    """What was measured, what could not be, what is unstable, and the command to run next."""
    command = f"perfmodel calibrate --output {shlex.quote(str(draft.path))}"
    origins = [record.origin for record in draft.kernels.values() if record.error is None]
    found = [
        f"{draft.path}: {origins.count('grid')} grid keys, {origins.count('scenario')} scenario keys,"
        f" {len(draft.profile.curves)} curves, {len(draft.profile.host)} host costs, in {format_seconds(spent_s)}",
        *lines,
    ]
    failed = draft.failed()
    memory = [key for key, reason in failed.items() if reason == OUT_OF_MEMORY]
    found += _listed("ran out of memory", memory)
    found += _listed("not measured", [f"{key}: {reason}" for key, reason in failed.items() if reason != OUT_OF_MEMORY])
    if left_out:
        found.append(f"{left_out} grid keys were left out for time. Go on with: {command} --resume")
    found += sentinels.drift_lines(draft.profile)
    unstable = draft.unstable()
    found += _listed("unstable", [f"{command} --only {shlex.quote(key)}" for key in unstable])
    return found


def _listed(title: str, items: Sequence[str]) -> list[str]:
    if not items:
        return []
    more = [f"  and {len(items) - LISTED} more, in the profile"] if len(items) > LISTED else []
    return [f"{title}: {len(items)}", *(f"  {item}" for item in items[:LISTED]), *more]
