"""Estimates of scans, sorts, selections and factorisations: how they grow, and what they come from."""

from __future__ import annotations

import pytest

from calibrate.kernels.operators import tensor
from perfmodel.cost.kernels.dependent_steps import dependent_steps_s
from perfmodel.hardware.profile import Device
from perfmodel.trace.operation import Argument, Operation, TensorSpec

H200 = Device(
    kind="cuda",
    name="H200",
    memory_bytes=140 * 2**30,
    multiprocessors=132,
    l2_bytes=60 * 2**20,
    peak_flops_per_s={"fp32": 67e12},
)
CPU = Device(kind="cpu", name="CPU", memory_bytes=2**30)
X = tensor("float32", 5120, 512)
MATRICES = tensor("float32", 10, 512, 512)


def seconds(name: str, *inputs: Argument, device: Device = H200, **keywords: Argument) -> float:
    outputs = tuple(spec for spec in inputs[:1] if isinstance(spec, TensorSpec))
    return dependent_steps_s(Operation(f"aten.{name}", inputs, tuple(sorted(keywords.items())), outputs), device)


def test_a_scan_down_columns_waits_for_each_row() -> None:
    """However many columns there are, until they are more than the device has threads."""
    assert seconds("cumsum.default", X, 0) == seconds("cumsum.default", tensor("float32", 5120, 64), -2)
    assert seconds("cumsum.default", tensor("float32", 10240, 64), 0) == 2 * seconds("cumsum.default", X, 0)
    assert seconds("cumsum.default", tensor("float32", 3, 5120, 64), 1) == seconds("cumsum.default", X, 0)
    threads = 132 * 2048
    one, two = (seconds("cumsum.default", tensor("float32", 512, threads * n), 0) for n in (1, 2))
    assert two == 2 * one > 2 * seconds("cumsum.default", tensor("float32", 512, 64), 0)  # and each from memory


def test_a_scan_along_rows_is_shared_by_a_blocks_threads() -> None:
    along, down = seconds("cumsum.default", X, 1), seconds("cumsum.default", X, 0)
    assert 1e-6 < along < down / 50
    assert seconds("cumsum.default", tensor("float32", 2**22), 0) < 5e-6  # of one row, by all blocks
    assert seconds("cummax.default", tensor("float32", 2**22), 0) > 1e-3  # with indices, by one
    assert seconds("cumsum.default", X, dim=1) == along


def test_sorts_grow_with_elements_and_bytes_of_the_keys() -> None:
    many, few = tensor("float32", 4 * 5120, 512), tensor("bfloat16", 5120, 512)
    assert 3 < seconds("sort.default", many, 0) / seconds("sort.default", X, 0) < 4
    assert 0.4 < seconds("sort.default", few, 0) / seconds("sort.default", X, 0) < 0.6
    assert seconds("sort.default", X, -1) < seconds("sort.default", X, 0) / 4  # short rows, each within a block
    assert seconds("sort.stable", X, stable=True, dim=0) == seconds("sort.default", X, 0)
    assert seconds("_unique2.default", X) > seconds("sort.default", X, 1)
    assert 0 < seconds("bincount.default", X) < seconds("sort.default", X, 0) / 5  # which counts and sorts nothing
    assert seconds("unique_consecutive.default", X) == 0


def test_selections() -> None:
    routed = seconds("topk.default", tensor("float32", 8192, 64), 2, 1)
    assert 10e-6 < routed < 100e-6
    longest = seconds("topk.default", tensor("bfloat16", 64, 50_257), 50)
    assert routed < longest < seconds("topk.default", tensor("float32", 64, 50_257), 50)
    assert seconds("median.default", X) > 50 * seconds("median.dim", X, 1)  # one block for all of it


def test_batches_are_eliminated_all_at_once_and_large_matrices_compute() -> None:
    """A single matrix has kernels that work together on it; a device has room for 132 at once."""
    one, few, full, more = (seconds("linalg_inv_ex.default", tensor("float32", n, 64, 64)) for n in (1, 2, 132, 133))
    assert one == few / 2
    assert few == full == more / 2
    large = [seconds("linalg_inv_ex.default", tensor("float32", n, n)) for n in (32768, 65536)]
    assert large[1] == pytest.approx(8 * large[0])


def test_other_factorisations_take_one_matrix_after_the_other() -> None:
    one, four = (seconds("linalg_qr.default", tensor("float32", n, 512, 128)) for n in (1, 4))
    assert four == 4 * one
    singular, eigen = (
        seconds(f"{name}.default", tensor("float32", 512, 512)) for name in ("_linalg_svd", "_linalg_eigh")
    )
    assert singular == eigen > 4 * seconds("linalg_qr.default", tensor("float32", 512, 512))
    substituted = seconds("linalg_solve_triangular.default", tensor("float32", 512, 512), tensor("float32", 512, 8))
    assert substituted < seconds("linalg_qr.default", tensor("float32", 512, 512)) / 5


def test_additions_and_searches() -> None:
    x, indices = tensor("float32", 4096, 1024), tensor("int64", 4096, 1024)
    added = seconds("scatter_add_.default", x, 1, indices, x)
    assert (
        added
        == seconds("histc.default", x, 100)
        == 2 * seconds("scatter_add_.default", x, 1, indices, x._replace(shape=(2048, 1024)))
    )
    assert seconds("gather.default", x, 1, indices) == 0
    few, many = (seconds("searchsorted.Tensor", tensor("float32", n), x) for n in (2**5, 2**20))
    assert many == pytest.approx(4 * few)  # as many halvings
    assert seconds("bucketize.Tensor", x, tensor("float32", 2**5)) == few


def test_distances_take_a_block_for_each_pair_of_rows() -> None:
    points, many, wide = tensor("float32", 1024, 64), tensor("float32", 2048, 64), tensor("float32", 1024, 512)
    of_points, of_many, of_wide = (seconds("_cdist_forward.default", x, x, 1.0, None) for x in (points, many, wide))
    assert of_many == pytest.approx(4 * of_points, rel=0.01)
    assert 1 < of_wide / of_points < 2  # a thread takes two elements of each row
    assert seconds("_pdist_forward.default", points, 1.0) == pytest.approx(of_points / 2, rel=0.01)


def test_where_nothing_waits() -> None:
    assert seconds("relu.default", X) == seconds("cumsum.default", tensor("float32", 0, 4), 0) == 0
    assert seconds("cumsum.default", X, 0, device=CPU) == 0  # by another rule
    assert seconds("linalg_inv_ex.default", MATRICES, device=CPU) == pytest.approx(2 * 10 * 512**3 / 20e9)
