"""The calls from Python whose host cost the general calibration measures: one small example of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

BATCH, LENGTH, WIDTH, HEADS = 2, 16, 64, 4
CLASSES, CHANNELS, IMAGE = 32, 8, 8

MANY = 8

Make = Callable[["Tensors"], Callable[[], Any]]


class Tensors:
    """Makes fresh example tensors on one device, so that copies of a call share nothing."""

    def __init__(self, device: str) -> None:
        self.device = device

    def leaf(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Random numbers that want a gradient."""
        return torch.randn(shape, device=self.device).to(dtype).requires_grad_()

    def plain(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def rows(self) -> torch.Tensor:
        """[batch, length, width], as between the blocks of a transformer."""
        return self.leaf(BATCH, LENGTH, WIDTH)

    def heads(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[batch, heads, length, width of a head]."""
        return self.leaf(BATCH, HEADS, LENGTH, WIDTH // HEADS, dtype=dtype)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, device=self.device)

    def mask(self) -> torch.Tensor:
        return torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=self.device).triu(1)

    def images(self) -> torch.Tensor:
        return self.leaf(BATCH, CHANNELS, IMAGE, IMAGE)


def on_rows(function: Callable[[torch.Tensor], Any]) -> Make:
    """Return a call of one [batch, length, width] tensor."""

    def make(tensors: Tensors) -> Callable[[], Any]:
        x = tensors.rows()
        return lambda: function(x)

    return make


def on_two(function: Callable[[torch.Tensor, torch.Tensor], Any]) -> Make:
    """Return a call of two such tensors."""

    def make(tensors: Tensors) -> Callable[[], Any]:
        x, y = tensors.rows(), tensors.rows()
        return lambda: function(x, y)

    return make


def on_heads(function: Callable[[torch.Tensor], Any]) -> Make:
    def make(tensors: Tensors) -> Callable[[], Any]:
        x = tensors.heads()
        return lambda: function(x)

    return make


def _view_often(x: torch.Tensor) -> torch.Tensor:
    for _ in range(MANY // 2):
        x = x.view(BATCH * LENGTH, WIDTH).view(BATCH, LENGTH, WIDTH)
    return x


def _stack(leaves: int) -> Make:
    """Return a stack of ``MANY`` tensors, so many of which want a gradient."""

    def make(tensors: Tensors) -> Callable[[], Any]:
        stacked = [tensors.plain(WIDTH).requires_grad_(index < leaves) for index in range(MANY)]
        return lambda: torch.stack(stacked)

    return make


def _linear(bias: bool, dtype: torch.dtype = torch.float32) -> Make:
    def make(tensors: Tensors) -> Callable[[], Any]:
        x = tensors.leaf(BATCH, LENGTH, WIDTH, dtype=dtype)
        weight = tensors.leaf(WIDTH, WIDTH, dtype=dtype)
        shift = tensors.leaf(WIDTH, dtype=dtype) if bias else None
        return lambda: functional.linear(x, weight, shift)

    return make


def _flat_linear(tensors: Tensors) -> Callable[[], Any]:
    x, weight, shift = tensors.leaf(LENGTH, WIDTH), tensors.leaf(WIDTH, WIDTH), tensors.leaf(WIDTH)
    return lambda: functional.linear(x, weight, shift)


def _linear_of_data(tensors: Tensors) -> Callable[[], Any]:
    """Return a linear layer's call whose input wants no gradient, so that under autocast it is cast in every call."""
    x, weight = tensors.plain(BATCH, LENGTH, WIDTH), tensors.leaf(WIDTH, WIDTH)
    return lambda: functional.linear(x, weight)


def _addmm(tensors: Tensors) -> Callable[[], Any]:
    shift, x, weight = tensors.leaf(WIDTH), tensors.leaf(LENGTH, WIDTH), tensors.leaf(WIDTH, WIDTH)
    return lambda: torch.addmm(shift, x, weight)


def _matmul(function: Callable[[torch.Tensor, torch.Tensor], Any]) -> Make:
    def make(tensors: Tensors) -> Callable[[], Any]:
        x, y = tensors.heads(), tensors.leaf(BATCH, HEADS, WIDTH // HEADS, LENGTH)
        return lambda: function(x, y)

    return make


def _attention(dtype: torch.dtype, masked: bool = False, dropout: float = 0.0) -> Make:
    def make(tensors: Tensors) -> Callable[[], Any]:
        q, k, v = (tensors.heads(dtype) for _ in range(3))
        mask = ~tensors.mask() if masked else None
        return lambda: functional.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=not masked)

    return make


def _norm(function: Callable[..., Any], bias: bool) -> Make:
    def make(tensors: Tensors) -> Callable[[], Any]:
        x, weight = tensors.rows(), tensors.leaf(WIDTH)
        affine = (weight, tensors.leaf(WIDTH)) if bias else (weight,)
        return lambda: function(x, (WIDTH,), *affine)

    return make


def _embedding(tensors: Tensors) -> Callable[[], Any]:
    indices, table = tensors.integers(CLASSES, BATCH, LENGTH), tensors.leaf(CLASSES, WIDTH)
    return lambda: functional.embedding(indices, table)


def _cross_entropy(tensors: Tensors) -> Callable[[], Any]:
    logits, labels = tensors.leaf(BATCH * LENGTH, CLASSES), tensors.integers(CLASSES, BATCH * LENGTH)
    return lambda: functional.cross_entropy(logits, labels)


def _masked_fill(tensors: Tensors) -> Callable[[], Any]:
    scores, mask = tensors.leaf(BATCH, HEADS, LENGTH, LENGTH), tensors.mask()
    return lambda: scores.masked_fill(mask, -math.inf)


def _where(tensors: Tensors) -> Callable[[], Any]:
    scores, mask, other = tensors.leaf(BATCH, HEADS, LENGTH, LENGTH), tensors.mask(), tensors.plain()
    return lambda: torch.where(mask, scores, other)


def _inplace(function: Callable[[torch.Tensor], Any]) -> Make:
    """Autograd lets no leaf be changed, so the call changes a clone."""

    def make(tensors: Tensors) -> Callable[[], Any]:
        x = tensors.rows()
        return lambda: function(x.clone())

    return make


def _mask_calls(function: Callable[[torch.Tensor], Any]) -> Make:
    def make(tensors: Tensors) -> Callable[[], Any]:
        mask = tensors.mask()
        return lambda: function(mask)

    return make


def _without_inputs(function: Callable[[str], Any]) -> Make:
    def make(tensors: Tensors) -> Callable[[], Any]:
        return lambda: function(tensors.device)

    return make


def _convolution(bias: bool) -> Make:
    def make(tensors: Tensors) -> Callable[[], Any]:
        x, weight = tensors.images(), tensors.leaf(CHANNELS, CHANNELS, 3, 3)
        shift = tensors.leaf(CHANNELS) if bias else None
        return lambda: functional.conv2d(x, weight, shift, padding=1)

    return make


def _batch_norm(tensors: Tensors) -> Callable[[], Any]:
    x, weight, shift = tensors.images(), tensors.leaf(CHANNELS), tensors.leaf(CHANNELS)
    mean, variance = tensors.plain(CHANNELS), tensors.plain(CHANNELS).abs() + 1
    return lambda: functional.batch_norm(x, mean, variance, weight, shift, True, 0.1, 1e-5)


def _on_images(function: Callable[[torch.Tensor], Any]) -> Make:
    def make(tensors: Tensors) -> Callable[[], Any]:
        x = tensors.images()
        return lambda: function(x)

    return make


@dataclass(frozen=True)
class Example:
    """A call to measure: ``make`` gives a function whose last call it is, on tensors of its own."""

    title: str
    make: Make


def examples() -> list[Example]:
    """Return every example; those that make other calls first, or run several autograd nodes, come after examples of
    these.
    """
    found: dict[str, Make] = {
        "view": on_rows(lambda x: x.view(BATCH * LENGTH, WIDTH)),
        "many views": on_rows(_view_often),
        "transpose": on_rows(lambda x: x.transpose(1, 2)),
        "permute": on_rows(lambda x: x.permute(0, 2, 1)),
        "t": on_rows(lambda x: x.mT),
        "unsqueeze": on_rows(lambda x: x.unsqueeze(1)),
        "squeeze": on_rows(lambda x: x.squeeze(0)),
        "expand": on_rows(lambda x: x[:, None].expand(BATCH, HEADS, LENGTH, WIDTH)),
        "select": on_rows(lambda x: x[0]),
        "slice": on_rows(lambda x: x[..., : WIDTH // 2]),
        "slice rows": on_rows(lambda x: x[:, :-1]),
        "flatten": on_rows(lambda x: torch.flatten(x, 1)),
        "unflatten": on_rows(lambda x: x.unflatten(-1, (HEADS, -1))),
        "split": on_rows(lambda x: x.split(WIDTH // 2, -1)),
        "chunk": on_rows(lambda x: x.chunk(2, -1)),
        "reshape": on_rows(lambda x: x.reshape(BATCH, LENGTH, HEADS, -1)),
        "reshape copy": on_heads(lambda x: x.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)),
        "detach": on_rows(lambda x: x.detach()),
        "add": on_two(lambda x, y: x + y),
        "add number": on_rows(lambda x: x + 1e-5),
        "number add": on_rows(lambda x: 1.0 + x),
        "sub": on_two(lambda x, y: x - y),
        "number sub": on_rows(lambda x: 1.0 - x),
        "mul": on_two(lambda x, y: x * y),
        "mul number": on_rows(lambda x: x * 0.5),
        "number mul": on_rows(lambda x: 0.5 * x),
        "div": on_two(lambda x, y: x / y),
        "div number": on_rows(lambda x: x / 8.0),
        "neg": on_rows(lambda x: -x),
        "pow": on_rows(lambda x: x.pow(2)),
        "torch.pow": on_rows(lambda x: torch.pow(x, 3.0)),
        "square": on_rows(lambda x: x**2),
        "mean": on_rows(lambda x: x.mean(-1, keepdim=True)),
        "sum": on_rows(lambda x: x.sum()),
        "sum rows": on_rows(lambda x: x.sum(-1)),
        "max": on_rows(lambda x: x.amax(-1)),
        "rsqrt": on_rows(torch.rsqrt),
        "sqrt": on_rows(torch.sqrt),
        "exp": on_rows(torch.exp),
        "log": on_rows(torch.log),
        "erf": on_rows(torch.erf),
        "tanh": on_rows(torch.tanh),
        "sigmoid": on_rows(torch.sigmoid),
        "cos": on_rows(lambda x: x.cos()),
        "sin": on_rows(lambda x: x.sin()),
        "clone": on_rows(lambda x: x.clone()),
        "contiguous copy": on_heads(lambda x: x.transpose(1, 2).contiguous()),
        "cast": on_rows(lambda x: x.to(torch.bfloat16)),
        "float": on_rows(lambda x: x.half().float()),
        "relu": on_rows(functional.relu),
        "gelu": on_rows(functional.gelu),
        "gelu tanh": on_rows(lambda x: functional.gelu(x, approximate="tanh")),
        "silu": on_rows(functional.silu),
        "softmax": on_heads(lambda x: torch.softmax(x, -1)),
        "functional softmax": on_heads(lambda x: functional.softmax(x, -1)),
        "log_softmax": on_heads(lambda x: functional.log_softmax(x, -1)),
        "dropout": on_rows(lambda x: functional.dropout(x, 0.1, True)),
        "masked_fill": _masked_fill,
        "where": _where,
        "cat": on_two(lambda x, y: torch.cat((x, y), -1)),
        "stack": on_two(lambda x, y: torch.stack((x, y))),
        "stack of many": _stack(MANY),
        "stack of one": _stack(1),
        "matmul": _matmul(lambda x, y: x @ y),
        "torch.matmul": _matmul(torch.matmul),
        "linear": _linear(False),
        "linear bias": _linear(True),
        "linear flat": _flat_linear,
        "linear of data": _linear_of_data,
        "linear bf16": _linear(False, torch.bfloat16),
        "linear bias bf16": _linear(True, torch.bfloat16),
        "addmm": _addmm,
        "layer_norm": _norm(functional.layer_norm, True),
        "rms_norm": _norm(functional.rms_norm, False),
        "embedding": _embedding,
        "cross_entropy": _cross_entropy,
        "attention": _attention(torch.float32),
        "attention dropout": _attention(torch.float32, dropout=0.1),
        "attention masked": _attention(torch.float32, masked=True),
        "attention bf16": _attention(torch.bfloat16),
        "attention bf16 dropout": _attention(torch.bfloat16, dropout=0.1),
        "relu_": _inplace(lambda x: functional.relu(x, inplace=True)),
        "add_": _inplace(lambda x: x.add_(1.0)),
        "conv2d": _convolution(False),
        "conv2d bias": _convolution(True),
        "batch_norm": _batch_norm,
        "max_pool2d": _on_images(lambda x: functional.max_pool2d(x, 2, 2)),
        "adaptive_avg_pool2d": _on_images(lambda x: functional.adaptive_avg_pool2d(x, (1, 1))),
        "arange": _without_inputs(lambda device: torch.arange(LENGTH, device=device)),
        "ones": _without_inputs(lambda device: torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device)),
        "zeros": _without_inputs(lambda device: torch.zeros(LENGTH, device=device)),
        "full": _without_inputs(lambda device: torch.full((LENGTH, LENGTH), 1.0, device=device)),
        "triu": _mask_calls(lambda mask: mask.triu(1)),
        "invert": _mask_calls(lambda mask: ~mask),
        "and": _mask_calls(lambda mask: mask & mask),
        "all": _mask_calls(lambda mask: mask.all()),
        "cumsum": _mask_calls(lambda mask: mask.cumsum(-1)),
    }
    return [Example(title, make) for title, make in found.items()]
