"""Host costs of hand-made steps, in closed form. Times are whole microseconds for legibility."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.host import (
    call_key,
    host_costs,
    host_slowness,
    host_spread,
    key_flags,
    list_key,
    node_key,
    paced_by_host,
    piece_key,
)
from perfmodel.errors import PerfModelError
from perfmodel.hardware.interconnect import CallRecord, Interconnect
from perfmodel.hardware.profile import Device, HostRecord, Profile
from perfmodel.program.program import HOST, Insertion, Instruction, Program
from perfmodel.trace.host_structure import UNIT_CALLS, structure_of
from perfmodel.trace.kernel_key import optimizer_prefix
from perfmodel.trace.operation import Operation, TensorSpec
from perfmodel.trace.trace import EventKind, Parameter
from tests import builders
from tests.builders import parameters_of

US = 1e-6
OPERATIONS = ("view", "mm", "_to_copy", "add", "mul", "sum")
CALLS = ("linear", "Tensor.add", "mystery")
NODES = ("MmBackward0", "torch::autograd::AccumulateGrad", "MysteryBackward0")
MODULES = (("", "Model"), ("blocks.0", "Block"), ("blocks.1", "Block"), ("head", "Head"))

Events = list[tuple[EventKind, int]]


def op(name: str) -> tuple[EventKind, int]:
    return EventKind.OP, OPERATIONS.index(name)


def call(name: str, *operators: str) -> Events:
    number = CALLS.index(name)
    return [(EventKind.CALL_ENTER, number), *map(op, operators), (EventKind.CALL_EXIT, number)]


def node(name: str, *operators: str) -> Events:
    return [(EventKind.NODE, NODES.index(name)), *map(op, operators)]


def module(number: int, *parts: Events) -> Events:
    inside = [event for part in parts for event in part]
    return [(EventKind.MODULE_ENTER, number), *inside, (EventKind.MODULE_EXIT, number)]


def program_of(
    *phases: tuple[str, int, Events], accumulation: int = 1, parameters: int = 0, **workload: object
) -> Program:
    return builders.program_of(
        *phases,
        accumulation=accumulation,
        workload={"mode": "train", **workload},
        operations=tuple(Operation(f"aten.{name}.default", runs_on_device=name != "view") for name in OPERATIONS),
        modules=MODULES,
        calls=CALLS,
        nodes=NODES,
        parameters=parameters_of(*[4] * parameters),
    )


def profile_of(records_us: dict[str, float]) -> Profile:
    host = {key: HostRecord(time_s=value * US) for key, value in records_us.items()}
    return Profile(name="test", device=Device(kind="cuda", name="gpu", memory_bytes=1), host=host)


def costs_us(program: Program, records_us: dict[str, float], precision: str = "fp32") -> list[float]:
    return [round(float(value), 6) for value in host_costs(program, profile_of(records_us), precision) / US]


def test_a_call_passes_before_its_launches_and_a_quarter_of_it_after_them() -> None:
    program = program_of(("forward", 0, call("linear", "view", "mm", "add", "view")))
    assert costs_us(program, {"call linear(mm,add)": 14, "glue": 2}) == [0, 0, 6, 6, 0, 4]


def test_a_call_that_launches_nothing_passes_at_its_end() -> None:
    assert costs_us(program_of(("forward", 0, call("linear", "view"))), {"call linear()": 3}) == [0, 0, 3]


def test_an_unmeasured_form_of_a_call_costs_the_nearest_one_and_the_operators_between() -> None:
    records = {"call linear(mm)": 10, "call linear(mm,add)": 13, "cast": 4, "launch": 3}
    program = program_of(("forward", 0, call("linear", "_to_copy", "_to_copy", "mm")))
    assert sum(costs_us(program, records)) == pytest.approx(18)


def test_a_call_never_costs_less_than_half_its_nearest_form() -> None:
    program = program_of(("forward", 0, call("linear", "mm")))
    assert sum(costs_us(program, {"call linear(mm,add,mul)": 10, "launch": 4})) == pytest.approx(5)


def test_an_unknown_call_costs_its_operators() -> None:
    program = program_of(("forward", 0, call("mystery", "view", "mm", "_to_copy")))
    assert sum(costs_us(program, {"call": 1, "view": 2, "launch": 4, "cast": 8})) == pytest.approx(15)


def test_an_operator_outside_any_call_costs_one() -> None:
    program = program_of(("forward", 0, [op("mm"), op("view")]))
    assert costs_us(program, {"call": 1, "view": 2, "launch": 4}) == [5, 3]


def test_amp_and_no_grad_records_go_before_plain_ones() -> None:
    records = {"call linear(mm)": 1, "call linear(mm) amp": 2, "call linear(mm) amp no-grad": 3}
    train, forward = (program_of(("forward", 0, call("linear", "mm")), mode=mode) for mode in ("train", "forward"))
    totals = [
        sum(costs_us(program, records, precision)) for program in (train, forward) for precision in ("fp32", "amp-bf16")
    ]
    assert totals == pytest.approx([1, 2, 1, 3])


def test_nodes_pass_mostly_before_their_launches() -> None:
    backward = [*node("MmBackward0", "view", "mm", "mm"), *node("torch::autograd::AccumulateGrad")]
    program = program_of(("backward", 0, backward))
    records = {"node MmBackward0(mm,mm)": 20, "node AccumulateGrad()": 2, "backward": 5}
    assert costs_us(program, records) == [11, 0, 7, 7, 2]


def test_an_unknown_node_costs_the_engine_and_its_operators() -> None:
    program = program_of(("backward", 0, node("MysteryBackward0", "view", "mul")))
    assert sum(costs_us(program, {"node": 1, "node view": 2, "node launch": 4})) == pytest.approx(7)


def test_modules_cost_their_call() -> None:
    assert costs_us(program_of(("forward", 0, module(1))), {"module": 10}) == [6, 4]


BLOCK = [*call("linear", "mm"), *call("Tensor.add", "add")]


def model(head: Events | None = None) -> Events:
    """Two equal blocks, a head and a call of the model's own."""
    return module(
        0, module(1, BLOCK), module(2, BLOCK), module(3, head or call("linear", "mm")), call("Tensor.add", "add")
    )


