"""The parameters of a fitted curve by the name of its form: the format of
:class:`~perfmodel.hardware.profile.CurveRecord`.

The forms themselves, as functions, are in :mod:`perfmodel.cost.kernels`; a test compares the two.

    memory_bytes_per_s                   one parameter for all calls
    elements_per_s [gelu 2]              the same for calls of one label
    correction length, sharing           constants of what is interpolated between the measured calls
    point 3 m, point 3 weight [TN, mm]   a measured call: its place by coordinate; its weight, with its labels
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

MOST_WEIGHT = 100.0  # of logarithms of time
WEIGHT = "weight"
CORRECTION = ("correction length", "correction sharing")


class FormLayout(NamedTuple):
    """Names of the parameters and of the coordinates of one form."""

    parameters: tuple[str, ...]
    coordinates: tuple[str, ...]


_MEMORY = ("start_s", "memory_bytes_per_s", "cache_bytes_per_s", "cache_bytes", "write_weight", "ramp_s")
_POINTWISE = (*_MEMORY, "elements_per_s", "slowness", "start_factor")
_TILED = (*_MEMORY, "flops_per_s", "small_tile", "epilogue_s", "split_s", "quantised")
LAYOUTS = {
    "pointwise": FormLayout(_POINTWISE, ("bytes", "elements")),
    "placed": FormLayout(_POINTWISE, ("bytes", "elements", "length")),
    "rows": FormLayout(
        (*_MEMORY, "elements_per_s", "passes", "row_s", "row_element_s", "resident"), ("rows", "length")
    ),
    "columns": FormLayout((*_MEMORY, "elements_per_s", "step_s", "joining_s"), ("rows", "length")),
    "full_reduction": FormLayout((*_MEMORY, "elements_per_s", "step_s", "joining_s", "slowness"), ("rows", "length")),
    "scatter": FormLayout(
        (*_MEMORY, "token_s", "missed_token_s", "sort_s", "sorted_token_s", "sorted_element_s"),
        ("tokens", "length", "table_bytes"),
    ),
    "lists": FormLayout((*_MEMORY, "launch_s", "chunk_s", "slowness", "quantised"), ("bytes", "chunks", "launches")),
    "gemm": FormLayout((*_TILED, "layout", "alignment", "operator", "precision"), ("m", "n", "k", "batch")),
    "convolution": FormLayout(
        (*_TILED, "layer", "part_s", "rearranging"), ("rows", "channels", "out_channels", "window")
    ),
    "attention": FormLayout(
        (*_MEMORY, "flops_per_s", "epilogue_s", "score_s", "quantised", "resident", "dropout"),
        ("sequences", "keys", "head_size"),
    ),
}


def broken_rule(
    form: str, parameters: Mapping[str, float], ranges: Mapping[str, tuple[float, float]] | None = None
) -> str | None:
    """Return what a curve of a known form lacks or has too much; None if it is whole.

    >>> broken_rule("rows", {})
    'that holds start_s'
    """
    layout = LAYOUTS[form]
    absent = next((name for name in layout.parameters if name not in parameters), None)
    if absent is not None:
        return f"that holds {absent}"
    for name, (least, most) in (ranges or {}).items():
        if name not in layout.coordinates or least > most:
            return f"with ascending ranges of {', '.join(layout.coordinates)}, not of {name!r:.40}"
    points: dict[str, set[str]] = {}
    for key, value in parameters.items():
        name = key.partition(" [")[0]
        if name in layout.parameters:
            rule = None if value > 0 else f"with {key} above 0, not {value:g}"
        else:
            rule = _broken_rule_of_point(key, value, layout, points)
        if rule is not None:
            return rule
    return _broken_rule_of_points(points, parameters, layout)


def _broken_rule_of_point(key: str, value: float, layout: FormLayout, points: dict[str, set[str]]) -> str | None:
    """Return the same for what is not a parameter; a measured call is noted among ``points``."""
    if key in CORRECTION:
        return None if value > 0 else f"with {key} above 0, not {value:g}"
    word, _, rest = key.partition(" [")[0].partition(" ")
    number, _, what = rest.partition(" ")
    if word != "point" or not number.isdecimal() or what not in (*layout.coordinates, WEIGHT):
        return f"of parameters that its form takes, not {key!r:.60}"
    points.setdefault(number, set()).add(what)
    return None if abs(value) <= MOST_WEIGHT else f"with {key} from -{MOST_WEIGHT:g} to {MOST_WEIGHT:g}, not {value:g}"


def _broken_rule_of_points(
    points: dict[str, set[str]], parameters: Mapping[str, float], layout: FormLayout
) -> str | None:
    wanted = {*layout.coordinates, WEIGHT}
    for number, known in points.items():
        if known != wanted:
            return f"that holds {', '.join(sorted(wanted - known))} of point {number}"
    lacking = [name for name in CORRECTION if points and name not in parameters]
    return f"that holds {lacking[0]}" if lacking else None
