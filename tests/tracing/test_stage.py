"""Parts of a pipeline, traced: against the whole model's trace, against torch's own stages, and memory."""

from collections import Counter
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from perfmodel.errors import PerfModelError
from perfmodel.models.build import build_module, make_inputs
from perfmodel.models.stages import cut, loss_of
from perfmodel.scenario.scenario import Scenario
from perfmodel.scenario.stage_split import blocks_of_stages
from perfmodel.trace import store
from perfmodel.trace.store import get_stage_trace, stage_trace_name
from perfmodel.trace.trace import EventKind, StorageKind, gradient_storages, load_trace, save_trace
from perfmodel.tracing.recorder import Traits
from perfmodel.tracing.stage import make_stage, trace_stage
from perfmodel.tracing.step import trace_step

SMALL = {"layers": 5, "width": 16, "heads": 2, "ffn_width": 32, "vocabulary": 50}
OWN = {"gpt": {}, "gpt2": {"dropout": 0.0}, "llama": {"kv_heads": 1}, "bert": {"dropout": 0.0}}
FAMILIES = tuple(OWN)
VARIANTS = [*((family, "none") for family in FAMILIES), ("gpt", "full"), ("llama", "full")]  # and checkpointing
BATCH, LENGTH, PARTS = 2, 8, 3
HIDDEN = f"float32[{BATCH},{LENGTH},16]"


def asked(family, precision="fp32", training=None, **pipeline):
    return Scenario.model_validate(
        {
            "model": {"family": family, "attention": "eager", **SMALL, **OWN[family]},
            "batch": {"size": 2 * BATCH, "sequence_length": LENGTH},
            "precision": precision,
            "training": training or {},
            "parallelism": {"pp": {"stages": PARTS, "micro_batches": 2, "layers": (1, 2, 2), **pipeline}},
            "hardware": {"profile": "none"},
        }
    )


@cache
def traced(family, number, split=False, precision="fp32", checkpointing="none"):
    training = {"activation_checkpointing": checkpointing}
    return trace_stage(asked(family, precision, training=training), number, split)


@cache
def whole(family, precision):
    scenario = asked(family, precision)
    return trace_step(scenario.model_copy(update={"batch": scenario.batch.model_copy(update={"size": BATCH})}))


def rows(trace, phase, micro_batch, events=None):
    events = trace.steady if events is None else events
    segment = next(s for s in events.segments if (s.phase, s.micro_batch) == (phase, micro_batch))
    within = slice(segment.start, segment.stop)
    return list(zip(events.kind[within].tolist(), events.a[within].tolist(), strict=True))


def operations(trace, phase, micro_batch=0):
    return [trace.operations[a] for kind, a in rows(trace, phase, micro_batch) if kind == EventKind.OP]


def launched(traces, phase, micro_batch=0):
    return Counter(op for trace in traces for op in operations(trace, phase, micro_batch) if op.runs_on_device)


def difference(more, fewer):
    """``add.Tensor -> float32[2,8,16]`` by how often ``more`` has it beyond what ``fewer`` has."""
    found = Counter()
    for op, count in (more - fewer).items():
        name = op.name.removeprefix("aten.").removesuffix(".default")
        found[f"{name} -> {', '.join(each.text for each in op.outputs)}"] += count
    return dict(found)


