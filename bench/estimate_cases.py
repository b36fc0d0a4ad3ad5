"""Calls of operators that no grid has: those that the constants of estimates come from, and those held out.

The constants of perfmodel/cost/kernels/dependent_steps.py come from calls of ``tuning``, whose times may be known when
a constant or a factor of estimates.py is chosen. ``held_out`` was fixed, and its times predicted, before any of it was
measured; no constant was changed because of it. Whoever changes one moves the calls that asked for it to ``seen``,
which are for tuning from then on.

Calls were held out in two rounds. Of the 45 of the first, 12 showed that batches which are eliminated, triangles,
searches and additions need rules of their own. They are ``seen`` now. 24 others of these kinds, the second round, were
predicted by the new rules before any of them was measured.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from calibrate.kernels import operators
from calibrate.kernels.operators import call, tensor
from perfmodel.trace.operation import Operation, TensorSpec

F32, F64, BF16, F16, INT64 = "float32", "float64", "bfloat16", "float16", "int64"
C64, C128, BOOL, FP8 = "complex64", "complex128", "bool", "float8_e4m3fn"
MASKS = ((1, 128), (2, 256), (2, 2048), (4, 1024), (4, 2048), (8, 1024))


class Case(NamedTuple):
    """One call.

    Attributes
    ----------
    operation : Operation
        The call.
    mark : str
        Whether its time may be known when a constant is chosen.
    constants : tuple of str
        Those that its time has a say in; none where it is held out.
    blind_round : int or None
        The round in which its time was predicted before it was measured; None where it was known from the first.
    """

    operation: Operation
    mark: Literal["tuning", "held-out"]
    constants: tuple[str, ...] = ()
    blind_round: int | None = None


def cases() -> list[Case]:
    """All calls, those first that constants come from."""
    return [
        *(Case(operation, "tuning", tuple(names.split())) for names, operation in tuning()),
        *(Case(operation, "tuning", tuple(names.split()), blind_round=1) for names, operation in seen()),
        *(Case(operation, "held-out", blind_round=number) for number, operation in held_out()),
    ]


def tuning() -> list[tuple[str, Operation]]:
    """Calls, and the constants that they have a say in; without one, they have a say in their kind's factor alone."""
    x, matrices, small = tensor(F32, 5120, 512), tensor(F32, 10, 512, 512), tensor(F32, 256, 64, 64)
    rows, wide, flat = tensor(F32, 8192, 2048), tensor(F32, 1024, 65_536), tensor(F32, 2**22)
    long, logits, routes = tensor(BF16, 64, 32_768), tensor(BF16, 64, 50_257), tensor(F32, 16_384, 64)
    tall, square, large = tensor(F32, 4096, 256), tensor(F32, 1024, 1024), tensor(F32, 8192, 8192)
    return [
        *(("BARRIER_S", _scan("cumsum", tensor(BOOL, *shape), -1, INT64)) for shape in MASKS),
        ("BARRIER_S", _scan("cumsum", rows, 1)),
        ("CACHE_WAIT_S", _scan("cumsum", x, 0)),
        ("MEMORY_WAIT_S", _scan("cumsum", wide, 0)),
        ("MEMORY_WAIT_S", call("cummax.default", rows, 0, out=(rows, _indices(rows)))),
        ("KERNEL_S", _scan("cumsum", flat, 0)),
        ("", _scan("logcumsumexp", flat, 0)),
        ("LONG_SORT_S_PER_BYTE", _sort(x, 0)),
        ("LONG_SORT_S_PER_BYTE", _sort(long, 1, True)),
        ("SHORT_SORT_S_PER_BYTE", _sort(rows, 1)),
        ("KERNEL_S", _sort(tensor(F32, 64, 256), 1)),
        ("SELECT_S", call("topk.default", x, 8, out=_top(x, 8))),
        ("SELECT_S", call("topk.default", logits, 50, out=_top(logits, 50))),
        ("KERNEL_S BARRIER_S", call("topk.default", routes, 2, out=_top(routes, 2))),
        ("BATCHED_COLUMN_S", call("linalg_inv_ex.default", matrices, out=(matrices, tensor("int32", 10)))),
        ("BATCHED_COLUMN_S", call("linalg_inv_ex.default", small, out=(small, tensor("int32", 256)))),
        ("COLUMN_S", call("linalg_qr.default", tall, out=(tall, tensor(F32, 256, 256)))),
        ("COLUMN_S", _factors(square)),
        ("EFFICIENCY", _factors(large)),
        ("ITERATIONS", _singular(matrices)),
        ("", call("gather.default", x, 1, _indices(x), out=x)),
        ("ADDITION_S", call("scatter_add.default", rows, 1, _indices(rows), rows, out=rows)),
        ("", call("_fft_c2c.default", x._replace(dtype=C64), (1,), 0, True, out=x._replace(dtype=C64))),
        ("", call("_fft_r2c.default", rows, (1,), 0, True, out=tensor(C64, 8192, 1025))),
        ("", operators.mm(F64, 512, 512, 512)),
    ]


