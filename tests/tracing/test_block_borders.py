"""Where the backward of blocks begins and ends, held against which gradients become ready in between."""

from __future__ import annotations

from typing import Any

import pytest

from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.trace import EventKind
from perfmodel.tracing.step import trace_step

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"family": "gpt", "size": "tiny"},
    "gpt2": {"family": "gpt2", "layers": 2, "width": 16, "heads": 2, "ffn_width": 32, "vocabulary": 50},
    "bert": {"family": "bert", "layers": 2, "width": 16, "heads": 2, "ffn_width": 32, "vocabulary": 50},
}
BLOCKS = {"gpt": "layers", "gpt2": "transformer.h", "bert": "bert.encoder.layer"}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_blocks_gradients_become_ready_between_its_borders(family: str, checkpointing: str) -> None:
    scenario = Scenario.model_validate(
        {
            "model": MODELS[family],
            "batch": {"size": 2, "sequence_length": 8},
            "training": {"activation_checkpointing": checkpointing},
            "hardware": {"profile": "x"},
        }
    )
    trace = trace_step(scenario)
    first, last = f"{BLOCKS[family]}.0", f"{BLOCKS[family]}.1"
    for events in (trace.first, trace.steady):
        inside: list[str] = []
        borders, ready = [], []
        for kind, number in zip(events.kind.tolist(), events.a.tolist(), strict=True):
            if kind == EventKind.BLOCK_ENTER:
                borders.append(("enter", trace.modules[number][0]))
                inside = [*inside, trace.modules[number][0]][-1:]
            elif kind == EventKind.BLOCK_EXIT:
                borders.append(("exit", trace.modules[number][0]))
                inside = []
            elif kind == EventKind.GRAD_READY:
                ready.append((trace.parameters[number].name, inside[0] if inside else ""))
        assert list(dict.fromkeys(borders)) == [  # a model may return loss and logits
            ("enter", ""),
            ("enter", last),
            ("exit", last),
            ("enter", first),
            ("exit", first),
        ]
        for name, block in ready:
            assert name.startswith(f"{block}.") if block else not name.startswith(f"{BLOCKS[family]}.")
