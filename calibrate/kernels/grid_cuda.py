"""The grid of a CUDA device, by class. See :mod:`calibrate.kernels.grid`.

To calibrate a new class of kernels, add it to :func:`classes`; a curve of its own stands in
:mod:`perfmodel.cost.kernels.classify` and :mod:`perfmodel.cost.kernels.features`.
"""

from __future__ import annotations

import random
from itertools import chain

from calibrate.kernels import operators
from calibrate.kernels.operators import image, tensor, unary
from calibrate.kernels.sampling import (  # fmt: skip
    Point,
    activation_ladder,
    batched_gemms,
    gemms,
    image_parameter_list,
    latin_hypercube,
    parameter_list,
    plain,
    rounded,
    row_shapes,
)
from perfmodel.trace.operation import Operation, TensorSpec

HEADS = {
    "fp32": (10000, 50257),
    "bf16": (10000, 30522, 30522, 32000, 50257, 50257, 128256),
    "tf32": (32000,),
    "fp16": (50257,),
}
F32, BF16, F16 = "float32", "bfloat16", "float16"
KINDS = {"fp32": F32, "tf32": F32, "bf16": BF16, "fp16": F16}
SHARES = {"fp32": 1.0, "bf16": 1.0, "tf32": 0.7, "fp16": 0.2}  # fp16 runs the kernels of bf16


def classes() -> dict[str, list[Point]]:
    """Return the grid by class. Its order is drawn by class, and ``calibrate --only`` names some of them."""
    return {
        **{f"gemm {kind}": _gemms(kind, share) for kind, share in SHARES.items()},
        "head": _language_heads(),
        "attention": plain(chain(*_attention())),
        "pointwise": plain(_pointwise()),
        "transcendental": plain(_transcendental()),
        "row": plain(_rows()),
        "column": plain(_columns()),
        "full-reductions": plain(_full_reductions()),
        "embedding": plain(_embeddings()),
        "copy": plain(_copies()),
        "cat": plain(_cats()),
        "fill": plain(_fills()),
        "dropout": plain(_dropouts()),
        "convolution": plain(chain(*_convolutions())),
        "pool": plain(_pools()),
        "batch norm": plain(_batch_norms()),
        "optimizer": plain(_optimizers()),
    }


def _gemms(kind: str, share: float) -> list[Point]:
    dtype = KINDS[kind]
    found: list[Point] = []
    for layout in ("NN", "NT", "TN"):
        found += gemms(operators.mm, dtype, kind, layout, round(18 * share))
        found += batched_gemms(dtype, kind, layout, round(6 * share), (4, 768), (32, 2048))
    found += gemms(operators.addmm, dtype, kind, "NT", round(10 * share))
    return found + gemms(operators.addmm, dtype, kind, "NN", round(4 * share))


def _language_heads() -> list[Point]:
    """Return GEMMs with a vocabulary as one size, and GEMMs of very few rows."""
    draw = random.Random("heads")
    found: list[Point] = []
    for kind, dtype in KINDS.items():
        for vocabulary in HEADS[kind]:
            tokens, width = draw.choice((512, 1024, 2048, 4096)), draw.choice((768, 1024, 1600, 2048))
            tf32 = kind == "tf32"
            found.append((operators.mm(dtype, tokens, vocabulary, width, "NT"), tf32))
            found.append((operators.mm(dtype, tokens, width, vocabulary, "NN"), tf32))
            found.append((operators.mm(dtype, vocabulary, width, tokens, "TN"), tf32))
        for rows in (4, 32):
            width, out = draw.choice((1024, 4096)), draw.choice((1000, 4096, 8192))
            found.append((operators.addmm(dtype, rows, out, width, "NT"), kind == "tf32"))
            if kind in ("fp32", "bf16"):
                found.append((operators.mm(dtype, rows, width, out, "NN"), False))
                found.append((operators.mm(dtype, out, width, rows, "TN"), False))
    return found


