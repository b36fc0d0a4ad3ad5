"""The forms of data parallelism that can be run for real, by strategy; torch is imported when one is made."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfmodel.scenario.scenario import Scenario
    from validate.strategies.data_parallel import Form

FORMS = {
    "naive": "validate.strategies.data_parallel:Naive",
    "flat": "validate.strategies.data_parallel:Flat",
    "overlap": "validate.strategies.data_parallel:Overlap",
    "ddp": "validate.strategies.data_parallel:Ddp",
    "zero1": "validate.strategies.fsdp:zero1",
    "zero2": "validate.strategies.fsdp:FullyShard",
    "zero3": "validate.strategies.fsdp:FullyShard",
}


def make_form(scenario: Scenario) -> Form:
    """Return the form of ``parallelism.strategy``, one of :data:`FORMS`."""
    module, _, name = FORMS[scenario.parallelism.strategy].partition(":")
    form: Form = getattr(import_module(module), name)(scenario)
    return form
