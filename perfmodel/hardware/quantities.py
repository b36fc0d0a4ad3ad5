"""Ranges of the numbers in measured files: finite, and wider than any machine's.

They keep out what is damaged (a NaN, a negative time, a size of 10^40) and what arithmetic cannot carry through a
prediction.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from perfmodel.units import LEAST_S

MOST_S = 1e6
LEAST_DIFFERENCE_S = -0.01
MOST_BYTES = 2**60
MOST_COUNT = 10**9
# Of provenance, which else may hold anything: what is a mapping, and what a mapping of mappings.
MAPPINGS = ("interconnects_s", "launch", "nvidia_smi", "sentinels_s", "set", "stages_s")
OF_MAPPINGS = ("interconnects_s", "sentinels_s")


def _as_it_is_used(provenance: dict[str, Any]) -> dict[str, Any]:
    for name in MAPPINGS:
        found = provenance.get(name, {})
        inner = found.values() if isinstance(found, dict) and name in OF_MAPPINGS else ()
        if not all(isinstance(each, dict) for each in (found, *inner)):
            of = " of mappings" if name in OF_MAPPINGS else ""
            raise PydanticCustomError("provenance", f"Input should be with a mapping{of} under {name}")
    if not isinstance(provenance.get("imported", []), list):
        raise PydanticCustomError("provenance", "Input should be with a list under imported")
    return provenance


Provenance = Annotated[dict[str, Any], AfterValidator(_as_it_is_used)]


def _of_a_clock(value_s: float) -> float:
    if value_s < LEAST_S:
        raise PydanticCustomError("seconds", f"Input should be no shorter than {LEAST_S:g} s")
    return value_s


Seconds = Annotated[float, Field(gt=0, le=MOST_S), AfterValidator(_of_a_clock)]
NotNegativeSeconds = Annotated[float, Field(ge=0, le=MOST_S)]
# One measured time less another, which noise may leave a little negative.
DifferenceSeconds = Annotated[float, Field(ge=LEAST_DIFFERENCE_S, le=MOST_S)]
SecondsPerByte = Annotated[float, Field(ge=0, le=MOST_S)]
Bytes = Annotated[int, Field(ge=0, le=MOST_BYTES)]
PositiveBytes = Annotated[int, Field(ge=1, le=MOST_BYTES)]
FittedBytes = Annotated[float, Field(ge=1, le=MOST_BYTES)]
Flops = Annotated[float, Field(ge=1, le=1e21)]
PerSecond = Annotated[float, Field(ge=1, le=1e21)]  # bytes, FLOPs or clock cycles
Watts = Annotated[float, Field(ge=0, le=MOST_COUNT)]
Coordinate = Annotated[float, Field(ge=0, le=1e30)]  # of a call among those a curve was fitted on
Spread = Annotated[float, Field(ge=0, le=MOST_COUNT)]  # relative
Share = Annotated[float, Field(ge=0, le=1)]
Factor = Annotated[float, Field(ge=1e-6, le=1e6)]
Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]
PositiveCount = Annotated[int, Field(ge=1, le=MOST_COUNT)]


def is_count(text: str, least: int = 1, most: int = MOST_COUNT) -> bool:
    """Return whether a text is a whole number of that range, in digits."""
    return text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and least <= int(text) <= most
