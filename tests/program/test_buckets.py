"""Bucket layouts, against those that torch's DistributedDataParallel reports of itself."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from perfmodel.program.buckets import assign_buckets, bucket_limits
from perfmodel.program.ddp import ddp_buckets
from perfmodel.workload.models.build import build_module, make_inputs
from perfmodel.workload.models.step import TrainingStep, make_optimizer
from perfmodel.workload.ops import TensorSpec
from perfmodel.workload.scenario import Scenario
from perfmodel.workload.trace import trace_step

GPT = {"family": "gpt", "layers": 3, "width": 256, "heads": 4, "ffn_width": 1024, "vocabulary": 2000}
GPT2 = {"family": "gpt2", "layers": 2, "width": 128, "heads": 4, "ffn_width": 512, "vocabulary": 5000}


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("ranks") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
    yield
    dist.destroy_process_group()


def scenario(model: dict, **parallelism: object) -> Scenario:
    return Scenario.model_validate(
        {
            "model": model,
            "batch": {"size": 1, "sequence_length": 16},
            "parallelism": {"dp": 2, "strategy": "ddp", **parallelism},
            "hardware": {"profile": "any", "gpus": 2},
        }
    )


def reported(asked: Scenario) -> list[int]:
    """Sizes that a real DDP has after it has rebuilt its buckets."""
    module = build_module(asked)
    section = asked.parallelism
    wrapped = DistributedDataParallel(
        module,
        bucket_cap_mb=section.bucket_cap_mb,
        gradient_as_bucket_view=section.gradient_as_bucket_view,
        static_graph=section.static_graph,
    )
    step = TrainingStep(wrapped, make_inputs(asked, "cpu"), make_optimizer(module.parameters(), asked), asked)
    for _ in range(5):  # a static graph is rebuilt after the third
        step.run()
    data = wrapped._get_ddp_logging_data()
    assert data["has_rebuilt_buckets"]
    return [int(size) for size in data["rebuilt_bucket_sizes"].split(",")]


@pytest.mark.parametrize("model", [GPT, GPT2], ids=["gpt", "gpt2"])
@pytest.mark.parametrize(
    "parallelism",
    [
        {},
        {"bucket_cap_mb": 0.5},
        {"bucket_cap_mb": 1},
        {"bucket_cap_mb": 4},
        {"bucket_cap_mb": 25},
        {"bucket_cap_mb": 2, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 2, "static_graph": True},
    ],
    ids=lambda settings: " ".join(f"{key}={value}" for key, value in settings.items()) or "default",
)
def test_buckets_are_those_of_torch(model: dict, parallelism: dict) -> None:
    asked = scenario(model, **parallelism)
    found = ddp_buckets(asked, trace_step(asked))
    assert [bucket.size_bytes for bucket in found] == reported(asked)


def test_a_bucket_closes_once_it_has_reached_its_limit() -> None:
    tensors = [TensorSpec.parse(f"float32[{count}]") for count in (10, 20, 30, 40, 5)]
    found = assign_buckets(tensors, [4, 3, 2, 1, 0], (100, 200))
    assert [(bucket.parameters, bucket.size_bytes) for bucket in found] == [
        ((4, 3), 180),  # 20 bytes are not enough, 180 overshoot
        ((2, 1), 200),
        ((0,), 40),
    ]


def test_each_dtype_has_buckets_of_its_own() -> None:
    tensors = [TensorSpec.parse(text) for text in ("float32[50]", "bfloat16[50]", "float32[50]", "bfloat16[10]")]
    found = assign_buckets(tensors, [0, 1, 2, 3], (200, 300))
    assert [(bucket.parameters, bucket.dtype, bucket.size_bytes) for bucket in found] == [
        ((0,), "float32", 200),
        ((1, 3), "bfloat16", 120),
        ((2,), "float32", 200),
    ]


def test_the_first_bucket_is_small_only_by_default() -> None:
    assert bucket_limits(None) == (2**20, 25 * 2**20)
    assert bucket_limits(100) == (100 * 2**20, 100 * 2**20)
    assert torch.distributed._DEFAULT_FIRST_BUCKET_BYTES == 2**20
