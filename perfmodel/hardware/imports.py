"""Measurements of other tools, as records of a profile: nccl-tests for collectives, nvbandwidth for copies.

Both print microseconds, or GB/s of 1e9 bytes; what nccl-tests calls size is what
:func:`~perfmodel.hardware.interconnect.collective_key` counts. Two things that they mean by their numbers: nccl-tests
repeats a collective back to back, so ranks do not wait for one another; its sendrecv has every rank send and receive at
once, around a ring. nvbandwidth uses pinned memory and, where several devices were measured, the records hold the
median device, with what devices differ by as spread.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perfmodel.errors import PerfModelError, naming
from perfmodel.files.reading import read_foreign_json, read_text
from perfmodel.files.validation import validated
from perfmodel.hardware.interconnect import (
    CollectiveRecord,
    TransferRecord,
    busbw_factor,
    collective_key,
    transfer_key,
)
from perfmodel.hardware.nccl_output import MALFORMED, WHAT, NcclTestsRow, json_rows, table_rows
from perfmodel.hardware.nccl_output import REMEDY as NCCL_REMEDY
from perfmodel.hardware.quantities import MOST_BYTES
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
NVBANDWIDTH_REMEDY = "Save what `nvbandwidth -j` prints."
BUFFER_BYTES = 512 * MIB  # of nvbandwidth, unless told otherwise
MOST_RANKS = 10**6
MOST_BUFFER_BYTES = 2**20 * MIB
LEAST_US, MOST_US = 1e-3, 1e12  # of a collective
LEAST_GB_PER_S, MOST_GB_PER_S = 1e-6, 1e6  # of a copy
# by what a record's key begins with: test cases, of which the first that passed counts
TRANSFERS = {
    "h2d pinned": ("host_to_device_memcpy_ce",),
    "d2h pinned": ("device_to_host_memcpy_ce",),
    "p2p": ("device_to_device_memcpy_write_ce", "device_to_device_memcpy_read_ce"),
}
BOTH_WAYS = ("host_to_device_bidirectional_memcpy_ce", "device_to_host_bidirectional_memcpy_ce")


class Imported(NamedTuple):
    """Collectives of nccl-tests by key, and how many nodes their ranks were on."""

    nodes: int
    collectives: dict[str, CollectiveRecord]


def import_nccl_tests(path: Path) -> Imported:
    """Collectives of the output of nccl-tests: printed tables, of several programs too, or one file of ``-J``.

    Times are those out of place. A size that was measured several times counts with its median; one whose results were
    wrong is recorded as such. The name of the test is taken from the output or else from the name of the file, the
    number of ranks from the devices listed, the number of nodes from their hosts.

    Raises
    ------
    PerfModelError
        If the file cannot be read, holds no results out of place, or contradicts itself: a time must be that of its
        bandwidth, and all tests must have run on as many nodes.
    """
    text = read_text(path, WHAT, NCCL_REMEDY)
    rows = json_rows(path) if text.lstrip().startswith("{") else table_rows(path, text)
    if not rows:
        raise PerfModelError(f"{path}: output of nccl-tests must hold results out of place (got none). {NCCL_REMEDY}")
    found: dict[str, list[NcclTestsRow]] = {}
    for row in rows:
        found.setdefault(_checked_key(path, row), []).append(row)
    nodes = sorted({row.nodes for row in rows})
    if len(nodes) > 1:
        got = " and ".join(map(str, nodes))
        raise PerfModelError(
            f"{path}: output of nccl-tests must be of ranks on one number of nodes (got {got:.60}). Import each under "
            "an --interconnect of its own."
        )
    return Imported(nodes[0], {key: _collective(path, same) for key, same in found.items()})


def _collective(path: Path, rows: Sequence[NcclTestsRow]) -> CollectiveRecord:
    samples = sum(row.samples for row in rows)
    wrong = sum(row.wrong for row in rows)
    times_s = [row.time_us * US for row in rows]
    data: dict[str, Any] = {"time_s": statistics.median(times_s), "spread": _spread(times_s, rows[0].spread)}
    if wrong:
        data = {"error": f"{wrong:g} wrong values"}
    with naming(f"{path}: {rows[0].place}"):
        return validated(CollectiveRecord, data | {"samples": samples}, "profile", NCCL_REMEDY)


def _spread(values: Sequence[float], alone: float = 0.0) -> float:
    return statistics.stdev(values) / statistics.median(values) if len(values) > 1 else alone


def _checked_key(path: Path, row: NcclTestsRow) -> str:
    """Refuses rows whose numbers do not belong together, as when ranks were cut from the list."""
    where = f"{path}: {row.place}: {row.program} of {row.size_bytes:.10g} bytes"
    kind = KINDS.get(row.program)
    if kind is None:
        known = ", ".join(KINDS)
        raise PerfModelError(f"{path}: the test must be one of {known} (got {row.program!r:.60}). {NCCL_REMEDY}")
    if not 2 <= row.ranks <= MOST_RANKS:
        raise PerfModelError(
            f"{where}: must list the devices of at least 2 ranks, and at most {MOST_RANKS} (got {row.ranks:.10g}). "
            f"{NCCL_REMEDY}"
        )
    if row.dtype not in DTYPES:
        raise PerfModelError(
            f"{where}: its type must be one of {', '.join(DTYPES)} (got {row.dtype!r:.40}). {NCCL_REMEDY}"
        )
    if row.size_bytes > MOST_BYTES:
        raise PerfModelError(f"{where}: its size must be at most {MOST_BYTES} bytes. {NCCL_REMEDY}")
    if not LEAST_US <= row.time_us <= MOST_US:
        raise PerfModelError(
            f"{where}: its time must be from {LEAST_US:g} to {MOST_US:g} us (got {row.time_us:g}). {NCCL_REMEDY}"
        )
    if not 0 <= row.spread < math.inf:
        raise PerfModelError(f"{where}: its spread must be at least 0 % (got {100 * row.spread:g}). {NCCL_REMEDY}")
    if not 0 <= row.wrong < math.inf:
        raise PerfModelError(f"{where}: its wrong values must be counted (got {row.wrong:g}). {NCCL_REMEDY}")
    _check_bandwidths(where, kind, row)
    return collective_key(kind, row.ranks, DTYPES[row.dtype], row.size_bytes)


def _check_bandwidths(where: str, kind: str, row: NcclTestsRow) -> None:
    """algbw is size over time, busbw a multiple of it; all are printed with two digits after the point."""
    algbw, busbw, factor = row.algbw_gb_per_s, row.busbw_gb_per_s, busbw_factor(kind, row.ranks)
    own_gb_per_s = row.size_bytes / (row.time_us * US) / GB
    if not abs(algbw - own_gb_per_s) <= 0.02 * own_gb_per_s + 0.01:
        raise PerfModelError(
            f"{where}: algbw must be its size over its time, {own_gb_per_s:.4g} GB/s at {row.time_us:g} us (got "
            f"{algbw:g}). Save the output unchanged."
        )
    if not abs(busbw - factor * algbw) <= 0.01 * abs(busbw) + 0.02:
        raise PerfModelError(
            f"{where}: busbw must be {factor:.4g} times algbw with {row.ranks} ranks"
            f" (got {busbw:g} and {algbw:g}). Keep all lines that list devices."
        )


def is_nvbandwidth(path: Path) -> bool:
    """Return whether a file looks like output of nvbandwidth.

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
        cases = {str(each["name"]): _nvbandwidth_case(each) for each in report["testcases"]}
    except MALFORMED as error:
        raise PerfModelError(
            f"{path}: output of nvbandwidth must have nvbandwidth.testcases, each with name, status and"
            f" bandwidth_matrix ({type(error).__name__}: {str(error)[:80]}). {NVBANDWIDTH_REMEDY}"
        ) from error
    if not 1 <= size_bytes <= MOST_BUFFER_BYTES:
        raise PerfModelError(
            f"{path}: bufferSize must be above 0 and at most {MOST_BUFFER_BYTES // MIB} MiB (got "
            f"{size_bytes / MIB:g}). {NVBANDWIDTH_REMEDY}"
        )
    with naming(path):
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
            f"{path}: output of nvbandwidth must hold one of {known} (got {', '.join(cases)[:80] or 'no test case'})."
            f" {NVBANDWIDTH_REMEDY}"
        )
    return records


