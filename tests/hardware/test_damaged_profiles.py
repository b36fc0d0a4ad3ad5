"""A damaged profile is refused when it is read, with the key that is wrong; so is one that ``--set`` would damage."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perfmodel.cost.kernels.features import FORMS
from perfmodel.errors import PerfModelError
from perfmodel.hardware.curve_forms import LAYOUTS
from perfmodel.hardware.profile import CATALOG, load_profile
from perfmodel.scenario.yaml_file import with_assignments

NAN, INFINITY = float("nan"), float("inf")
Change = Callable[[dict[str, Any]], None]


@functools.cache
def shipped() -> str:
    """A shipped profile with a few of its kernels and host records."""
    data = json.loads((CATALOG / "h200-sxm-x4.json").read_bytes())
    data["kernels"] = dict(list(data["kernels"].items())[:5])
    data["host"] = {key: data["host"][key] for key in ("reference", "module", "launch")}
    return json.dumps(data)


def read(tmp_path: Path, data: dict[str, Any]) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(data))
    load_profile(path)


def refusal(tmp_path: Path, change: Change) -> str:
    """What is said of the shipped profile once it was changed; without the file's name."""
    data = copy.deepcopy(json.loads(shipped()))
    read(tmp_path, data)
    change(data)
    with pytest.raises(PerfModelError) as raised:
        read(tmp_path, data)
    where, _, sentence = str(raised.value).partition(": ")
    assert where == str(tmp_path / "profile.json")
    assert "\n" not in sentence
    return sentence


def put(keys: tuple[str | int, ...], value: Any) -> Change:
    def change(data: Any) -> None:
        *before, last = keys
        for key in before:
            data = data[key]
        data[last] = value

    return change


WIRES = ("interconnects", "nvlink")
DAMAGE: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("host", "launch", "time_s"), NAN, "a finite number (got nan)"),
    (("host", "launch", "time_s"), "nan", "a finite number"),
    (("host", "launch", "time_s"), -1, "greater than or equal to -0.01 (got -1)"),
    (("host", "launch", "time_s"), INFINITY, "a finite number (got inf)"),
    (("host", "launch", "time_s"), 1e300, "less than or equal to 1000000"),
    (("host", "launch", "spread"), -1, "greater than or equal to 0"),
    (("device", "memory_bytes"), 0, "greater than or equal to 1 (got 0)"),
    (("device", "memory_bytes"), 10**40, "less than or equal to"),
    (("device", "multiprocessors"), 0, "greater than or equal to 1"),
    (("device", "l2_bytes"), -1, "greater than or equal to 0"),
    (("device", "peak_flops_per_s", "fp32"), 0, "greater than or equal to 1"),
    (("device", "peak_memory_bytes_per_s"), NAN, "a finite number"),
    (("gpus",), 0, "greater than or equal to 1"),
    (("launch", "waiting_gap_s", 1), -1e-6, "greater than or equal to 0"),
    (("cache", "capacity_bytes"), 0, "greater than or equal to 1"),
    (("memory", "context_bytes"), -1, "greater than or equal to 0"),
    (("power", "kinds", "gemm_bf16", "clock_share"), 1.5, "less than or equal to 1"),
    (("power", "full_clock_hz"), 0, "greater than or equal to 1"),
    (("transfers", "h2d pinned 1024", "time_s"), 0, "greater than 0"),
    (("transfers", "h2d pinned 1024", "time_s"), 5e-324, "no shorter than 1e-12 s"),
    (("curves", "copy", "points"), -1, "greater than or equal to 0"),
    (("curves", "copy", "leave_one_out", "p90"), "nan", "a finite number"),
    ((*WIRES, "nodes"), 0, "greater than or equal to 1"),
    ((*WIRES, "host", "isend", "time_s"), -1, "greater than or equal to -0.01"),
    ((*WIRES, "contention", "layer_norm wait 2 float32 67108864", "compute_factor"), 0, "greater than or equal to"),
    ((*WIRES, "couplings", "row", "tail_share"), 0, "greater than or equal to"),
    ((*WIRES, "segments", "all_reduce 4", 0, "beta_s_per_byte"), -1e-12, "greater than or equal to 0"),
    ((*WIRES, "segments", "all_reduce 4", 0, "least_bytes"), 0, "greater than or equal to 1"),
]


@pytest.mark.parametrize(("keys", "value", "rule"), DAMAGE)
def test_numbers_are_finite_and_in_range(tmp_path: Path, keys: tuple[str | int, ...], value: object, rule: str) -> None:
    sentence = refusal(tmp_path, put(keys, value))
    assert sentence.startswith(f"{'.'.join(map(str, keys))} must be {rule}")


@pytest.mark.parametrize(
    ("keys", "value", "rule"),
    [(keys, *rest) for keys, *rest in DAMAGE if keys != ("gpus",) and not any(isinstance(key, int) for key in keys)],
)
def test_the_same_rules_hold_for_values_of_the_command_line(keys: tuple[str, ...], value: object, rule: str) -> None:
    profile = load_profile(CATALOG / "h200-sxm-x4.json")
    key = f"hardware.{'.'.join(keys)}"
    with pytest.raises(PerfModelError) as raised:
        with_assignments(profile, [f"{key}={yaml_of(value)}"])
    assert f"{key} must be {rule}" in str(raised.value)


