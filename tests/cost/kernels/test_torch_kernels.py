import pytest

from perfmodel.cost.kernels.torch_kernels import list_launches, reduction_split, row_kernel

CHUNK = 65536


@pytest.mark.parametrize(
    ("sizes", "lists", "expected"),
    [
        ([10] * 110, 1, [(110, 1100)]),
        ([10] * 111, 1, [(110, 1100), (1, 10)]),
        ([10] * 65, 2, [(64, 640), (1, 10)]),
        ([CHUNK * 320], 1, [(320, 320 * CHUNK)]),
        ([CHUNK * 320 + 1], 1, [(320, 320 * CHUNK), (1, 1)]),
        ([CHUNK * 200, CHUNK * 200], 3, [(320, 320 * CHUNK), (80, 80 * CHUNK)]),
        ([], 1, []),
    ],
)
def test_list_launches(sizes, lists, expected):
    assert list_launches(sizes, lists) == expected


@pytest.mark.parametrize(
    ("rows", "length", "expected"),
    [
        (32, 1024, (32, 1)),  # too few rows to share among the threads of a block
        (592, 1024, (148, 1)),  # four rows of threads
        (592, 1023, (37, 1)),  # no vectors: sixteen
        (4096, 256, (16, 64)),  # few columns: blocks share them
        (4096, 2**20, (1024, 1)),  # enough columns to fill the chip
    ],
)
def test_split_of_columns(rows, length, expected):
    split = reduction_split(length, rows, along=False, vector=4 if length % 4 == 0 else 1, multiprocessors=132)
    assert (split.values, split.groups) == expected


@pytest.mark.parametrize(
    ("results", "values", "along", "expected"),
    [
        (1, 1024, True, (4, 1, 1)),  # 256 lanes of vectors in one block
        (1, 255 * 512, True, (255, 1, 1)),  # the longest that one block does
        (1, 256 * 512, True, (16, 16, 1)),  # from there on blocks share it, with at least 16 values a thread
        (1, 2**24, True, (63, 528, 1)),  # as many blocks as are resident: 4 on each of 132 multiprocessors
        (1, 2**28, True, (256, 2048, 1)),  # more of them, so that no thread has over 256 values
        (64, 1024, True, (32, 1, 4)),  # a warp does a row, 16 rows a block
        (64, 8192, True, (16, 1, 64)),  # a block does a row
        (64, 2**20, True, (228, 9, 64)),  # nine blocks do one
        (8, 2**20, False, (16, 1024, 1)),  # two lanes of vectors, 64 threads down each, in small blocks
    ],
)
def test_split_of_few_results(results, values, along, expected):
    assert reduction_split(results, values, along, 4, 132)[:3] == expected


@pytest.mark.parametrize(
    ("name", "length", "item_bytes", "expected"),
    [
        ("native_layer_norm", 1024, 4, "any"),
        ("_softmax", 1024, 4, "warp"),
        ("_softmax", 1028, 4, "shared"),
        ("_log_softmax", 1025, 2, "block"),
        ("_log_softmax", 50257, 4, "block"),
    ],
)
def test_row_kernel(name, length, item_bytes, expected):
    assert row_kernel(name, length, item_bytes) == expected


def test_launches_of_a_tensor_beyond_any_device_are_counted_at_once():
    launch = 320 * 65536
    assert list_launches([5, 10**13, 7], 1)[:2] == [(320, 319 * 65536 + 5), (320, launch)]
    assert sum(elements for _, elements in list_launches([5, 10**13, 7], 1)) == 10**13 + 12
    assert len(list_launches([10**13], 1)) == -(-(10**13) // launch)