def _attention() -> list[tuple[Operation, Operation]]:
    found = []
    for backend, dtype, count in (("cudnn", BF16, 16), ("efficient", F32, 9), ("flash", BF16, 3), ("cudnn", F16, 2)):
        draw = random.Random(f"attention {backend} {dtype}")
        longest = 2048 if dtype == F32 else 4096
        for i, (heads, sequence) in enumerate(latin_hypercube(f"{backend} {dtype}", count, (12, 768), (100, longest))):
            length = rounded(sequence, draw) if sequence < 600 else 128 * round(sequence / 128)
            size = (64, 128, 64, 64, 128, 80, 64, 96)[i % 8]
            work = 4 * heads * length**2 * size
            count_heads = heads if work < 2e11 else heads * 2e11 / work
            per_batch = draw.choice((12, 16, 32))
            batch = max(1, round(count_heads / per_batch))
            kv_heads = per_batch // 4 if i % 5 == 4 and backend == "cudnn" else per_batch
            p = 0.1 if i % 4 == 3 and backend != "flash" else 0.0
            found.append(operators.attention(backend, dtype, batch, per_batch, kv_heads, length, size, i % 2 == 0, p))
    return found


def _pointwise() -> list[Operation]:
    found: list[Operation] = []
    for x in [*activation_ladder(F32, 9), *activation_ladder(BF16, 5, width=768)]:
        found.append(operators.binary("add.Tensor", x, x))
    for x in [*activation_ladder(F32, 4, width=2560), *activation_ladder(BF16, 4, width=1600)]:
        found.append(operators.binary("mul.Tensor", x, x))
        found.append(operators.binary("mul.Tensor", x, tensor(x.dtype, x.shape[-1])))
    for x in [*activation_ladder(F32, 4, width=768), *activation_ladder(BF16, 3, width=4096)]:
        found.append(unary("mul.Tensor", x, 0.5))
        found.append(operators.binary("mul.Tensor", x, tensor(x.dtype, *x.shape[:-1], 1)))
    for x in activation_ladder(BF16, 5, width=1280):
        wide = x._replace(dtype=F32)
        found.append(operators.binary("add.Tensor", wide, x))
        found.append(operators.binary("mul.Tensor", x, wide, out=wide))
    for x in [*activation_ladder(F32, 2, 2**19, 2**25), *activation_ladder(BF16, 2, 2**20, 2**26)]:
        found.append(unary("pow.Tensor_Scalar", x, 2))
        found.append(operators.binary("threshold_backward.default", x, x, 0))
        found.append(operators.binary("add_.Tensor", x, x))
    for batch, heads, sequence in ((4, 12, 128), (16, 25, 128), (2, 12, 512), (8, 16, 512), (2, 16, 2048)):
        for dtype in (F32, BF16):
            scores = tensor(dtype, batch, heads, sequence, sequence)
            found.append(
                operators.binary("masked_fill.Scalar", scores, tensor("bool", sequence, sequence), float("-inf"))
            )
    for batch, heads, sequence in ((2, 16, 512), (2, 32, 1024), (4, 32, 2048)):
        for dtype in (F32, BF16):
            rotated = tensor(dtype, batch, heads, sequence, 64, stride=(sequence * heads * 64, 64, heads * 64, 1))
            found.append(operators.binary("mul.Tensor", rotated, tensor(dtype, 1, 1, sequence, 64)))
            found.append(operators.binary("add.Tensor", rotated, tensor(dtype, *rotated.shape)))
    for x in activation_ladder(F32, 3, 2**15, 2**26):
        spread = x._replace(stride=(x.shape[1], 1, 0))
        found.append(call_scalar("div.Scalar", spread, x, x.shape[-1]))
        found += [
            unary("mul_.Tensor", x, 0.999),
            operators.binary("lerp_.Scalar", x, x, 0.1),
            operators.square(operators.call("addcmul_.default", x, x, x, out=x, value=0.001)),
            operators.call("addcdiv_.default", x, x, x, out=x, value=-0.01),
        ]
    return found


def call_scalar(name: str, x: TensorSpec, out: TensorSpec, scalar: float) -> Operation:
    """Return a call that takes a tensor and a number, and gives a tensor of another layout."""
    return operators.call(name, x, scalar, out=out)


