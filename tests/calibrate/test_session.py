from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import cli
from calibrate import draft, session
from calibrate.closing import closing_warnings
from calibrate.host import costs
from calibrate.host.pieces import HostPieces
from calibrate.jobs import Job, chosen, job, missing, program_jobs
from calibrate.kernels.bench import Bench, failure
from calibrate.this_machine import facts as machine
from calibrate.timing.samples import CpuStopwatch, Limits, Samples
from perfmodel.errors import PerfModelError
from perfmodel.hardware.profile import HostRecord, KernelRecord, Profile, load_profile, save_profile
from perfmodel.program.program import single_device_program
from perfmodel.program.ranks import rank_programs
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.kernel_key import kernel_key
from tests.calibrate.kernels.operations import op, t
from tests.refusals import refused

GRID = [op("mm.default", t(f"float32[8,{n}]"), t(f"float32[{n},8]")) for n in (4, 8, 12, 16, 20, 24)]
KEYS = sorted(kernel_key(operation) for operation in GRID)
MISSING_OPERATOR = op("no_such_operator.default", t("float32[2]"))


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of six GEMMs and one host cost; every record is written down at once."""
    monkeypatch.setattr(
        "calibrate.kernels.grid.grid_operations", lambda device: [(operation, False) for operation in GRID]
    )
    monkeypatch.setattr("calibrate.host.costs.measure_host", lambda *_: {"call": HostRecord(time_s=1e-6)})
    monkeypatch.setattr("calibrate.host.costs.measure_host_keys", lambda *arguments: {})
    monkeypatch.setattr(draft, "CHECKPOINT_S", 0.0)
    quick = Limits(fewest=3, most=3, fewest_long=3, most_long=3, sample_s=1e-4)
    monkeypatch.setattr(session, "CpuStopwatch", lambda: CpuStopwatch(quick))


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a whole calibration of the small machine, for tests to copy."""
    folder = tmp_path_factory.mktemp("calibrated")
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        session.calibrate(folder / "p.json", "cpu", progress=False)
    return folder


@pytest.fixture
def path(calibrated: Path, tmp_path: Path) -> Path:
    """A profile of the small machine that was calibrated before."""
    shutil.copytree(calibrated, tmp_path, dirs_exist_ok=True)
    return tmp_path / "p.json"


def counted(monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None) -> list[str]:
    """The keys that are really timed, in order; killed after so many."""
    timed: list[str] = []
    time = Bench.time

    def counting(self: Bench, wanted: Job) -> tuple[KernelRecord, Samples | None]:
        if stop_after is not None and len(timed) == stop_after:
            raise KeyboardInterrupt
        timed.append(wanted.key)
        return time(self, wanted)

    monkeypatch.setattr(Bench, "time", counting)
    return timed


def scenario() -> Scenario:
    return Scenario.model_validate(
        {
            "name": "tiny",
            "model": {"family": "gpt", "size": "tiny"},
            "batch": {"size": 1, "sequence_length": 4},
            "hardware": {"profile": "x"},
        }
    )


def test_a_cpu_is_calibrated(tmp_path: Path) -> None:
    path = tmp_path / "laptop.json"
    threads = torch.get_num_threads()
    profile = session.calibrate(path, "cpu", progress=False)
    assert load_profile(path) == profile
    assert profile.name == "laptop"
    assert list(profile.kernels) == KEYS
    assert {record.origin for record in profile.kernels.values()} == {"grid"}
    assert all(record.time_s and record.samples >= 3 and record.kernels == 1 for record in profile.kernels.values())
    assert profile.host == {"call": HostRecord(time_s=1e-6)}
    assert profile.device == machine.device_section("cpu")
    assert set(profile.provenance["stages_s"]) == {"launch", "grid", "host", "power"}
    assert set(profile.provenance["sentinels_s"]["add"]) == {"start", "middle", "end"}
    assert torch.get_num_threads() == threads
    assert (tmp_path / "laptop.samples.json.gz").exists()


