"""The slices of a Chrome trace that tell of operators and kernels, each checked before anything is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perfmodel.errors import PerfModelError
from perfmodel.files.validation import shortened

REMEDY = "Export one with torch.profiler's export_chrome_trace."
LAUNCHES = {"cuda_runtime", "cuda_driver"}
DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
CALLS, ANNOTATIONS = {"cpu_op"}, {"user_annotation"}
USED = LAUNCHES | DEVICE_WORK | CALLS | ANNOTATIONS
MOST_US = 1e18  # of a clock that began in 1970 and counts nanoseconds

Event = dict[str, Any]


def checked_slices(path: Path, data: Any) -> list[Event]:
    """Complete events (``"ph": "X"``) of the categories that are made use of.

    Parameters
    ----------
    path : Path
        The file, to begin sentences with.
    data : Any
        What it holds: an object with a list ``traceEvents``, or that list.

    Raises
    ------
    PerfModelError
        If there is no such list, or such an event has a time that is no number, or names that are none; the sentence
        says which.
    """
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise PerfModelError(f"{path}: a profiler trace must hold a list traceEvents (got none). {REMEDY}")
    found = []
    for number, event in enumerate(events):
        if isinstance(event, dict) and _is_used(event):
            wrong = _broken_rule(event)
            if wrong is not None:
                raise PerfModelError(f"{path}: traceEvents[{number}].{wrong}. {REMEDY}")
            found.append(event)
    return found


def _is_used(event: Event) -> bool:
    category = event.get("cat")
    return (
        event.get("ph") == "X" and isinstance(category, str) and category in USED and "ts" in event and "dur" in event
    )


def _broken_rule(event: Event) -> str | None:
    """Return what is wrong with an event, beginning with its key; None if nothing is."""
    for key in ("ts", "dur"):
        value = event[key]
        if type(value) not in (int, float) or not abs(value) <= MOST_US:
            return f"{key} must be a number up to {MOST_US:g} (got {shortened(value)})"
    if event["dur"] < 0:
        return f"dur must be at least 0 (got {event['dur']:g})"
    arguments = event.get("args", {})
    if not isinstance(arguments, dict):
        return f"args must be a mapping (got {shortened(arguments)})"
    named = (("name", event.get("name", "")), ("pid", event.get("pid", 0)), ("tid", event.get("tid", 0)))
    for key, value in (*named, ("args.correlation", arguments.get("correlation", 0))):
        if not isinstance(value, (str, int)):
            return f"{key} must be text or a whole number (got {shortened(value)})"
    return None
