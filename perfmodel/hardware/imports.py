"""Measurements of other tools, as records of a profile: nccl-tests for collectives, nvbandwidth for copies.

Both print microseconds, or GB/s of 1e9 bytes; what nccl-tests calls size is what
:func:`~perfmodel.hardware.interconnect.collective_key` counts. Two things that they mean by their numbers: nccl-tests
repeats a collective back to back, so ranks do not wait for one another; its sendrecv has every rank send and receive at
once, around a ring. nvbandwidth uses pinned memory and, where several devices were measured, the records hold the
median device, with what devices differ by as spread.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perfmodel.errors import PerfModelError
from perfmodel.hardware.interconnect import (
    CollectiveRecord,
    TransferRecord,
    busbw_factor,
    collective_key,
    transfer_key,
)
from perfmodel.reading import read_foreign_json, read_text
from perfmodel.units import GB, MIB, US

KINDS = {
    "all_reduce_perf": "all_reduce",
    "all_gather_perf": "all_gather",
    "reduce_scatter_perf": "reduce_scatter",
    "broadcast_perf": "broadcast",
    "alltoall_perf": "all_to_all",
    "sendrecv_perf": "send_recv",
}
DTYPES = {
    **{name: name for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64", "bfloat16")},
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "f8e4m3": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
NCCL_REMEDY = "Save what one of nccl-tests' programs prints, or writes with -J."
NVBANDWIDTH_REMEDY = "Save what `nvbandwidth -j` prints."
BUFFER_BYTES = 512 * MIB  # of nvbandwidth, unless told otherwise
LEAST_US, MOST_US = 1e-3, 1e12  # of a collective
LEAST_GB_PER_S, MOST_GB_PER_S = 1e-6, 1e6  # of a copy
# by what a record's key begins with: test cases, of which the first that passed counts
TRANSFERS = {
    "h2d pinned": ("host_to_device_memcpy_ce",),
    "d2h pinned": ("device_to_host_memcpy_ce",),
    "p2p": ("device_to_device_memcpy_write_ce", "device_to_device_memcpy_read_ce"),
}
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)  # of JSON that is laid out otherwise
BOTH_WAYS = ("host_to_device_bidirectional_memcpy_ce", "device_to_host_bidirectional_memcpy_ce")


class _Row(NamedTuple):
    """One size of one test, out of place. place: in the file. spread: relative, where iterations were told apart."""

    place: str
    program: str
    ranks: int
    dtype: str
    size_bytes: int
    time_us: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    wrong: float
    spread: float
    samples: int


def import_nccl_tests(path: Path) -> dict[str, CollectiveRecord]:
    """Collectives of the output of nccl-tests: printed tables, of several programs too, or one file of ``-J``.

    Times are those out of place. A size that was measured several times counts with its median; one whose results were
    wrong is recorded as such. The name of the test is taken from the output or else from the name of the file, the
    number of ranks from the devices listed.

    Raises
    ------
    PerfModelError
        If the file cannot be read, holds no results out of place, or contradicts itself.
    """
    text = read_text(path, "output of nccl-tests", NCCL_REMEDY)
    rows = _json_rows(path) if text.lstrip().startswith("{") else list(_Table(path).rows(text.splitlines()))
    if not rows:
        raise PerfModelError(f"{path}: output of nccl-tests must hold results out of place (got none). {NCCL_REMEDY}")
    found: dict[str, list[_Row]] = {}
    for row in rows:
        found.setdefault(_checked_key(path, row), []).append(row)
    return {key: _collective(same) for key, same in found.items()}


def _collective(rows: Sequence[_Row]) -> CollectiveRecord:
    samples = sum(row.samples for row in rows)
    wrong = sum(row.wrong for row in rows if row.wrong > 0)
    if wrong:
        return CollectiveRecord(samples=samples, error=f"{wrong:g} wrong values")
    times_s = [row.time_us * US for row in rows]
    return CollectiveRecord(time_s=statistics.median(times_s), spread=_spread(times_s, rows[0].spread), samples=samples)


def _spread(values: Sequence[float], alone: float = 0.0) -> float:
    return statistics.stdev(values) / statistics.median(values) if len(values) > 1 else alone


def _checked_key(path: Path, row: _Row) -> str:
    """Refuses rows whose numbers do not belong together, as when ranks were cut from the list."""
    where = f"{path}: {row.place}: {row.program} of {row.size_bytes} bytes"
    kind = KINDS.get(row.program)
    if kind is None:
        raise PerfModelError(f"{path}: the test must be one of {', '.join(KINDS)} (got {row.program!r}). {NCCL_REMEDY}")
    if row.ranks < 2:
        raise PerfModelError(f"{where}: must list the devices of at least 2 ranks (got {row.ranks}). {NCCL_REMEDY}")
    if row.dtype not in DTYPES:
        raise PerfModelError(
            f"{where}: its type must be one of {', '.join(DTYPES)} (got {row.dtype!r:.40}). {NCCL_REMEDY}"
        )
    if not LEAST_US <= row.time_us <= MOST_US:
        raise PerfModelError(
            f"{where}: its time must be from {LEAST_US:g} to {MOST_US:g} us (got {row.time_us:g}). {NCCL_REMEDY}"
        )
    if not 0 <= row.spread < math.inf:
        raise PerfModelError(f"{where}: its spread must be at least 0 % (got {100 * row.spread:g}). {NCCL_REMEDY}")
    factor = busbw_factor(kind, row.ranks)
    if abs(row.busbw_gb_per_s - factor * row.algbw_gb_per_s) > 0.01 * row.busbw_gb_per_s + 0.02:
        raise PerfModelError(
            f"{where}: busbw must be {factor:.4g} times algbw with {row.ranks} ranks"
            f" (got {row.busbw_gb_per_s:g} and {row.algbw_gb_per_s:g}). Keep all lines that list devices."
        )
    return collective_key(kind, row.ranks, DTYPES[row.dtype], row.size_bytes)


class _Table:
    """Reads printed tables line by line; what a comment says holds for the rows after it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._program = _program_in(path.name)
        self._ranks: set[int] = set()
        self._groups: set[int] = set()
        self._columns: list[str] = []
        self._iterations = 1

    def rows(self, lines: Iterable[str]) -> Iterable[_Row]:
        for number, line in enumerate(lines, start=1):
            self._program = _program_in(line) or self._program
            cells = line.split()
            if line.startswith("#"):
                self._comment(line, cells[1:])
            elif self._columns and cells and cells[0].isdigit() and int(cells[0]) > 0:
                row = self._row(f"line {number}", line, cells)
                if row is not None:
                    yield row

    def _comment(self, line: str, words: list[str]) -> None:
        rank = re.match(r"#\s*Rank\s+(\d+)\s+(?:Group\s+(\d+)\s)?", line)
        if rank:
            self._ranks.add(int(rank[1]))
            self._groups.add(int(rank[2] or 0))
        elif "nThread" in words:
            self._ranks, self._groups, self._columns = set(), set(), []
            found = re.search(r"warmup iters:\s*\d+\s+iters:\s*(\d+)", line)
            self._iterations = int(found[1]) if found else 1
        elif "size" in words and "busbw" in words:
            if "time" not in words:
                raise PerfModelError(
                    f"{self._path}: times must be those of the device (got cputime). Run nccl-tests without -C."
                )
            self._columns = words

    def _row(self, place: str, line: str, cells: list[str]) -> _Row | None:
        columns = self._columns
        if columns[-1] == "timestamp":
            columns, cells = columns[:-1], cells[:-2]
        if len(columns) - len(cells) > 2:  # only in place; redop and root may be blank
            return None
        try:
            value = {name: cells[columns.index(name) - len(columns)] for name in columns if name not in columns[:3]}
            wrong = value.get("#wrong", "N/A")
            return _Row(
                place=place,
                program=self._program or "",
                ranks=len(self._ranks) // max(len(self._groups), 1),
                dtype=cells[columns.index("type")],
                size_bytes=int(cells[0]),
                time_us=float(value["time"]),
                algbw_gb_per_s=float(value["algbw"]),
                busbw_gb_per_s=float(value["busbw"]),
                wrong=0.0 if wrong == "N/A" else float(wrong),
                spread=float(value.get("i_cv%", 0)) / 100,
                samples=self._iterations,
            )
        except (ValueError, IndexError, KeyError) as error:
            raise PerfModelError(
                f"{self._path}: {place}: a row of the table must have numbers under {' '.join(columns)}"
                f" (got {line.strip()!r:.80}). {NCCL_REMEDY}"
            ) from error