def keys_of(program: Program) -> dict[str, str]:
    """Forward keys by class."""
    pieces = structure_of(program.trace).pieces
    return {piece.class_name: piece_key("forward", piece, program.trace.workload, ()) for piece in pieces}


ESTIMATES = {"call linear(mm)": 6, "call Tensor.add(add)": 2, "module": 1}


def test_without_records_of_modules_the_things_in_them_add_up() -> None:
    program = program_of(("forward", 0, [*model(), *call("Tensor.add", "add")]))
    assert sum(costs_us(program, ESTIMATES)) == pytest.approx(2 * 8 + 6 + 2 + 2 + 4)


def test_measured_modules_scale_what_is_in_them() -> None:
    program = program_of(("forward", 0, [*model(), *call("Tensor.add", "add")]))
    keys = keys_of(program)
    records = {**ESTIMATES, keys["Block"]: 18, keys["Head"]: 3.5, keys["Model"]: 30, keys["step"]: 40}
    found = costs_us(program, records)
    assert found[1:9] == found[9:17]
    assert sum(found[1:9]) == pytest.approx(18)
    assert sum(found[17:22]) == pytest.approx(3.5)
    assert sum(found) == pytest.approx(2 * 18 + 3.5 + 30 + 40)


def test_the_first_of_a_kind_is_cold_in_every_forward() -> None:
    forward = [event for number in (1, 2) for event in module(number, call("linear", "mm"))]
    program = program_of(("forward", 0, module(0, forward)), ("forward", 1, module(0, forward)))
    block = structure_of(program.trace).pieces[-1]
    key = piece_key("forward", block, {}, ())
    records = {key: HostRecord(time_s=5 * US, cold_s=3 * US), "call linear(mm)": HostRecord(time_s=US)}
    profile = profile_of({}).model_copy(update={"host": records})
    assert host_costs(program, profile, "fp32").sum() == pytest.approx(2 * (3 + 5 + 5) * US)


def test_what_was_measured_on_the_same_shapes_goes_first() -> None:
    program = program_of(("forward", 0, module(0, module(1, call("linear", "mm")))))
    block = structure_of(program.trace).pieces[-1]
    plain, same = (piece_key("forward", block, {}, (), with_shapes=with_shapes) for with_shapes in (False, True))
    other = piece_key("forward", block._replace(shapes="other"), {}, (), with_shapes=True)
    records = {"call linear(mm)": 1, plain: 10, other: 20}
    assert sum(costs_us(program, records)) == pytest.approx(10)
    assert sum(costs_us(program, records | {same: 30})) == pytest.approx(30)


