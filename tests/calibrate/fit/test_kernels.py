from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from calibrate.fit.kernels import fit_curve, fit_curves
from calibrate.kernels import operators
from calibrate.kernels.grid import grid_operations
from calibrate.kernels.operators import tensor
from perfmodel.cost.kernels.curves import curve_time_s, predict_times_s
from perfmodel.cost.kernels.features import FORMS, features_of
from perfmodel.cost.kernels.forms import Calls, form_time_s
from perfmodel.hardware.profile import Device, KernelRecord
from perfmodel.trace.kernel_key import kernel_key

GPU = Device(kind="cuda", name="GPU", memory_bytes=140 << 30, multiprocessors=132, l2_bytes=60 << 20)
MEMORY = {
    "start_s": 2e-6, "memory_bytes_per_s": 4e12, "cache_bytes_per_s": 9e12, "cache_bytes": 45e6, "write_weight": 1.1, "ramp_s": 1e-6,
}  # fmt: skip
GRID = [(operation, tf32, features_of(operation, GPU, tf32)) for operation, tf32 in grid_operations(GPU)]

# The truth of each curve, from which times are made.
TRUTHS = {
    "pointwise": MEMORY | {
        "elements_per_s": 2e12, "elements_per_s [broadcast 4]": 5e11, "start_factor": 1.0, "slowness": 1.0,
        "start_s [cast]": 4e-6, "memory_bytes_per_s [cast]": 3e12,
    },
    "optimizer foreach": MEMORY | {
        "launch_s": 1.5e-6, "chunk_s": 2e-7, "slowness": 1.0, "slowness [_foreach_norm 4]": 1.3, "quantised": 0.8,
    },
    "gemm fp32": MEMORY | {
        "flops_per_s": 7e13, "small_tile": 25.0, "epilogue_s": 1e-6, "split_s": 3e-6, "split_s [bias]": 1.0, "quantised": 0.6,
        "layout": 1.0, "layout [TN]": 1.06, "alignment": 1.0, "operator": 1.0, "operator [bias]": 1.03, "precision": 1.0,
    },
    "attention_forward cudnn 16-bit": MEMORY | {
        "flops_per_s": 8e14, "epilogue_s": 1e-6, "score_s": 2e-11, "quantised": 0.6, "resident": 1.0, "dropout": 1.0,
        "dropout [dropout]": 2.0,
    },
    "row_forward native_layer_norm": MEMORY | {
        "elements_per_s": 3e12, "passes": 1.1, "row_s": 2e-6, "row_element_s": 1e-10, "resident": 4.0,
    },
    "column": MEMORY | {"elements_per_s": 1e12, "step_s": 4e-8, "joining_s": 4e-6},
    "full_reduction": MEMORY | {
        "elements_per_s": 2e12, "step_s": 2e-8, "joining_s": 3e-6, "slowness": 1.0, "slowness [var]": 1.3,
    },
}  # fmt: skip


def _points(curve):
    return [features for _, _, features in GRID if features.curve == curve]


def _calls(curve):
    return Calls.of([(features.numbers, features.labels) for features in _points(curve)])


def _truth_s(curve):
    return form_time_s(FORMS[_points(curve)[0].form], TRUTHS[curve], _calls(curve))


@cache
def _fitted(curve):
    """On times without noise."""
    return fit_curve(FORMS[_points(curve)[0].form], _calls(curve), _truth_s(curve))


@pytest.mark.parametrize("curve", TRUTHS)
def test_noise_free_times_are_reproduced(curve):
    points, time_s, record = _calls(curve), _truth_s(curve), _fitted(curve)
    errors = np.abs(curve_time_s(record, points) / time_s - 1)
    assert np.median(errors) < 0.01
    assert record.points == len(time_s)
    assert record.leave_one_out["median"] < 0.02
    assert set(record.leave_one_out) == {"median", "p90", "worst", "bias"}


