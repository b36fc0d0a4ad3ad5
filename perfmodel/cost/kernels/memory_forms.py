"""Forms of kernels limited by memory, by their threads' instructions, or by having too few rows to fill the chip."""

from __future__ import annotations

import numpy as np

from perfmodel.cost.kernels.forms import (
    Array,
    Form,
    Numbers,
    Parameter,
    Values,
    memory_parameters,
    memory_starts,
    soft_maximum,
    transfer_s,
)  # fmt: skip
from perfmodel.cost.kernels.torch_kernels import EMBEDDING_ROWS_WITHOUT_SORT


def pointwise_time_s(numbers: Numbers, values: Values) -> Array:
    """t = start + slowness x softmax(transfer(bytes), elements / rate); start and slowness vary a little by operator.

    The second limit is instructions: index arithmetic of strided access, casts, transcendental functions.
    """
    moving = transfer_s(numbers, values)
    working = soft_maximum(moving, numbers["elements"] / values["elements_per_s"])
    return np.asarray(values["start_s"] * values["start_factor"] + values["slowness"] * working)


def _pointwise_starts(numbers: Numbers, time_s: Array) -> dict[str, float]:
    rate = float(np.max(numbers["elements"] / time_s))
    return {**memory_starts(numbers, time_s), "elements_per_s": 2 * rate, "slowness": 1.0, "start_factor": 1.0}


def rows_time_s(numbers: Numbers, values: Values) -> Array:
    """t = start + softmax(passes x transfer(bytes), elements / rate, turns x (row + length x element)).

    turns = max(1, rows / (resident multiprocessors)): one row's own latency shows while there are few rows, and where a
    block does one row and few blocks fit. Affine in rows at fixed length.
    """
    moving = transfer_s(numbers, values) * values["passes"]
    turns = np.maximum(1.0, numbers["rows"] / (numbers["multiprocessors"] * values["resident"]))
    walking = turns * (values["row_s"] + numbers["length"] * values["row_element_s"])
    return np.asarray(values["start_s"] + soft_maximum(moving, numbers["elements"] / values["elements_per_s"], walking))


def _rows_starts(numbers: Numbers, time_s: Array) -> dict[str, float]:
    least = float(np.min(time_s))
    longest = float(np.max(numbers["length"]))
    walking = {"row_s": 0.2 * least, "row_element_s": 0.5 * least / longest, "resident": 4.0, "passes": 1.0}
    return {
        **memory_starts(numbers, time_s),
        "elements_per_s": 2 * float(np.max(numbers["elements"] / time_s)),
        **walking,
    }


def columns_time_s(numbers: Numbers, values: Values) -> Array:
    """t = start + softmax(transfer(bytes), elements / rate, values x step) [+ joining].

    values: what one thread adds up, one after the other. joining: where several blocks share a column, the last of them
    adds up their results.
    """
    moving = transfer_s(numbers, values)
    walking = numbers["values"] * values["step_s"]
    joining = np.where(numbers["groups"] > 1, values["joining_s"], 0.0)
    working = soft_maximum(moving, numbers["elements"] / values["elements_per_s"], walking)
    return np.asarray(values["start_s"] + working + joining)


def _columns_starts(numbers: Numbers, time_s: Array) -> dict[str, float]:
    least = float(np.min(time_s))
    rate = 2 * float(np.max(numbers["elements"] / time_s))
    return {**memory_starts(numbers, time_s), "elements_per_s": rate, "joining_s": least, "step_s": least / 100}


def full_reductions_time_s(numbers: Numbers, values: Values) -> Array:
    """Return :func:`columns_time_s` with a slowness of the operator: t = start + slowness x softmax(...) [+ joining].

    Threads of all blocks read the tensor once and reduce what they read; where several blocks share a result, each
    leaves its own in memory, and the last to do so reduces these (two passes, and a counter to be cleared before).
    """
    moving = transfer_s(numbers, values)
    walking = numbers["values"] * values["step_s"]
    working = soft_maximum(moving, numbers["elements"] / values["elements_per_s"], walking) * values["slowness"]
    return np.asarray(values["start_s"] + working + np.where(numbers["groups"] > 1, values["joining_s"], 0.0))


def _full_reductions_starts(numbers: Numbers, time_s: Array) -> dict[str, float]:
    return {**_columns_starts(numbers, time_s), "slowness": 1.0}


def scatter_time_s(numbers: Numbers, values: Values) -> Array:
    """Gradient of a table: t = start + transfer(bytes) + walking.

    walking = tokens x (token + missed) up to 3072 tokens, which one kernel walks over, waiting longer for each where
    the table is not in the cache; beyond, sort + tokens x (token' + length x element').
    """
    moving = transfer_s(numbers, values)
    missed = 1 - 1 / (1 + (numbers["table_bytes"] / values["cache_bytes"]) ** 4)
    few = numbers["tokens"] * (values["token_s"] + missed * values["missed_token_s"])
    many = numbers["tokens"] * (values["sorted_token_s"] + numbers["length"] * values["sorted_element_s"])
    walking = np.where(numbers["tokens"] > EMBEDDING_ROWS_WITHOUT_SORT, values["sort_s"] + many, few)
    return np.asarray(values["start_s"] + moving + walking)


