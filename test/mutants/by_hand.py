"""Mutants made by hand: wrong shifts, masks, seeds, temperatures, and the tests that kill each.

    python test/mutants/by_hand.py                # all of by_hand.toml, as a table
    python test/mutants/by_hand.py encoder ledger # those whose name holds a word

Each is one change of one place, in a copy of the tree; its tests run in a forked process that has
torch and transformers imported already. Exits with the number of survivors.
"""

import argparse
import shutil
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

import datasets  # noqa: F401  (so that every fork has them)
import torchrl.data  # noqa: F401
import transformers.models.qwen3.modeling_qwen3  # noqa: F401

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "test" / "objectives"))

from mutate import survives  # noqa: E402

TREES = (
    *("torchrl_data", "torchrl_modules", "torchrl_envs", "objectives", "collectors"),
    *(
        "torchrl_agents",
        "torchrl_tasks",
        "sota-implementations",
        "benchmarks",
        "docs",
        "examples",
        "test",
    ),
)


class Mutant(NamedTuple):
    """One change, and who has to notice."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]


def read_mutants() -> list[Mutant]:
    """Those of the table; each change has exactly one place."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    found = [Mutant(**entry) for entry in table["mutant"]]
    for mutant in found:
        places = (ROOT / mutant.file).read_text(encoding="utf-8").count(mutant.old)
        if places != 1:
            sys.exit(f"{mutant.name}: {mutant.old!r} stands {places} times in {mutant.file}.")
        for test in mutant.tests:
            if not (ROOT / test).exists():
                sys.exit(f"{mutant.name}: there is no {test}.")
    return found


def copy_tree(where: Path) -> None:
    """A tree of our own, without what was built."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "outputs")
    for name in TREES:
        shutil.copytree(ROOT / name, where / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", where)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutants whose name holds one of them")
    words = parser.parse_args().words
    mutants = [m for m in read_mutants() if not words or any(word in m.name for word in words)]
    if not mutants:
        sys.exit(f"No mutant's name holds {' or '.join(words)}.")
    survivors = []
    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        copy_tree(where)
        sound: set[tuple[str, ...]] = set()
        for mutant in mutants:
            if tuple(mutant.tests) not in sound and not survives(where, mutant.tests):
                sys.exit(f"{' '.join(mutant.tests)}: these fail without any mutant.")
            sound.add(tuple(mutant.tests))
            target = where / mutant.file
            source = target.read_text(encoding="utf-8")
            target.write_text(source.replace(mutant.old, mutant.new), encoding="utf-8")
            began = time.monotonic()
            alive = survives(where, mutant.tests)
            target.write_text(source, encoding="utf-8")
            survivors += [mutant.name] * alive
            verdict = "SURVIVED" if alive else "killed"
            tests = " ".join(mutant.tests)
            seconds = time.monotonic() - began
            print(f"{verdict:<9}{mutant.name:<68}{tests}  ({seconds:.0f} s)", flush=True)  # noqa: T201
    print(f"{len(mutants) - len(survivors)} of {len(mutants)} mutants made by hand killed.")  # noqa: T201
    sys.exit(min(len(survivors), 255))


if __name__ == "__main__":
    main()
