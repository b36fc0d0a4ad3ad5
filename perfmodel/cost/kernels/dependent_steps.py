"""Seconds of steps that wait for each other, far longer than moving the bytes: scans, sorts, factorisations.

What a GPU runs is read in ATen/native/cuda (ScanUtils.cuh, Sort.cpp, SortStable.cu, TensorTopK.cu, Sorting.cu) and in
the libraries that it calls. The seconds are of one H200; bench/estimate_cases.py names the calls that each constant
comes from, and bench/results/estimates-h200.json has their times. How these kinds of operators compute:

- a scan down columns has one thread a column, which waits for each row's load before it asks for the next;
- a scan along rows has blocks of 512 threads, which scan 2^(k+1) elements of a row in k + 1 steps, and then the next;
- a sort passes over keys and indices once for each digit of the keys;
- a selection (of the k largest, of the median) passes over the keys once for each digit, and then collects;
- a factorisation takes one step a column, and many where it iterates;
- distances between rows take one block for each pair of rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from perfmodel.cost.kernels.classify import classify
from perfmodel.cost.kernels.torch_kernels import THREADS_PER_MULTIPROCESSOR, WARP
from perfmodel.cost.kernels.work import footprint_bytes, row_pairs
from perfmodel.hardware.profile import Device
from perfmodel.trace.operation import Operation, TensorSpec
from perfmodel.units import DTYPE_BYTES

CACHE_WAIT_S = 155e-9  # for a load from the second-level cache: cumsum of 5120 rows, 797 us
MEMORY_WAIT_S = 350e-9  # cumsum of 1024 rows of 65,536, 459 us; cummax of 8192 rows, 3.2 ms
# Of a block, with what it does between two: cumsum of 1 to 8 rows of 128 to 2048. Of rows and lengths that had no say
# (16 x 1024 to 65,536 x 128) six scans took 0.76 to 1.24 times what it makes of them.
BARRIER_S = 150e-9
ADDITION_S = 10e-12  # of one element to a place that others add to: two scatter_add, index_add and histc, 3 to 30 ps
# Of a kernel with little to do. A choice below what two calls imply, which both come out a third too short: cumsum of
# one row, 14.3 us, implies 7.5 us and sort of 64 x 256, 26.1 us, implies 4.4 us.
KERNEL_S = 2.5e-6

SCAN_THREADS = 512
LEAST_SCAN_LOG_THREADS, MOST_SCAN_LOG_THREADS = 4, 9  # along one row
WITH_INDICES = ("cummax", "cummin", "_cummax_helper", "_cummin_helper")

SHORT_SORT = 4096  # elements that one block sorts in its own memory
FEW_SEGMENTS = 128  # fewer are sorted by value, all together, and then by segment
# Of key, for each element. The short one is a guess, no measurement: its only call, sort of 8192 x 2048 along its rows,
# 526 us, implies 6.1e-12. The long one comes from sort of 5120 x 512 down its columns, 307 us.
SHORT_SORT_S_PER_BYTE, LONG_SORT_S_PER_BYTE = 4e-12, 25e-12
SORT_KERNELS = 5  # a guess, no measurement
SELECTING = ("topk", "kthvalue", "median", "nanmedian")
COUNTING, COMPARING = ("bincount", "histc"), ("unique_consecutive",)  # one pass over the elements
ADDING = ("scatter_add", "index_add")
SEARCHING = ("searchsorted", "bucketize")
SELECT_S = 7e-12  # an element and pass of many blocks: topk of 5120 x 512, 152 us
SELECT_KERNELS_PER_PASS, COLLECTING_KERNELS = 3, 10  # guesses, no measurement of theirs alone
# Rows from which on several blocks select in one, by how many rows there are at most.
SHARED_SELECTION = (
    (20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800), (math.inf, 400),
)  # fmt: skip
SELECT_THREADS = 1024
SELECT_BITS = 2  # of the keys that one block looks at in a pass; many blocks look at 8
# Passes that leave most of the keys, since only digits of the fraction are evenly spread: a guess, no measurement.
EXPONENT_PASSES = 4

PAIRING = ("_cdist_forward", "_pdist_forward")
PAIR_THREADS, PAIR_BARRIERS = 256, 2  # of a block, in DistanceKernel.cu; no constant comes from distances

# Of a factorisation: a panel's kernels, which wait for each other. One LU and two QR took 1.8 to 6.6 us.
COLUMN_S = 3.5e-6
ITERATIONS = 7  # of each column: two sets of singular values and one of eigenvalues, 18 to 36 us a column
ITERATIVE = ("svd", "eig", "eigh", "lstsq")
BATCHED_ITERATIVE_COLUMNS = 32  # matrices up to so many columns: each block takes one; a guess, no measurement
# Batches are eliminated all at once, a block taking a matrix: four of 64 to 512 columns took 5.6 to 8.7 us a column.
BATCHED_COLUMN_S = 7e-6
ELIMINATING = ("inv", "lu_factor", "solve_ex", "det", "slogdet", "inverse", "lu_with_info")
SUBSTITUTING = ("solve_triangular", "triangular_solve", "cholesky_solve", "lu_solve")
EXPONENTIAL_KERNELS = 100  # of a matrix's exponential, GEMMs and choices between them: a guess, no measurement
SUBSTITUTED_COLUMN_S = 0.3e-6  # of known triangles: solve_triangular of 1024 x 1024, 296 us
# Of the peak, where a factorisation of n columns counts as 2 n^3 operations: LU of 8192 x 8192, 34 ms. An LU has
# 2/3 n^3, so that by its own arithmetic it comes to a third of this, 0.16 of the peak.
EFFICIENCY = 0.5
CPU_FLOPS_PER_S = 20e9  # of one core, where the device's peak is not known: a guess, no measurement


def dependent_steps_s(operation: Operation, device: Device) -> float:
    """Seconds that a call takes beyond moving its bytes; 0 for kinds of operators whose steps do not wait."""
    kind, x = classify(operation), next(iter(operation.input_tensors()), None)
    if x is None or not x.numel:
        return 0.0
    if kind == "linear_algebra":
        return factorisation_s(operation, device)
    return _steps_s(operation, kind, x, device) if device.kind == "cuda" else 0.0


def _steps_s(operation: Operation, kind: str, x: TensorSpec, device: Device) -> float:
    name = operation.base_name.rstrip("_")
    if kind == "scan":
        casts = any(out.dtype != x.dtype for out in operation.outputs[:1])  # which is a kernel of its own
        return _scan_s(operation, _lines(operation, x), device) + (KERNEL_S if casts else 0.0)
    if kind == "sort":
        return _order_s(name, _lines(operation, x), device)
    if name in ADDING:
        return operation.input_tensors()[-1].numel * ADDITION_S
    if name in SEARCHING:
        return _search_s(operation, device)
    return _distances_s(operation, device) if name in PAIRING else 0.0


class Lines(NamedTuple):
    """The lines of a tensor along one of its dimensions: how many there are, how long, and whether they are rows."""

    number: int
    length: int
    are_rows: bool
    item_bytes: int


def _lines(operation: Operation, x: TensorSpec) -> Lines:
    """Along the dimension that the call names: the last whole number among its arguments; k of topk comes before it."""
    numbers = [value for value in operation.inputs if isinstance(value, int) and not isinstance(value, bool)]
    if operation.base_name in ("topk", "kthvalue"):
        numbers = numbers[1:]
    named = dict(operation.keywords).get("dim", numbers[-1] if numbers else None)
    item_bytes = DTYPE_BYTES[x.dtype]
    flat = named is None and (operation.name.endswith("median.default") or "unique" in operation.base_name)
    if flat or not x.shape:
        return Lines(1, x.numel, True, item_bytes)
    dim = (named if isinstance(named, int) else -1) % len(x.shape)
    inner = math.prod(x.shape[dim + 1 :])
    return Lines(x.numel // x.shape[dim], x.shape[dim], inner == 1, item_bytes)


def _scan_s(operation: Operation, lines: Lines, device: Device) -> float:
    wait_s = CACHE_WAIT_S if footprint_bytes(operation) <= device.l2_bytes else MEMORY_WAIT_S
    if not lines.are_rows:
        turns = math.ceil(lines.number / (device.multiprocessors * THREADS_PER_MULTIPROCESSOR))
        return turns * lines.length * wait_s
    if lines.number == 1 and operation.base_name not in WITH_INDICES:
        return KERNEL_S  # CUB scans one row with all blocks
    log_threads = scan_log_threads(lines.number, lines.length)
    blocks = math.ceil(lines.number / (SCAN_THREADS >> log_threads))
    turns = math.ceil(blocks * SCAN_THREADS / (device.multiprocessors * THREADS_PER_MULTIPROCESSOR))
    return turns * math.ceil(lines.length / (2 << log_threads)) * (wait_s + (log_threads + 1) * BARRIER_S)


def scan_log_threads(rows: int, length: int) -> int:
    """Logarithm of a block's threads along a row, the others taking other rows; unsigned, as ScanUtils.cuh has it.

    >>> [scan_log_threads(*shape) for shape in ((1, 10_000), (5120, 512), (4096, 50257), (2**20, 16))]
    [9, 4, 6, 9]
    """
    excess = math.ceil(math.log2(length)) - math.ceil(math.log2(rows))
    wrapped = (9 + excess) % 2**32 // 2
    return min(max(wrapped, LEAST_SCAN_LOG_THREADS), MOST_SCAN_LOG_THREADS)


def _search_s(operation: Operation, device: Device) -> float:
    """A thread halves the sorted values for each value that it looks for, and waits for a load each time."""
    first, second = operation.input_tensors()[:2]
    wanted, values = (first, second) if operation.base_name == "bucketize" else (second, first)
    turns = math.ceil(wanted.numel / (device.multiprocessors * THREADS_PER_MULTIPROCESSOR))
    return turns * math.ceil(math.log2(max(values.shape[-1], 2))) * CACHE_WAIT_S


def _distances_s(operation: Operation, device: Device) -> float:
    """Return the seconds of pairs of rows: a block each, whose threads take the rows' elements in turns and add up the
    sums.
    """
    pairs, length = row_pairs(operation)
    resident = device.multiprocessors * (THREADS_PER_MULTIPROCESSOR // PAIR_THREADS)
    block_s = math.ceil(length / PAIR_THREADS) * CACHE_WAIT_S + PAIR_BARRIERS * BARRIER_S
    return math.ceil(pairs / resident) * block_s


def _order_s(name: str, lines: Lines, device: Device) -> float:
    if name in SELECTING:
        return _select_s(lines, name == "topk", device)
    if name in COUNTING:
        return lines.number * lines.length * ADDITION_S
    return 0.0 if name in COMPARING else _sort_s(lines)


def _sort_s(lines: Lines) -> float:
    key_bytes = lines.number * lines.length * lines.item_bytes
    if lines.length <= SHORT_SORT:
        return SORT_KERNELS * KERNEL_S + key_bytes * SHORT_SORT_S_PER_BYTE
    sorts = 2 if 1 < lines.number < FEW_SEGMENTS else 1
    return sorts * (lines.item_bytes * 2 * KERNEL_S + key_bytes * LONG_SORT_S_PER_BYTE)


def _select_s(lines: Lines, collects: bool, device: Device) -> float:
    """The k-th value of each line, and, where it ``collects``, those above it, which are sorted in the end."""
    collecting_s = COLLECTING_KERNELS * KERNEL_S if collects else 0.0
    if collects and _shares_rows(lines):
        elements, passes = lines.number * lines.length, lines.item_bytes
        kernels_s = SELECT_KERNELS_PER_PASS * passes * KERNEL_S
        return kernels_s + (passes + 1) * elements * SELECT_S + collecting_s
    threads = min(math.ceil(lines.length / WARP) * WARP, SELECT_THREADS)
    resident = device.multiprocessors * min(THREADS_PER_MULTIPROCESSOR // threads, 32)
    narrowing = EXPONENT_PASSES + math.log2(lines.length) / SELECT_BITS  # until one key is left
    searches = min(narrowing, lines.item_bytes * 8 / SELECT_BITS) + 2
    pass_s = 4 * BARRIER_S + math.ceil(lines.length / threads) * CACHE_WAIT_S
    return math.ceil(lines.number / resident) * searches * pass_s + collecting_s


def _shares_rows(lines: Lines) -> bool:
    """Whether several blocks select in one row; ``should_use_multiblock`` of TensorTopK.cu.

    >>> [_shares_rows(Lines(rows, length, True, 4)) for rows, length in ((5120, 512), (5120, 64), (64, 50257))]
    [True, False, True]
    """
    return lines.length >= next(length for most, length in SHARED_SELECTION if lines.number <= most)


def factorisation_s(operation: Operation, device: Device) -> float:
    """Seconds of an operator of linear algebra: its columns' steps, or its arithmetic if that takes longer.

    Matrices of a batch follow one another, unless they are so small that a block has room for one; those that are
    eliminated (LU, inverse, solution) need not. Arithmetic: 2 m n min(m, n) operations, ten times as many where it
    iterates. A CPU has the arithmetic alone.

    >>> gpu = Device(kind="cuda", name="H200", memory_bytes=1, multiprocessors=132)
    >>> inverse = Operation("aten.linalg_inv_ex.default", (TensorSpec.parse("float32[10,512,512]"),))
    >>> round(factorisation_s(inverse, gpu), 5)
    0.00358
    """
    matrices = next((spec for spec in operation.input_tensors() if len(spec.shape) >= 2), None)
    if matrices is None:
        return 0.0
    *batch, rows, columns = matrices.shape
    name = operation.base_name.rstrip("_").removeprefix("_").removeprefix("linalg_")
    iterates, least, count = name.startswith(ITERATIVE), min(rows, columns), math.prod(batch)
    flops = 2.0 * count * rows * columns * least * (10 if iterates else 1)
    if device.kind == "cpu":
        return flops / (device.peak_flops_per_s.get("fp32") or CPU_FLOPS_PER_S)
    if name.startswith("matrix_exp"):
        return EXPONENTIAL_KERNELS * KERNEL_S + flops / device.peak_flops_per_s.get("fp32", math.inf)
    column_s = _columns_s(name, iterates, least, count, device)
    return max(least * column_s, flops / (EFFICIENCY * device.peak_flops_per_s.get("fp32", math.inf)))


def _columns_s(name: str, iterates: bool, columns: int, matrices: int, device: Device) -> float:
    """Seconds of one column of all matrices of a batch."""
    turns = math.ceil(matrices / device.multiprocessors)
    if iterates:
        return (turns if columns <= BATCHED_ITERATIVE_COLUMNS else matrices) * ITERATIONS * COLUMN_S
    if name.startswith(SUBSTITUTING):
        return turns * SUBSTITUTED_COLUMN_S
    if name.startswith(ELIMINATING):
        return min(turns * BATCHED_COLUMN_S, matrices * COLUMN_S)
    return matrices * COLUMN_S