def _scatter_starts(numbers: Numbers, time_s: Array) -> dict[str, float]:
    token_s = float(np.max(time_s)) / float(np.max(numbers["tokens"])) / 4
    each = {"token_s": token_s, "missed_token_s": token_s / 2, "sorted_token_s": token_s}
    sorted_element_s = token_s / float(np.max(numbers["length"]))
    rest = {"sorted_element_s": sorted_element_s, "sort_s": float(np.median(time_s)) / 2}
    return {**memory_starts(numbers, time_s), **each, **rest}


def lists_time_s(numbers: Numbers, values: Values) -> Array:
    """Operators on lists: t = start + (launches - 1) launch + chunks x chunk + slowness x unevenness x transfer(bytes).

    Every launch takes tensors until its argument buffer is full; each 65536-element chunk of a tensor is one block.
    unevenness: to the share ``quantised`` the blocks of a launch take whole turns on the multiprocessors.
    """
    whole = np.minimum(values["quantised"], 1.0)
    moving = transfer_s(numbers, values) * (1 - whole + whole * np.maximum(numbers["padding"], 1.0))
    small = numbers["padding"] > MOST_PADDING
    moving = np.where(small, transfer_s(numbers, values), moving) * values["slowness"]
    chunks = numbers["chunks"] / numbers["multiprocessors"] * values["chunk_s"]
    return np.asarray(values["start_s"] + (numbers["launches"] - 1) * values["launch_s"] + chunks + moving)


MOST_PADDING = 4.0  # beyond it lists are too small for turns to matter


def _lists_starts(numbers: Numbers, time_s: Array) -> dict[str, float]:
    least = float(np.min(time_s))
    rest = {"launch_s": 0.9 * least, "chunk_s": 0.1 * least, "slowness": 1.0, "quantised": 0.7}
    return {**memory_starts(numbers, time_s), **rest}


_RATE = Parameter("elements_per_s", prior=1.5, labelled="path", label_prior=0.4)

_POINTWISE_PARAMETERS = (
    Parameter("start_s", 1.0, "access", 0.4),
    *memory_parameters("access")[1:],
    _RATE,
    Parameter("slowness", 0.02, "operator", 0.1),
    Parameter("start_factor", 0.02, "operator", 0.1),
)
POINTWISE = Form(
    "pointwise",
    _POINTWISE_PARAMETERS,
    pointwise_time_s,
    _pointwise_starts,
    ("bytes", "elements"),
    ("path", "operator"),
)
PLACED = Form(
    "placed",
    _POINTWISE_PARAMETERS,
    pointwise_time_s,
    _pointwise_starts,
    ("bytes", "elements", "length"),
    ("path",),
)
ROWS = Form(
    "rows",
    (
        Parameter("start_s", 1.0, "path", 0.1),
        *memory_parameters()[1:],
        _RATE,
        Parameter("passes", 0.02, "kernel", 0.4),
        Parameter("row_s", 1.0, "path", 0.5),
        Parameter("row_element_s", 1.0, "path", 0.5),
        Parameter("resident", 0.7, "path", 0.5),
    ),
    rows_time_s,
    _rows_starts,
    ("rows", "length"),
    ("path",),
)
COLUMNS = Form(
    "columns",
    (*memory_parameters(), _RATE, Parameter("step_s", 1.0, "path", 0.3), Parameter("joining_s", 1.0)),
    columns_time_s,
    _columns_starts,
    ("rows", "length"),
    ("path",),
)
FULL_REDUCTIONS = Form(
    "full_reduction",
    (
        *memory_parameters(),
        Parameter("elements_per_s", 1.5, "path", 0.8),
        Parameter("step_s", 1.0, "path", 0.5),
        Parameter("joining_s", 1.0),
        Parameter("slowness", 0.02, "operator", 0.7),
    ),
    full_reductions_time_s,
    _full_reductions_starts,
    ("rows", "length"),
    ("path", "operator"),
)
SCATTER = Form(
    "scatter",
    (
        *memory_parameters(),
        Parameter("token_s", 1.0, "path", 0.3),
        Parameter("missed_token_s", 1.0),
        Parameter("sort_s", 1.0),
        Parameter("sorted_token_s", 1.0),
        Parameter("sorted_element_s", 1.0),
    ),
    scatter_time_s,
    _scatter_starts,
    ("tokens", "length", "table_bytes"),
    ("path",),
)
LISTS = Form(
    "lists",
    (
        *memory_parameters(),
        Parameter("launch_s", 0.7),
        Parameter("chunk_s", 1.0),
        Parameter("slowness", 0.02, "path", 0.2),
        Parameter("quantised", 0.3),
    ),
    lists_time_s,
    _lists_starts,
    ("bytes", "chunks", "launches"),
    ("path",),
)
