"""What the command line prints on terminals of every kind, and how it ends where there is none."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import cli
from perfmodel.errors import PerfModelError
from perfmodel.hardware.profile import load_profile
from perfmodel.report.text.prediction import rendered
from perfmodel.terminal import (
    CLOSED_PIPE,
    INTERRUPTED,
    LONGEST_VALUE,
    TERMINATED,
    print_rich,
    safe_stdout,
    sentence,
    sigterm_raises,
    visible,
)
from tests.places import ROOT
from tests.report.synthetic import prediction

SHIPPED = "scenarios/gpt2-batch1.yaml"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments, env={"COLUMNS": "200"})


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """``perfmodel`` in the command stands for the command line."""
    script = command.replace("perfmodel", f"{sys.executable} {ROOT / 'cli.py'}")
    return subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env=os.environ | environment, capture_output=True, check=False
    )


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
    ids=["encoding", "locale"],
)
def test_a_terminal_without_letters_gets_others(environment: dict[str, str]) -> None:
    wide = shell(f"perfmodel predict {SHIPPED}", PYTHONIOENCODING="utf-8").stdout.decode()
    result = shell(f"perfmodel predict {SHIPPED}", **environment)
    assert (result.returncode, result.stderr) == (0, b"")
    plain = result.stdout.decode("ascii")
    assert "█" in wide
    assert [len(line) for line in plain.splitlines()] == [len(line) for line in wide.splitlines()]  # columns hold
    assert plain.count("#") >= wide.count("█")


def test_a_message_with_letters_that_the_terminal_lacks() -> None:
    result = shell("perfmodel predict é█.yaml", PYTHONIOENCODING="ascii", LC_ALL="C.UTF-8")
    assert result.returncode == 1
    assert result.stderr.startswith(rb"Error: \xe9#.yaml: ")


def test_a_reader_that_has_gone_ends_the_command_without_a_word() -> None:
    result = shell("perfmodel schema profile | true; exit ${PIPESTATUS[0]}")
    late = shell("(while [ ! -e gone ]; do :; done; perfmodel predict --help; echo $? >&2) | (exec 0<&-; touch gone)")
    Path(ROOT / "gone").unlink()
    assert (result.returncode, result.stdout, result.stderr) in [(CLOSED_PIPE, b"", b""), (0, b"", b"")]
    assert late.stderr == f"{CLOSED_PIPE}\n".encode()


@pytest.mark.parametrize("command", ["schema", "--help", f"predict {SHIPPED}", "--version"])
@pytest.mark.parametrize("buffered", ["", "1"])
def test_a_full_disk_is_one_sentence(command: str, buffered: str) -> None:
    result = shell(f"perfmodel {command} > /dev/full", PYTHONUNBUFFERED=buffered)
    assert result.returncode == 1
    assert result.stderr.startswith(b"Error: stdout must be writable (No space left on device).")
    assert result.stderr.count(b"\n") == 1


def test_a_closed_stdout_is_one_sentence() -> None:
    result = shell(f"perfmodel predict {SHIPPED} >&-")
    assert (result.returncode, result.stderr) == (
        1, b"Error: stdout must be open (it is closed). Send it to /dev/null to print nothing.\n"
    )  # fmt: skip


@pytest.mark.parametrize("nowhere", ["2>&-", "2>/dev/full"])
def test_a_message_that_nobody_reads_changes_no_exit_code(nowhere: str) -> None:
    result = shell(f"perfmodel predict none.yaml {nowhere}")
    assert (result.returncode, result.stdout) == (1, b"")
    assert shell(f"perfmodel schema {nowhere}").returncode == 0


def test_interrupting_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*question: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("perfmodel.prediction.predict.predict", interrupted)
    result = run("predict", str(ROOT / SHIPPED))
    assert (result.exit_code, result.stdout, result.stderr.strip()) == (INTERRUPTED, "", "Stopped.")


def test_a_file_that_is_cut_off_is_no_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*question: Any, **options: Any) -> None:
        raise EOFError

    monkeypatch.setattr("perfmodel.prediction.predict.predict", cut)
    assert isinstance(run("predict", str(ROOT / SHIPPED)).exception, EOFError)


def test_names_do_not_steer_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfmodel.prediction.predict.predict", lambda *question, **options: prediction(scenario=named))
    named = prediction().scenario.model_copy(update={"name": "\x1b[31m[bold]x[/bold]\u202e"})
    result = run("predict", str(ROOT / SHIPPED))
    assert result.exit_code == 0
    assert result.stdout.startswith(r"\x1b[31m[bold]x[/bold]\u202e on toy-gpu")


@pytest.mark.parametrize("name", ["\x1b[31m.yaml", "\x9b2J.yaml", "a\rb.yaml", "\u202ea.yaml", "a\nb.yaml"])
def test_values_in_messages_do_not_steer_the_terminal(name: str) -> None:
    for result in (run("predict", name), run("predict", "a", name)):
        *_, line = result.stderr.splitlines()
        assert line.startswith("Error: ")
        assert line == visible(line)


def test_markup_in_a_table_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table

    table = Table("a")
    table.add_row("[red]x[/nothing] :smile: \x1b]0;title\x07")
    print_rich(table)
    shown = capsys.readouterr().out
    assert r"[red]x[/nothing] :smile: \x1b]0;title\x07" in shown
    assert "[red]x[/nothing] :smile:" in rendered(table)


def test_a_long_value_is_cut_in_every_message() -> None:
    for result in (
        run("predict", "x" * 5000),
        run("predict", SHIPPED, "--set", f"name=[{'x, ' * 5000}"),
        run("schema", "y " * 5000),
        run("predict", SHIPPED, "z" * 5000),
        run("calibrate", "--ranks", "9" * 5000),
    ):
        *_, line = result.stderr.splitlines()
        assert line.startswith("Error: ")
        assert len(line) < 3 * LONGEST_VALUE


def test_a_sentence_keeps_what_is_no_value() -> None:
    known = "must be a known one (got 'x'). Known: " + ", ".join(f"name_{number}" for number in range(100)) + "."
    assert sentence(known) == known


def test_stdout_fails_again_after_a_library_ignored_it() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(PerfModelError, match="No space left"):
        patch.setattr(sys, "stdout", Full())
        with safe_stdout(), contextlib.suppress(PerfModelError):
            sys.stdout.write("x")


def test_the_version_is_that_of_the_package() -> None:
    import perfmodel

    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.split()[:2] == ["perfmodel", perfmodel.__version__]


def test_hints_name_the_profile_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile's name is not where it lies."""
    from perfmodel.hardware.profile import CATALOG

    monkeypatch.chdir(tmp_path)
    data = json.loads((CATALOG / "h200-sxm-x4.json").read_text())
    data["name"] = "mine"
    data["unstable"] = list(data["kernels"])
    Path("there is one.json").write_text(json.dumps(data))
    result = run("predict", str(ROOT / SHIPPED), "--set", "hardware.profile=there is one.json")
    _, _, hint = result.stdout.replace("\n", " ").partition("`perfmodel profile show ")
    assert hint.startswith("'there is one.json'`")
    assert load_profile(Path("there is one.json")).name == "mine"


def test_lines_of_a_calibration_do_not_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from calibrate.progress import Progress

    Progress(shown=False).warn("[bold]x[/] \x1b[31m is unstable")
    assert capsys.readouterr().err == "[bold]x[/] \\x1b[31m is unstable\n"


TERMINATED_WHILE_WRITING = """
    import signal, time
    from pathlib import Path
    import click
    from perfmodel.cli.endings import OneLineErrors
    from perfmodel.files.writing import replacing
    @click.group(cls=OneLineErrors)
    def main():
        pass
    @main.command()
    def write():
        with replacing(Path("new/t.json"), None) as temporary:
            temporary.write_text("half of it")
            signal.raise_signal(signal.SIGTERM)
            time.sleep(600)
    main(["write"])
"""


def test_sigterm_leaves_no_half_written_file(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(TERMINATED_WHILE_WRITING)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (TERMINATED, "", "Stopped.\n")
    assert list((tmp_path / "new").iterdir()) == []


def test_sigterm_is_left_to_a_caller_who_handles_it() -> None:
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with sigterm_raises():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]


def test_sigterm_is_as_before_after_a_command() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert run("schema").exit_code == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
