"""Traces against eight recorded CUDA steps, operator by operator, and what every variant of a step must hold."""

from collections import Counter

import numpy as np
import pytest

from perfmodel.trace.trace import EventKind, StorageKind, load_trace, save_trace
from perfmodel.tracing.step import trace_step
from tests.refusals import refused
from tests.tracing.recordings import (
    SCENARIOS,
    comparable,
    names_of,
    operations_of,
    recorded,
    recorded_requests,
    scenario_of,
    traced,
    traced_requests,
)

TINY = {"model": {"family": "gpt", "size": "tiny"}, "batch": {"size": 2, "sequence_length": 16}}
TINY_GPT2 = {
    "model": {"family": "gpt2", "layers": 2, "width": 32, "heads": 2, "ffn_width": 64, "vocabulary": 100},
    "batch": {"size": 2, "sequence_length": 16},
}
TINY_PARAMETERS = 20


def trace_of(keys=TINY, **more):
    return trace_step(scenario_of(keys | more))


def kinds_of(trace, events, phase):
    segment = next(segment for segment in events.segments if segment.phase == phase)
    return events.kind[segment.start : segment.stop].tolist()


def sync_names(trace, phase=None):
    events = trace.steady
    return [
        trace.operations[events.a[index]].base_name
        for segment in events.segments
        for index in range(segment.start, segment.stop)
        if events.kind[index] == EventKind.SYNC and phase in (None, segment.phase)
    ]


# Against the recordings


@pytest.mark.parametrize("name", SCENARIOS)
def test_operators_equal_the_recorded_step(name):
    mine, theirs = comparable(traced(name), recorded(name)["ops"])
    assert mine == theirs


