"""Divisors against torch's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

from perfmodel.program.strategies.fsdp.gradient_divisor import divisors


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("shards", "copies"), [(2, 1), (3, 1), (4, 1), (6, 1), (8, 1), (16, 1), (2, 2), (8, 4)])
def test_divisors_are_torchs(dtype: str, shards: int, copies: int) -> None:
    sharing: Any = SimpleNamespace(size=lambda: shards)
    replicas: Any = None if copies == 1 else SimpleNamespace(size=lambda: copies)
    before, after, *_ = _get_gradient_divide_factors(sharing, replicas, getattr(torch, dtype), "cuda")
    assert divisors(dtype, shards * copies) == (before or 1, after or 1)
