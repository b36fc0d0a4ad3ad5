"""Recorded CUDA steps (tests/data/cuda_steps) and traces, in one form that can be compared as whole lists."""

import gzip
import json
from functools import cache

from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.operation import TensorSpec
from perfmodel.trace.trace import EventKind
from perfmodel.tracing.step import trace_step
from tests.places import TESTS

DATA = TESTS / "data" / "cuda_steps"

_GPT = {"family": "gpt", "layers": 2, "width": 768, "heads": 12, "ffn_width": 3072}
_GPT2 = _GPT | {"family": "gpt2"}
_LLAMA = {"family": "llama", "layers": 2, "width": 1024, "heads": 16, "kv_heads": 4, "ffn_width": 2816}

SCENARIOS = {
    "gpt-small2-fp32": {"model": _GPT, "batch": {"size": 4, "sequence_length": 128}},
    "gpt-small2-amp": {"model": _GPT, "batch": {"size": 4, "sequence_length": 128}, "precision": "amp-bf16"},
    "gpt2-2layer-fp32": {"model": _GPT2, "batch": {"size": 2, "sequence_length": 256}},
    "gpt2-2layer-amp": {"model": _GPT2, "batch": {"size": 2, "sequence_length": 256}, "precision": "amp-bf16"},
    "llama-2layer-bf16": {
        "model": _LLAMA,
        "batch": {"size": 2, "sequence_length": 512},
        "precision": "bf16",
        "optimizer": {"implementation": "fused"},
    },
    "bert-2layer-amp": {
        "model": _GPT | {"family": "bert"},
        "batch": {"size": 4, "sequence_length": 128},
        "precision": "amp-bf16",
    },
    "vgg16-fp32": {
        "model": {"family": "vgg16"},
        "batch": {"size": 4},
        "optimizer": {"name": "sgd", "momentum": 0.9},
    },
    "resnet50-amp-channels_last": {
        "model": {"family": "resnet50"},
        "batch": {"size": 4},
        "precision": "amp-bf16",
        "optimizer": {"name": "sgd"},
        "training": {"memory_format": "channels_last"},
    },
}


def scenario_of(keys):
    return Scenario(hardware={"profile": "none"}, **keys)


@cache
def traced(name):
    return trace_step(scenario_of(SCENARIOS[name]))


@cache
def recorded(name):
    return json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))


def operations_of(trace, events, phase=None):
    """(phase, Operation) of every operator, in order."""
    return [
        (segment.phase, trace.operations[events.a[index]])
        for segment in events.segments
        for index in range(segment.start, segment.stop)
        if events.kind[index] == EventKind.OP and phase in (None, segment.phase)
    ]


def names_of(trace, events, phase=None):
    """``mm`` and so on, of every operator of a phase."""
    return [operation.base_name for _, operation in operations_of(trace, events, phase)]


def comparable(trace, recording_ops):
    """Traced and recorded operators as two lists of (phase, name, inputs, outputs), for comparison.

    Recordings flatten tensor lists and do not say which inputs were keywords, show the engine's sums of gradients out
    of place, and hold the profiler's own operators. The scalars of two AdamW operators hold the step number. Older
    versions of checkpointing make empty tensors on the host.
    """
    mine = [(phase, op) for phase, op in operations_of(trace, trace.steady) if not _is_placeholder(op.name, op.outputs)]
    theirs = [
        op
        for op in recording_ops
        if not op["op"].startswith(("prim.", "profiler.")) and not _is_placeholder(op["op"], op["out"])
    ]
    traced_calls, recorded_calls = [], []
    for index, (phase, operation) in enumerate(mine):
        positional = [_text(value) for value in _flat(operation.inputs)]
        keywords = sorted(_text(value) for _, value in operation.keywords for value in _flat(value))
        name = _out_of_place(phase, operation.name)
        outputs = [] if operation.base_name.startswith("_f") and name.endswith("_") else operation.outputs
        traced_calls.append((phase, name, _kept(name, positional + keywords), [spec.text for spec in outputs]))
        if index < len(theirs):
            op = theirs[index]
            given = [_text(value) for value in op["in"]]
            given = given[: len(positional)] + sorted(given[len(positional) :])
            name = _out_of_place(op["phase"], op["op"])
            recorded_calls.append((op["phase"], name, _kept(op["op"], given), [_text(spec) for spec in op["out"]]))
    return traced_calls, recorded_calls + [(op["phase"], op["op"]) for op in theirs[len(mine) :]]


def _is_placeholder(name, outputs):
    return name == "aten.empty.memory_format" and [_text(spec) for spec in outputs] == ["float32[0]@cpu"]


def _out_of_place(phase, name):
    return "aten.add.Tensor" if (phase, name) == ("backward", "aten.add_.Tensor") else name


def _kept(name, inputs):
    if name.startswith(("aten._foreach_div_", "aten._foreach_addcdiv_")):
        return [text for text in inputs if "[" in text]
    return inputs


def _text(value):
    if isinstance(value, TensorSpec):
        return value.text
    if isinstance(value, dict):
        return TensorSpec(tuple(value["shape"]), tuple(value["stride"]), value["dtype"], value["device"]).text
    return "cuda" if value == "cuda:0" else repr(value) if not isinstance(value, str) else value


def _flat(value):
    if isinstance(value, (tuple, list)) and not isinstance(value, TensorSpec):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def traced_requests(trace, which):
    """("alloc" or "free", bytes) of the first or the steady step, in order."""
    size_of = {storage.id: storage.bytes for storage in trace.persistent}
    requests = {"first": [], "steady": []}
    for step, events in (("first", trace.first), ("steady", trace.steady)):
        for kind, a, b in zip(events.kind.tolist(), events.a.tolist(), events.b.tolist(), strict=True):
            if kind == EventKind.ALLOC:
                size_of[a] = b
                requests[step].append(("alloc", b))
            elif kind == EventKind.FREE:
                requests[step].append(("free", size_of[a]))
    return requests[which]


def recorded_requests(recording, step):
    """The same of a recorded step; -1 is everything before the first."""
    events, starts = recording["memory"]["events"], recording["memory"]["step_starts_at_event"]
    first, last = (0, starts[0]) if step < 0 else (starts[step], starts[step + 1])
    size_of, requests = {}, []
    for index, (action, address, size, _) in enumerate(events[:last]):
        if action == "alloc":
            size_of[address] = size
        if index >= first and action in ("alloc", "free_requested"):
            requests.append(("alloc" if action == "alloc" else "free", size_of[address]))
    return requests