def _transcendental() -> list[Operation]:
    found: list[Operation] = []
    for x in [*activation_ladder(F32, 4, width=3072), *activation_ladder(BF16, 4, width=3072)]:
        found += [unary("gelu.default", x), operators.binary("gelu_backward.default", x, x)]
    for x in [*activation_ladder(F32, 4, 2**15, width=2816), *activation_ladder(BF16, 4, 2**15, width=2816)]:
        found += [unary("silu.default", x), operators.binary("silu_backward.default", x, x)]
        found += [unary("erf.default", x), unary("exp.default", x)]
    for x in [*activation_ladder(F32, 3, 2**16, width=4096), *activation_ladder(BF16, 3, 2**16, width=4096)]:
        found += [unary("tanh.default", x), operators.binary("tanh_backward.default", x, x)]
    for x in activation_ladder(F32, 2, 2**18, 2**25, width=4096):
        found += [unary("pow.Tensor_Scalar", x, 3), unary("sqrt.default", x)]
    found += [unary("rsqrt.default", tensor(F32, 4, rows, 1)) for rows in (64, 65536)]
    return found


def _rows() -> list[Operation]:
    """Norms over models' widths, softmax over sequence lengths, losses over vocabularies; rows are tokens of a step."""
    found: list[Operation] = []
    tokens, widths = (128, 32768), (256, 8192)
    for dtype, count in ((F32, 8), (BF16, 6)):
        for rows, width in row_shapes(f"layer norm {dtype}", count, tokens, widths, 2**26):
            found += operators.layer_norm(dtype, 4, rows // 4, width)
        for rows, width in row_shapes(f"rms norm {dtype}", count - 2, tokens, widths, 2**26):
            found += operators.rms_norm(dtype, 4, rows // 4, width)
        for rows, length in row_shapes(f"softmax {dtype}", count, (2048, 524288), (64, 2048), 2**28):
            found += operators.softmax(dtype, (4, 8, rows // 32, length))
        for rows, length in row_shapes(f"log softmax {dtype}", count, (256, 16384), (1000, 128256), 2**28):
            found += operators.softmax(dtype, (rows, length), log=True)
    for rows, length in row_shapes("nll", 6, (64, 16384), (1000, 128256), 2**28):
        found += operators.nll_loss(F32, rows, length)
    for i, (rows, width) in enumerate(row_shapes("mean", 9, tokens, widths, 2**26)):
        x = tensor(F32, 4, rows // 4, width)
        found.append(
            operators.reduction("sum.dim_IntList", x, (2,)) if i % 2 else operators.reduction("mean.dim", x, (-1,))
        )
    return found


def _columns() -> list[Operation]:
    found: list[Operation] = []
    for dtype, count in ((F32, 14), (BF16, 10)):
        for i, (rows, width) in enumerate(row_shapes(f"column {dtype}", count, (128, 32768), (256, 32768), 2**27)):
            deep = i % 3 == 0
            x = tensor(dtype, 4, rows // 4, width) if deep else tensor(dtype, rows, width)
            found.append(operators.reduction("sum.dim_IntList", x, (0, 1) if deep else (0,)))
    for batch, sequence, width in ((4, 128, 768), (16, 128, 2560), (8, 1024, 1024)):
        found.append(operators.reduction("sum.dim_IntList", tensor(F32, batch, sequence, width), (0,)))
    return found


def _full_reductions() -> list[Operation]:
    """Return reductions to one value, within a block and by many, and to few values of long rows and columns."""
    found: list[Operation] = []
    for i, elements in enumerate((2**10, 2**14, 100_000, 2**17, 2**20, 12_582_912, 50_331_648, 2**28)):
        found.append(operators.full_reduction(("sum.default", "mean.default")[i % 2], tensor(F32, elements)))
    for i, elements in enumerate((2**12, 2**18, 2**22, 2**25, 2**27)):
        found.append(operators.full_reduction(("mean.default", "sum.default")[i % 2], tensor(BF16, elements)))
    for elements in (2**8, 2**16, 2**21, 2**26):
        found.append(operators.full_reduction("linalg_vector_norm.default", tensor(F32, elements), 2.0))
        found.append(operators.full_reduction("max.default", tensor(F32, 3 * elements)))
    for elements in (2**15, 2**24):
        found.append(operators.full_reduction("argmax.default", tensor(F32, elements)))
        found.append(operators.full_reduction("var.correction", tensor(F32, elements), correction=1))
    for dtype, rows, length in (
        (F32, 2, 2**22), (F32, 16, 2**18), (F32, 64, 2**14), (F32, 64, 1_000_000), (F32, 1024, 12_544),
        (BF16, 8, 2**20), (BF16, 4096, 50_257),
    ):  # fmt: skip
        found.append(operators.reduction("sum.dim_IntList", tensor(dtype, rows, length), (1,)))
    for dtype, rows, columns in (
        (F32, 512, 10), (F32, 5120, 10), (F32, 2**20, 8), (F32, 2**16, 64), (F32, 2**19, 3), (BF16, 2**18, 64),
        (BF16, 2**14, 16),
    ):  # fmt: skip
        found.append(operators.reduction("sum.dim_IntList", tensor(dtype, rows, columns), (0,)))
    return found


def _embeddings() -> list[Operation]:
    sizes = [
        (10000, 768, 16, 128), (10000, 2560, 16, 128), (30522, 768, 8, 512), (50257, 768, 8, 1024),
        (50257, 1600, 2, 1024), (32000, 1024, 2, 512), (128256, 2048, 4, 2048), (1024, 1024, 1, 1024),
        (512, 768, 1, 128), (2, 768, 8, 512), (32000, 4096, 2, 4096), (10000, 1280, 8, 128), (50257, 768, 1, 1024),
        (30522, 1024, 16, 512),
    ]  # fmt: skip
    found: list[Operation] = []
    for i, size in enumerate(sizes):
        found += operators.embedding(F32, *size)
        if i % 2 == 0 or i > 11:
            found += operators.embedding(BF16, *size)
    return found


def _copies() -> list[Operation]:
    found: list[Operation] = []
    for x in activation_ladder(F32, 6, 2**9, 2**27, 512):
        found += [operators.cast(x, BF16), operators.cast(x._replace(dtype=BF16), F32)]
    for x in activation_ladder(F32, 3, 2**14, 2**26, 768):
        found += [operators.cast(x, F16), operators.cast(x._replace(dtype=F16), F32), unary("clone.default", x)]
    for batch, heads, sequence, size in ((4, 12, 128, 64), (16, 32, 128, 80), (2, 16, 2048, 64), (8, 12, 1024, 128)):
        for dtype in (F32, BF16):
            step = heads * size
            heads_first = tensor(dtype, batch, heads, sequence, size, stride=(sequence * step, size, step, 1))
            keys = tensor(dtype, batch, heads, size, sequence, stride=(sequence * step, size, 1, step))
            back = tensor(dtype, batch, sequence, heads, size, stride=(sequence * step, size, sequence * size, 1))
            swapped = tensor(dtype, batch, sequence, step, stride=(sequence * step, 1, sequence))
            found += [operators.contiguous(x) for x in (heads_first, keys, back, swapped)]
    for x in activation_ladder(BF16, 3, 2**12, 2**24):
        found.append(operators.binary("copy_.default", x, x))
    return found


def _cats() -> list[Operation]:
    found: list[Operation] = []
    for dtype in (F32, BF16):
        for batch, sequence, width in ((2, 256, 768), (8, 1024, 768), (4, 1024, 1600)):
            found.append(operators.cat([tensor(dtype, batch, sequence, width)] * 3, 2))
        for batch, heads, sequence in ((2, 16, 512), (4, 32, 2048)):
            first = tensor(dtype, batch, heads, sequence, 32)
            second = tensor(dtype, batch, heads, sequence, 32, stride=(sequence * heads * 64, 64, heads * 64, 1))
            found.append(operators.cat([first, second], -1))
    return found


def _fills() -> list[Operation]:
    found = [unary("zero_.default", x) for x in activation_ladder(F32, 6, 2**6, 2**27, 64)]
    found += [unary("zeros_like.default", x, pin_memory=False) for x in activation_ladder(BF16, 3, 2**12, 2**26)]
    return [*found, unary("fill_.Scalar", tensor(F32, 1024, 1024), 1.0)]


def _dropouts() -> list[Operation]:
    return list(
        chain(
            *(
                operators.dropout(x)
                for x in [*activation_ladder(F32, 5, 2**13, width=768), *activation_ladder(BF16, 5, 2**13, width=768)]
            )
        )
    )


def _convolutions() -> list[tuple[Operation, Operation]]:
    """Layers of residual and plain networks: stems, 1x1 and 3x3 of every stage, strided ones; batches 4 to 64."""
    layers = [(3, 224, 64, 7, 2), (3, 224, 64, 3, 1), (64, 224, 64, 3, 1), (64, 112, 128, 3, 1), (128, 112, 128, 3, 1)]
    for stage, size in enumerate((56, 28, 14, 7)):
        width = 64 * 2**stage
        layers += [(width, size, width, 3, 1), (width, size, 4 * width, 1, 1), (4 * width, size, width, 1, 1)]
        layers += [(4 * width, size, 8 * width, 1, 2), (2 * width, size, 2 * width, 3, 2)]
        layers += [(2 * width, size, 4 * width, 3, 1), (4 * width, size, 4 * width, 3, 1)]
    found = []
    for dtype, last, bias, share in (
        (F32, False, True, 6), (BF16, True, False, 6), (BF16, False, True, 3), (F32, True, False, 1),
    ):  # fmt: skip
        draw = random.Random(f"convolution {dtype} {last}")
        for i, (channels, size, out, kernel, stride) in enumerate(layers):
            if (i + 3 * share) % 10 >= share:
                continue
            flops = 2 * channels * out * kernel**2 * (size / stride) ** 2
            batch = draw.choice(
                [batch for batch in (4, 8, 16, 32, 64) if batch * flops < 2e11 and batch * size <= 9000]
            )
            found.append(
                operators.convolution(dtype, batch, channels, size, out, kernel, stride, last, bias, channels == 3)
            )
    return found


def _pools() -> list[Operation]:
    found: list[Operation] = []
    for dtype, last in ((F32, False), (BF16, True), (BF16, False)):
        for batch, channels, size, kernel in (
            (4, 64, 112, 3), (64, 64, 112, 3), (4, 64, 224, 2), (32, 128, 112, 2), (16, 512, 14, 2),
        ):  # fmt: skip
            found += operators.max_pool(dtype, batch, channels, size, kernel, 2, last)
        for batch, size in ((4, 7), (64, 7)):
            found.append(operators.reduction("mean.dim", image(dtype, (batch, 2048, size, size), last), (-1, -2)))
    for dtype in (F32, BF16):
        for batch, size in ((4, 7), (32, 7)):
            found += operators.average_pool(dtype, batch, 512, size, 7)
    return found


def _batch_norms() -> list[Operation]:
    found: list[Operation] = []
    sizes = (
        (4, 64, 112), (64, 64, 112), (8, 256, 56), (64, 256, 56), (16, 128, 28), (64, 512, 28), (32, 256, 14),
        (64, 1024, 14), (64, 512, 7), (8, 2048, 7),
    )  # fmt: skip
    for i, size in enumerate(sizes):
        found += operators.batch_norm(BF16, *size, last=True, cudnn=False)
        found += operators.batch_norm(F32, *size, last=False, cudnn=True)
        if i % 3 == 0:
            found += operators.batch_norm(BF16, *size, last=False, cudnn=False)
        if i % 6 == 0:
            found += operators.batch_norm(F32, *size, last=True, cudnn=True)
    return found


def _optimizers() -> list[Operation]:
    lists = [
        parameter_list(F32, 2, 768, 10000), parameter_list(F32, 6, 2048, 10000),
        image_parameter_list(F32, 4), [tensor(F32, 8192, 8192)], [tensor(F32, 1024)] * 64,
    ]  # fmt: skip
    half = [parameter_list(BF16, 2, 1024, 32000), parameter_list(BF16, 8, 2048, 32000)]
    found: list[Operation] = []
    for i, parameters in enumerate([*lists, half[0]]):
        found += operators.foreach_adamw(parameters)
        if i % 2 == 1:
            found += operators.foreach_sgd(parameters)
    found += [operators.fused_adamw(parameters) for parameters in [*lists, *half]]
    found += [operators.fused_sgd(lists[2]), operators.fused_sgd(lists[0])]
    return [*found, unary_list("_foreach_add_.Scalar", 64), unary_list("_foreach_add_.Scalar", 300)]


def unary_list(name: str, count: int) -> Operation:
    """Return a list operator on step counters, one element each."""
    return operators.call(name, tuple(tensor(F32) for _ in range(count)), 1)
