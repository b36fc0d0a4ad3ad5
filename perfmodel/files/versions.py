"""The versions of perfmodel's own files: which can be read, and how older ones are brought up to date."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perfmodel.errors import PerfModelError

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]


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
