"""Which coupling an operator takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.contention import operator_kind, slowdowns
from perfmodel.cost.kernels.cost import KernelCost
from perfmodel.hardware.interconnect import Coupling, Interconnect
from perfmodel.program.program import Collective
from tests.simulate.steps import ops, program_of


def cost(kind: str, arithmetic: str = "fp32", time_s: float = 1.0) -> KernelCost:
    return KernelCost(time_s, 0.0, "exact", kind, 0.0, 0.0, arithmetic, 1, time_s)


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (cost("gemm"), "gemm_fp32"),
        (cost("gemm", "tf32"), "gemm_bf16"),
        (cost("gemm", "bf16"), "gemm_bf16"),
        (cost("convolution_forward", "fp32"), "convolution"),
        (cost("attention_backward", "bf16"), "attention"),
        (cost("row_forward"), "row"),
        (cost("batch_norm"), "row"),
        (cost("column"), "row"),
        (cost("pointwise"), "pointwise"),
        (cost("copy"), "pointwise"),
        (cost("embedding_forward"), "pointwise"),
        (cost("optimizer"), "optimizer"),
    ],
)
def test_kinds(found: KernelCost, kind: str) -> None:
    assert operator_kind(found, is_list=False) == kind


def test_lists_of_tensors_are_optimizers() -> None:
    assert operator_kind(cost("pointwise"), is_list=True) == "optimizer"


def wired(**couplings: tuple[float, float, float]) -> Interconnect:
    made = {
        kind: Coupling(compute_factor=compute, communication_factor=communication, tail_share=tail)
        for kind, (compute, communication, tail) in couplings.items()
    }
    return Interconnect(backend="nccl", couplings=made)


def test_each_launch_takes_the_coupling_of_its_kind_or_the_nearest() -> None:
    program = replace(
        program_of(("backward", 0, ops(0, 1, 0))), collectives=(Collective("all_reduce", "float32", 4, 2),) * 2
    )
    costs = [cost("gemm", "fp32"), cost("pointwise")]
    operation, duration_s = np.array([0, 1, 0]), np.array([10.0, 20.0, 30.0])
    known = wired(gemm_fp32=(1.25, 1.5, 0.5), pointwise=(1.1, 2.0, 1.0))
    first, second = slowdowns(program, costs, operation, duration_s, [known] * 2)
    assert first is second
    assert first.compute_factor.tolist() == [1.25, 1.1, 1.25]
    assert first.communication_factor.tolist() == [1.5, 2.0, 1.5]
    assert first.tail_s.tolist() == [5.0, 20.0, 15.0]


@pytest.mark.parametrize(
    ("time_s", "factors"), [(1e-6, (2.0, 1.0, 0.2)), (1e-3, (1.5, 2.0, 0.6)), (1.0, (1.0, 3.0, 1.0))]
)
def test_products_between_small_and_large_lie_between_them(time_s: float, factors: tuple[float, float, float]) -> None:
    program = replace(program_of(("backward", 0, ops(0))), collectives=(Collective("all_reduce", "float32", 4, 2),))
    small = Coupling(compute_factor=2.0, communication_factor=1.0, tail_share=0.2, kernel_s=1e-4)
    large = Coupling(compute_factor=1.0, communication_factor=3.0, tail_share=1.0, kernel_s=1e-2)
    wires = Interconnect(backend="nccl", couplings={"gemm_bf16": large, "gemm_bf16_small": small})
    (found,) = slowdowns(program, [cost("gemm", "bf16", time_s)], np.array([0]), np.array([1.0]), [wires])
    assert (found.compute_factor[0], found.communication_factor[0], found.tail_s[0]) == pytest.approx(factors)


def test_nothing_measured_slows_nothing() -> None:
    program = replace(program_of(("backward", 0, ops(0))), collectives=(Collective("all_reduce", "float32", 4, 2),))
    assert slowdowns(program, [cost("gemm")], np.array([0]), np.array([1.0]), [wired()]) == ()


@pytest.mark.parametrize(("couplings", "factor"), [({}, 1.25), ({"convolution": (1.5, 1.0, 1.0)}, 1.5)])
def test_convolutions_are_like_products_until_they_are_measured(couplings: dict, factor: float) -> None:
    program = replace(program_of(("backward", 0, ops(0))), collectives=(Collective("all_reduce", "float32", 4, 2),))
    known = wired(gemm_fp32=(1.25, 1.0, 1.0), **couplings)
    (found,) = slowdowns(program, [cost("convolution_forward")], np.array([0]), np.array([1.0]), [known])
    assert found.compute_factor.tolist() == [factor]


def test_each_collective_takes_the_couplings_of_its_own_wires() -> None:
    program = replace(program_of(("backward", 0, ops(0))), collectives=(Collective("all_reduce", "float32", 4, 2),) * 3)
    wires = [wired(gemm_fp32=(1.25, 1.0, 1.0)), wired(), wired(gemm_fp32=(1.5, 1.0, 1.0))]
    found = slowdowns(program, [cost("gemm", "fp32")], np.array([0]), np.array([1.0]), wires)
    assert [each.compute_factor.tolist() for each in found] == [[1.25], [1.0], [1.5]]
