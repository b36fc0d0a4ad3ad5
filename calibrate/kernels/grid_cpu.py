"""The grid of a CPU, by class: sizes one core handles in milliseconds. See :mod:`calibrate.kernels.grid`."""

from __future__ import annotations

import random
from itertools import chain

from calibrate.kernels import operators
from calibrate.kernels.operators import tensor, unary
from calibrate.kernels.sampling import (
    Point,
    activation_ladder,
    latin_hypercube,
    parameter_list,
    plain,
    powers,
    rounded,
    row_shapes,
)
from perfmodel.trace.operation import Operation, TensorSpec

F32 = "float32"


def classes() -> dict[str, list[Point]]:
    """Return the grid by class; the names are only for order."""
    return {
        "gemm": plain(_gemms()),
        "attention": plain(chain(*_attention())),
        "pointwise": plain(_pointwise()),
        "row": plain(_rows()),
        "full-reductions": plain(_full_reductions()),
        "memory": plain(_memory()),
        "convolution": plain(chain(*_convolutions())),
        "normalisation": plain(_pools_and_norms()),
        "optimizer": plain(_optimizers()),
    }


def _gemms() -> list[Operation]:
    found: list[Operation] = []
    draw = random.Random("cpu gemm")
    for build, layout, count in (
        (operators.mm, "NN", 12), (operators.mm, "NT", 12), (operators.mm, "TN", 12), (operators.addmm, "NT", 10),
        (operators.addmm, "NN", 5),
    ):  # fmt: skip
        for sizes in latin_hypercube(f"cpu {build.__name__} {layout}", count, (16, 768), (16, 1024), (16, 1024)):
            m, n, k = (rounded(size, draw) for size in sizes)
            found.append(build(F32, m, n, k, layout))
    for layout in ("NN", "NT", "TN"):
        for batch, long in latin_hypercube(f"cpu bmm {layout}", 4, (4, 64), (16, 128)):
            head, length = draw.choice((16, 32, 64)), rounded(long, draw)
            m, n, k = draw.choice(((length, length, head), (length, head, length)))
            found.append(operators.bmm(F32, round(batch), m, n, k, layout))
    return found


def _attention() -> list[tuple[Operation, Operation]]:
    shapes = (
        (2, 4, 32, 16), (4, 4, 64, 32), (2, 8, 128, 64), (4, 12, 128, 64), (1, 8, 256, 64), (8, 2, 16, 16),
        (1, 12, 128, 64), (4, 2, 256, 32), (2, 2, 48, 24), (2, 12, 64, 64),
    )  # fmt: skip
    return [
        operators.attention("efficient", F32, batch, heads, heads, length, size, i % 2 == 0)
        for i, (batch, heads, length, size) in enumerate(shapes)
    ]


def _ladder(count: int, low: int = 2**9, high: int = 2**22, width: int = 256) -> list[TensorSpec]:
    return activation_ladder(F32, count, low, high, width)


def _pointwise() -> list[Operation]:
    found: list[Operation] = []
    for x in _ladder(7):
        found += [
            operators.binary("add.Tensor", x, x),
            operators.binary("mul.Tensor", x, tensor(F32, x.shape[-1])),
            unary("mul.Tensor", x, 0.5),
        ]
    for x in _ladder(5, 2**10):
        rows = tensor(F32, *x.shape[:-1], 1)
        found += [
            operators.binary("mul.Tensor", x, rows),
            unary("pow.Tensor_Scalar", x, 2),
            operators.binary("add_.Tensor", x, x),
        ]
        found += [
            unary("relu_.default", x),
            operators.binary("threshold_backward.default", x, x, 0),
            unary("neg.default", x),
        ]
        found += [
            operators.binary("lerp_.Scalar", x, x, 0.1),
            operators.square(operators.call("addcmul_.default", x, x, x, out=x, value=0.001)),
            operators.call("addcdiv_.default", x, x, x, out=x, value=-0.01),
        ]
    for x in _ladder(5, 2**10, 2**20):
        found += [unary(f"{name}.default", x) for name in ("gelu", "silu", "erf", "exp", "tanh", "sqrt")]
        found += [operators.binary(f"{name}_backward.default", x, x) for name in ("gelu", "silu", "tanh")]
    for sequence in (32, 128):
        scores = tensor(F32, 4, 4, sequence, sequence)
        found.append(operators.binary("masked_fill.Scalar", scores, tensor("bool", sequence, sequence), float("-inf")))
    return found


