"""Steps of small models whose host seconds tell what a wrapper adds to a step."""

from __future__ import annotations

import torch
from torch import nn

from calibrate.host.reference import HostReference, synchronize
from calibrate.timing.host_stopwatch import timed

ROUNDS, WARM_UP = 25, 3
SETTLING = 2  # more steps that do not count: wrappers set themselves up in the first, and DDP rebuilds its buckets
WIDTH = 16


def linears(count: int, device: str) -> nn.Sequential:
    """So many layers of one small parameter each."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))).to(device)


def step_seconds(model: nn.Module, device: str, reference: HostReference) -> tuple[list[float], list[float]]:
    """Host seconds of forward and of backward, each begun with the device idle, at the reference's speed."""
    x = torch.randn(2, WIDTH, device=device)
    forward_s: list[float] = []
    backward_s: list[float] = []
    for index in range(WARM_UP + SETTLING + ROUNDS):
        model.zero_grad()
        reference.beat()
        synchronize(device)
        seconds, result = timed(lambda: model(x))
        loss = result.sum()
        synchronize(device)
        backward, _ = timed(loss.backward)
        if index >= WARM_UP + SETTLING:
            reference.note(forward_s, seconds)
            reference.note(backward_s, backward)
    reference.beat()
    return forward_s, backward_s
