"""Case lists: the shipped one covers what it must, and every refusal is one sentence."""

import re
from collections import Counter
from typing import get_args

import pytest

from perfmodel.errors import PerfModelError
from perfmodel.hardware.profile import Device, Profile, save_profile
from perfmodel.scenario.scenario import Scenario, Schedule, workload_of
from validate.cases import HERE, choose_cases, load, resolved_scenario

ONE_GPU = load(HERE / "one-gpu.yaml")
DATA_PARALLEL = load(HERE / "data-parallel.yaml")
SHARDED = load(HERE / "sharded.yaml")
PIPELINES = load(HERE / "pipelines.yaml")
CASE = "{name: a, split: tuning, class: x, scenario: {model: {family: gpt, size: tiny}, %s}}"
GOOD = CASE % "batch: {size: 1, sequence_length: 8}, hardware: {profile: p}"


def test_the_shipped_list_holds_out_a_third_of_every_class():
    classes = Counter(case.group for case in ONE_GPU)
    held_out = Counter(case.group for case in ONE_GPU if case.split == "held-out")
    assert set(classes) == {"gpt-fp32", "gpt-amp", "transformers", "vision", "variants", "launch-bound", "host-bound"}
    assert sum(classes.values()) >= 28
    assert all(held_out[name] >= count / 3 for name, count in classes.items())


@pytest.mark.parametrize(
    ("cases", "names", "least"),
    [
        (DATA_PARALLEL, {"ddp-nvlink", "ddp-host-memory", "ddp-two-nodes", "forms"}, 36),
        (SHARDED, {"zero-nvlink", "zero-settings", "zero-host-memory", "zero-two-nodes"}, 30),
        (PIPELINES, {"pp-nvlink", "pp-schedules", "pp-host-memory", "pp-ddp"}, 36),
    ],
    ids=["data-parallel", "sharded", "pipelines"],
)
def test_lists_of_several_gpus_hold_out_a_third_of_every_class(cases, names, least):
    classes = Counter(case.group for case in cases)
    held_out = Counter(case.group for case in cases if case.split == "held-out")
    assert set(classes) == names
    assert sum(classes.values()) >= least
    assert all(held_out[name] >= count / 3 for name, count in classes.items())


def test_the_sharded_list_has_every_stage_wiring_model_and_precision():
    scenarios = [case.scenario for case in SHARDED]
    assert {s.parallelism.strategy for s in scenarios} == {"none", "ddp", "zero1", "zero2", "zero3"}
    assert {s.hardware.interconnect for s in scenarios} == {None, "nvlink", "host-memory", "two-nodes"}
    assert {(s.model.family, s.model.size) for s in scenarios} >= {
        *(("gpt", size) for size in ("large", "xl", "2.7b")),
        ("gpt2", "1.5b"),
        *(("llama", size) for size in ("1b", "3b", "8b")),
    }
    policies = [s.parallelism.fsdp.mixed_precision for s in scenarios if s.parallelism.fsdp is not None]
    assert {(each.param, each.reduce) for each in policies if each is not None} == {("bf16", None), ("bf16", "fp32")}


def test_the_pipeline_list_has_every_schedule_wiring_model_and_number_of_gpus():
    scenarios = [case.scenario for case in PIPELINES]
    sections = [scenario.parallelism.pp for scenario in scenarios]
    assert {section.schedule for section in sections} == set(get_args(Schedule))
    assert {section.stages for section in sections} == {2, 3, 4}
    assert all(s.parallelism.ranks == s.hardware.gpus for s in scenarios)
    assert {(s.parallelism.dp, s.parallelism.strategy) for s in scenarios} == {(1, "none"), (2, "ddp")}
    assert {section.micro_batches for section in sections} >= {2, 4, 8, 16, 32}
    assert any(section.layers is not None for section in sections)
    assert {s.hardware.interconnect for s in scenarios} == {"nvlink", "host-memory"}
    assert {s.precision for s in scenarios} == {"fp32", "bf16"}
    assert {(s.model.family, s.model.size) for s in scenarios} >= {
        *(("gpt", size) for size in ("large", "xl", "2.7b")),
        ("bert", "large"),
    }


