"""The host stage is kept piece by piece: a stop after any of them loses nothing that was measured."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from calibrate.host import costs, optimizers, records
from calibrate.host import pieces as host_pieces
from calibrate.host.examples import examples
from calibrate.host.pieces import HostPieces
from perfmodel.errors import PerfModelError
from perfmodel.hardware.profile import HostRecord
from tests.refusals import refused

EXAMPLES = ("linear bias", "add", "view", "sum", "cast")
SWEEPS = 2
FLAGS = ((), ("amp",))
PIECES = len(FLAGS) * (SWEEPS + 1 + 1) + 1 + 4


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few calls, each once, and no optimizers."""
    chosen = [each for each in examples() if each.title in EXAMPLES]
    monkeypatch.setattr(costs, "examples", lambda: chosen)
    monkeypatch.setattr(costs, "FLAGS", FLAGS)
    for name, value in {"OPERATOR_PIECES": 1, "SWEEPS": SWEEPS, "ROUNDS": 3, "BACKWARD_ROUNDS": 3}.items():
        monkeypatch.setattr(costs, name, value)
    for name, value in {"ROUNDS": 1, "WARM_UP": 0, "COUNTS": (1, 2), "IMPLEMENTATIONS": {}}.items():
        monkeypatch.setattr(optimizers, name, value)
    monkeypatch.setattr(records, "SAMPLES", 2)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every time something is written down, the run is stopped."""
    save = HostPieces.save

    def save_and_stop(self: HostPieces) -> None:
        save(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(HostPieces, "save", save_and_stop)


def runs_until_done(path: Path) -> tuple[int, dict[str, HostRecord]]:
    """How many runs were stopped, each of which got on, and what the last one found."""
    stops, before = 0, -1
    while True:
        pieces = HostPieces.kept_in(path, "p")
        try:
            return stops, costs.measure_host("cpu", kept=pieces)
        except KeyboardInterrupt:
            stops += 1
            data = json.loads(path.read_text())
            done = len(data["finished"]) + len(data["operators_s"])
            assert done > before
            before = done


def test_a_stop_after_each_piece_loses_none(
    tmp_path: Path, small: None, stopped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pieces, "CHECKPOINT_S", math.inf)
    stops, found = runs_until_done(tmp_path / "host.json")
    assert stops == PIECES
    monkeypatch.undo()
    samples = {key: record.samples for key, record in found.items() if key.startswith("call ") and "(" in key}
    assert samples
    assert set(samples.values()) == {SWEEPS * 3}
    assert all(math.isfinite(record.time_s) for record in found.values())
    assert {"reference", "call", "call amp", "node", "module", "glue", "backward", "clip parameter"} <= found.keys()


def test_a_stop_within_a_piece_keeps_its_operators(
    tmp_path: Path, small: None, stopped: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pieces, "CHECKPOINT_S", -1.0)
    monkeypatch.setattr(costs, "FLAGS", ((),))
    monkeypatch.setattr(costs, "examples", lambda: [each for each in examples() if each.title == "add"])
    monkeypatch.setattr(costs, "list_prefixes", lambda: ("zero_grad",))
    noted: list[str] = []
    note = HostPieces.note_operator

    def noting(self: HostPieces, key: str, seconds: float) -> None:
        noted.append(key)
        note(self, key, seconds)

    monkeypatch.setattr(HostPieces, "note_operator", noting)
    stops, _ = runs_until_done(tmp_path / "host.json")
    assert len(noted) > 1
    assert len(noted) == len(set(noted))  # none twice
    assert stops == SWEEPS + 1 + 1 + 1 + 1 + len(noted)


def test_no_piece_is_begun_that_is_too_late(tmp_path: Path, small: None) -> None:
    path = tmp_path / "host.json"
    asked: list[None] = []

    def is_late() -> bool:
        asked.append(None)
        return len(asked) > 5

    pieces = HostPieces.kept_in(path, "p")
    found = costs.measure_host("cpu", kept=pieces, is_late=is_late)
    assert pieces.left_out == PIECES - 5
    assert {"reference", "call", "node"} <= found.keys()
    assert "module" not in found
    again = HostPieces.kept_in(path, "p")
    assert (again.left_out, again.finished) == (0, pieces.finished)
    assert again.records == pieces.records
    assert costs.measure_host("cpu", kept=HostPieces(), is_late=lambda: True) == {}


def test_pieces_of_another_profile_are_neither_used_nor_replaced(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    first = HostPieces.kept_in(path, "first")
    first.measure("modules", lambda: first.records.update(module=HostRecord(time_s=1.0)))
    before = path.read_text()
    assert HostPieces.kept_in(path, "first").finished == ["modules"]
    with refused("host.json", "first"):
        HostPieces.kept_in(path, "second")
    assert path.read_text() == before
    first.remove()
    assert os.listdir(tmp_path) == []


def test_a_file_without_pieces_is_anybodys(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    HostPieces.kept_in(path, "first").save()
    HostPieces.kept_in(path, "second").save()
    assert json.loads(path.read_text())["profile"] == "second"


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ({"reference_s": "x"}, "reference_s must be a number"),
        ({"reference_s": -1.0}, "reference_s must be greater than 0 (got -1.0)"),
        ({"runs_s": [0.001, -1.0]}, "runs_s.1 must be greater than 0"),
        ({"operators_s": {"mm": 1e300}}, "operators_s.mm must be less than"),
        ({"samples": {"amp": {"mm": [[-1.0], []]}}}, "samples.amp.mm.0.0 must be greater than"),
        ({"left_out": -1}, "left_out must be greater than"),
    ],
)
def test_numbers_out_of_range_are_named(tmp_path: Path, content: dict[str, object], rule: str) -> None:
    path = tmp_path / "host.json"
    path.write_text(json.dumps({"version": 1, "profile": "p", **content}))
    with pytest.raises(PerfModelError) as refused:
        HostPieces.kept_in(path, "p")
    assert str(refused.value).startswith(f"{path}: {rule}")
    assert str(refused.value).endswith("Delete it to measure the host's costs from their beginning.")


@pytest.mark.parametrize(
    "content",
    ['{"version": 1, "profile": "p", "reference_s": "x"}', '{"version": 1, "profile"', "notes", '{"reference_s": NaN}'],
)
def test_a_damaged_file_is_one_sentence(tmp_path: Path, content: str) -> None:
    path = tmp_path / "host.json"
    path.write_text(content)
    with pytest.raises(PerfModelError, match=r"host\.json: .* Delete it to measure the host's costs") as refused:
        HostPieces.kept_in(path, "p")
    assert "\n" not in str(refused.value)
    assert path.read_text() == content