def _program_in(text: str) -> str | None:
    """The last test that is named, as in a command or a path."""
    named = re.findall(r"[a-z_]+_perf(?![a-z_])", text)
    return named[-1] if named else None


def _json_rows(path: Path) -> list[_Row]:
    data = read_foreign_json(path, "output of nccl-tests", NCCL_REMEDY)
    try:
        config = data["config"]
        program = _program_in(" ".join(data.get("args", []))) or _program_in(path.name) or ""
        ranks = _ranks_of(config.get("devices", data.get("devices", [])), config["nthreads"] * config["ngpus"])
        results = {f"results[{number}]": each for number, each in enumerate(data["results"])}
        return [
            _json_row(place, each, program, ranks, int(config.get("iterations", 1)))
            for place, each in results.items()
            if each.get("out_of_place") and each["size"] > 0
        ]
    except MALFORMED as error:
        raise PerfModelError(
            f"{path}: output of nccl-tests must have config, devices and results as -J writes them"
            f" ({type(error).__name__}: {error}). {NCCL_REMEDY}"
        ) from error


def _ranks_of(devices: Sequence[Any], a_process: int) -> int:
    """Ranks of a group; each process may list all of its ranks, or only its first."""
    ranks = {int(each["rank"]) for each in devices}
    groups = {int(each.get("group", 0)) for each in devices}
    if not ranks:
        return 0
    whole = len(ranks) if any(rank % a_process for rank in ranks) else max(ranks) + a_process
    return whole // len(groups)