def test_shapes_and_tf32_tell_pieces_apart() -> None:
    program = program_of(("forward", 0, module(0, module(1, call("linear", "mm")), module(2, call("linear", "mm")))))
    assert len({piece.shapes for piece in structure_of(program.trace).pieces if piece.kind == "unit"}) == 1
    matrix = TensorSpec.parse("float32[8,8]")
    operations = tuple(replace(operation, inputs=(matrix, matrix)) for operation in program.trace.operations)
    wide = replace(program.trace, operations=operations, steady=replace(program.trace.steady))
    last = [structure_of(trace).pieces[-1] for trace in (program.trace, wide)]
    assert len({piece.shapes for piece in last}) == 2
    assert len({piece.text() for piece in last}) == 1
    assert piece_key("forward", last[0], {}, key_flags({}, "tf32")) == f"{piece_key('forward', last[0], {}, ())} tf32"


def test_only_the_measured_modules_are_scaled() -> None:
    program = program_of(("forward", 0, model()))
    found = costs_us(program, {**ESTIMATES, keys_of(program)["Block"]: 18})
    assert sum(found) == pytest.approx(2 * 18 + (1 + 6) + (1 + 2))


def test_equal_modules_share_a_key_and_others_do_not() -> None:
    one, other = (
        program_of(("forward", 0, model(head))) for head in (call("linear", "mm"), call("linear", "mm", "add"))
    )
    assert keys_of(one)["Block"] == keys_of(other)["Block"]
    assert keys_of(one)["Head"] != keys_of(other)["Head"]
    assert keys_of(one)["Model"] == keys_of(other)["Model"]


def test_a_module_of_many_calls_is_a_container() -> None:
    large = [event for _ in range(UNIT_CALLS) for event in call("linear", "mm")]
    program = program_of(("forward", 0, module(0, module(1, large, module(3, call("linear", "mm"))))))
    found = [(piece.class_name, piece.kind) for piece in structure_of(program.trace).pieces]
    assert found == [("step", "own"), ("Model", "own"), ("Block", "own"), ("Head", "unit")]


def test_what_runs_around_the_model_enters_autocast_unless_it_was_measured() -> None:
    program = program_of(("forward", 0, module(0)))
    key = keys_of(program)["step"] + " amp"
    assert costs_us(program, {"autocast": 9}, "amp-bf16") == [9, 0]
    assert costs_us(program, {"autocast": 9, key: 5}, "amp-bf16") == [5, 0]
    assert costs_us(program, {"autocast": 9}) == [0, 0]


def backward_records(program: Program, micro_batch: int = 0) -> dict[str, float]:
    """Backward of every piece of a micro-batch: 10 us a block, 1 us the others."""
    structure = structure_of(program.trace)
    return {
        piece_key("backward", piece, program.trace.workload, (), micro_batch > 0): 10
        if piece.class_name == "Block"
        else 1
        for piece in structure.pieces
    }


STEP = (
    ("forward", 0, model()),
    ("backward", 0, [*node("MmBackward0", "mm", "mm"), *node("torch::autograd::AccumulateGrad")]),
)


def test_a_backward_costs_what_its_modules_cost_when_all_are_measured() -> None:
    program = program_of(*STEP)
    records = {"node MmBackward0(mm,mm)": 6, "node AccumulateGrad()": 2, "backward": 5}
    all_of_them = {**records, **backward_records(program)}
    assert costs_us(program, records)[-4:] == pytest.approx([6.8, 2.1, 2.1, 2])
    expected = [value * 23 / 8 for value in (1.8, 2.1, 2.1, 2)]
    assert costs_us(program, all_of_them)[-4:] == pytest.approx(expected, rel=1e-5)
    all_of_them.popitem()
    assert costs_us(program, all_of_them)[-4:] == pytest.approx([6.8, 2.1, 2.1, 2])


def halves_of(program: Program, half: str, accumulates: bool = False) -> dict[str, float]:
    pieces = structure_of(program.trace).pieces
    return {piece_key(half, piece, program.trace.workload, (), accumulates): 3 for piece in pieces}


INPUT = [*node("MmBackward0", "mm"), *node("MysteryBackward0", "mul")]
WEIGHT = node("MmBackward0", "mm")


