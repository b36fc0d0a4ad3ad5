"""Each kind of complaint that pydantic makes, as the sentence a user reads."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest
from pydantic import ValidationError

from perfmodel.files.validation import sentence_of, shortened
from perfmodel.hardware.profile import Profile
from perfmodel.scenario.scenario import Scenario

LISTS = "`perfmodel schema scenario` says what each key takes."


def scenario_data(changes: dict[Any, Any]) -> dict[Any, Any]:
    data: dict[Any, Any] = {
        "model": {"family": "gpt", "size": "tiny"},
        "batch": {"size": 1, "sequence_length": 8},
        "hardware": {"profile": "x"},
    }
    return data | changes


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"bacth": 3}, "bacth must be a key of a scenario (got 3). Did you mean 'batch'?"),
        ({"batch": {"sise": 3}}, "batch.sise must be a key of batch (got 3). Did you mean 'size'?"),
        ({"batch": {}}, "batch.size must be given. Add it; `perfmodel schema scenario` lists every key."),
        (
            {"batch": 3},
            "batch must be a mapping of keys to values (got 3). `perfmodel schema scenario` lists its keys.",
        ),
        ({"batch": {"size": -3}}, f"batch.size must be greater than or equal to 1 (got -3). {LISTS}"),
        (
            {"parallelism": {"pp": {"stages": "2", "micro_batches": 2}}},
            f"parallelism.pp.stages must be an integer (got '2'). {LISTS}",
        ),
        (
            {"parallelism": {"pp": {"stages": 2.0, "micro_batches": 2}}},
            f"parallelism.pp.stages must be an integer (got 2.0). {LISTS}",
        ),
        (
            {"parallelism": {"pp": {"stages": 2, "micro_batches": 2, "layers": "2,2"}}},
            f"parallelism.pp.layers must be a list (got '2,2'). {LISTS}",
        ),
        ({"hardware": {"profile": "x", "gpu_speeds": 1}}, f"hardware.gpu_speeds must be a list (got 1). {LISTS}"),
        ({"batch": {"size": 2.0}}, f"batch.size must be an integer (got 2.0). {LISTS}"),
        *(
            (
                {"parallelism": {"fsdp": {"reshard_after_forward": given}}},
                "parallelism.fsdp.reshard_after_forward must be true, false or a number of ranks "
                f"(got {given!r}). {LISTS}",
            )
            for given in (0, -1, 2.0, 1.0, "yes", [2])
        ),
        ({"name": 3}, f"name must be a string (got 3). {LISTS}"),
        (
            {"precision": "fp33"},
            "precision must be 'fp32', 'tf32', 'bf16', 'fp16', 'amp-bf16' or 'amp-fp16' (got 'fp33'). Did you mean 'fp32'?",
        ),
        (
            {"training": {"activation_checkpointing": "ful"}},
            "training.activation_checkpointing must be 'none', 'full' or 'selective' (got 'ful'). Did you mean 'full'?",
        ),
        (
            {"training": {"activation_checkpointing": {"every": 0}}},
            f"training.activation_checkpointing.every must be greater than or equal to 1 (got 0). {LISTS}",
        ),
        (
            {"model": {"target": "a:b", "inputs": {"x": {"shape": ["batsh"]}}}},
            "model.inputs.x.shape.0 must be 'batch' or 'sequence' (got 'batsh'). Did you mean 'batch'?",
        ),
        (
            {"model": {"target": "a:b", "inputs": {"x": {"shape": [1], "dtyp": "int64"}}}},
            "model.inputs.x.dtyp must be a key of model.inputs.x (got 'int64'). Did you mean 'dtype'?",
        ),
        (
            {"\udcff": 2},
            r"a scenario must have keys that are strings (got '\udcff'). Put it in quotes, or leave it out.",
        ),
        ({1: 2}, "a scenario must have keys that are strings (got 1). Put it in quotes, or leave it out."),
        (
            {"model": {"target": "a:b", "arguments": {1: 2}}},
            "model.arguments must have keys that are strings (got 1). Put it in quotes, or leave it out.",
        ),
        (
            {"model": {"target": "a:b", "inputs": {"x": {"shape": [1.5]}}}},
            f"model.inputs.x.shape.0 must be 'batch' or 'sequence' or an integer (got 1.5). {LISTS}",
        ),
        ({"training": {"compile": "maybe"}}, f"training.compile must be true or false (got 'maybe'). {LISTS}"),
        ({"optimizer": {"momentum": 1.5}}, f"optimizer.momentum must be less than 1 (got 1.5). {LISTS}"),
        ({"name": date(2026, 1, 2)}, f"name must be a string (got 2026-01-02). {LISTS}"),
    ],
)
def test_scenario_sentences(changes: dict[str, Any], sentence: str) -> None:
    data = scenario_data(changes)
    with pytest.raises(ValidationError) as caught:
        Scenario.model_validate(data)
    assert sentence_of(caught.value, Scenario, data, "scenario") == sentence


@pytest.mark.parametrize("given", [True, False, None, 1, 8])
def test_resharding_keeps_booleans_and_numbers_apart(given: bool | int | None) -> None:
    data = scenario_data({"parallelism": {"fsdp": {"reshard_after_forward": given}}})
    section = Scenario.model_validate(data).parallelism.fsdp
    assert section is not None
    assert (type(section.reshard_after_forward), section.reshard_after_forward) == (type(given), given)


def test_profile_sentence_names_the_kernel_key() -> None:
    data = {
        "name": "a",
        "device": {"kind": "cpu", "name": "x", "memory_bytes": 1},
        "kernels": {"aten.mm.default(x)": {"time_s": -1}},
    }
    with pytest.raises(ValidationError) as caught:
        Profile.model_validate(data)
    assert sentence_of(caught.value, Profile, data, "profile") == (
        "kernels.aten.mm.default(x).time_s must be greater than 0 (got -1). "
        "`perfmodel schema profile` says what each key takes."
    )


def test_values_are_shortened() -> None:
    assert shortened("x" * 100) == "'" + "x" * 56 + "..."


DEVICE = {"kind": "cpu", "name": "x", "memory_bytes": 1}
OF_PROFILES = "`perfmodel schema profile` says what each key takes."


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"launch": {"queue_depth": 1e300}},
            f"launch.queue_depth must be an integer of fewer digits (got 1e+300). {OF_PROFILES}",
        ),
        ({"launch": {"queue_depth": 1.5}}, f"launch.queue_depth must be an integer (got 1.5). {OF_PROFILES}"),
        ({"provenance": []}, f"provenance must be a mapping of keys to values (got []). {OF_PROFILES}"),
        (
            {"device": DEVICE | {"compute_capability": [9, 0, 1]}},
            f"device.compute_capability must have at most 2 items (got [9, 0, 1]). {OF_PROFILES}",
        ),
        (
            {"device": DEVICE | {"compute_capability": [9]}},
            "device.compute_capability must have more items (got [9]). Add it; `perfmodel schema profile` lists every key.",
        ),
    ],
)
def test_profile_sentences(changes: dict[str, Any], sentence: str) -> None:
    data = {"name": "a", "device": DEVICE} | changes
    with pytest.raises(ValidationError) as caught:
        Profile.model_validate(data)
    assert sentence_of(caught.value, Profile, data, "profile") == sentence
