"""docs/limits.md lists every limit as it is."""

import re

from perfmodel import limits
from tests.places import ROOT


def test_the_table_in_docs_lists_every_limit() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \|", (ROOT / "docs/limits.md").read_text(), re.MULTILINE)
    assert {name: int(number.replace(",", "")) for name, number in rows} == {
        name: value for name, value in vars(limits).items() if name.startswith(("MOST_", "LARGEST_"))
    }