def seen() -> list[tuple[str, Operation]]:
    """Calls that were held out in the first round, and the constants that they have had a say in since."""
    counted = ("ADDITION_S", call("histc.default", tensor(F32, 2**22), 100, out=tensor(F32, 100)))
    return [counted, *_seen_indexing(), *_seen_factorisations()]


def held_out() -> list[tuple[int, Operation]]:
    """Other operators, shapes and dtypes of each kind, with the round in which they were held out."""
    first = [*_products(), *_scans(), *_sorts(), *_transforms(), *_others()]
    second = [*_counts(), *_indexing(), *_factorisations()]
    return [*((1, operation) for operation in first), *((2, operation) for operation in second)]


def _products() -> list[Operation]:
    scale, (fp8, int8) = tensor(F32), ((tensor(d, 4096, 4096), _transposed(d, 4096, 4096)) for d in (FP8, "int8"))
    return [
        operators.mm(C64, 1024, 1024, 1024),
        operators.bmm(C64, 16, 256, 256, 256),
        operators.addmm(C64, 4096, 512, 512, "NN"),
        operators.mm(C128, 1024, 1024, 1024),
        operators.mm(F64, 2048, 2048, 2048),
        call("_int_mm.default", *int8, out=tensor("int32", 4096, 4096)),
        call("_scaled_mm.default", *fp8, scale, scale, None, None, "torch.bfloat16", out=tensor(BF16, 4096, 4096)),
    ]


def _scans() -> list[Operation]:
    least, sequences = tensor(F32, 2048, 4096), tensor(BF16, 16, 512, 4096)
    return [
        *(_scan("cumsum", tensor(BOOL, *shape), -1, INT64) for shape in ((16, 1024), (64, 4096), (512, 512))),
        _scan("cumsum", tensor(F32, 32, 50_257), 1),
        _scan("cumprod", tensor(F32, 65_536, 128), 1),
        call("cummin.default", least, 1, out=(least, _indices(least))),
        _scan("cumsum", sequences, 1),
        _scan("cumsum", tensor(INT64, 1, 2**20), 1),
    ]


def _sorts() -> list[Operation]:
    keys, scores, values = tensor(INT64, 2**20), tensor(F32, 1024, 10_000), tensor(F32, 4096, 2048)
    few, some = tensor(F32, 16, 100_000), tensor(F32, 4096)
    return [
        _sort(keys, 0),
        _sort(tensor(F16, 2048, 4096), 1),
        call("sort.stable", few, stable=True, dim=1, out=(few, _indices(few))),
        call("topk.default", scores, 100, out=_top(scores, 100)),
        call("kthvalue.default", values, 100, out=(some, _indices(some))),
        call("median.dim", values, 1, out=(some, _indices(some))),
        call("_unique2.default", tensor(F32, 10**6), out=(tensor(F32, 10**6), tensor(INT64, 0), tensor(INT64, 0))),
    ]


