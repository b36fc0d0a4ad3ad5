"""Calls that find nothing in the cache: how many copies, and that they are copies."""

from __future__ import annotations

import pytest
import torch

from calibrate.kernels import cold_calls
from calibrate.kernels.arguments import materialise
from calibrate.kernels.cold_calls import ColdCall, addressed_bytes, rounds_needed
from perfmodel.trace.operation import Operation
from tests.calibrate.kernels.operations import OPERATIONS, op, t

MB = 1_000_000
VECTOR = t("float32[250000]")  # 1 MB
ADD = Operation("aten.add.Tensor", (VECTOR, VECTOR), (), (VECTOR,))


def test_footprints() -> None:
    assert addressed_bytes(ADD) == 3 * MB
    assert addressed_bytes(Operation("aten.mul.Tensor", (VECTOR, VECTOR), (), (VECTOR,), same=(0, 0))) == 2 * MB
    assert addressed_bytes(Operation("aten.add_.Tensor", (VECTOR, VECTOR), (), (VECTOR,))) == 2 * MB


@pytest.mark.parametrize(
    ("operation", "cache_bytes", "rounds"),
    [
        (ADD, 10 * MB, 11),  # 30 MB of 3 MB calls, and one more
        (ADD, 1 * MB, 2),
        (ADD, MB - 1, 1),  # a single call passes three caches
        (op("neg.default", t("float32[20000]")), 10 * MB, 1),  # next to nothing
        (op("neg.default", t("float32[30000]")), 500 * MB, 12501),
        (op("neg.default", t("float32[30000]")), 5000 * MB, 1),  # too many copies
    ],
)
def test_rounds(operation: Operation, cache_bytes: int, rounds: int) -> None:
    assert rounds_needed(operation, cache_bytes) == rounds


def test_copies_may_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_calls, "MOST_BYTES", 32 * MB)
    assert rounds_needed(ADD, 10 * MB) == 1


def test_inputs_rotate_through_equal_copies_and_results_are_held() -> None:
    square = op("mul.Tensor", t("float32[2,3]{1,2}"), t("float32[3]"))
    call = materialise(square, "cpu")
    rotating = ColdCall(call, 3, "cpu")
    seen = [tuple(tensor.data_ptr() for tensor in part.arguments) for part in rotating._calls]
    assert len({address for addresses in seen for address in addresses}) == 6
    for part in rotating._calls:
        assert torch.equal(part.arguments[0], call.arguments[0])
        assert part.arguments[0].stride() == (1, 2)
        assert part.arguments[0].data_ptr() % 4 == 0
    assert len({result.data_ptr() for result in rotating._results}) == 3


def test_every_set_is_used_in_turn() -> None:
    call = materialise(op("add_.Tensor", t("float32[4]"), t("float32[4]")), "cpu")
    call.arguments[1].fill_(1.0)
    call.arguments[0].zero_()
    rotating = ColdCall(call, 2, "cpu")  # runs a round
    rotating()
    assert [part.arguments[0].tolist() for part in rotating._calls] == [[2.0] * 4, [1.0] * 4]


def test_a_tensor_passed_twice_stays_one() -> None:
    call = materialise(Operation("aten.mul.Tensor", (VECTOR, VECTOR), (), (VECTOR,), same=(0, 0)), "cpu")
    assert all(part.arguments[0] is part.arguments[1] for part in ColdCall(call, 3, "cpu")._calls)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.base_name)
def test_every_operator_runs_on_copies(operation: Operation) -> None:
    rotating = ColdCall(materialise(operation, "cpu"), 3, "cpu")
    for _ in range(3):
        rotating()
