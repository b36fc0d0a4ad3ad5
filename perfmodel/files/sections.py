"""The base class of what files hold: scenarios, profiles, measurements and what calibration keeps between runs."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A mapping of a file: its keys are known, its numbers are finite, and it never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
