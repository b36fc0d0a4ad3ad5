"""Cases in processes of their own: results, failures of every kind, and that one loses no other."""

import io
import re
import sys
from contextlib import nullcontext

import pytest
from rich.console import Console

from perfmodel.errors import PerfModelError
from perfmodel.hardware.measurement import Measurement, StepMemory, load_measurement
from perfmodel.scenario.scenario import Scenario
from tests.refusals import refused
from validate import run
from validate.cases import Case, resolved_scenario
from validate.run import measure, measure_cases, merge_ranks
from validate.worker import Effort

QUICK = Effort(
    warmup_steps=3, warmup_s=0.0, steady_s=0.0, least_steps=8, most_steps=8, synced_s=0.0, least_synced_steps=1
)


def tiny(**keys):
    data = {
        "name": "tiny",
        "model": {"family": "gpt", "size": "tiny"},
        "batch": {"size": 1, "sequence_length": 8},
        "hardware": {"profile": "cpu"},
    }
    return Scenario.model_validate(data | keys)


def two(strategy, interconnect=None, **keys):
    return {
        "parallelism": {"dp": 2, "strategy": strategy, **keys},
        "hardware": {"profile": "cpu.json", "gpus": 2, "interconnect": interconnect},
    }


def in_place_of_the_worker(monkeypatch, code):
    """Run ``code`` where the worker's module would run."""
    popen = run.subprocess.Popen
    monkeypatch.setattr(
        run.subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", code], **options)
    )


def test_cases_are_measured_kept_and_failures_collected(tmp_path):
    good = Case("good", "tuning", "tiny", tiny())
    bad = Case("bad", "held-out", "tiny", tiny(model={"target": "torch.nn:Identity"}))
    ruled_out = Case("ruled-out", "tuning", "tiny", tiny(training={"compile": True}))
    shown = io.StringIO()
    outcome = measure_cases(
        [bad, ruled_out, good], "cpu", tmp_path, effort=QUICK, recordings=True, console=Console(file=shown, width=200)
    )
    in_the_worker, before = map(str, outcome.failures)
    assert "model.target: torch.nn:Identity" in in_the_worker and "--allow-import" in in_the_worker
    assert before.startswith("ruled-out: training.compile must be false")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good.json", "good.trace.json.gz"]
    assert load_measurement(tmp_path / "good.json") == outcome.measured[0]
    assert re.search(r"bad: failed\. .*model\.target", shown.getvalue())
    assert re.search(r"good: step .* ±.* %, synced ", shown.getvalue())

    shown = io.StringIO()
    again = measure_cases(
        [good], "cpu", tmp_path, effort=QUICK, recordings=True, console=Console(file=shown, width=200)
    )
    assert (again.measured, again.kept, again.failures) == ([], outcome.measured, [])
    assert "nothing is recorded of a kept case" in shown.getvalue() and "--again" in shown.getvalue()

    other = Case("good", "tuning", "tiny", tiny(precision="bf16"))
    changed = measure_cases([other], "cpu", tmp_path, effort=QUICK, console=Console(file=io.StringIO()))
    assert "must be a measurement of this case (its scenario differs)" in str(changed.failures[0])


def test_a_hang_ends_with_the_case_named(monkeypatch):
    in_place_of_the_worker(monkeypatch, "import time; time.sleep(60)")
    with pytest.raises(PerfModelError, match=re.escape("tiny: the run must end within 0.2 s (it did not)")):
        measure(tiny(), "cpu", timeout_s=0.2)


def test_a_crash_is_told_in_one_line_and_shown_in_full(monkeypatch, capsys):
    in_place_of_the_worker(monkeypatch, "print('before'); raise MemoryError('too much')")
    sentence = "tiny: the step must run on cpu (exit code 1: MemoryError: too much)"
    with pytest.raises(PerfModelError, match=re.escape(sentence)):
        measure(tiny(), "cpu")
    assert "before\nTraceback" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["raise MemoryError('too much')", ""])
def test_recordings_are_replaced_when_the_run_has_succeeded(tmp_path, monkeypatch, end):
    """The worker records the allocator's history early, and may fail after that."""
    code = f"""
import json, sys
from pathlib import Path
asked = json.loads(Path(sys.argv[1]).read_text())["request"]
for kind in ("trace", "history"):
    path = Path(asked[kind])
    path.parent.mkdir(exist_ok=True)
    path.write_text("new " + kind)
{end}
sample = dict(name="tiny", split="tuning", group="own", scenario={{}}, provenance={{}}, warmup_steps=5)
sample |= dict(step_s=[1.0], synced_step_s=[1.0], phases_s={{}})
Path(sys.argv[2]).write_text(json.dumps(dict(measurement=sample)))
"""
    popen = run.subprocess.Popen
    monkeypatch.setattr(
        run.subprocess,
        "Popen",
        lambda command, **options: popen([sys.executable, "-c", code, *command[-2:]], **options),
    )
    old = {"trace": '{"traceEvents": []}', "history": '{"events": []}'}
    paths = {kind: tmp_path / f"tiny.{kind}.json" for kind in old}
    for kind, path in paths.items():
        path.write_text(old[kind])
    with pytest.raises(PerfModelError) if end else nullcontext():
        measure(tiny(), "cuda", trace=paths["trace"], history=paths["history"])
    new = old if end else {kind: f"new {kind}" for kind in old}
    assert {kind: path.read_text() for kind, path in paths.items()} == new
    assert sorted(tmp_path.iterdir()) == sorted(paths.values())


