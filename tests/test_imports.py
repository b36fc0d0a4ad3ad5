"""The layers: imports run downwards, and nothing heavy is loaded before it is needed."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.places import ROOT

HEAVY = ("torch", "transformers", "scipy", "matplotlib", "networkx", "sympy", "pandas")
# Each may import those of its own number and below.
LAYERS = {
    "perfmodel.derived": 0,
    "perfmodel.errors": 0,
    "perfmodel.files": 0,
    "perfmodel.limits": 0,
    "perfmodel.progress": 0,
    "perfmodel.terminal": 0,
    "perfmodel.units": 0,
    "perfmodel.hardware": 1,
    "perfmodel.scenario": 2,
    "perfmodel.trace": 3,
    "perfmodel.models": 4,
    "perfmodel.tracing": 4,
    "perfmodel.trace.store": 4,
    "perfmodel.program": 5,
    "perfmodel.cost": 6,
    "perfmodel.simulate": 7,
    "perfmodel.closed_form": 7,
    "perfmodel.prediction": 8,
    "perfmodel.report": 9,
    "perfmodel.accuracy": 10,
    "perfmodel.topology": 10,
    "calibrate": 11,
    "validate": 11,
    "perfmodel.cli": 12,
    "cli": 13,
}
TORCH_MAY_LOAD = ("perfmodel/models/", "perfmodel/tracing/", "calibrate/", "validate/")
MODULES = sorted(
    path.relative_to(ROOT)
    for top in ("cli.py", "perfmodel", "calibrate", "validate")
    for path in ([ROOT / top] if top.endswith(".py") else (ROOT / top).rglob("*.py"))
)


def layer(module: str) -> int | None:
    """Of the longest name in LAYERS that the module lies under; None for other people's modules."""
    owners = [name for name in LAYERS if module == name or module.startswith(f"{name}.")]
    return LAYERS[max(owners, key=len)] if owners else None


class Import(NamedTuple):
    """One import statement: what it loads, whether as soon as the importing module is, and whether for types alone."""

    module: str
    at_once: bool
    for_types: bool

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


def imports(source: str) -> list[Import]:
    """Every import statement in the source."""
    found: list[Import] = []

    def visit(node: ast.AST, at_once: bool, for_types: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, at_once, for_types) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.append(Import(node.module or "", at_once, for_types))
            found.extend(Import(f"{node.module}.{alias.name}", at_once, for_types) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.body:
                visit(child, False, True)
        else:
            inside = at_once and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                visit(child, inside, for_types)

    visit(ast.parse(source), True, False)
    return found


@cache
def imports_of_modules() -> dict[Path, list[Import]]:
    """Those of every module, each parsed once."""
    return {path: imports((ROOT / path).read_text()) for path in MODULES}


def dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def is_upward(path: Path, module: str) -> bool:
    own, other = layer(dotted(path)), layer(module)
    return own is not None and other is not None and other > own


def test_every_module_is_in_a_layer() -> None:
    assert [str(path) for path in MODULES if layer(dotted(path)) is None and dotted(path) != "perfmodel"] == []


def test_imports_run_downwards() -> None:
    upwards = [
        f"{path} imports {each.module}"
        for path, statements in imports_of_modules().items()
        for each in statements
        if not each.for_types and is_upward(path, each.module)
    ]
    assert upwards == [], "\n".join(upwards)


def test_no_import_statement_of_torch_outside_its_rooms() -> None:
    outside = [
        f"{path} imports {each.module}"
        for path, statements in imports_of_modules().items()
        for each in statements
        if each.package in ("torch", "transformers") and not path.as_posix().startswith(TORCH_MAY_LOAD)
    ]
    assert outside == [], "\n".join(outside)


def test_scipy_and_matplotlib_wait_until_they_are_needed() -> None:
    early = [
        f"{path} imports {each.module}"
        for path, statements in imports_of_modules().items()
        for each in statements
        if each.at_once and each.package in ("scipy", "matplotlib", "networkx", "sympy")
    ]
    assert early == [], "\n".join(early)


def test_the_rules_see_what_a_file_imports_and_when() -> None:
    source = """
import scipy.optimize
if TYPE_CHECKING:
    from perfmodel.prediction.predict import predict
def late():
    import torch
"""
    assert imports(source) == [
        Import("scipy.optimize", True, False),
        Import("perfmodel.prediction.predict", False, True),
        Import("perfmodel.prediction.predict.predict", False, True),
        Import("torch", False, False),
    ]
    assert is_upward(Path("perfmodel/cost/host.py"), "perfmodel.prediction.predict")
    assert not is_upward(Path("perfmodel/cost/host.py"), "perfmodel.units")


def loaded_after(code: str) -> list[str]:
    """The heavy modules, and ours of the outer layers, that a fresh interpreter has loaded after running ``code``."""
    names = [*HEAVY, "calibrate", "validate"]
    report = (
        f"\nimport json, sys\nprint(json.dumps([name for name in {names!r} if name in sys.modules]), file=sys.stderr)"
    )
    command = [sys.executable, "-W", "error", "-c", code + report]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: list[str] = json.loads(result.stderr.splitlines()[-1])
    return found


def test_the_package_and_the_command_line_are_light() -> None:
    assert (
        loaded_after(
            "import perfmodel, cli, perfmodel.prediction.predict, perfmodel.scenario.yaml_file, perfmodel.report.text.prediction"
        )
        == []
    )


def test_a_warm_prediction_is_light(tmp_path: Path) -> None:
    profile = tmp_path / "p.json"
    device = {
        "kind": "cuda",
        "name": "GPU",
        "memory_bytes": 150e9,
        "peak_flops_per_s": {"fp32": 67e12},
        "peak_memory_bytes_per_s": 4.8e12,
    }
    profile.write_text(json.dumps({"version": 1, "name": "p", "device": device}))
    arguments = ["predict", "scenarios/gpt2.7b.yaml", "--set", f"hardware.profile={profile}"]
    assert loaded_after(f"import cli\ncli.main({arguments!r}, standalone_mode=False)") == []
