"""Runs all tests, in two processes: an engine inside a process changes its globals.

    python test/run_tests.py [arguments of pytest]

What talks to real servers, browsers and engines has deadlines, so tests that failed get a second
try in a new process. That tells a flaky test from a broken one, and hides neither: a test that
passes at its second try alone fails the run too, unless ``test/house/known_flaky.txt`` names it
with a reason. Both halves run whatever the first one said.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
KNOWN_FLAKY = ROOT / "test/house/known_flaky.txt"
MOST_TRIED_AGAIN = 30
PASSED, SOME_FAILED, NOTHING_RUN = 0, 1, 5  # what pytest returns


class Half(NamedTuple):
    """A part of the tests that has a process of its own."""

    name: str
    arguments: tuple[str, ...]
    cache: str
    num_threads: int


HALVES = (
    Half("without vLLM", ("-m", "not vllm"), ".pytest_cache", 2),
    Half(
        "with vLLM",
        ("-m", "vllm", "test/docs", "test/modules", "test/sota"),
        ".pytest_cache/vllm",
        1,
    ),
)


class Outcome(NamedTuple):
    """What came of a half: test ids, and what broke beside them."""

    half: str
    failed: Sequence[str] = ()
    flaky: Sequence[str] = ()
    known: Sequence[str] = ()
    broken: str = ""

    @property
    def passed(self) -> bool:
        return not (self.failed or self.flaky or self.broken)


def known_flaky(path: Path = KNOWN_FLAKY) -> dict[str, str]:
    """Ids of tests that may need a second try, each with the reason.

    Raises:
        ValueError: a line has no reason.
    """
    known = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, reason = line.partition(": ")
            if "::" not in name or not reason.strip():
                raise ValueError(f"{path.name} wants `file::test: reason`, it has {line!r}.")
            known[name] = reason
    return known


def run_half(half: Half, known: dict[str, str], root: Path = ROOT, more: Sequence[str] = ()):
    """Runs a half, and what failed in it once more."""
    last_failed = root / half.cache / "v/cache/lastfailed"
    last_failed.unlink(missing_ok=True)
    status = _pytest(half, root, more)
    first = _ids(last_failed)
    if status in (PASSED, NOTHING_RUN):
        return Outcome(half.name)
    if status != SOME_FAILED or not first:
        return Outcome(half.name, first, broken=f"pytest ended with status {status}")
    if len(first) > MOST_TRIED_AGAIN:
        return Outcome(half.name, first)
    status = _pytest(half, root, [*more, "--last-failed", "--last-failed-no-failures", "none"])
    broken = f"the second try ended with status {status}" * (status not in (PASSED, SOME_FAILED))
    second = first if broken else _ids(last_failed)
    unsteady = [name for name in first if name not in second]
    excused = [name for name in unsteady if name in known or name.partition("[")[0] in known]
    return Outcome(half.name, second, [n for n in unsteady if n not in excused], excused, broken)


def _pytest(half: Half, root: Path, more: Sequence[str]) -> int:
    command = [sys.executable, "-m", "pytest", *half.arguments, "-o", f"cache_dir={half.cache}"]
    # Threads of torch that wait must not burn the cores that tools, servers and engines need.
    threads = {"OMP_NUM_THREADS": str(half.num_threads), "OMP_WAIT_POLICY": "passive"}
    environment = {**threads, **os.environ} | {"OMP_NUM_THREADS": threads["OMP_NUM_THREADS"]}
    return subprocess.run([*command, *more], cwd=root, env=environment, check=False).returncode


def _ids(last_failed: Path) -> list[str]:
    return list(json.loads(last_failed.read_text("utf-8"))) if last_failed.exists() else []


def summary(outcomes: Sequence[Outcome], known: dict[str, str]) -> str:
    """What to read at the end."""
    lines = [""]
    for outcome in outcomes:
        lines.append(f"tests {outcome.half}: {'passed' if outcome.passed else 'FAILED'}")
        lines += [f"  failed twice, or not tried again: {name}" for name in outcome.failed]
        lines += [
            f"  FLAKY, passed at the second try only: {name} (mend it, or say in "
            f"{KNOWN_FLAKY.relative_to(ROOT)} why it can't be)"
            for name in outcome.flaky
        ]
        lines += [
            f"  known to be flaky, passed at the second try: {name} "
            f"({known.get(name) or known[name.partition('[')[0]]})"
            for name in outcome.known
        ]
        lines += [f"  {outcome.broken}"] if outcome.broken else []
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Runs both halves; 1 if one failed."""
    known = known_flaky()
    outcomes = [run_half(half, known, more=arguments) for half in HALVES]
    sys.stdout.write(summary(outcomes, known) + "\n")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
