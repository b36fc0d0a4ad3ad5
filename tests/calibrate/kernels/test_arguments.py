from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from calibrate.jobs import program_jobs
from calibrate.kernels.arguments import materialise, resolve
from perfmodel.errors import PerfModelError
from perfmodel.program.ranks import rank_programs
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.operation import Operation, TensorSpec
from tests.calibrate.kernels.operations import OPERATIONS, op, t

REPEATS = 300


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.base_name)
def test_every_operator_runs_again_and_again_with_finite_values(operation: Operation) -> None:
    torch.manual_seed(0)
    call = materialise(operation, "cpu")
    result = call()
    for _ in range(REPEATS):
        result = call()
    may_be_infinite = operation.base_name == "masked_fill"
    for tensor in [*tensors(result), *tensors(call.arguments)]:
        if tensor.is_floating_point() and not may_be_infinite:
            assert torch.isfinite(tensor).all()


@pytest.mark.parametrize(
    "text",
    [
        "float32[4,6]",
        "float32[4,6]{1,4}",
        "bfloat16[2,3]{0,1}",
        "int64[2,4]{8,1}",
        "bool[]",
        "float32[0,3]",
        "float8_e4m3fn[4]",
    ],
)
def test_layouts_are_exact(text: str) -> None:
    call = materialise(op("clone.default", t(text)), "cpu")
    (made,) = call.arguments
    assert TensorSpec(tuple(made.shape), made.stride(), str(made.dtype).removeprefix("torch."), "cuda").text == text


def test_data_is_random() -> None:
    left, right = materialise(op("mm.default", t("float32[64,64]"), t("float32[64,64]")), "cpu").arguments
    assert 0.9 < left.std() < 1.1
    assert 0.015 < right.std() < 0.025


def test_indices_are_in_range_and_positions_count() -> None:
    tokens = materialise(op("embedding.default", t("float32[10,6]"), t("int64[64,64]")), "cpu").arguments[1]
    assert (int(tokens.min()), int(tokens.max())) == (0, 9)
    positions = materialise(op("embedding.default", t("float32[10,6]"), t("int64[3,4]{0,1}")), "cpu").arguments[1]
    assert positions.tolist() == [[0, 1, 2, 3]] * 3
    backward = op("embedding_dense_backward.default", t("float32[2,4,6]"), t("int64[2,4]"), 2, -1, False)
    kinds = materialise(backward, "cpu").arguments[1]
    assert kinds.sum() == 0


def test_saved_tensors_belong_to_their_forward() -> None:
    pooled = op(
        "max_pool2d_with_indices_backward.default",
        t("float32[1,1,2,2]"), t("float32[1,1,4,4]"), (2, 2), (2, 2), (0, 0), (1, 1), False, t("int64[1,1,2,2]"),
    )  # fmt: skip
    arguments = materialise(pooled, "cpu").arguments
    _, indices = torch.ops.aten.max_pool2d_with_indices(arguments[1], (2, 2), (2, 2))
    assert torch.equal(arguments[-1], indices)


def test_text_becomes_torch_objects() -> None:
    call = materialise(op("_to_copy.default", t("float32[2]"), dtype="torch.bfloat16", device="cuda:0"), "cpu")
    assert call.keywords == {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    gelu = materialise(op("gelu.default", t("float32[2]"), approximate="tanh"), "cpu")
    assert gelu.keywords == {"approximate": "tanh"}


def test_trailing_defaults_stay_left_out() -> None:
    call = materialise(op("sum.dim_IntList", t("float32[2,3]"), (0,)), "cpu")
    assert len(call.arguments) == 2
    assert call.keywords == {}


def test_an_unknown_operator_is_named() -> None:
    with pytest.raises(PerfModelError, match=r"'aten\.mmm\.default' must exist in torch"):
        resolve("aten.mmm.default")


FSDP = {
    "model": {"family": "gpt", "size": "tiny", "layers": 1},
    "batch": {"size": 1, "sequence_length": 8},
    "parallelism": {"dp": 4, "strategy": "zero3"},
    "hardware": {"profile": "any", "gpus": 4},
}
BF16_TO_FP32 = {"param": "bf16", "reduce": "fp32"}


@pytest.mark.parametrize("policy", [None, BF16_TO_FP32, {"param": "bf16"}])
@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_what_fully_shard_runs_can_be_measured(policy: dict[str, str] | None, implementation: str) -> None:
    """Its copies, and the optimizer of each rank's part, as calibration asks for them."""
    parallelism = FSDP["parallelism"] | {"fsdp": {"mixed_precision": policy}}  # type: ignore[operator]
    optimizer = {"name": "adamw", "implementation": implementation}
    scenario = Scenario.model_validate(FSDP | {"parallelism": parallelism, "optimizer": optimizer})
    jobs = [job for each in rank_programs(scenario) for job in program_jobs(each.program, scenario.matmul_tf32)]
    names = {job.operation.name for job in jobs}
    copies = {"aten._foreach_copy_.default", "aten.split_with_sizes_copy.out", "aten._chunk_cat.out"}
    assert names >= copies | ({"aten._to_copy.default"} if policy == {"param": "bf16"} else set())
    assert any(name.startswith(("aten._fused_adamw_", "aten._foreach_lerp_")) for name in names)
    for job in {job.key: job for job in jobs}.values():
        materialise(job.operation, "cpu")()


def test_a_gathered_buffer_is_split_into_parameters() -> None:
    parts = (t("float32[2,3]"), t("float32[2,1]"))
    call = materialise(
        Operation("aten.split_with_sizes_copy.out", (t("float32[2,4]"), (3, 1), 1), (("out", parts),)), "cpu"
    )
    call()
    assert torch.equal(torch.cat(call.keywords["out"], 1), call.arguments[0])


def test_gradients_are_joined_padded_and_cast() -> None:
    gradients, joined = (t("bfloat16[3,2]"), t("bfloat16[4]")), t("float32[2,6]")
    call = materialise(Operation("aten._chunk_cat.out", (gradients, 0, 2), (("out", joined),)), "cpu")
    call()
    (first, second), made = call.arguments[0], call.keywords["out"]
    padded = torch.cat([first.flatten(), torch.zeros(2)])
    assert torch.equal(made, torch.cat([padded.view(2, 4), second.view(2, 2)], 1).float())


def test_a_tensor_that_is_passed_twice_is_one() -> None:
    x = t("float32[4]")
    square = materialise(Operation("aten.mul.Tensor", (x, x), same=(0, 0)), "cpu").arguments
    assert square[0] is square[1]
    loop = Operation("aten.addcmul_.default", (x, x, x), (("value", 0.5),), same=(0, 1, 1))
    moment, first, second = materialise(loop, "cpu").arguments
    assert first is second
    assert first is not moment
    lists = Operation("aten._foreach_addcmul_.Scalar", ((x, x), (x, x), (x, x), 0.5), same=(0, 1, 2, 3, 2, 3))
    moments, firsts, seconds, _ = materialise(lists, "cpu").arguments
    assert all(a is b for a, b in zip(firsts, seconds, strict=True))
    assert len({id(tensor) for tensor in (*moments, *firsts)}) == 4
