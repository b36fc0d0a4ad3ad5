"""Names of host calls: those that programs insert, those that calibration measured, and those that costs know."""

from __future__ import annotations

from itertools import product

import pytest

from perfmodel.hardware import host_calls
from perfmodel.hardware.interconnect import REFERENCE
from perfmodel.hardware.profile import find_profile, load_profile
from perfmodel.program.ranks import rank_programs
from perfmodel.scenario.scenario import OptimizerSection
from perfmodel.scenario.yaml_file import load_question
from perfmodel.trace.kernel_key import optimizer_prefix
from perfmodel.trace.store import only_kept_traces
from tests.goldens.predictions import QUESTIONS
from tests.places import ROOT

COLLECTIVES = host_calls.COLLECTIVE_CALLS
PIPELINES = host_calls.PIPELINE_CALLS | host_calls.MESSAGE_CALLS
SHARDING = host_calls.FSDP_CALLS | host_calls.DTENSOR_CALLS
OFFLOADING = host_calls.HOST_OPTIMIZER_CALLS | host_calls.COPY_CALLS


@pytest.mark.parametrize(
    ("question", "families"),
    [
        ("flat", [COLLECTIVES]),
        ("overlap", [COLLECTIVES]),
        ("ddp", [COLLECTIVES, host_calls.DDP_CALLS]),
        ("zero1", [COLLECTIVES, host_calls.DDP_CALLS]),
        ("zero1, reduce-scatter", [COLLECTIVES]),
        ("zero3, clipping", [host_calls.FSDP_CALLS, host_calls.DTENSOR_CALLS]),
        ("zero3, offload", [SHARDING, OFFLOADING]),
        ("pipeline, interleaved-1f1b, replicas", [COLLECTIVES, host_calls.DDP_CALLS, PIPELINES]),
        ("pipeline, zbv-zero-bubble", [PIPELINES]),
    ],
)
def test_programs_insert_names_of_the_table(question: str, families: list[frozenset[str]]) -> None:
    asked = QUESTIONS[question]
    scenario, _ = load_question(ROOT / "scenarios" / f"{asked.scenario}.yaml", asked.settings)
    with only_kept_traces():
        ranks = rank_programs(scenario)
    inserted = {call for rank in ranks for call in rank.program.instructions.calls}
    assert inserted - host_calls.LAUNCHES <= frozenset().union(*families)
    assert all(inserted & family for family in families)


def test_the_shipped_profiles_hold_what_the_table_says_is_measured() -> None:
    """Every name was measured on some machine, and no machine has measured another."""
    profiles = [load_profile(find_profile(name)) for name in ("h200-sxm-x2", "h200-sxm-x4")]
    measured = {name for profile in profiles for each in profile.interconnects.values() for name in each.host}
    assert measured == host_calls.MEASURED | {REFERENCE}


def test_every_optimizer_of_a_scenario_has_a_name() -> None:
    choices = product(("adamw", "sgd"), (0.0, 0.9), ("foreach", "fused", "for-loop"))
    sections = [
        OptimizerSection.model_validate({"name": name, "momentum": momentum, "implementation": implementation})
        for name, momentum, implementation in choices
        if name == "sgd" or momentum == 0
    ]
    assert {optimizer_prefix({"optimizer": each.model_dump()}) for each in sections} == set(host_calls.OPTIMIZERS)
    literals = OptimizerSection.model_json_schema()["properties"]
    assert literals["name"]["enum"] == ["adamw", "sgd"]
    assert sorted(literals["implementation"]["enum"]) == ["for-loop", "foreach", "fused"]


def test_a_repeated_call_repeats_one_of_the_table() -> None:
    repeats = [name for name in host_calls.NAMES if host_calls.first_of(name) != name]
    assert repeats
    assert {host_calls.first_of(name) for name in repeats} <= host_calls.NAMES
