"""Measuring an interconnect: all ranks run the stages together, and rank 0 writes down what was found after each.

``python -m calibrate.communication REQUEST RESULT`` on every rank, started by :func:`measure_interconnect`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from calibrate.coupling import fit_couplings
from calibrate.interconnects import nodes_of
from perfmodel.cost.segments import fit_segments
from perfmodel.files import write_atomically
from perfmodel.hardware.interconnect import (
    COLLECTIVES,
    CollectiveRecord,
    ContentionRecord,
    Interconnect,
    collective_key,
)
from perfmodel.hardware.profile import Profile
from perfmodel.program.program import Collective
from perfmodel.units import GIB, KIB, MIB

ROOT = Path(__file__).parent.parent
MOST_BYTES = {"nccl": GIB, "gloo": 64 * MIB}
LONGEST_S = 0.4  # of one collective; larger sizes are left out
NAMED = "all_reduce"  # the kind whose ladder is the finest


@dataclass(frozen=True)
class Request:
    """interconnect: its name. exact: further collectives (kind, dtype, size_bytes, ranks). budget_s: after which no
    further size is begun. stages: of ``calls``, ``collectives``, ``contention``. reference_s: of the profile's host.
    """

    interconnect: str
    ranks: int
    device: str
    budget_s: float
    exact: tuple[tuple[str, str, int, int], ...] = ()
    stages: tuple[str, ...] = ("calls", "collectives", "contention")
    reference_s: float | None = None
    most_bytes: int | None = None


@dataclass
class Found:
    """What the stages found so far, as plain data."""

    collectives: dict[str, Any] = field(default_factory=dict)
    communicator_bytes: dict[str, int] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)
    contention: dict[str, Any] = field(default_factory=dict)
    stages_s: dict[str, float] = field(default_factory=dict)


def measure_interconnect(request: Request, timeout_s: float) -> tuple[Interconnect, dict[str, float]]:
    """Run the stages on the ranks of this machine.

    Returns
    -------
    Interconnect, and seconds of each stage.

    Raises
    ------
    PerfModelError
        If a rank fails, or all do not end within ``timeout_s``; what was written down until then is lost.
    """
    from calibrate.ranks import Launch, run_ranks

    with tempfile.TemporaryDirectory(prefix="perfmodel-") as name:
        folder = Path(name)
        asked, answered = folder / "request.json", folder / "result.json"
        asked.write_text(json.dumps(asdict(request)))
        search_path = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(search_path)}
        program = ("-m", "calibrate.communication", str(asked), str(answered), str(folder))
        run_ranks(
            Launch(
                f"interconnect {request.interconnect}",
                program,
                request.ranks,
                request.device,
                folder,
                timeout_s,
                environment,
            )
        )
        found = Found(**json.loads(answered.read_text()))
    return _interconnect(request, found), found.stages_s


def _interconnect(request: Request, found: Found) -> Interconnect:
    from calibrate.interconnects import environment

    backend = "gloo" if request.device == "cpu" or request.interconnect == "gloo" else "nccl"
    records = {key: CollectiveRecord.model_validate(data) for key, data in found.collectives.items()}
    contention = {key: ContentionRecord.model_validate(data) for key, data in found.contention.items()}
    return Interconnect.model_validate(
        {
            "backend": backend,
            "environment": environment(request.interconnect, 0, request.ranks),
            "nodes": nodes_of(request.interconnect),
            "collectives": records,
            "segments": segments_of(records),
            "communicator_bytes": found.communicator_bytes,
            "host": found.host,
            "contention": contention,
            "couplings": fit_couplings(contention),
        }
    )


def segments_of(records: dict[str, CollectiveRecord]) -> dict[str, Any]:
    """Curves of all kinds and groups, fitted to the general ladder's sizes."""
    points: dict[str, list[tuple[int, float]]] = {}
    for key, record in records.items():
        kind, ranks, _, size_bytes = key.split()
        if record.time_s is not None and record.origin == "grid":
            points.setdefault(f"{kind} {ranks}", []).append((int(size_bytes), record.time_s))
    return {name: fit_segments(rows) for name, rows in sorted(points.items())}


def merged(profile: Profile, name: str, interconnect: Interconnect) -> Profile:
    """The profile with this interconnect; what it had before and was not measured again stays."""
    before = profile.interconnects.get(name)
    if before is not None:
        records = before.collectives | interconnect.collectives
        interconnect = interconnect.model_copy(
            update={
                "collectives": records,
                "segments": segments_of(records),
                "communicator_bytes": before.communicator_bytes | interconnect.communicator_bytes,
                "host": before.host | interconnect.host,
                "contention": before.contention | interconnect.contention,
                "couplings": before.couplings | interconnect.couplings,
            }
        )
    known = profile.interconnects | {name: interconnect}
    return profile.model_copy(update={"interconnects": known, "interconnect": profile.interconnect or name})


