"""Hypothesis's strategies for what can be wrong with a value, a file, an option."""

from __future__ import annotations

from functools import reduce
from operator import getitem
from typing import Any

import click
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

import cli
from tests.campaign.documents import File, sound

NUMBERS = (
    0, -1, 1, 2, 3, 7, 64, 1000, 2**31, 2**63, 10**7, 10**18, "@@digits:40", "@@digits:5000",
    0.5, -0.0, 1e-300, 1e12, 1e300, float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
TEXTS = (
    "", " ", "x", "nan", "1e400", "-1", "3.0", "yes", "null", "\x1b[31mred\x1b[0m", "\x9b2J", "a\nb\r\tc", "\x07\x00",
    "[bold]x[/bold]", "[/]", "[link=file:///x]y", "é🙂中", "\u202egnol", "\ud800", "\udcff", "../..", ".", "a/b", "%s{0}",
    "!!python/name:os.abort", "{a: 1}", "- a", "&a [*a]", "<<", "0x10", "1_000", "1:30", "2024-01-01", "@@long:100000",
    "aten.mm.default(float32[2,2], float32[2,2])", "float32[1e9,1e9]", "all_reduce 2 float32 1024",
)  # fmt: skip
OTHERS = (
    None,
    True,
    False,
    [],
    {},
    [1],
    [[]],
    [None],
    {"a": 1},
    {"": {}},
    {"a": {"b": [1, "x"]}},
    "@@deep:60",
    "@@deep:100000",
)
FORMS = ("missing", "folder", "pipe", "gzip", "bomb", "utf-16", "bom")
# Never a path outside the folder of the example, nor a device: a command may write there.
OUTPUTS = ("out.json", "out.json.gz", "out.md", "out.png", "scenario.yaml", "profile.json", "folder", "pipe", "no/such/x.json",
           "", "x" * 300, "\x1b[31m.json", "a\nb.svg", "-", "profile.json/x")  # fmt: skip


def values() -> SearchStrategy[Any]:
    """What stands where something else should."""
    return st.one_of(
        st.sampled_from(NUMBERS),
        st.sampled_from(TEXTS),
        st.sampled_from(OTHERS),
        st.integers(-(10**20), 10**20),
        st.floats(),
        st.text(max_size=12),
    )


def words() -> SearchStrategy[str]:
    """What stands on the command line in place of a name or a number."""
    drawn = st.sampled_from(TEXTS) | st.sampled_from(NUMBERS).map(str) | st.text(max_size=12)
    return drawn.map(_word)


def _word(text: str) -> str:
    """As an operating system passes it: without zero bytes, and what is not UTF-8 as Python stands for it."""
    text = text.replace("@@long:100000", "x" * 1000).replace("\0", "")
    return text.encode("utf-8", "replace").decode() if text != "\udcff" else text


@st.composite
def paths(draw: DrawFn, tree: Any) -> list[Any]:
    """The keys from the root to somewhere in the tree, each level as likely to be the last."""
    path: list[Any] = []
    while isinstance(tree, (dict, list)) and tree and (not path or draw(st.integers(0, 4))):
        key = draw(st.sampled_from(list(tree) if isinstance(tree, dict) else range(len(tree))))
        path.append(key)
        tree = tree[key]
    return path


def _near(value: Any) -> SearchStrategy[Any]:
    """Of the same type."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, (int, float)):
        kind = type(value)
        return st.sampled_from([0, 1e-3, 0.5, 1.5, 2, 10, 1e3, 1e6, -1]).map(lambda factor: kind(value * factor))
    if isinstance(value, list):
        return st.sampled_from([value[:-1], value * 2, value[::-1], value[:1]])
    if isinstance(value, dict):
        return st.sampled_from([dict(list(value.items())[keep]) for keep in (slice(1), slice(1, None), slice(0, 0))])
    return words() | st.sampled_from(
        ["fp32", "bf16", "fp16", "nccl", "gloo", "cpu", "cuda", str(value).upper(), f"{value}x"]
    )


@st.composite
def edits(draw: DrawFn, tree: Any) -> tuple[Any, ...]:
    path = draw(paths(tree))
    action = draw(st.sampled_from(["set", "set", "set", "near", "near", "remove", "add", "rename", "again", "move"]))
    if action == "near":  # of the right type
        return path, "set", draw(_near(reduce(getitem, path, tree)))
    if action == "move":  # a value of another place
        value = reduce(getitem, draw(paths(tree)), tree)
        return path, "set", value if len(str(value)) < 10_000 else None
    if action == "add":
        return path, action, [draw(words()), draw(values())]
    if action == "rename":
        return path, action, draw(words() | st.just(str(path[-1]) + "s" if path else "x"))
    return path, action, None if action == "remove" else draw(values())


@st.composite
def text_edits(draw: DrawFn) -> tuple[Any, ...]:
    place = draw(st.floats(0, 1, exclude_max=True))
    action = draw(st.sampled_from(["cut", "insert", "delete", "repeat", "number", "number", "bytes"]))
    value: Any = None
    if action == "insert":
        value = draw(words() | st.sampled_from(["@@400000:x", "@@100000:[", "@@200000:1 ", "{", "}", ",", "\n"]))
    elif action == "delete":
        value = draw(st.integers(1, 50))
    elif action == "repeat":
        value = draw(st.sampled_from([2, 10, 5000]))
    elif action == "number":
        value = draw(st.sampled_from([0, -1, 1e300, "nan", "inf", "1" * 40, "9" * 5000, 10**7, 0.001, "1e-300"]))
    elif action == "bytes":
        value = draw(st.sampled_from(["ff", "00", "1b5b324a", "c328", "efbbbf", "80" * 20]))
    return action, place, value


@st.composite
def files(draw: DrawFn, base: str) -> File:
    """The sound file with one to three faults, most of them of its tree."""
    kind = draw(st.sampled_from(["tree"] * 7 + ["text"] * 2 + ["form"]))
    if kind == "form":
        return File(base, form=draw(st.sampled_from(FORMS)))
    if kind == "text" or isinstance(sound(base), str):
        return File(base, text_edits=tuple(draw(st.lists(text_edits(), min_size=1, max_size=3))))
    return File(base, edits=tuple(draw(st.lists(edits(sound(base)), min_size=1, max_size=3))))


@st.composite
def assignments(draw: DrawFn, trees: tuple[Any, ...]) -> str:
    """``key=value`` of ``--set``, mostly of a key that there is."""
    tree = draw(st.sampled_from(trees))
    key = ".".join(map(str, draw(paths(tree)))) if draw(st.integers(0, 9)) else draw(words())
    return f"{key}={draw(words())}" if draw(st.integers(0, 19)) else draw(words())


@st.composite
def variations(draw: DrawFn, trees: tuple[Any, ...]) -> str:
    """``key=value,value`` of ``--vary``."""
    return draw(assignments(trees)) + "".join(f",{word}" for word in draw(st.lists(words(), max_size=1)))


@st.composite
def options(draw: DrawFn, command: click.Command, trees: tuple[Any, ...]) -> list[str]:
    """Some of the command's options, right or wrong; those that it must have are not among them."""
    known = [each for each in command.params if isinstance(each, click.Option) and not each.required]
    given: list[str] = []
    for option in draw(st.lists(st.sampled_from(known), max_size=3)) if known else []:
        name = option.opts[0]
        if option.is_flag:
            given.append(name)
        elif "set" in name:
            given += [name, draw(assignments(trees))]
        elif isinstance(option.type, click.Path):
            given += [name, draw(st.sampled_from(OUTPUTS))]
        elif isinstance(option.type, click.Choice) and draw(st.booleans()):
            given += [name, draw(st.sampled_from([str(each) for each in option.type.choices]))]
        else:
            given += [name, draw(words() | st.sampled_from(["1", "2", "nvlink", "0.5", "h200-sxm-x4"]))]
    if not draw(st.integers(0, 19)):
        given.append(draw(words()))
    return given


def subcommand(*names: str) -> click.Command:
    """The command of the command line that these words name."""
    command: click.Command = cli.main
    for name in names:
        assert isinstance(command, click.Group)
        command = command.commands[name]
    return command