def _counts() -> list[Operation]:
    return [
        call("histc.default", tensor(F32, 2**24), 1000, out=tensor(F32, 1000)),
        call("bincount.default", tensor(INT64, 2**20), out=tensor(INT64, 1000)),
    ]


def _seen_indexing() -> list[tuple[str, Operation]]:
    """Held out in the first round, until additions and searches were estimated by their times."""
    table, rows = tensor(F32, 32_000, 1024), tensor(F32, 8192, 1024)
    scores, some, square = tensor(BF16, 64, 32_768), tensor(BF16, 64, 4096), tensor(F32, 4096, 4096)
    queries = tensor(F32, 10**6)
    return [
        ("ADDITION_S", call("index_add.default", table, 0, tensor(INT64, 8192), rows, out=table)),
        ("", call("index_select.default", table, 0, tensor(INT64, 8192), out=rows)),
        ("", call("gather.default", scores, 1, _indices(some), out=some)),
        ("ADDITION_S", call("scatter_add.default", square, 0, _indices(square), square, out=square)),
        ("", call("searchsorted.Tensor", tensor(F32, 100_000), queries, out=_indices(queries))),
    ]


def _indexing() -> list[Operation]:
    halves, square, few = tensor(BF16, 4096, 4096), tensor(F32, 8192, 8192), tensor(F32, 1000, 256)
    table, rows, queries = tensor(F32, 100_000, 256), tensor(F32, 50_000, 256), tensor(F32, 10**7)
    values = tensor(F32, 4096, 1024)
    return [
        call("scatter_add.default", halves, 1, _indices(halves), halves, out=halves),
        call("index_add.default", few, 0, tensor(INT64, 65_536), tensor(F32, 65_536, 256), out=few),
        call("gather.default", square, 0, _indices(square), out=square),
        call("scatter.src", values, 1, _indices(values), values, out=values),
        call("index.Tensor", table, (tensor(INT64, 50_000),), out=rows),
        call("index_put_.default", table, (tensor(INT64, 50_000),), rows, out=table),
        call("searchsorted.Tensor", tensor(F32, 1000), queries, out=_indices(queries)),
        call("bucketize.Tensor", values, tensor(F32, 64), out=_indices(values)),
    ]


def _transforms() -> list[Operation]:
    waves, half = tensor(C64, 256, 4096), tensor(C64, 1024, 1025)
    return [
        call("_fft_c2c.default", waves, (1,), 0, True, out=waves),
        call("_fft_r2c.default", tensor(F32, 64, 512, 512), (1, 2), 0, True, out=tensor(C64, 64, 512, 257)),
        call("_fft_c2r.default", half, (1,), 2, 2048, out=tensor(F32, 1024, 2048)),
    ]


def _seen_factorisations() -> list[tuple[str, Operation]]:
    """Held out in the first round, until batches that are eliminated and triangles had rules by their times."""
    square, batch, right = tensor(F32, 256, 256), tensor(F32, 64, 256, 256), tensor(F32, 64, 256, 8)
    panels, triangle, many = tensor(F32, 16, 512, 128), tensor(F32, 1024, 1024), tensor(F32, 1024, 256)
    return [
        ("ITERATIONS", _eigen(square)),
        ("ITERATIONS", _singular(tensor(F32, 2048, 64))),
        ("BATCHED_COLUMN_S", _solution(batch, right)),
        ("COLUMN_S", call("linalg_qr.default", panels, out=(panels, tensor(F32, 16, 128, 128)))),
        ("BATCHED_COLUMN_S", _factors(tensor(F32, 128, 128, 128))),
        ("SUBSTITUTED_COLUMN_S", call("linalg_solve_triangular.default", triangle, many, upper=True, out=many)),
    ]


