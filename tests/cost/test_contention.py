"""Which coupling an operator takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.contention import beside_message, operator_kind, slowdowns
from perfmodel.cost.kernels.kernel_cost import KernelCost
from perfmodel.hardware.interconnect import Coupling, Interconnect
from perfmodel.hardware.profile import find_profile, load_profile
from perfmodel.prediction.predict import predict
from perfmodel.program.program import Collective
from perfmodel.scenario.yaml_file import load_scenario
from perfmodel.trace.kernel_key import kernel_key
from perfmodel.trace.operation import Operation, TensorSpec
from tests.builders import ops, program_of
from tests.places import ROOT


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
    assert first.wave_s is not None
    assert first.wave_s.tolist() == first.tail_s.tolist()


def test_a_message_slows_a_rank_by_the_couplings_of_its_role() -> None:
    program = replace(program_of(("backward", 0, ops(0))), collectives=(Collective("send_recv", "float32", 4, 2),) * 3)
    known = wired(gemm_fp32=(1.25, 1.5, 0.5)).model_copy(
        update={
            "message_couplings": {
                "send": wired(gemm_fp32=(1.5, 2.0, 0.25)).couplings,
                "wait": wired(gemm_fp32=(1.125, 1.0, 1.0)).couplings,
            },
            "own_couplings": {kernel_key(program.operations[0]): wired(own=(9.0, 9.0, 1.0)).couplings["own"]},
        }
    )
    by_role = [beside_message(known, role) for role in ("send", "receive", "wait")]
    found = slowdowns(program, [cost("gemm")], np.array([0]), np.array([10.0]), by_role)
    assert [each.compute_factor[0] for each in found] == [1.5, 9.0, 1.125]  # receive: as beside collectives
    assert [each.communication_factor[0] for each in found] == [2.0, 9.0, 1.0]
    assert [each.tail_s[0] for each in found] == [2.5, 10.0, 10.0]


def test_a_kernel_measured_beside_a_role_takes_its_own_coupling_though_its_kind_was_not() -> None:
    program = replace(program_of(("backward", 0, ops(0, 1))), collectives=(Collective("send_recv", "float32", 4, 2),))
    first, second = (kernel_key(each) for each in program.operations)
    coupling = {factor: wired(own=(factor, 1.0, 1.0)).couplings["own"] for factor in (1.75, 4.0, 9.0)}
    known = wired(gemm_fp32=(1.25, 1.5, 0.5)).model_copy(
        update={"own_couplings": {first: coupling[9.0]}, "own_message_couplings": {"wait": {first: coupling[1.75]}}}
    )

    def factors(interconnect: Interconnect) -> list[float]:
        beside = [beside_message(interconnect, "wait")]
        (found,) = slowdowns(program, [cost("gemm")] * 2, np.array([0, 1]), np.array([10.0, 10.0]), beside)
        return found.compute_factor.tolist()

    assert factors(known) == [1.75, 1.25]
    beside_collectives = {first: coupling[9.0], second: coupling[4.0]}
    assert factors(known.model_copy(update={"own_couplings": beside_collectives})) == [1.75, 4.0]
    kinds = {"wait": wired(gemm_fp32=(1.125, 1.0, 1.0)).couplings}
    assert factors(known.model_copy(update={"message_couplings": kinds})) == [1.75, 1.125]
    assert factors(Interconnect(backend="nccl", own_message_couplings=known.own_message_couplings)) == [1.75, 1.0]


def test_the_kernels_of_a_list_are_placed_one_by_one() -> None:
    program = replace(program_of(("optimizer", -1, ops(0))), collectives=(Collective("all_reduce", "float32", 4, 2),))
    known = wired(optimizer=(1.25, 1.5, 0.5))
    (found,) = slowdowns(program, [cost("optimizer")], np.array([0]), np.array([10.0]), [known])
    assert found.tail_s.tolist() == [5.0]
    assert found.wave_s is not None
    assert found.wave_s.tolist() == [0.0]


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


def product(columns: int) -> Operation:
    a, b = TensorSpec((8, 8), (8, 1), "float32"), TensorSpec((8, columns), (columns, 1), "float32")
    return Operation("aten.mm.default", (a, b))


OWN = Coupling(compute_factor=1.7, communication_factor=1.1, tail_share=0.25)


@pytest.mark.parametrize(
    ("measured", "options", "factors"),
    [
        (kernel_key(product(8)), {}, [1.7, 1.25]),
        (kernel_key(product(8)), {"exact": False}, [1.25, 1.25]),
        (kernel_key(product(8)), {"matmul_tf32": True}, [1.25, 1.25]),
        (kernel_key(product(8), matmul_tf32=True), {"matmul_tf32": True}, [1.7, 1.25]),
    ],
)
def test_a_kernel_that_was_measured_itself_takes_its_own_coupling(
    measured: str, options: dict[str, bool], factors: list[float]
) -> None:
    steps = program_of(("backward", 0, ops(0, 1)))
    program = replace(
        steps,
        trace=replace(steps.trace, operations=(product(8), product(16))),
        collectives=(Collective("all_reduce", "float32", 4, 2),),
    )
    wires = wired(gemm_fp32=(1.25, 1.5, 0.5)).model_copy(update={"own_couplings": {measured: OWN}})
    costs, duration_s = [cost("gemm"), cost("gemm")], np.array([4.0, 4.0])
    (found,) = slowdowns(program, costs, np.array([0, 1]), duration_s, [wires], **options)
    assert found.compute_factor.tolist() == factors
    is_own = factors[0] == OWN.compute_factor
    assert found.communication_factor.tolist() == [1.1 if is_own else 1.5, 1.5]
    assert found.tail_s.tolist() == [1.0 if is_own else 2.0, 2.0]


def test_own_kernels_are_enough_where_no_kind_was_measured() -> None:
    steps = program_of(("backward", 0, ops(0, 1)))
    program = replace(
        steps,
        trace=replace(steps.trace, operations=(product(8), product(16))),
        collectives=(Collective("all_reduce", "float32", 4, 2),),
    )
    wires = Interconnect(backend="nccl", own_couplings={kernel_key(product(8)): OWN})
    operation, ones = np.array([0, 1]), np.ones(2)
    (found,) = slowdowns(program, [cost("gemm"), cost("gemm")], operation, ones, [wires])
    assert found.compute_factor.tolist() == [1.7, 1.0]
    assert slowdowns(program, [cost("gemm"), cost("gemm")], operation, ones, [wires], exact=False) == ()


def test_a_prediction_slows_just_the_kernel_that_was_measured() -> None:
    scenario = load_scenario(ROOT / "scenarios/gpt2.7b-zero3.yaml")
    profile = load_profile(find_profile("h200-sxm-x4"))
    key = "aten.mm.default(float32[2048,2560], float32[2560,2560]{1,2560})"
    wires = profile.interconnects["nvlink"].model_copy(update={"own_couplings": {key: OWN}})
    told = profile.model_copy(update={"interconnects": profile.interconnects | {"nvlink": wires}})
    before, after = predict(scenario, profile), predict(scenario, told)
    totals_s = {use.key: use.total_s for use in before.kernels}
    slower = {use.key: use.total_s / totals_s[use.key] for use in after.kernels}
    assert slower.pop(key) > 1.02
    assert all(abs(ratio - 1) < 0.01 for name, ratio in slower.items() if ".mm." in name)
    general = [predict(scenario, each, exact=False).timeline.step_time_s for each in (profile, told)]
    assert general[0] == general[1]


def test_a_pause_between_kernels_weighs_most_on_the_small_ones() -> None:
    # A kernel of 1 us that does nothing takes 4 us: the pause is 3 us. Of the row operators' factor, measured on a kernel
    # of 30 us, it made 0.1; of an operator's own one it is part already.
    couplings = {
        "pause": Coupling(compute_factor=4.0, communication_factor=1.0, tail_share=1.0, kernel_s=1e-6),
        "row": Coupling(compute_factor=1.5, communication_factor=1.2, tail_share=0.5, kernel_s=30e-6),
    }
    key = kernel_key(Operation("aten.own.default"), False)
    own = {key: Coupling(compute_factor=1.7, communication_factor=1.0, tail_share=1.0)}
    wires = Interconnect(backend="nccl", couplings=couplings, own_couplings=own)
    program = replace(
        program_of(("forward", 0, ops(0, 1, 2))),
        extra_operations=(),
        collectives=(Collective("all_gather", "float32", 4, 2),),
    )
    operations = tuple(Operation(f"aten.{name}.default") for name in ("row", "add", "own"))
    program = replace(program, trace=replace(program.trace, operations=operations))
    costs = [cost("row", time_s=6e-6), cost("pointwise", time_s=3e-6)._replace(kernels=2), cost("row", time_s=3e-6)]
    (found,) = slowdowns(program, costs, np.arange(3), np.array([6e-6, 3e-6, 3e-6]), [wires])
    assert found.compute_factor.tolist() == pytest.approx([1.4 + 3 / 6, 1.0 + 2 * 3 / 3, 1.7])
