"""A rank of test_sharded: what every form made of the parameters, what it holds, and which collectives a step ran."""

import os
import sys
from collections import Counter
from pathlib import Path

import torch

from calibrate.this_machine.launcher import join, telling
from perfmodel.models.step import TrainingStep, build_module, make_inputs, make_optimizer
from perfmodel.scenario.scenario import Scenario
from validate.strategies.forms import make_form

RANKS, STEPS, LAYERS = 4, 3, 2
MODEL = {"layers": LAYERS, "width": 6, "ffn_width": 10, "vocabulary": 33}
COLLECTIVES = {
    "c10d::broadcast_": "broadcast",
    "c10d::allreduce_": "all_reduce",
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
}
VARIANTS = {
    "broadcast": {"strategy": "zero1"},
    "broadcast-view": {"strategy": "zero1", "parameters_as_bucket_view": True},
    "reduce-scatter": {"strategy": "zero1", "zero1_form": "reduce-scatter"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "zero3-all": {"strategy": "zero3", "fsdp": {"reshard_after_forward": True}},
    "zero3-pairs": {"strategy": "zero3", "fsdp": {"reshard_after_forward": 2}},
    "zero3-root": {"strategy": "zero3", "fsdp": {"wrap": "root"}},
    "zero3-prefetch": {"strategy": "zero3", "fsdp": {"forward_prefetch": 2, "backward_prefetch": 1}},
    "zero3-prefetch-far": {"strategy": "zero3", "fsdp": {"forward_prefetch": 1, "backward_prefetch": 2}},
    "hsdp": {"strategy": "zero3", "fsdp": {"replicate": 2}},
    "hsdp-prefetch": {"strategy": "zero3", "fsdp": {"replicate": 2, "forward_prefetch": 1, "backward_prefetch": 2}},
    "zero3-offload": {"strategy": "zero3", "fsdp": {"offload": True}},
    "bf16-reduce": {"strategy": "zero3", "fsdp": {"mixed_precision": {"param": "fp32", "reduce": "bf16"}}},
}
TRAININGS = {
    "accumulated": {
        "optimizer": {"name": "sgd", "momentum": 0.9, "max_grad_norm": 0.1},
        "training": {"gradient_accumulation": 2},
    },
    "plain": {"optimizer": {"name": "adamw"}},
    "scaled": {"precision": "amp-fp16", "optimizer": {"name": "sgd", "implementation": "for-loop"}},
}
TRIED = {
    "accumulated": tuple(VARIANTS),
    "plain": ("broadcast", "reduce-scatter", "zero2", "zero3"),
    "scaled": ("broadcast", "zero3", "hsdp"),
}


def scenario(variant, training):
    """Of 1002 parameters, so that 4 ranks must pad; and rows that 4 ranks cannot share evenly."""
    return Scenario.model_validate(
        {
            "model": {**MODEL, "family": "gpt", "heads": 2},
            "batch": {"size": 1, "sequence_length": 8},
            "parallelism": {"dp": RANKS, **VARIANTS[variant]},
            "hardware": {"profile": "cpu.json", "gpus": RANKS},
            **TRAININGS[training],
        }
    )


def inputs_of(rank):
    return make_inputs(scenario("zero3", "plain"), "cpu", torch.Generator().manual_seed(rank))


def build(asked, seed=0):
    torch.manual_seed(seed)
    return build_module(asked)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def held(tensor):
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).numel()


def states(optimizer):
    """Numbers of the first state of each parameter: momentum."""
    found = getattr(optimizer, "optim", optimizer).state.values()
    return sum(held(next(value for value in state.values() if value is not None and value.dim())) for state in found)


def run(asked, inputs, form=None, seed=0):
    module = build(asked, seed)
    if form is not None:
        module = form.wrap(module)
    optimizer = form.make_optimizer(module) if form else make_optimizer(module.parameters(), asked)
    step = TrainingStep(module, inputs, optimizer, asked, reducer=form)
    for _ in range(STEPS - 1):
        step.run()
    with torch.profiler.profile() as profiler:
        step.run()
    names = Counter(COLLECTIVES[event.name] for event in profiler.events() if event.name in COLLECTIVES)
    return {
        "moved": [
            whole(now) - old.detach() for now, old in zip(module.parameters(), build(asked).parameters(), strict=True)
        ],
        "held": [held(parameter) for parameter in module.parameters()],
        "states": states(optimizer),
        "gradients": sum(held(each.grad) for each in module.parameters() if each.grad is not None),
        "collectives": dict(names),
        "buckets_rebuilt": hasattr(form, "buckets") and form.buckets().rebuilt,
    }


def main(folder):
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    found = {}
    with telling(folder, rank), join("cpu", None, timeout_s=240):
        for training, variants in TRIED.items():
            for variant in variants:
                asked = scenario(variant, training)
                found[training, variant] = run(asked, inputs_of(rank), make_form(asked), seed=rank)
        torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
