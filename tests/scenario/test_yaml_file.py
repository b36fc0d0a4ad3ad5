"""What a scenario file may be, what --set changes, and the one sentence for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import PerfModelError
from perfmodel.hardware.interconnect import Interconnect
from perfmodel.hardware.profile import Device, KernelRecord, Profile, save_profile
from perfmodel.scenario.yaml_file import load_question, load_scenario, parse_assignment, parse_yaml, with_assignments
from tests.refusals import refused

GOOD = "model: {family: gpt, size: tiny}\nbatch: {size: 2, sequence_length: 16}\nhardware: {profile: x}\n"
EXAMPLES = "The files in scenarios/ show how one is written."
PLAIN = "values must be plain text, numbers, lists or mappings"
BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "s.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_defaults(tmp_path: Path) -> None:
    scenario = load_scenario(written(tmp_path, GOOD))
    assert scenario.model_dump(exclude_defaults=True) == {
        "model": {"family": "gpt", "size": "tiny"},
        "batch": {"size": 2, "sequence_length": 16},
        "hardware": {"profile": "x"},
    }
    assert (scenario.mode, scenario.precision, scenario.optimizer.name) == ("train", "fp32", "adamw")


def test_aliases_and_merges_are_plain_data() -> None:
    assert parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n", "f") == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", f"a scenario must hold model, batch and hardware (got nothing). {EXAMPLES}"),
        ("# only a comment\n", f"a scenario must hold model, batch and hardware (got nothing). {EXAMPLES}"),
        ("- a\n- b\n", f"a scenario must be a mapping of keys to values (got a list). {EXAMPLES}"),
        ("hello", f"a scenario must be a mapping of keys to values (got a str). {EXAMPLES}"),
        ("a: &a [*a]", "an alias must not stand inside what it names (got one in line 1). Write it out."),
        ("a: &a {<<: *a}", "an alias must not stand inside what it names (got one in line 1). Write it out."),
        (BOMB, f"YAML must hold at most 10000 values once aliases are followed. {EXAMPLES}"),
        ("- a\n" * 20_000 + "]", f"YAML must hold at most 10000 values (got more by line 10001). {EXAMPLES}"),
        ("[" * 60 + "]" * 60, f"YAML must nest at most 50 levels (got more in line 1). {EXAMPLES}"),
        ("[" * 100_000, f"YAML must nest at most 50 levels (got more). {EXAMPLES}"),
        (
            GOOD + "name: !!python/object/apply:os.system [ls]",
            f"{PLAIN} (got 'python/object/apply:os.system' in line 4). Remove the tag, or quote it.",
        ),
        (GOOD + "name: 2020-01-01", f"{PLAIN} (got 'timestamp' in line 4). Remove the tag, or quote it."),
        (GOOD + "name: a\nname: b", "'name' must be given once (got it again in line 1). Remove one."),
        (GOOD + "? [a]\n: 3", f"keys must be plain text (got a list or mapping in line 1). {EXAMPLES}"),
        (b"\x00\xff\x01", f"a scenario must be UTF-8 text (byte 1 is not). {EXAMPLES}"),
        (b"\x00\x01\x02", f"must be whole YAML (special characters are not allowed). {EXAMPLES}"),
        (
            GOOD[:20],
            "must be whole YAML (line 1, column 21: expected the node content, but found '<stream end>'). " + EXAMPLES,
        ),
        (GOOD + "---\n" + GOOD, f"must be whole YAML (line 4, column 1: but found another document). {EXAMPLES}"),
        ("version: 2\n" + GOOD, "version must be at most 1 (got 2). Update perfmodel to read it."),
        ("version: true\n" + GOOD, f"version must be an integer from 1 to 1 (got True). {EXAMPLES}"),
        (
            GOOD.replace("{size: 2", "{size: -2"),
            "batch.size must be greater than or equal to 1 (got -2). `perfmodel schema scenario` says what each key takes.",
        ),
        (GOOD.replace("{size: 2", "{size: .nan"), "batch.size must be a finite number (got nan). Write a number."),
        (GOOD + "optimizer: {max_grad_norm: .inf}", "optimizer.max_grad_norm must be a finite number (got inf). Write a number."),
        (GOOD.replace("batch:", "bacth:").replace("size: 2, sequence_length: 16", "size: 2"), "bacth must be a key of a scenario (got {'size': 2}). Did you mean 'batch'?"),
        (GOOD.replace("gpt", "gtp"), "model.family must be a known family (got 'gtp'). Did you mean 'gpt'?"),
        (
            GOOD.replace("size: tiny", "layers: 2, width: 64, heads: 5, ffn_width: 256"),
            "model.heads must divide model.width=64 (got 5). Use 1, 2, 4, 8, 16, 32 or 64.",
        ),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, content: str | bytes, sentence: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(PerfModelError) as caught:
        load_scenario(path)
    assert str(caught.value) == f"{path}: {sentence}"


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(PerfModelError, match=r"must be a readable file \(No such file or directory\)"):
        load_scenario(tmp_path / "none.yaml")
    with pytest.raises(PerfModelError, match=r"must be a regular file \(got a directory\)"):
        load_scenario(tmp_path)
    path = written(tmp_path, "#" * (2**20 + 1))
    with pytest.raises(PerfModelError, match=r"must hold at most 1 MiB \(got more\)"):
        load_scenario(path)


@given(st.one_of(st.text(max_size=60), st.text(alphabet="{}[]:-,&*!<>?|\n ab1.'\"#%", max_size=60)))
def test_any_text_is_data_or_a_sentence(text: str) -> None:
    try:
        parse_yaml(text, "f")
    except PerfModelError as error:
        assert str(error).startswith("f: ")
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch.size=8", ("batch.size", 8)),
        ("model.size=2.7b", ("model.size", "2.7b")),
        ("hardware.device.memory_bytes=80e9", ("hardware.device.memory_bytes", 80e9)),
        ("a=-1.5E-3", ("a", -1.5e-3)),
        ("a={every: 2}", ("a", {"every": 2})),
        ("a=null", ("a", None)),
        ("name=x=y", ("name", "x=y")),
        ("hardware.kernels.aten.f(a, p=2).time_s=1e-3", ("hardware.kernels.aten.f(a, p=2).time_s", 1e-3)),
    ],
)
def test_assignments(text: str, expected: tuple[str, object]) -> None:
    assert parse_assignment(text) == expected


@pytest.mark.parametrize("text", ["batch.size", "=3", ""])
def test_assignment_without_key_or_value(text: str) -> None:
    with pytest.raises(PerfModelError) as caught:
        parse_assignment(text)
    assert str(caught.value) == f"--set must read key=value (got {text!r}). For example --set batch.size=8."


def test_assignments_change_the_scenario(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    scenario = load_scenario(path, ["batch.size=4", "training.gradient_accumulation=2", "hardware.gpus=1"])
    assert (scenario.batch.size, scenario.training.gradient_accumulation, scenario.hardware.gpus) == (4, 2, 1)
    with refused("batch.siz", 4, "size"):
        load_scenario(path, ["batch.siz=4"])
    with pytest.raises(PerfModelError, match=r"--set name\.x\.y: name must be a section to hold x.y"):
        load_scenario(written(tmp_path, GOOD + "name: toy\n"), ["name.x.y=4"])


def small_profile(**changes: object) -> Profile:
    known = Profile(
        name="p",
        device=Device(kind="cuda", name="gpu", memory_bytes=100),
        kernels={"aten.f(a, p=2)": KernelRecord(time_s=1.0)},
    )
    return known.model_copy(update=changes)


def test_assignments_change_the_profile() -> None:
    changed = with_assignments(
        small_profile(),
        [
            "batch.size=4",
            "hardware.gpus=4",
            "hardware.device.memory_bytes=80e9",
            "hardware.kernels.aten.f(a, p=2).time_s=2",
        ],
    )
    assert changed.device.memory_bytes == 80_000_000_000
    assert changed.kernels["aten.f(a, p=2)"].time_s == 2.0
    assert changed.gpus == 1  # hardware.gpus is the scenario's
    assert changed.provenance == {
        "set": {"hardware.device.memory_bytes": "80e9", "hardware.kernels.aten.f(a, p=2).time_s": "2"}
    }


def test_what_was_set_is_kept_apart_from_what_it_changed() -> None:
    cases = (["hardware.provenance={}"], ["hardware.cache={}", "hardware.cache.code_miss_s=1"])
    for assignments in cases:
        changed = with_assignments(small_profile(), assignments)
        assert changed.provenance["set"] == {
            key: value for key, _, value in (text.partition("=") for text in assignments)
        }
        assert changed.original.provenance == {}
    with pytest.raises(PerfModelError, match=r"hardware\.provenance must be a mapping"):
        with_assignments(small_profile(), ["hardware.provenance=null"])


def test_profile_is_left_alone_without_assignments() -> None:
    profile = small_profile()
    assert with_assignments(profile, ["batch.size=4"]) is profile


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("hardware.device.memory=3", "--set hardware.device.memory must be a key of device (got 3). Did you mean 'memory_bytes'?"),
        ("hardware.launch.latency_s=-1", "--set hardware.launch.latency_s must be greater than or equal to 0 (got -1). `perfmodel schema profile` says what each key takes."),
        ("hardware.launch.latency_s=.nan", "--set: hardware.launch.latency_s must be a finite number (got nan). Write a number."),
    ],
)  # fmt: skip
def test_refused_profile_values(assignment: str, sentence: str) -> None:
    with pytest.raises(PerfModelError) as caught:
        with_assignments(small_profile(), [assignment])
    assert str(caught.value) == sentence


def test_question_on_this_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cpu = Device(kind="cpu", name="cpu", memory_bytes=100)
    save_profile(small_profile(), Path("gpu.json"))
    save_profile(small_profile(device=cpu, name="default"), Path("cpu.json"))
    save_profile(small_profile(device=cpu, name="own"), Path("own.json"))
    path = written(tmp_path, GOOD)
    names = [
        load_question(path, [f"hardware.profile={name}", "hardware.gpus=2"], device)[1].name
        for name, device in [("gpu.json", None), ("gpu.json", "cpu"), ("own.json", "cpu"), ("cpu.json", "cpu")]
    ]
    assert names == ["p", "default", "own", "default"]
    assert load_question(path, ["hardware.profile=gpu.json", "hardware.gpus=2"], "cpu")[0].hardware.gpus == 1


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        (["parallelism.dp=2", "hardware.interconnect=b"], "b"),
        (["parallelism.dp=2"], "a"),  # the profile's own
        (["hardware.interconnect=b"], "none"),  # one rank
    ],
)
def test_values_of_an_interconnect_that_is_not_in_use_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str], used: str
) -> None:
    monkeypatch.chdir(tmp_path)
    wires = {name: Interconnect(backend="nccl") for name in ("a", "b", "b2")}
    save_profile(small_profile(interconnects=wires, interconnect="a"), Path("p.json"))
    path = written(tmp_path, GOOD)
    for name in wires:
        change = [*asked, "hardware.profile=p.json", f"hardware.interconnects.{name}.bandwidth_factor=2"]
        assert load_question(path, change, others=True)[1].interconnects[name].bandwidth_factor == 2
        if name == used:
            assert load_question(path, change)[1].interconnects[name].bandwidth_factor == 2
            continue
        with pytest.raises(PerfModelError) as caught:
            load_question(path, change)
        assert str(caught.value) == (
            f"--set hardware.interconnects.{name}.bandwidth_factor must change an interconnect that is in use (in use: "
            f"{used}). Choose it by hardware.interconnect and parallelism.dp, or leave it out."
        )


def test_question_names_the_missing_profile(tmp_path: Path) -> None:
    with refused("hardware.profile", "x"):
        load_question(written(tmp_path, GOOD))
