"""Where the tests find what is committed."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
