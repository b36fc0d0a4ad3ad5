"""Output of nccl-tests and nvbandwidth: the files are laid out as these tools write, with numbers made up for the test."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from perfmodel.cost.piecewise import fit_curves
from perfmodel.errors import PerfModelError
from perfmodel.hardware.imports import import_nccl_tests, import_nvbandwidth
from perfmodel.hardware.interconnect import CollectiveRecord, TransferRecord
from perfmodel.units import MIB, US
from tests.places import TESTS

DATA = TESTS / "data" / "imports"
TEXT = (DATA / "nccl-tests.txt").read_text()
JSON = json.loads((DATA / "nccl-tests.json").read_text())
NVBANDWIDTH = json.loads((DATA / "nvbandwidth.json").read_text())


def written(folder: Path, content: str | dict[str, Any], name: str = "output") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def imported(path: Path) -> dict[str, CollectiveRecord]:
    return import_nccl_tests(path).collectives


def plain(records: dict[str, CollectiveRecord]) -> dict[str, Any]:
    return {key: record.time_s and round(record.time_s / US, 6) for key, record in records.items()}


def test_printed_tables_of_two_programs() -> None:
    found = imported(DATA / "nccl-tests.txt")
    assert plain(found) == {
        "all_reduce 4 float32 1024": 10.0,
        "all_reduce 4 float32 262144": 12.5,
        "all_reduce 4 float32 67108864": 320.0,
        "all_to_all 4 float32 1048576": 26.0,
        "all_to_all 4 float32 67108864": None,
    }
    assert found["all_reduce 4 float32 1024"].samples == 20
    twice = found["all_to_all 4 float32 1048576"]
    assert (twice.samples, twice.spread) == (40, pytest.approx(2**0.5 / 26))
    assert found["all_to_all 4 float32 67108864"].error == "3 wrong values"


def test_json_of_one_process_that_lists_only_its_first_rank() -> None:
    found = imported(DATA / "nccl-tests.json")
    assert plain(found) == {"all_gather 4 float16 1048576": 12.0, "all_gather 4 float16 67108864": 160.0}
    assert [record.spread for record in found.values()] == [0.0, 0.02]


@pytest.mark.parametrize(
    ("a_process", "listed", "ranks"), [(1, [0, 1, 2, 3], 4), (2, [0, 2], 4), (4, [0, 1, 2, 3], 4), (4, [0], 4)]
)
def test_ranks_of_processes(tmp_path: Path, a_process: int, listed: list[int], ranks: int) -> None:
    config = JSON["config"] | {"ngpus": a_process, "devices": [{"rank": rank, "group": 0} for rank in listed]}
    found = imported(written(tmp_path, JSON | {"config": config}))
    assert {key.split()[1] for key in found} == {str(ranks)}


def test_groups_that_ran_side_by_side_are_counted_apart(tmp_path: Path) -> None:
    lines = "".join(f"#  Rank {rank} Group {rank % 2} Pid 1 on node0 device {rank} [0] GPU\n" for rank in range(4, 8))
    split = TEXT.split("# nccl-tests version")[1].replace("Rank  0 Group  0", "Rank  0 Group  1")
    found = imported(written(tmp_path, split.replace("#\n#   ", lines + "#\n#   ", 1)))
    assert {key.split()[1] for key in found} == {"4"}


def test_the_name_may_be_in_the_command_or_the_file(tmp_path: Path) -> None:
    bare = "\n".join(line for line in TEXT.split("# Collective test concluded")[0].splitlines() if "_perf" not in line)
    assert "all_reduce 4 float32 1024" in imported(written(tmp_path, bare, "all_reduce_perf.log"))
    assert "all_reduce 4 float32 1024" in imported(written(tmp_path, f"$ ./build/all_reduce_perf -g 4\n{bare}"))
    with pytest.raises(PerfModelError, match=r"the test must be one of all_reduce_perf, .* \(got ''\)"):
        import_nccl_tests(written(tmp_path, bare))


def test_columns_may_be_more_or_fewer(tmp_path: Path) -> None:
    stamped = TEXT.replace("#wrong \n", "#wrong\n").replace("#wrong     time", "#wrong time")
    lines = []
    for line in stamped.split("# Collective test concluded")[0].splitlines():
        is_row = line.strip()[:1].isdigit()
        names = line.startswith("#       size")
        lines.append(line + (" 2026-01-01 00:00:00" if is_row else " timestamp" if names else ""))
    assert plain(imported(written(tmp_path, "\n".join(lines))))["all_reduce 4 float32 1024"] == 10.0
    blank = TEXT.replace("    none      -1", "")
    assert plain(imported(written(tmp_path, blank)))["all_to_all 4 float32 1048576"] == 26.0


def test_what_is_imported_is_fitted() -> None:
    curves = fit_curves(imported(DATA / "nccl-tests.txt"))
    assert {name: [each.points for each in segments] for name, segments in curves.items()} == {
        "all_reduce 4": [3],
        "all_to_all 4": [1],
    }


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "must hold results out of place"),
        ("\x00\xff", "must hold results out of place"),
        (TEXT.replace("all_reduce_perf", "hypercube_perf"), "got 'hypercube_perf'"),
        (TEXT.replace("#  Rank  3", "#  Lost  3"), "busbw must be 1.333 times algbw with 3 ranks"),
        (
            "\n".join(line for line in TEXT.splitlines() if "Rank" not in line),
            "must list the devices of at least 2 ranks",
        ),
        (
            TEXT.replace("  10.00 ", "   0.00 "),
            r"line 14: all_reduce_perf of 1024 bytes: its time must be from 0.001 to 1e\+12 us \(got 0\)",
        ),
        (
            TEXT.replace("   float ", "   floot ", 1),
            r"line 14: all_reduce_perf of 1024 bytes: its type must be one of int8, .*double.* \(got 'floot'\)",
        ),
        (TEXT.replace("  10.00 ", "     -- "), "line 14: a row of the table must have numbers under size count type"),
        (TEXT.replace("time", "cputime"), "Run nccl-tests without -C"),
        (TEXT.replace("(us)", "(days)"), r"line 13: units must be B, one of ns, us, ms, s, and GB/s \(got B, days"),
        (TEXT.replace("(B)", "(KB)"), "line 13: units must be B"),
        (TEXT.replace("(us)", "(ms)"), r"algbw must be its size over its time, 0.0001024 GB/s at 10000 us \(got 0.1\)"),
        (TEXT.replace(" 12.50 ", " 12500 "), "line 15: .*algbw must be its size over its time, 0.02097 GB/s"),
        (TEXT.replace(" 209.72 ", "    nan "), "line 16: .*algbw must be its size over its time"),
        (TEXT.replace(" 314.57 ", "    nan "), "line 16: .*busbw must be 1.5 times algbw"),
        (
            TEXT.replace("        1024  ", f"  {10**40} "),
            r"of 1e\+40 bytes: its size must be at most 1152921504606846976",
        ),
        (TEXT.replace("        1024  ", f"  {'9' * 5000} "), "its size must be at most"),
        (TEXT.replace("  320.00  209.72  314.57       0", "  320.00  209.72  314.57      -1"), "wrong values must be"),
        (TEXT.replace("node0 device  3", "node1 device  3", 1), r"on one number of nodes \(got 1 and 2\)"),
        ("{", "must be whole JSON"),
        ("[" * 100_000, "must hold results out of place"),
        ('{"a":' * 100_000, "more than 200 levels"),
        (JSON | {"config": JSON["config"] | {"nthreads": "x" * 100, "ngpus": 10**9}}, "must have config, devices"),
        (JSON | {"config": JSON["config"] | {"ngpus": 0}}, "must have config, devices"),
        (JSON | {"config": JSON["config"] | {"ngpus": 10**12}}, "of at least 2 ranks, and at most 1000000"),
        (JSON | {"results": [JSON["results"][0] | {"size": 10**40}]}, "its size must be at most"),
        (JSON | {"results": [JSON["results"][0] | {"actual_iterations": -1}]}, "samples must be greater than or equal"),
        ("{}", "must have config, devices and results"),
        (JSON | {"results": []}, "must hold results out of place"),
        (JSON | {"results": [JSON["results"][0] | {"out_of_place": {"cpu_time": 1.0}}]}, "without -C"),
        (JSON | {"results": [JSON["results"][0] | {"type": "quarter"}]}, r"results\[0\]: .* \(got 'quarter'\)"),
        (JSON | {"results": [JSON["results"][0] | {"size": math.inf}]}, "must have config, devices and results"),
        (
            JSON | {"results": [JSON["results"][0] | {"out_of_place_per_iter": {"cv_pct": -1}}]},
            r"its spread must be at least 0 % \(got -1\)",
        ),
        (JSON | {"results": [3]}, "must have config, devices and results"),
    ],
)
def test_bad_output_of_nccl_tests_is_one_sentence(tmp_path: Path, content: Any, sentence: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(PerfModelError, match=sentence) as error:
        import_nccl_tests(path)
    assert str(error.value).startswith(f"{path}: ")


def test_hosts_of_ranks_are_nodes(tmp_path: Path) -> None:
    assert import_nccl_tests(DATA / "nccl-tests.txt").nodes == 1
    two = TEXT.replace("node0 device  2", "node1 device  2").replace("node0 device  3", "node1 device  3")
    assert import_nccl_tests(written(tmp_path, two)).nodes == 2
    each_alone = "".join(
        f"#  Rank {rank} Group {rank // 4} Pid 1 on node{rank // 4} device {rank % 4} [0] GPU\n" for rank in range(4, 8)
    )
    split = TEXT.split("# nccl-tests version")[1].replace("#\n#   ", each_alone + "#\n#   ", 1)
    assert import_nccl_tests(written(tmp_path, split)).nodes == 1
    devices = [{"rank": rank, "group": 0, "hostname": f"node{rank // 2}"} for rank in range(4)]
    config = JSON["config"] | {"devices": devices}
    assert import_nccl_tests(written(tmp_path, JSON | {"config": config})).nodes == 2


def test_times_in_another_unit(tmp_path: Path) -> None:
    in_ms = TEXT.split("# Collective test concluded")[0].replace("(us)", "(ms)")
    for time in ("   10.00", "   12.50", "  320.00"):
        in_ms = in_ms.replace(f"{time}  ", f"{float(time) / 1000:8.6f}  ", 1)
    assert plain(imported(written(tmp_path, in_ms)))["all_reduce 4 float32 67108864"] == 320.0


@pytest.mark.parametrize("character", ["a", "_", "a ", "_perf", "1", "#", "# Rank 1 ", " ", "(B", " on ", "((a) "])
@pytest.mark.parametrize("beginning", ["", "#", "# Rank 1", "# (B) (elements) (us) ", "# nThread warmup iters: 1"])
def test_a_long_line_is_read_once(tmp_path: Path, beginning: str, character: str) -> None:
    """400 kB without end took 80 s when each letter began another search to the end of the line."""
    line = beginning + character * (400_000 // len(character))
    assert plain(imported(written(tmp_path, f"{TEXT}{line}\n")))["all_reduce 4 float32 1024"] == 10.0


def test_missing_files_are_one_sentence(tmp_path: Path) -> None:
    for read in (import_nccl_tests, import_nvbandwidth):
        with pytest.raises(PerfModelError, match="must be a readable file"):
            read(tmp_path / "none.json")


def test_copies_take_their_buffer_at_the_median_bandwidth() -> None:
    size = 512 * MIB
    found = import_nvbandwidth(DATA / "nvbandwidth.json")
    assert {key: record.time_s for key, record in found.items()} == {
        f"h2d pinned {size}": pytest.approx(size / 51e9),
        f"d2h pinned {size}": pytest.approx(size / 54e9),
        f"both pinned {size}": pytest.approx(size / 32e9),
        f"p2p {size}": pytest.approx(size / 390e9),
    }
    assert found[f"h2d pinned {size}"].spread == pytest.approx(2**0.5 / 51)
    assert found[f"h2d pinned {size}"].samples == 2


def test_the_buffer_is_what_the_file_or_the_caller_says(tmp_path: Path) -> None:
    assert f"p2p {64 * MIB}" in import_nvbandwidth(DATA / "nvbandwidth.json", 64 * MIB)
    assert f"p2p {128 * MIB}" in import_nvbandwidth(written(tmp_path, told(128)), 64 * MIB)


def told(buffer_mib: float) -> dict[str, Any]:
    return {"nvbandwidth": NVBANDWIDTH["nvbandwidth"] | {"bufferSize": buffer_mib}}


def cases(*found: Any) -> dict[str, Any]:
    return {"nvbandwidth": {"testcases": list(found)}}


def test_what_failed_is_recorded_and_what_was_waived_is_not(tmp_path: Path) -> None:
    report = cases(
        {"name": "host_to_device_memcpy_ce", "status": "Error", "error": "out of memory"},
        {"name": "device_to_host_memcpy_ce", "status": "Waived"},
    )
    found = import_nvbandwidth(written(tmp_path, report))
    assert found == {f"h2d pinned {512 * MIB}": TransferRecord(error="out of memory")}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[]", "must have nvbandwidth.testcases"),
        ({}, "must have nvbandwidth.testcases"),
        (cases(), "must hold one of host_to_device_memcpy_ce, .*no test case"),
        (cases({"name": "host_to_device_memcpy_ce", "status": "Passed"}), "bandwidth_matrix"),
        (cases({"name": "p", "status": "Passed", "bandwidth_matrix": [["-5"]]}), "bandwidths from 1e-06 to 1e.06 GB/s"),
        (cases({"name": "p", "status": "Passed", "bandwidth_matrix": [["1e-320"]]}), "bandwidths from 1e-06"),
        (cases({"name": "p", "status": "Passed", "bandwidth_matrix": [["nan"]]}), "bandwidths from 1e-06"),
        (told(-5), r"bufferSize must be above 0 and at most 1048576 MiB \(got -5\)"),
        (told(0), r"bufferSize must be above 0 and at most 1048576 MiB \(got 0\)"),
        (told(math.inf), "must have nvbandwidth.testcases"),
    ],
)
def test_bad_output_of_nvbandwidth_is_one_sentence(tmp_path: Path, content: Any, sentence: str) -> None:
    with pytest.raises(PerfModelError, match=sentence):
        import_nvbandwidth(written(tmp_path, content))