def test_a_silent_end_is_told_too(monkeypatch):
    in_place_of_the_worker(monkeypatch, "")
    with pytest.raises(PerfModelError, match=re.escape("(exit code 0: it said nothing)")):
        measure(tiny(), "cpu")


@pytest.mark.parametrize(
    ("keys", "options", "named"),
    [
        ({}, {"device": "tpu"}, ("--device", "cuda", "cpu", "tpu")),
        ({"parallelism": {"strategy": "ddp"}}, {}, ("parallelism.strategy", "none", "one GPU", "ddp")),
        (two("ddp") | {"mode": "forward"}, {}, ("mode", "train", 2, "forward")),
        (
            two("ddp", interconnect="nvlink"),
            {"device": "cpu"},
            ("hardware.interconnect", "gloo", "nvlink"),
        ),
        ({}, {"device": "cpu", "history": True}, ("allocator history", "--device cuda", "cpu")),
    ],
)
def test_refusals_before_anything_runs(tmp_path, keys, options, named):
    if "history" in options:
        options = options | {"history": tmp_path / "history.json.gz"}
    with refused(*named):
        measure(tiny(**keys), **options)


def test_every_rank_s_memory_is_kept_where_ranks_are_merged():
    def of_rank(peak, step_s):
        memory = StepMemory(allocated_before_bytes=0, peak_allocated_bytes=peak, peak_reserved_bytes=2 * peak)
        data = {"name": "a", "split": "tuning", "group": "own", "scenario": {}, "provenance": {}, "warmup_steps": 5}
        times = {"step_s": (step_s, 2.0), "synced_step_s": (step_s,), "phases_s": {}}
        return Measurement(**data, **times, memory=(memory,) * 4)

    merged = merge_ranks([of_rank(5, 1.0), of_rank(7, 3.0)])
    assert [rank.steady_memory.peak_allocated_bytes for rank in merged.ranks] == [5, 7]
    assert [rank.steady_memory.peak_reserved_bytes for rank in merged.ranks] == [10, 14]
    assert (merged.step_s, merged.memory[-1].peak_allocated_bytes) == ((3.0, 2.0), 5)
    assert merged.peak_allocated_bytes == 7


@pytest.fixture
def answers(monkeypatch):
    """In place of running: measurements, or an error, to be given out one after the other."""
    given = []

    def answer(scenario, device, *, name, split, group, **options):
        step_s = given.pop(0)
        if isinstance(step_s, PerfModelError):
            raise step_s
        known = resolved_scenario(scenario)
        samples = {"step_s": step_s, "synced_step_s": (1.0,), "phases_s": {}}
        return Measurement(
            name=name, split=split, group=group, scenario=known, provenance={}, warmup_steps=5, **samples
        )

    monkeypatch.setattr(run, "measure", answer)
    return given


NOISY, QUIET = (1.0, 2.0) * 4, (1.0,) * 8


def measured_in(folder, **options):
    case, shown = Case("good", "tuning", "tiny", tiny()), io.StringIO()
    outcome = measure_cases([case], "cpu", folder, console=Console(file=shown, width=200), **options)
    return outcome, shown.getvalue()


def test_a_noisy_case_is_measured_anew_on_request(tmp_path, answers):
    answers += [NOISY, PerfModelError("broke"), QUIET]
    hint = "good: steps vary by 35.6% (want 5%). Measure it again with `perfmodel validate --again`."
    assert hint in measured_in(tmp_path)[1]
    kept, shown = measured_in(tmp_path)
    assert (kept.kept[0].step_s, hint in shown) == (NOISY, True)
    failed, _ = measured_in(tmp_path, again=True)
    assert [str(error) for error in failed.failures] == ["broke"]
    assert load_measurement(tmp_path / "good.json").step_s == NOISY
    anew, shown = measured_in(tmp_path, again=True)
    assert ([each.step_s for each in anew.measured], anew.kept, "vary" in shown) == ([QUIET], [], False)
    assert load_measurement(tmp_path / "good.json").step_s == QUIET


def test_a_damaged_measurement_is_measured_anew_on_request_but_nothing_else_is_replaced(tmp_path, answers):
    answers += [QUIET]
    path = tmp_path / "good.json"
    measured_in(tmp_path)
    path.write_bytes(path.read_bytes()[:300])
    assert "must be whole JSON" in str(measured_in(tmp_path)[0].failures[0])
    answers += [QUIET]
    assert measured_in(tmp_path, again=True)[0].failures == []
    assert load_measurement(path).step_s == QUIET
    for content in ('{"version": 1, "name": "p", "device": {}}', "name: good"):
        path.write_text(content)
        assert "must be a measurement or not exist" in str(measured_in(tmp_path, again=True)[0].failures[0])
        assert path.read_text() == content


def test_outputs_are_looked_at_before_anything_runs(tmp_path, answers):
    (tmp_path / "good.trace.json.gz").write_text("notes")
    outcome, _ = measured_in(tmp_path, recordings=True)
    assert "good.trace.json.gz: must be a profiler trace or not exist" in str(outcome.failures[0])
    with pytest.raises(PerfModelError, match="Not a directory"):
        measured_in(tmp_path / "good.trace.json.gz")
