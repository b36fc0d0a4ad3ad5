"""A rank of test_pipelines: replicas of a pipeline, their gradients after a step, and when the third step reduces what."""

import os
import sys
from pathlib import Path

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from calibrate.this_machine.launcher import join, telling
from perfmodel.scenario.scenario import Scenario
from validate.strategies.pipeline import PipelineStep, own_stages

STAGES, DP, MICRO_BATCHES = 2, 2, 4
CAP_MB = 0.002
CPU = torch.device("cpu")
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved-1f1b": 2, "looped-bfs": 2}
AS_VIEW = dict.fromkeys(SCHEDULES, False) | {"views": True}
STEPS = 3  # buckets are rebuilt in the second


def scenario(name):
    schedule = name if name in SCHEDULES else "1f1b"
    pipeline = {"stages": STAGES, "schedule": schedule, "micro_batches": MICRO_BATCHES}
    return Scenario.model_validate(
        {
            "name": name,
            "model": {"family": "gpt", "layers": 4, "width": 16, "heads": 2, "ffn_width": 32, "vocabulary": 50},
            "batch": {"size": 8, "sequence_length": 8},
            "optimizer": {"name": "sgd"},
            "parallelism": {
                "dp": DP,
                "strategy": "ddp",
                "bucket_cap_mb": CAP_MB,
                "gradient_as_bucket_view": AS_VIEW[name],
                "pp": pipeline | {"virtual_stages": SCHEDULES[schedule]},
            },
            "hardware": {"profile": "cpu.json", "gpus": STAGES * DP},
        }
    )


def record(stage, log):
    """What the stage does, in order: (F, stage, micro-batch), (ready, stage, shape), (reduce, bytes), (end,)."""
    module, number = stage.submod, stage.stage_index

    def reduce(group, bucket):
        log.append(("reduce", bucket.buffer().nbytes))
        return allreduce_hook(group, bucket)

    module.register_comm_hook(module.process_group, reduce)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda tensor: log.append(("ready", number, tuple(tensor.shape))))
    stage.forward_one_chunk = told(stage.forward_one_chunk, "F", number, log)
    stage.backward_one_chunk = told(stage.backward_one_chunk, "B", number, log)


def told(method, kind, stage, log):
    def run(micro_batch, *args, **options):
        log.append((kind, stage, micro_batch))
        found = method(micro_batch, *args, **options)
        log.append(("end",))
        return found

    return run


def steps(name, rank):
    torch.manual_seed(0)
    parts = own_stages(scenario(name), rank, CPU)
    step = PipelineStep(parts, scenario(name), CPU)
    log = []
    for stage in step._stages:
        record(stage, log)
    step.run()
    gradients = {key: each.grad.clone() for part in parts.values() for key, each in part.named_parameters()}
    for _ in range(STEPS - 1):
        log.clear()
        step.run()
    return {"gradients": gradients, "log": log, "inputs": step.inputs}


def main(folder):
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    with telling(folder, rank), join("cpu", None, timeout_s=240):
        torch.save({name: steps(name, rank) for name in AS_VIEW}, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