# What each part but the first computes for itself of what the whole model computes once.
MASK = {
    "arange -> int64[8]": 6,
    "sub.Tensor -> int64[2,1]": 2,
    "cat -> int64[2,9]": 2,
    "sub.Tensor -> int64[2,8]": 2,
    "ne.Scalar -> bool[2,8]": 2,
    "cumsum -> int64[2,8]": 2,
    "eq.Scalar -> bool[2]": 2,
    "all -> bool[]": 2,
    "_local_scalar_dense -> ": 2,
    "arange -> int64[2]": 2,
    "arange -> int64[1]": 2,
    "add.Tensor -> int64[8]": 3,  # less one: positions, counted from what a cache holds, of which parts have none
    "le.Tensor -> bool[1,1,8,8]": 2,
    "lift_fresh -> float32[]": 2,
    "scalar_tensor -> float32[]": 2,
    "where.self -> float32[2,1,8,8]": 2,
}
ROTARY = {
    "_to_copy -> float32[1,1,8]": 2,
    "bmm -> float32[1,4,8]": 2,
    "cat -> float32[1,8,8]": 2,
    "cos -> float32[1,8,8]": 2,
    "sin -> float32[1,8,8]": 2,
    "mul.Tensor -> float32[1,8,8]": 4,
}
# The gradient that is received is the stage's own, so that the last block cannot add to it in place.
RECEIVED = ({f"add.Tensor -> {HIDDEN}": 2}, {f"add_.Tensor -> {HIDDEN}": 2})
# Autocast keeps what it made of a leaf, which a received activation is: one cast for query, key and value, whose
# gradients add up as they are.
CASTS = {"_to_copy -> bfloat16[2,8,16]": 4}
CAST_GRADIENTS = (
    {"add.Tensor -> bfloat16[2,8,16]": 2, "add_.Tensor -> bfloat16[2,8,16]": 2},
    {f"_to_copy -> {HIDDEN}": 4, f"add_.Tensor -> {HIDDEN}": 4, "add_.Tensor -> float32[50,16]": 1},
)
TIED = {"add.Tensor -> float32[50,16]": 1}  # the gradients of a matrix that is used at both ends

EXPECTED = {  # what parts run more and what they run less than the whole model
    ("gpt", "fp32", "forward"): ({}, {}),
    ("gpt", "fp32", "backward"): RECEIVED,
    ("gpt", "amp-bf16", "forward"): ({}, {}),
    ("gpt", "amp-bf16", "backward"): RECEIVED,
    ("gpt2", "fp32", "forward"): (MASK, {}),
    ("gpt2", "fp32", "backward"): (RECEIVED[0], RECEIVED[1] | TIED),
    ("llama", "fp32", "forward"): (MASK | ROTARY, {}),
    ("llama", "fp32", "backward"): RECEIVED,
    ("bert", "fp32", "forward"): ({}, {}),
    ("bert", "fp32", "backward"): ({}, TIED),
    ("bert", "amp-bf16", "forward"): ({}, CASTS),
    ("bert", "amp-bf16", "backward"): CAST_GRADIENTS,
}


@pytest.mark.parametrize(("family", "precision", "phase"), EXPECTED)
def test_parts_together_run_what_the_whole_model_runs_but_for_named_differences(family, precision, phase):
    parts = [traced(family, number, precision=precision) for number in range(PARTS)]
    own, its = launched(parts, phase), launched([whole(family, precision)], phase)
    assert (difference(own, its), difference(its, own)) == EXPECTED[family, precision, phase]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp-bf16"])
def test_the_parts_of_gpt_one_after_another_run_its_forward_in_its_order(precision):
    parts = [traced("gpt", number, precision=precision) for number in range(PARTS)]
    own = [op for trace in parts for op in operations(trace, "forward")]
    assert own == operations(whole("gpt", precision), "forward")


def test_tf32_is_traced_as_fp32_is():
    assert traced("gpt", 1, precision="tf32").operations == traced("gpt", 1).operations


def phases(split):
    backward = ["backward_input", "backward_weight"] if split else ["backward"]
    each = [(phase, number) for number in (0, 1) for phase in ["forward", *backward]]
    return [("zero_grad", -1), *each, ("scale", -1), ("optimizer", -1)]


@pytest.mark.parametrize("split", [False, True])
def test_phases_and_tables(split):
    for number in range(PARTS):
        trace = traced("gpt", number, split)
        for events in (trace.first, trace.steady):
            assert [(s.phase, s.micro_batch) for s in events.segments] == phases(split)
        scaled = operations(trace, "scale", -1)
        assert {op.name for op in scaled} == {"aten.div_.Tensor"}
        assert len(scaled) == len(trace.parameters)
    names = [parameter.name for parameter in traced("gpt", 1, split).parameters]
    assert {name.split(".")[1] for name in names} == {"0", "1"}  # blocks 1 and 2 of the model