def test_halves_of_a_backward_cost_what_those_of_its_modules_cost() -> None:
    halves = [("backward_input", INPUT), ("backward_weight", WEIGHT)]
    phases = [(phase, number, part) for number in (0, 1) for phase, part in [("forward", model()), *halves]]
    program = program_of(*phases)
    pieces = len(structure_of(program.trace).pieces) // 2
    records = {"node": 1, "backward": 5, **halves_of(program, "backward_input")}
    records |= {key: 2 * us for key, us in halves_of(program, "backward_weight").items()}

    def totals(records_us: dict[str, float]) -> list[float]:
        found = np.array(costs_us(program, records_us))
        return [float(found[program.instructions.run == index].sum()) for index in (1, 2, 4, 5)]

    # the second micro-batch adds to gradients of weights, which was not measured: a node, and calling the engine
    assert totals(records) == pytest.approx([3 * pieces, 6 * pieces, 3 * pieces, 1 + 5])
    records |= {key: 4 * us for key, us in halves_of(program, "backward_weight", accumulates=True).items()}
    assert totals(records) == pytest.approx([3 * pieces, 6 * pieces, 3 * pieces, 12 * pieces])


def test_where_the_input_has_no_gradient_the_second_half_is_a_whole_backward() -> None:
    program = program_of(("forward", 0, model()), ("backward_input", 0, []), ("backward_weight", 0, INPUT))
    structure = structure_of(program.trace)
    assert (structure.directions(0), structure.direction(2)) == (("backward",), "backward")
    records = {"node": 1, **backward_records(program)}
    assert sum(costs_us(program, records)) == pytest.approx(sum(backward_records(program).values()) + 10)


def test_several_parts_of_a_rank_have_backwards_of_their_own() -> None:
    """Each costs what the forward before it says, though micro-batches are numbered alike."""
    whole, head = ("forward", 0, model()), ("forward", 0, module(3, call("linear", "mm")))
    program = program_of(whole, STEP[1], head, STEP[1])
    structure = structure_of(program.trace)
    assert [structure.forward_of(index) for index in (1, 3)] == [0, 2]
    pieces = [piece for piece in structure.pieces if piece.segment == 2]
    records = {"node": 1} | {piece_key("backward", piece, program.trace.workload, ()): 7 for piece in pieces}
    found = np.array(costs_us(program, records))
    assert found[program.instructions.run == 3].sum() == pytest.approx(7 * len(pieces))


def test_parts_of_a_rank_share_loops_over_all_its_parameters() -> None:
    loops = [("zero_grad", -1, [(EventKind.FREE, 0)]), ("scale", -1, [op("mul")])]
    program = program_of(*loops, *loops, parameters=10)
    records = {"zero_grad": 5, "zero_grad parameter": 1, "scale": 2, "scale parameter": 0.5}
    assert costs_us(program, records) == [7.5, 3.5, 7.5, 3.5]


def test_later_micro_batches_add_to_gradients_and_repeat() -> None:
    later = tuple((phase, 1, events) for phase, _, events in STEP)
    program = program_of(*STEP, *later, accumulation=3)
    records = {"node": 1, **backward_records(program), **{k: 2 * v for k, v in backward_records(program, 1).items()}}
    found = np.array(costs_us(program, records))
    runs = [run.phase + str(run.micro_batch) for run in program.runs]
    totals = {name: found[program.instructions.run == index].sum() for index, name in enumerate(runs)}
    assert totals == pytest.approx(
        {"forward0": 0, "backward0": 23, "forward1": 0, "backward1": 46, "forward2": 0, "backward2": 46}
    )


def test_recomputation_in_backward_costs_its_calls() -> None:
    recomputed = [*node("MmBackward0"), *module(1, call("linear", "mm")), op("mul")]
    program = program_of(("backward", 0, recomputed))
    records = {"node MmBackward0(mul)": 10, "call linear(mm)": 4, "module": 1}
    assert sum(costs_us(program, records)) == pytest.approx(15)


PHASES = (("zero_grad", -1, []), ("forward", 0, call("linear", "mm")), ("clip", -1, [op("sum")]))
OPTIMIZER = ("optimizer", -1, [op("mul"), op("add"), (EventKind.FREE, 0)])