def _json_row(place: str, result: dict[str, Any], program: str, ranks: int, iterations: int) -> _Row:
    values, apart = result["out_of_place"], result.get("out_of_place_per_iter") or {}
    if "cpu_time" in values:
        raise ValueError("times must be those of the device, without -C")
    return _Row(
        place=place,
        program=program,
        ranks=ranks,
        dtype=str(result["type"]),
        size_bytes=int(result["size"]),
        time_us=float(values["time"]),
        algbw_gb_per_s=float(values["alg_bw"]),
        busbw_gb_per_s=float(values["bus_bw"]),
        wrong=float(values.get("nwrong") or 0),
        spread=float(apart.get("cv_pct", 0)) / 100,
        samples=int(result.get("actual_iterations", iterations)),
    )


def is_nvbandwidth(path: Path) -> bool:
    """Whether a file looks like output of nvbandwidth.

    Raises
    ------
    PerfModelError
        If it cannot be read.
    """
    return '"nvbandwidth"' in read_text(path, "output of nccl-tests or nvbandwidth", "Save what either of them prints.")


def import_nvbandwidth(path: Path, buffer_bytes: int = BUFFER_BYTES) -> dict[str, TransferRecord]:
    """Copies of the JSON output of nvbandwidth: seconds = bytes of its buffer / median bandwidth of the devices.

    Host to device and back, both at once (as long as the slower of the two takes), and between devices (writing, or
    else reading), all by copy engines. Test cases that were waived are left out; one that failed is recorded as such.

    Parameters
    ----------
    path : Path
    buffer_bytes : int
        What its ``-b`` said, unless the file does.

    Raises
    ------
    PerfModelError
        If the file cannot be read, is not of nvbandwidth, or holds none of these copies.
    """
    data = read_foreign_json(path, "output of nvbandwidth", NVBANDWIDTH_REMEDY)
    try:
        report = data["nvbandwidth"]
        size_bytes = int(report.get("bufferSize", buffer_bytes / MIB) * MIB)
        cases = {str(each["name"]): _case(each) for each in report["testcases"]}
    except MALFORMED as error:
        raise PerfModelError(
            f"{path}: output of nvbandwidth must have nvbandwidth.testcases, each with name, status and"
            f" bandwidth_matrix ({type(error).__name__}: {error}). {NVBANDWIDTH_REMEDY}"
        ) from error
    if size_bytes < 1:
        raise PerfModelError(f"{path}: bufferSize must be above 0 MiB (got {size_bytes / MIB:g}). {NVBANDWIDTH_REMEDY}")
    found = {
        transfer_key(name, size_bytes): _transfer([cases.get(each) for each in names], size_bytes)
        for name, names in TRANSFERS.items()
    }
    slower = sorted((each for each in map(cases.get, BOTH_WAYS) if each), key=_bandwidth)
    found[transfer_key("both pinned", size_bytes)] = _transfer(slower, size_bytes)
    records = {key: record for key, record in found.items() if record is not None}
    if not records:
        known = ", ".join((*(name for names in TRANSFERS.values() for name in names), *BOTH_WAYS))
        raise PerfModelError(
            f"{path}: output of nvbandwidth must hold one of {known} (got {', '.join(cases) or 'no test case'})."
            f" {NVBANDWIDTH_REMEDY}"
        )
    return records


class _Case(NamedTuple):
    """gb_per_s: of each pair that was measured. error: why there is none."""

    gb_per_s: tuple[float, ...]
    error: str | None


def _case(testcase: dict[str, Any]) -> _Case | None:
    """None where it did not run."""
    status = testcase["status"]
    if status == "Passed":
        values = [float(cell) for row in testcase["bandwidth_matrix"] for cell in row if cell != "N/A"]
        values = [value for value in values if value != 0]
        if not values or not all(LEAST_GB_PER_S <= value <= MOST_GB_PER_S for value in values):
            known = f"bandwidths from {LEAST_GB_PER_S:g} to {MOST_GB_PER_S:g} GB/s"
            raise ValueError(f"{testcase['name']} must have {known}, got {values}")
        return _Case(tuple(values), None)
    return _Case((), str(testcase.get("error", status))) if status == "Error" else None


def _bandwidth(case: _Case) -> float:
    return statistics.median(case.gb_per_s) if case.gb_per_s else math.inf


def _transfer(cases: Sequence[_Case | None], size_bytes: int) -> TransferRecord | None:
    """Of the first that passed, or else of the first that failed."""
    ran = [each for each in cases if each is not None]
    passed = next((each for each in ran if each.gb_per_s), None)
    if passed is not None:
        return TransferRecord(
            time_s=size_bytes / (_bandwidth(passed) * GB),
            spread=_spread(passed.gb_per_s),
            samples=len(passed.gb_per_s),
        )
    return TransferRecord(error=ran[0].error) if ran else None
