"""How PyTorch's own CUDA kernels split their work, which decides what they cost and which workspaces they ask for.

Both the costs of kernels and the memory walk read the rules here: chunks and launches of list operators, threads of
reductions, rows of softmax, indices of an embedding's backward.

Read in ATen/native/cuda: ForeachFunctors.cuh and MultiTensorApply.cuh, Reduce.cuh, SoftMax.cu, Embedding.cu.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from perfmodel.cost.kernels.work import is_list, tensors_of
from perfmodel.trace.operation import Operation

CHUNK_ELEMENTS = 65536  # of a tensor in a list: what one block works on
# Tensors that one launch of a list operator takes, by number of lists (1, 2, ...), and its blocks: 4 KiB of arguments.
TENSORS_PER_LAUNCH = (110, 64, 48, 36, 30)
BLOCKS_PER_LAUNCH = 320
FUSED_LISTS = 4  # of a fused step, without the step counters

REDUCTION_THREADS = 512
WARP = 32
THREADS_PER_MULTIPROCESSOR = 2048
LEAST_VALUES_PER_THREAD, MOST_VALUES_PER_THREAD = 16, 256

LONGEST_WARP_ROW = 1024
SHARED_MEMORY_BYTES = 48 * 1024
ROW_ALIGNMENT_BYTES = 16

EMBEDDING_ROWS_WITHOUT_SORT = 3072  # one kernel walks over so many indices; more of them are sorted first


def list_launches(sizes: list[int], lists: int) -> list[tuple[int, int]]:
    """(blocks, elements) of each launch of an operator on ``lists`` lists of tensors of these sizes (elements).

    A launch takes 65536-element chunks of tensors in order until its table of tensors or of blocks is full.

    >>> list_launches([65536] * 3, 1), list_launches([1] * 111, 1)
    ([(3, 196608)], [(110, 110), (1, 1)])
    """
    most = TENSORS_PER_LAUNCH[min(lists, len(TENSORS_PER_LAUNCH)) - 1]
    launches: list[tuple[int, int]] = []
    tensors, blocks, elements_here = 0, 0, 0
    whole = BLOCKS_PER_LAUNCH * CHUNK_ELEMENTS
    for size in sizes:
        tensors += 1
        left = size
        while left > 0:
            if not blocks and left > whole:  # of a tensor by itself
                count = (left - 1) // whole
                launches += [(BLOCKS_PER_LAUNCH, whole)] * count
                left -= count * whole
                tensors = 1
            taken = min(left, (BLOCKS_PER_LAUNCH - blocks) * CHUNK_ELEMENTS)
            blocks, elements_here, left = blocks - (-taken // CHUNK_ELEMENTS), elements_here + taken, left - taken
            full = blocks == BLOCKS_PER_LAUNCH or (tensors == most and left == 0)
            if full:
                launches.append((blocks, elements_here))
                tensors, blocks, elements_here = (1 if left else 0), 0, 0
    return [*launches, (blocks, elements_here)] if blocks else launches


def optimizer_launches(operation: Operation) -> list[tuple[int, int]]:
    """(blocks, elements) of each launch of an operator on lists; a fused step's counters are no list of their own."""
    lists = [tensors_of(argument) for argument in operation.inputs if is_list(argument)]
    sizes = [spec.numel for spec in lists[0]] if lists else [1]
    counters = operation.base_name.startswith("_fused_") and len(lists) > FUSED_LISTS
    return list_launches(sizes, max(len(lists) - counters + bool(operation.outputs), 1))


class Split(NamedTuple):
    """The division of a reduction's work among threads and blocks.

    Attributes
    ----------
    values : int
        Values that one thread reduces, one after the other.
    groups : int
        Blocks that share each result.
    blocks : int
        Blocks of threads that it takes to make all results once; with ``groups``, so many times as many are launched.
    row_results : int
        Results that one row of a block's threads makes: 1 where neighbouring threads reduce one result.
    """

    values: int
    groups: int
    blocks: int
    row_results: int


def reduction_split(results: int, values: int, along: bool, vector: int, multiprocessors: int) -> Split:
    """Return how ATen divides a reduction among threads (``setReduceConfig`` in Reduce.cuh).

    Parameters
    ----------
    results, values : int
        How many values come out, and of how many each is made.
    along : bool
        Whether neighbours in memory belong to the same result (rows), or to neighbouring ones (columns).
    vector : int
        Elements that a thread loads at once.
    multiprocessors : int
        Of the device, each with room for 2048 threads.

    Notes
    -----
    A block has up to 512 threads (over results loaded four at a time: 128). Its rows share a result once a thread would
    reduce 16 values a row, or 256; blocks share it once each of these threads still has 256 values.

    Examples
    --------
    >>> reduction_split(1, 2**24, True, 4, 132)
    Split(values=63, groups=528, blocks=1, row_results=1)
    >>> reduction_split(64, 1024, True, 4, 132)
    Split(values=32, groups=1, blocks=4, row_results=1)
    """
    lanes, others = (values // vector, results) if along else (results // vector, values)
    most = REDUCTION_THREADS if along else REDUCTION_THREADS // vector
    lanes, others = (min(2 ** int(math.log2(max(size, 1))), most) for size in (lanes, others))
    height = min(others, most // min(lanes, WARP))
    width = min(lanes, most // height)
    each = -(-values // (width if along else 1))
    is_shared = each >= min(height * LEAST_VALUES_PER_THREAD, MOST_VALUES_PER_THREAD)
    each = -(-each // height) if is_shared else each
    row_results = 1 if along else width * vector
    blocks = -(-results // (row_results * (1 if is_shared else height)))
    resident = multiprocessors * (THREADS_PER_MULTIPROCESSOR // (width * height))
    if not is_shared or each < MOST_VALUES_PER_THREAD or blocks > resident:
        return Split(each, 1, blocks, row_results)
    groups = max(min(-(-resident // blocks), -(-each // LEAST_VALUES_PER_THREAD)), -(-each // MOST_VALUES_PER_THREAD))
    return Split(-(-each // groups), groups, blocks, row_results)


def row_kernel(name: str, length: int, item_bytes: int) -> str:
    """Which of an operator's kernels takes rows of that length.

    Softmax keeps a row in one warp's registers up to 1024 elements, in a block's shared memory while it fits there, and
    else reads it several times (ATen/native/cuda/SoftMax.cu).
    """
    if "softmax" not in name:
        return "any"
    if length <= LONGEST_WARP_ROW and length * item_bytes <= 4 * LONGEST_WARP_ROW:
        return "warp"
    fits = length * item_bytes <= SHARED_MEMORY_BYTES and length * item_bytes % ROW_ALIGNMENT_BYTES == 0
    return "shared" if fits else "block"
