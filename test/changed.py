"""Tests what a change touches, by its imports, the nearest first, for as long as two minutes.

    make check                  what differs from HEAD, or else from the commit before it
    make check FOR=objectives   all tests of a package

A test file is near to a changed one by the number of imports between the two. What is marked as
slow, or needs vLLM, is left out; CI runs everything.
"""

import argparse
import ast
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = (
    *("torchrl_data", "torchrl_modules", "torchrl_envs", "objectives", "collectors"),
    *("torchrl_agents", "torchrl_tasks", "sota-implementations", "examples", "benchmarks", "test"),
)
MARKS = "not slow and not vllm and not weekly"
SECONDS = 120.0


def git(root: Path, *arguments: str) -> list[str]:
    """The lines that git says of a repository."""
    told = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return told.stdout.splitlines()


def changed_since(root: Path, commit: str) -> list[str]:
    """What differs from a commit, untracked files too."""
    untracked = git(root, "ls-files", "--others", "--exclude-standard")
    return [*git(root, "diff", "--name-only", commit), *untracked]


def changed_files() -> list[str]:
    """What differs from HEAD; where nothing does, what HEAD changed."""
    return changed_since(ROOT, "HEAD") or git(ROOT, "diff", "--name-only", "HEAD~1", "HEAD")


class Imports:
    """Which of our files import which, without importing any.

    Args:
        root: of the repository; paths are relative to it.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        files = [path for name in OURS for path in sorted(root.glob(f"{name}/**/*.py"))]
        self.files = [path.relative_to(root).as_posix() for path in files]
        self._names: dict[str, list[str]] = defaultdict(list)
        for file in self.files:
            parts = Path(file).with_suffix("").parts
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            self._names[".".join(parts)].append(file)
            if parts[0] in ("sota-implementations", "test"):  # their folders are on the path
                self._names[parts[-1]].append(file)

    def of(self, file: str) -> set[str]:
        """The files that one imports, whenever it does; of a name of a package, its home."""
        found = set()
        tree = ast.parse((self._root / file).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found |= {*self._names.get(alias.name, ())}
            elif isinstance(node, ast.ImportFrom):
                module = self._module(file, node)
                for alias in node.names:
                    found |= self._home(module, alias.name)
        return found - {file}

    def _module(self, file: str, node: ast.ImportFrom) -> str:
        above = Path(file).parent.parts
        above = above[: len(above) - node.level + 1] if node.level else ()
        return ".".join([*above, *([node.module] if node.module else [])])

    def _home(self, module: str, name: str) -> set[str]:
        if f"{module}.{name}" in self._names:
            return {*self._names[f"{module}.{name}"]}
        homes = set()
        for file in self._names.get(module, ()):
            inside = self._exports(file).get(name) if file.endswith("__init__.py") else None
            homes |= self._home(*inside) if inside else {file}
        return homes

    @cache  # noqa: B019
    def _exports(self, file: str) -> Mapping[str, tuple[str, str]]:
        """Where the names of a package are from, by its ``from .module import name``."""
        tree = ast.parse((self._root / file).read_text(encoding="utf-8"))
        froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        return {
            alias.asname or alias.name: (self._module(file, node), alias.name)
            for node in froms
            for alias in node.names
        }

    def tests_near(self, changed: Iterable[str]) -> dict[str, int]:
        """The test files that depend on some files, by the number of imports between them."""
        users: dict[str, set[str]] = defaultdict(set)
        for file in self.files:
            for used in self.of(file):
                users[used].add(file)
        distances = {file: 0 for file in changed if file in set(self.files)}
        edge = list(distances)
        while edge:
            nearer, edge = edge, []
            for file in nearer:
                for user in sorted(self._with_its_tests(file, users[file])):
                    if user not in distances:
                        distances[user] = distances[file] + 1
                        edge.append(user)
        tests = {f: n for f, n in distances.items() if Path(f).name.startswith("test_")}
        return dict(sorted(tests.items(), key=lambda each: (each[1], each[0])))

    def _with_its_tests(self, file: str, users: Iterable[str]) -> Iterator[str]:
        """What a file is used by; of a conftest.py, the tests below it, too."""
        yield from users
        if Path(file).name == "conftest.py":
            folder = Path(file).parent.as_posix()
            yield from (f for f in self.files if f.startswith(f"{folder}/"))


class Deadline:
    """A plugin of pytest: begins no test after some seconds, and tells how many it left out."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._left_out: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Leave a test out."""
        if time.monotonic() < self._end:
            return None
        self._left_out.append(item.nodeid.partition("::")[0])
        return True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what was left out."""
        if self._left_out:
            files = len(set(self._left_out))
            terminalreporter.write_line(
                f"{len(self._left_out)} tests of {files} files were left out after {SECONDS:.0f} "
                f"s, the farthest from the change; the first of them: {self._left_out[0]}"
            )


def folder_of(package: str) -> str:
    """The folder with a package's tests, by the package's name or the folder's."""
    name = package.rstrip("/").removeprefix("test/")
    short = name.removeprefix("torchrl_")
    short = {"agents": "sota", "sota-implementations": "sota"}.get(short, short)
    if not (ROOT / "test" / short).is_dir():
        known = sorted(path.name for path in (ROOT / "test").iterdir() if path.is_dir())
        raise SystemExit(f"FOR={package}: there are tests of {', '.join(known)}.")
    return f"test/{short}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("package", nargs="?", help="all tests of one")
    parser.add_argument("--list", action="store_true", help="only name the test files")
    given = parser.parse_args()
    os.environ.setdefault("HYPOTHESIS_PROFILE", "quick")
    os.chdir(ROOT)
    arguments = ["-q", "-x", "-m", MARKS]
    if given.package:
        return pytest.main([*arguments, folder_of(given.package)])
    changed = changed_files()
    near = Imports().tests_near(changed)
    tests = [*near, "test/test_house.py"]
    print(f"{len(changed)} changed files; {len(near)} test files depend on them, nearest first:")
    print("  " + ", ".join(f"{Path(f).name} ({n})" for f, n in [*near.items()][:12]), flush=True)
    if given.list:
        print("\n".join(tests))
        return 0
    code = pytest.main([*arguments, *dict.fromkeys(tests)], plugins=[Deadline(SECONDS)])
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED else code


if __name__ == "__main__":
    sys.exit(main())
