"""Operator calls: tensors, operators, and their text form. No torch in here.

A tensor is written ``float32[16,128]``, with strides in braces where it is not contiguous
(``float32[768,3072]{1,768}``), and ``@cpu`` where it does not live on the device.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from perfmodel.errors import PerfModelError
from perfmodel.units import DTYPE_BYTES


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides (elements) of a row-major tensor, as torch computes them.

    >>> contiguous_stride((2, 3, 4))
    (12, 4, 1)
    """
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


class TensorSpec(NamedTuple):
    """A tensor's shape (elements), stride (elements), dtype name without ``torch.``, and ``cuda`` or ``cpu``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str = "cuda"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Return the bytes of the elements as addressed, numel x element size."""
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def touched_bytes(self) -> int:
        """Return the bytes of distinct elements: broadcast (stride 0) dimensions count once."""
        distinct = math.prod(n for n, s in zip(self.shape, self.stride, strict=True) if s != 0)
        return (distinct if self.numel else 0) * DTYPE_BYTES[self.dtype]

    @property
    def is_contiguous(self) -> bool:
        expected = contiguous_stride(self.shape)
        return all(n == 1 or s == e for n, s, e in zip(self.shape, self.stride, expected, strict=True))

    @property
    def text(self) -> str:
        stride = "" if self.stride == contiguous_stride(self.shape) else "{" + ",".join(map(str, self.stride)) + "}"
        device = "" if self.device == "cuda" else f"@{self.device}"
        return f"{self.dtype}[{','.join(map(str, self.shape))}]{stride}{device}"

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        """Return the tensor of a :attr:`text`.

        >>> TensorSpec.parse("float32[768,3072]{1,768}").stride
        (1, 768)
        """
        match = _TENSOR.fullmatch(text)
        if match is None or match["dtype"] not in DTYPE_BYTES:
            raise PerfModelError(
                f"tensor text must read dtype[shape]{{stride}}@device (got {text!r:.80}). Trace it again."
            )
        shape = _integers(match["shape"])
        stride = contiguous_stride(shape) if match["stride"] is None else _integers(match["stride"])
        tensor = cls(shape, stride, match["dtype"], match["device"] or "cuda")
        if len(shape) != len(stride) or tensor.bytes > MOST_BYTES:
            raise PerfModelError(
                f"a tensor must have a stride for each size, and at most {MOST_BYTES} bytes (got {text!r:.80}). Trace "
                "it again."
            )
        return tensor


MOST_BYTES = 2**60  # of one tensor
LONGEST_SIZE = 19  # digits
_TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[0-9,]*)\](?:\{(?P<stride>[0-9,]*)\})?(?:@(?P<device>\w+))?")


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(digits[: LONGEST_SIZE + 1]) for digits in text.split(",") if digits)


MOST_TENSORS = 10**6  # of one operator call

# Tensors, numbers, None, text (dtypes, layouts and devices as 'torch.bfloat16', 'cuda') and tuples of these.
Argument = TensorSpec | bool | int | float | str | None | tuple["Argument", ...]


