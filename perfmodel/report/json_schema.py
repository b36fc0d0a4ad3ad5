"""`perfmodel schema`: the JSON Schemas of perfmodel's three kinds of file."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from perfmodel.errors import PerfModelError, did_you_mean
from perfmodel.hardware.measurement import Measurement
from perfmodel.hardware.profile import Profile
from perfmodel.scenario.scenario import Scenario

MODELS: dict[str, type[BaseModel]] = {"scenario": Scenario, "profile": Profile, "measurement": Measurement}


def json_schema(kind: str) -> dict[str, Any]:
    """The JSON Schema of a ``scenario``, ``profile`` or ``measurement`` file.

    Raises
    ------
    PerfModelError
        If there is no such kind.
    """
    if kind not in MODELS:
        raise PerfModelError(
            f"schema must be of a scenario, profile or measurement (got {kind!r}). {did_you_mean(kind, MODELS)}"
        )
    return MODELS[kind].model_json_schema()
