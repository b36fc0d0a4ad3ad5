"""What torch's fully_shard issues in the variants, recorded once in tests/data, a line each as fsdp_scripts spells it.

``python -m tests.program.strategies.fsdp.issued`` records it again, with the torch that is installed: for new variants,
another torch, or lines that are spelt otherwise. test_issued.py checks a few of them against torch itself.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from typing import Any

import torch

from tests.places import TESTS
from tests.program.strategies.fsdp.fsdp_scripts import recorded, torchs, variant_of
from tests.program.strategies.fsdp.recorded_fsdp import Variant
from tests.program.strategies.fsdp.variants import recorded_variants

PATH = TESTS / "data" / "fully_shard.json.gz"
PHASES = {"forward and backward": ("forward", "backward")} | {
    phase: (phase,) for phase in ("zero_grad", "clip", "optimizer")
}

Steps = list[dict[str, list[str]]]  # the first step and the second: lines by what they are of


def lines_of(variant: Variant) -> Steps:
    """Return what torch issues now."""
    return [{name: torchs(step, *phases) for name, phases in PHASES.items()} for step in recorded(variant)]


def issued(variant: Variant) -> Steps:
    """Return what torch issued when it was recorded."""
    steps: Steps = _file()["variants"][str(variant)]
    return steps


@cache
def _file() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(gzip.decompress(PATH.read_bytes()))
    return data


def record() -> None:
    """Record every variant."""
    variants = {str(variant): lines_of(variant) for variant in map(variant_of, recorded_variants())}
    text = json.dumps({"torch": torch.__version__, "variants": variants}, indent=0)
    PATH.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    record()
