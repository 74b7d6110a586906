"""The API reference says what the docstrings say, and leaves no public name out."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "test/house"))

import public_api  # noqa: E402
import reference  # noqa: E402


def test_reference_is_current():
    assert reference.PAGE.read_text(encoding="utf-8") == reference.page(), (
        "a public docstring changed: run `python test/house/reference.py`"
    )


def test_every_public_name_stands_in_the_reference():
    text = reference.PAGE.read_text(encoding="utf-8")
    names = {name.rpartition(".")[2] for name in public_api.public_names()}
    assert {name for name in names if f"\n| `{name}` |" not in text} == set()
