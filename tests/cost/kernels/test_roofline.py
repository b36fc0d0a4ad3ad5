import pytest

from calibrate.kernels import operators
from calibrate.kernels.operators import tensor
from perfmodel.cost.kernels.roofline import roofline_time_s
from perfmodel.errors import PerfModelError
from perfmodel.hardware.profile import Device

DEVICE = Device(
    kind="cuda", name="GPU", memory_bytes=1 << 40, multiprocessors=128, peak_flops_per_s={"fp32": 64e12, "bf16": 1e15},
    peak_memory_bytes_per_s=4e12,
)  # fmt: skip


def test_a_large_product_is_limited_by_arithmetic():
    operation = operators.mm("bfloat16", 8192, 8192, 8192)
    assert roofline_time_s(operation, DEVICE, False) == pytest.approx(2.5e-6 + 2 * 8192**3 / 0.75e15)


def test_half_filled_multiprocessors_take_as_long_as_full_ones():
    half, full = operators.mm("bfloat16", 1024, 1024, 2**17), operators.mm("bfloat16", 2048, 1024, 2**17)
    assert roofline_time_s(half, DEVICE, False) > 0.6 * roofline_time_s(full, DEVICE, False)


def test_a_copy_is_limited_by_memory():
    x = tensor("float32", 2**28)
    assert roofline_time_s(operators.unary("clone.default", x), DEVICE, False) == pytest.approx(2.5e-6 + 2**31 / 3.4e12)


def test_hardware_without_tensor_cores_for_a_kind_computes_in_fp32():
    old = DEVICE.model_copy(update={"peak_flops_per_s": {"fp32": 64e12}})
    assert roofline_time_s(operators.mm("float32", 4096, 4096, 4096), old, True) == roofline_time_s(
        operators.mm("float32", 4096, 4096, 4096), old, False
    )


def test_without_peaks_it_says_what_to_do():
    bare = Device(kind="cpu", name="some CPU", memory_bytes=1)
    with pytest.raises(
        PerfModelError, match=r"aten\.mm\.default: no measured time, curve or datasheet peak of some CPU .*Calibrate"
    ):
        roofline_time_s(operators.mm("float32", 8, 8, 8), bare, False)
