"""Chooses the test files of an everyday run: what recent commits touch, and some of the others.

A file is chosen if it is near to a file that has changed lately (it is that file, or imports it),
if it is one of those that every run has, or if it is its turn: of the others each day has a
quarter, so that within four days every file has run. The day is that of the last commit: a commit
is tested alike wherever and whenever that is done.
"""

import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from changed import ROOT, Imports, changed_since, git

LATELY_S = 4 * 3600
NUM_TURNS = 4
DAY_S = 86400
EVERY_RUN = (
    *("test/sota/test_grpo_script.py", "test/sota/test_recipes.py"),
    *("test/collectors/test_exact_tokens.py", "test/objectives/test_grpo_loss.py"),
)
"""What this project is about, beside the files of ``test`` itself (the house, the public names)."""
PAGES = ("docs/", "README.md", "examples/")
RECIPES = "sota-implementations/"


class Choice(NamedTuple):
    """The files of a run."""

    left_out: frozenset[str]
    why: str
    """How they were chosen, to be shown."""


def choose(root: Path = ROOT) -> Choice:
    """Choose by the history of a repository; all files where that can't say what has changed.

    Args:
        root: of the repository.
    """
    tests = [path.relative_to(root).as_posix() for path in sorted(root.glob("test/**/test_*.py"))]
    try:
        is_shallow = git(root, "rev-parse", "--is-shallow-repository") == ["true"]
        now_s = int(git(root, "log", "-1", "--format=%ct")[0])
        base = git(root, "rev-list", "-1", f"--before={now_s - LATELY_S}", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return Choice(frozenset(), "all files, because there is no history of commits")
    if is_shallow or not base:
        return Choice(frozenset(), "all files, because the history of commits is short")
    changed = changed_since(root, base[0])
    of_packages = [n for n in changed if n.startswith("requirements/") and n.endswith(".txt")]
    if of_packages or ("pyproject.toml" in changed and _needs(root, base[0]) != _needs(root)):
        return Choice(frozenset(), "all files, because other packages are needed than before")
    imports = Imports(root)
    near = imports.tests_near(_sources(changed, imports.files))
    near |= dict.fromkeys(_not_imported(tests, changed), 0)
    turn = now_s // DAY_S % NUM_TURNS
    left_out = frozenset(
        name
        for name in tests
        if near.get(name, 2) > 1
        and name not in EVERY_RUN
        and Path(name).parent != Path("test")
        and crc32(name.encode()) % NUM_TURNS != turn
    )
    return Choice(
        left_out,
        f"{len(tests) - len(left_out)} of {len(tests)} files: those near to {len(changed)} files "
        f"that have changed since {base[0][:8]}, and turn {turn + 1} of {NUM_TURNS} of the others "
        "(ARGS=--all runs all)",
    )


def _needs(root: Path, commit: str | None = None) -> dict:
    """The dependencies of the project, of a commit or as they are."""
    name = "pyproject.toml"
    text = (
        (root / name).read_text(encoding="utf-8")
        if commit is None
        else "\n".join(git(root, "show", f"{commit}:{name}"))
    )
    project = tomllib.loads(text).get("project", {})
    return {key: project.get(key) for key in ("dependencies", "optional-dependencies")}


def _not_imported(tests: Iterable[str], changed: Iterable[str]) -> list[str]:
    """Tests of pages where one has changed, and those of a recipe, which have its name."""
    recipes = {Path(n).parts[1].replace("-", "_") for n in changed if n.startswith(RECIPES)}
    is_page = any(name.startswith(PAGES) for name in changed)
    return [
        name
        for name in tests
        if (is_page and name.startswith("test/docs/"))
        or (name.startswith("test/sota/") and any(each in Path(name).stem for each in recipes))
    ]


def _sources(changed: Iterable[str], files: Iterable[str]) -> list[str]:
    """Changed files of Python; for another one in a folder of ours, the modules beside it."""
    by_folder: dict[str, list[str]] = {}
    for file in files:
        by_folder.setdefault(Path(file).parent.as_posix(), []).append(file)
    found: list[str] = []
    for name in changed:
        found += [name] if name.endswith(".py") else by_folder.get(Path(name).parent.as_posix(), [])
    return found
