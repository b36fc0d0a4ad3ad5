"""Which of the scenarios' own kernels are measured beside a collective, and how the ranks are told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from calibrate.interconnect.own_contention import MOST_KERNELS, OwnKernel, measured_with, own_kernels, together
from calibrate.interconnect.request import Request
from perfmodel.cost.kernels.kernel_cost import KernelCost
from perfmodel.program.program import Program
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.kernel_key import kernel_key
from perfmodel.trace.operation import Operation, TensorSpec
from tests.builders import ops, program_of


def product(columns: int) -> Operation:
    a, b, out = (TensorSpec(shape, (shape[1], 1), "float32") for shape in ((8, 8), (8, columns), (8, columns)))
    return Operation("aten.mm.default", (a, b), (), (out,))


def program(*phases: tuple[str, list[int]]) -> Program:
    """Products of as many columns as their number says."""
    made = program_of(*((phase, 0, ops(*indices)) for phase, indices in phases))
    operations = tuple(product(index) for index in range(len(made.operations)))
    return replace(made, trace=replace(made.trace, operations=operations))


def cost(kind: str, time_s: float, kernels: int = 1) -> KernelCost:
    return KernelCost(time_s, 0.0, "exact", kind, 0.0, 0.0, "fp32", kernels, time_s)


def chosen(kernels: tuple[OwnKernel, ...]) -> list[tuple[str, float]]:
    return [(each.job.key, each.share) for each in kernels]


def test_the_largest_under_communication_are_chosen() -> None:
    """Of 100 s: 0 takes 10 in forward and again in backward; 1 takes 30, but in the optimizer; 2 is pointwise, 3 small;
    4 takes 5 in forward, and those in the optimizer do not count; attention and rows count as products do.
    """
    step = program(("forward", [0, 4, 5]), ("backward", [0, 2, 3, 6]), ("optimizer", [1, 4]))
    costs = [
        cost("gemm", 10.0), cost("gemm", 30.0), cost("pointwise", 22.1), cost("gemm", 0.9), cost("gemm", 5.0),
        cost("attention_forward", 15.0), cost("row_backward", 2.0, kernels=3),
    ]  # fmt: skip
    found = own_kernels(step, costs, False, "all_reduce")
    expected = [(kernel_key(product(index)), share) for index, share in ((0, 0.2), (5, 0.15), (4, 0.05), (6, 0.02))]
    assert chosen(found) == [(key, pytest.approx(share)) for key, share in expected]
    assert [each.launches for each in found] == [1, 1, 1, 3]
    assert {each.collective for each in found} == {"all_reduce"}


def test_at_most_so_many_are_chosen() -> None:
    step = program(("forward", list(range(20))))
    found = own_kernels(step, [cost("gemm", 1.0 + index) for index in range(20)], False, "all_reduce")
    assert [each.job.key for each in found] == [
        kernel_key(product(index)) for index in range(19, 19 - MOST_KERNELS, -1)
    ]


def test_keys_say_whether_tf32_is_used() -> None:
    (found,) = own_kernels(program(("forward", [0])), [cost("gemm", 1.0)], True, "all_reduce")
    assert (found.job.key, found.job.tf32) == (kernel_key(product(0), matmul_tf32=True), True)


def step(indices: list[int], collective: str) -> tuple[OwnKernel, ...]:
    """Of a step whose products take a second more than their number."""
    costs = [cost("gemm", 1.0 + index) for index in range(max(indices) + 1)]
    return own_kernels(program(("forward", indices)), costs, False, collective)


def test_scenarios_that_share_a_kernel_ask_for_it_once() -> None:
    found = together([step([0, 2], "all_gather"), step([0, 1], "all_reduce"), step([0, 3], "all_reduce"), ()])
    expected = [(3, 0.8), (0, 0.25 + 1 / 3 + 0.2), (2, 0.75), (1, 2 / 3)]
    assert chosen(found) == [(kernel_key(product(index)), pytest.approx(share)) for index, share in expected]
    assert [each.collective for each in found] == ["all_reduce", "all_gather", "all_gather", "all_reduce"]


def test_a_kernel_is_asked_for_beside_a_collective_and_beside_a_receive_that_waits() -> None:
    found = together([step([0, 2], "all_reduce"), step([0, 1], "wait"), step([0, 1], "wait"), step([0], "all_gather")])
    expected = [(1, "wait", 4 / 3), (0, "all_reduce", 1.25), (2, "all_reduce", 0.75), (0, "wait", 2 / 3)]
    assert [(each.job.key, each.collective, each.share) for each in found] == [
        (kernel_key(product(index)), beside, pytest.approx(share)) for index, beside, share in expected
    ]


@pytest.mark.parametrize(
    ("strategy", "kinds", "expected"),
    [
        ("ddp", {"all_reduce"}, ("all_reduce",)),
        ("zero1", {"all_reduce", "all_gather"}, ("all_reduce",)),
        ("zero2", {"all_gather", "reduce_scatter"}, ("all_gather",)),
        ("zero3", {"all_gather", "reduce_scatter", "all_reduce"}, ("all_gather",)),
        ("zero3", {"all_reduce"}, ("all_reduce",)),  # of HSDP, between nodes
        ("ddp", {"send_recv", "exchange"}, ("wait",)),  # of a pipeline alone
        ("ddp", {"send_recv", "all_reduce"}, ("all_reduce", "wait")),  # and under data parallelism
        ("zero2", {"exchange", "all_gather"}, ("all_gather", "wait")),
    ],
)
def test_kernels_are_measured_beside_what_the_scenario_sends(
    strategy: str, kinds: set[str], expected: tuple[str, ...]
) -> None:
    sections = {
        "model": {"family": "gpt", "size": "tiny"},
        "batch": {"size": 1, "sequence_length": 8},
        "parallelism": {"dp": 2, "strategy": strategy},
        "hardware": {"profile": "cpu.json", "gpus": 2},
    }
    assert measured_with(Scenario.model_validate(sections), kinds) == expected


def test_a_request_reaches_the_ranks_as_it_was_made() -> None:
    wanted = own_kernels(program(("forward", [0, 1])), [cost("gemm", 1.0), cost("row", 0.5, 2)], True, "all_gather")
    exact = (("all_reduce", "float32", 12344, 2),)
    request = Request("nvlink", 2, "cuda", 60.0, exact, ("calls",), 1e-3, own=wanted, own_budget_s=7.5)
    assert len(request.own) == 2
    assert Request.from_json(request.to_json()) == request
    assert Request.from_json(Request("gloo", 2, "cpu", 1.0).to_json()) == Request("gloo", 2, "cpu", 1.0)
