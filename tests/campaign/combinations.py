"""Scenarios of settings that can be had, in every combination: which of them go together is what perfmodel must say."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from pydantic import BaseModel

from perfmodel.scenario.scenario import (
    FsdpSection,
    MixedPrecisionSection,
    ModelSection,
    OptimizerSection,
    ParallelismSection,
    PipelineSection,
    Scenario,
    TrainingSection,
)
from tests.campaign.documents import PROFILE

MODELS = (
    {"family": "gpt", "size": "tiny"},
    {"family": "gpt", "layers": 4, "width": 32, "heads": 2, "ffn_width": 64, "vocabulary": 100},
    {"family": "llama", "layers": 3, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 64, "vocabulary": 100},
    {"family": "bert", "layers": 2, "width": 32, "heads": 2, "ffn_width": 64, "vocabulary": 100},
    {"family": "gpt2", "layers": 2, "width": 32, "heads": 2, "ffn_width": 128, "vocabulary": 100, "dropout": 0.1},
)


def _choices(section: type[BaseModel], key: str) -> SearchStrategy[Any]:
    """Every value that the key can have, of those that are named."""
    return st.sampled_from(sorted(_named(section.model_fields[key].annotation), key=str))


def _named(annotation: Any) -> set[Any]:
    found = get_args(annotation)
    named = {each for each in found if each is None or isinstance(each, (str, bool))}
    return named.union(*(_named(each) for each in found)) | ({True, False} if annotation is bool else set())


def _some(keys: dict[str, SearchStrategy[Any]]) -> SearchStrategy[dict[str, Any]]:
    """Each key or not."""
    return st.fixed_dictionaries({}, optional=keys)


def _parallelism(dp: int) -> SearchStrategy[dict[str, Any]]:
    choices = ParallelismSection
    mixed = _some({key: _choices(MixedPrecisionSection, key) for key in ("param", "reduce")})
    fsdp = {
        "mixed_precision": mixed,
        "wrap": _choices(FsdpSection, "wrap"),
        "reshard_after_forward": st.sampled_from([True, False, 1, 2]),
        "replicate": st.sampled_from([1, 2]),
        "offload": st.booleans(),
        "forward_prefetch": st.integers(1, 2),
        "backward_prefetch": st.integers(1, 2),
    }
    return st.fixed_dictionaries(
        {"dp": st.just(dp), "strategy": _choices(choices, "strategy")},
        optional={
            "bucket_cap_mb": st.sampled_from([0.01, 1, 25]),
            "gradient_as_bucket_view": st.booleans(),
            "static_graph": st.booleans(),
            "zero1_form": _choices(choices, "zero1_form"),
            "fsdp": _some(fsdp),
        },
    )


def _pipeline(stages: int) -> SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "stages": st.just(stages),
            "schedule": _choices(PipelineSection, "schedule"),
            "micro_batches": st.integers(1, 6),
        },
        optional={"virtual_stages": st.integers(1, 2), "layers": st.lists(st.integers(1, 2), min_size=2, max_size=4)},
    )


@st.composite
def combinations(draw: DrawFn) -> dict[str, Any]:
    """A whole scenario, by sections."""
    dp, stages = draw(st.sampled_from([1, 1, 2, 4])), draw(st.sampled_from([1, 1, 1, 2, 3]))
    parallelism = draw(_parallelism(dp))
    if stages > 1:
        parallelism["pp"] = draw(_pipeline(stages))
    training = {
        "gradient_accumulation": st.integers(1, 3),
        "activation_checkpointing": st.sampled_from(["none", "full", "selective", {"every": 2}]),
        "memory_format": _choices(TrainingSection, "memory_format"),
    }
    optimizer = {key: _choices(OptimizerSection, key) for key in ("name", "implementation")}
    optimizer |= {"momentum": st.sampled_from([0.0, 0.9]), "max_grad_norm": st.sampled_from([None, 1.0])}
    attention = draw(_some({"attention": _choices(ModelSection, "attention")}))
    return {
        "mode": draw(st.sampled_from(["train"] * 9 + ["forward"])),
        "model": draw(st.sampled_from(MODELS)) | attention,
        "batch": {"size": draw(st.integers(1, 6)), "sequence_length": 16},
        "precision": draw(_choices(Scenario, "precision")),
        "optimizer": draw(_some(optimizer)),
        "training": draw(_some(training)),
        "parallelism": parallelism,
        "hardware": draw(_hardware(dp * stages)),
    }


def _hardware(gpus: int) -> SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"profile": st.sampled_from([PROFILE, "h200-sxm-x4", "h200-sxm-x2"]), "gpus": st.just(gpus)},
        optional={
            "interconnect": st.sampled_from(["nvlink", "host-memory", "two-nodes"]),
            "nodes": st.sampled_from([1, 2]),
        },
    )
