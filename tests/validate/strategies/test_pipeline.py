"""Every schedule on gloo ranks against one process that has the whole model and batch; what must not hang; the file."""

import os
import re
import runpy
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from calibrate.this_machine.launcher import Launch, run_ranks
from perfmodel.errors import PerfModelError
from perfmodel.hardware.measurement import load_measurement, save_measurement
from perfmodel.models.step import TrainingStep, build_module, make_inputs, make_optimizer
from perfmodel.program.pipeline.orders import Compute
from perfmodel.program.pipeline.schedules import rank_actions
from perfmodel.program.program import COLLECTIVE
from perfmodel.program.ranks import rank_programs
from perfmodel.scenario.scenario import Scenario
from perfmodel.trace.trace import EventKind
from tests.places import ROOT
from tests.refusals import refused
from validate.run import measure
from validate.strategies.pipeline import SEED
from validate.worker import Effort

SCRIPT, REPLICAS = (Path(__file__).parent / name for name in ("rank_pipelines.py", "rank_replicas.py"))
of_rank, of_replica = runpy.run_path(str(SCRIPT)), runpy.run_path(str(REPLICAS))
RANKS, TRIED, SCHEDULES, scenario = (of_rank[name] for name in ("RANKS", "TRIED", "SCHEDULES", "scenario"))
TIED = {
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "bert": ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
}
QUICK = Effort(
    warmup_steps=3, warmup_s=0.0, steady_s=0.0, least_steps=4, most_steps=4, synced_s=0.0, least_synced_steps=1
)


def launch(folder, *arguments, script=SCRIPT, ranks=RANKS):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run_ranks(Launch("pipelines", [str(script), str(folder), *arguments], ranks, "cpu", folder, 120.0, environment))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    launch(folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def alone(asked, replicas=1):
    """Gradients of the whole module over the whole batch, of all replicas, at once."""
    torch.manual_seed(0)
    module = build_module(asked)
    batches = [make_inputs(asked, "cpu", torch.Generator().manual_seed(SEED + number)) for number in range(replicas)]
    inputs = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    TrainingStep(module, inputs, make_optimizer(module.parameters(), asked), asked).run()
    return {key: parameter.grad for key, parameter in module.named_parameters()}


@pytest.mark.parametrize("name", TRIED)
def test_gradients_are_those_of_the_whole_batch(ranks, name):
    found = ranks[0][name]["gradients"] | ranks[1][name]["gradients"]
    assert len(found) == sum(len(rank[name]["gradients"]) for rank in ranks)
    if name in TIED:  # the shared matrix is in two parts, each with its own share of the gradient
        embeddings, head = TIED[name]
        found[embeddings] = found[embeddings] + found.pop(head)
    expected = alone(scenario(name))
    assert found.keys() == expected.keys()
    tolerance = {"atol": 2e-3, "rtol": 0.1} if name == "amp" else {"atol": 1e-7, "rtol": 1e-4}
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, expected[key], **tolerance)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_computed_is_what_the_program_computes(ranks, schedule):
    programs = rank_actions(schedule, RANKS, 4, SCHEDULES[schedule])
    for rank, program in zip(ranks, programs, strict=True):
        assert rank[schedule]["actions"] == [tuple(each) for each in program if isinstance(each, Compute)]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """What each rank of each replica wrote."""
    folder, count = tmp_path_factory.mktemp("replicas"), of_replica["STAGES"] * of_replica["DP"]
    launch(folder, script=REPLICAS, ranks=count)
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


@pytest.mark.parametrize("name", of_replica["AS_VIEW"])
def test_replicas_have_gradients_of_all_batches_together(replicas, name):
    expected = alone(of_replica["scenario"](name), replicas=of_replica["DP"])
    for first in range(0, len(replicas), of_replica["STAGES"]):
        ranks = replicas[first : first + of_replica["STAGES"]]
        found = {key: gradient for rank in ranks for key, gradient in rank[name]["gradients"].items()}
        assert found.keys() == expected.keys()
        for key, gradient in found.items():
            torch.testing.assert_close(gradient, expected[key], atol=1e-7, rtol=1e-4)
    first, _, second, _ = (rank[name]["inputs"].get("input_ids") for rank in replicas)
    assert not torch.equal(first, second)  # each replica has a batch of its own