def _rows() -> list[Operation]:
    found: list[Operation] = []
    tokens, widths = (32, 2048), (64, 2048)
    for rows, width in row_shapes("cpu layer norm", 8, tokens, widths, 2**20):
        found += operators.layer_norm(F32, 4, rows // 4, width)
    for rows, length in row_shapes("cpu softmax", 8, (64, 8192), (16, 1024), 2**20):
        found += operators.softmax(F32, (4, 8, rows // 32, length))
    for rows, length in row_shapes("cpu log softmax", 8, (32, 2048), (100, 32000), 2**21):
        found += operators.softmax(F32, (rows, length), log=True)
        found += operators.nll_loss(F32, rows, length)
    for rows, width in row_shapes("cpu mean", 6, tokens, widths, 2**20):
        found.append(operators.reduction("mean.dim", tensor(F32, 4, rows // 4, width), (-1,)))
        found.append(operators.reduction("sum.dim_IntList", tensor(F32, rows, width), (0,)))
        found.append(operators.reduction("sum.dim_IntList", tensor(F32, 4, rows // 4, width), (0, 1)))
    return found


def _full_reductions() -> list[Operation]:
    found: list[Operation] = []
    for elements in powers(2**8, 2**23, 6):
        found.append(operators.full_reduction("sum.default", tensor(F32, elements)))
        found.append(operators.full_reduction("mean.default", tensor("bfloat16", elements)))
    for elements in (2**12, 2**17, 2**22):
        found.append(operators.full_reduction("sum.default", tensor("bfloat16", elements)))
    for elements in (2**10, 2**16, 2**21):
        found.append(operators.full_reduction("linalg_vector_norm.default", tensor(F32, elements), 2.0))
        found.append(operators.full_reduction("max.default", tensor(F32, elements)))
    for elements in (2**10, 2**15, 2**21):
        found.append(operators.full_reduction("argmax.default", tensor(F32, elements)))
        found.append(operators.full_reduction("var.correction", tensor(F32, elements), correction=1))
    for rows, length in ((4, 2**18), (32, 2**14)):
        found.append(operators.reduction("sum.dim_IntList", tensor(F32, rows, length), (1,)))
        found.append(operators.reduction("sum.dim_IntList", tensor(F32, length, rows), (0,)))
    return found


def _memory() -> list[Operation]:
    found: list[Operation] = []
    for table in ((512, 64, 4, 32), (1000, 128, 4, 64), (10000, 256, 2, 128), (30522, 256, 4, 128)):
        found += operators.embedding(F32, *table)
    for x in _ladder(6):
        found += [
            operators.cast(x, "bfloat16"),
            operators.cast(x._replace(dtype="bfloat16"), F32),
            unary("clone.default", x),
        ]
        found.append(unary("zero_.default", x))
        found += operators.dropout(x)
    for batch, heads, sequence, size in ((2, 4, 32, 16), (4, 8, 128, 32), (4, 12, 128, 64)):
        step = heads * size
        first = tensor(F32, batch, heads, sequence, size, stride=(sequence * step, size, step, 1))
        keys = tensor(F32, batch, heads, size, sequence, stride=(sequence * step, size, 1, step))
        back = tensor(F32, batch, sequence, heads, size, stride=(sequence * step, size, sequence * size, 1))
        found += [operators.contiguous(x) for x in (first, keys, back)]
        found.append(operators.cat([tensor(F32, batch, sequence, step)] * 3, 2))
    return found


def _convolutions() -> list[tuple[Operation, Operation]]:
    layers = (
        (2, 3, 32, 16, 3, 1), (2, 16, 32, 32, 3, 2), (4, 32, 16, 64, 3, 1), (2, 64, 16, 64, 1, 1), (1, 3, 64, 32, 7, 2),
        (2, 64, 8, 128, 3, 1), (1, 32, 32, 32, 3, 1), (4, 16, 16, 64, 1, 1), (2, 128, 8, 128, 3, 1),
        (1, 64, 28, 128, 3, 2),
    )  # fmt: skip
    return [
        operators.convolution(F32, *layer, last=False, bias=i % 2 == 0, first=layer[1] == 3)
        for i, layer in enumerate(layers)
    ]


def _pools_and_norms() -> list[Operation]:
    found: list[Operation] = []
    for batch, channels, size in ((2, 16, 32), (4, 64, 16), (2, 64, 56)):
        found += operators.max_pool(F32, batch, channels, size, 2, 2, last=False)
        found += operators.batch_norm(F32, batch, channels, size, last=False, cudnn=True)
        found += operators.average_pool(F32, batch, channels, size, 7)
        found.append(operators.reduction("mean.dim", tensor(F32, batch, channels, size, size), (-1, -2)))
    return found


def _optimizers() -> list[Operation]:
    found: list[Operation] = []
    for parameters in (
        parameter_list(F32, 2, 64, 512),
        parameter_list(F32, 2, 128, 4000),
        [tensor(F32, width) for width in powers(64, 4096, 30)],
    ):
        found += [
            *operators.foreach_adamw(parameters),
            *operators.foreach_sgd(parameters),
            operators.fused_adamw(parameters),
        ]
    return found
