"""What commands write, and what they refuse to write over before any work is done."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from perfmodel.accuracy.card import save_card
from perfmodel.hardware.measurement import save_measurement
from perfmodel.trace import store
from tests.accuracy.cards import CARD, measurement
from tests.cli.commands import TINY, Asked, failure, run, write_measurement


@pytest.mark.parametrize("option", ["--trace", "--memory-snapshot", "--plot"])
def test_a_scenario_is_not_replaced_by_what_is_asked_of_it(asked: Asked, option: str) -> None:
    os.rename("toy.yaml", "toy.json.gz")
    assert failure("predict", "toy.json.gz", option, "toy.json.gz").startswith("Error: toy.json.gz: must be ")
    assert (Path("toy.json.gz").read_text(), asked) == (TINY, [])


@pytest.mark.parametrize("option", ["--trace", "--memory-snapshot", "--plot"])
def test_a_device_stays_a_device(asked: Asked, option: str) -> None:
    os.mkfifo("pipe.json")
    assert failure("predict", "toy.yaml", option, "pipe.json").startswith("Error: pipe.json: must be ")
    assert (Path("pipe.json").is_fifo(), asked) == (True, [])


def test_two_outputs_do_not_share_a_file(asked: Asked) -> None:
    result = run("predict", "toy.yaml", "--trace", "x.json", "--memory-snapshot", "x.json")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].endswith("(got a predicted trace). Choose another name.")
    assert "traceEvents" in Path("x.json").read_text()


@pytest.mark.parametrize("pack", [lambda text: text, gzip.compress])
def test_a_trace_that_was_recorded_is_not_replaced_by_a_predicted_one(
    asked: Asked, pack: Callable[[bytes], bytes]
) -> None:
    content = pack(b'{"schemaVersion": 1, "traceEvents": []}')
    Path("t.json.gz").write_bytes(content)
    assert failure("predict", "toy.yaml", "--trace", "t.json.gz") == (
        "Error: t.json.gz: must be a predicted trace or not exist to be written (got a profiler trace). Choose another "
        "name."
    )
    assert (Path("t.json.gz").read_bytes(), asked) == (content, [])
    for _ in range(2):
        assert run("predict", "toy.yaml", "--trace", "u.json.gz").exit_code == 0


def test_a_picture_is_not_drawn_over_another_file(asked: Asked) -> None:
    Path("p").mkdir()
    Path("p/timeline.png").write_text("notes")
    assert "(got a file that begins with 'notes')" in run("predict", "toy.yaml", "--plot", "p").stderr
    assert Path("p/timeline.png").read_text() == "notes"
    assert failure("topology", "1x2:pcie", "--plot", "toy.yaml").startswith("Error: toy.yaml: a plot must end in")
    os.rename("p/timeline.png", "t.png")
    assert "(got a file that begins with 'notes')" in failure("topology", "1x2:pcie", "--plot", "t.png")


def test_a_picture_of_another_program_is_kept(asked: Asked) -> None:
    own, drawn = "p/memory.png", b""
    assert run("predict", "toy.yaml", "--plot", "p").exit_code == 0
    for replaced in (True, False):
        with Image.open(own) as picture:
            picture.load()
        picture.putpixel((0, 0), 7)
        picture.save(own, pnginfo=software("perfmodel" if replaced else "Inkscape"))
        drawn = Path(own).read_bytes()
        shown = run("predict", "toy.yaml", "--plot", "p")
        assert (shown.exit_code == 0, Path(own).read_bytes() != drawn) == (replaced, replaced)
    assert (
        "memory.png: must be a picture by perfmodel or not exist to be written (got another program's" in shown.stderr
    )


def software(name: str) -> PngInfo:
    """What a program says of itself in a PNG."""
    texts = PngInfo()
    texts.add_text("Software", name)
    return texts


def test_the_numbers_of_a_card_do_not_replace_a_profile(asked: Asked) -> None:
    save_measurement(measurement(), Path("results/a.json"))
    profile = Path("toy.json").read_text()
    assert failure("compare", "results", "--output", "toy.md") == (
        "Error: toy.json: must be an accuracy card's numbers or not exist to be written (got a profile). Choose "
        "another name."
    )
    assert (Path("toy.json").read_text(), Path("toy.md").exists(), asked) == (profile, False, [])


@pytest.mark.parametrize("output", ["results/card.md", "results/new/card.md", "link/card.md"])
def test_a_card_is_not_put_among_the_measurements(asked: Asked, output: str) -> None:
    write_measurement(Path("results/a.json"))
    Path("link").symlink_to("results")
    said = failure("compare", "results", "--output", output)
    assert said.startswith(f"Error: --output must lie outside results (got {output})")
    assert ([path.name for path in Path("results").rglob("*")], asked) == (["a.json"], [])


def test_a_card_is_held_against_what_it_replaces(asked: Asked) -> None:
    """Not against itself, which would always hold."""
    write_measurement(Path("results/a.json"))
    save_card(CARD, "# Accuracy", Path("A.md"))
    result = run("compare", "results", "--output", "A.md", "--check", "A.json")
    assert result.exit_code == 1
    assert "A.json: no class may get worse" in result.stderr
    predicted = len(asked)
    assert failure("compare", "results", "--check", "gone.json").startswith("Error: gone.json: ")
    assert len(asked) == predicted


@pytest.mark.parametrize(
    ("work", "arguments"),
    [
        ("perfmodel.prediction.sweep.sweep", ("sweep", "toy.yaml", "--vary", "batch.size=1,2")),
        ("perfmodel.accuracy.comparison.predict_measured", ("compare", "results")),
    ],
)
def test_a_folder_that_cannot_be_is_refused_before_the_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, work: str, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(work, None)
    assert "toy.yaml: must be writable (got: Not a directory)" in failure(*arguments, "--plot", "toy.yaml")


def test_a_prediction_without_a_cache_is_made_with_a_warning(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a home that may only be read; here a file is in the way of the folder, which stops root too."""
    monkeypatch.setenv("PERFMODEL_CACHE", str(tmp_path / "toy.yaml"))
    monkeypatch.setattr(store, "_remembered", store.OrderedDict())
    result = run("predict", "toy.yaml", "--set", "batch.size=3", "--set", "hardware.profile=h200-sxm-x2")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0]
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Warning: {tmp_path}/toy.yaml/traces: the trace was not kept")