@pytest.mark.parametrize("survived", range(4, 11))
def test_killed_anywhere_it_leaves_a_valid_profile_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    path = tmp_path / "p.json"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        counted(patch, stop_after=survived)
        session.calibrate(path, "cpu", progress=False)
    before = load_profile(path)
    assert len(before.kernels) == survived - 4  # the sentinels, to warm up and to note
    timed = counted(monkeypatch)
    after = session.calibrate(path, "cpu", resume=True, progress=False)
    assert list(after.kernels) == KEYS
    assert {key: after.kernels[key] for key in before.kernels} == before.kernels
    assert set(timed).isdisjoint(before.kernels)
    assert "grid" in after.provenance["stages_s"]


def test_nothing_is_measured_twice(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_profile(path)
    timed = counted(monkeypatch)
    again = session.calibrate(path, "cpu", resume=True, progress=False)
    assert timed == []
    assert again == first


def test_a_scenario_adds_its_keys_to_the_same_profile(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    general = load_profile(path)
    merged = session.calibrate(path, "cpu", [scenario()], progress=False)
    new = {key: record for key, record in merged.kernels.items() if record.origin == "scenario"}
    assert len(new) > 50
    assert all(record.time_s for record in new.values())
    assert merged.kernels == general.kernels | new
    assert set(merged.provenance["scenarios_s"]) == {"tiny"}
    timed = counted(monkeypatch)
    session.calibrate(path, "cpu", [scenario()], progress=False)
    assert timed == []


def test_kernels_and_host_keys_of_all_parts_of_a_pipeline_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel once; each part's modules, and the loops of each rank."""
    section = {"stages": 2, "micro_batches": 2, "virtual_stages": 2, "schedule": "zbv-zero-bubble"}
    changes = {"batch": {"size": 2, "sequence_length": 4}, "model": {"family": "gpt", "size": "tiny", "layers": 4}}
    hardware = {"profile": "x", "gpus": 2}
    cut = Scenario.model_validate({"name": "cut", **changes, "parallelism": {"pp": section}, "hardware": hardware})
    known = {"reference": HostRecord(time_s=1e-3)}
    monkeypatch.setattr("calibrate.host.costs.measure_host", lambda *_: known)
    asked: list[tuple[str, Any, Any]] = []

    def keys(trace: Any, precision: str, device: str, known: Any, *_: Any) -> dict[str, HostRecord]:
        asked.append(("keys", trace.workload["part"]["blocks"][1], len(trace.parameters)))
        return {f"forward {len(asked)}": HostRecord(time_s=1e-6)}

    def lists(trace: Any, device: str, known: Any) -> dict[str, HostRecord]:
        asked.append(("lists", None, len(trace.parameters)))
        return {f"zero_grad {len(asked)}": HostRecord(time_s=1e-6)}

    monkeypatch.setattr("calibrate.host.costs.measure_host_keys", keys)
    monkeypatch.setattr("calibrate.host.costs.measure_host_lists", lists)
    timed = counted(monkeypatch)
    profile = session.calibrate(tmp_path / "p.json", "cpu", [cut], budget_s=0, progress=False)
    wanted = {item.key for each in rank_programs(cut) for item in program_jobs(each.program, cut.matmul_tf32)}
    assert wanted <= set(profile.kernels)
    assert any(key.startswith("aten.div_.Tensor") for key in wanted)  # of the gradients
    assert len([key for key in timed if key in wanted]) == len(wanted)
    blocks = [count for kind, count, _ in asked if kind == "keys"]
    assert (len(asked), blocks) == (5, [1, 1, 1])  # the two parts in the middle are alike
    sizes = [count for _, _, count in asked]
    assert sizes[3:] == [sizes[0] + sizes[1], 2 * sizes[2]]  # the first rank has the first part and the last
    assert set(profile.host) == {"reference", *(f"forward {i}" for i in (1, 2, 3)), "zero_grad 4", "zero_grad 5"}


def test_without_budget_there_is_no_grid(tmp_path: Path) -> None:
    profile = session.calibrate(tmp_path / "p.json", "cpu", [scenario()], progress=False, budget_s=0)
    assert {record.origin for record in profile.kernels.values()} == {"scenario"}
    assert set(profile.provenance["stages_s"]) == {"launch", "host"}


def test_what_does_not_fit_into_the_budget_is_left_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.json"
    with monkeypatch.context() as patch:
        timed = counted(patch)
        profile = session.calibrate(path, "cpu", budget_s=12, clock=lambda: float(len(timed)))  # each takes a second
    assert len(profile.kernels) == 3
    resume = (
        f"3 grid keys were left out for time. Go on with: perfmodel calibrate --device cpu --output {path} --resume"
    )
    assert resume in capsys.readouterr().err
    assert list(session.calibrate(path, "cpu", resume=True, progress=False).kernels) == KEYS


def test_only_repeats_what_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = counted(monkeypatch)
    session.calibrate(path, "cpu", only=[KEYS[2]], progress=False)
    assert [key for key in timed if key in KEYS] == [KEYS[2]]
    with refused("--only", repr(KEYS[2] + "x"), repr(KEYS[2])):
        session.calibrate(path, "cpu", only=[KEYS[2] + "x"], progress=False)


def test_only_measures_a_class_of_the_grid(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Known to the profile or not, and with the sentinels, which tell this run's machine; other curves stay."""
    sums = [(op("sum.default", t(f"float32[{n}]")), False) for n in (64, 4096, 2**16, 2**18, 2**20)]
    before = load_profile(path)
    monkeypatch.setattr(session, "grid_classes", lambda device: {"sums": sums, "others": [(GRID[0], False)]})
    timed = counted(monkeypatch)
    after = session.calibrate(path, "cpu", only=["sums"])
    new = {kernel_key(operation) for operation, _ in sums}
    assert set(timed) & (new | set(KEYS)) == new
    assert after.kernels.keys() - before.kernels.keys() == new
    assert after.curves.keys() - before.curves.keys() == {"full_reduction"}
    assert after.curves["full_reduction"].ranges == {"rows": (1, 1), "length": (64, 2**20)}
    assert {name: after.curves[name] for name in before.curves} == before.curves
    facts = after.provenance["grid_classes"]["sums"]
    assert set(facts) == {"measured_at", "sentinels_s"}
    assert set(facts["sentinels_s"]) == {"gemm_fp32", "add"}
    assert after.provenance["sentinels_s"] == before.provenance["sentinels_s"]
    assert load_profile(path) == after
    assert set(draft.Draft.load(path).samples) >= new
    assert "sums: 5 kernel keys" in capsys.readouterr().err


def raising(error: Exception | None) -> Callable[[], None]:
    def call() -> None:
        if error is not None:
            raise error

    return call


def test_failures_are_recorded_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors: dict[str, Exception] = {
        KEYS[0]: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        KEYS[1]: RuntimeError('"mm" not implemented for this\nmore'),
        KEYS[2]: RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
    }
    monkeypatch.setattr(Bench, "make", lambda self, wanted: raising(errors.get(wanted.key)))
    profile = session.calibrate(tmp_path / "p.json", "cpu")
    assert {key: record.error for key, record in profile.kernels.items() if record.error} == {
        KEYS[0]: "out-of-memory",
        KEYS[1]: '"mm" not implemented for this',
        KEYS[2]: "out-of-memory",
    }
    assert all(profile.kernels[key].time_s is None for key in KEYS[:3])
    assert all(profile.kernels[key].time_s is not None for key in KEYS[3:])
    report = capsys.readouterr().err
    assert "ran out of memory: 2" in report
    assert f'{KEYS[1]}: "mm" not implemented for this' in report


def test_an_operator_this_torch_lacks_is_recorded() -> None:
    record, samples = Bench("cpu", CpuStopwatch()).time(job(MISSING_OPERATOR, "grid"))
    assert samples is None
    assert record.error is not None
    assert "must exist in torch" in record.error


def test_unstable_keys_come_with_the_command_that_repeats_them() -> None:
    record = KernelRecord(time_s=1e-6, spread=0.5, samples=5, origin="grid")
    stable = KernelRecord(time_s=1e-6, spread=0.01, samples=5, origin="grid")
    device = machine.device_section("cpu")
    kept = draft.Draft(Path("p.json"), Profile(name="p", device=device), kernels={"a(b, c)": record, "d": stable})
    assert kept.unstable() == ("a(b, c)",)
    assert closing_warnings(kept, []) == [
        "unstable: 1",
        "  perfmodel calibrate --device cpu --output p.json --only 'a(b, c)'",
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"device": "tpu"}, "--device must be cuda or cpu"),
        ({"output": "p.yaml"}, "must end in .json"),
        ({"only": ["x"]}, "must exist for --only"),
    ],
)
def test_bad_requests(tmp_path: Path, arguments: dict[str, Any], sentence: str) -> None:
    request = {"output": "p.json", "device": "cpu"} | arguments
    with pytest.raises(PerfModelError, match=sentence):
        session.calibrate(tmp_path / request.pop("output"), progress=False, **request)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["p.json", "p.samples.json.gz", "p.host-pieces.json"])
