"""Every committed pipeline is predicted, printed, drawn and exported where torch cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.places import ROOT

WITHOUT_TORCH = "import sys\nsys.modules['torch'] = None\n"

PROGRAMS = """
import json
from pathlib import Path
from perfmodel.files.reading import read_json
from perfmodel.program.ranks import rank_programs
from perfmodel.scenario.yaml_file import parse_scenario

stages = {}
for path in sorted(Path("results").glob("*/*.json")):
    asked = read_json(path, "a measurement", "", 10**9).get("scenario", {})
    if asked.get("parallelism", {}).get("pp"):
        programs = [each.program for each in rank_programs(parse_scenario(asked, str(path)))]
        runs = [run.stage for program in programs for run in program.runs]
        stages[str(path)] = [len(programs[0].stage_blocks), max(runs) + 1]
print(json.dumps(stages))
"""

# Where it is cut follows from numbers of parameters.
SETTINGS = (
    "parallelism.pp.layers=null",
    "parallelism.pp.schedule=dualpipev",
    "parallelism.pp.virtual_stages=2",
    "model.size=large",
    "batch.sequence_length=512",
)

ANSWER = f"""
import json, sys
from pathlib import Path
from perfmodel.prediction.predict import predict
from perfmodel.report.json_report import json_report
from perfmodel.report.plots.pipeline import save_pipeline_plot
from perfmodel.report.text.prediction import rendered, report
from perfmodel.report.traces.chrome import save_chrome_trace
from perfmodel.scenario.yaml_file import load_question

scenario, profile = load_question(Path("scenarios/gpt2.7b-1f1b.yaml"), {SETTINGS!r})
prediction = predict(scenario, profile)
folder = Path(sys.argv[1])
save_pipeline_plot(prediction, folder / "pipeline.png")
save_chrome_trace(prediction, folder / "trace.json")
print(json.dumps({{"text": rendered(report(prediction)), "pipeline": json_report(prediction)["pipeline"]}}))
"""


def run(code: str, folder: Path) -> str:
    """What the code prints in a fresh interpreter without torch. folder: its argument, and its empty cache."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_TORCH + code, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PERFMODEL_CACHE": str(folder), "PERFMODEL_PROGRESS": "off"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_measured_pipeline_has_its_programs(tmp_path: Path) -> None:
    """Their runs name stages of the model up to the last that has blocks."""
    stages = json.loads(run(PROGRAMS, tmp_path))
    assert len(stages) > 50
    assert {path: counts for path, counts in stages.items() if counts[0] != counts[1] or counts[0] < 2} == {}


def test_a_pipeline_is_printed_drawn_and_exported(tmp_path: Path) -> None:
    answer = json.loads(run(ANSWER, tmp_path))
    assert "dualpipev, stages of 9, 9, 9, 9 blocks, 8 micro-batches" in answer["text"]
    assert answer["pipeline"]["blocks"] == [9, 9, 9, 9]
    assert [each["stages"] for each in answer["pipeline"]["ranks"]] == [[0, 3], [1, 2]]
    assert (tmp_path / "pipeline.png").stat().st_size > 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
