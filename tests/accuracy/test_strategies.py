"""Which cases stand side by side, and in what order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perfmodel.accuracy.cases import CardCase
from perfmodel.accuracy.strategies import layout_of, strategy_groups
from tests.accuracy.strategy_cases import FOUR, case, scenario


def labels(*cases: CardCase) -> list[list[str]]:
    return [list(group.cases) for group in strategy_groups(cases)]


def test_strategies_stand_in_the_order_of_the_schema_with_one_gpu_first() -> None:
    cases = [case(f"gpt-{strategy}", strategy) for strategy in ("zero3", "zero1", "none", "ddp", "zero2", "flat")]
    (group,) = strategy_groups(cases)
    assert list(group.cases) == ["none", "flat", "ddp", "zero1", "zero2", "zero3"]
    assert (group.name, group.place, group.profiles) == ("gpt", "4 GPUs over nvlink", ["toy-gpu"])


@pytest.mark.parametrize(
    "change",
    [
        {"batch": {"size": 4}},
        {"precision": "amp-bf16"},
        {"optimizer": {"name": "sgd"}},
        {"training": {"gradient_accumulation": 2}},
        {"model": {"family": "vgg16"}},
        {"hardware": FOUR | {"interconnect": "host-memory"}},
        {"hardware": FOUR | {"gpus": 2}},
        {"hardware": FOUR | {"nodes": 2}},
        {"hardware": FOUR | {"profile": "other"}},
        {"parallelism": {"fsdp": {"mixed_precision": {"param": "bf16"}}}},
        {"parallelism": {"fsdp": {"mixed_precision": {"reduce": "bf16"}}}},
    ],
    ids=str,
)
def test_everything_but_the_strategy_is_equal(change: dict[str, Any]) -> None:
    known = [case("none"), case("ddp"), case("zero2")]
    assert labels(*known, case("zero3", "zero3", **change)) == [["none", "ddp", "zero2"]]
    assert labels(*known, case("zero3")) == [["none", "ddp", "zero2", "zero3"]]


def test_cases_of_one_policy_are_a_group() -> None:
    def policy(**values: str) -> dict[str, Any]:
        return {"fsdp": {"mixed_precision": values}}

    plain = [case("a", "ddp"), case("b", "zero2", parallelism=policy(param="fp32")), case("c", "zero3")]
    bf16 = [
        case("d", "zero2", parallelism=policy(param="bf16")),
        case("e", "zero3", parallelism=policy(param="bf16", reduce="bf16")),
        case("f", "zero3", parallelism={"fsdp": {"mixed_precision": {"param": "bf16"}, "wrap": "root"}}),
    ]
    kept = case("g", "zero3", parallelism=policy(param="bf16", reduce="fp32"))
    assert labels(*plain, *bf16, kept) == [["ddp", "zero2", "zero3"], ["zero2", "zero3", "zero3 wrap root"]]


def test_settings_that_are_not_at_their_defaults_are_named() -> None:
    fsdp = {"wrap": "blocks", "replicate": 1, "offload": True, "reshard_after_forward": False}
    views = {"bucket_cap_mb": 25.0, "gradient_as_bucket_view": True}
    assert (
        layout_of(scenario("zero3", parallelism={"fsdp": fsdp})).label == "zero3 reshard_after_forward false, offload"
    )
    assert layout_of(scenario("ddp", parallelism=views)).label == "ddp bucket_cap_mb 25, gradient_as_bucket_view"
    assert layout_of(scenario("ddp")).label == "ddp"
    assert layout_of(scenario("ddp", FOUR | {"nodes": 2})).place == "4 GPUs over nvlink on 2 nodes"


def test_one_gpu_stands_in_every_group_of_its_work() -> None:
    slow = FOUR | {"interconnect": "host-memory"}
    cases = [case("none"), *(case(f"{where}-{each}", each, hardware)
             for where, hardware in (("near", FOUR), ("far", slow)) for each in ("ddp", "zero1"))]  # fmt: skip
    assert [(group.name, list(group.cases)) for group in strategy_groups(cases)] == [
        ("far", ["none", "ddp", "zero1"]),
        ("near", ["none", "ddp", "zero1"]),
    ]


def test_too_few_cases_or_one_strategy_are_no_group() -> None:
    buckets = [case(f"b{size}", "ddp", parallelism={"bucket_cap_mb": size}) for size in (1, 5, 25)]
    assert labels(*buckets) == []
    assert labels(case("ddp"), case("zero1")) == []
    static = case("static", "ddp", parallelism={"static_graph": True})
    assert labels(static, *buckets[::-1], case("ddp"), case("zero1")) == [
        ["ddp", "ddp bucket_cap_mb 1", "ddp bucket_cap_mb 5", "ddp bucket_cap_mb 25", "ddp static_graph", "zero1"]
    ]


def test_of_several_measurements_of_one_layout_the_earliest_counts() -> None:
    cases = [case("again", "ddp"), case("a", "ddp"), case("b", "zero1"), case("c", "zero2")]
    (group,) = strategy_groups(
        [replace(cases[0], measured_at="2"), *(replace(each, measured_at="1") for each in cases[1:])]
    )
    assert [each.name for each in group.cases.values()] == ["a", "b", "c"]


def test_a_pipeline_is_other_work() -> None:
    section = {"dp": 1, "strategy": "none", "pp": {"stages": 4, "schedule": "gpipe", "micro_batches": 4}}
    pipeline = replace(case("gpt-pp", "ddp"), layout=layout_of(scenario("ddp", parallelism=section)))
    assert pipeline.layout is not None
    assert (pipeline.layout.place, pipeline.layout.label) == ("4 GPUs over nvlink", "none")
    assert labels(*(case(f"gpt-{each}", each) for each in ("none", "ddp")), pipeline) == []
