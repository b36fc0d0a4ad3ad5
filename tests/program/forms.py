"""A step of three parameters under each form of data parallelism, and its program in words."""

from __future__ import annotations

from perfmodel.program.program import COLLECTIVE, HOST, RECORD, WAIT, Program
from perfmodel.program.strategies.data_parallel import data_parallel_program
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.trace import EventKind, Trace
from tests.builders import Phase, backward_of, ops, parameters_of, step_events, tiny_scenario, trace_of

SIZES = (100, 300, 50)  # elements of parameters 0, 1, 2; gradients become ready as 2, 0, 1
READY = (2, 0, 1)


def trace(micro_batches: int = 1) -> Trace:
    phases: list[Phase] = []
    for micro_batch in range(micro_batches):
        phases += [("forward", micro_batch, ops(0)), ("backward", micro_batch, backward_of(READY))]
    return trace_of(step_events(*phases, ("optimizer", -1, ops(2))), parameters=parameters_of(*SIZES))


def scenario(strategy: str, accumulation: int = 1, dp: int = 4, **parallelism: object) -> Scenario:
    return tiny_scenario(
        training={"gradient_accumulation": accumulation},
        parallelism={"dp": dp, "strategy": strategy, **parallelism},
        hardware={"profile": "any", "gpus": dp},
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