def test_the_data_parallel_list_has_every_form_and_wiring():
    scenarios = [case.scenario for case in DATA_PARALLEL]
    assert {s.hardware.gpus for s in scenarios} == {2, 4}
    assert all(s.parallelism.dp == s.hardware.gpus for s in scenarios)
    assert all(s.hardware.nodes == (2 if s.hardware.interconnect == "two-nodes" else 1) for s in scenarios)
    wirings = {"nvlink", "host-memory", "two-nodes"}
    for strategy in ("naive", "flat", "overlap", "ddp"):
        assert len({s.hardware.interconnect for s in scenarios if s.parallelism.strategy == strategy}) >= 2
    assert {s.hardware.interconnect for s in scenarios} == wirings
    sizes = {s.model.size for s in scenarios if s.model.family == "gpt"}
    assert sizes == {"small", "medium", "large", "xl", "2.7b"}
    assert {s.model.family for s in scenarios} == {"gpt", "gpt2", "llama", "bert", "vgg16", "resnet50"}
    assert any(s.training.gradient_accumulation == 4 for s in scenarios)
    for case in DATA_PARALLEL:
        wiring = case.group.removeprefix("ddp-")
        assert case.group == "forms" or wiring == case.scenario.hardware.interconnect


def test_bucket_groups_share_everything_but_the_cap():
    groups = {}
    for case in DATA_PARALLEL:
        if "-bucket" in case.name:
            name, _, cap = case.name.rpartition("-bucket")
            section = case.scenario.parallelism
            assert section.bucket_cap_mb == float(cap)
            without = section.model_copy(update={"bucket_cap_mb": None})
            scenario = case.scenario.model_copy(update={"name": name, "parallelism": without})
            groups.setdefault(name, []).append((section.bucket_cap_mb, scenario))
    assert sorted(scenarios[0][1].hardware.interconnect for scenarios in groups.values()) == [
        "host-memory",
        "nvlink",
        "two-nodes",
    ]
    for members in groups.values():
        assert [cap for cap, _ in members] == [1, 5, 25, 100, 500]
        assert all(scenario == members[0][1] for _, scenario in members)


def test_the_shipped_list_has_every_kind_of_step():
    scenarios = [case.scenario for case in ONE_GPU]
    gpt = {(s.model.size, s.precision) for s in scenarios if s.model.family == "gpt" and s.batch.size == 16}
    assert gpt >= {(size, p) for size in ("small", "medium", "large", "xl", "2.7b") for p in ("fp32", "amp-bf16")}
    assert {s.model.family for s in scenarios} == {"gpt", "gpt2", "llama", "bert", "vgg16", "resnet50"}
    assert {s.precision for s in scenarios} == {"fp32", "tf32", "bf16", "amp-bf16", "amp-fp16"}
    assert {s.optimizer.implementation for s in scenarios} == {"foreach", "fused", "for-loop"}
    assert {s.mode for s in scenarios} == {"train", "forward"}
    assert any(s.optimizer.max_grad_norm for s in scenarios)
    assert any(s.training.gradient_accumulation == 4 for s in scenarios)
    assert any(s.training.activation_checkpointing == "full" for s in scenarios)
    assert all((s.hardware.gpus, s.hardware.profile) == (1, "h200-sxm-x4") for s in scenarios)


def test_cases_name_their_scenarios():
    assert [case.scenario.name for case in ONE_GPU] == [case.name for case in ONE_GPU]


@pytest.mark.parametrize("case", ONE_GPU, ids=[case.name for case in ONE_GPU])
def test_a_resolved_scenario_loads_as_the_same_workload(case):
    again = Scenario.model_validate(resolved_scenario(case.scenario))
    assert workload_of(again) == workload_of(case.scenario)
    assert resolved_scenario(again) == resolved_scenario(case.scenario)


