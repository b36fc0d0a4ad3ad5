import numpy as np
import pytest

from perfmodel.cost.kernels.features import FORMS
from perfmodel.cost.kernels.forms import Calls, form_time_s, soft_maximum, transfer_s
from perfmodel.cost.kernels.matrix_forms import tiled_time_s
from perfmodel.cost.kernels.memory_forms import POINTWISE

MEMORY = {
    "start_s": 2e-6, "memory_bytes_per_s": 4e12, "cache_bytes_per_s": 8e12, "cache_bytes": 40e6, "write_weight": 1.0, "ramp_s": 1e-6,
}  # fmt: skip


def _values(**values: float):
    return {name: np.array([value]) for name, value in values.items()}


def test_soft_maximum_is_the_larger_and_root_of_two_where_equal():
    assert soft_maximum(np.array(3.0), np.array(0.0)) == pytest.approx(3.0)
    assert soft_maximum(np.array(1.0), np.array(1.0)) == pytest.approx(2 ** (1 / 4))


def _moved(size, written=0.0):
    return {"bytes": np.array([size]), "footprint_bytes": np.array([size]), "written_bytes": np.array([written])}


def test_transfer_is_at_cache_speed_when_it_fits_and_memory_speed_when_not():
    values = _values(**MEMORY)
    assert transfer_s(_moved(4e6), values) == pytest.approx(4e6 / 8e12, rel=2e-3)
    assert transfer_s(_moved(4e9), values) == pytest.approx(4e9 / 4e12 + 1e-6, rel=1e-3)


def test_written_bytes_may_cost_more():
    values = _values(**MEMORY | {"write_weight": 1.5})
    assert transfer_s(_moved(4e9, written=2e9), values) == pytest.approx(5e9 / 4e12 + 1e-6, rel=1e-3)


def _pointwise(labels, parameters):
    numbers = {name: np.array([4e9, 8.0]) for name in ("bytes", "footprint_bytes")}
    numbers |= {"written_bytes": np.zeros(2), "elements": np.array([1.0, 1e9])}
    calls = Calls(numbers, {"path": labels, "operator": ["x", "x"], "access": ["y", "y"]})
    return form_time_s(POINTWISE, MEMORY | {"slowness": 1.0, "start_factor": 1.0} | parameters, calls)


def test_a_pointwise_kernel_is_start_plus_the_slower_limit():
    times = _pointwise(["a", "b"], {"elements_per_s": 1e12, "elements_per_s [b]": 1e11})
    assert times == pytest.approx([2e-6 + 1e-3 + 1e-6, 2e-6 + 1e-2], rel=1e-3)


def test_an_unseen_label_gets_the_general_value():
    times = _pointwise(["a", "unseen"], {"elements_per_s": 1e12, "elements_per_s [b]": 1e11})
    assert times == pytest.approx([2e-6 + 1e-3 + 1e-6, 2e-6 + 1e-3], rel=1e-3)


def _tiled(m, n, k, **changes):
    values = {
        "flops_per_s": 1e12,
        "small_tile": 1e-9,
        "epilogue_s": 1e-12,
        "split_s": 1.0,
        "quantised": 1.0,
        "cache_bytes_per_s": 1e13,
    }
    values |= changes
    sizes = [np.array([float(size)]) for size in (1, m, n, k, 4)]
    return float(tiled_time_s(_values(**values), *sizes)[0])


def test_whole_waves_of_tiles():
    # 4 multiprocessors of 0.25 TFLOP/s; 512 x 256 is 4 tiles of 128 x 256 or 256 x 128: one wave
    assert _tiled(512, 256, 1024) == pytest.approx(2 * 512 * 256 * 1024 / 1e12, rel=1e-6)


def test_a_tile_more_costs_a_wave_unless_waves_are_fractional():
    exact, whole, fractional = _tiled(512, 256, 1024), _tiled(514, 257, 1024), _tiled(514, 257, 1024, quantised=1e-6)
    assert exact < fractional < whole


def test_splitting_the_depth_fills_the_chip():
    alone = _tiled(16, 64, 2**16)
    split = _tiled(16, 64, 2**16, split_s=1e-9)
    assert split == pytest.approx(alone / 4, rel=0.05)


NUMBERS = {
    "multiprocessors": 132.0, "cache_bytes": 6e7, "bytes": 1e7, "written_bytes": 3e6, "footprint_bytes": 1e7, "elements": 1e6,
    "flops": 1e9, "rows": 1000.0, "length": 1000.0, "values": 100.0, "groups": 1.0, "tokens": 1000.0, "table_bytes": 1e6,
    "launches": 1.0, "chunks": 10.0, "padding": 1.2, "batch": 1.0, "m": 512.0, "n": 512.0, "k": 512.0, "tensor_cores": 1.0,
    "sequences": 48.0, "queries": 256.0, "keys": 256.0, "head_size": 64.0, "causal": 0.0, "flops_per_score": 256.0,
    "tile": 128.0, "channels": 64.0, "out_channels": 64.0, "window": 9.0,
    **{f"{part}_{size}": 512.0 for part in ("forward", "input", "weight") for size in "mnk"},
}  # fmt: skip
GROWING = {
    "pointwise": ("bytes", "elements"),
    "placed": ("bytes", "elements"),
    "rows": ("rows", "length", "bytes"),
    "columns": ("values", "bytes"),
    "scatter": ("bytes",),
    "lists": ("bytes", "launches", "chunks"),
    "gemm": ("m", "n", "k", "batch"),
    "convolution": ("forward_m", "forward_k", "bytes"),
    "attention": ("sequences", "queries", "keys"),
}


@pytest.mark.parametrize(("name", "grown"), [(name, grown) for name, names in GROWING.items() for grown in names])
def test_more_work_is_never_faster(name, grown):
    form = FORMS[name]
    ladder = NUMBERS[grown] * np.array([1, 2, 4, 8, 16, 64, 256])
    numbers = {number: np.full(7, value) for number, value in NUMBERS.items()} | {grown: ladder}
    labels = {parameter.labelled: ["x"] * 7 for parameter in form.parameters if parameter.labelled}
    labels |= {place: ["x"] * 7 for place in form.places}
    starts = form.starts(numbers, np.full(7, 1e-4))
    times = form_time_s(form, starts, Calls(numbers, labels))
    assert np.all(np.diff(times) >= -1e-12 * times[:-1])
    assert times[-1] > times[0]


def test_every_form_starts_all_its_parameters():
    for form in FORMS.values():
        numbers = {number: np.full(3, value) for number, value in NUMBERS.items()}
        starts = form.starts(numbers, np.full(3, 1e-4))
        assert set(starts) >= {parameter.name for parameter in form.parameters}
        assert all(value > 0 for value in starts.values())