def test_nothing_is_measured_into_what_is_no_file_of_a_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    timed = counted(monkeypatch)
    os.mkfifo(tmp_path / name)
    with pytest.raises(PerfModelError, match=rf"{name}: must be a regular file to be written \(got a pipe\)"):
        session.calibrate(tmp_path / "p.json", "cpu", progress=False)
    os.unlink(tmp_path / name)
    (tmp_path / name).write_text("notes")
    with pytest.raises(PerfModelError, match=rf"{name}: must be .* \(got a file that begins with 'notes'\)"):
        session.calibrate(tmp_path / "p.json", "cpu", progress=False)
    assert ((tmp_path / name).read_text(), os.listdir(tmp_path), timed) == ("notes", [name], [])


class Later(datetime):
    """A clock an hour after that of the calibration before."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + timedelta(hours=1)


@pytest.mark.parametrize("name", ["p.samples.json.gz", "p.host-pieces.json"])
def test_nothing_is_measured_over_the_files_of_another_profile(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pieces = HostPieces.kept_in(tmp_path / "p.host-pieces.json", "another")
    pieces.measure("modules", lambda: None)
    for each in {"p.json", "p.samples.json.gz", "p.host-pieces.json"} - {name}:
        (tmp_path / each).unlink()
    before = (tmp_path / name).read_bytes()
    timed = counted(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr("calibrate.opening.datetime", Later)
        with pytest.raises(PerfModelError, match=rf"{name}: must belong to the profile .*\. Move it away, or choose"):
            session.calibrate(path, "cpu", progress=False)
    assert ((tmp_path / name).read_bytes(), os.listdir(tmp_path), timed) == (before, [name], [])


def test_a_calibration_on_a_base_that_was_stopped_in_its_host_stage_goes_on(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perfmodel.hardware.profile.CATALOG", tmp_path)
    path = tmp_path / "second.json"

    def stop(device: str, show: object, pieces: HostPieces, is_late: object) -> None:
        pieces.measure("modules", lambda: None)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("calibrate.host.costs.measure_host", stop)
        session.calibrate(path, "cpu", base="p", progress=False)
    found: list[list[str]] = []
    monkeypatch.setattr(
        "calibrate.host.costs.measure_host", lambda *arguments: found.append(arguments[2].finished) or {}
    )
    session.calibrate(path, "cpu", resume=True, progress=False)
    assert found == [["modules"]]


def test_an_existing_profile_is_not_measured_over(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(PerfModelError, match=r"exists already\. Go on with --resume"):
        session.calibrate(path, "cpu", progress=False)
    assert path.read_bytes() == before


def test_through_a_link_all_files_lie_beside_its_target(tmp_path: Path) -> None:
    links, real = tmp_path / "links", tmp_path / "real"
    links.mkdir()
    real.mkdir()
    link = links / "p.json"
    link.symlink_to(real / "p.json")
    session.calibrate(link, "cpu", budget_s=0.0, progress=False)
    session.calibrate(link, "cpu", resume=True, progress=False)
    assert os.listdir(links) == ["p.json"]
    assert link.is_symlink()
    assert sorted(os.listdir(real)) == ["p.json", "p.samples.json.gz"]


def test_a_stage_that_is_done_is_repeated_where_it_is_named(path: Path) -> None:
    known = load_profile(path)
    stages_s = known.provenance["stages_s"] | {"power": 99.0}
    save_profile(known.model_copy(update={"provenance": known.provenance | {"stages_s": stages_s}}), path)
    assert session.calibrate(path, "cpu", resume=True, progress=False).provenance["stages_s"]["power"] == 99.0
    again = session.calibrate(path, "cpu", only=["power", KEYS[0]], progress=False)
    assert again.provenance["stages_s"]["power"] < 99.0
    for stage in ("waiting", "cache"):
        with refused(f"--only {stage}", "--device cuda", "cpu"):
            session.calibrate(path, "cpu", only=[stage], progress=False)


def test_on_a_base_only_the_host_is_measured(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfmodel.hardware.profile.CATALOG", tmp_path)
    base = load_profile(path)
    monkeypatch.setattr(machine, "cpu_name", lambda: "another")
    monkeypatch.setattr("calibrate.host.costs.measure_host", lambda *_: {"call": HostRecord(time_s=2e-6)})
    timed = counted(monkeypatch)
    path = tmp_path / "second.json"
    second = session.calibrate(path, "cpu", base="p", progress=False)
    assert timed == []
    assert second.host == {"call": HostRecord(time_s=2e-6)}
    assert (second.provenance["cpu"], list(second.provenance["stages_s"])) == ("another", ["host"])
    assert load_profile(path) == second
    assert (second.kernels, second.curves, second.power) == (base.kernels, base.curves, base.power)
    assert set(json.loads(path.read_text())) == {"version", "name", "base", "provenance", "host"}
    with pytest.raises(PerfModelError, match="must be new for --base"):
        session.calibrate(path, "cpu", base="p", resume=True, progress=False)
    monkeypatch.setattr(machine, "machine_facts", lambda device: base.provenance | {"torch": "1.0"})
    with pytest.raises(PerfModelError, match="--base must be a profile of this torch"):
        session.calibrate(tmp_path / "third.json", "cpu", base="p", progress=False)


def test_another_machine_may_not_add_to_a_profile(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cpu_name", lambda: "another")
    with pytest.raises(PerfModelError, match="must have been measured with this cpu"):
        session.calibrate(path, "cpu", resume=True, progress=False)


def test_a_broken_samples_file_is_named(path: Path) -> None:
    path.with_name("p.samples.json.gz").write_bytes(b"nothing")
    with pytest.raises(PerfModelError, match="must be whole JSON"):
        session.calibrate(path, "cpu", resume=True, progress=False)


def test_program_jobs_are_distinct_device_operators() -> None:
    from perfmodel.trace.store import get_trace

    jobs = program_jobs(single_device_program(get_trace(scenario())), matmul_tf32=True)
    assert len({item.key for item in jobs}) == len(jobs)
    assert all(item.operation.runs_on_device for item in jobs)
    products = [item for item in jobs if item.operation.base_name in ("mm", "bmm")]
    assert products
    assert all(item.tf32 and item.key.endswith(" tf32") for item in products)
    assert not any(item.tf32 for item in jobs if item not in products)


def test_missing_and_chosen() -> None:
    jobs = [job(operation, "grid") for operation in (*GRID, GRID[0])]
    keys = [item.key for item in jobs]
    assert [item.key for item in missing(jobs, [keys[1]])] == [keys[0], *keys[2:6]]
    assert chosen(jobs, [jobs[3].key]) == [jobs[3]]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "out-of-memory"),
        (torch.OutOfMemoryError("CUDA out of memory."), "out-of-memory"),
        (ValueError(""), "ValueError"),
        (RuntimeError("first\nsecond"), "first"),
    ],
)
def test_reasons(error: Exception, reason: str) -> None:
    assert failure(error) == reason


class Clock:
    """A clock that only measurements move: a second for a kernel, two for a piece of the host's costs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        time_kernel = Bench.time

        def kernel(bench: Bench, wanted: Job) -> tuple[KernelRecord, Samples | None]:
            self.now_s += 1.0
            return time_kernel(bench, wanted)

        def pieces(device: str, reference: Any, kept: Any) -> list[tuple[str, str, Callable[[], None]]]:
            def measure(number: int) -> None:
                self.now_s += 2.0
                kept.runs_s.append(reference.reference_s)
                kept.records[f"piece {number}"] = HostRecord(time_s=1.0)

            return [(f"piece {number}", "piece", partial(measure, number)) for number in range(HOST_PIECES)]

        monkeypatch.setattr(Bench, "time", kernel)
        monkeypatch.setattr(costs, "measure_host", MEASURE_HOST)
        monkeypatch.setattr(costs, "_pieces", pieces)

    def __call__(self) -> float:
        return self.now_s


