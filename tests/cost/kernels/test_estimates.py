"""What counts as measured, on the shipped profile of an H200; and what a full reduction takes there."""

from __future__ import annotations

import pytest

from calibrate.kernels import operators
from calibrate.kernels.operators import tensor
from perfmodel.cost.kernels.dependent_steps import dependent_steps_s
from perfmodel.cost.kernels.estimates import FAR, factor_of_spread
from perfmodel.cost.kernels.kernel_cost import KernelCost
from perfmodel.cost.kernels.lookup import kernel_costs
from perfmodel.hardware.profile import Device, Profile, find_profile, load_profile
from perfmodel.trace.operation import Operation, TensorSpec

MANY = tensor("float32", 50_331_648)  # 201 MB: four times the cache
X = tensor("float32", 5120, 512)
MATRICES = tensor("float32", 10, 512, 512)
VALUE = TensorSpec.parse("float32[]")


@pytest.fixture(scope="module")
def h200() -> Profile:
    return load_profile(find_profile("h200-sxm-x4"))


def cost(profile: Profile, name: str, *inputs: object, out: TensorSpec = VALUE) -> KernelCost:
    return kernel_costs([Operation(f"aten.{name}", inputs, (), (out,))], profile, False)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "inputs", "read_bytes"),
    [
        ("mean.default", (MANY,), MANY.bytes),
        ("sum.dim_IntList", (tensor("float32", 256, 3, 256, 256), (0, 1, 2, 3), True), MANY.bytes),
        ("max.default", (MANY,), MANY.bytes),
        ("argmax.default", (MANY,), MANY.bytes),
        ("linalg_vector_norm.default", (MANY, 2.0), MANY.bytes),
        ("var.correction", (MANY, None), MANY.bytes),
        ("mean.dim", (tensor("float32", 8, 2**22), (1,)), 2**27),
        ("sum.dim_IntList", (tensor("float32", 2**22, 8), (0,)), 2**27),
        ("mse_loss.default", (MANY, MANY), 4 * MANY.bytes),  # two are read, their difference is written, and read
    ],
)
def test_a_reduction_to_few_values_takes_about_what_reading_takes(
    h200: Profile, name: str, inputs: tuple[object, ...], read_bytes: int
) -> None:
    assert h200.device.peak_memory_bytes_per_s is not None
    reading_s = read_bytes / h200.device.peak_memory_bytes_per_s
    assert reading_s < cost(h200, name, *inputs).time_s < 2 * reading_s + 20e-6


@pytest.mark.parametrize("elements", [1, 100, 2**13, 2**17 - 1, 2**17 + 1, 12_582_912])
def test_small_ones_take_microseconds(h200: Profile, elements: int) -> None:
    assert 1e-6 < cost(h200, "sum.default", tensor("float32", elements)).time_s < 40e-6


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("_linalg_svd.default", (MATRICES,)),
        ("_unique2.default", (X,)),
        ("nonesuch.default", (X,)),
        ("_fft_c2c.default", (X._replace(dtype="complex64"), (1,), 0, True)),
        ("gather.default", (X, 1, X._replace(dtype="int64"))),
        ("upsample_nearest2d.default", (tensor("float32", 8, 64, 32, 32), (64, 64))),  # other pooling was
        ("mm.default", (tensor("float64", 512, 512),) * 2),
        ("mm.default", (tensor("complex64", 512, 512),) * 2),
        ("_int_mm.default", (tensor("int8", 512, 512),) * 2),
    ],
)
def test_a_curve_of_other_operators_or_dtypes_is_no_measurement(
    h200: Profile, name: str, inputs: tuple[object, ...]
) -> None:
    assert cost(h200, name, *inputs, out=X).source == "estimated"


def test_a_complex_product_takes_as_long_as_the_real_one_with_the_same_arithmetic(h200: Profile) -> None:
    """[m, 2k] x [2k, 2n], and not [m, k] x [k, n]."""
    for build in (operators.mm, operators.addmm, lambda dtype, *sizes: operators.bmm(dtype, 1, *sizes)):
        found, real, least = (
            kernel_costs([build(dtype, 4096, n, k)], h200, False, False)[0]
            for dtype, n, k in (("complex64", 2048, 2048), ("float32", 4096, 4096), ("float32", 2048, 2048))
        )
        assert found.flops == real.flops == 4 * least.flops
        assert found.time_s == pytest.approx(real.time_s, rel=0.1)
        assert found.time_s > 3 * least.time_s


