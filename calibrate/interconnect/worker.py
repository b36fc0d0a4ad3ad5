"""An interconnect's stages: all ranks run them together, and rank 0 writes down what was found after each.

``python -m calibrate.interconnect.worker REQUEST RESULT FOLDER`` on every rank, started by
:func:`calibrate.interconnect.request.measure`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from calibrate.interconnect.own_contention import WAIT, decode_own, encode_own
from calibrate.interconnect.request import Asked, Found, Request
from calibrate.interconnect.sizes import MOST_BYTES, grid
from calibrate.stage_names import GROUP
from calibrate.this_machine.wirings import members, nodes_of
from perfmodel.errors import PerfModelError
from perfmodel.files.kinds import STAGES
from perfmodel.files.writing import write_atomically
from perfmodel.hardware.interconnect import LIBRARY, ContentionRecord
from perfmodel.topology.matrix import nvidia_smi

if TYPE_CHECKING:
    from calibrate.interconnect.collectives import CollectiveBench, Wanted
    from calibrate.interconnect.sweeps import Sweeps
    from calibrate.this_machine.launcher import Ranks

TRANSFERS_S = 20.0


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
        """Yield names and what to run, one after the other.

        The passes over the collectives lie far apart in time; the last is for those of which the others differ.
        """
        asked, has_gpu = self.request.stages, self.request.device == "cuda"
        groups = range(self.request.ranks, 1, -1)
        for ranks in groups:
            yield f"{GROUP}{ranks}", lambda: self._first_pass(ranks)  # noqa: B023
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
                yield f"{GROUP}{ranks}", lambda: self._sweep(ranks, is_last)  # noqa: B023

    def _first_pass(self, ranks: int) -> None:
        if ranks == self.request.ranks:
            self._open_world()
        self._open(ranks)
        self._sweep(ranks)

    def _open_world(self) -> None:
        """Open the first communicator of the process, which also takes the memory that the library keeps for all of
        them.
        """
        import torch.distributed as dist

        from calibrate.interconnect.collectives import CollectiveBench, outside_bytes

        before_bytes = outside_bytes(self.request.device)
        CollectiveBench(dist.group.WORLD, self.request.device).connect(self.request.ranks)
        self._world_bytes = outside_bytes(self.request.device) - before_bytes
        self.ranks.together()

    def _open(self, ranks: int) -> None:
        """Open a communicator of ``ranks`` ranks, and note the memory that it takes outside torch's allocator."""
        import torch.distributed as dist

        from calibrate.interconnect.collectives import CollectiveBench, outside_bytes
        from calibrate.interconnect.sweeps import Sweeps
        from calibrate.this_machine.launcher import GROUP_TIMEOUT_S

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
        """Return collectives of a group, and who asked for each: the scenarios' first."""
        from calibrate.interconnect.collectives import Wanted

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
        from calibrate.interconnect.wrappers.ddp import call_records

        records = call_records(self.request.device, self.request.reference_s)
        self.found.host |= {name: each.model_dump() for name, each in records.items()}

    def _collective_calls(self) -> None:
        from calibrate.host.reference import HostReference
        from calibrate.interconnect.collectives import call_records
        from calibrate.timing.host_stopwatch import no_collection

        with no_collection():
            reference = HostReference(self.request.device, self.request.reference_s)
            records = call_records(self.request.device, reference)
        self.found.host |= {name: each.model_dump() for name, each in records.items()}

    @property
    def _most_bytes(self) -> int:
        return self.request.most_bytes or MOST_BYTES[self.request.device]

    def _p2p(self) -> None:
        from calibrate.interconnect.p2p import MessageStage

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

        from calibrate.interconnect.contention import ContentionBench

        records = ContentionBench.on_gpus(dist.group.WORLD).records(lambda what: None)
        self.found.contention |= {key: record.model_dump() for key, record in records.items()}

    def _own_contention(self) -> None:
        """Measure the scenarios' own kernels that rank 0 chose: machines may differ in their choice, as their profiles
        do.

        Kernels that run with collectives may use a share of the budget in proportion to their number.
        """
        import torch.distributed as dist

        from calibrate.interconnect.contention import ContentionBench
        from calibrate.interconnect.p2p_contention import MessageContention

        chosen = [encode_own(self.request.own)]
        dist.broadcast_object_list(chosen, src=0)
        wanted, budget_s = decode_own(chosen[0]), self.request.own_budget_s
        concurrent = tuple(each for each in wanted if each.collective != WAIT)
        waiting = tuple(each for each in wanted if each.collective == WAIT)
        began_s = time.perf_counter()
        if concurrent:
            share_s = budget_s * len(concurrent) / len(wanted)
            self._keep_own(ContentionBench.on_gpus(dist.group.WORLD).own_records(concurrent, share_s, self._note))
        if waiting and (pair := self._benches.get(2)) is not None:
            left_s = budget_s - (time.perf_counter() - began_s)
            self._keep_own(MessageContention.on_gpus(pair.group).own_waiting(waiting, left_s, self._note))
        self.ranks.together()

    def _keep_own(self, records: Mapping[str, Mapping[str, ContentionRecord]]) -> None:
        for key, pairs in records.items():
            known = self.found.own_contention.setdefault(key, {})
            known.update({name: each.model_dump() for name, each in pairs.items()})

    def _note(self, note: str) -> None:
        if self.ranks.rank == 0:
            print(f"{self.request.interconnect}: {note}", flush=True)

    def _transfers(self) -> None:
        """Let rank 0 copy while the others do nothing."""
        import torch

        from calibrate.interconnect.transfers import TransferBench, transfer_records, transfer_sizes

        if self.ranks.rank == 0:
            bench = TransferBench.on_gpu(peer=1 if torch.cuda.device_count() > 1 else None)
            records = transfer_records(bench.kinds(), transfer_sizes(), TRANSFERS_S)
            self.found.transfers = dict(records)
        self.ranks.together()


