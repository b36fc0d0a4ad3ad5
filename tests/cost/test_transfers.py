"""What copies cost: exact sizes, curves, and what was not measured."""

from __future__ import annotations

import pytest

from perfmodel.cost import transfers
from perfmodel.cost.transfers import CURVE_SPREAD, has_transfers, pinned_copy, transfer_cost, transfer_curves
from perfmodel.errors import PerfModelError
from perfmodel.hardware.interconnect import TransferRecord, transfer_key
from perfmodel.hardware.profile import Device, Profile
from perfmodel.trace.operation import Operation, TensorSpec
from tests.refusals import refused

MIB = 2**20
SIZES = [2**power for power in range(12, 30, 2)]


def time_s(size: int) -> float:
    return 1e-5 + size / 50e9


RECORDS = {
    **{transfer_key("h2d pinned", size): TransferRecord(time_s=time_s(size), spread=0.01) for size in SIZES},
    transfer_key("p2p", 512 * MIB): TransferRecord(time_s=0.001),
    transfer_key("d2h pageable", MIB): TransferRecord(error="out of memory"),
}


def profile(records: dict[str, TransferRecord]) -> Profile:
    return Profile(name="toy", device=Device(kind="cuda", name="toy", memory_bytes=1), transfers=records)


TOY = profile(RECORDS)


def test_a_measured_size_is_exact() -> None:
    found = transfer_cost("h2d", "pinned", MIB, TOY)
    assert found == (time_s(MIB), 0.01, "exact", MIB / time_s(MIB))


@pytest.mark.parametrize("size", [1, 3 * MIB, 2**29])
def test_other_sizes_are_read_off_the_curve(size: int) -> None:
    found = transfer_cost("h2d", "pinned", size, TOY)
    assert found.time_s == pytest.approx(time_s(size), rel=1e-6)
    assert (found.spread, found.source) == (CURVE_SPREAD, "curve")


def test_sizes_far_above_all_measured_are_extrapolated_and_less_sure() -> None:
    beyond, far = (transfer_cost("h2d", "pinned", size, TOY) for size in (2**30, 2**33))
    assert far.time_s == pytest.approx(time_s(2**33), rel=1e-6)
    assert (beyond.source, far.source) == ("extrapolated", "extrapolated")
    assert CURVE_SPREAD < beyond.spread < far.spread


@pytest.mark.parametrize("memory", [None, "pinned"])
def test_one_size_says_a_bandwidth(memory: str | None) -> None:
    assert transfer_cost("p2p", memory, 256 * MIB, TOY).time_s == pytest.approx(0.0005)


def test_nothing_costs_nothing() -> None:
    assert transfer_cost("d2h", "pinned", 0, TOY).time_s == 0.0


def test_what_was_not_measured_is_one_sentence() -> None:
    with refused("toy", "d2h pageable", "h2d pinned", "p2p"):
        transfer_cost("d2h", "pageable", MIB, TOY)


@pytest.mark.parametrize("key", ["h2d pinned", "h2d pinned 0", "h2d pinned x"])
def test_keys_without_bytes_are_one_sentence(key: str) -> None:
    with pytest.raises(PerfModelError, match=f"the key of a transfer must end in bytes, .*got '{key}'"):
        transfer_curves({key: TransferRecord(time_s=1.0)})


@pytest.mark.parametrize(("direction", "memory"), [("h2h", "pinned"), ("h2d", "pined"), ("h2d", None)])
def test_unknown_words_are_one_sentence(direction: str, memory: str | None) -> None:
    with pytest.raises(PerfModelError, match="of a transfer must be known"):
        transfer_cost(direction, memory, MIB, TOY)


def test_curves_are_fitted_once_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = []
    monkeypatch.setattr(transfers, "transfer_curves", lambda records: fitted.append(1) or transfer_curves(records))
    again = profile(dict(RECORDS))
    for size in (3, 5, 7):
        transfer_cost("h2d", "pinned", size, again)
    assert len(fitted) == 1
    faster = profile({key: TransferRecord(time_s=1e-6) for key in RECORDS})
    assert transfer_cost("h2d", "pinned", 3 * MIB, faster).time_s == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("devices", "non_blocking", "direction"),
    [
        (("cpu", "cuda"), True, "h2d"),
        (("cuda", "cpu"), True, "d2h"),
        (("cuda", "cuda"), True, None),
        (("cpu", "cuda"), False, None),  # of which nobody knows what memory it is from
    ],
)
def test_copies_that_the_host_does_not_wait_for(
    devices: tuple[str, str], non_blocking: bool, direction: str | None
) -> None:
    source, target = (TensorSpec((8,), (1,), "float32", device) for device in devices)
    keywords = (("device", devices[1]), ("non_blocking", non_blocking))
    assert pinned_copy(Operation("aten._to_copy.default", (source,), keywords, (target,))) == direction
    assert pinned_copy(Operation("aten.clone.default", (source,), keywords, (target,))) is None


def test_what_was_measured() -> None:
    known = [(direction, memory) for direction in ("h2d", "d2h") for memory in ("pinned", "pageable")]
    assert [each for each in known if has_transfers(*each, TOY)] == [("h2d", "pinned")]
