"""Reads the matrix that ``nvidia-smi topo -m`` prints: how every two GPUs and NICs of a machine reach each other.

A cell is ``X`` (the device itself), ``NV4`` (a bond of 4 NVLinks), or how far up the PCIe tree the way goes: ``PIX``
(one switch), ``PXB`` (several switches), ``PHB`` (a host bridge), ``NODE`` (host bridges of one NUMA node), ``SYS``
(between NUMA nodes). Nothing is repaired: a matrix that lacks a cell is refused.
"""

from __future__ import annotations

import re
import subprocess
from typing import NamedTuple

from perfmodel.errors import PerfModelError

PCIE_CODES = ("PIX", "PXB", "PHB", "NODE", "SYS")  # the nearest first
SELF = "X"
AFFINITIES = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
REMEDY = "Save what `nvidia-smi topo -m` prints, whole."

_ESCAPE = re.compile(r"\x1b?\[[0-9;]*m|\x1b\[[0-9;?]*[A-Za-z]")  # copied text may have lost the escape character
_NVLINK = re.compile(r"NV([1-9]\d{0,3})")
_GPU = re.compile(r"GPU\d+")


class Matrix(NamedTuple):
    """A matrix that ``nvidia-smi topo -m`` printed.

    Attributes
    ----------
    where : str
        What was read.
    devices : tuple of str
        GPUs and NICs in printed order.
    codes : dict
        Codes by pair of devices, in both orders.
    cpu_affinity, numa : dict
        Affinities by device, as printed; None if blank or N/A.
    nic_names : dict
        Names of the legend (``NIC0: mlx5_0``).
    """

    where: str
    devices: tuple[str, ...]
    codes: dict[tuple[str, str], str]
    cpu_affinity: dict[str, str | None]
    numa: dict[str, str | None]
    nic_names: dict[str, str]

    @property
    def gpus(self) -> tuple[str, ...]:
        """Return those of ``devices`` that are GPUs; all others are NICs."""
        return tuple(device for device in self.devices if _GPU.fullmatch(device))


def nvlinks(code: str) -> int | None:
    """Return how many NVLinks the code of a cell bonds; None for other codes.

    >>> nvlinks("NV18"), nvlinks("SYS")
    (18, None)
    """
    match = _NVLINK.fullmatch(code)
    return int(match[1]) if match else None


def processors(affinity: str) -> tuple[range, ...]:
    """Return the processors of a CPU affinity.

    >>> processors("0-2,8")
    (range(0, 3), range(8, 9))
    """
    ends = (part.partition("-") for part in affinity.split(","))
    return tuple(range(int(first), int(last or first) + 1) for first, _, last in ends)


def parse_matrix(text: str, where: str = "nvidia-smi topo -m") -> Matrix:
    """The matrix in ``text``, between tabs or blanks, with or without the terminal's underlining.

    Parameters
    ----------
    text : str
        What ``nvidia-smi topo -m`` printed; lines before the header do not matter.
    where : str
        The file, to begin error messages with.

    Raises
    ------
    PerfModelError
        If there is no header, a row is missing or lacks a cell, a code is unknown, or two cells that must agree do not.
    """
    lines = _ESCAPE.sub("", text).splitlines()
    start = next((number for number, line in enumerate(lines) if _GPU.match(line.lstrip())), None)
    if start is None:
        raise PerfModelError(f"{where}: must have a header that names GPU0 and the other devices (got none). {REMEDY}")
    head, title, titles = lines[start].partition(AFFINITIES[0])
    devices = tuple(head.split())
    if len(set(devices)) < len(devices):
        raise PerfModelError(f"{where}: the header must name each device once (got {' '.join(devices):.80}). {REMEDY}")
    columns = [name for name in AFFINITIES if name in " ".join((title + titles).split())]
    rows, affinities = {}, {}
    for number, device in enumerate(devices):
        line = lines[start + 1 + number] if start + 1 + number < len(lines) else ""
        name, *cells = line.split() or [""]
        if name != device:
            raise PerfModelError(
                f"{where}: row {number + 1} must be that of {device:.40}, as in the header (got {name!r:.60}). {REMEDY}"
            )
        rows[device], affinities[device] = _split_row(cells, device, devices, columns, where)
    _check(rows, where)
    by_column = {title: {device: found.get(title) for device, found in affinities.items()} for title in AFFINITIES}
    return Matrix(
        where=where,
        devices=devices,
        codes={(row, column): code for row, cells in rows.items() for column, code in cells.items() if row != column},
        cpu_affinity=by_column["CPU Affinity"],
        numa=by_column["NUMA Affinity"],
        nic_names=_nic_legend(lines[start + 1 + len(devices) :], devices),
    )


