"""Measuring an interconnect: all ranks run the stages together, and rank 0 writes down what was found after each.

``python -m calibrate.communication REQUEST RESULT`` on every rank, started by :func:`measure`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.coupling import fit_couplings, fit_message_couplings, fit_own_couplings, fit_own_message_couplings
from calibrate.interconnects import backend_of, environment, members, nodes_of
from calibrate.ladder import MOST_BYTES, grid
from calibrate.own_contention import WAIT, OwnKernel, decode_own, encode_own
from perfmodel.cost.segments import fit_curves
from perfmodel.errors import PerfModelError
from perfmodel.files import write_atomically
from perfmodel.hardware.interconnect import (
    LIBRARY,
    CollectiveRecord,
    ContentionRecord,
    Interconnect,
    TransferRecord,
)
from perfmodel.hardware.topology_matrix import nvidia_smi
from perfmodel.program.program import Collective

if TYPE_CHECKING:
    from calibrate.collectives import CollectiveBench, Wanted
    from calibrate.ranks import Ranks
    from calibrate.sweeps import Sweeps

ROOT = Path(__file__).parent.parent
TRANSFERS_S = 20.0
OWN_BUDGET_S = 25.0  # about 35 kernels


@dataclass(frozen=True)
class Request:
    """interconnect: its name. exact: further collectives (kind, dtype, size_bytes, ranks). budget_s: for timing
    collectives; sizes that do not fit in are left out. stages: of ``calls``, ``collective calls``, ``collectives``,
    ``p2p``, ``contention``, ``transfers``. own: scenarios' kernels to be measured beside collectives, the most
    important first, in ``own_budget_s``; rank 0's count. reference_s: of the profile's host. passes: over all
    collectives. nodes, rendezvous: see :class:`~calibrate.ranks.Launch`.
    """

    interconnect: str
    ranks: int
    device: str
    budget_s: float
    exact: tuple[tuple[str, str, int, int], ...] = ()
    stages: tuple[str, ...] = ("calls", "collectives", "contention")
    reference_s: float | None = None
    most_bytes: int | None = None
    passes: int = 2
    nodes: int = 1
    rendezvous: str | None = None
    own: tuple[OwnKernel, ...] = ()
    own_budget_s: float = OWN_BUDGET_S

    def to_json(self) -> str:
        """For the ranks."""
        return json.dumps(asdict(replace(self, own=())) | {"own": encode_own(self.own)})

    @classmethod
    def from_json(cls, text: str) -> Request:
        """The inverse of :meth:`to_json`."""
        data = json.loads(text)
        exact = tuple(tuple(each) for each in data["exact"])
        return cls(**data | {"exact": exact, "stages": tuple(data["stages"]), "own": decode_own(data["own"])})


@dataclass
class Found:
    """What the stages found so far, as plain data."""

    collectives: dict[str, Any] = field(default_factory=dict)
    communicator_bytes: dict[str, int] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)
    contention: dict[str, Any] = field(default_factory=dict)
    own_contention: dict[str, dict[str, Any]] = field(default_factory=dict)
    messages_ahead: dict[int, int] = field(default_factory=dict)
    transfers: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    topology: str | None = None
    stages_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """What the stages found, for :func:`~calibrate.merging.merged`. transfers: empty unless that stage was asked for.
    topology: what ``nvidia-smi topo -m`` prints.
    """

    interconnect: Interconnect
    transfers: dict[str, TransferRecord]
    stages_s: dict[str, float]
    topology: str | None = None


def measure(request: Request, timeout_s: float, kept: Path | None = None) -> Measured | None:
    """Run the stages on the ranks of this machine, or of several that make the same request.

    Parameters
    ----------
    request : Request
    timeout_s : float
        Seconds after which all ranks are ended.
    kept : Path, optional
        A file that rank 0 writes after each stage, for :func:`measured_in`; it outlives whatever ends this.

    Returns
    -------
    Measured or None
        None on a machine that rank 0 is not on.

    Raises
    ------
    PerfModelError
        If a rank fails, waits for another in vain, or all do not end within ``timeout_s``.
    """
    from calibrate.ranks import Launch, run_ranks

    with tempfile.TemporaryDirectory(prefix="perfmodel-") as name:
        folder = Path(name)
        asked, answered = folder / "request.json", (kept or folder / "result.json").absolute()
        answered.unlink(missing_ok=True)
        asked.write_text(request.to_json())
        search_path = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        program = ("-m", "calibrate.communication", str(asked), str(answered), str(folder))
        launch = Launch(
            name=f"interconnect {request.interconnect}",
            program=program,
            ranks=request.ranks,
            device=request.device,
            folder=folder,
            timeout_s=timeout_s,
            environment=os.environ | {"PYTHONPATH": os.pathsep.join(search_path)},
            nodes=request.nodes,
            rendezvous=request.rendezvous,
        )
        run_ranks(launch)
        return measured_in(answered, request) if answered.exists() else None


def measured_in(path: Path, request: Request) -> Measured:
    """What stages that ended have left in a file, also those of a run that was ended."""
    found = Found(**json.loads(path.read_text()))
    records = {key: CollectiveRecord.model_validate(data) for key, data in found.collectives.items()}
    contention = _contention(found.contention)
    own = {key: _contention(pairs) for key, pairs in found.own_contention.items()}
    interconnect = Interconnect.model_validate(
        {
            "backend": backend_of(request.device, request.interconnect),
            "environment": environment(request.interconnect, 0, request.ranks),
            "provenance": found.provenance,
            "nodes": max(nodes_of(request.interconnect), request.nodes),
            "collectives": records,
            "segments": fit_curves(records),
            "communicator_bytes": found.communicator_bytes,
            "host": found.host,
            "contention": contention,
            "couplings": fit_couplings(contention),
            "message_couplings": fit_message_couplings(contention),
            "own_contention": own,
            "own_couplings": fit_own_couplings(own),
            "own_message_couplings": fit_own_message_couplings(own),
            "messages_ahead": found.messages_ahead,
        }
    )
    transfers = {key: TransferRecord.model_validate(data) for key, data in found.transfers.items()}
    return Measured(interconnect, transfers, found.stages_s, found.topology)


def _contention(data: dict[str, Any]) -> dict[str, ContentionRecord]:
    return {key: ContentionRecord.model_validate(each) for key, each in data.items()}


def exact_collectives(collectives: Sequence[Collective]) -> tuple[tuple[str, str, int, int], ...]:
    """For a request, each once."""
    return tuple(dict.fromkeys((each.kind, each.dtype, each.size_bytes, each.ranks) for each in collectives))


# on every rank


class Worker:
    """The stages of one rank. Whatever decides what is measured next is the same on all members of a group."""

    def __init__(self, request: Request, ranks: Ranks, found: Found) -> None:
        self.request, self.ranks, self.found = request, ranks, found
        self._sweeps: dict[int, Sweeps] = {}
        self._benches: dict[int, CollectiveBench] = {}
        self._left_s = request.budget_s
        self._turns_left = request.passes * (request.ranks - 1)
        self._world_bytes = 0

    def stages(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Names and what to run, one after the other. The passes over the collectives lie far apart in time; the last
        is for those of which the others differ.
        """
        asked, has_gpu = self.request.stages, self.request.device == "cuda"
        groups = range(self.request.ranks, 1, -1)
        for ranks in groups:
            yield f"group of {ranks}", lambda: self._first_pass(ranks)  # noqa: B023
        if "calls" in asked:
            yield "calls", self._calls
        if "collective calls" in asked:
            yield "collective calls", self._collective_calls
        if "p2p" in asked:
            yield "p2p", self._p2p
        if "contention" in asked and has_gpu:
            yield "contention", self._contention
        if has_gpu and (self.request.own or self.request.nodes > 1):  # other machines may have chosen none
            yield "own contention", self._own_contention
        if "transfers" in asked and has_gpu:
            yield "transfers", self._transfers
        for number in range(1, self.request.passes + 1 if self.request.passes > 1 else 1):
            is_last = number == self.request.passes
            for ranks in groups:
                yield f"group of {ranks}", lambda: self._sweep(ranks, is_last)  # noqa: B023

    def _first_pass(self, ranks: int) -> None:
        if ranks == self.request.ranks:
            self._open_world()
        self._open(ranks)
        self._sweep(ranks)

    def _open_world(self) -> None:
        """The first communicator of the process: it also takes what the library keeps for all of them."""
        import torch.distributed as dist

        from calibrate.collectives import CollectiveBench, outside_bytes

        before_bytes = outside_bytes(self.request.device)
        CollectiveBench(dist.group.WORLD, self.request.device).connect(self.request.ranks)
        self._world_bytes = outside_bytes(self.request.device) - before_bytes
        self.ranks.together()

    def _open(self, ranks: int) -> None:
        """A communicator of ``ranks`` ranks, and the memory that it takes beside torch's allocator."""
        import torch.distributed as dist

        from calibrate.collectives import CollectiveBench, outside_bytes
        from calibrate.ranks import GROUP_TIMEOUT_S
        from calibrate.sweeps import Sweeps

        before_bytes = outside_bytes(self.request.device)
        timeout = timedelta(seconds=max(GROUP_TIMEOUT_S, self.request.budget_s))
        nodes = max(nodes_of(self.request.interconnect), self.request.nodes)
        joined = members(ranks, self.request.ranks, nodes)
        group = dist.new_group(joined, timeout=timeout)
        if self.ranks.rank not in joined:
            return
        bench = CollectiveBench(group, self.request.device)
        bench.connect(ranks)
        self._benches[ranks] = bench
        self._sweeps[ranks] = Sweeps(bench, self._wanted(ranks))
        if self.request.device == "cuda":
            own_bytes = max(outside_bytes(self.request.device) - before_bytes, 0)
            self.found.communicator_bytes[str(ranks)] = own_bytes
            self.found.communicator_bytes.setdefault(LIBRARY, max(self._world_bytes - own_bytes, 0))

    def _sweep(self, ranks: int, only_disputed: bool = False) -> None:
        """Time a group's collectives once more; the other ranks wait. A sweep gets its share of what time is left, so
        that what one does not need is the next one's.
        """
        began_s = time.perf_counter()
        if ranks in self._sweeps:
            share_s = self._left_s / max(self._turns_left, 1)
            for key, record in self._sweeps[ranks].run(share_s, only_disputed):
                self.found.collectives[key] = record.model_dump()
        self.ranks.together()
        self._left_s = max(self._left_s - (time.perf_counter() - began_s), 0.0)
        self._turns_left -= 1

    def _wanted(self, ranks: int) -> dict[Wanted, str]:
        """Collectives of a group, and who asked for each: the scenarios' first."""
        from calibrate.collectives import Wanted

        found = {
            Wanted(kind, ranks, dtype, size_bytes): "scenario"
            for kind, dtype, size_bytes, members in self.request.exact
            if members == ranks
        }
        if "collectives" in self.request.stages:
            for kind, size_bytes in grid(ranks, self._most_bytes):
                found.setdefault(Wanted(kind, ranks, "float32", size_bytes), "grid")
        return found

    def _calls(self) -> None:
        from calibrate.communication_calls import call_records

        records = call_records(self.request.device, self.request.reference_s)
        self.found.host |= {name: each.model_dump() for name, each in records.items()}

    def _collective_calls(self) -> None:
        from calibrate.collectives import call_records
        from calibrate.host_reference import HostReference
        from calibrate.host_timing import no_collection

        with no_collection():
            reference = HostReference(self.request.device, self.request.reference_s)
            records = call_records(self.request.device, reference)
        self.found.host |= {name: each.model_dump() for name, each in records.items()}

    @property
    def _most_bytes(self) -> int:
        return self.request.most_bytes or MOST_BYTES[self.request.device]

    def _p2p(self) -> None:
        from calibrate.p2p import MessageStage

        asked, bench = self.request, self._benches.get(2)
        stage = MessageStage(
            self.ranks, bench, asked.device, asked.reference_s, self._most_bytes, self._left_s, asked.passes
        )
        sections = stage.run()._asdict()
        self.found.messages_ahead = sections.pop("messages_ahead")
        for section, records in sections.items():
            getattr(self.found, section).update({key: each.model_dump() for key, each in records.items()})

    def _contention(self) -> None:
        import torch.distributed as dist

        from calibrate.contention import ContentionBench

        records = ContentionBench(dist.group.WORLD).records(lambda what: None)
        self.found.contention |= {key: record.model_dump() for key, record in records.items()}

    def _own_contention(self) -> None:
        """Machines may differ in what they chose, as their profiles do: rank 0's choice is everybody's."""
        import torch.distributed as dist

        from calibrate.contention import ContentionBench
        from calibrate.p2p_contention import MessageContention

        chosen = [encode_own(self.request.own)]
        dist.broadcast_object_list(chosen, src=0)
        wanted, budget_s = decode_own(chosen[0]), self.request.own_budget_s
        beside = [each for each in wanted if each.collective != WAIT]
        waiting = [each for each in wanted if each.collective == WAIT]
        began_s = time.perf_counter()
        if beside:
            self._keep_own(ContentionBench(dist.group.WORLD).own_records(beside, budget_s, self._note))
        if waiting and (pair := self._benches.get(2)) is not None:
            left_s = budget_s - (time.perf_counter() - began_s)
            self._keep_own(MessageContention(pair.group).own_waiting(waiting, left_s, self._note))
        self.ranks.together()

    def _keep_own(self, records: Mapping[str, Mapping[str, ContentionRecord]]) -> None:
        for key, pairs in records.items():
            known = self.found.own_contention.setdefault(key, {})
            known.update({name: each.model_dump() for name, each in pairs.items()})

    def _note(self, note: str) -> None:
        if self.ranks.rank == 0:
            print(f"{self.request.interconnect}: {note}", flush=True)

    def _transfers(self) -> None:
        """Rank 0 copies while the others do nothing."""
        import torch

        from calibrate.transfers import TransferBench, transfer_records, transfer_sizes

        if self.ranks.rank == 0:
            bench = TransferBench(peer=1 if torch.cuda.device_count() > 1 else None)
            records = transfer_records(bench.kinds(), transfer_sizes(), TRANSFERS_S)
            self.found.transfers = {key: record.model_dump() for key, record in records.items()}
        self.ranks.together()