def test_phases_over_parameters_are_spread_over_their_operators() -> None:
    program = program_of(*PHASES, OPTIMIZER, parameters=10, optimizer={"name": "adamw", "implementation": "foreach"})
    records = {"zero_grad": 5, "zero_grad parameter": 1, "clip": 2, "clip parameter": 0.5}
    records |= {"optimizer adamw foreach": 40, "optimizer adamw foreach parameter": 2, "scaler": 20}
    assert costs_us(program, records) == [15, 0, 0, 7, 30, 30, 0]
    assert costs_us(program, records, "amp-fp16")[-3:] == [40, 40, 0]


def test_a_loop_over_just_these_parameters_goes_before_the_line() -> None:
    program = program_of(OPTIMIZER, parameters=3, optimizer={"name": "sgd", "momentum": 0.9, "implementation": "fused"})
    exact = list_key("optimizer sgd-momentum fused", program.trace.parameters)
    records = {"optimizer sgd-momentum fused": 40, exact: 8}
    assert costs_us(program, records) == [4, 4, 0]


def test_a_phase_without_operators_is_spread_over_its_events() -> None:
    program = program_of(("zero_grad", -1, [(EventKind.FREE, 0), (EventKind.FREE, 1)]), parameters=2)
    assert costs_us(program, {"zero_grad": 6}) == [3, 3]


def test_calls_that_strategies_insert_cost_what_was_measured_or_what_they_consist_of() -> None:
    program = program_of(("forward", 0, [op("mm")]))
    names = ("all_reduce", "fsdp forward group", "fsdp forward parameter", "fsdp reduce group", "dtensor clip")
    rows = tuple(Instruction(HOST, call=name, share=2.0) for name in names)
    program = replace(program, insertions=(Insertion(0, 0, rows),))
    records = {name: HostRecord(time_s=seconds * US) for name, seconds in (("call", 3), ("launch", 1))}
    profile = profile_of({}).model_copy(update={"host": records})

    def found(**calls_us: float) -> list[float]:
        calls = {name.replace("_", " "): CallRecord(time_s=value * US) for name, value in calls_us.items()}
        calls["all_gather"] = CallRecord(time_s=50 * US)
        wires = Interconnect(backend="nccl", host=calls)
        return [round(float(each) / US, 6) for each in host_costs(program, profile, "fp32", wires)[:5]]

    assert found() == [8, 2 * (50 + 4 + 4), 0, 2 * (4 + 4), 2 * (4 + 4 + 4)]
    measured = {"fsdp_forward_group": 200, "fsdp_forward_parameter": 7, "fsdp_reduce_group": 90, "dtensor_clip": 30}
    assert found(**measured) == [8, 400, 14, 180, 60]


def test_a_call_that_no_table_names_is_refused() -> None:
    program = program_of(("forward", 0, [op("mm")]))
    program = replace(program, insertions=(Insertion(0, 0, (Instruction(HOST, call="all_reduse"),)),))
    measured = Interconnect(backend="nccl", host={"all_reduse": CallRecord(time_s=1.0)})
    for interconnect in (None, measured):
        with pytest.raises(ValueError, match="all_reduse"):
            host_costs(program, profile_of({}), "fp32", interconnect)


def test_an_optimizer_on_the_host_takes_what_was_measured() -> None:
    parts = tuple(Parameter(str(n), TensorSpec.parse("float32[8]@cpu"), n) for n in range(2))
    program = program_of(("optimizer", -1, []), parameters=2)
    program = replace(program, trace=replace(program.trace, optimized=parts))
    calls = ("cpu optimizer adamw foreach", "cpu optimizer adamw foreach MiB")
    rows = tuple(Instruction(HOST, call=name, share=share) for name, share in zip(calls, (1.0, 2.5), strict=True))
    program = replace(program, insertions=(Insertion(0, 0, rows),))
    profile = profile_of({"optimizer adamw foreach": 1000})  # on the device
    measured = {name: CallRecord(time_s=seconds * US) for name, seconds in zip(calls, (30, 4), strict=True)}
    wires = Interconnect(backend="nccl", host=measured)
    assert host_costs(program, profile, "fp32", wires) / US == pytest.approx([30, 10])
    with pytest.raises(PerfModelError, match=r"measured for 'cpu optimizer adamw foreach MiB'.* calibrate"):
        host_costs(program, profile, "fp32", wires.model_copy(update={"host": {calls[0]: measured[calls[0]]}}))


