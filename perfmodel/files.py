"""Reading of perfmodel's own files: versioned, and never executing what they hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perfmodel.errors import PerfModelError

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]


def read_json(path: Path, what: str, remedy: str) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises
    ------
    PerfModelError
        If it cannot be read, is not whole JSON, or is not an object; the sentence ends with ``remedy``.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise PerfModelError(f"{path}: {what} must be a readable file ({error.strerror}). {remedy}") from error
    except ValueError as error:
        raise PerfModelError(f"{path}: {what} must be whole JSON ({error}). {remedy}") from error
    if not isinstance(data, dict):
        raise PerfModelError(f"{path}: {what} must be a JSON object (got {type(data).__name__}). {remedy}")
    return data


def check_version(path: Path, data: Mapping[str, Any], current: int, remedy: str) -> int:
    """The file's version; refuses files without one and files from a newer perfmodel."""
    version = data.get("version") if isinstance(data, Mapping) else None
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise PerfModelError(f"{path}: version must be an integer from 1 to {current} (got {version!r}). {remedy}")
    if version > current:
        raise PerfModelError(f"{path}: version must be at most {current} (got {version}). Update perfmodel to read it.")
    return version


def upgrade(
    path: Path, data: dict[str, Any], current: int, upgrades: Mapping[int, Upgrade], remedy: str
) -> dict[str, Any]:
    """Bring ``data`` to version ``current``: ``upgrades[n]`` turns version n-1 into n."""
    for version in range(check_version(path, data, current, remedy) + 1, current + 1):
        data = upgrades[version](data) | {"version": version}
    return data
