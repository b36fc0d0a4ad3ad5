"""For each command, the inputs of a campaign: sound ones of which something is wrong."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from tests.campaign.combinations import combinations
from tests.campaign.documents import PROFILE, SCENARIOS, File, sound
from tests.campaign.mutations import assignments, files, options, subcommand, variations, words

SCENARIO = "scenario.yaml"
CACHED = "cache"  # what is called so lies in the cache, as the trace of the scenario "tiny"
PLAIN = [name for name in SCENARIOS if name != "target"]


@dataclass(frozen=True)
class Example:
    """One input: the words of the command line, and the files that lie in its folder."""

    command: str
    arguments: tuple[str, ...]
    files: dict[str, File]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Example:
        data = json.loads(text)
        kept = {name: File(each["base"], *(tuple(each[key]) for key in ("edits", "text_edits")), each["form"])
                for name, each in data["files"].items()}  # fmt: skip
        return cls(data["command"], tuple(data["arguments"]), kept)


def examples() -> SearchStrategy[Example]:
    """Of every command; the more, the more it reads."""
    kinds = [("scenario", 6), ("combination", 4), ("profile", 6), ("set", 4), ("options", 2), ("sweep", 3), ("diff", 3), ("compare", 3), ("cached", 1), ("show", 2),
             ("import", 3), ("topology", 2), ("validate", 2), ("calibrate", 1), ("names", 1)]  # fmt: skip
    return st.sampled_from([kind for kind, weight in kinds for _ in range(weight)]).flatmap(_of)


def _of(kind: str) -> SearchStrategy[Example]:
    return globals()[f"_{kind}"]()  # type: ignore[no-any-return]


@st.composite
def _question(draw: DrawFn, bases: list[str] = PLAIN) -> dict[str, File]:
    """A sound scenario with a sound profile."""
    return {SCENARIO: File(f"scenario/{draw(st.sampled_from(bases))}"), PROFILE: File("profile")}


def _trees(files: dict[str, File]) -> tuple[Any, ...]:
    """What assignments change: the scenario, and the profile under ``hardware``."""
    profile = sound("profile")
    return sound(files[SCENARIO].base), {"hardware": {name: profile[name] for name in profile if name != "version"}}


def _json() -> SearchStrategy[list[str]]:
    return st.sampled_from([["--json"], []])


@st.composite
def _scenario(draw: DrawFn) -> Example:
    lying = draw(_question(list(SCENARIOS)))
    lying[SCENARIO] = draw(files(lying[SCENARIO].base))
    allowed = ["--allow-import"] if lying[SCENARIO].base.endswith("target") else []
    return Example("predict", ("predict", SCENARIO, *draw(_json()), *allowed), lying)


@st.composite
def _combination(draw: DrawFn) -> Example:
    """A scenario whose every value is one that its key can have, though not all of them go together."""
    tree = draw(combinations())
    edits = tuple(((key,), "set", value) for key, value in tree.items())
    lying = {SCENARIO: File("scenario/tiny", edits), PROFILE: File("profile")}
    return Example("predict", ("predict", SCENARIO, *draw(_json())), lying)


@st.composite
def _profile(draw: DrawFn) -> Example:
    lying = draw(_question()) | {PROFILE: draw(files("profile"))}
    return Example("predict", ("predict", SCENARIO, *draw(_json())), lying)


@st.composite
def _set(draw: DrawFn) -> Example:
    lying = draw(_question())
    given = draw(st.lists(assignments(_trees(lying)), min_size=1, max_size=2))
    words = [word for each in given for word in ("--set", each)]
    return Example("predict", ("predict", SCENARIO, *draw(_json()), *words), lying)


@st.composite
def _options(draw: DrawFn) -> Example:
    lying = draw(_question()) | {"folder": File("", form="folder"), "pipe": File("", form="pipe")}
    given = draw(options(subcommand("predict"), _trees(lying)))
    return Example("predict", ("predict", SCENARIO, *given), lying)


@st.composite
def _sweep(draw: DrawFn) -> Example:
    lying = draw(_question()) | {"folder": File("", form="folder")}
    varied = draw(variations(_trees(lying)) | st.just("batch.size=1,4"))
    given = draw(options(subcommand("sweep"), _trees(lying)))
    return Example("sweep", ("sweep", SCENARIO, "--vary", varied, *draw(_json()), *given), lying)


@st.composite
def _diff(draw: DrawFn) -> Example:
    name = draw(st.sampled_from(["trace.json", "trace.json.gz"]))
    trace = draw(files("trace"))
    if name.endswith("gz") and trace.form == "plain":
        trace = File(trace.base, trace.edits, trace.text_edits, "gzip")
    return Example("diff", ("diff", SCENARIO, name), draw(_question(["tiny"])) | {name: trace})


@st.composite
def _cached(draw: DrawFn) -> Example:
    """A damaged trace in the cache is made again."""
    trace = draw(files("cached/tiny"))
    if trace.form == "plain":
        trace = File(trace.base, trace.edits, trace.text_edits, "gzip")
    lying = {SCENARIO: File("scenario/tiny"), PROFILE: File("profile"), CACHED: trace}
    return Example("predict", ("predict", SCENARIO, *draw(_json())), lying)


@st.composite
def _compare(draw: DrawFn) -> Example:
    lying = {PROFILE: File("profile"), "results/a.json": File("measurement"), "card.json": File("card")}
    wrong = draw(st.sampled_from(["results/a.json", "results/a.json", "card.json"]))
    lying[wrong] = draw(files(lying[wrong].base))
    given = ["--check", "card.json"] if wrong == "card.json" else draw(options(subcommand("compare"), ()) | st.just([]))
    return Example("compare", ("compare", "results", *given), lying)


@st.composite
def _show(draw: DrawFn) -> Example:
    return Example("profile show", ("profile", "show", PROFILE), {PROFILE: draw(files("profile"))})


@st.composite
def _import(draw: DrawFn) -> Example:
    name = draw(st.sampled_from(["nccl-tests.txt", "nccl-tests.txt", "nccl-tests.json", "nvbandwidth.json"]))
    lying = {PROFILE: File("profile"), name: File(f"import/{name}")}
    wrong = draw(st.sampled_from([name] * 5 + [PROFILE]))
    lying[wrong] = draw(files(lying[wrong].base))
    given = draw(
        st.sampled_from([[], [], ["--interconnect", "nvlink"]]) | words().map(lambda word: ["--interconnect", word])
    )
    return Example("profile import", ("profile", "import", PROFILE, name, *given), lying)


@st.composite
def _topology(draw: DrawFn) -> Example:
    source = draw(st.sampled_from(["file", "text"]))
    lying = {"folder": File("", form="folder")}
    if source == "file":
        lying["topology.txt"] = draw(files(f"topology/{draw(st.sampled_from(['h200-x4.txt', 'hgx8-verbatim.txt']))}"))
        name = "topology.txt"
    else:
        pieces = [
            "2x",
            "8",
            "8x",
            ":",
            "nvswitch",
            "=450GB/s",
            ",",
            "network=8x50GB/s",
            "pcie",
            "1e9",
            "10000x",
            "-1x",
            "GB/s",
            "nv18",
        ]
        name = "".join(draw(st.lists(st.sampled_from(pieces) | words(), min_size=1, max_size=7)))
    given = draw(options(subcommand("topology"), ()))
    return Example("topology", ("topology", name, *given), lying)


@st.composite
def _validate(draw: DrawFn) -> Example:
    lying = {
        SCENARIO: draw(files(f"scenario/{draw(st.sampled_from(PLAIN))}") | files("cases")),
        PROFILE: File("profile"),
    }
    tree = (sound("scenario/tiny"),)
    return Example("validate", ("validate", SCENARIO, *draw(options(subcommand("validate"), tree))), lying)


@st.composite
def _calibrate(draw: DrawFn) -> Example:
    lying = draw(_question())
    lying[SCENARIO] = draw(files(lying[SCENARIO].base))
    given = draw(options(subcommand("calibrate"), ()))
    return Example("calibrate", ("calibrate", "--scenario", SCENARIO, *given), lying)


@st.composite
def _names(draw: DrawFn) -> Example:
    """Commands that take a name of what there is, or none."""
    command = draw(st.sampled_from(["formula", "schema", "profile show", "predict", "", "topology"]))
    given = draw(st.lists(words() | st.sampled_from(["--help", "--version", "-h", "profile", "scenario"]), max_size=2))
    return Example(command or "perfmodel", (*command.split(), *given), {})