def test_memory_and_not_the_host_paces_what_counts_mib() -> None:
    program = program_of(("optimizer", -1, []), parameters=1)
    rows = (
        Instruction(HOST, call="cpu optimizer adamw fused"),
        Instruction(HOST, call="cpu optimizer adamw fused MiB"),
    )
    found = paced_by_host(replace(program, insertions=(Insertion(0, 0, rows),)))
    assert found.tolist() == [True, False, *[True] * (len(found) - 2)]


def test_a_call_right_after_one_like_it_has_a_cost_of_its_own() -> None:
    program = program_of(("optimizer", -1, []), parameters=1)
    rows = (
        Instruction(HOST, call="wait"),
        Instruction(HOST, call="wait again"),
        Instruction(HOST, call="broadcast async again"),
    )
    program = replace(program, insertions=(Insertion(0, 0, rows),))
    calls = {"wait": 9, "wait again": 2, "broadcast async": 50}
    host = {name: CallRecord(time_s=seconds * US) for name, seconds in calls.items()}
    found = host_costs(program, profile_of({}), "fp32", Interconnect(backend="nccl", host=host))
    assert found[:3] / US == pytest.approx([9, 2, 50])  # of broadcasts in a row nothing was measured
    host["broadcast async again"] = CallRecord(time_s=20 * US)
    found = host_costs(program, profile_of({}), "fp32", Interconnect(backend="nccl", host=host))
    assert found[:3] / US == pytest.approx([9, 2, 20])


def test_nothing_measured_costs_nothing() -> None:
    assert costs_us(program_of(*STEP), {}) == [0.0] * len(program_of(*STEP).instructions.kind)
    assert costs_us(program_of(), {}) == []


def test_negative_records_cost_nothing() -> None:
    """On a CPU a key holds what comes on top of its operators, which noise may take below zero."""
    assert costs_us(program_of(("forward", 0, call("linear", "mm"))), {"call linear(mm)": -3}) == [0, 0, 0]


def test_keys_are_legible() -> None:
    program = program_of(*STEP, training={"activation_checkpointing": {"every": 2}})
    block = structure_of(program.trace).pieces[2]
    assert block.kind == "unit"
    found = [
        call_key("linear", ("_to_copy", "mm"), ("amp",)),
        node_key("MmBackward0", ("mm", "mm")),
        piece_key("backward", block, program.trace.workload, ("amp",), accumulates=True),
        piece_key("forward", block, {}, ()),
        optimizer_prefix({"optimizer": {"name": "adamw", "implementation": "for-loop", "momentum": 0.0}}),
        *key_flags({"mode": "forward"}, "amp-fp16"),
    ]
    assert found == [
        "call linear(_to_copy,mm) amp",
        "node MmBackward0(mm,mm)",
        f"backward Block {block.digest} amp accumulate checkpoint-every2",
        f"forward Block {block.digest}",
        "optimizer adamw for-loop",
        "amp",
        "no-grad",
    ]


def test_the_structure_of_a_trace_is_found_once() -> None:
    program = program_of(*STEP)
    assert structure_of(program.trace) is structure_of(program.trace)
    assert structure_of(program_of(*STEP).trace) is not structure_of(program.trace)


def test_costs_follow_the_speed_of_the_host() -> None:
    profile = profile_of({"reference": 2000})
    assert host_slowness(profile, 3e-3) == pytest.approx(1.5)
    assert host_slowness(profile, None) == 1
    assert host_slowness(profile, None, talks=True) == 1
    together = [{"reference": CallRecord(time_s=time_s)} for time_s in (1e-3, 3e-3, 8e-3)]
    wires = {str(number): Interconnect(backend="nccl", host=host) for number, host in enumerate([*together, {}])}
    joined = profile.model_copy(update={"interconnects": wires})
    assert host_slowness(joined, None, talks=True) == pytest.approx(1.5)
    assert host_slowness(joined, 4e-3, talks=True) == pytest.approx(2)
    assert host_slowness(joined, None) == 1
    assert host_slowness(profile_of({}), 3e-3) == 1


@pytest.mark.parametrize(("spread", "expected"), [(0.2, 0.2), (0.01, 0.05)])
def test_the_host_is_as_uncertain_as_it_wandered(spread: float, expected: float) -> None:
    profile = profile_of({"reference": 2000})
    wandering = profile.model_copy(update={"host": {"reference": HostRecord(time_s=2e-3, spread=spread)}})
    assert host_spread(wandering) == expected
    assert host_spread(profile_of({})) == 0.05