HOST_PIECES = 10
MEASURE_HOST = costs.measure_host


@pytest.mark.parametrize("budget_s", [1.0, 6.0, 12.0, 20.0, 100.0])
def test_a_budget_is_kept_and_what_is_left_out_comes_with_the_command_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], budget_s: float
) -> None:
    path = tmp_path / "p.json"
    clock = Clock(monkeypatch)
    profile = session.calibrate(path, "cpu", budget_s=budget_s, progress=False, clock=clock)
    assert clock.now_s <= budget_s + session.TOLERANCE_S
    left_out = [line for line in capsys.readouterr().err.splitlines() if "left out for time" in line]
    assert bool(left_out) == (budget_s < 100)
    assert (len(profile.kernels) < len(KEYS), "host" not in profile.provenance["stages_s"]) == (
        budget_s < 20,
        budget_s < 100,
    )
    for line in left_out[:1]:
        _, _, command = line.partition("Go on with: perfmodel ")
        assert CliRunner().invoke(cli.main, shlex.split(command)).exit_code == 0
    whole = load_profile(path)
    assert set(whole.provenance["stages_s"]) == {"launch", "grid", "host", "power"}
    assert list(whole.kernels) == KEYS
    assert set(whole.host) == {"reference", *(f"piece {number}" for number in range(HOST_PIECES))}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["p.json", "p.samples.json.gz"]


