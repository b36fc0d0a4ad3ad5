"""Output of nccl-tests, printed or written with ``-J``, row by row as it stands; :mod:`perfmodel.hardware.imports`
judges it.

Each line is read in time proportional to its length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perfmodel.errors import PerfModelError
from perfmodel.files.reading import read_foreign_json

WHAT = "output of nccl-tests"
REMEDY = "Save what one of nccl-tests' programs prints, or writes with -J."
MALFORMED = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)  # of JSON that is laid out otherwise
UNITS_US = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}
LONGEST_NUMBER = 40  # digits
_PROGRAM = re.compile(r"(?<![a-z_])[a-z_]+_perf(?![a-z_])")
_RANK = re.compile(r"#\s*Rank\s+(\d{1,9})\s+(?:Group\s+(\d{1,9})\s)?(?:.*?\son\s+(\S+)\s+device\s)?")
_UNITS = re.compile(r"#\s*\((\w+)\)\s+\(\w+\)\s.*?\((\w+)\)\s+\(([\w/]+)\)")
_ITERATIONS = re.compile(r"warmup iters:\s*\d{1,9}\s+iters:\s*(\d{1,9})(?!\d)")


class NcclTestsRow(NamedTuple):
    """One size of one test, out of place.

    Attributes
    ----------
    place : str
        Where it stands in the file.
    ranks, nodes : int
        Ranks and nodes of one group.
    spread : float
        Relative spread, if iterations were listed one by one.
    """

    place: str
    program: str
    ranks: int
    nodes: int
    dtype: str
    size_bytes: int
    time_us: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    wrong: float
    spread: float
    samples: int


def table_rows(path: Path, text: str) -> list[NcclTestsRow]:
    """Read printed tables, also of several programs.

    Raises
    ------
    PerfModelError
        If a row lacks numbers, times are not the device's, or units are not those of nccl-tests.
    """
    return list(_Table(path).rows(text.splitlines()))


class _Table:
    """Reads printed tables line by line; what a comment says holds for the rows after it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._program = program_in(path.name)
        self._begin()
        self._iterations = 1

    def _begin(self) -> None:
        self._ranks: set[int] = set()
        self._groups: dict[int, set[str]] = {}
        self._columns: list[str] = []
        self._unit_us = 1.0

    def rows(self, lines: Iterable[str]) -> Iterable[NcclTestsRow]:
        for number, line in enumerate(lines, start=1):
            self._program = program_in(line) or self._program
            cells = line.split()
            if line.startswith("#"):
                self._comment(number, line, cells[1:])
            elif self._columns and cells and re.fullmatch("[0-9]+", cells[0]) and cells[0].strip("0"):
                row = self._row(f"line {number}", line, cells)
                if row is not None:
                    yield row

    def _comment(self, number: int, line: str, words: list[str]) -> None:
        rank, units = _RANK.match(line), _UNITS.match(line)
        if rank:
            self._ranks.add(int(rank[1]))
            self._groups.setdefault(int(rank[2] or 0), set()).add(rank[3] or "")
        elif "nThread" in words:
            self._begin()
            found = _ITERATIONS.search(line)
            self._iterations = int(found[1]) if found else 1
        elif units:
            self._unit_us = self._checked_unit_us(number, *units.groups())
        elif "size" in words and "busbw" in words:
            if "time" not in words:
                raise PerfModelError(
                    f"{self._path}: times must be those of the device (got cputime). Run nccl-tests without -C."
                )
            self._columns = words

    def _checked_unit_us(self, number: int, size: str, time: str, rate: str) -> float:
        if size != "B" or time not in UNITS_US or rate != "GB/s":
            raise PerfModelError(
                f"{self._path}: line {number}: units must be B, one of {', '.join(UNITS_US)}, and GB/s (got "
                f"{size:.20}, {time:.20} and {rate:.20}). {REMEDY}"
            )
        return UNITS_US[time]

    def _row(self, place: str, line: str, cells: list[str]) -> NcclTestsRow | None:
        columns = self._columns
        if columns[-1] == "timestamp":
            columns, cells = columns[:-1], cells[:-2]
        if len(columns) - len(cells) > 2:  # only in place; redop and root may be blank
            return None
        try:
            value = {name: cells[columns.index(name) - len(columns)] for name in columns if name not in columns[:3]}
            wrong = value.get("#wrong", "N/A")
            return NcclTestsRow(
                place=place,
                program=self._program or "",
                ranks=len(self._ranks) // max(len(self._groups), 1),
                nodes=max(map(len, self._groups.values()), default=1),
                dtype=cells[columns.index("type")],
                size_bytes=int(cells[0][: LONGEST_NUMBER + 1]),
                time_us=float(value["time"]) * self._unit_us,
                algbw_gb_per_s=float(value["algbw"]),
                busbw_gb_per_s=float(value["busbw"]),
                wrong=0.0 if wrong == "N/A" else float(wrong),
                spread=float(value.get("i_cv%", 0)) / 100,
                samples=self._iterations,
            )
        except (ValueError, IndexError, KeyError) as error:
            raise PerfModelError(
                f"{self._path}: {place}: a row of the table must have numbers under {' '.join(columns)}"
                f" (got {line.strip()!r:.80}). {REMEDY}"
            ) from error


