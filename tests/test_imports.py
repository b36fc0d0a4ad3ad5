"""The layers: imports run downwards, and nothing heavy is loaded before it is needed."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "scipy", "matplotlib", "networkx", "sympy", "pandas")
# Each may import those of its own number and below.
LAYERS = {
    "perfmodel.errors": 0,
    "perfmodel.units": 0,
    "perfmodel.files": 0,
    "perfmodel.limits": 0,
    "perfmodel.progress": 0,
    "perfmodel.file_kinds": 0,
    "perfmodel.writing": 0,
    "perfmodel.reading": 0,
    "perfmodel.hardware": 1,
    "perfmodel.schema": 0,
    "perfmodel.terminal": 0,
    "perfmodel.workload": 2,
    "perfmodel.program": 3,
    "perfmodel.cost": 4,
    "perfmodel.simulate": 5,
    "perfmodel.closed_form": 5,
    "perfmodel.report": 6,
    "perfmodel.support": 6,
    "perfmodel.what_if": 6,
    "perfmodel.api": 7,
    "perfmodel.comparison": 8,
    "perfmodel.fitting": 8,
    "perfmodel.sweep": 8,
    "perfmodel.cli_help": 9,
    "perfmodel.cli_options": 9,
    "calibrate": 9,
    "validate": 9,
    "cli": 10,
}
TORCH_MAY_LOAD = ("perfmodel/workload/models/", "perfmodel/workload/trace/", "calibrate/", "validate/")
MODULES = sorted(
    path.relative_to(ROOT)
    for top in ("cli.py", "perfmodel", "calibrate", "validate")
    for path in ([ROOT / top] if top.endswith(".py") else (ROOT / top).rglob("*.py"))
)


def layer(module: str) -> int | None:
    """Of the longest name in LAYERS that the module lies under; None for other people's modules."""
    owners = [name for name in LAYERS if module == name or module.startswith(f"{name}.")]
    return LAYERS[max(owners, key=len)] if owners else None


def imports(path: Path, *, with_types: bool = True) -> list[tuple[str, bool]]:
    """(module, whether it is loaded as soon as the importing module is) for each import statement in the file."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, at_once: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, at_once) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module or "", at_once))
            found.extend((f"{node.module}.{alias.name}", at_once) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            if with_types:
                for child in node.body:
                    visit(child, False)
        else:
            inside = at_once and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                visit(child, inside)

    visit(ast.parse((ROOT / path).read_text()), True)
    return found


def dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_run_downwards(path: Path) -> None:
    own = layer(dotted(path))
    if dotted(path) == "perfmodel":
        return
    assert own is not None, f"{path} is in no layer"
    upwards = [
        name for name, _ in imports(path, with_types=False) if (other := layer(name)) is not None and other > own
    ]
    assert upwards == []


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_no_import_statement_of_torch_outside_its_rooms(path: Path) -> None:
    if path.as_posix().startswith(TORCH_MAY_LOAD):
        return
    assert [name for name, _ in imports(path) if name.partition(".")[0] in ("torch", "transformers")] == []


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_scipy_and_matplotlib_wait_until_they_are_needed(path: Path) -> None:
    heavy = ("scipy", "matplotlib", "networkx", "sympy")
    assert [name for name, at_once in imports(path) if at_once and name.partition(".")[0] in heavy] == []


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
        loaded_after("import perfmodel, cli, perfmodel.api, perfmodel.workload.scenario_file, perfmodel.report.text")
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