def _factorisations() -> list[Operation]:
    large, batch, square = tensor(F32, 2048, 2048), tensor(F32, 64, 128, 128), tensor(F32, 1024, 1024)
    small, panels, exponents = tensor(F32, 512, 32, 32), tensor(F32, 64, 128, 32), tensor(F32, 64, 64, 64)
    triangles, many = tensor(F32, 32, 512, 512), tensor(F32, 32, 512, 64)
    return [
        call("linalg_inv_ex.default", large, out=(large, tensor("int32"))),
        call("linalg_inv_ex.default", batch, out=(batch, tensor("int32", 64))),
        _factors(tensor(F32, 32, 512, 512)),
        _factors(tensor(F64, 512, 512)),
        call("_linalg_det.default", small, out=(tensor(F32, 512), small, tensor("int32", 512, 32))),
        _solution(square, tensor(F32, 1024, 16)),
        call("linalg_qr.default", square, out=(square, square)),
        call("linalg_qr.default", panels, out=(panels, tensor(F32, 64, 32, 32))),
        _singular(tensor(F32, 64, 32, 32)),
        _singular(square),
        _eigen(tensor(F64, 128, 128)),
        _eigen(tensor(F32, 16, 128, 128)),
        call("linalg_matrix_exp.default", exponents, out=exponents),
        call("linalg_solve_triangular.default", triangles, many, upper=True, out=many),
    ]


def _others() -> list[Operation]:
    points, words = tensor(F32, 1, 2048, 64), tensor(F32, 8, 512, 768)
    between, features = tensor(F32, 1, 2048, 2048), tensor(F32, 4096, 256)
    pictures, grid, image = tensor(F32, 16, 64, 64, 64), tensor(F32, 16, 64, 64, 2), tensor(F32, 32, 64, 56, 56)
    return [
        call("_cdist_forward.default", points, points, 1.0, None, out=between),
        call("_cdist_forward.default", words, words, 2.0, 2, out=tensor(F32, 8, 512, 512)),
        call("_cdist_backward.default", between, points, points, 1.0, between, out=points),
        call("_pdist_forward.default", tensor(F32, 2048, 128), 2.0, out=tensor(F32, 2048 * 2047 // 2)),
        call("_euclidean_dist.default", features, features, out=tensor(F32, 4096, 4096)),
        call("im2col.default", image, (3, 3), (1, 1), (1, 1), (1, 1), out=tensor(F32, 32, 576, 3136)),
        call("grid_sampler_2d.default", pictures, grid, 0, 0, False, out=pictures),
        call("upsample_bicubic2d.default", pictures, (128, 128), False, out=tensor(F32, 16, 64, 128, 128)),
    ]


def _scan(name: str, x: TensorSpec, dim: int, dtype: str | None = None) -> Operation:
    return call(f"{name}.default", x, dim, out=x._replace(dtype=dtype or x.dtype))


def _sort(x: TensorSpec, dim: int, *descending: bool) -> Operation:
    return call("sort.default", x, dim, *descending, out=(x, _indices(x)))


def _singular(x: TensorSpec) -> Operation:
    *batch, _, columns = x.shape
    values = tensor(x.dtype, *batch, columns)
    return call("_linalg_svd.default", x, False, False, out=(x, values, tensor(x.dtype, *batch, columns, columns)))


def _eigen(x: TensorSpec) -> Operation:
    return call("_linalg_eigh.default", x, "L", True, out=(tensor(x.dtype, *x.shape[:-1]), x))


def _solution(x: TensorSpec, right: TensorSpec) -> Operation:
    *batch, _, columns = x.shape
    pivots = tensor("int32", *batch, columns)
    return call("_linalg_solve_ex.default", x, right, out=(right, x, pivots, tensor("int32", *batch)))


def _factors(x: TensorSpec) -> Operation:
    *batch, _, columns = x.shape
    return call("linalg_lu_factor_ex.default", x, out=(x, tensor("int32", *batch, columns), tensor("int32", *batch)))


def _indices(x: TensorSpec) -> TensorSpec:
    return x._replace(dtype=INT64)


def _transposed(dtype: str, rows: int, columns: int) -> TensorSpec:
    return tensor(dtype, rows, columns, stride=(1, rows))


def _top(x: TensorSpec, k: int) -> tuple[TensorSpec, TensorSpec]:
    return tensor(x.dtype, x.shape[0], k), tensor(INT64, x.shape[0], k)
