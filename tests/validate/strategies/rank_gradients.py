"""A rank of test_data_parallel: every form's gradients and parameters after a step, and DDP's buckets, into a file."""

import sys
from pathlib import Path

import torch

from calibrate.this_machine.launcher import join, telling
from perfmodel.models.step import TrainingStep, build_module, make_inputs, make_optimizer
from perfmodel.scenario.scenario import Scenario
from validate.strategies.forms import make_form

REPLICATED = ("naive", "flat", "overlap", "ddp")
STEPS = 3  # DDP rebuilds its buckets by the third
CAP_MB = 0.1


def scenario(strategy, static_graph=False):
    return Scenario.model_validate(
        {
            "model": {"family": "gpt", "size": "tiny"},
            "batch": {"size": 2, "sequence_length": 8},
            "optimizer": {"name": "sgd", "max_grad_norm": 1e6},
            "training": {"gradient_accumulation": 2},
            "parallelism": {
                "dp": 2,
                "strategy": strategy,
                "bucket_cap_mb": CAP_MB if strategy == "ddp" else None,
                "static_graph": static_graph,
            },
            "hardware": {"profile": "cpu.json", "gpus": 2},
        }
    )


def inputs_of(rank):
    return make_inputs(scenario("ddp"), "cpu", torch.Generator().manual_seed(rank))


def run(asked, inputs, form=None, seed=0):
    """Gradients of the last step, and one gradient as it is before the last micro-batch."""
    torch.manual_seed(seed)
    module = build_module(asked)
    if form is not None:
        module = form.wrap(module)
    step = TrainingStep(module, inputs, make_optimizer(module.parameters(), asked), asked, reducer=form)
    local = []

    def mark(phase, micro_batch):
        if (phase, micro_batch) == ("forward", 1):
            local[:] = [next(module.parameters()).grad.clone()]

    for _ in range(STEPS):
        step.run(mark)
    return {
        "gradients": [parameter.grad for parameter in module.parameters()],
        "parameters": [parameter.detach() for parameter in module.parameters()],
        "local": local[0],
    }


def main(folder):
    torch.set_num_threads(1)
    import os

    rank = int(os.environ["RANK"])
    with telling(folder, rank), join("cpu", None, timeout_s=240):
        found = {}
        for strategy in REPLICATED:
            asked = scenario(strategy)
            form = make_form(asked)
            found[strategy] = run(asked, inputs_of(rank), form, seed=rank)  # ``wrap`` makes them equal
        found["buckets"] = form.buckets().model_dump()
        torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
