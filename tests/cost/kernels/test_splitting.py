import pytest

from perfmodel.cost.kernels.splitting import column_split, list_launches, row_kernel

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
def test_column_split(rows, length, expected):
    assert column_split(rows, length, 132) == expected


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
