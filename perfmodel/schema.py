"""What pydantic refuses, as the one sentence a user reads."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from perfmodel.errors import PerfModelError, did_you_mean

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

LONGEST_VALUE = 60
Model = TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], data: object, kind: str, remedy: str | None = None) -> Model:
    """Plain data as the model that they must be; the parameters are those of :func:`sentence_of`.

    Raises
    ------
    PerfModelError
        If they break a rule.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise PerfModelError(sentence_of(error, model, data, kind, remedy)) from error


def sentence_of(
    error: ValidationError, model: type[BaseModel], data: object, kind: str, remedy: str | None = None
) -> str:
    """The most telling of pydantic's complaints as ``key rule (got value). What to do.``

    Parameters
    ----------
    error : ValidationError
        What ``model.model_validate(data)`` raised.
    model : type[BaseModel]
        Gives the known keys for 'did you mean'.
    data : object
        What was validated.
    kind : str
        Which schema to point at: scenario, profile or measurement.
    remedy : str, optional
        What the sentence ends with where there is no schema to point at.

    Returns
    -------
    str
        One sentence and what to do, without the file's name.
    """
    first = min(error.errors(), key=lambda details: _rank(details, data))
    path = _path(first, data)
    key = ".".join(map(str, path)) or kind
    got = f"(got {shortened(first['input'])})"
    if first["type"] == "missing":
        return f"{key} must be given. {remedy or f'Add it; `perfmodel schema {kind}` lists every key.'}"
    if first["type"] == "extra_forbidden":
        section = _section_at(model, path[:-1])
        owner = ".".join(map(str, path[:-1])) or f"a {kind}"
        return f"{key} must be a key of {owner} {got}. {did_you_mean(str(path[-1]), section.model_fields)}"
    if first["type"] == "literal_error":
        expected = first["ctx"]["expected"]
        return f"{key} must be {expected} {got}. {did_you_mean(str(first['input']), _quoted(expected))}"
    if first["type"] == "model_type":
        return (
            f"{key} must be a mapping of keys to values {got}. {remedy or f'`perfmodel schema {kind}` lists its keys.'}"
        )
    rule = first["msg"].removeprefix("Input should be ").split(", unable")[0]
    rule = rule.replace("a valid integer", "an integer").replace("a valid tuple", "a list").replace("a valid ", "a ")
    return f"{key} must be {rule} {got}. {remedy or f'`perfmodel schema {kind}` says what each key takes.'}"


def shortened(value: object) -> str:
    """``repr``, cut to fit a message."""
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def _rank(details: ErrorDetails, data: object) -> tuple[bool, int, bool]:
    """Misspelt keys first (they explain missing ones), then the deepest (the union branch meant), then choices."""
    return details["type"] != "extra_forbidden", -len(_path(details, data)), details["type"] != "literal_error"


def _path(details: ErrorDetails, data: object) -> list[str | int]:
    """pydantic's location without the union branches it puts between the keys."""
    path: list[str | int] = []
    here: Any = data
    for part in details["loc"]:
        is_key = isinstance(here, dict) and part in here
        is_index = isinstance(here, (list, tuple)) and isinstance(part, int) and part < len(here)
        if is_key or is_index:
            path.append(part)
            here = here[part]
    return [*path, details["loc"][-1]] if details["type"] == "missing" else path


def _section_at(model: type[BaseModel], path: list[str | int]) -> type[BaseModel]:
    """The section of the schema that ``path`` leads to; names of a mapping's own and indices are passed over."""
    for part in path:
        field = model.model_fields.get(str(part))
        model = (_section_in(field.annotation) if field else None) or model
    return model


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if hasattr(annotation, "model_fields"):
        return typing.cast("type[BaseModel]", annotation)
    return next((found for part in typing.get_args(annotation) if (found := _section_in(part))), None)


def _quoted(expected: str) -> list[str]:
    """The choices out of pydantic's ``'a', 'b' or 'c'``."""
    return [part.strip(" '") for part in expected.replace(" or ", ",").split(",")]
