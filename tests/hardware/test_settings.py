"""What each setting of the hardware does: the table against the schema, and, key by key, against answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from perfmodel.errors import PerfModelError
from perfmodel.hardware.measurement import load_measurement
from perfmodel.hardware.profile import Profile, find_profile, load_profile
from perfmodel.hardware.settings import EFFECTS, SETTINGS, settings_table
from perfmodel.prediction.predict import predict
from perfmodel.prediction.what_if import figures
from perfmodel.scenario.scenario import HardwareSection, Scenario
from perfmodel.scenario.yaml_file import load_question, with_assignments
from tests.places import ROOT
from tests.refusals import refused

SMALL, AMP, LLAMA = "gpt2-batch1", "gpt2.7b-amp", "llama1b-bf16"
WIRED, SHARDED, PIPELINE = "gpt-small-ddp-two-nodes", "gpt2.7b-zero3", "gpt2.7b-1f1b"
CURVES = "llama8b-checkpointing"
OFFLOAD, NO_EXACT = "offload", "no exact keys"  # of SHARDED and of WIRED
MEASURED = ROOT / "results" / "fourth-four-gpu-node"
INTERLEAVED = "gpt-large-fp32-host2-interleaved-1f1b-m8"
ADDCDIV = "aten._foreach_addcdiv_.ScalarList([260 float32 2568276480 3952da0f], [260 float32 2568276480 3952da0f], "
ADDCDIV = f"kernels.{ADDCDIV}[260 float32 2568276480 3952da0f], [260 float])"
MM = "aten.mm.default(float32[2048,768], float32[768,768]{1,768})"
WIDE_MM = "aten.mm.default(float32[2560,2048]{1,2560}, float32[2048,10240])"
NARROW_MM = "aten.mm.default(float32[1280,1024]{1,1280}, float32[1024,1280])"
BLOCK = "host.forward GPT2Block 54984295 8487e3c7 amp"
CURVE = "curves.gemm 16-bit"
KIND = "power.kinds.gemm_bf16"
NVLINK, NODES, HOST = "interconnects.nvlink", "interconnects.two-nodes", "interconnects.host-memory"
REDUCE = f"{NODES}.collectives.all_reduce 4 float32 30720000"
GATHER = "[{least_bytes: 1, most_bytes: 1000000000, alpha_s: 1.0e-3, beta_s_per_byte: 1.0e-10}]"
COPY = "transfers.h2d pinned 1024"
COUPLING = {"compute_factor": 1.0, "communication_factor": 1.0, "tail_share": 1.0, "kernel_s": 1.0}


def coupled(section: str, key: str, **changed: float) -> str:
    values = ", ".join(f"{name}: {value}" for name, value in (COUPLING | changed).items())
    return f"{section}={{'{key}': {{{values}}}}}"


# By key of the table: a scenario whose answer follows it, and a value of one such setting.
FOLLOWED: dict[str, tuple[str, str]] = {
    "provenance.*": (PIPELINE, "provenance.torch='2.13'"),
    "device.memory_bytes": (SMALL, "device.memory_bytes=1e9"),
    "device.l2_bytes": (AMP, "device.l2_bytes=1e8"),
    "device.power_limit_w": (LLAMA, "device.power_limit_w=500"),
    "device.peak_flops_per_s.*": (AMP, "device.peak_flops_per_s.bf16=2e15"),
    "device.peak_memory_bytes_per_s": (AMP, "device.peak_memory_bytes_per_s=8e12"),
    "launch.latency_s": (SMALL, "launch.latency_s=1e-3"),
    "launch.gap_s": (AMP, "launch.gap_s=2e-6"),
    "launch.queue_depth": (AMP, "launch.queue_depth=2"),
    "launch.synchronize_s": (SMALL, "launch.synchronize_s=1e-3"),
    "launch.waiting_gap_s": (SHARDED, "launch.waiting_gap_s=[1e-4]"),
    "cache.capacity_bytes": (AMP, "cache.capacity_bytes=1e8"),
    "cache.miss_s_per_byte": (CURVES, "cache.miss_s_per_byte=1e-11"),
    "cache.code_miss_s": (AMP, "cache.code_miss_s=1e-5"),
    "kernels.*.time_s": (AMP, f"{ADDCDIV}.time_s=0.1"),
    "kernels.*.cold_time_s": (AMP, f"{ADDCDIV}.cold_time_s=0.1"),
    "kernels.*.spread": (AMP, f"{ADDCDIV}.spread=0.5"),
    "kernels.*.kernels": (SHARDED, f"kernels.{WIDE_MM}.kernels=50"),
    "kernels.*.memory_script": (WIRED, f"kernels.{MM}.memory_script=[512,50000000000,-2]"),
    "kernels.*.origin": (NO_EXACT, f"kernels.{MM}.origin=grid"),
    "host.*.time_s": (SMALL, f"{BLOCK}.time_s=1e-2"),
    "host.*.cold_s": (SMALL, f"{BLOCK}.cold_s=1e-2"),
    "host.*.spread": (SMALL, "host.reference.spread=0.5"),
    "curves.*.parameters.*": (CURVES, f"{CURVE}.parameters.start_s=1e-3"),
    "curves.*.leave_one_out.*": (CURVES, f"{CURVE}.leave_one_out.p90=0.5"),
    "curves.*.ranges.*": (CURVES, f"{CURVE}.ranges={{m: [1, 2]}}"),
    "memory.context_bytes": (SMALL, "memory.context_bytes=2000000000"),
    "memory.cublas_workspace_bytes": (SMALL, "memory.cublas_workspace_bytes=2000000000"),
    "memory.cublaslt_workspace_bytes": (SMALL, "memory.cublaslt_workspace_bytes=2000000000"),
    "power.idle_w": (LLAMA, "power.idle_w=300"),
    "power.full_clock_hz": (LLAMA, "power.full_clock_hz=1e9"),
    "power.kinds.*.draw_w": (LLAMA, f"{KIND}.draw_w=2000"),
    "power.kinds.*.clock_share": (LLAMA, f"{KIND}.clock_share=0.1"),
    "power.kinds.*.flops_per_s": (LLAMA, f"{KIND}.flops_per_s=2e15"),
    "power.kinds.*.arithmetic": (LLAMA, f"{KIND}.arithmetic=fp32"),
    "power.spread": (LLAMA, "power.spread=0.5"),
    "interconnects.*.collectives.*.time_s": (WIRED, f"{REDUCE}.time_s=0.5"),
    "interconnects.*.collectives.*.spread": (WIRED, f"{REDUCE}.spread=5"),
    "interconnects.*.collectives.*.origin": (NO_EXACT, f"{REDUCE}.origin=grid"),
    "interconnects.*.segments.*": (SHARDED, f"{NVLINK}.segments.all_gather 4={GATHER}"),
    "interconnects.*.communicator_bytes.*": (WIRED, f"{NODES}.communicator_bytes.4=5000000000"),
    "interconnects.*.host.*.time_s": (WIRED, f"{NODES}.host.ddp bucket.time_s=0.1"),
    "interconnects.*.couplings.*.compute_factor": (SHARDED, f"{NVLINK}.couplings.gemm_fp32.compute_factor=3"),
    "interconnects.*.couplings.*.communication_factor": (
        SHARDED,
        f"{NVLINK}.couplings.gemm_fp32.communication_factor=9",
    ),
    "interconnects.*.couplings.*.tail_share": (SHARDED, f"{NVLINK}.couplings.gemm_fp32.tail_share=1e-3"),
    "interconnects.*.couplings.*.kernel_s": (SHARDED, f"{NVLINK}.couplings.gemm_fp32.kernel_s=9e-4"),
    "interconnects.*.messages_ahead.*": (INTERLEAVED, f"{HOST}.messages_ahead={{100000000: 8}}"),
    "interconnects.*.rerun_spread": (WIRED, f"{NODES}.rerun_spread=1"),
    "interconnects.*.bandwidth_factor": (WIRED, f"{NODES}.bandwidth_factor=2"),
    "transfers.*.time_s": (OFFLOAD, f"{COPY}.time_s=1e-2"),
    "transfers.*.spread": (OFFLOAD, f"{COPY}.spread=1"),
}
_SMALL_PRODUCTS = f"{HOST}.message_couplings.receive.gemm_fp32_small"
for name, value in {"compute_factor": 3.0, "communication_factor": 9.0, "tail_share": 1e-3}.items():
    row = coupled(f"{NVLINK}.own_couplings", WIDE_MM, **{name: value})
    FOLLOWED[f"interconnects.*.own_couplings.*.{name}"] = SHARDED, row
for name, value in {"compute_factor": 3.0, "tail_share": 1e-3}.items():
    row = coupled(f"{HOST}.own_message_couplings.receive", NARROW_MM, **{name: value})
    FOLLOWED[f"interconnects.*.own_message_couplings.*.*.{name}"] = INTERLEAVED, row
for name, value in {"compute_factor": 3.0, "tail_share": 1e-3, "kernel_s": 9e-6}.items():
    FOLLOWED[f"interconnects.*.message_couplings.*.*.{name}"] = INTERLEAVED, f"{_SMALL_PRODUCTS}.{name}={value}"


@lru_cache
def question(name: str) -> tuple[Scenario, Profile]:
    measured = MEASURED / f"{name}.json"
    if measured.exists():
        scenario = Scenario.model_validate(load_measurement(measured).scenario)
        return scenario, load_profile(find_profile(scenario.hardware.profile))
    shared = ["parallelism.fsdp.offload=true"] if name == OFFLOAD else []
    path = {OFFLOAD: SHARDED, NO_EXACT: WIRED}.get(name, name)
    return load_question(ROOT / "scenarios" / f"{path}.yaml", shared)


@lru_cache
def answer(name: str, *assignments: str) -> tuple[object, ...]:
    scenario, profile = question(name)
    return figures(predict(scenario, with_assignments(profile, assignments), exact=name != NO_EXACT, doubted=()))


@pytest.mark.parametrize("key", [key for key, setting in SETTINGS.items() if setting.effect in ("used", "scales")])
def test_a_setting_that_is_used_changes_an_answer(key: str) -> None:
    name, assignment = FOLLOWED[key]
    assert answer(name, f"hardware.{assignment}") != answer(name)


# By key: a scenario that might be thought to follow it, and two values.
IGNORED: dict[str, tuple[str, str, str]] = {
    "name": (SMALL, "name=a", "name=b"),
    "device.name": (SMALL, "device.name=a", "device.name=b"),
    "kernels.*.samples": (AMP, f"{ADDCDIV}.samples=3", f"{ADDCDIV}.samples=4"),
    "kernels.*.error": (AMP, f"{ADDCDIV}.error=a", f"{ADDCDIV}.error=b"),
    "host.*.samples": (SMALL, f"{BLOCK}.samples=3", f"{BLOCK}.samples=4"),
    "curves.*.standard_errors.*": (
        CURVES,
        f"{CURVE}.standard_errors.start_s=1",
        f"{CURVE}.standard_errors.start_s=2",
    ),
    "curves.*.points": (CURVES, f"{CURVE}.points=3", f"{CURVE}.points=4"),
    "topology": (WIRED, "topology=a", "topology=b"),
    "unstable": (SMALL, "unstable=[]", "unstable=[a]"),
    "transfers.*.samples": (OFFLOAD, f"{COPY}.samples=3", f"{COPY}.samples=4"),
    "transfers.*.error": (OFFLOAD, f"{COPY}.error=a", f"{COPY}.error=b"),
}
for name in ("environment", "provenance"):
    IGNORED[f"interconnects.*.{name}.*"] = WIRED, f"{NODES}.{name}={{a: b}}", f"{NODES}.{name}={{a: c}}"
for name in ("samples", "error"):
    IGNORED[f"interconnects.*.collectives.*.{name}"] = WIRED, f"{REDUCE}.{name}='3'", f"{REDUCE}.{name}='4'"
for name in ("samples", "spread"):
    row = f"{NODES}.host.ddp bucket.{name}"
    IGNORED[f"interconnects.*.host.*.{name}"] = WIRED, f"{row}=3", f"{row}=4"
RECORDS = ("fitted_error", "held_out_error", "pairs")
for name in RECORDS:
    row = f"{NVLINK}.couplings.gemm_fp32.{name}"
    IGNORED[f"interconnects.*.couplings.*.{name}"] = SHARDED, f"{row}=3", f"{row}=4"
    row = f"{_SMALL_PRODUCTS}.{name}"
    IGNORED[f"interconnects.*.message_couplings.*.*.{name}"] = INTERLEAVED, f"{row}=3", f"{row}=4"
OF_OWN = ("kernel_s", *RECORDS)  # at once, since a kernel's key is a section's
rows = [coupled(f"{NVLINK}.own_couplings", WIDE_MM, **dict.fromkeys(OF_OWN, value)) for value in (3, 4)]
IGNORED |= {f"interconnects.*.own_couplings.*.{name}": (SHARDED, rows[0], rows[1]) for name in OF_OWN}
OF_OWN = ("communication_factor", *OF_OWN)
rows = [coupled(f"{HOST}.own_message_couplings.receive", NARROW_MM, **dict.fromkeys(OF_OWN, value)) for value in (3, 4)]
IGNORED |= {f"interconnects.*.own_message_couplings.*.*.{name}": (INTERLEAVED, rows[0], rows[1]) for name in OF_OWN}
_ROW = f"{_SMALL_PRODUCTS}.communication_factor"
IGNORED["interconnects.*.message_couplings.*.*.communication_factor"] = INTERLEAVED, f"{_ROW}=3", f"{_ROW}=4"


@pytest.mark.parametrize("name", sorted({name for name, _, _ in IGNORED.values()}))
def test_settings_that_are_said_to_change_nothing_change_nothing(name: str) -> None:
    rows = [row for row in IGNORED.values() if row[0] == name]
    one, other = (tuple(dict.fromkeys(f"hardware.{row[at]}" for row in rows)) for at in (1, 2))
    assert answer(name, *one) == answer(name, *other)


def test_examples_are_of_every_setting() -> None:
    of_effect = {effect: {key for key, each in SETTINGS.items() if each.effect == effect} for effect in EFFECTS}
    assert FOLLOWED.keys() == of_effect["used"] | of_effect["scales"]
    assert IGNORED.keys() == of_effect["none"]
    assert REFUSED.keys() == of_effect["refused"]


_MEMORY = ("start_s", "memory_bytes_per_s", "cache_bytes_per_s", "cache_bytes", "write_weight", "ramp_s")
_PLACED = {
    "form": "placed",
    "parameters": dict.fromkeys((*_MEMORY, "elements_per_s", "slowness", "start_factor"), 1.0),
}
REFUSED = {
    "version": ("version=2", "1 (got 2)"),
    "base": ("base=h200-sxm-x4", "hardware.profile"),
    "device.kind": ("device.kind=cpu", "hardware.profile"),
    "device.multiprocessors": ("device.multiprocessors=264", "hardware.device.peak_flops_per_s"),
    "device.compute_capability": ("device.compute_capability=[10, 0]", "hardware.profile"),
    "curves.*.form": (f"curves.copy={json.dumps(_PLACED)}", "hardware.curves.NAME.parameters"),
    "power.draw_w.*": ("power.draw_w={}", "hardware.power.kinds"),
    "power.clock_hz.*": ("power.clock_hz={}", "hardware.power.kinds"),
    "power.limit_w": ("power.limit_w=300", "hardware.device.power_limit_w"),
    "power.readings.*": ("power.readings={}", "hardware.power.kinds"),
    "interconnects.*.backend": (f"{NVLINK}.backend=gloo", "hardware.interconnect"),
    "interconnects.*.nodes": (f"{NVLINK}.nodes=2", "hardware.interconnect"),
    "interconnects.*.contention.*": (f"{NVLINK}.contention={{}}", "hardware.interconnects.NAME.couplings"),
    "interconnects.*.own_contention.*": (
        f"{NVLINK}.own_contention={{mm: {{}}}}",
        "hardware.interconnects.NAME.couplings",
    ),
}


@pytest.mark.parametrize("key", [key for key, setting in SETTINGS.items() if setting.effect == "refused"])
def test_a_setting_that_is_refused_says_what_would_work(key: str) -> None:
    assignment, instead = REFUSED[key]
    with pytest.raises(PerfModelError) as caught:
        answer(SHARDED, f"hardware.{assignment}")
    sentence = str(caught.value)
    assert re.match(rf"--set hardware\.{re.escape(assignment.partition('=')[0])}[.a-z]* must be", sentence)
    assert instead in sentence


def test_a_section_that_leaves_a_refused_value_as_it_is_can_be_set() -> None:
    device = question(SMALL)[1].device.model_dump() | {"memory_bytes": 80_000_000_000}
    _, changed = question(SMALL)[0], with_assignments(question(SMALL)[1], [f"hardware.device={json.dumps(device)}"])
    assert changed.device.memory_bytes == 80_000_000_000
    with refused("hardware.device.multiprocessors", 3):
        with_assignments(changed.original, [f"hardware.device={json.dumps(device | {'multiprocessors': 3})}"])


def schema_keys(section: Any) -> Iterator[str]:
    """Every key of a section, with ``*`` for names; a list is a value."""
    for name, field in section.model_fields.items():
        yield from (f"{name}{rest}" for rest in below(field.annotation))


def below(annotation: Any) -> Iterator[str]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from (f".{key}" for key in schema_keys(annotation))
    elif get_origin(annotation) is dict:
        yield from (f".*{rest}" for rest in below(get_args(annotation)[1]))
    else:
        yield ""


def test_the_table_has_every_key_of_the_schema_once() -> None:
    keys = list(schema_keys(Profile))
    for key in keys:
        rows = [row for row in SETTINGS if key == row or (row.endswith(".*") and key.startswith(row))]
        assert len(rows) == 1, f"{key} must stand in SETTINGS, with what it does"
    unknown = [row for row in SETTINGS if not any(key == row or key.startswith(row) for key in keys)]
    assert unknown == []


def test_what_the_scenario_names_itself_is_not_the_profiles() -> None:
    shared = Profile.model_fields.keys() & HardwareSection.model_fields.keys()
    assert {key for key, setting in SETTINGS.items() if setting.effect == "scenario"} == shared


def test_the_documentation_has_the_table() -> None:
    text = (ROOT / "docs" / "what-if.md").read_text(encoding="utf-8")
    assert "\n".join(settings_table()) in text, "docs/what-if.md must end with the lines of settings_table()"
    for key in HardwareSection.model_fields:
        assert f"`hardware.{key}`" in text
