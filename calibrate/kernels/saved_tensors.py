"""Which forward makes the tensors that a backward operator needs, and what stands in for CUDA's operators on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Saved:
    """forward: operator to run first, with the backward's arguments of equal name.

    renamed: forward argument -> backward argument. constants: forward arguments that backward lacks. outputs: backward
    argument -> position among forward's results.
    """

    forward: str
    outputs: Mapping[str, int]
    renamed: Mapping[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)


_ATTENTION_RESULTS = ("out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
_ATTENTION_OUTPUTS = {name: i for i, name in enumerate(_ATTENTION_RESULTS)}

# by base name of the backward operator
SAVED: dict[str, Saved] = {
    "_scaled_dot_product_cudnn_attention_backward": Saved(
        "aten._scaled_dot_product_cudnn_attention.default", _ATTENTION_OUTPUTS, constants={"compute_log_sumexp": True}
    ),
    "_scaled_dot_product_flash_attention_backward": Saved(
        "aten._scaled_dot_product_flash_attention.default", _ATTENTION_OUTPUTS
    ),
    "_scaled_dot_product_efficient_attention_backward": Saved(
        "aten._scaled_dot_product_efficient_attention.default",
        {"out": 0, "logsumexp": 1, "philox_seed": 2, "philox_offset": 3},
        constants={"compute_log_sumexp": True},
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Saved(
        "aten._scaled_dot_product_flash_attention_for_cpu.default", {"out": 0, "logsumexp": 1}
    ),
    "cudnn_batch_norm_backward": Saved(
        "aten.cudnn_batch_norm.default",
        {"save_mean": 1, "save_var": 2, "reserveSpace": 3},
        {"bias": "weight"},
        {"training": True, "exponential_average_factor": 0.1},
    ),
    "max_pool2d_with_indices_backward": Saved("aten.max_pool2d_with_indices.default", {"indices": 1}),
}


@dataclass(frozen=True)
class Twin:
    """The CPU's operator for the same work.

    taken: arguments of equal name. renamed: its argument -> CUDA's. constants: what CUDA's call does not say or the CPU
    cannot do. defaults: where CUDA's call leaves it out.
    """

    name: str
    taken: tuple[str, ...]
    renamed: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by the twin's names."""
        taken = dict(self.defaults) | {name: bound[name] for name in self.taken if name in bound}
        return taken | {name: bound[old] for name, old in self.renamed.items() if old in bound} | dict(self.constants)


_CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
_CPU_FORWARD = Twin(
    f"{_CPU_ATTENTION}.default",
    ("query", "key", "value", "is_causal", "scale"),
    {"attn_mask": "attn_bias"},
    {"dropout_p": 0.0},
)
_CPU_BACKWARD = Twin(
    f"{_CPU_ATTENTION}_backward.default",
    ("grad_out", "query", "key", "value", "out", "logsumexp", "is_causal", "scale"),
    {"attn_mask": "attn_bias", "grad_out": "grad_out_"},
    {"dropout_p": 0.0},
    {"is_causal": False},
)

# by base name; the CPU's fused attention has no dropout, so neither has the twin
CPU_TWINS: dict[str, Twin] = {
    **{f"_scaled_dot_product_{backend}_attention": _CPU_FORWARD for backend in ("cudnn", "flash", "efficient")},
    **{
        f"_scaled_dot_product_{backend}_attention_backward": _CPU_BACKWARD
        for backend in ("cudnn", "flash", "efficient")
    },
    "cudnn_batch_norm": Twin(
        "aten.native_batch_norm.default",
        ("input", "weight", "bias", "running_mean", "running_var", "training"),
        {"momentum": "exponential_average_factor", "eps": "epsilon"},
    ),
    "cudnn_batch_norm_backward": Twin(
        "aten.native_batch_norm_backward.default",
        ("input", "weight", "running_mean", "running_var", "save_mean"),
        {"grad_out": "grad_output", "save_invstd": "save_var", "eps": "epsilon"},
        {"train": True, "output_mask": [True, True, True]},
    ),
}
