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
    return {**memory_starts(numbers, time_s), "elements_per_s": 2 * float(np.max(numbers["elements"] / time_s)), **walking}


def columns_time_s(numbers: Numbers, values: Values) -> Array:
    """t = start + softmax(transfer(bytes), elements / rate, depth x step): threads walk down ``depth`` rows each.

    depth = rows over the number of row groups that columns leave room for on the chip.
    """
    moving = transfer_s(numbers, values)
    groups = np.clip(values["lanes"] * numbers["multiprocessors"] / numbers["length"], 1.0, numbers["rows"])
    walking = numbers["rows"] / groups * values["row_s"]
    return np.asarray(values["start_s"] + soft_maximum(moving, numbers["elements"] / values["elements_per_s"], walking))


def _columns_starts(numbers: Numbers, time_s: Array) -> dict[str, float]:
    least = float(np.min(time_s))
    deepest = float(np.max(numbers["rows"]))
    return {**_pointwise_starts(numbers, time_s), "lanes": 256.0, "row_s": 10 * least / deepest}


def scatter_time_s(numbers: Numbers, values: Values) -> Array:
    """Gradient of a table: t = start + transfer(bytes) + tokens x (token + length x element) [+ sort].

    Up to 3072 tokens one kernel walks over all of them for each slice of columns; beyond, they are sorted first, and a
    token's and an element's share are others.
    """
    moving = transfer_s(numbers, values)
    walking = values["token_s"] + numbers["length"] * values["element_s"]
    sorted_walking = values["sorted_token_s"] + numbers["length"] * values["sorted_element_s"]
    many = values["sort_s"] + numbers["tokens"] * sorted_walking
    return np.asarray(values["start_s"] + moving + np.where(numbers["tokens"] > FEW_TOKENS, many, numbers["tokens"] * walking))


FEW_TOKENS = 3072  # embedding_dense_backward in ATen/native/cuda/Embedding.cu


def _scatter_starts(numbers: Numbers, time_s: Array) -> dict[str, float]:
    token_s = float(np.max(time_s)) / float(np.max(numbers["tokens"])) / 4
    element_s = token_s / float(np.max(numbers["length"]))
    each = {"token_s": token_s, "element_s": element_s, "sorted_token_s": token_s, "sorted_element_s": element_s}
    return {**memory_starts(numbers, time_s), **each, "sort_s": float(np.median(time_s)) / 2}


def lists_time_s(numbers: Numbers, values: Values) -> Array:
    """Operators on lists of tensors: t = start + launches x launch + softmax(transfer(bytes), chunks / slots x chunk).

    Every launch takes tensors until its argument buffer is full; each 65536-element chunk of a tensor is one block.
    """
    moving = transfer_s(numbers, values) * values["slowness"]
    turns = np.maximum(1.0, numbers["chunks"] / numbers["multiprocessors"])
    started = values["start_s"] + (numbers["launches"] - 1) * values["launch_s"]
    return np.asarray(started + soft_maximum(moving, turns * values["chunk_s"]))


def _lists_starts(numbers: Numbers, time_s: Array) -> dict[str, float]:
    least = float(np.min(time_s))
    return {**memory_starts(numbers, time_s), "launch_s": 0.7 * least, "chunk_s": 0.3 * least, "slowness": 1.0}


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
    (*memory_parameters(), _RATE, Parameter("lanes", 1.0), Parameter("row_s", 1.5)),
    columns_time_s,
    _columns_starts,
    ("rows", "length"),
    ("path",),
)
SCATTER = Form(
    "scatter",
    (
        *memory_parameters(),
        Parameter("sort_s", 1.0),
        Parameter("token_s", 1.0),
        Parameter("element_s", 1.0),
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
    ),
    lists_time_s,
    _lists_starts,
)
