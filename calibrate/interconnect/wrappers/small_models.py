"""Steps of small models whose host seconds tell what a wrapper adds to a step."""

from __future__ import annotations

import torch
from torch import nn

from calibrate.host.reference import HostReference, synchronize
from calibrate.timing.host_stopwatch import timed
from calibrate.timing.paired import Timings, paired_samples

ROUNDS, WARM_UP = 25, 3
SETTLING = 2  # more steps that do not count: wrappers set themselves up in the first, and DDP rebuilds its buckets
WIDTH = 16


def linears(count: int, device: str) -> nn.Sequential:
    """Return so many layers of one small parameter each."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))).to(device)


def step_seconds(model: nn.Module, device: str, reference: HostReference) -> tuple[list[float], list[float]]:
    """Return host seconds of forward and of backward, each begun with the device idle, at the reference's speed."""
    x = torch.randn(2, WIDTH, device=device)

    def one_round() -> Timings:
        model.zero_grad()
        return step()

    def step() -> Timings:
        synchronize(device)
        forward_s, result = timed(lambda: model(x))
        yield "forward", forward_s
        loss = result.sum()
        synchronize(device)
        yield "backward", timed(loss.backward)[0]

    samples_s = paired_samples(reference, one_round, rounds=ROUNDS, warm_up=WARM_UP + SETTLING)
    return samples_s["forward"], samples_s["backward"]
