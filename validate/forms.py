"""The forms of data parallelism that can be run for real, by strategy; torch is imported when one is made."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfmodel.scenario.scenario import Scenario
    from validate.data_parallel import Form

FORMS = {
    "naive": "validate.data_parallel:Naive",
    "flat": "validate.data_parallel:Flat",
    "overlap": "validate.data_parallel:Overlap",
    "ddp": "validate.data_parallel:Ddp",
    "zero1": "validate.sharded:zero1",
    "zero2": "validate.sharded:FullyShard",
    "zero3": "validate.sharded:FullyShard",
}


def make_form(scenario: Scenario) -> Form:
    """The form of ``parallelism.strategy``, one of :data:`FORMS`."""
    module, _, name = FORMS[scenario.parallelism.strategy].partition(":")
    form: Form = getattr(import_module(module), name)(scenario)
    return form