@dataclass(frozen=True)
class Operation:
    """One distinct operator call.

    Attributes
    ----------
    name : str
        Full aten name with overload, ``aten.mm.default``.
    inputs : tuple
        Positional arguments.
    keywords : tuple
        Keyword arguments, sorted by name.
    outputs : tuple of TensorSpec
        The tensors returned; an in-place operator returns its first input's.
    runs_on_device : bool
        False for views, bookkeeping and work on CPU tensors, which launch nothing.
    same : tuple of int
        For each of :meth:`input_tensors` the first of them that is the same view of the same storage (the second of
        ``mul(x, x)``: 0); empty where all differ.
    """

    name: str
    inputs: tuple[Argument, ...] = ()
    keywords: tuple[tuple[str, Argument], ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    runs_on_device: bool = True
    same: tuple[int, ...] = ()
    _hash: int = field(default=0, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.name, self.inputs, self.keywords, self.outputs, self.same)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def base_name(self) -> str:
        """Return the name without namespace and overload: ``mm`` of ``aten.mm.default``."""
        return self.name.split(".")[1]

    def input_tensors(self) -> list[TensorSpec]:
        """Return every tensor among the arguments, lists flattened, in order."""
        tensors: list[TensorSpec] = []
        _collect(self.inputs, tensors)
        _collect(tuple(value for _, value in self.keywords), tensors)
        return tensors

    def distinct_inputs(self) -> list[TensorSpec]:
        """Return the input tensors without the repetitions of one that is passed more than once."""
        tensors = self.input_tensors()
        return [tensors[i] for i, first in enumerate(self.same) if i == first] if self.same else tensors


def _collect(argument: Argument, tensors: list[TensorSpec]) -> None:
    if isinstance(argument, TensorSpec):
        tensors.append(argument)
    elif isinstance(argument, tuple):
        for item in argument:
            _collect(item, tensors)


def encode_argument(argument: Argument) -> object:
    """Return the JSON form of an argument: tensors as ``{"t": text}``, tuples as lists, the rest as it is."""
    if isinstance(argument, TensorSpec):
        return {"t": argument.text}
    if isinstance(argument, tuple):
        return [encode_argument(item) for item in argument]
    if isinstance(argument, float) and not math.isfinite(argument):
        return {"f": repr(argument)}
    return argument


@lru_cache(maxsize=4096)  # the lists of an optimizer say the same few hundreds of texts over and over
def _parsed(text: str) -> TensorSpec:
    return TensorSpec.parse(text)


def decode_argument(value: object) -> Argument:
    """Return the argument of a JSON form, see :func:`encode_argument`."""
    if isinstance(value, dict):
        return _parsed(value["t"]) if "t" in value else float(value["f"])
    if isinstance(value, list):
        return tuple(decode_argument(item) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise PerfModelError(
        f"operator argument must be a tensor, number, text or list (got {value!r:.80}). Trace it again."
    )


def encode_operation(operation: Operation) -> list[object]:
    """Return the JSON form: [name, inputs, keywords, outputs, runs_on_device, same].

    ``same`` is written as its length and its :func:`repeated_runs`.
    """
    return [
        operation.name,
        encode_argument(operation.inputs),
        {key: encode_argument(value) for key, value in operation.keywords},
        [spec.text for spec in operation.outputs],
        operation.runs_on_device,
        _encode_runs(operation.same),
    ]


def repeated_runs(same: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Return repetitions as (position, position of the first, how many in a row).

    >>> repeated_runs((0, 1, 2, 0, 1, 5))
    [(3, 0, 2)]
    """
    runs: list[tuple[int, int, int]] = []
    for position, first in enumerate(same):
        if position == first:
            continue
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (position, first):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((position, first, 1))
    return runs


def _encode_runs(same: tuple[int, ...]) -> list[list[int]]:
    return [[len(same)], *map(list, repeated_runs(same))] if same else []


def _decode_runs(rows: list[list[int]]) -> tuple[int, ...]:
    if not rows:
        return ()
    same = list(range(min(rows[0][0], MOST_TENSORS)))
    for position, first, count in rows[1:]:
        if not 0 <= first < position <= position + count <= len(same):
            raise ValueError(f"repetition {[position, first, count]} of {len(same)} tensors")
        same[position : position + count] = range(first, first + count)
    return tuple(same)


def decode_operation(row: list[object]) -> Operation:
    """Return the operation of a JSON form, see :func:`encode_operation`."""
    name, inputs, keywords, outputs, runs_on_device, same = row
    if "." not in str(name):
        raise ValueError(f"{str(name)[:80]!r} without a namespace")
    return Operation(
        str(name),
        decode_argument(inputs),  # type: ignore[arg-type]
        tuple((key, decode_argument(value)) for key, value in keywords.items()),  # type: ignore[attr-defined]
        tuple(_parsed(text) for text in outputs),  # type: ignore[attr-defined]
        bool(runs_on_device),
        _decode_runs(same),  # type: ignore[arg-type]
    )