def done(program, stages):
    """What a program does with gradients, as :func:`rank_replicas.record` writes it down."""
    found, columns, left = [], program.instructions, iter(stages)
    for number, run in enumerate(program.runs):
        if run.phase not in ("forward", "backward"):
            continue
        stage = next(left)
        found.append(("F" if run.phase == "forward" else "B", stage, run.micro_batch))
        for at in np.flatnonzero(columns.run == number).tolist():
            if columns.kind[at] == EventKind.GRAD_READY:
                found.append(("ready", stage, program.trace.parameters[columns.a[at]].tensor.shape))
            elif columns.kind[at] == COLLECTIVE and program.collectives[columns.a[at]].kind == "all_reduce":
                found.append(("reduce", program.collectives[columns.a[at]].size_bytes))
        found.append(("end",))
    return found


@pytest.mark.parametrize("name", of_replica["AS_VIEW"])
def test_buckets_are_reduced_when_the_program_reduces_them(replicas, name):
    asked = of_replica["scenario"](name)
    section = asked.parallelism.pp
    actions = rank_actions(section.schedule, section.stages, section.micro_batches, section.virtual_stages)
    for each in rank_programs(asked):
        stages = [action.stage for action in actions[each.ranks[0]] if isinstance(action, Compute)]
        expected = done(each.program, stages)
        assert sum(event[0] == "reduce" for event in expected) > 2 * section.virtual_stages
        for rank in each.ranks:
            assert replicas[rank][name]["log"] == expected


def test_a_step_has_three_phases(ranks):
    assert ranks[0]["1f1b"]["phases"] == ["zero_grad", "pipeline", "optimizer", "end"]


def test_stages_that_do_not_fit_are_refused_on_every_rank(ranks):
    sentence = (
        "1f1b: stage 0 must give what stage 1 takes (it gives [2, 8, 16] of float32, where [2, 8, 16] of bfloat16 is "
        "taken). Cast it at the end of the stage's forward."
    )
    assert [rank["refused"] for rank in ranks] == [sentence] * RANKS


def test_a_stage_that_gives_another_type_ends_in_a_sentence(tmp_path):
    started_s = time.monotonic()
    sentence = "1f1b: stage 0 must give [2, 8, 16] of float32, which stage 1 expects (it gave [2, 8, 16] of bfloat16)"
    with pytest.raises(PerfModelError, match=re.escape(sentence)):
        launch(tmp_path, "wrong")
    assert time.monotonic() - started_s < 200  # a rank waits for another for 240


PIPELINE = {"stages": 2, "micro_batches": 4}


def two(parallelism=None, gpus=2, batch=4, **keys):
    data = {
        "name": "tiny",
        "model": {"family": "gpt", "size": "tiny"},
        "batch": {"size": batch, "sequence_length": 8},
        "parallelism": {"pp": PIPELINE} | (parallelism or {}),
        "hardware": {"profile": "cpu.json", "gpus": gpus},
    }
    return Scenario.model_validate(data | keys)


def test_a_pipeline_is_measured_with_what_each_stage_computed_when(tmp_path):
    measured = measure(two(), "cpu", effort=QUICK, timeout_s=120)
    assert list(measured.phases_s) == ["zero_grad", "pipeline", "optimizer"]
    assert (len(measured.ranks), measured.actions) == (2, measured.ranks[0].actions)
    first, last = ({(each.kind, each.micro_batch): each for each in rank.actions} for rank in measured.ranks)
    for rank, stage in ((first, 0), (last, 1)):
        assert sorted(rank) == [(kind, micro_batch) for kind in "BF" for micro_batch in range(4)]
        assert {each.stage for each in rank.values()} == {stage}
        assert all(0 <= each.start_s < each.end_s for each in rank.values())
    for micro_batch in range(4):
        assert first["F", micro_batch].end_s < last["F", micro_batch].start_s
        assert last["F", micro_batch].end_s <= last["B", micro_batch].start_s
        assert last["B", micro_batch].end_s < first["B", micro_batch].start_s
    path = tmp_path / "tiny.json"
    save_measurement(measured, path)
    assert load_measurement(path) == measured


def test_replicas_of_a_pipeline_are_measured_rank_by_rank():
    measured = measure(two({"dp": 2, "strategy": "ddp"}, gpus=4), "cpu", effort=QUICK, timeout_s=120)
    assert list(measured.phases_s) == ["zero_grad", "pipeline", "optimizer"]
    stages = [{each.stage for each in rank.actions} for rank in measured.ranks]
    assert stages == [{0}, {1}, {0}, {1}]
    assert all(len(rank.actions) == 8 for rank in measured.ranks)


def test_what_cannot_be_run_is_refused_before_it_starts():
    """Rules of pipelines are those of scenarios; see tests/scenario/test_rules.py."""
    with refused("hardware.gpus", "gpus=4", "stages=2", "dp=1", 2):
        measure(two(gpus=4), "cpu")
