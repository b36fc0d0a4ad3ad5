"""Every schedule on two gloo ranks against one process that has the whole model and batch; what must not hang; the file."""

import os
import re
import runpy
import time
from pathlib import Path

import pytest
import torch

from calibrate.ranks import Launch, run_ranks
from perfmodel.errors import PerfModelError
from perfmodel.hardware.measurement import load_measurement, save_measurement
from perfmodel.program.pipeline.orders import Compute
from perfmodel.program.pipeline.schedules import rank_actions
from perfmodel.workload.models.step import TrainingStep, build_module, make_inputs, make_optimizer
from perfmodel.workload.scenario import Scenario
from validate.pipelines import SEED
from validate.run import measure
from validate.worker import Effort

SCRIPT = Path(__file__).parent / "rank_pipelines.py"
ROOT = Path(__file__).parent.parent.parent
of_rank = runpy.run_path(str(SCRIPT))
RANKS, TRIED, SCHEDULES, scenario = (of_rank[name] for name in ("RANKS", "TRIED", "SCHEDULES", "scenario"))
TIED = {
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "bert": ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
}
QUICK = Effort(
    warmup_steps=3, warmup_s=0.0, steady_s=0.0, least_steps=4, most_steps=4, synced_s=0.0, least_synced_steps=1
)


def launch(folder, *arguments):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run_ranks(Launch("pipelines", [str(SCRIPT), str(folder), *arguments], RANKS, "cpu", folder, 120.0, environment))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    launch(folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def alone(name):
    """Gradients of the whole module over the whole batch at once."""
    asked = scenario(name)
    torch.manual_seed(0)
    module = build_module(asked)
    inputs = make_inputs(asked, "cpu", torch.Generator().manual_seed(SEED))
    TrainingStep(module, inputs, make_optimizer(module.parameters(), asked), asked).run()
    return {key: parameter.grad for key, parameter in module.named_parameters()}


@pytest.mark.parametrize("name", TRIED)
def test_gradients_are_those_of_the_whole_batch(ranks, name):
    found = ranks[0][name]["gradients"] | ranks[1][name]["gradients"]
    assert len(found) == sum(len(rank[name]["gradients"]) for rank in ranks)
    if name in TIED:  # the shared matrix is in two parts, each with its own share of the gradient
        embeddings, head = TIED[name]
        found[embeddings] = found[embeddings] + found.pop(head)
    expected = alone(name)
    assert found.keys() == expected.keys()
    tolerance = {"atol": 2e-3, "rtol": 0.1} if name == "amp" else {"atol": 1e-7, "rtol": 1e-4}
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, expected[key], **tolerance)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_computed_is_what_the_program_computes(ranks, schedule):
    programs = rank_actions(schedule, RANKS, 4, SCHEDULES[schedule])
    for rank, program in zip(ranks, programs, strict=True):
        assert rank[schedule]["actions"] == [tuple(each) for each in program if isinstance(each, Compute)]


def test_a_step_has_three_phases(ranks):
    assert ranks[0]["1f1b"]["phases"] == ["zero_grad", "pipeline", "optimizer", "end"]


def test_stages_that_do_not_fit_are_refused_on_every_rank(ranks):
    sentence = (
        "1f1b: stage 0 must give what stage 1 takes (it gives [2, 8, 16] of float32, where [2, 8, 16] of bfloat16 is "
        "taken). Cast it at the end of the part's forward."
    )
    assert [rank["refused"] for rank in ranks] == [sentence] * RANKS


def test_a_stage_that_gives_another_type_ends_in_a_sentence(tmp_path):
    started_s = time.monotonic()
    sentence = "1f1b: stage 0 must give [2, 8, 16] of float32, which stage 1 expects (it gave [2, 8, 16] of bfloat16)"
    with pytest.raises(PerfModelError, match=re.escape(sentence)):
        launch(tmp_path, "wrong")
    assert time.monotonic() - started_s < 55  # a rank waits for another for 60


def two(parallelism=None, gpus=2, batch=4, **keys):
    data = {
        "name": "tiny",
        "model": {"family": "gpt", "size": "tiny"},
        "batch": {"size": batch, "sequence_length": 8},
        "parallelism": {"pp": {"stages": 2, "micro_batches": 4}} | (parallelism or {}),
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


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (two(gpus=4), "tiny: hardware.gpus must be parallelism.pp.stages (got gpus=4, stages=2)"),
        (two({"dp": 2, "strategy": "ddp"}), "tiny: parallelism.dp must be 1 with a pipeline (got 2)"),
        (two(mode="forward"), "tiny: mode must be train with a pipeline (got forward)"),
        (two(training={"gradient_accumulation": 2}), "tiny: training.gradient_accumulation must be 1 with a pipeline"),
        (two(optimizer={"max_grad_norm": 1.0}), "tiny: optimizer.max_grad_norm must be left out with a pipeline"),
        (two(precision="amp-fp16"), "tiny: precision must not be amp-fp16 with a pipeline"),
        (two(batch=6), "parallelism.pp.micro_batches must divide batch.size=6 (got 4)"),
    ],
)
def test_what_cannot_be_run_is_refused_before_it_starts(asked, sentence):
    with pytest.raises(PerfModelError, match=re.escape(sentence)):
        measure(asked, "cpu")