# Split backward

NORMS = {1: 4, 2: 5}  # of both blocks, and the head's


def split_difference(family, number):
    """More and less than a backward at once: sums that the hooks which keep gradients forbid to make in place, and norms
    whose two gradients come from two calls.
    """
    more, fewer = {}, {}
    sums = 4 if family == "bert" else 2 + number
    if number == PARTS - 1:
        more["ones_like -> float32[]"] = fewer["ones_like -> float32[]"] = 1  # asked for in other words
    more[f"add.Tensor -> {HIDDEN}"], fewer[f"add_.Tensor -> {HIDDEN}"] = sums, sums
    if family in ("gpt2", "bert"):
        more[f"native_layer_norm_backward -> {HIDDEN}"] = NORMS[number]
        more["native_layer_norm_backward -> float32[16], float32[16]"] = NORMS[number]
        fewer[f"native_layer_norm_backward -> {HIDDEN}, float32[16], float32[16]"] = NORMS[number]
    return more, fewer


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradients_of_input_and_weights_together_are_the_backward_but_for_named_differences(family, number):
    apart, at_once = traced(family, number, split=True), traced(family, number)
    own = launched([apart], "backward_input", 1) + launched([apart], "backward_weight", 1)
    its = launched([at_once], "backward", 1)
    found = difference(own, its), difference(its, own)
    assert found == split_difference(family, number)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_part_computes_all_with_the_weights(family):
    apart, at_once = traced(family, 0, split=True), traced(family, 0)
    assert operations(apart, "backward_input", 1) == []
    assert operations(apart, "backward_weight", 1) == operations(at_once, "backward", 1)


# Memory


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("number", range(PARTS))
@pytest.mark.parametrize(("family", "checkpointing"), VARIANTS)
def test_what_a_micro_batch_allocates_is_freed_in_its_own_phases_but_for_the_listed(
    family, number, split, checkpointing
):
    trace = traced(family, number, split, checkpointing=checkpointing)
    gradients = set(gradient_storages(trace, trace.steady).values())
    assert len(gradients) == len(trace.parameters)
    given = trace.boundary.gives_gradient
    for micro_batch in (0, 1):
        own = [row for phase, of in phases(split) if of == micro_batch for row in rows(trace, phase, micro_batch)]
        made = {a for kind, a in own if kind == EventKind.ALLOC}
        freed = {a for kind, a in own if kind == EventKind.FREE}
        assert freed <= made
        left = made - freed
        if micro_batch == 0:
            assert gradients <= left
            left -= gradients
        if split and given is not None:
            assert given.steady[micro_batch] in left  # until the next step begins
            left.remove(given.steady[micro_batch])
        losses = {a for kind, a in rows(trace, "scale", -1) if kind == EventKind.FREE}
        assert left <= losses
        assert len(left) == (number == PARTS - 1)


@pytest.mark.parametrize("split", [False, True])
def test_what_a_step_leaves_is_freed_as_the_next_begins(split):
    trace = traced("gpt", 1, split)
    left = set(gradient_storages(trace, trace.first).values())
    if split:
        left |= set(trace.boundary.gives_gradient.first)
    assert {a for kind, a in rows(trace, "zero_grad", -1) if kind == EventKind.FREE} == left