@pytest.mark.parametrize("name", SCENARIOS)
def test_parameters_and_gradient_order_equal_the_recorded_step(name):
    trace, recording = traced(name), recorded(name)
    parameters = [[p.name, list(p.tensor.shape), p.tensor.dtype] for p in trace.parameters if p.requires_grad]
    assert parameters == [entry[:3] for entry in recording["parameters"]]
    steady = trace.steady
    ready = [trace.parameters[a].name for a in steady.a[steady.kind == EventKind.GRAD_READY]]
    assert ready == recording["gradient_ready_order"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_exists_before_the_first_step_is_what_was_allocated(name):
    held = Counter()
    for action, size in recorded_requests(recorded(name), -1):
        held[size] += 1 if action == "alloc" else -1
    assert Counter(storage.bytes for storage in traced(name).persistent) == +held


def _cudnn_backward(batch, heads, length, head_dim, grouped):
    """Bytes inside cuDNN's attention backward: float32 dQ (and dK or dV where heads are grouped), row sums, state."""
    return 4 * batch * heads * length * (head_dim * (2 if grouped else 1) + 1) + 256


# Bytes that operators allocate and free within themselves, which no trace of operators can hold.
INSIDE_OPERATORS = {
    "gpt-small2-fp32": [4 * 4 * 12 * 128 * 128] * 2,  # softmax backward: one output
    "gpt-small2-amp": [4 * 4 * 12 * 128 * 128] * 2,
    "gpt2-2layer-fp32": [8 * 2 * 256, *([4 * 2 * 256 * 768, 4 * 2 * 12 * 256, 4 * 2 * 12 * 256, 1574400] * 2)],
    "gpt2-2layer-amp": [8 * 2 * 256, 256, 256, *[_cudnn_backward(2, 12, 256, 64, False)] * 2],
    "bert-2layer-amp": [8 * 4 * 128] * 2 + [256, 256, *[_cudnn_backward(4, 12, 128, 64, False)] * 2],
    "llama-2layer-bf16": [8 * 2 * 512, 256, 256, *[_cudnn_backward(2, 16, 512, 64, True)] * 2, *[8388608, 32] * 5],
}


@pytest.mark.parametrize("name", INSIDE_OPERATORS)
def test_allocations_and_frees_equal_the_recorded_step_but_for_those_inside_operators(name):
    mine, theirs = Counter(traced_requests(traced(name), "steady")), Counter(recorded_requests(recorded(name), 3))
    inside = Counter(("alloc", size) for size in INSIDE_OPERATORS[name])
    inside += Counter(("free", size) for size in INSIDE_OPERATORS[name])
    assert theirs - mine == inside
    assert mine - theirs == Counter()


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize(("which", "step"), [("first", 0), ("steady", 3)])
def test_every_traced_allocation_was_recorded(name, which, step):
    mine = Counter(traced_requests(traced(name), which))
    assert mine - Counter(recorded_requests(recorded(name), step)) == Counter()


# Where weights are cast, the cache of casts is freed in the order of a hash table: that order is no part of a trace.
@pytest.mark.parametrize("name", ["gpt-small2-fp32", "gpt2-2layer-fp32", "llama-2layer-bf16", "vgg16-fp32"])
@pytest.mark.parametrize(("which", "step"), [("first", 0), ("steady", 3)])
def test_allocations_and_frees_come_in_the_recorded_order(name, which, step):
    remaining = iter(recorded_requests(recorded(name), step))
    assert all(request in remaining for request in traced_requests(traced(name), which))


# What a trace holds


def test_tables_hold_what_events_point_at():
    trace = traced("gpt-small2-amp")
    sizes = {
        EventKind.OP: trace.operations,
        EventKind.SYNC: trace.operations,
        EventKind.MODULE_ENTER: trace.modules,
        EventKind.MODULE_EXIT: trace.modules,
        EventKind.CALL_ENTER: trace.calls,
        EventKind.CALL_EXIT: trace.calls,
        EventKind.NODE: trace.nodes,
        EventKind.GRAD_READY: trace.parameters,
    }
    for kind, table in sizes.items():
        used = trace.steady.a[trace.steady.kind == kind]
        assert np.all((used >= 0) & (used < len(table)))
    assert len(set(trace.operations)) == len(trace.operations)


@pytest.mark.parametrize("mode", ["train", "forward"])
def test_segments_cover_every_event(mode):
    trace = trace_of(mode=mode)
    for events in (trace.first, trace.steady):
        edges = [0, *(segment.stop for segment in events.segments)]
        assert [segment.start for segment in events.segments] == edges[:-1]
        assert edges[-1] == len(events.kind)


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_modules_and_calls_nest(checkpointing):
    trace = trace_of(training={"activation_checkpointing": checkpointing})
    stack = []
    pairs = {EventKind.MODULE_EXIT: EventKind.MODULE_ENTER, EventKind.CALL_EXIT: EventKind.CALL_ENTER}
    for kind, a in zip(trace.steady.kind.tolist(), trace.steady.a.tolist(), strict=True):
        if kind in pairs.values():
            stack.append((kind, a))
        elif kind in pairs:
            assert stack.pop() == (pairs[kind], a)
    assert stack == []


def test_modules_are_entered_in_forward_order():
    trace = trace_of()
    entered = [trace.modules[a] for a in trace.steady.a[trace.steady.kind == EventKind.MODULE_ENTER]]
    assert entered[:6] == [
        ("", "GPT"),
        ("token_embeddings", "Embedding"),
        ("position_embeddings", "Embedding"),
        ("layers.0", "Block"),
        ("layers.0.ln1", "RMSNorm"),
        ("layers.0.attn", "Attention"),
    ]


def test_calls_are_the_outermost_functions_that_run_operators():
    trace = trace_of(TINY_GPT2)
    steady, calls = trace.steady, []
    for kind, a in zip(steady.kind.tolist(), steady.a.tolist(), strict=True):
        if kind == EventKind.CALL_ENTER:
            calls.append((trace.calls[a], []))
        elif kind == EventKind.OP and calls:
            calls[-1][1].append(trace.operations[a].base_name)
    assert calls[0] == ("Tensor.view", ["view"])
    assert ("diff", ["cat", "slice", "slice", "sub"]) in calls
    assert all(operators for _, operators in calls)


def test_nodes_are_reported_even_where_they_run_nothing():
    trace = trace_of()
    kinds = kinds_of(trace, trace.steady, "backward")
    nodes = [trace.nodes[a] for a in trace.steady.a[trace.steady.kind == EventKind.NODE]]
    assert nodes[:4] == ["NllLossBackward0", "LogSoftmaxBackward0", "ViewBackward0", "UnsafeViewBackward0"]
    assert nodes.count("torch::autograd::AccumulateGrad") == TINY_PARAMETERS
    assert kinds.count(EventKind.GRAD_READY) == TINY_PARAMETERS


def test_operators_of_backward_carry_their_node():
    trace = trace_of()
    steady, node = trace.steady, -1
    for kind, a, b in zip(steady.kind.tolist(), steady.a.tolist(), steady.b.tolist(), strict=True):
        if kind == EventKind.NODE:
            node = a
        elif kind == EventKind.OP and b != -1:
            assert b == node
    segment = trace.segment("forward", 0)
    forward = slice(segment.start, segment.stop)
    assert set(steady.b[forward][steady.kind[forward] == EventKind.OP]) == {-1}


def test_storage_kinds_add_up():
    trace = trace_of()
    parameter_bytes = sum(parameter.tensor.bytes for parameter in trace.parameters)
    sizes = {}
    for events in (trace.first, trace.steady):
        made = events.kind == EventKind.ALLOC
        sizes |= dict(zip(events.a[made].tolist(), events.b[made].tolist(), strict=True))
    total = Counter()
    for storage, size in sizes.items():
        total[trace.storage_kinds[storage]] += size
    assert total[StorageKind.GRADIENT] == 2 * parameter_bytes  # of two steps
    assert total[StorageKind.OPTIMIZER_STATE] == 2 * parameter_bytes
    assert total[StorageKind.ACTIVATION] > 0
    assert set(sizes) == set(trace.storage_kinds)


def test_what_lives_after_a_step_is_parameters_inputs_states_and_gradients():
    trace = trace_of()
    held = {storage.id: storage.kind for storage in trace.persistent}
    for events in (trace.first, trace.steady):
        for kind, a in zip(events.kind.tolist(), events.a.tolist(), strict=True):
            if kind == EventKind.ALLOC:
                held[a] = trace.storage_kinds[a]
            elif kind == EventKind.FREE:
                del held[a]
        assert Counter(held.values()) == {
            StorageKind.PARAMETER: TINY_PARAMETERS,
            StorageKind.INPUT: 2,
            StorageKind.GRADIENT: TINY_PARAMETERS,
            StorageKind.OPTIMIZER_STATE: 2 * TINY_PARAMETERS,
        }


def test_the_third_step_runs_what_the_second_runs():
    second, third = trace_of(), trace_step(scenario_of(TINY), steps=3)
    assert names_of(second, second.steady) == names_of(third, third.steady)
    assert traced_requests(second, "steady")[TINY_PARAMETERS:] == [
        ("alloc", size) if kind == EventKind.ALLOC else ("free", freed)
        for kind, size, freed in _requests_of_last_step(third)
    ]


def _requests_of_last_step(trace):
    sizes = {}
    steady = trace.steady
    rows = list(zip(steady.kind.tolist(), steady.a.tolist(), steady.b.tolist(), strict=True))
    sizes = {a: b for kind, a, b in rows if kind == EventKind.ALLOC}
    requests = [row for row in rows if row[0] in (EventKind.ALLOC, EventKind.FREE)]
    return [(kind, b, sizes.get(a)) for kind, a, b in requests[TINY_PARAMETERS:]]


def test_tracing_twice_gives_the_same_trace(tmp_path):
    for name in ("one", "two"):
        save_trace(trace_of(), tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_trace_survives_its_file(tmp_path):
    trace = trace_of(TINY_GPT2, precision="amp-bf16")
    save_trace(trace, tmp_path / "trace")
    loaded = load_trace(tmp_path / "trace")
    assert loaded.operations == trace.operations
    assert loaded.storage_kinds == trace.storage_kinds
    assert np.array_equal(loaded.steady.a, trace.steady.a)


# Variants


def test_accumulation_is_traced_with_two_micro_batches():
    trace = trace_of(training={"gradient_accumulation": 5})
    assert [(segment.phase, segment.micro_batch) for segment in trace.steady.segments] == [
        ("zero_grad", -1),
        ("forward", 0),
        ("backward", 0),
        ("forward", 1),
        ("backward", 1),
        ("optimizer", -1),
    ]
    first, second = (trace.segment("backward", index) for index in (0, 1))
    added = [
        sum(
            trace.operations[trace.steady.a[index]].name == "aten.add_.Tensor"
            and trace.nodes[trace.steady.b[index]] == "torch::autograd::AccumulateGrad"
            for index in range(segment.start, segment.stop)
            if trace.steady.kind[index] == EventKind.OP
        )
        for segment in (first, second)
    ]
    assert added == [0, TINY_PARAMETERS]


def test_clipping_runs_foreach_and_waits_for_nothing():
    trace = trace_of(optimizer={"max_grad_norm": 1.0})
    assert names_of(trace, trace.steady, "clip") == [
        "_foreach_norm", "stack", "linalg_vector_norm", "add", "reciprocal", "mul", "clamp", "_foreach_mul_",
    ]  # fmt: skip
    assert sync_names(trace) == []


def test_float16_scales_the_loss_and_reads_found_inf_once():
    trace = trace_of(precision="amp-fp16")
    names = names_of(trace, trace.steady, "optimizer")
    assert names[:7] == [
        "_to_copy", "reciprocal", "_to_copy", "full", "_to_copy", "_to_copy", "_amp_foreach_non_finite_check_and_unscale_",
    ]  # fmt: skip
    assert names[-1] == "_amp_update_scale_"
    assert "_foreach_addcdiv_" in names
    assert sync_names(trace) == ["_local_scalar_dense"]


def test_float16_with_a_fused_optimizer_reads_nothing():
    trace = trace_of(precision="amp-fp16", optimizer={"implementation": "fused"})
    assert "_fused_adamw_" in names_of(trace, trace.steady, "optimizer")
    assert sync_names(trace) == []


@pytest.mark.parametrize(
    ("optimizer", "operators"),
    [
        ({"name": "sgd"}, {"_foreach_add_": 1}),
        ({"name": "sgd", "momentum": 0.9}, {"_foreach_mul_": 1, "_foreach_add_": 2}),
        ({"name": "sgd", "momentum": 0.9, "implementation": "fused"}, {"_fused_sgd_": 1}),
        ({"name": "sgd", "implementation": "for-loop"}, {"add_": TINY_PARAMETERS}),
        ({"implementation": "fused"}, {"_foreach_add_": 1, "_fused_adamw_": 1}),
    ],
)
def test_optimizers(optimizer, operators):
    trace = trace_of(optimizer=optimizer)
    assert Counter(names_of(trace, trace.steady, "optimizer")) == operators


def test_the_step_counts_of_adamw_stay_on_the_host():
    trace = trace_of()
    host = [op for _, op in operations_of(trace, trace.steady, "optimizer") if not op.runs_on_device]
    assert [op.base_name for op in host] == ["lift_fresh", "_foreach_add_", *["_local_scalar_dense"] * 40]
    assert {spec.device for op in host for spec in op.input_tensors()} == {"cpu"}
    assert sync_names(trace) == []


def test_fused_adamw_keeps_its_step_counts_on_the_device():
    trace = trace_of(optimizer={"implementation": "fused"})
    devices = {spec.device for _, op in operations_of(trace, trace.first) for spec in op.input_tensors()}
    assert devices == {"cuda"}


def test_checkpointing_runs_the_blocks_again_in_backward():
    plain, checkpointed = trace_of(), trace_of(training={"activation_checkpointing": "full"})
    matmuls = names_of(plain, plain.steady, "backward").count("bmm")
    again = names_of(checkpointed, checkpointed.steady, "backward").count("bmm")
    assert again == matmuls + names_of(plain, plain.steady, "forward").count("bmm")
    entered = kinds_of(checkpointed, checkpointed.steady, "backward").count(EventKind.MODULE_ENTER)
    assert entered == 2 * 10  # of two blocks: two norms, attention and its four projections, feed-forward and its two
    assert EventKind.MODULE_ENTER not in kinds_of(plain, plain.steady, "backward")


def test_checkpointing_keeps_fewer_activations():
    def activation_bytes(**training):
        trace = trace_of(training=training)
        made = trace.steady.kind == EventKind.ALLOC
        pairs = zip(trace.steady.a[made].tolist(), trace.steady.b[made].tolist(), strict=True)
        return sum(size for storage, size in pairs if trace.storage_kinds[storage] == StorageKind.ACTIVATION)

    kept = [activation_bytes(activation_checkpointing=wanted) for wanted in ("none", {"every": 2}, "selective", "full")]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 4


def test_forward_only_runs_no_backward():
    trace = trace_of(mode="forward")
    assert [(segment.phase, segment.micro_batch) for segment in trace.steady.segments] == [("forward", 0)]
    assert StorageKind.ACTIVATION not in trace.storage_kinds.values()
    assert "detach" not in names_of(trace, trace.steady)


def test_hugging_face_models_read_their_mask_in_forward():
    assert sync_names(trace_of(TINY_GPT2)) == ["_local_scalar_dense"]
    assert sync_names(traced("llama-2layer-bf16"), "forward") == ["_local_scalar_dense"]


def test_precision_tf32_runs_the_operators_of_fp32():
    assert trace_of(precision="tf32").operations == trace_of().operations


def test_provenance_names_the_versions():
    import torch
    import transformers

    assert traced("gpt2-2layer-fp32").provenance == {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def test_what_is_refused_leaves_torch_as_it_was():
    import torch

    target = {"target": "torch.nn:Linear", "arguments": {"in_features": 2, "out_features": 2}, "blocks": "layers"}
    keys = {
        "model": target | {"inputs": {"input": {"shape": ["batch", 2]}}},
        "batch": {"size": 1},
        "training": {"activation_checkpointing": "full"},
    }
    with refused("model.blocks", "'layers'"):
        trace_step(scenario_of(keys), allow_import=True)
    assert torch.nn.functional.dropout(torch.ones(4), 0.5).shape == (4,)


# Touches and repeated tensors


def touches_of(trace, events, index):
    return events.touches[events.touch_offsets[index] : events.touch_offsets[index + 1]].tolist()


def test_every_launching_operator_touches_what_it_reads_and_makes():
    trace = trace_of(batch={"size": 2, "sequence_length": 16}, training={"gradient_accumulation": 3})
    for events in (trace.first, trace.steady):
        alive = {storage.id for storage in trace.persistent}
        if events is trace.steady:
            alive |= set(trace.first.a[trace.first.kind == EventKind.ALLOC].tolist())
        alive |= set(events.a[events.kind == EventKind.ALLOC].tolist())
        assert set(events.touches.tolist()) <= alive
        for index in np.flatnonzero(events.kind == EventKind.OP).tolist():
            operation, touched = trace.operations[events.a[index]], touches_of(trace, events, index)
            assert len(set(touched)) == len(touched)
            on_device = [spec for spec in (*operation.input_tensors(), *operation.outputs) if spec.device == "cuda"]
            if not operation.runs_on_device:
                assert touched == []
            elif operation.base_name != "_local_scalar_dense":
                assert bool(touched) == any(spec.numel for spec in on_device)
                assert len(touched) <= len(on_device)


def test_outputs_are_touched_after_inputs_by_those_who_allocate_them():
    events = trace_of().steady
    for index in np.flatnonzero(events.kind[1:] == EventKind.ALLOC).tolist():
        if events.kind[index] == EventKind.OP:
            assert touches_of(None, events, index)[-1] >= events.a[index + 1]


def test_a_product_of_a_tensor_with_itself_and_squared_gradients_are_seen():
    trace = trace_of(optimizer={"implementation": "foreach"})
    (addcmul,) = [operation for operation in trace.operations if operation.base_name == "_foreach_addcmul_"]
    count = len(addcmul.inputs[0])
    assert addcmul.same == (*range(2 * count), *range(count, 2 * count))
    loop = trace_of(optimizer={"implementation": "for-loop"})
    assert {op.same for op in loop.operations if op.base_name == "addcmul_"} == {(0, 1, 1)}
    assert {op.same for op in loop.operations if op.base_name == "addcdiv_"} == {()}


def test_touches_survive_the_file(tmp_path):
    trace = trace_of(optimizer={"implementation": "foreach"})
    save_trace(trace, tmp_path / "trace.json.gz")
    again = load_trace(tmp_path / "trace.json.gz")
    assert again.operations == trace.operations
    for name in ("touch_offsets", "touches", "touch_bytes"):
        assert np.array_equal(getattr(again.steady, name), getattr(trace.steady, name))
