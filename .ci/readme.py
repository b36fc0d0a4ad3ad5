"""Hold what README.md shows against what the commands print and the card says now; with --write, bring it up to date.
Its pictures must be there.

What is shown stands between two comments, the first of which names the command, or the section of the card:

    <!-- output of: perfmodel predict scenarios/gpt2.7b.yaml -->
    ...
    <!-- end of output -->
    <!-- section of ACCURACY.md: Step time -->
    ...
    <!-- end of section -->
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BLOCK = re.compile(
    r"<!-- output of: perfmodel (?P<arguments>[^\n]*?) -->\n(?P<shown>.*?)(?=<!-- end of output -->)", re.DOTALL
)
SECTION = re.compile(
    r"<!-- section of ACCURACY.md: (?P<title>[^\n]*?) -->\n(?P<shown>.*?)(?=<!-- end of section -->)", re.DOTALL
)
PICTURE = re.compile(r"!\[[^\]]*\]\((?P<path>[^)]+)\)")
COLUMNS = "100"


def printed(arguments: str) -> str:
    """What the command prints on a terminal of COLUMNS columns without colours, as a fenced block."""
    command = [sys.executable, "cli.py", *shlex.split(arguments)]
    environment = os.environ | {"COLUMNS": COLUMNS, "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, encoding="utf-8", check=False)
    if result.returncode != 0:
        sys.exit(f"README.md: perfmodel {arguments} must succeed (got exit code {result.returncode}): {result.stderr}")
    lines = [line.rstrip() for line in result.stdout.rstrip().splitlines()]
    return "\n".join(["```", *lines, "```", ""])


def section(title: str) -> str:
    """What the committed card says below that heading."""
    card = (ROOT / "ACCURACY.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(title)}\n\n(.*?)(?=^## |\Z)", card, re.DOTALL | re.MULTILINE)
    if found is None:
        sys.exit(f"README.md: ACCURACY.md must have the section it shows (got {title!r}). Name one that is there.")
    return found[1].rstrip() + "\n"


def check_pictures(text: str) -> None:
    """Every one that is shown must be committed."""
    missing = ", ".join(path for path in PICTURE.findall(text) if not (ROOT / path).is_file())
    if missing:
        sys.exit(f"README.md: its pictures must be there (not so: {missing}). Draw them with `make accuracy`.")


def up_to_date(text: str) -> str:
    """The text with every shown output and section replaced by what it is now."""

    def current(block: re.Match[str]) -> str:
        arguments = block["arguments"]
        return f"<!-- output of: perfmodel {arguments} -->\n{printed(arguments)}"

    def copied(block: re.Match[str]) -> str:
        return f"<!-- section of ACCURACY.md: {block['title']} -->\n{section(block['title'])}"

    return SECTION.sub(copied, BLOCK.sub(current, text))


def main() -> None:
    text = README.read_text(encoding="utf-8")
    if not BLOCK.search(text):
        sys.exit("README.md: must show the output of a command (it shows none). .ci/readme.py says how.")
    check_pictures(text)
    new = up_to_date(text)
    if "--write" in sys.argv[1:]:
        README.write_text(new, encoding="utf-8")
    elif new != text:
        changes = difflib.unified_diff(text.splitlines(), new.splitlines(), "README.md", "printed now", lineterm="")
        sys.exit("\n".join([*changes, "README.md: shown outputs must be current (they are not). Run make readme."]))


if __name__ == "__main__":
    main()
