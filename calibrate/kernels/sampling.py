"""Drawing sizes for the grid: everything from fixed seeds, so that a grid is the same wherever it is made."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator

from calibrate.kernels import operators
from calibrate.kernels.operators import tensor
from perfmodel.trace.operation import Operation, TensorSpec

Point = tuple[Operation, bool]  # the call, and whether TF32 is allowed in it
GEMM_FLOPS = {"fp32": (1e7, 2.5e11), "tf32": (1e7, 8e11), "bf16": (1e7, 1.6e12), "fp16": (1e7, 1.6e12)}
GEMM_ELEMENTS = 400e6  # of both factors and the result


def plain(*groups: Iterable[Operation]) -> list[Point]:
    """Return the operations of all groups, TF32 off (cuDNN's own switch is not a GEMM's)."""
    return [(operation, False) for group in groups for operation in group]


def latin_hypercube(seed: str, count: int, *ranges: tuple[float, float]) -> list[tuple[float, ...]]:
    """``count`` points, each coordinate log-uniform in its range with one point in each of ``count`` equal strata.

    >>> sorted(round(x) for (x,) in latin_hypercube("a", 2, (1, 10000)))[0] <= 100
    True
    """
    draw = random.Random(seed)
    columns = []
    for low, high in ranges:
        strata = [(i + draw.random()) / count for i in range(count)]
        draw.shuffle(strata)
        columns.append([low * (high / low) ** s for s in strata])
    return list(zip(*columns, strict=True))


def rounded(value: float, draw: random.Random) -> int:
    """Return a size as models have them: mostly multiples of 64 or powers of two, some multiples of 8, a few odd."""
    kind = draw.random()
    if kind < 0.30:
        return int(2 ** round(math.log2(value)))
    if kind < 0.85 and value >= 96:
        return 64 * round(value / 64)
    if kind < 0.95:
        return max(8, 8 * round(value / 8))
    return max(1, round(value) | 1)


def powers(low: int, high: int, count: int, multiple: int = 1) -> list[int]:
    """``count`` sizes from ``low`` to ``high``, evenly spaced in the logarithm, rounded to ``multiple``.

    >>> powers(1, 100, 3)
    [1, 10, 100]
    """
    step = (high / low) ** (1 / max(count - 1, 1))
    return [max(multiple, multiple * round(low * step**i / multiple)) for i in range(count)]


def gemm_sizes(
    seed: str, count: int, kind: str, rows: tuple[int, int], columns: tuple[int, int], depth: tuple[int, int]
) -> Iterator[tuple[int, int, int]]:
    """``count`` (m, n, k) within the kind's limits of FLOPs and memory."""
    least, most = GEMM_FLOPS[kind]
    draw = random.Random(seed)
    for attempt in range(1000):
        for sizes in latin_hypercube(f"{seed}{attempt}", max(count, 8), rows, columns, depth):
            m, n, k = (rounded(size, draw) for size in sizes)
            if least <= 2 * m * n * k <= most and m * k + k * n + m * n <= GEMM_ELEMENTS:
                yield m, n, k
                count -= 1
                if count == 0:
                    return


def gemms(build: Callable[..., Operation], dtype: str, kind: str, layout: str, count: int) -> list[Point]:
    """Return GEMMs in one layout: tokens are the rows of forward and input gradients, the depth of weight gradients."""
    tokens, width = (64, 16384), (64, 16384)
    ranges = (width, width, tokens) if layout == "TN" else (tokens, width, width)
    seed = f"{build.__name__} {kind} {layout}"
    return [(build(dtype, m, n, k, layout), kind == "tf32") for m, n, k in gemm_sizes(seed, count, kind, *ranges)]


def batched_gemms(
    dtype: str, kind: str, layout: str, count: int, batches: tuple[int, int], size: tuple[int, int]
) -> list[Point]:
    """Return batched GEMMs as attention written out has them: one of the three sizes is a head's."""
    draw = random.Random(f"bmm {kind} {layout}")
    found: list[Point] = []
    samples = latin_hypercube(f"bmm {kind} {layout}", 8 * count, batches, size, size)
    for batch, x, y in samples:
        long, other, head = rounded(x, draw), rounded(y, draw), draw.choice((64, 64, 80, 128))
        m, n, k = draw.choice(((long, long, head), (long, head, long), (head, long, long), (long, other, head)))
        b = round(batch)
        within = GEMM_FLOPS[kind][0] <= 2 * b * m * n * k <= GEMM_FLOPS[kind][1] / 4
        if within and b * (m * k + k * n + m * n) <= GEMM_ELEMENTS:
            found.append((operators.bmm(dtype, b, m, n, k, layout), kind == "tf32"))
        if len(found) == count:
            break
    return found


def parameter_list(dtype: str, layers: int, width: int, vocabulary: int) -> list[TensorSpec]:
    """Return the parameters of a decoder of that size: few large tensors, many vectors."""
    layer = [
        tensor(dtype, width), tensor(dtype, 3 * width, width), tensor(dtype, width, width),
        tensor(dtype, width), tensor(dtype, 4 * width, width), tensor(dtype, width, 4 * width),
    ]  # fmt: skip
    ends = [tensor(dtype, vocabulary, width)]
    return [*ends, *(layer * layers), tensor(dtype, width), *ends]


def image_parameter_list(dtype: str, stages: int) -> list[TensorSpec]:
    """Return the parameters of a residual network: many tensors, most of them small."""
    found: list[TensorSpec] = []
    for stage in range(stages):
        width = 64 * 2**stage
        for _ in range(4):
            found += [tensor(dtype, width, 4 * width, 1, 1), tensor(dtype, width), tensor(dtype, width)]
            found += [tensor(dtype, width, width, 3, 3), tensor(dtype, width), tensor(dtype, width)]
            found += [tensor(dtype, 4 * width, width, 1, 1), tensor(dtype, 4 * width), tensor(dtype, 4 * width)]
    return [*found, tensor(dtype, 1000, 256 * 2 ** (stages - 1)), tensor(dtype, 1000)]


def _activation(dtype: str, elements: int, width: int = 1024) -> TensorSpec:
    """Return an activation [batch, sequence, width] of about so many elements."""
    rows = max(1, round(elements / width))
    batch = 4 if rows % 4 == 0 and rows >= 16 else 1
    return tensor(dtype, batch, rows // batch, width)


def activation_ladder(
    dtype: str, count: int, low: int = 2**12, high: int = 2**27, width: int = 1024
) -> list[TensorSpec]:
    return [_activation(dtype, elements, width) for elements in powers(low, high, count)]


def row_shapes(
    seed: str, count: int, rows: tuple[int, int], lengths: tuple[int, int], most: float
) -> list[tuple[int, int]]:
    """(rows, row length) by Latin hypercube: rows in multiples of 32, fewer where elements would exceed ``most``."""
    draw = random.Random(seed)
    return [
        (max(32, 32 * round(min(tall, most / wide) / 32)), rounded(wide, draw))
        for tall, wide in latin_hypercube(seed, count, rows, lengths)
    ]
