"""Sentences on settings with which a step would fit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING

from perfmodel.prediction.fitting import ACCUMULATION
from perfmodel.prediction.sweep_result import label
from perfmodel.units import format_bytes

if TYPE_CHECKING:
    from perfmodel.prediction.fitting import Fitting, Remedy, SettingValues

NONE_FITS = "none of what was tried fits"
NONE_TRACED_FITS = "none of what is traced fits"


def fitting_lines(fitting: Fitting, ask: Callable[[dict[str, list[str]]], str]) -> list[str]:
    """Write a line for each setting that was tried, or that would have to be.

    Parameters
    ----------
    fitting : Fitting
        Settings that were tried.
    ask : callable
        Gives the command that tells whether these values, by key, fit.
    """
    fit = [each for each in fitting.remedies if each.fits]
    untraced = [each.values for each in fitting.remedies if each.fits is None]
    refused = [each for each in fitting.remedies if each.fits is False]
    lines = []
    if fitting.is_fixed_too_much:
        fixed = f"{format_bytes(fitting.fixed_bytes)} of {format_bytes(fitting.capacity_bytes)}"
        lines.append(f"no smaller batch and no checkpointing alone: {fixed} are needed apart from activations")
    if not fit and (refused or not untraced):
        lines.append(NONE_TRACED_FITS if untraced else NONE_FITS)
    lines += [f"{label(each.values)} fits: {_bytes(each)} in use" for each in fit]
    for _, group in groupby(untraced, key=list):
        asked = _values_asked(list(group))
        shown = ", ".join(f"{key} {' or '.join(several)}" for key, several in asked.items())
        lines.append(f"{shown} is not yet traced: ask `{ask(asked)}`")
    return lines + [f"{label(each.values)} does not fit: needs at least {_bytes(each)}" for each in refused]


def _values_asked(settings: list[SettingValues]) -> dict[str, list[str]]:
    """Return by key what one sweep asks; of keys that change together the first values alone, as it varies each."""
    if ACCUMULATION in settings[0]:
        settings = settings[:1]
    return {key: list(dict.fromkeys(str(each[key]) for each in settings)) for key in settings[0]}


def _bytes(remedy: Remedy) -> str:
    assert remedy.needed_bytes is not None
    return format_bytes(remedy.needed_bytes)
