"""Bucket layouts, against those that torch's DistributedDataParallel reports of itself."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from perfmodel.models.build import build_module, make_inputs
from perfmodel.models.step import TrainingStep, make_optimizer
from perfmodel.program.strategies.buckets import assign_buckets, bucket_limits
from perfmodel.program.strategies.data_parallel import data_parallel_program
from perfmodel.program.strategies.ddp import ddp_buckets
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.operation import TensorSpec
from perfmodel.tracing.step import trace_step

GPT = {"family": "gpt", "layers": 3, "width": 256, "heads": 4, "ffn_width": 1024, "vocabulary": 2000}
GPT2 = {"family": "gpt2", "layers": 2, "width": 128, "heads": 4, "ffn_width": 512, "vocabulary": 5000}


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("ranks") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=240))
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


def wrapped_step(asked: Scenario) -> tuple[DistributedDataParallel, TrainingStep]:
    module = build_module(asked)
    section = asked.parallelism
    wrapped = DistributedDataParallel(
        module,
        bucket_cap_mb=section.bucket_cap_mb,
        gradient_as_bucket_view=section.gradient_as_bucket_view,
        static_graph=section.static_graph,
    )
    return wrapped, TrainingStep(wrapped, make_inputs(asked, "cpu"), make_optimizer(module.parameters(), asked), asked)


def reported(asked: Scenario) -> list[int]:
    """Sizes that a real DDP has after it has rebuilt its buckets."""
    wrapped, step = wrapped_step(asked)
    for _ in range(4):  # torch writes down what it rebuilt when the next step begins
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


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("static_graph", [False, True])
def test_buckets_are_rebuilt_in_the_step_in_which_torch_does(static_graph: bool, as_view: bool) -> None:
    asked = scenario(GPT, bucket_cap_mb=2, static_graph=static_graph, gradient_as_bucket_view=as_view)
    wrapped, step = wrapped_step(asked)
    rebuilt_in = []
    for number in range(1, 5):
        before = wrapped._has_rebuilt_buckets
        step.run()
        if wrapped._has_rebuilt_buckets and not before:
            rebuilt_in.append(number)
    rebuild = data_parallel_program(asked, trace_step(asked)).rebuild
    assert rebuild is not None
    assert rebuilt_in == [rebuild.step]


@pytest.mark.parametrize("static_graph", [False, True])
def test_gradients_of_the_first_step_become_views_when_those_of_torch_do(static_graph: bool) -> None:
    """The program frees as many of their own storages before the end of backward as torch has turned into views."""
    asked = scenario(GPT, static_graph=static_graph, gradient_as_bucket_view=True)
    wrapped, step = wrapped_step(asked)
    views_seen = []

    def count(_: torch.Tensor) -> None:
        gradients = [parameter.grad for parameter in wrapped.parameters() if parameter.grad is not None]
        views_seen.append(sum(gradient.untyped_storage().nbytes() > gradient.nbytes for gradient in gradients))

    hooks = [parameter.register_post_accumulate_grad_hook(count) for parameter in wrapped.parameters()]
    step.run()
    for hook in hooks:
        hook.remove()
    made = data_parallel_program(asked, trace_step(asked))
    early = [
        insertion
        for insertion in made.first_insertions
        if insertion.event < made.first_runs[insertion.run].segment.stop
    ]
    freed_early = sum(len(insertion.instructions) for insertion in early)
    assert freed_early == (0 if static_graph else len(hooks))
    assert max(views_seen) == max(freed_early - 1, 0)  # a parameter's hook runs before its gradient is copied


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
