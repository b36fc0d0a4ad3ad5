"""The JSON Schemas refuse what the loaders refuse."""

from __future__ import annotations

import pytest

from perfmodel.errors import PerfModelError
from perfmodel.report.json_schema import json_schema


@pytest.mark.parametrize("kind", ["scenario", "profile", "measurement"])
def test_json_schema_refuses_unknown_keys(kind: str) -> None:
    schema = json_schema(kind)
    assert schema["title"] == kind.capitalize()
    assert schema["additionalProperties"] is False
    assert {"version", "name"} <= set(schema["properties"])


def test_json_schema_of_nothing() -> None:
    with pytest.raises(PerfModelError, match=r"Did you mean 'scenario'\?$"):
        json_schema("scenarios")
