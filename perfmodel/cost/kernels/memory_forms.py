"""Forms of kernels limited by memory, by their threads' instructions, or by having too few rows to fill the chip."""

from __future__ import annotations

import numpy as np

from perfmodel.cost.kernels.forms import (
    MEMORY_PARAMETERS,
    Array,
    Form,
    Numbers,
    Parameter,
    Values,
    memory_starts,
    soft_maximum,
    transfer_s,
)  # fmt: skip


def pointwise_time_s(numbers: Numbers, values: Values) -> Array:
    """t = start + slowness x softmax(transfer(bytes), elements / rate); start and slowness vary a little by operator.

    The second limit is instructions: index arithmetic of strided access, casts, transcendental functions.
    """
    moving = transfer_s(numbers["bytes"], numbers["bytes"], values)
    working = soft_maximum(moving, numbers["elements"] / values["elements_per_s"])
    return np.asarray(values["start_s"] + values["slowness"] * working)


def _pointwise_starts(numbers: Numbers, time_s: Array) -> dict[str, float]:
    rate = float(np.max(numbers["elements"] / time_s))
    return {**memory_starts(numbers, time_s), "elements_per_s": 2 * rate, "slowness": 1.0}


def rows_time_s(numbers: Numbers, values: Values) -> Array:
    """t = start + softmax(transfer(passes x bytes), elements / rate, turns (row + length x element)).

    turns = max(1, rows / multiprocessors).
    The third limit is one row's own latency, which shows while there are few rows. Affine in rows at fixed length.
    """
    moving = transfer_s(numbers["bytes"] * values["passes"], numbers["bytes"], values)
    turns = np.maximum(1.0, numbers["rows"] / numbers["multiprocessors"])
    walking = turns * (values["row_s"] + numbers["length"] * values["row_element_s"])
    return np.asarray(values["start_s"] + soft_maximum(moving, numbers["elements"] / values["elements_per_s"], walking))


def _rows_starts(numbers: Numbers, time_s: Array) -> dict[str, float]:
    least = float(np.min(time_s))
    longest = float(np.max(numbers["length"]))
    return {
        **_pointwise_starts(numbers, time_s),
        "passes": 1.0,
        "row_s": 0.05 * least,
        "row_element_s": 0.2 * least / longest,
    }


def columns_time_s(numbers: Numbers, values: Values) -> Array:
    """t = start + softmax(transfer(bytes), elements / rate, depth x step): threads walk down ``depth`` rows each.

    depth = rows over the number of row groups that columns leave room for on the chip.
    """
    moving = transfer_s(numbers["bytes"], numbers["bytes"], values)
    groups = np.clip(values["lanes"] * numbers["multiprocessors"] / numbers["length"], 1.0, numbers["rows"])
    walking = numbers["rows"] / groups * values["row_s"]
    return np.asarray(values["start_s"] + soft_maximum(moving, numbers["elements"] / values["elements_per_s"], walking))


def _columns_starts(numbers: Numbers, time_s: Array) -> dict[str, float]:
    least = float(np.min(time_s))
    deepest = float(np.max(numbers["rows"]))
    return {**_pointwise_starts(numbers, time_s), "lanes": 256.0, "row_s": 10 * least / deepest}


def scatter_time_s(numbers: Numbers, values: Values) -> Array:
    """Gradient of a table: t = start + table / B + few: tokens x token, many: sort + tokens x sorted + transfer(rows).

    Up to 3072 tokens one kernel walks over all of them for each slice of columns; beyond, they are sorted first.
    """
    clearing = transfer_s(numbers["table_bytes"], numbers["table_bytes"], values)
    moving = transfer_s(numbers["bytes"] - numbers["table_bytes"], numbers["bytes"], values)
    many = values["sort_s"] + numbers["tokens"] * values["sorted_token_s"] + moving
    few = numbers["tokens"] * values["token_s"] + moving
    return np.asarray(values["start_s"] + clearing + np.where(numbers["tokens"] > FEW_TOKENS, many, few))


FEW_TOKENS = 3072  # embedding_dense_backward in ATen/native/cuda/Embedding.cu


def _scatter_starts(numbers: Numbers, time_s: Array) -> dict[str, float]:
    least = float(np.min(time_s))
    most = float(np.max(numbers["tokens"]))
    tokens = {"sort_s": 5 * least, "sorted_token_s": least / most, "token_s": 5 * least / most}
    return {**memory_starts(numbers, time_s), **tokens}


def lists_time_s(numbers: Numbers, values: Values) -> Array:
    """Operators on lists of tensors: t = start + launches x launch + softmax(transfer(bytes), chunks / slots x chunk).

    Every launch takes tensors until its argument buffer is full; each 65536-element chunk of a tensor is one block.
    """
    moving = transfer_s(numbers["bytes"], numbers["bytes"], values) * values["slowness"]
    turns = np.maximum(1.0, numbers["chunks"] / numbers["multiprocessors"])
    started = values["start_s"] + (numbers["launches"] - 1) * values["launch_s"]
    return np.asarray(started + soft_maximum(moving, turns * values["chunk_s"]))


def _lists_starts(numbers: Numbers, time_s: Array) -> dict[str, float]:
    least = float(np.min(time_s))
    return {**memory_starts(numbers, time_s), "launch_s": 0.7 * least, "chunk_s": 0.3 * least, "slowness": 1.0}


_RATE = Parameter("elements_per_s", prior=1.5, labelled="path", label_prior=0.7)

_POINTWISE_PARAMETERS = (
    Parameter("start_s", 1.0, "operator", 0.3),
    *MEMORY_PARAMETERS[1:],
    _RATE,
    Parameter("slowness", 0.02, "operator", 0.2),
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
    (*MEMORY_PARAMETERS, _RATE, Parameter("passes", 0.3), Parameter("row_s", 1.5), Parameter("row_element_s", 1.5)),
    rows_time_s,
    _rows_starts,
    ("rows", "length"),
    ("path",),
)
COLUMNS = Form(
    "columns",
    (*MEMORY_PARAMETERS, _RATE, Parameter("lanes", 1.0), Parameter("row_s", 1.5)),
    columns_time_s,
    _columns_starts,
    ("rows", "length"),
    ("path",),
)
SCATTER = Form(
    "scatter",
    (*MEMORY_PARAMETERS, Parameter("sort_s", 1.0), Parameter("sorted_token_s", 2.0), Parameter("token_s", 2.0)),
    scatter_time_s,
    _scatter_starts,
)
LISTS = Form(
    "lists",
    (
        *MEMORY_PARAMETERS,
        Parameter("launch_s", 0.7),
        Parameter("chunk_s", 1.0),
        Parameter("slowness", 0.02, "path", 0.2),
    ),
    lists_time_s,
    _lists_starts,
)