def exact_collectives(collectives: Sequence[Collective]) -> tuple[tuple[str, str, int, int], ...]:
    """For a request, each once."""
    return tuple(dict.fromkeys((each.kind, each.dtype, each.size_bytes, each.ranks) for each in collectives))


# on every rank


def ladder(most_bytes: int) -> list[int]:
    """Sizes from 1 KiB up by factors of two, and between them where protocols switch.

    >>> ladder(4096)
    [1024, 2048, 4096]
    """
    sizes = []
    size_bytes = KIB
    while size_bytes <= most_bytes:
        sizes.append(size_bytes)
        if MIB // 4 <= size_bytes < 64 * MIB:
            sizes.append(size_bytes * 3 // 2)
        size_bytes *= 2
    return sizes


def _run(request: Request, result: Path) -> None:
    import torch.distributed as dist

    found = Found()
    for name, stage in _stages(request, found):
        began_s = time.perf_counter()
        stage()
        found.stages_s[name] = round(time.perf_counter() - began_s, 2)
        if dist.get_rank() == 0:
            write_atomically(result, json.dumps(asdict(found)))
            print(f"{request.interconnect}: {name} {found.stages_s[name]} s", flush=True)


def _stages(request: Request, found: Found) -> Iterator[tuple[str, Any]]:
    began_s = time.perf_counter()
    groups = range(request.ranks, 1, -1)
    for index, ranks in enumerate(groups):
        stop_s = began_s + request.budget_s * (index + 1) / len(groups)
        yield f"group of {ranks}", lambda: _group(request, ranks, found, stop_s)  # noqa: B023
    if "calls" in request.stages:
        yield "calls", lambda: _calls(request, found)
    if "contention" in request.stages and request.device == "cuda":
        yield "contention", lambda: _contention(found)


def _calls(request: Request, found: Found) -> None:
    from calibrate.communication_calls import call_records

    found.host = {name: each.model_dump() for name, each in call_records(request.device, request.reference_s).items()}


def _contention(found: Found) -> None:
    import torch.distributed as dist

    from calibrate.contention import ContentionBench

    records = ContentionBench(dist.group.WORLD).records(lambda what: None)
    found.contention = {key: record.model_dump() for key, record in records.items()}


def _group(request: Request, ranks: int, found: Found, stop_s: float) -> None:
    """The collectives of the first ``ranks`` ranks; the others wait."""
    import torch
    import torch.distributed as dist

    from calibrate.collectives import CollectiveBench

    group = dist.group.WORLD if ranks == request.ranks else dist.new_group(list(range(ranks)))
    if dist.get_rank() < ranks:
        before_bytes = torch.cuda.mem_get_info()[0] if request.device == "cuda" else 0
        bench = CollectiveBench(group, request.device)
        bench.samples_s(lambda: dist.all_reduce(bench._flag, group=group))
        if request.device == "cuda":
            found.communicator_bytes[str(ranks)] = before_bytes - torch.cuda.mem_get_info()[0]
        _sweep(request, ranks, found, bench, stop_s)
    dist.barrier()


def _sweep(request: Request, ranks: int, found: Found, bench: Any, stop_s: float) -> None:
    from calibrate.collectives import Wanted

    for kind, dtype, size_bytes, members in request.exact:
        if members == ranks:
            wanted = Wanted(kind, ranks, dtype, size_bytes)
            key = collective_key(kind, ranks, dtype, size_bytes)
            found.collectives[key] = bench.record(wanted, "scenario").model_dump()
    if "collectives" not in request.stages:
        return
    most_bytes = request.most_bytes or MOST_BYTES["gloo" if request.device == "cpu" else "nccl"]
    for kind in COLLECTIVES:
        if kind == "send_recv" and ranks != 2:
            continue
        for size_bytes in ladder(most_bytes):
            if size_bytes % (4 * ranks) and kind not in ("all_reduce", "broadcast", "send_recv"):
                continue
            if kind != NAMED and size_bytes & (size_bytes - 1):
                continue
            if bench.agree(time.perf_counter() - stop_s) > 0:
                return
            key = collective_key(kind, ranks, "float32", size_bytes)
            record = bench.record(Wanted(kind, ranks, "float32", size_bytes))
            found.collectives.setdefault(key, record.model_dump())
            if record.time_s is None or record.time_s > LONGEST_S:
                break


def main(request_path: str, result_path: str, folder: str) -> None:
    """One rank."""
    from calibrate.ranks import join, telling

    data = json.loads(Path(request_path).read_text())
    data["exact"] = tuple(tuple(each) for each in data["exact"])
    request = Request(**{**data, "stages": tuple(data["stages"])})
    with telling(Path(folder), int(os.environ["RANK"])), join(request.device, request.interconnect):
        _run(request, Path(result_path))


if __name__ == "__main__":
    main(*sys.argv[1:])