def program_in(text: str) -> str | None:
    """The last test that is named, as in a command or a path.

    >>> program_in("srun ./build/all_reduce_perf -b 8")
    'all_reduce_perf'
    """
    named = _PROGRAM.findall(text)
    return named[-1] if named else None


def json_rows(path: Path) -> list[NcclTestsRow]:
    """Read one file of ``-J``.

    Raises
    ------
    PerfModelError
        If it cannot be read or is laid out otherwise.
    """
    data = read_foreign_json(path, WHAT, REMEDY)
    try:
        config = data["config"]
        program = program_in(" ".join(data.get("args", []))) or program_in(path.name) or ""
        devices = config.get("devices", data.get("devices", []))
        ranks = _ranks_of(devices, int(config["nthreads"]) * int(config["ngpus"]))
        results = {f"results[{number}]": each for number, each in enumerate(data["results"])}
        return [
            _json_row(place, each, program, (ranks, _nodes_of(devices)), int(config.get("iterations", 1)))
            for place, each in results.items()
            if each.get("out_of_place") and each["size"] > 0
        ]
    except MALFORMED as error:
        raise PerfModelError(
            f"{path}: {WHAT} must have config, devices and results as -J writes them"
            f" ({type(error).__name__}: {str(error)[:80]}). {REMEDY}"
        ) from error


def _ranks_of(devices: Sequence[Any], a_process: int) -> int:
    """Ranks of a group; each process may list all of its ranks, or only its first."""
    ranks = {int(each["rank"]) for each in devices}
    groups = {int(each.get("group", 0)) for each in devices}
    if not ranks:
        return 0
    whole = len(ranks) if any(rank % a_process for rank in ranks) else max(ranks) + a_process
    return whole // len(groups)


def _nodes_of(devices: Sequence[Any]) -> int:
    """Hosts of the group that has ranks on most; 1 where they have no names."""
    hosts: dict[int, set[str]] = {}
    for each in devices:
        hosts.setdefault(int(each.get("group", 0)), set()).add(str(each.get("hostname", "")))
    return max(map(len, hosts.values()), default=1)


def _json_row(
    place: str, result: dict[str, Any], program: str, members: tuple[int, int], iterations: int
) -> NcclTestsRow:
    values, apart = result["out_of_place"], result.get("out_of_place_per_iter") or {}
    if "cpu_time" in values:
        raise ValueError("times must be those of the device, without -C")
    return NcclTestsRow(
        place,
        program,
        *members,
        dtype=str(result["type"]),
        size_bytes=int(result["size"]),
        time_us=float(values["time"]),
        algbw_gb_per_s=float(values["alg_bw"]),
        busbw_gb_per_s=float(values["bus_bw"]),
        wrong=float(values.get("nwrong") or 0),
        spread=float(apart.get("cv_pct", 0)) / 100,
        samples=int(result.get("actual_iterations", iterations)),
    )