def _split_row(
    cells: list[str], row: str, devices: tuple[str, ...], columns: list[str], where: str
) -> tuple[dict[str, str], dict[str, str | None]]:
    """Link codes by device, and affinities by title; a row has all affinities or, as of a NIC, none."""
    expected = len(devices) + len(columns)
    rest = cells[len(devices) :]
    blank = all(cell == "N/A" for cell in rest) and len(rest) <= len(columns)
    if len(cells) < len(devices) or not (blank or len(rest) == len(columns)):
        short = f" or {len(devices)}" if columns else ""
        raise PerfModelError(f"{where}: row {row} must have {expected}{short} cells (got {len(cells)}). {REMEDY}")
    for column, code in zip(devices, cells, strict=False):
        if code != SELF and code not in PCIE_CODES and nvlinks(code) is None:
            raise PerfModelError(
                f"{where}: row {row}, column {column} must be X, NV and a number, or one of {', '.join(PCIE_CODES)}"
                f" (got {code!r:.60}). {REMEDY}"
            )
    known: dict[str, str | None] = {}
    if not blank:
        known = {title: None if cell == "N/A" else cell for title, cell in zip(columns, rest, strict=True)}
    affinity = known.get("CPU Affinity")
    if affinity is not None and not re.fullmatch(r"\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*", affinity):
        raise PerfModelError(f"{where}: row {row}: CPU Affinity must be like 0-15,32 (got {affinity!r:.60}). {REMEDY}")
    return dict(zip(devices, cells, strict=False)), known


def _check(rows: dict[str, dict[str, str]], where: str) -> None:
    """X on the diagonal and nowhere else; what one device is to another, the other is to it."""
    for row, cells in rows.items():
        for column, code in cells.items():
            if (code == SELF) != (row == column):
                rule = "must be X" if row == column else "must not be X"
                raise PerfModelError(f"{where}: row {row}, column {column} {rule} (got {code!r:.60}). {REMEDY}")
            if code != rows[column][row]:
                raise PerfModelError(
                    f"{where}: row {row}, column {column} must agree with row {column}, column {row}"
                    f" (got {code} and {rows[column][row]}). {REMEDY}"
                )


def _nic_legend(lines: list[str], devices: tuple[str, ...]) -> dict[str, str]:
    """Names behind NIC0, NIC1, ...; older drivers print them as devices, without a legend."""
    found = (re.fullmatch(r"\s*(\S+):\s+(\S+)\s*", line) for line in lines)
    return {match[1]: match[2] for match in found if match and match[1] in devices}


def nvidia_smi(*arguments: str, timeout_s: float = 60.0) -> str:
    """Return what ``nvidia-smi`` prints.

    Raises
    ------
    PerfModelError
        If it is not installed, fails, or does not answer in time.
    """
    command = " ".join(("nvidia-smi", *arguments))
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=timeout_s, check=True)
    except OSError as error:
        raise PerfModelError(
            f"{command}: must be installed to read this machine ({error.strerror}). Give a FILE or a description."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise PerfModelError(f"{command}: must answer within {timeout_s:g} s (it did not). Give a FILE.") from error
    except subprocess.CalledProcessError as error:
        said = " ".join((error.stderr or error.stdout).split())
        raise PerfModelError(f"{command}: must succeed (it said {said!r:.200}). Give a FILE.") from error
    return done.stdout