def test_a_target_keeps_its_keys_when_resolved():
    model = {"target": "m:f", "arguments": {"n": 1}, "inputs": {"x": {"shape": ["batch"], "dtype": "float32"}}}
    scenario = Scenario(model=model, batch={"size": 1}, hardware={"profile": "p"})
    assert Scenario.model_validate(resolved_scenario(scenario)) == scenario


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "a case list must be a list of cases (got None)"),
        ("name: a", "a case list must be a list of cases (got {'name': 'a'})"),
        ("- [", "must be whole YAML"),
        ("- !!python/object/apply:os.getcwd []", "values must be plain text, numbers, lists or mappings"),
        ("- 3", "case 1 must be a mapping of keys to values (got 3)"),
        ("- {name: a, split: tuning, class: x}", "case 1: scenario must be given"),
        (f"- {GOOD}\n- {GOOD}", "case names must differ (got 'a' twice)"),
        ("- " + GOOD.replace("split", "splt"), "case 1: split must be given"),
        ("- " + GOOD.replace("{name", "{nme: 1, name"), "nme must be a key of a case. Did you mean 'name'?"),
        ("- " + GOOD.replace("tuning", "test"), "split must be tuning or held-out (got 'test')"),
        ("- " + GOOD.replace("name: a", "name: ../a"), "name must be of letters, digits, dots, dashes and underscores"),
        (
            "- " + CASE % "batch: {size: 0, sequence_length: 8}, hardware: {profile: p}",
            "case 1 (a): batch.size must be",
        ),
        ("- " + CASE % "batch: {size: 1}, hardware: {profile: p}", "(a): batch.sequence_length must be given for gpt"),
    ],
)
def test_refusals(tmp_path, text, sentence):
    path = tmp_path / "cases.yaml"
    path.write_text(text)
    with pytest.raises(PerfModelError, match=re.escape(sentence)) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))


def test_a_missing_list_is_refused(tmp_path):
    with pytest.raises(PerfModelError, match="must be a readable file"):
        load(tmp_path / "none.yaml")


@pytest.fixture
def question(tmp_path):
    """A scenario file, and the profile it names."""
    save_profile(Profile(name="own", device=Device(kind="cpu", name="CPU", memory_bytes=1)), tmp_path / "own.json")
    path = tmp_path / "a-question.yaml"
    path.write_text(
        "model: {family: gpt, size: tiny}\n"
        "batch: {size: 1, sequence_length: 8}\n"
        f"hardware: {{profile: {tmp_path / 'own.json'}}}\n"
    )
    return path


def test_a_scenario_is_a_list_of_one(question):
    (case,) = choose_cases(question, ["batch.size=3"], "cpu")
    assert (case.name, case.split, case.group, case.scenario.batch.size) == ("a-question", "tuning", "own", 3)
    (case,) = choose_cases(question, ["name=other"])
    assert case.name == "other"
    with pytest.raises(PerfModelError, match=re.escape("name must be of letters, digits")):
        choose_cases(question, ["name=a/b"])


def test_a_list_can_be_narrowed_but_not_changed():
    path = HERE / "one-gpu.yaml"
    assert choose_cases(path) == ONE_GPU
    assert [case.name for case in choose_cases(path, only=["gpt-xl-tf32"])] == ["gpt-xl-tf32"]
    with pytest.raises(PerfModelError, match=re.escape("--only must name a case (got 'gpt-xl-tf23'). Did you mean")):
        choose_cases(path, only=["gpt-xl-tf23"])
    with pytest.raises(PerfModelError, match=re.escape("(got 'nothing'). There are 44, of which the closest")) as found:
        choose_cases(path, only=["nothing"])
    assert len(str(found.value)) < 300
    with pytest.raises(PerfModelError, match=re.escape("--set must be left out with a list of cases")):
        choose_cases(path, ["batch.size=1"])
