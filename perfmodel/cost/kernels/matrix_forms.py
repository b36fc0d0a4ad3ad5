"""Forms of GEMMs, convolutions and attention: tiles in waves over the multiprocessors."""

from __future__ import annotations

import numpy as np

from perfmodel.cost.kernels.forms import (
    Array,
    Form,
    Numbers,
    Parameter,
    Values,
    memory_parameters,
    soft_maximum,
    transfer_s,
)  # fmt: skip

# Tiles that libraries choose from (rows, columns of the product) and into how many parts they split the depth. Tensor
# cores' kernels come in many sizes; the others only in powers of two.
_SIDES = {"whole": (32, 64, 128, 256), "fine": (16, 32, 64, 96, 128, 192, 256)}
_LEAST_AREA, _MOST_AREA = 1024, 32768
SPLITS = (1, 2, 3, 4, 6, 8, 16, 32)


def _options(sides: tuple[int, ...]) -> tuple[Array, Array, Array]:
    pairs = [(rows, columns) for rows in sides for columns in sides if _LEAST_AREA <= rows * columns <= _MOST_AREA]
    options = [(rows, columns, split) for rows, columns in pairs for split in SPLITS]
    tile_rows, tile_columns, split = (np.array(option, dtype=np.float64) for option in zip(*options, strict=True))
    return tile_rows, tile_columns, split


OPTIONS = {name: _options(sides) for name, sides in _SIDES.items()}
SHORTEST_PART = 64  # steps of depth below which no library splits further


def tiled_time_s(
    values: Values, batch: Array, m: Array, n: Array, k: Array, multiprocessors: Array, fine: bool = True
) -> Array:
    """The fastest of the known tilings; no memory limit, no start.

    t = waves (k/s tm tn 2 (1 + a (1/tm + 1/tn)) / R + e tm tn) + splitting, minimised over tile (tm, tn) and split s.
    R: FLOP/s of one multiprocessor at its best; a: how much small tiles lose; e: prologue and epilogue. The waves of
    tiles over multiprocessors are whole ones in the share ``quantised`` and fractional in the rest (persistent kernels,
    several tiles resident at once).
    """
    column = np.newaxis
    tm, tn, split = OPTIONS["fine" if fine else "whole"]
    tiles = batch[:, column] * np.ceil(m[:, column] / tm) * np.ceil(n[:, column] / tn) * split
    turns = tiles / multiprocessors[:, column]
    whole = np.minimum(values["quantised"], 1.0)[:, column]
    waves = whole * np.ceil(turns) + (1 - whole) * np.maximum(turns, 1.0)
    per_multiprocessor = values["flops_per_s"][:, column] / multiprocessors[:, column]
    depth = np.ceil(k[:, column] / split / 16) * 16
    lost = 1 + values["small_tile"][:, column] * (1 / tm + 1 / tn)
    tile_s = depth * 2 * tm * tn * lost / per_multiprocessor + values["epilogue_s"][:, column] * tm * tn / 128**2
    partial_bytes = (batch * m * n)[:, column] * split * 8
    reducing = np.where(
        split > 1, values["split_s"][:, column] + partial_bytes / values["cache_bytes_per_s"][:, column], 0.0
    )
    time = waves * tile_s + reducing
    time[(split > 1) & (k[:, column] / split < SHORTEST_PART)] = np.inf
    return np.asarray(time.min(axis=1))


def gemm_time_s(numbers: Numbers, values: Values) -> Array:
    """t = start + softmax(tiled(batch, m, n, k) x layout, transfer(bytes)). See :func:`tiled_time_s`."""
    batch, m, n, k, multiprocessors = (numbers[name] for name in ("batch", "m", "n", "k", "multiprocessors"))
    fine = bool(numbers["tensor_cores"][0])
    computing = tiled_time_s(values, batch, m, n, k, multiprocessors, fine) * values["layout"] * values["operator"]
    computing = computing * values["alignment"] * values["precision"]
    moving = transfer_s(numbers, values)
    return np.asarray(values["start_s"] + soft_maximum(computing, moving))


def convolution_time_s(numbers: Numbers, values: Values) -> Array:
    """Return convolutions as implicit GEMMs:
    t = start + tiled(output) [+ tiled(input gradient) + tiled(weight gradient)] + rearranging.

    A product that is not wanted has size 0. Rearranging: what a layout that is not the kernels' own costs on top.
    """
    total = np.zeros_like(numbers["bytes"])
    for part in ("forward", "input", "weight"):
        wanted = numbers[f"{part}_m"] > 0
        if wanted.any():
            m, n, k = (np.maximum(numbers[f"{part}_{name}"], 1.0) for name in ("m", "n", "k"))
            part_s = tiled_time_s(values, np.ones_like(total), m, n, k, numbers["multiprocessors"])
            total = total + np.where(wanted, part_s * values["layer"] + values["part_s"], 0.0)
    moving = transfer_s(numbers, values)
    return np.asarray(values["start_s"] + soft_maximum(total, moving) + moving * values["rearranging"])