def test_messages_are_received_into_storages_that_are_there_and_sent_from_such_as_are_made():
    for number in range(PARTS):
        trace = traced("gpt", number)
        takes, gives, takes_gradient, gives_gradient, output = trace.boundary
        kinds = {storage.id: storage.kind for storage in trace.persistent}
        exchanged = [takes, gives, takes_gradient, gives_gradient]
        assert [each is not None for each in exchanged] == [number > 0, number < 2, number < 2, number > 0]
        assert {each.tensor.text for each in exchanged if each is not None} == {HIDDEN}
        assert output == gives or number == PARTS - 1
        received = [each for each in (takes, takes_gradient) if each is not None]
        assert {kinds[storage] for each in received for storage in each.steady} == {StorageKind.INPUT}
        assert len({storage for each in received for storage in each.steady}) == 2 * len(received)
        for events, own in ((trace.first, "first"), (trace.steady, "steady")):
            for micro_batch in (0, 1):
                forward, backward = [rows(trace, phase, micro_batch, events) for phase in ("forward", "backward")]
                assert (EventKind.ALLOC, getattr(output, own)[micro_batch]) in forward
                assert (EventKind.FREE, getattr(output, own)[micro_batch]) in backward
                if gives_gradient is not None:
                    assert (EventKind.ALLOC, getattr(gives_gradient, own)[micro_batch]) in backward
    assert traced("gpt", 2).boundary.output.tensor.text == "float32[2,8,50]"


def test_tokens_and_labels_of_both_micro_batches_are_there():
    def bytes_of(number):
        trace = traced("gpt", number)
        return sorted(storage.bytes for storage in trace.persistent if storage.kind == StorageKind.INPUT)

    hidden, tokens = BATCH * LENGTH * 16 * 4, 2 * BATCH * LENGTH * 8
    assert [bytes_of(number) for number in range(PARTS)] == [
        [tokens, hidden, hidden] if tokens < hidden else [hidden, hidden, tokens],
        [hidden] * 4,
        [tokens, hidden, hidden] if tokens < hidden else [hidden, hidden, tokens],
    ]


# Against torch's own stages on the CPU


