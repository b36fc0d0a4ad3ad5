"""A rank of test_pipelines: gradients after one step of every schedule and what it computed, or a stage that breaks its word.

Arguments: a folder, and optionally ``wrong``: stage 0 then gives another type than it says.
"""

import os
import sys
from pathlib import Path

import torch

from calibrate.this_machine.launcher import join, telling
from perfmodel.errors import PerfModelError
from perfmodel.scenario.scenario import Scenario
from validate.strategies.pipeline import PipelineStep, own_stages

RANKS = 2
CPU = torch.device("cpu")
SMALL = {"layers": 4, "width": 16, "heads": 2, "ffn_width": 32, "vocabulary": 50}
SCHEDULES = {
    "gpipe": 1, "1f1b": 1, "interleaved-1f1b": 2, "looped-bfs": 2, "interleaved-zero-bubble": 2, "zbv-zero-bubble": 2,
    "dualpipev": 2,
}  # fmt: skip
TRIED = {
    **{schedule: {"schedule": schedule} for schedule in SCHEDULES},
    "gpt2": {"model": {"family": "gpt2", "dropout": 0.0}},
    "llama": {"model": {"family": "llama"}},
    "bert": {"model": {"family": "bert", "dropout": 0.0}, "schedule": "zbv-zero-bubble"},
    "amp": {"precision": "amp-bf16", "schedule": "interleaved-zero-bubble"},
}


def scenario(name):
    tried = TRIED[name]
    schedule = tried.get("schedule", "1f1b")
    pipeline = {"schedule": schedule, "micro_batches": 4, "virtual_stages": SCHEDULES[schedule]}
    return Scenario.model_validate(
        {
            "name": name,
            "model": {"family": "gpt", **SMALL, **tried.get("model", {})},
            "batch": {"size": 8, "sequence_length": 8},
            "precision": tried.get("precision", "fp32"),
            "optimizer": {"name": "sgd"},
            "parallelism": {"pp": {"stages": RANKS, **pipeline}},
            "hardware": {"profile": "cpu.json", "gpus": RANKS},
        }
    )


def parts_of(name, rank):
    torch.manual_seed(0)
    return own_stages(scenario(name), rank, CPU)


def one_step(name, rank, ranks):
    parts = parts_of(name, rank)
    step = PipelineStep(parts, scenario(name), CPU)
    phases = []
    step.run(lambda phase, micro_batch: phases.append(phase))
    gradients = {key: each.grad.clone() for part in parts.values() for key, each in part.named_parameters()}
    actions = [(each.kind, each.stage, each.micro_batch) for each in step.record_actions(ranks)]
    return {"gradients": gradients, "phases": phases, "actions": actions}


def refused(rank):
    """The sentence where stage 1 takes another type than stage 0 gives."""
    parts = parts_of("1f1b", rank)
    if rank == 1:
        parts["1"].dtype = torch.bfloat16
    try:
        PipelineStep(parts, scenario("1f1b"), CPU)
    except PerfModelError as error:
        return str(error)
    return None


def break_word(rank):
    parts = parts_of("1f1b", rank)
    step = PipelineStep(parts, scenario("1f1b"), CPU)
    if rank == 0:
        parts["0"].register_forward_hook(lambda module, inputs, output: output.bfloat16())
    step.run()


def main(folder, wrong):
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    with telling(folder, rank), join("cpu", None, timeout_s=240) as ranks:
        if wrong:
            break_word(rank)
        found = {name: one_step(name, rank, ranks) for name in TRIED}
        torch.save(found | {"refused": refused(rank)}, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["wrong"])
