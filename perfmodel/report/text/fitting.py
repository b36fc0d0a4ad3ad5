"""Sentences on settings with which a step would fit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING

from perfmodel.prediction.sweep import label
from perfmodel.units import format_bytes

if TYPE_CHECKING:
    from perfmodel.prediction.fitting import Fitting


def fitting_lines(fitting: Fitting, ask: Callable[[dict[str, list[str]]], str]) -> list[str]:
    """Write a line for each setting that was tried, or that would have to be.

    Parameters
    ----------
    fitting : Fitting
        What is known about such settings.
    ask : callable
        Returns the command that finds out whether values, given by key, fit.
    """
    lines = []
    if fitting.is_fixed_too_much:
        fixed = f"{format_bytes(fitting.fixed_bytes)} of {format_bytes(fitting.capacity_bytes)}"
        lines.append(f"no smaller batch and no checkpointing alone: {fixed} are needed apart from activations")
    for _, alike in groupby(fitting.remedies, key=lambda each: list(each.values)):
        remedies = list(alike)
        for each in remedies:
            if each.fits is not None and each.needed_bytes is not None:
                verdict = "fits" if each.fits else "does not fit"
                lines.append(f"{label(each.values)} {verdict}: needs {format_bytes(each.needed_bytes)}")
        unknown = [each.values for each in remedies if each.fits is None]
        if unknown:
            values = {key: list(dict.fromkeys(str(each[key]) for each in unknown)) for key in unknown[0]}
            shown = ", ".join(f"{key} {' or '.join(several)}" for key, several in values.items())
            lines.append(f"{shown}: ask `{ask(values)}`")
    return lines