@pytest.mark.parametrize("with_curves", [True, False])
@pytest.mark.parametrize(
    ("name", "inputs", "pairs", "length"),
    [
        ("_cdist_forward.default", (tensor("float32", 8, 4096, 512), tensor("float32", 8, 2048, 512), 1.0, None), 2**26, 512),
        ("_pdist_forward.default", (tensor("float32", 8192, 512), 2.0), 2**25 - 2**12, 512),
        ("_euclidean_dist.default", (tensor("float32", 8192, 512),) * 2, 2**26, 512),
    ],
)  # fmt: skip
def test_distances_take_at_least_their_arithmetic(
    h200: Profile, name: str, inputs: tuple[object, ...], pairs: int, length: int, with_curves: bool
) -> None:
    """However little is moved: two operations at least for each pair of rows and element."""
    profile = h200 if with_curves else h200.model_copy(update={"curves": {}, "kernels": {}})
    found = cost(profile, name, *inputs, out=tensor("float32", pairs))
    least_s = 2 * pairs * length / h200.device.peak_flops_per_s["fp32"]
    assert found.source == "estimated"
    assert found.time_s > least_s > 2 * found.bytes / 4.8e12 / factor_of_spread(found.spread)


def test_an_estimate_without_any_curve(h200: Profile) -> None:
    """The datasheet's label is no better where the kind of operator is what is not known."""
    bare = h200.model_copy(update={"curves": {}, "kernels": {}})
    assert cost(bare, "sort.default", X, 0, out=X).source == "estimated"
    assert cost(bare, "relu.default", X, out=X).source == "roofline"
    assert cost(bare, "_linalg_svd.default", MATRICES).source == "estimated"


@pytest.mark.parametrize("name", ["relu", "lgamma", "nan_to_num", "maximum"])
def test_elementwise_operators_tell_of_each_other(h200: Profile, name: str) -> None:
    assert cost(h200, f"{name}.default", X, out=X).source == "curve"


def test_steps_that_wait_come_on_top_with_and_without_a_curve(h200: Profile) -> None:
    bare = h200.model_copy(update={"curves": {}, "kernels": {}})
    for name, out in (("cumsum.default", X), ("sort.default", X), ("topk.default", tensor("float32", 5120, 8))):
        waiting_s = dependent_steps_s(Operation(f"aten.{name}", (X, 0), (), (out,)), h200.device)
        for profile in (h200, bare):
            assert waiting_s < cost(profile, name, X, 0, out=out).time_s < waiting_s + 40e-6
    assert cost(bare, "_linalg_svd.default", MATRICES).time_s == pytest.approx(0.18, rel=0.4)


def test_scans_that_the_barriers_time_comes_from(h200: Profile) -> None:
    """These are among the six that it was fitted on, and say nothing of others."""
    for shape in ((1, 128), (2, 256), (8, 1024), (2, 2048)):
        mask, sums = tensor("bool", *shape), tensor("int64", *shape)
        operation = Operation("aten.cumsum.default", (mask, -1), (), (sums,))
        measured, estimated = (kernel_costs([operation], h200, False, exact)[0] for exact in (True, False))
        assert (measured.source, estimated.source) == ("exact", "estimated")
        assert estimated.time_s == pytest.approx(measured.time_s, rel=0.25)


def test_a_cpu_takes_many_times_as_long_as_elementwise(h200: Profile) -> None:
    cpu = h200.model_copy(update={"device": Device(kind="cpu", name="CPU", memory_bytes=2**34), "kernels": {}})
    elementwise, gathering, transforming, scanning, choosing, sorting, adding_up = (
        cost(cpu, f"{name}.default", X, 1, out=X)
        for name in ("nonesuch", "gather", "_fft_c2c", "cumsum", "topk", "sort", "logcumsumexp")
    )
    assert gathering.time_s == pytest.approx(elementwise.time_s, rel=0.1)
    assert elementwise.time_s < transforming.time_s < scanning.time_s < choosing.time_s < sorting.time_s
    assert sorting.time_s < adding_up.time_s
    assert factor_of_spread(sorting.spread) == pytest.approx(FAR)


def test_outside_the_shapes_of_the_fit_is_said_and_less_sure(h200: Profile) -> None:
    ranges = h200.curves["reduction"].model_copy(
        update={"ranges": {"rows": (128.0, 131072.0), "length": (49.0, 6080.0)}}
    )
    known = h200.model_copy(update={"curves": h200.curves | {"reduction": ranges}})
    inside, beside, outside, far = (
        kernel_costs([operators.reduction("mean.dim", tensor("float32", rows, 2048), (1,))], known, False)[0]
        for rows in (65536, 200_000, 2**20, 2**22)
    )
    assert [each.source for each in (inside, beside, outside, far)] == [
        "curve",
        "curve",
        "extrapolated",
        "extrapolated",
    ]
    assert inside.spread == beside.spread < outside.spread < far.spread
    assert outside.time_s > 3 * beside.time_s