def attention_time_s(numbers: Numbers, values: Values) -> Array:
    """t = start + softmax(waves x tile, transfer(bytes)).

    tile = e + keys seen x queries x (c D / R + x): the GEMMs' FLOPs (c = 4 forward, 10 backward), the exponentials
    and masks of each score; a causal tile sees half of the keys and half of its own.
    """
    tile = numbers["tile"]
    tiles = numbers["sequences"] * np.ceil(numbers["queries"] / tile)
    seen = np.where(numbers["causal"] > 0, (numbers["keys"] + tile) / 2, numbers["keys"])
    seen = np.minimum(seen, np.ceil(numbers["keys"] / 64) * 64)
    turns = tiles / (numbers["multiprocessors"] * values["resident"])
    whole = np.minimum(values["quantised"], 1.0)
    waves = whole * np.ceil(turns) + (1 - whole) * np.maximum(turns, 1.0)
    per_multiprocessor = values["flops_per_s"] / numbers["multiprocessors"]
    score_s = numbers["flops_per_score"] / per_multiprocessor + values["score_s"]
    tile_s = values["epilogue_s"] + seen * tile * score_s
    moving = transfer_s(numbers, values)
    return np.asarray(values["start_s"] + soft_maximum(waves * values["resident"] * tile_s * values["dropout"], moving))


def _starts(numbers: Numbers, time_s: Array) -> dict[str, float]:
    least = float(np.min(time_s))
    best_bytes_per_s = float(np.max(numbers["bytes"] / time_s))
    return {
        "start_s": 0.5 * least,
        "memory_bytes_per_s": 1.3 * best_bytes_per_s,
        "cache_bytes_per_s": 2.5 * best_bytes_per_s,
        "cache_bytes": float(np.max(numbers["cache_bytes"])) * 0.9,
        "write_weight": 1.15,
        "ramp_s": 0.5 * least,
        "flops_per_s": 1.1 * float(np.max(numbers["flops"] / time_s)),
        "epilogue_s": 0.2 * least,
        "quantised": 0.7,
    }


def _gemm_starts(numbers: Numbers, time_s: Array) -> dict[str, float]:
    least = float(np.min(time_s))
    factors = dict.fromkeys(("layout", "alignment", "operator", "precision"), 1.0)
    return {**_starts(numbers, time_s), **factors, "small_tile": 30.0, "split_s": 0.5 * least}


def _convolution_starts(numbers: Numbers, time_s: Array) -> dict[str, float]:
    return {**_gemm_starts(numbers, time_s), "part_s": 0.3 * float(np.min(time_s)), "rearranging": 0.5, "layer": 1.0}


def _attention_starts(numbers: Numbers, time_s: Array) -> dict[str, float]:
    found = _starts(numbers, time_s)
    products_s = np.median(numbers["flops_per_score"]) * np.max(numbers["multiprocessors"]) / found["flops_per_s"]
    return {**found, "score_s": 0.3 * float(products_s), "resident": 1.0, "dropout": 1.0}


_TILED = (
    *memory_parameters(),
    Parameter("flops_per_s", 0.5),
    Parameter("small_tile", 1.0),
    Parameter("epilogue_s", 1.5),
    Parameter("split_s", 1.0, "operator", 1.5),
    Parameter("quantised", 0.5),
)
GEMM = Form(
    "gemm",
    (
        *_TILED,
        Parameter("layout", 0.02, "layout", 0.1),
        Parameter("alignment", 0.02, "alignment", 0.7),
        Parameter("operator", 0.02, "operator", 0.1),
        Parameter("precision", 0.02, "precision", 0.05),
    ),
    gemm_time_s,
    _gemm_starts,
    ("m", "n", "k", "batch"),
    ("layout", "alignment", "operator"),
)
CONVOLUTION = Form(
    "convolution",
    (
        *_TILED,
        Parameter("layer", 0.02, "layer", 0.4),
        Parameter("part_s", 1.5),
        Parameter("rearranging", 1.0, "layout", 1.0),
    ),
    convolution_time_s,
    _convolution_starts,
    ("rows", "channels", "out_channels", "window"),
    ("layout", "layer"),
)
ATTENTION = Form(
    "attention",
    (
        *memory_parameters(),
        Parameter("flops_per_s", 0.5),
        Parameter("epilogue_s", 1.5),
        Parameter("score_s", 1.5),
        Parameter("quantised", 0.5),
        Parameter("resident", 0.5),
        Parameter("dropout", 0.02, "dropout", 0.3),
    ),
    attention_time_s,
    _attention_starts,
    ("sequences", "keys", "head_size"),
    ("causal", "dropout"),
)
