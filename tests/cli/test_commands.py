"""The command line: each command once, each way to go wrong as one line on stderr and exit code 1."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from perfmodel.accuracy.card import save_card
from perfmodel.errors import PerfModelError
from perfmodel.hardware.profile import Device, Profile, load_profile, save_profile
from perfmodel.prediction.prediction import Prediction
from perfmodel.report.traces.chrome import save_chrome_trace
from tests.accuracy.cards import CARD, measurement
from tests.cli.commands import TINY, Asked, failure, run, write_measurement
from tests.places import ROOT, TESTS
from tests.refusals import names
from tests.report.pipelines import with_larger_last
from tests.report.synthetic import WHOLE, prediction


def test_predict_prints_the_table(asked: Asked) -> None:
    result = run("predict", "toy.yaml", "--set", "batch.size=4", "--set", "hardware.device.memory_bytes=3")
    assert result.exit_code == 0
    assert [line.rstrip() for line in result.stdout.splitlines()] == WHOLE.splitlines()
    ((scenario, profile, options),) = asked
    assert (scenario.batch.size, profile.device.memory_bytes) == (4, 3)
    assert options == {"exact": True, "allow_import": False}


def test_predict_options(asked: Asked) -> None:
    assert run("predict", "toy.yaml", "--no-exact-keys", "--allow-import").exit_code == 0
    assert asked[0][2] == {"exact": False, "allow_import": True}


def test_predict_json_is_alone_on_stdout(asked: Asked) -> None:
    result = run("predict", "toy.yaml", "--json", "--trace", "t.json")
    assert json.loads(result.stdout)["fits"] is True
    assert result.stderr == "wrote t.json\n"


def test_predict_writes_what_is_asked_for(asked: Asked, folder: Path) -> None:
    result = run("predict", "toy.yaml", "--plot", "p", "--trace", "t.json.gz", "--memory-snapshot", "m.pickle")
    assert result.exit_code == 0
    wrote = [Path(line.removeprefix("wrote ")) for line in result.stderr.splitlines()]
    assert [path.name for path in wrote] == [
        "timeline.png", "where-the-time-goes.png", "roofline.png", "memory.png", "t.json.gz", "m.pickle",
    ]  # fmt: skip
    assert all(path.stat().st_size > 0 for path in wrote)


def test_predict_for_real(folder: Path) -> None:
    result = run("predict", ROOT / "scenarios/gpt2.7b.yaml", "--set", "hardware.profile=toy.json", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["memory"]["peak_allocated_bytes"] > 4 * 4 * 2_568_276_480  # parameters, gradients, two states


def test_no_memory_snapshot_of_a_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfmodel.prediction.predict.predict", lambda *question, **options: prediction("cpu"))
    result = run("predict", "toy.yaml", "--memory-snapshot", "m.pickle")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: m.pickle: memory must be predicted for a snapshot (on a CPU it is not). Leave it out.\n"
    )


def test_diff(asked: Asked, folder: Path) -> None:
    save_chrome_trace(prediction(), Path("t.json"))
    result = run("diff", "toy.yaml", "t.json")
    assert result.stdout.splitlines()[0].rstrip() == "predicted 38 us, in the trace 38 us: +0 ns, +0.0 %"


def test_compare_prints_or_writes_the_card(asked: Asked, folder: Path) -> None:
    write_measurement(Path("results/toy.json"))
    assert run("compare", "results").stdout.startswith("# Accuracy\n")
    result = run("compare", "results", "--output", "A.md", "--plot", "p")
    assert result.stdout == "1 case: step time off by 3.80% in the median, 3.80% in the mean, -3.80% at worst (toy)\n"
    assert result.stderr.splitlines()[-2:] == ["wrote A.md", "wrote A.json"]
    assert run("compare", "results", "--check", "A.json").exit_code == 0
    assert [options.get("exact", True) for _, _, options in asked] == [True, False] * 3


def test_compare_with_another_profile(asked: Asked, folder: Path) -> None:
    write_measurement(Path("results/toy.json"), hardware={"profile": "gone.json"})
    assert "gone.json: a profile must be a readable file" in failure("compare", "results")
    assert run("compare", "results", "--profile", "toy.json").exit_code == 0


def test_compare_fails_where_a_class_got_worse(asked: Asked, folder: Path) -> None:
    write_measurement(Path("results/toy.json"))
    save_card(CARD, "", Path("old.md"))
    result = run("compare", "results", "--check", "old.json")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "Error: old.json: no class may get worse by more than 0.3 points (got step of all cases"
    )


def test_compare_without_measurements(folder: Path) -> None:
    assert failure("compare", "results") == (
        "Error: results: must hold measurement files (got none). Make one with `perfmodel validate --output results`."
    )


def test_profile_show(folder: Path) -> None:
    result = run("profile", "show", "toy.json")
    assert result.stdout.splitlines()[0].rstrip() == "toy: 1 x Toy GPU"
    about, _, rest = failure("profile", "show", "none").partition(" must ")
    assert about == "Error: NAME"
    assert names(rest, "none")
    assert names(rest, "h200-sxm-x4")


def test_without_a_profile_of_this_cpu_show_says_how_to_measure_one(folder: Path) -> None:
    about, _, rest = failure("profile", "show", "cpu").partition(" must ")
    assert about == "Error: NAME"
    assert names(rest, "cpu")
    assert names(rest, "perfmodel calibrate --device cpu")


def test_topology(folder: Path) -> None:
    result = run("topology", "2x4:nvswitch=450GB/s,network=50GB/s", "--groups", "tp=4,dp=2", "--plot", "topology.png")
    assert result.exit_code == 0, result.output
    assert "NV 450" in result.output
    assert "tp" in result.output
    assert Path("topology.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_kind_of_picture_is_one_sentence(folder: Path) -> None:
    assert failure("topology", "1x2:pcie", "--plot", "x.xyz") == (
        "Error: x.xyz: a plot must end in .png, .svg, .pdf (got '.xyz'). Choose one of them."
    )
    assert not Path("x.xyz").exists()


def test_a_topology_of_nothing_known_is_one_sentence(folder: Path) -> None:
    result = run("topology", "2x")
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert len(result.output.splitlines()) == 1


def test_measurements_of_other_tools_are_imported(folder: Path) -> None:
    save_profile(Profile(name="toy", device=Device(kind="cuda", name="Toy GPU", memory_bytes=2**30)), Path("toy.json"))
    data = TESTS / "data" / "imports" / "nccl-tests.txt"
    result = run("profile", "import", "toy.json", str(data), "--interconnect", "nvlink")
    assert result.exit_code == 0, result.output
    assert load_profile(Path("toy.json")).interconnect == "nvlink"


def test_a_negative_buffer_is_one_sentence(folder: Path) -> None:
    data = json.loads((TESTS / "data" / "imports" / "nvbandwidth.json").read_text())
    data["nvbandwidth"]["bufferSize"] = -5
    Path("copies.json").write_text(json.dumps(data))
    assert failure("profile", "import", "toy.json", "copies.json").startswith(
        "Error: copies.json: bufferSize must be above 0"
    )


def test_schema() -> None:
    assert json.loads(run("schema").stdout)["title"] == "Scenario"
    assert json.loads(run("schema", "profile").stdout)["title"] == "Profile"
    assert failure("schema", "x").startswith("Error: schema must be of a scenario, profile or measurement (got 'x').")


def test_calibrate_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr("calibrate.session.calibrate", lambda *asked, **options: calls.append((asked, options)))
    assert run("calibrate", "--device", "cpu", "--scenario", "toy.yaml", "--resume", "--name", "n").exit_code == 0
    asked = ("--budget", "0", "--allow-import", "--base", "first")
    assert run("calibrate", *asked, "--output", "o.json", "--only", "a", "--only", "b", "--quiet").exit_code == 0
    (first, one), (second, two) = calls
    assert (first, second) == ((Path("cpu.json"), "cpu"), (Path("o.json"), "cuda"))
    assert [scenario.name for scenario in one.pop("scenarios")] == ["toy"]
    new = {"budget_s": None, "allow_import": False, "base": None}
    assert one == {"resume": True, "name": "n", "only": None, "progress": True} | new
    again = {"resume": False, "name": None, "base": "first", "only": ("a", "b"), "progress": False}
    assert two == {"scenarios": [], "budget_s": 0.0, "allow_import": True} | again


def test_calibrate_interconnect_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from calibrate.interconnect.plan import InterconnectOptions

    calls: list[tuple[Path, InterconnectOptions, float | None]] = []
    answers = iter([object(), None])

    def calibrate(output: Path, options: InterconnectOptions, timeout_s: float | None) -> Any:
        calls.append((output, options, timeout_s))
        return next(answers)

    monkeypatch.setattr("calibrate.interconnect.session.calibrate_interconnect", calibrate)
    asked = ("calibrate", "--interconnect", "gloo", "--device", "cpu")
    plain = run(*asked)
    limits = ("--budget", 7, "--timeout", 9, "--ranks", 4, "--nnodes", 2, "--rdzv", "host:1", "--only", "calls")
    elsewhere = run(*asked, *limits)
    assert (plain.stderr, elsewhere.stderr) == ("wrote cpu.json\n", "cpu.json is written on rank 0's machine\n")
    of_machines = {"budget_s": 7.0, "only": ("calls",), "nodes": 2, "rendezvous": "host:1"}
    assert calls == [
        (Path("cpu.json"), InterconnectOptions("gloo", "cpu", 2, []), None),
        (Path("cpu.json"), InterconnectOptions("gloo", "cpu", 4, [], **of_machines), 9.0),
    ]


@pytest.mark.parametrize("option", [("--resume",), ("--name", "n"), ("--quiet",)])
def test_calibrate_refuses_what_interconnects_do_not_take(folder: Path, option: tuple[str, ...]) -> None:
    assert failure("calibrate", "--interconnect", "nvlink", *option) == (
        f"Error: calibrate: {option[0]} must not be given with --interconnect (got nvlink). Leave one out."
    )


@pytest.mark.parametrize("option", [("--ranks", 2), ("--nnodes", 1), ("--rdzv", "host:1"), ("--timeout", 9)])
def test_calibrate_refuses_what_only_interconnects_take(folder: Path, option: tuple[object, ...]) -> None:
    assert failure("calibrate", *option) == (
        f"Error: calibrate: {option[0]} must be given with --interconnect (got none). Give both."
    )


def test_the_usual_time_limit_is_said() -> None:
    from calibrate.interconnect.plan import TIMEOUT_S

    assert f"{TIMEOUT_S:g} if left" in " ".join(run("calibrate", "--help").stdout.split())


def test_validate_shows_predictions_beside_measurements(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    from validate.run import Outcome

    def measure_cases(cases: list[Any], device: str, results: Path, **options: Any) -> Outcome:
        assert ([case.name for case in cases], device, results) == (["toy"], "cuda", Path("r"))
        known = {**cases[0].scenario.model_dump(mode="json", exclude_unset=True)}
        return Outcome(measured=[measurement(scenario=known)], failures=[PerfModelError("b: broke. Mend it.")])

    monkeypatch.setattr("validate.run.measure_cases", measure_cases)
    result = run("validate", "toy.yaml", "--output", "r")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1].split() == ["toy", "step", "39.5", "us", "38", "us", "-3.8", "%"]
    assert result.stderr.splitlines() == [
        "Error: b: broke. Mend it.",
        "Error: toy.yaml: every case must run (1 of 1 failed). See above.",
    ]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("- a", "a scenario must be a mapping of keys to values (got a list)."),
        ("", "a scenario must hold model, batch and hardware (got nothing)."),
        ("a: &a [*a]", "an alias must not stand inside what it names (got one in line 1)."),
        ("a: !!python/name:os.system", "values must be plain text, numbers, lists or mappings"),
        (TINY.replace("size: 2", "size: -2"), "batch.size must be greater than or equal to 1 (got -2)."),
        (TINY.replace("gpt", "gtp"), "model.family must be a known family (got 'gtp'). Did you mean 'gpt'?"),
        (
            TINY.replace("toy.json", "toy.json, gpus: 2") + "parallelism: {dp: 2, strategy: ddp}",
            "hardware.gpus must be at most 1",
        ),
        (TINY + "parallelism: {dp: 2}", "parallelism.dp must be hardware.gpus (got dp=2, gpus=1)"),
    ],
)
def test_a_bad_scenario_is_one_sentence(folder: Path, content: str, sentence: str) -> None:
    Path("bad.yaml").write_text(content)
    assert failure("predict", "bad.yaml", "--trace", "t.json").startswith(f"Error: bad.yaml: {sentence}")
    assert not Path("t.json").exists()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"version": 1, "na', "a profile must be whole JSON"),
        ('{"version": 99}', "version must be at most 1 (got 99). Update perfmodel to read it."),
        ("[]", "a profile must be a JSON object (got list)."),
    ],
)
def test_a_bad_profile_is_one_sentence(folder: Path, content: str, sentence: str) -> None:
    Path("toy.json").write_text(content)
    assert failure("predict", "toy.yaml").startswith(f"Error: toy.json: {sentence}")


def test_a_defect_keeps_its_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*question: Any, **options: Any) -> Prediction:
        raise ZeroDivisionError

    monkeypatch.setattr("perfmodel.prediction.predict.predict", broken)
    assert isinstance(run("predict", "toy.yaml").exception, ZeroDivisionError)


def test_the_rank_of_a_memory_snapshot_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfmodel.prediction.predict.predict", lambda *question, **options: with_larger_last())
    assert run("predict", "toy.yaml", "--memory-snapshot", "m.pickle").stderr == "wrote m.pickle of rank 1\n"


@pytest.mark.usefixtures("empty_cache")
def test_predict_of_what_does_not_fit_names_commands_that_run(folder: Path) -> None:
    small = ["--set", "hardware.device.memory_bytes=4e6", "--set", "batch.size=4"]
    result = run("predict", "toy.yaml", *small)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "does not fit" in result.stdout
    _, _, asked = result.stdout.partition("what would fit")
    commands = re.findall(r"`perfmodel (sweep .*)`", asked)
    assert commands
    for command in commands:
        assert "--set hardware.device.memory_bytes=4e6" in command
        swept = run(*shlex.split(command))
        assert (swept.exit_code, swept.stderr) == (0, "")
        assert swept.stdout.startswith("toy on toy: ")
    data = json.loads(run("predict", "toy.yaml", *small, "--json").stdout)
    assert data["fits"] is False
    assert data["memory"]["out_of_memory"]["missing_bytes"] > 0
    assert data["what_fits"]["capacity_bytes"] == 4_000_000
    assert json.loads(run("predict", "toy.yaml", "--json").stdout)["what_fits"] is None


def test_a_sweep_lists_what_does_not_fit_beside_what_does(folder: Path) -> None:
    result = run("sweep", "toy.yaml", "--vary", "hardware.device.memory_bytes=1e6,1e11", "--json", "--plot", "plots")
    assert result.exit_code == 0
    first, second = json.loads(result.stdout)["configurations"]
    assert (first["rank"], first["outcome"]["fits"], first["outcome"]["needed_bytes"]) == (1, True, None)
    assert (second["rank"], second["outcome"]["fits"]) == (None, False)
    assert second["outcome"]["needed_bytes"] == first["outcome"]["device_bytes"]
    assert {path.name for path in Path("plots").iterdir()} == {"time.png", "memory.png"}
