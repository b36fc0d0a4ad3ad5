"""A step of three parameters under each form of data parallelism, and its program in words."""

from __future__ import annotations

import numpy as np

from perfmodel.program.program import COLLECTIVE, HOST, RECORD, WAIT, Program
from perfmodel.program.strategies.data_parallel import data_parallel_program
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.operation import Operation, TensorSpec
from perfmodel.trace.trace import EventKind, Parameter, Segment, StepEvents, Trace

SIZES = (100, 300, 50)  # elements of parameters 0, 1, 2; gradients become ready as 2, 0, 1
READY = (2, 0, 1)


def trace(micro_batches: int = 1) -> Trace:
    events: list[tuple[int, int]] = []
    segments: list[Segment] = []

    def phase(name: str, micro_batch: int, rows: list[tuple[int, int]]) -> None:
        segments.append(Segment(name, micro_batch, len(events), len(events) + len(rows)))
        events.extend(rows)

    for micro_batch in range(micro_batches):
        phase("forward", micro_batch, [(EventKind.OP, 0)])
        backward = [row for index in READY for row in ((EventKind.OP, 1), (EventKind.GRAD_READY, index))]
        phase("backward", micro_batch, backward)
    phase("optimizer", -1, [(EventKind.OP, 2)])
    kind, a = (np.array([event[column] for event in events], dtype=np.int64) for column in (0, 1))
    step = StepEvents(kind, a, np.zeros_like(a), tuple(segments))
    operations = tuple(Operation(f"aten.op{index}.default") for index in range(3))
    parameters = tuple(
        Parameter(f"p{index}", TensorSpec.parse(f"float32[{size}]"), index) for index, size in enumerate(SIZES)
    )
    return Trace({}, {}, operations, (), (), (), parameters, (), step, step)


def scenario(strategy: str, accumulation: int = 1, dp: int = 4, **parallelism: object) -> Scenario:
    return Scenario.model_validate(
        {
            "model": {"family": "gpt", "size": "tiny"},
            "batch": {"size": 1, "sequence_length": 8},
            "training": {"gradient_accumulation": accumulation},
            "parallelism": {"dp": dp, "strategy": strategy, **parallelism},
            "hardware": {"profile": "any", "gpus": dp},
        }
    )


def program(strategy: str, accumulation: int = 1, **parallelism: object) -> Program:
    return data_parallel_program(scenario(strategy, accumulation, **parallelism), trace(min(accumulation, 2)))


def spelt(made: Program) -> list[str]:
    """One word an instruction, stream and call with it where they are not the usual ones."""
    columns = made.instructions
    names = {COLLECTIVE: "reduce", RECORD: "record", WAIT: "wait", HOST: "host"}
    found = []
    for kind, a, stream, call in zip(columns.kind, columns.a, columns.stream, columns.call, strict=True):
        if kind == EventKind.OP:
            word = made.operations[a].base_name
        elif kind == COLLECTIVE:
            word = f"reduce {made.collectives[a].size_bytes}"
        else:
            word = f"{names.get(int(kind), EventKind(int(kind)).name.lower() if kind < 16 else '')} {a}"
        call_text = f" <{columns.calls[call]}>" if call >= 0 else ""
        found.append(f"{'@' if stream else ''}{word}{call_text}")
    return found