# Seconds an element of a CPU's loops: vectorised or not, and with a copy in float32 before.
LOOPS_S = {"sum": 5e-11, "mean": 5e-11, "linalg_vector_norm": 1.1e-10, "max": 1.1e-10, "argmax": 9e-10, "var": 1e-9}
CAST_S = 1.8e-10


def _loop_s(operation):
    name, x = operation.base_name, operation.inputs[0]
    return 2e-6 + x.numel * (CAST_S if (name, x.dtype) == ("mean", "bfloat16") else LOOPS_S[name])


def test_reductions_on_a_cpu_take_what_their_loops_take():
    """Of operators whose loops differ by a factor of twenty, outside the grid's sizes and dtypes."""
    cpu = Device(kind="cpu", name="CPU", memory_bytes=2**34)
    draw = np.random.default_rng(5)
    operations = {kernel_key(operation): operation for operation, _ in grid_operations(cpu)}
    known = {
        key: KernelRecord(time_s=_loop_s(operation) * np.exp(draw.normal(0, 0.05)), origin="grid")
        for key, operation in operations.items()
        if features_of(operation, cpu, False).curve == "full_reduction"
    }
    curves = fit_curves(known, {key: operations[key] for key in known}, cpu)
    for name, dtype in (
        ("sum", "float32"), ("sum", "bfloat16"), ("mean", "float32"), ("mean", "bfloat16"), ("max", "bfloat16"),
        ("argmax", "float32"), ("argmax", "bfloat16"), ("var", "float32"), ("linalg_vector_norm", "float32"),
    ):  # fmt: skip
        operation = operators.full_reduction(f"{name}.default", tensor(dtype, 300_000))
        assert predict_times_s([operation], cpu, curves, False)[0].time_s == pytest.approx(_loop_s(operation), rel=0.3)


def test_known_parameters_are_recovered_within_their_standard_errors():
    curve = "pointwise"
    noise = np.random.default_rng(3).normal(0, 0.01, len(_points(curve)))
    record = fit_curve(FORMS["pointwise"], _calls(curve), _truth_s(curve) * np.exp(noise))
    for name, key in (
        ("start_s [vectorised]", "start_s"), ("memory_bytes_per_s [vectorised]", "memory_bytes_per_s"),
        ("memory_bytes_per_s [cast]", "memory_bytes_per_s [cast]"), ("start_s [cast]", "start_s [cast]"),
    ):  # fmt: skip
        truth = TRUTHS[curve][key]
        assert record.parameters[name] == pytest.approx(truth, rel=0.03)
        assert 0 < record.standard_errors[name] < 0.1 * truth
    assert record.leave_one_out["median"] == pytest.approx(0.0067, abs=0.004)


def test_an_outlier_does_not_move_the_rest():
    curve = "pointwise"
    time_s = _truth_s(curve)
    clean = _fitted(curve)
    time_s[::29] *= 3
    spoilt = fit_curve(FORMS["pointwise"], _calls(curve), time_s)
    name = "memory_bytes_per_s [vectorised]"
    assert spoilt.parameters[name] == pytest.approx(clean.parameters[name], rel=0.02)
    assert spoilt.leave_one_out["median"] < 0.01
    assert spoilt.leave_one_out["worst"] > 0.6


def _measured(truth=TRUTHS, **changes):
    return {
        kernel_key(operation, tf32): KernelRecord(
            time_s=float(form_time_s(FORMS[f.form], truth[f.curve], Calls.of([(f.numbers, f.labels)]))[0]),
            origin="grid",
            **changes,
        )
        for operation, tf32, f in GRID
        if f.curve in truth
    }


OPERATIONS = {kernel_key(operation, tf32): operation for operation, tf32, _ in GRID}
SMALL = {"pointwise": TRUTHS["pointwise"]}


def _few(measured, every=3):
    """Less of the pointwise grid, which has most points; the others' curves only begin from its memory's."""
    keys = [key for key in measured if features_of(OPERATIONS[key], GPU, False).curve == "pointwise"]
    left_out = set(keys) - set(keys[::every])
    return {key: record for key, record in measured.items() if key not in left_out}