def test_without_a_budget_only_the_grid_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "BUDGET_S", {"cpu": 8.0})
    clock = Clock(monkeypatch)
    profile = session.calibrate(tmp_path / "p.json", "cpu", progress=False, clock=clock)
    assert clock.now_s > 8.0 + 2.0 * HOST_PIECES / 2
    assert "grid" not in profile.provenance["stages_s"]
    assert "host" in profile.provenance["stages_s"]


def test_killed_in_its_host_stage_it_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "p.json"
    clock = Clock(monkeypatch)
    finish = HostPieces.measure

    def finish_and_stop(self: HostPieces, name: str, work: Callable[[], None]) -> None:
        is_new = name not in self.finished
        finish(self, name, work)
        if is_new:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HostPieces, "measure", finish_and_stop)
        for _ in range(HOST_PIECES):
            with pytest.raises(KeyboardInterrupt):
                session.calibrate(path, "cpu", resume=path.exists(), progress=False)
            load_profile(path)
    before_s = clock.now_s
    whole = session.calibrate(path, "cpu", resume=True, progress=False)
    assert clock.now_s - before_s < 2.0 * HOST_PIECES
    assert len(whole.host) == 1 + HOST_PIECES


def test_warnings_are_shown_in_quiet_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(draft, "UNSTABLE_SPREAD", {"cpu": -1.0})
    monkeypatch.setattr("calibrate.kernels.drift.DRIFT", {"cpu": -1.0})
    session.calibrate(tmp_path / "p.json", "cpu", progress=False)
    shown = capsys.readouterr()
    assert "the machine drifted meanwhile: add by" in shown.err
    assert f"unstable: {len(KEYS)}" in shown.err
    assert "grid keys" not in shown.err
    assert shown.out == ""