class Names(TorchDispatchMode):
    """Every operator, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if Traits(func).is_recorded:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def recorded(action):
    with Names() as mode:
        result = action()
    return result, alike(mode.names)


def alike(names):
    """Under a mode the engine cannot add in place, which the trace has as it is without one."""
    return ["aten.add.Tensor" if name == "aten.add_.Tensor" else name for name in names]


def real_stages(scenario):
    torch.manual_seed(0)
    with torch.device("cpu"):
        parts = cut(build_module(scenario), scenario)
    return [make_stage(part, scenario, number, nullcontext()) for number, part in enumerate(parts)]


def run_really(scenario, split):
    """Names of operators by part, phase and micro-batch; messages are copied by hand."""
    stages, criterion, found = real_stages(scenario), loss_of(scenario), {}
    batch = make_inputs(scenario, "cpu", torch.Generator().manual_seed(0))
    tokens, labels = batch["input_ids"].chunk(2), batch["labels"].chunk(2)
    for i in range(2):
        for stage in stages:
            number = stage.stage_index
            arguments = (tokens[i],) if stage.is_first else ()

            def forward(stage=stage, arguments=arguments, i=i):
                output = stage.forward_one_chunk(i, arguments, {}, save_forward_output=False)
                return criterion(output, labels[i]) if stage.is_last else output

            output, found[number, "forward", i] = recorded(forward)
            if not stage.is_last:
                stages[number + 1].args_recv_info[i][0].buffer.data.copy_(output.detach())
        for stage in reversed(stages):
            loss, number = output if stage.is_last else None, stage.stage_index

            def backward(stage=stage, loss=loss, i=i):
                return stage.backward_one_chunk(i, loss=loss, full_backward=not split)

            _, found[number, "backward_input" if split else "backward", i] = recorded(backward)
            if not stage.is_first:
                stages[number - 1].grad_recv_info[i][0].buffer.copy_(stage.get_local_bwd_output(i)[0])
            if split:
                _, found[number, "backward_weight", i] = recorded(
                    lambda stage=stage, i=i: stage.backward_weight_one_chunk(i)
                )
    return found


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("family", "checkpointing"), VARIANTS)
def test_traces_have_the_operators_that_torchs_stages_run(family, split, checkpointing):
    training = {"activation_checkpointing": checkpointing}
    found = run_really(asked(family, training=training), split)
    for (number, phase, micro_batch), names in found.items():
        trace = traced(family, number, split, checkpointing=checkpointing)
        own = alike([op.name for op in operations(trace, phase, micro_batch)])
        in_order = sorted if phase == "backward_weight" else list  # torch goes through sets of parameters, in any order
        assert in_order(own) == in_order(names), (number, phase, micro_batch)


# Names and files


@pytest.fixture
def empty_store(tmp_path, monkeypatch):
    monkeypatch.setenv("PERFMODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(store, "_remembered", store.OrderedDict())
    return tmp_path / "cache" / "traces"


def test_equal_inner_parts_share_a_trace_and_no_others(empty_store, monkeypatch):
    scenario = asked("gpt", stages=5, layers=(1, 1, 1, 1, 1), micro_batches=2)
    names = [stage_trace_name(scenario, number) for number in range(5)]
    assert names[1] == names[2] == names[3]
    assert len(set(names)) == 3
    assert len({*names, *(stage_trace_name(scenario, number, split=True) for number in range(5))}) == 6
    made = get_stage_trace(scenario, 1)
    assert get_stage_trace(scenario, 3) is made
    assert [path.name.split("-")[:2] for path in empty_store.iterdir()] == [names[1].split("-")]
    store._remembered.clear()
    monkeypatch.setattr("perfmodel.tracing.stage.trace_stage", None)
    assert get_stage_trace(scenario, 2).operations == made.operations


def test_parts_named_alike_run_the_same():
    scenario = asked("llama", stages=5, layers=(1, 1, 1, 1, 1))
    one, other = trace_stage(scenario, 1), trace_stage(scenario, 3)
    assert (one.operations, one.parameters, one.modules) == (other.operations, other.parameters, other.modules)
    assert (one.workload, one.boundary) == (other.workload, other.boundary)
    for column in ("kind", "a", "b", "touches"):
        assert np.array_equal(getattr(one.steady, column), getattr(other.steady, column))


def test_positions_matter_where_every_other_block_is_checkpointed():
    training = {"activation_checkpointing": {"every": 2}}
    scenario = asked("gpt", training=training, stages=5, layers=(1, 1, 1, 1, 1))
    names = [stage_trace_name(scenario, number) for number in (1, 2, 3)]
    assert names[0] == names[2] != names[1]
    lengths = [len(operations(trace_stage(scenario, number), "backward")) for number in (1, 2)]
    assert lengths[0] < lengths[1]


def test_the_micro_batch_names_a_part_and_not_how_many_there_are():
    scenario = asked("gpt")
    longer = scenario.model_copy(update={"batch": scenario.batch.model_copy(update={"size": 4 * BATCH})})
    more = scenario.parallelism.pp.model_copy(update={"micro_batches": 4})
    same = longer.model_copy(update={"parallelism": scenario.parallelism.model_copy(update={"pp": more})})
    assert stage_trace_name(scenario, 1) == stage_trace_name(same, 1) != stage_trace_name(longer, 1)


def test_layers_that_are_not_given_are_balanced():
    scenario = asked("gpt", layers=None)
    given = asked("gpt", layers=blocks_of_stages(scenario))
    assert [stage_trace_name(scenario, n) for n in range(PARTS)] == [stage_trace_name(given, n) for n in range(PARTS)]


@pytest.mark.parametrize("number", range(PARTS))
def test_files_keep_the_boundary(tmp_path, number):
    path = tmp_path / "part.json.gz"
    save_trace(traced("gpt", number), path)
    assert load_trace(path).boundary == traced("gpt", number).boundary
    save_trace(whole("gpt", "fp32"), path)
    assert load_trace(path).boundary is None


def test_what_cannot_be_traced_is_said():
    with pytest.raises(PerfModelError, match=r"stage must be from 0 to 2 \(got 3\)"):
        get_stage_trace(asked("gpt"), 3)
