import gc

import pytest

from calibrate.kernels import operators
from calibrate.kernels.operators import tensor
from perfmodel.cost.kernels import lookup
from perfmodel.cost.kernels.kernel_cost import KernelCost
from perfmodel.cost.kernels.lookup import kernel_costs
from perfmodel.hardware.interconnect import TransferRecord
from perfmodel.hardware.profile import Cache, CurveRecord, Device, KernelRecord, Profile
from perfmodel.trace.kernel_key import kernel_key
from perfmodel.trace.operation import Operation, TensorSpec

X = tensor("float32", 1000, 1000)
ADD, NEG, MM = (
    operators.binary("add.Tensor", X, X),
    operators.unary("neg.default", X),
    operators.mm("float32", 512, 512, 512),
)
DEVICE = Device(
    kind="cuda", name="GPU", memory_bytes=1 << 40, multiprocessors=100, l2_bytes=50 << 20,
    peak_flops_per_s={"fp32": 50e12, "tf32": 400e12}, peak_memory_bytes_per_s=4e12,
)  # fmt: skip
POINTWISE = CurveRecord(
    form="pointwise",
    parameters={
        "start_s": 2e-6, "memory_bytes_per_s": 4e12, "cache_bytes_per_s": 4e12, "cache_bytes": 1e6, "write_weight": 1.0,
        "ramp_s": 1e-12, "elements_per_s": 1e15, "slowness": 1.0, "start_factor": 1.0,
    },
    leave_one_out={"p90": 0.0329},
)  # fmt: skip


def _profile(**records: KernelRecord) -> Profile:
    kernels = {
        kernel_key(operation): records[name]
        for name, operation in (("add", ADD), ("neg", NEG), ("mm", MM))
        if name in records
    }
    return Profile(name="test", device=DEVICE, curves={"pointwise": POINTWISE}, kernels=kernels)


def _cost(operation: Operation, profile: Profile, matmul_tf32: bool = False) -> KernelCost:
    return kernel_costs([operation], profile, matmul_tf32)[0]


def test_exact_then_curve_then_roofline():
    profile = _profile(add=KernelRecord(time_s=5e-6, spread=0.004, kernels=1))
    add, neg, mm = kernel_costs([ADD, NEG, MM], profile, matmul_tf32=False)
    assert add == KernelCost(5e-6, 0.004, "exact", "pointwise", 1e6, 12e6, "fp32", 1, 5e-6)
    assert (neg.source, neg.spread, neg.time_s) == ("curve", pytest.approx(0.02), pytest.approx(4e-6))
    assert (mm.source, mm.spread, mm.kind, mm.flops) == ("roofline", 0.25, "gemm", 2 * 512**3)


def test_only_the_grid_counts_without_exact_keys():
    profile = _profile(
        add=KernelRecord(time_s=5e-6, origin="grid"),
        neg=KernelRecord(time_s=7e-6, origin="scenario"),
        mm=KernelRecord(time_s=9e-6),
    )
    assert [cost.source for cost in kernel_costs([ADD, NEG, MM], profile, False, exact=True)] == ["exact"] * 3
    assert [cost.source for cost in kernel_costs([ADD, NEG, MM], profile, False, exact=False)] == [
        "exact",
        "curve",
        "roofline",
    ]


def test_tf32_has_its_own_key():
    profile = _profile(mm=KernelRecord(time_s=9e-6))
    assert _cost(MM, profile, matmul_tf32=False).source == "exact"
    assert _cost(MM, profile, matmul_tf32=True)[2:8] == ("roofline", "gemm", 2 * 512**3, 3 * 2**20, "tf32", 1)


def test_a_key_that_failed_to_measure_falls_back():
    profile = _profile(add=KernelRecord(error="out of memory"))
    assert _cost(ADD, profile, False).source == "curve"


def test_views_cost_nothing():
    view = Operation("aten.t.default", (X,), (), (X,), runs_on_device=False)
    assert _cost(view, _profile(), False) == KernelCost(0.0, 0.0, "none", "other", 0.0, 0.0, "fp32", 0, 0.0)


def test_launches_are_counted_or_worked_out():
    lists = operators.foreach_adamw([tensor("float32", 10)] * 111)[0]
    assert _cost(lists, _profile(), False).kernels == 2
    assert _cost(ADD, _profile(add=KernelRecord(time_s=5e-6, kernels=3)), False).kernels == 3


def test_costs_are_remembered_as_long_as_the_profile():
    profile = _profile()
    first = kernel_costs([ADD, MM], profile, False)
    again = kernel_costs([MM, ADD], profile, False)
    assert [first[0] is again[1], first[1] is again[0]] == [True, True]
    gc.collect()
    known = len(lookup._COSTS)
    del profile
    gc.collect()
    assert len(lookup._COSTS) == known - 1


@pytest.mark.parametrize(
    ("record", "extra_s"),
    [
        (KernelRecord(time_s=5e-6, cold_time_s=8e-6), 3e-6),
        (KernelRecord(time_s=5e-6, cold_time_s=4e-6), 0.0),  # noise: nothing is faster cold
        (KernelRecord(time_s=5e-6), 8e-6),  # 12 MB of 1 / 1.5 TB/s
        (KernelRecord(error="failed"), 8e-6),  # the same on the curve
    ],
)
def test_cold_is_as_measured_or_what_misses_cost(record, extra_s):
    cache = Cache(capacity_bytes=40e6, miss_s_per_byte=1 / 1.5e12)
    profile = _profile(add=record).model_copy(update={"cache": cache})
    cost = _cost(ADD, profile, False)
    assert cost.cold_time_s - cost.time_s == pytest.approx(extra_s)


def test_cold_is_warm_where_nothing_is_found_or_known():
    record = KernelRecord(time_s=5e-6)
    small = Cache(capacity_bytes=6e6, miss_s_per_byte=1.0)  # a repeated call passes two caches
    for cache in (small, Cache(), Cache(capacity_bytes=40e6)):
        cost = _cost(ADD, _profile(add=record).model_copy(update={"cache": cache}), False)
        assert cost.cold_time_s == cost.time_s
    roofline = _cost(MM, _profile().model_copy(update={"cache": Cache(miss_s_per_byte=1.0)}), False)
    assert roofline.cold_time_s == roofline.time_s


def test_a_scalar_made_from_nothing_has_a_cost() -> None:
    made = Operation("aten.full.default", ((), 1.0), (), (TensorSpec((), (), "float32"),))
    cost = _cost(made, _profile(), False)
    assert cost.time_s > 0


def test_pinned_copies_take_what_transfers_do():
    """Where any in that direction were measured."""
    on_host = TensorSpec.parse("float32[262144]@cpu")
    keywords = (("device", "cuda"), ("non_blocking", True))
    copy = Operation("aten._to_copy.default", (on_host,), keywords, (on_host._replace(device="cuda"),))
    plain = _profile()
    transfers = {"h2d pinned 1048576": TransferRecord(time_s=2e-5, spread=0.02)}
    measured = plain.model_copy(update={"transfers": transfers})
    assert _cost(copy, measured) == KernelCost(2e-5, 0.02, "exact", "copy", 0.0, 2**20, "fp32", 1, 2e-5)
    assert _cost(copy, plain).source != "exact"