def _topology() -> str | None:
    try:
        return nvidia_smi("topo", "-m")
    except PerfModelError:  # a container may lack the program; nothing is predicted from it
        return None


def run_stages(worker: Worker, result: Path) -> None:
    """All stages of one rank; rank 0 writes down what was found after each."""
    from calibrate.machine import machine_facts

    name, ranks = worker.request.interconnect, worker.ranks
    if ranks.rank == 0:
        measured_at = datetime.now(UTC).isoformat(timespec="seconds")
        worker.found.provenance = machine_facts(worker.request.device) | {"measured_at": measured_at}
        worker.found.topology = _topology() if worker.request.device == "cuda" else None
    for stage, run in worker.stages():
        began_s = time.perf_counter()
        run()
        before_s = worker.found.stages_s.get(stage, 0.0)  # of an earlier pass
        worker.found.stages_s[stage] = round(before_s + time.perf_counter() - began_s, 2)
        if ranks.rank == 0:
            write_atomically(result, json.dumps(asdict(worker.found)))
            print(f"{name}: {stage} {worker.found.stages_s[stage]} s", flush=True)


def main(request_path: str, result_path: str, folder: str) -> None:
    """One rank."""
    from calibrate.ranks import GROUP_TIMEOUT_S, join, telling

    request = Request.from_json(Path(request_path).read_text())
    timeout_s = max(GROUP_TIMEOUT_S, request.budget_s)
    with (
        telling(Path(folder), int(os.environ["RANK"])),
        join(request.device, request.interconnect, timeout_s) as ranks,
    ):
        run_stages(Worker(request, ranks, Found()), Path(result_path))


if __name__ == "__main__":
    main(*sys.argv[1:])
