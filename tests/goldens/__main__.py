"""Write tests/goldens/predictions.json anew, and print what moved: ``python -m tests.goldens``."""

from __future__ import annotations

import os
import tempfile

from tests.goldens.predictions import GOLDENS, QUESTIONS, answer, figures, load, moved, save


def main() -> None:
    with tempfile.TemporaryDirectory() as empty:  # shipped traces alone
        os.environ["PERFMODEL_CACHE"] = empty
        found = {name: figures(answer(name)) for name in QUESTIONS}
    lines = moved(load() if GOLDENS.exists() else {}, found)
    save(found)
    print("\n".join([*lines, f"{GOLDENS.name}: {len(found)} predictions, {len(lines)} figures moved"]))


if __name__ == "__main__":
    main()
