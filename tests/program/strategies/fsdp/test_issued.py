"""What was recorded of torch's fully_shard is what it issues."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.program.strategies.fsdp.fsdp_scripts import variant_of
from tests.program.strategies.fsdp.issued import issued, lines_of
from tests.program.strategies.fsdp.variants import ALL, CLIPPED, OFFLOADED, SCALED

DRAW = Random(18)
FEW = [
    *DRAW.sample(ALL, 5),
    *DRAW.sample(OFFLOADED, 3),
    *(fields | {"clip": True} for fields in DRAW.sample(CLIPPED, 2)),
    *(fields | {"clip": True, "scaled": True} for fields in DRAW.sample(SCALED, 2)),
]


@pytest.mark.parametrize("fields", FEW, ids=str)
def test_torch_issues_what_was_recorded(fields: dict[str, Any]) -> None:
    """Else record it again: ``python -m tests.program.strategies.fsdp.issued``."""
    variant = variant_of(fields)
    assert issued(variant) == lines_of(variant)
