import math

import pytest
import torch

from calibrate.kernels import grid_cpu, grid_cuda
from calibrate.kernels.grid import grid_operations
from calibrate.kernels.sampling import gemm_sizes, latin_hypercube, powers, rounded
from perfmodel.cost.kernels.classify import CLASSES, classify
from perfmodel.cost.kernels.features import features_of
from perfmodel.cost.kernels.work import arithmetic_kind
from perfmodel.hardware.profile import Device
from perfmodel.trace.kernel_key import kernel_key
from perfmodel.trace.operation import TensorSpec

GPU = Device(kind="cuda", name="GPU", memory_bytes=140 << 30, multiprocessors=132, l2_bytes=60 << 20)
CPU = Device(kind="cpu", name="CPU", memory_bytes=8 << 30)
# Operators whose layouts or shapes on the meta device are not those of CUDA, or which it lacks.
UNMEASURED = {"index", "scan", "sort", "fft", "linear_algebra", "other"}
NOT_ON_META = {"convolution", "_fused_sgd_"}


@pytest.mark.parametrize("device", [GPU, CPU], ids=["gpu", "cpu"])
def test_no_key_twice_and_the_same_again(device):
    grid = grid_operations(device)
    keys = [kernel_key(operation, tf32) for operation, tf32 in grid]
    assert len(set(keys)) == len(keys)
    assert keys == [kernel_key(operation, tf32) for operation, tf32 in grid_operations(device)]


def test_size_of_the_grids():
    assert 700 <= len(grid_operations(GPU)) <= 1150
    assert len(grid_operations(CPU)) <= 480


def test_every_class_and_arithmetic_is_on_the_gpu_grid():
    grid = grid_operations(GPU)
    assert {classify(operation) for operation, _ in grid} == set(CLASSES) - UNMEASURED
    kinds = {arithmetic_kind(operation, tf32) for operation, tf32 in grid if classify(operation) == "gemm"}
    assert kinds == {"fp32", "tf32", "bf16", "fp16"}


@pytest.mark.parametrize(
    ("device", "groups"), [(GPU, grid_cuda.classes()), (CPU, grid_cpu.classes())], ids=["gpu", "cpu"]
)
def test_an_interrupted_run_has_its_share_of_every_group(device, groups):
    grid = grid_operations(device)
    first = {kernel_key(*point) for point in grid[: len(grid) // 3]}
    for points in groups.values():
        keys = {kernel_key(*point) for point in points}
        assert len(keys & first) / len(keys) == pytest.approx(1 / 3, abs=0.1)


@pytest.mark.parametrize("device", [GPU, CPU], ids=["gpu", "cpu"])
def test_every_point_has_a_curve(device):
    assert all(features_of(operation, device, tf32) is not None for operation, tf32 in grid_operations(device))


def test_only_float32_products_allow_tf32():
    for operation, tf32 in grid_operations(GPU):
        if tf32:
            assert arithmetic_kind(operation, True) == "tf32"


def _meta(value):
    if isinstance(value, TensorSpec):
        return torch.empty_strided(value.shape, value.stride, dtype=getattr(torch, value.dtype), device="meta")
    if isinstance(value, tuple):
        return [_meta(item) for item in value]
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return value


def _run_on_meta(operation):
    function = torch.ops
    for part in operation.name.split("."):
        function = getattr(function, part)
    result = function(*map(_meta, operation.inputs), **{name: _meta(value) for name, value in operation.keywords})
    results = result if isinstance(result, (tuple, list)) else [result]
    return [
        (tuple(t.shape), t.stride(), str(t.dtype).removeprefix("torch."))
        for t in results
        if isinstance(t, torch.Tensor)
    ]


@pytest.mark.parametrize("device", [GPU, CPU], ids=["gpu", "cpu"])
def test_every_call_is_one_torch_accepts_with_the_outputs_stated(device):
    for operation, _ in grid_operations(device):
        if operation.base_name not in NOT_ON_META:
            stated = [(spec.shape, spec.stride, spec.dtype) for spec in operation.outputs]
            assert _run_on_meta(operation) == stated, kernel_key(operation)


def test_the_largest_point_fits_a_small_gpu():
    largest = max(
        sum(spec.bytes for spec in (*operation.input_tensors(), *operation.outputs))
        for operation, _ in grid_operations(GPU)
    )
    assert largest < 8e9


def test_latin_hypercube_has_one_point_a_stratum():
    points = latin_hypercube("seed", 16, (1, 2**16), (10, 1000))
    assert sorted(math.floor(math.log2(x)) for x, _ in points) == list(range(16))
    assert all(10 <= y <= 1000 for _, y in points)


def test_sizes_are_not_all_powers_of_two():
    import random

    draw = random.Random(0)
    sizes = [rounded(1500 * 1.01**i, draw) for i in range(100)]
    powers_of_two = sum(size & (size - 1) == 0 for size in sizes)
    odd = sum(size % 8 != 0 for size in sizes)
    assert 15 <= powers_of_two <= 50
    assert 1 <= odd <= 15


def test_gemm_sizes_keep_their_limits():
    sizes = list(gemm_sizes("seed", 40, "fp32", (64, 16384), (64, 16384), (64, 16384)))
    assert len(sizes) == 40
    assert all(1e7 <= 2 * m * n * k <= 2.5e11 for m, n, k in sizes)


def test_powers():
    assert powers(64, 4096, 4) == [64, 256, 1024, 4096]
    assert powers(1, 100, 2, multiple=8) == [8, 96]


def test_classes_are_named_once():
    assert len(grid_cuda.classes()) == 20
