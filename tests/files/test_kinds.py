"""Files are known by how they begin: those that perfmodel wrote, whole or cut short, and foreign ones."""

from __future__ import annotations

import gzip
import json
import pickle
import zlib
from pathlib import Path

import pytest

from calibrate.draft import Draft
from calibrate.jobs import job
from perfmodel.accuracy.card import save_card
from perfmodel.accuracy.card_text import accuracy_markdown
from perfmodel.files import kinds as file_kinds
from perfmodel.files.kinds import KINDS, described, head_of
from perfmodel.hardware.measurement import save_measurement
from perfmodel.hardware.profile import CATALOG, Device, KernelRecord, Profile
from perfmodel.report.plots.canvas import FORMATS, save_figure
from perfmodel.report.traces.chrome import save_chrome_trace
from perfmodel.report.traces.memory_snapshot import save_memory_snapshot
from tests.accuracy.cards import CARD, measurement
from tests.calibrate.kernels.operations import op, t
from tests.places import ROOT
from tests.report.synthetic import prediction


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By the name of the file, the kind that the writer says it is."""
    folder = tmp_path_factory.mktemp("written")
    draft = Draft.new(folder / "p.json", Profile(name="p", device=Device(kind="cpu", name="CPU", memory_bytes=1)))
    draft.record(job(op("mm.default", t("float32[2,2]"), t("float32[2,2]")), "grid"), KernelRecord(origin="grid"), None)
    draft.write()
    save_chrome_trace(prediction(), folder / "t.json")
    save_chrome_trace(prediction(), folder / "t.json.gz")
    save_memory_snapshot(prediction(), folder / "m.pickle")
    save_card(CARD, accuracy_markdown(CARD), folder / "card.md")
    save_measurement(measurement("a"), folder / "a.json")
    for ending in FORMATS:
        save_figure(folder / f"f{ending}", "title", (2, 2), [lambda ax: ax])
    kinds = {
        "p.json": file_kinds.PROFILE,
        "p.samples.json.gz": file_kinds.SAMPLES,
        "t.json": file_kinds.PREDICTED_TRACE,
        "t.json.gz": file_kinds.PREDICTED_TRACE,
        "m.pickle": file_kinds.MEMORY_SNAPSHOT,
        "card.md": file_kinds.CARD,
        "card.json": file_kinds.CARD_NUMBERS,
        "a.json": file_kinds.MEASUREMENT,
        **{f"f{ending}": file_kinds.PICTURE for ending in FORMATS},
    }
    return {str(folder / name): kind.name for name, kind in kinds.items()}


def test_every_written_file_is_of_its_kind_and_of_no_other(written: dict[str, str]) -> None:
    found = {path: [kind.name for kind in KINDS if kind.matches(head_of(Path(path)))] for path in written}
    assert found == {path: [kind] for path, kind in written.items()}


def test_a_file_cut_short_is_still_known(written: dict[str, str], tmp_path: Path) -> None:
    """A calibration that a full disk ended may go on; a few hundred bytes are enough."""
    for path, kind in written.items():
        cut = tmp_path / "cut"
        cut.write_bytes(Path(path).read_bytes()[:400])
        assert described(head_of(cut)) == kind


def test_shipped_files_are_known() -> None:
    profiles = sorted(CATALOG.glob("*.json"))
    assert profiles
    assert {path.name: described(head_of(path)) for path in profiles} == {path.name: "a profile" for path in profiles}
    assert described(head_of(ROOT / "ACCURACY.md")) == "an accuracy card"
    assert described(head_of(ROOT / "ACCURACY.json")) == "an accuracy card's numbers"
    results = [path for path in sorted((ROOT / "results").rglob("*.json")) if ".trace" not in path.name]
    assert results
    assert {described(head_of(path)) for path in results} == {"a measurement"}


def test_kinds_without_a_writer_here() -> None:
    assert file_kinds.CHROME_TRACE.matches(b'{"schemaVersion": 1, "traceEvents": [{"ph": "X"')
    assert file_kinds.STAGES.matches(b'{"collectives": {"all_reduce 2": [1, 2')
    assert file_kinds.ALLOCATOR_HISTORY.matches(b'{"events":[["alloc",1,2,0],')


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"name: gpt2.7b\nmodel: x", "a file that begins with 'name: gpt2.7b'"),
        (pickle.dumps([1, 2]), "a pickle"),
        (zlib.compress(b"x"), "a file that begins with"),
        (gzip.compress(b"name: x", mtime=0), "a file that begins with 'name: x'"),
        (b"\x1f\x8bdamaged", "a compressed file"),
        (json.dumps(["traceEvents"]).encode(), """a file that begins with '["traceEvents"]'"""),
        (json.dumps({"a": {"traceEvents": 1}, "b": '"traceEvents":'}).encode(), "a file that begins with"),
        (b'"' * 1000, "a file that begins with"),
        (b"{" * 1000, "a file that begins with"),
        (b"\x1b[31mred", r"a file that begins with '\x1b[31mred'"),
        (b"# Accuracies of archers", "a file that begins with"),
    ],
    ids=str,
)
def test_foreign_files_are_told_by_their_first_line(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "foreign"
    path.write_bytes(content)
    assert described(head_of(path)).startswith(words)