class _NvbandwidthCase(NamedTuple):
    """One test case of nvbandwidth.

    Attributes
    ----------
    gb_per_s : tuple of float
        Bandwidth of each pair that was measured.
    error : str or None
        Why there is none.
    """

    gb_per_s: tuple[float, ...]
    error: str | None


def _nvbandwidth_case(testcase: dict[str, Any]) -> _NvbandwidthCase | None:
    """Read a test case; None if it did not run."""
    status = testcase["status"]
    if status == "Passed":
        values = [float(cell) for row in testcase["bandwidth_matrix"] for cell in row if cell != "N/A"]
        values = [value for value in values if value != 0]
        if not values or not all(LEAST_GB_PER_S <= value <= MOST_GB_PER_S for value in values):
            known = f"bandwidths from {LEAST_GB_PER_S:g} to {MOST_GB_PER_S:g} GB/s"
            raise ValueError(f"{testcase['name']} must have {known}, got {values}")
        return _NvbandwidthCase(tuple(values), None)
    return _NvbandwidthCase((), str(testcase.get("error", status))) if status == "Error" else None


def _bandwidth(case: _NvbandwidthCase) -> float:
    return statistics.median(case.gb_per_s) if case.gb_per_s else math.inf


def _transfer(cases: Sequence[_NvbandwidthCase | None], size_bytes: int) -> TransferRecord | None:
    """Return the record of the first case that passed, or else of the first that failed."""
    ran = [each for each in cases if each is not None]
    passed = next((each for each in ran if each.gb_per_s), None)
    if passed is not None:
        data = {
            "time_s": size_bytes / (_bandwidth(passed) * GB),
            "spread": _spread(passed.gb_per_s),
            "samples": len(passed.gb_per_s),
        }
        return validated(TransferRecord, data, "profile", NVBANDWIDTH_REMEDY)
    return TransferRecord(error=ran[0].error) if ran else None