def yaml_of(value: object) -> str:
    return {"nan": ".nan", "inf": ".inf"}.get(str(value), str(value))


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        (("transfers", "h2d hidden 1024"), "must be a direction, memory and bytes"),
        (("transfers", f"p2p {10**40}"), "must be a direction, memory and bytes"),
        ((*WIRES, "collectives", "all_reduce 4 float32"), "must be a collective, ranks, a type and bytes"),
        ((*WIRES, "collectives", "all_reduce four float32 8"), "must be a collective, ranks, a type and bytes"),
        ((*WIRES, "collectives", "all_reduce 4 float31 8"), "must be a collective, ranks, a type and bytes"),
        ((*WIRES, "collectives", "al_reduce 4 float32 8"), "must be a collective, ranks, a type and bytes"),
        ((*WIRES, "contention", "all_reduce 4 float32 8"), "must be a collective, ranks, a type and bytes"),
        ((*WIRES, "segments", "all_reduce"), "must be a collective and ranks"),
        ((*WIRES, "segments", "all_reduce 1"), "must be a collective and ranks"),
    ],
)
def test_keys_are_what_they_are_taken_apart_as(tmp_path: Path, keys: tuple[str, ...], rule: str) -> None:
    def change(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = next(iter(data.values()))

    assert refusal(tmp_path, change).startswith(f"{'.'.join(keys)} {rule}")


def test_the_reference_takes_time(tmp_path: Path) -> None:
    for keys in (("host",), (*WIRES, "host")):
        sentence = refusal(tmp_path, put((*keys, "reference", "time_s"), 0.0))
        assert sentence.startswith(f"{'.'.join(keys)} must be above 0 s for the host's reference")


def test_provenance_is_laid_out_as_it_is_used(tmp_path: Path) -> None:
    sentence = refusal(tmp_path, put(("provenance", "launch"), 3))
    assert sentence.startswith("provenance must be with a mapping under launch")
    sentence = refusal(tmp_path, put(("provenance", "sentinels_s"), {"all_reduce": 3}))
    assert sentence.startswith("provenance must be with a mapping of mappings under sentinels_s")
    sentence = refusal(tmp_path, put((*WIRES, "provenance", "imported"), "file"))
    assert sentence.startswith("interconnects.nvlink.provenance must be with a list under imported")


def test_segments_ascend_and_take_time(tmp_path: Path) -> None:
    name, place = "interconnects.nvlink.segments.all_reduce 4", (*WIRES, "segments", "all_reduce 4")
    assert refusal(tmp_path, put((*place, 0, "most_bytes"), 1)).startswith(
        f"{name}.0 must be a segment with most_bytes"
    )
    sentence = refusal(tmp_path, put((*place, 0, "most_bytes"), 2**40))
    assert sentence.startswith(f"{name} must be segments that ascend in size")
    sentence = refusal(tmp_path, put((*place, 0, "alpha_s"), -1e-6))
    assert sentence.startswith(f"{name} must be segments of which the first takes time")


@pytest.mark.parametrize("script", [[-1], [8, -2], [8, -1, -1], [0], [10**40]])
def test_a_memory_script_frees_what_it_holds(tmp_path: Path, script: list[int]) -> None:
    key = next(iter(json.loads(shipped())["kernels"]))
    sentence = refusal(tmp_path, put(("kernels", key, "memory_script"), script))
    assert sentence.startswith(f"kernels.{key}.memory_script must be of bytes, or of -k to free the k-th allocation")


def test_layouts_of_curves_are_those_of_the_forms() -> None:
    assert list(LAYOUTS) == list(FORMS)
    for name, form in FORMS.items():
        assert set(LAYOUTS[name].parameters) == {parameter.name for parameter in form.parameters}
        assert LAYOUTS[name].coordinates == form.coordinates


@pytest.mark.parametrize(
    ("keys", "value", "rule"),
    [
        (("copy", "form"), "tiles", "of form pointwise, placed, rows, columns, full_reduction, scatter, lists"),
        (("copy", "form"), "gemm", "that holds flops_per_s"),
        (("copy", "parameters"), {}, "that holds start_s"),
        (("copy", "ranges"), {"rows": [1, 2]}, "with ascending ranges of bytes, elements, not of 'rows'"),
        (("copy", "ranges"), {"bytes": [2, 1]}, "with ascending ranges of bytes, elements, not of 'bytes'"),
        (("copy", "parameters", "slowness"), 0, "with slowness above 0, not 0"),
        (("copy", "parameters", "elements_per_s [gelu 2]"), -1.0, r"with elements_per_s [gelu 2] above 0, not -1"),
        (("copy", "parameters", "slownes"), 1.0, "of parameters that its form takes, not 'slownes'"),
        (("cat", "parameters", "correction length"), 0, "with correction length above 0, not 0"),
        (("cat", "parameters", "point 0 rows"), 1.0, "of parameters that its form takes, not 'point 0 rows'"),
        (("cat", "parameters", "point 0 bytes"), 1e9, "with point 0 bytes from -100 to 100"),
        (("cat", "parameters", "point 999 bytes"), 1.0, "that holds elements, weight of point 999"),
        (("copy", "parameters", "point 0 bytes"), 1.0, "that holds elements, weight of point 0"),
    ],
)
def test_curves_hold_what_their_form_takes(tmp_path: Path, keys: tuple[str, ...], value: object, rule: str) -> None:
    assert refusal(tmp_path, put(("curves", *keys), value)).startswith(f"curves.{keys[0]} must be a curve {rule}")


def test_points_of_a_curve_need_their_constants(tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        del data["curves"]["cat"]["parameters"]["correction sharing"]

    assert refusal(tmp_path, change).startswith("curves.cat must be a curve that holds correction sharing")
