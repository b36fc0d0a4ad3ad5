"""Both sides of the table of families: a row and a module each, which say the same."""

from __future__ import annotations

import pkgutil

import pytest
import torch

from perfmodel.models import families
from perfmodel.models.family import torch_family
from perfmodel.scenario.families import FAMILIES, Family
from perfmodel.scenario.scenario import Scenario

ROWS = list(FAMILIES.items())


def test_every_row_has_a_module_and_every_module_a_row() -> None:
    assert sorted(module.name for module in pkgutil.iter_modules(families.__path__)) == sorted(FAMILIES)


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_a_family_that_is_cut_has_a_class_of_stages_and_one_list_of_blocks(name: str, row: Family) -> None:
    assert (torch_family(name).stage is not None) == (row.cut is not None)
    assert row.cut is None or len(row.blocks) == 1


@pytest.mark.parametrize(("name", "row"), ROWS)
def test_the_modules_of_a_family_have_the_names_of_its_row(name: str, row: Family) -> None:
    tiny = {"layers": 2, "width": 16, "heads": 2, "ffn_width": 32, "vocabulary": 50, "image_size": 32, "classes": 3}
    model = {"family": name} | {key: value for key, value in tiny.items() if key in row.dimensions}
    batch = {"size": 1} | ({"sequence_length": 8} if row.kind == "token" else {})
    scenario = Scenario.model_validate({"model": model, "batch": batch, "hardware": {"profile": "none"}})
    with torch.device("meta"):
        module = torch_family(name).build(scenario.model.resolved(), batch.get("sequence_length", 0))
    parts = () if row.cut is None else (*row.cut.embeddings, *row.cut.head, *row.cut.every)
    known = dict(module.named_modules())
    assert [missing for missing in (*row.blocks, *parts) if missing not in known] == []
    assert all(list(known[blocks].children()) for blocks in row.blocks)
