"""The colours of every picture: one meaning has one colour, whichever picture it stands in.

Colours that stand together in a picture differ for readers with any of the three colour deficiencies; a test simulates
them. Source of most: Paul Tol, Colour schemes (2021), bright and muted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from perfmodel.trace.trace import StorageKind

OPTIMIZER = "#AA3377"
FORWARD = "#66CCEE"
BACKWARD = "#228833"
COMMUNICATION = "#DD3311"
WAITING_FOR_RANK = "#F7C9C9"
HOST = "#444444"
OTHER = "#999999"
OUTSIDE = "#DDDDDD"  # of what a picture is about: another step, or no step
CAPACITY = "#BB2222"
INK = "#222222"
GRID = "#E5E5E5"
ACCURATE = "#EEEEEE"  # the band of small errors
IDLE = "#F4F4F4"

# Classes of kernels that do the same sort of work share a family and its colour.
KERNEL_FAMILIES = MappingProxyType(
    {
        "gemm": "#4477AA",
        "attention": "#332288",
        "convolution": "#88CCEE",
        "pointwise": "#DDCC77",
        "reduction, normalization": "#117733",
        "copy, indexing": "#EE8866",
        "optimizer": OPTIMIZER,
        "other": OTHER,
    }
)
FAMILY_OF_CLASS = {
    "gemm": "gemm",
    "attention_forward": "attention",
    "attention_backward": "attention",
    "convolution_forward": "convolution",
    "convolution_backward": "convolution",
    "pointwise": "pointwise",
    "pointwise_transcendental": "pointwise",
    "dropout": "pointwise",
    "row_forward": "reduction, normalization",
    "row_backward": "reduction, normalization",
    "column": "reduction, normalization",
    "reduction": "reduction, normalization",
    "full_reduction": "reduction, normalization",
    "scan": "reduction, normalization",
    "batch_norm": "reduction, normalization",
    "pooling": "reduction, normalization",
    "copy": "copy, indexing",
    "cat": "copy, indexing",
    "fill": "copy, indexing",
    "embedding_forward": "copy, indexing",
    "embedding_backward": "copy, indexing",
    "index": "copy, indexing",
    "optimizer": "optimizer",
    "sort": "other",
    "fft": "other",
    "linear_algebra": "other",
    "other": "other",
}
PHASES = MappingProxyType(
    {
        "forward": FORWARD,
        "backward": BACKWARD,
        "backward_input": "#EE8866",
        "backward_weight": "#CCBB44",
        "optimizer": OPTIMIZER,
    }
)
BREAKDOWN = MappingProxyType(
    {
        "forward_s": FORWARD,
        "backward_s": BACKWARD,
        "optimizer_s": OPTIMIZER,
        "exposed_communication_s": COMMUNICATION,
        "bubble_s": WAITING_FOR_RANK,
        "host_bound_s": HOST,
    }
)
# What forward makes has forward's colour, what backward makes backward's, and so with the optimizer.
STORAGE = MappingProxyType(
    {
        StorageKind.PARAMETER: "#222255",
        StorageKind.BUFFER: "#DDCC77",
        StorageKind.INPUT: OTHER,
        StorageKind.GRADIENT: BACKWARD,
        StorageKind.OPTIMIZER_STATE: OPTIMIZER,
        StorageKind.ACTIVATION: FORWARD,
        StorageKind.TEMPORARY: "#EE8866",
    }
)
SIDES = MappingProxyType({"measured": INK, "predicted": "#EE7733"})
SIDE_MARKERS = MappingProxyType({"measured": "o", "predicted": "s"})
SIDE_STYLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {  # of lines: a measured one can be seen below a predicted one that equals it
        "measured": {"marker": "o", "markersize": 13, "linewidth": 4},
        "predicted": {"marker": "s", "markersize": 7, "linewidth": 2},
    }
)
LAYOUTS = MappingProxyType({"one GPU": "#4477AA", "data parallel": "#EE8866", "ZeRO": "#228833", "pipeline": "#AA3377"})
LAYOUT_MARKERS = MappingProxyType({"one GPU": "o", "data parallel": "s", "ZeRO": "^", "pipeline": "D"})
LINKS = MappingProxyType(
    {"nvlink": "#228833", "pcie": "#4477AA", "host": "#999999", "smp": "#AA3377", "network": "#DD6611"}
)
TOPOLOGY_BOXES = MappingProxyType(
    {
        "gpu": "#CFE8D5",
        "nvswitch": "#A8D5B3",
        "pcie_switch": "#CFDDEC",
        "host_bridge": "#DDDDDD",
        "cpu": "#EBD3E2",
        "nic": "#FBDCC6",
        "node": "#EEEEEE",
        "network": "#F7C6A0",
    }
)
SERIES = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#EE8866", "#44BB99")  # of no meaning


def family_of(kind: str) -> str:
    """The family of a cost class (:data:`~perfmodel.cost.kernels.classify.CLASSES`).

    >>> family_of("attention_backward"), family_of("other")
    ('attention', 'other')
    """
    return FAMILY_OF_CLASS.get(kind, "other")


def kernel_colour(kind: str) -> str:
    """The colour of a cost class.

    >>> kernel_colour("gemm")
    '#4477AA'
    """
    return KERNEL_FAMILIES[family_of(kind)]


def families(kinds: Iterable[str]) -> dict[str, str]:
    """The colours of these classes' families, in the palette's order.

    >>> families(["optimizer", "row_forward", "row_backward"])
    {'reduction, normalization': '#117733', 'optimizer': '#AA3377'}
    """
    present = {family_of(kind) for kind in kinds}
    return {family: colour for family, colour in KERNEL_FAMILIES.items() if family in present}


def phase_colour(phase: str) -> str:
    """The colour of a phase; what is neither forward nor backward comes with the optimizer.

    >>> phase_colour("backward") == BACKWARD, phase_colour("zero_grad") == OPTIMIZER
    (True, True)
    """
    return PHASES.get(phase, OPTIMIZER)
