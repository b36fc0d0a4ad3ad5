"""Refusals of pydantic as the one sentence that a user reads."""

from __future__ import annotations

import re
import typing
from datetime import date
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from perfmodel.errors import PerfModelError, did_you_mean

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

LONGEST_VALUE = 60
RULES = {
    "bool": "be true or false",
    "dict": "be a mapping of keys to values",
    "finite_number": "be a finite number",
    "float": "be a number",
    "int": "be an integer",
    "int_from_float": "be an integer",
    "int_parsing_size": "be an integer of fewer digits",
    "list": "be a list",
    "model": "be a mapping of keys to values",
    "string": "be a string",
    "tuple": "be a list",
}  # by pydantic's types of errors, whose endings _type and _parsing are left out
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
    errors = error.errors()
    first = min(errors, key=lambda details: _rank(details, data))
    path = _path(first, data)
    same = [each for each in errors if _path(each, data) == path]
    schema = f"`perfmodel schema {kind}`"
    key = ".".join(map(str, path)) or kind
    return (
        _sentence_of_missing(first, path, remedy or f"Add it; {schema} lists every key.")
        or _sentence_of_key(first, path, model, kind)
        or _sentence_of_section(first, key, remedy or f"{schema} lists its keys.")
        or _sentence_of_value(first, same, key, remedy or f"{schema} says what each key takes.")
    )


def _sentence_of_missing(first: ErrorDetails, path: list[str | int], remedy: str) -> str | None:
    if first["type"] != "missing":
        return None
    *owner, last = map(str, path)
    if isinstance(path[-1], int):
        return f"{'.'.join(owner)} must have more items (got {shortened(first['input'])}). {remedy}"
    return f"{'.'.join([*owner, last])} must be given. {remedy}"


def _sentence_of_key(first: ErrorDetails, path: list[str | int], model: type[BaseModel], kind: str) -> str | None:
    """Write the sentence on a key that is unknown or no string; None for other errors."""
    owner, got = ".".join(map(str, path[:-1])) or f"a {kind}", f"(got {shortened(first['input'])})"
    if first["type"] == "extra_forbidden":
        known = did_you_mean(str(path[-1]), _section_at(model, path[:-1]).model_fields)
        return f"{'.'.join(map(str, path))} must be a key of {owner} {got}. {known}"
    is_of_key = first["loc"][-1:] in ((), ("[key]",))  # no place at all: a key that is no UTF-8
    if first["type"] == "invalid_key" or (is_of_key and first["type"].startswith("string_")):
        return f"{owner} must have keys that are strings {got}. Put it in quotes, or leave it out."
    return None


def _sentence_of_section(first: ErrorDetails, key: str, remedy: str) -> str | None:
    if first["type"] != "model_type":
        return None
    return f"{key} must be a mapping of keys to values (got {shortened(first['input'])}). {remedy}"


def _sentence_of_value(first: ErrorDetails, same: list[ErrorDetails], key: str, remedy: str) -> str:
    """Write the sentence on a value that may be of several types; ``same`` are all errors about it."""
    got = f"(got {shortened(first['input'])})"
    if first["type"] == "literal_error":
        expected = _quoted(first["ctx"]["expected"])
        if len(same) == 1 or get_close_matches(str(first["input"]), expected, n=1):
            return f"{key} must be {first['ctx']['expected']} {got}. {did_you_mean(str(first['input']), expected)}"
    of_types = [first, *(each for each in same if _is_of_type(each))] if _is_of_type(first) else [first]
    rules = dict.fromkeys(map(_rule, of_types))
    rule = " or ".join(rule if place == 0 else rule.removeprefix("be ") for place, rule in enumerate(rules))
    return f"{key} must {rule} {got}. {remedy}"


def _is_of_type(details: ErrorDetails) -> bool:
    """Return whether the value is of a wrong type or none of some choices, as against out of range."""
    return details["type"].endswith(("_type", "_parsing", "literal_error", "int_from_float"))


def _rule(details: ErrorDetails) -> str:
    """Return what pydantic asks for, so as to follow ``must``."""
    rule = RULES.get(details["type"].removesuffix("_type").removesuffix("_parsing"), "")
    if rule:
        return rule
    _, should, rule = details["msg"].partition(" should ")
    rule = re.split(r", (?:got|unable) | after validation", rule)[0]
    return rule.replace("be a valid ", "be a ") if should else f"be otherwise: {details['msg']}"


def shortened(value: object) -> str:
    """Write a value as Python does, cut to fit a message."""
    text = str(value) if isinstance(value, date) else repr(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def _rank(details: ErrorDetails, data: object) -> tuple[bool, int, bool, bool]:
    """Misspelt keys first (they explain missing ones), then the deepest (the union branch meant), then values of the
    right type, then choices.
    """
    kind = details["type"]
    return kind != "extra_forbidden", -len(_path(details, data)), _is_of_type(details), kind != "literal_error"


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