def _topology() -> str | None:
    try:
        return nvidia_smi("topo", "-m")
    except PerfModelError:  # a container may lack the program; nothing is predicted from it
        return None


def run_stages(worker: Worker, result: Path) -> None:
    """Run all stages of one rank; rank 0 writes down what was measured after each."""
    from calibrate.this_machine.facts import machine_facts

    request, ranks = worker.request, worker.ranks
    name = request.interconnect
    if ranks.rank == 0:
        worker.found.asked = Asked(
            profile=request.profile, ranks=request.ranks, nodes=request.nodes, stages=request.stages
        )
        measured_at = datetime.now(UTC).isoformat(timespec="seconds")
        worker.found.provenance = machine_facts(worker.request.device) | {"measured_at": measured_at}
        worker.found.topology = _topology() if worker.request.device == "cuda" else None
    for stage, run in worker.stages():
        began_s = time.perf_counter()
        run()
        before_s = worker.found.stages_s.get(stage, 0.0)  # of an earlier pass
        worker.found.stages_s[stage] = round(before_s + time.perf_counter() - began_s, 2)
        if ranks.rank == 0:
            write_atomically(result, json.dumps(worker.found.model_dump()), STAGES)
            print(f"{name}: {stage} {worker.found.stages_s[stage]} s", flush=True)


def main(request_path: str, result_path: str, folder: str) -> None:
    """Run one rank."""
    from calibrate.this_machine.launcher import GROUP_TIMEOUT_S, join, telling

    request = Request.from_json(Path(request_path).read_text())
    timeout_s = max(GROUP_TIMEOUT_S, request.budget_s)
    with (
        telling(Path(folder), int(os.environ["RANK"])),
        join(request.device, request.interconnect, timeout_s) as ranks,
    ):
        run_stages(Worker(request, ranks, Found()), Path(result_path))


if __name__ == "__main__":
    main(*sys.argv[1:])
