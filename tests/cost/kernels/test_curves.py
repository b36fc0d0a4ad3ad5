import pytest

from calibrate.kernels import operators
from calibrate.kernels.operators import tensor
from perfmodel.cost.kernels.curves import curve_spread, predict_times_s
from perfmodel.hardware.profile import CurveRecord, Device

DEVICE = Device(kind="cuda", name="GPU", memory_bytes=1 << 40, multiprocessors=100, l2_bytes=50 << 20)
POINTWISE = CurveRecord(
    form="pointwise",
    parameters={
        "start_s": 2e-6, "memory_bytes_per_s": 4e12, "cache_bytes_per_s": 4e12, "cache_bytes": 1e6, "write_weight": 1.0,
        "ramp_s": 1e-12, "elements_per_s": 1e15, "slowness": 1.0, "start_factor": 1.0,
    },
    points=10,
    leave_one_out={"median": 0.01, "p90": 0.0329, "worst": 0.2, "bias": 0.0},
)  # fmt: skip


def test_pointwise_by_hand():
    x = tensor("float32", 1000, 1000)
    add = operators.binary("add.Tensor", x, x)
    ((time_s, spread, source),) = predict_times_s([add], DEVICE, {"pointwise": POINTWISE}, tf32=False)
    assert source == "curve"
    assert time_s == pytest.approx(2e-6 + 12e6 / 4e12, rel=1e-6)
    assert spread == pytest.approx(0.02)


def test_spread_is_never_less_than_a_per_cent():
    assert curve_spread(POINTWISE.model_copy(update={"leave_one_out": {"p90": 0.0}})) == 0.01


def test_no_curve_no_prediction():
    x = tensor("float32", 1000, 1000)
    operations = [operators.mm("float32", 8, 8, 8), operators.unary("neg.default", x)]
    gemm, neg = predict_times_s(operations, DEVICE, {"pointwise": POINTWISE}, tf32=False)
    assert gemm is None
    assert neg is not None


def test_a_correction_multiplies_the_form():
    plain = CurveRecord(form="rows", parameters={
        "start_s": 1e-6, "memory_bytes_per_s": 4e12, "cache_bytes_per_s": 4e12, "cache_bytes": 1e6, "write_weight": 1.0,
        "ramp_s": 1e-12, "elements_per_s": 1e15,
        "passes": 1.0, "row_s": 1e-12, "row_element_s": 1e-15, "resident": 1.0,
    })  # fmt: skip
    at = {
        "correction length": 2.0,
        "correction sharing": 0.5,
        "point 0 rows": 9.0,
        "point 0 length": 10.0,
        "point 0 weight [warp 4]": 0.1,
    }
    corrected = plain.model_copy(update={"parameters": plain.parameters | at})
    forward, _ = operators.softmax("float32", (512, 1024))
    before, after = (
        predict_times_s([forward], DEVICE, {"row_forward _softmax": record}, False)[0].time_s
        for record in (plain, corrected)
    )
    assert after == pytest.approx(before * 2.718281828**0.1)