def test_curves_are_named_by_class_and_know_what_they_were_fitted_on():
    measured = _few(_measured(SMALL))
    curves = fit_curves(measured, OPERATIONS, GPU)
    assert sorted(curves) == ["pointwise"]
    sizes = [features_of(OPERATIONS[key], GPU, False).numbers for key in measured]
    for name in ("bytes", "elements"):
        assert curves["pointwise"].ranges[name] == (
            min(each[name] for each in sizes),
            max(each[name] for each in sizes),
        )
    assert set(curves["pointwise"].ranges) == {"bytes", "elements"}


def test_a_curve_stays_where_nothing_of_it_was_measured_again():
    """And gets its range if it had none; all are fitted again where the memory's is."""
    both = {name: TRUTHS[name] for name in ("pointwise", "column")}
    measured = _few(_measured(both))
    known = {
        name: curve.model_copy(update={"ranges": {}}) for name, curve in fit_curves(measured, OPERATIONS, GPU).items()
    }
    marked = {name: curve.model_copy(update={"standard_errors": {}}) for name, curve in known.items()}
    again = fit_curves(measured, OPERATIONS, GPU, marked)
    assert [curve.standard_errors for curve in again.values()] == [{}, {}]
    assert all(curve.ranges for curve in again.values())
    (column,) = (key for key in measured if key.startswith("aten.sum.dim_IntList(float32[128,704]"))
    fitted = fit_curves(measured, OPERATIONS, GPU, marked, [column])
    assert [bool(fitted[name].standard_errors) for name in ("column", "pointwise")] == [True, False]
    fewer = {key: record for key, record in measured.items() if key != column}
    assert fit_curves(fewer, OPERATIONS, GPU, marked)["column"].points == known["column"].points - 1
    added = next(key for key in measured if key.startswith("aten.add.Tensor"))
    assert all(curve.standard_errors for curve in fit_curves(measured, OPERATIONS, GPU, marked, [added]).values())


def test_failures_and_a_scenarios_own_kernels_are_not_fitted():
    measured = _measured(SMALL)
    keys = sorted(measured)
    spoilt = dict(measured)
    spoilt[keys[0]] = KernelRecord(origin="grid", error="out of memory")
    spoilt[keys[1]] = KernelRecord(time_s=1.0, origin="scenario")
    curve = fit_curves(spoilt, OPERATIONS, GPU)["pointwise"]
    assert curve.points == len(keys) - 2
    assert curve.leave_one_out["worst"] < 0.2


def test_too_few_points_make_no_curve():
    measured = _measured(SMALL)
    assert fit_curves(dict(list(measured.items())[:3]), OPERATIONS, GPU) == {}


def test_fitted_predictions_grow_with_the_rows():
    names = ("pointwise", "row_forward native_layer_norm")
    curves = fit_curves(_few(_measured({name: TRUTHS[name] for name in names})), OPERATIONS, GPU)

    def norms(rows):
        return predict_times_s([operators.layer_norm("float32", 1, rows, 1024)[0]], GPU, curves, False)[0].time_s

    def adds(rows):
        x = tensor("float32", rows, 1024)
        return predict_times_s([operators.binary("add.Tensor", x, x)], GPU, curves, False)[0].time_s

    for times in ([norms(2**i) for i in range(4, 17)], [adds(2**i) for i in range(2, 18)]):
        assert all(later >= earlier * 0.99 for earlier, later in pairwise(times))


def test_the_memory_is_learnt_from_pointwise_kernels():
    names = ("pointwise", "row_forward native_layer_norm")
    measured = _measured({name: TRUTHS[name] for name in names})
    norms = [key for key in measured if "native_layer_norm." in key]
    few = {key: record for key, record in _few(measured).items() if key not in norms[4:]}
    curves = fit_curves(few, OPERATIONS, GPU)
    assert curves["row_forward native_layer_norm"].points == 4
    assert curves["row_forward native_layer_norm"].parameters["memory_bytes_per_s"] == pytest.approx(4e12, rel=0.1)
