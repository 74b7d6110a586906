"""Runs all tests, in parts: an engine inside a process changes its globals.

    python test/run_tests.py [arguments of pytest]            files near to recent commits, and
                                                              a quarter of the others
    python test/run_tests.py --all [arguments of pytest]      all files
    python test/run_tests.py --weekly [arguments of pytest]   tests marked `weekly`, and properties
                                                              with many examples

The first two leave out what is marked `weekly`. See ``test/chosen_files.py`` for the first.

Three parts run at a time, those first that take longest: what waits for a server leaves its core to
another, so that three keep two cores busy. What a part prints comes when it is over.

What talks to real servers, browsers and engines has deadlines, so tests that failed get a second
try in a new process. That tells a flaky test from a broken one, and hides neither: a test that
passes at its second try alone fails the run too, unless ``test/house/known_flaky.txt`` names it
with a reason. All parts run whatever the first one said.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from chosen_files import choose

ROOT = Path(__file__).resolve().parents[1]
KNOWN_FLAKY = ROOT / "test/house/known_flaky.txt"
MOST_TRIED_AGAIN = 30
MOST_FLAKY = 2
"""Tests of a run that may pass at their second try alone; none of a weekly run."""
PASSED, SOME_FAILED, NOTHING_RUN = 0, 1, 5  # what pytest returns


class Part(NamedTuple):
    """Tests that have a process of their own."""

    name: str
    arguments: tuple[str, ...]

    @property
    def cache(self) -> str:
        return f".pytest_cache/{self.name.replace(' ', '-')}"


LEARNING = tuple(
    f"test/sota/test_{name}.py" for name in ("agents_learn", "easy_questions_learn", "recipes")
)
"""Runs that go on until something is learnt: weekly, but for two."""
PROCESSES = tuple(
    f"test/sota/test_{name}.py"
    for name in (
        *("agent_frameworks", "environment_packages", "grpo_script", "resume_script"),
        *("slurm", "stop_at_any_point", "torchrun"),
    )
)
"""Runs of which most have a process of their own."""
FOLDERS = {
    "of runs": ("not vllm", "test/sota"),
    "of units": ("not vllm", "test"),
    "of the outside": ("not vllm", *(f"test/{name}" for name in ("envs", "faults", "browser"))),
    "of collectors and data": ("not vllm", "test/collectors", "test/data"),
    "of processes": ("not vllm", "test/ranks", *PROCESSES),
    "of pages": ("not vllm", "test/docs"),
    "of engines": ("vllm", *(f"test/{name}" for name in ("modules", "images", "training_service"))),
    "of engines in recipes": ("vllm", "test/sota", "test/docs"),
    "of learning": ("not vllm", *LEARNING),
}
"""Marks and folders of each part, those first that take longest; what is in another is left out."""


WEEKLY = "(weekly or hypothesis)"
"""What is run once a week: hypothesis marks its properties itself."""
WEEKLY_LIMIT_S = 900
"""Seconds that a test may take where it does not say so itself: three times those of every day."""


def _part(name: str, *, weekly: bool = False) -> Part:
    marks, *paths = FOLDERS[name]
    others = [path for own, *all_of_it in FOLDERS.values() if own == marks for path in all_of_it]
    inside = [path for path in others if any(path.startswith(f"{own}/") for own in paths)]
    left_out = [f"--ignore={path}" for path in inside if path not in paths]
    if marks == "vllm":  # most files have none of it, and are not imported for it
        paths = [path for folder in paths for path in _that_need_vllm(folder)]
    when = WEEKLY if weekly else "not weekly"
    limit = [f"--timeout={WEEKLY_LIMIT_S}"] if weekly else []
    return Part(name, ("-m", f"{marks} and {when}", *paths, *left_out, *limit))


def _that_need_vllm(folder: str) -> list[str]:
    files = sorted((ROOT / folder).rglob("test_*.py"))
    return [
        path.relative_to(ROOT).as_posix()
        for path in files
        if "mark.vllm" in path.read_text(encoding="utf-8")
    ]


PARTS = tuple(map(_part, FOLDERS))
IMPORTED = ("test/sota/dry_run", "test/collectors/streaming")
"""Tests that import what all parts do."""
WEEKLY_PARTS = tuple(_part(name, weekly=True) for name in FOLDERS)


def chosen_of(parts: Sequence[Part], left_out: Collection[str]) -> list[Part]:
    """Parts without some files, and no part that has none left."""
    chosen = []
    for part in parts:
        marks, paths = part.arguments[:2], part.arguments[2:]
        kept = [path for path in paths if path not in left_out]
        folders = tuple(f"{path}/" for path in kept if not path.startswith("--"))
        ignored = [f"--ignore={file}" for file in sorted(left_out) if file.startswith(folders)]
        if folders:
            chosen.append(Part(part.name, (*marks, *kept, *ignored)))
    return chosen


class Outcome(NamedTuple):
    """What came of a part: test ids, and what broke beside them."""

    part: str
    failed: Sequence[str] = ()
    flaky: Sequence[str] = ()
    known: Sequence[str] = ()
    broken: str = ""

    @property
    def passed(self) -> bool:
        return not (self.failed or self.broken)


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


def compile_imports() -> None:
    """Imports once what all parts import, which three that begin together would each compile."""
    with open(os.devnull, "wb") as nowhere:
        _pytest(Part("compiled", ("--collect-only", *IMPORTED)), ROOT, (), nowhere)


def run_parts(
    parts: Sequence[Part], known: dict[str, str], root: Path = ROOT, more: Sequence[str] = ()
) -> list[Outcome]:
    """Runs three parts at a time, and then what failed in each once more, one after the other."""
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(_first_try, part, root, more) for part in parts]
        first = [one.result() for one in running]
    return [
        _outcome(part, *tried, known, root, more) for part, tried in zip(parts, first, strict=True)
    ]


def _first_try(part: Part, root: Path, more: Sequence[str]) -> tuple[int, list[str]]:
    last_failed = root / part.cache / "v/cache/lastfailed"
    last_failed.unlink(missing_ok=True)
    with tempfile.TemporaryFile() as told:
        status = _pytest(part, root, more, told)
        told.seek(0)
        sys.stdout.write(f"tests {part.name}\n{told.read().decode(errors='replace')}")
        sys.stdout.flush()
    return status, _ids(last_failed)


def _outcome(
    part: Part,
    status: int,
    first: list[str],
    known: dict[str, str],
    root: Path,
    more: Sequence[str],
) -> Outcome:
    if status in (PASSED, NOTHING_RUN):
        return Outcome(part.name)
    if status != SOME_FAILED or not first:
        return Outcome(part.name, first, broken=f"pytest ended with status {status}")
    if len(first) > MOST_TRIED_AGAIN:
        return Outcome(part.name, first)
    status = _pytest(part, root, [*more, "--last-failed", "--last-failed-no-failures", "none"])
    broken = f"the second try ended with status {status}" * (status not in (PASSED, SOME_FAILED))
    second = first if broken else _ids(root / part.cache / "v/cache/lastfailed")
    unsteady = [name for name in first if name not in second]
    excused = [name for name in unsteady if name in known or name.partition("[")[0] in known]
    return Outcome(part.name, second, [n for n in unsteady if n not in excused], excused, broken)


def _pytest(part: Part, root: Path, more: Sequence[str], shown: IO[bytes] | None = None) -> int:
    command = [sys.executable, "-m", "pytest", *part.arguments, "-o", f"cache_dir={part.cache}"]
    # Threads of torch that wait must not burn the cores that tools, servers and engines need.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what one part compiles the others read
    return subprocess.run(
        [*command, *more], cwd=root, env=environment, stdout=shown, stderr=shown, check=False
    ).returncode


def _ids(last_failed: Path) -> list[str]:
    return list(json.loads(last_failed.read_text("utf-8"))) if last_failed.exists() else []


def summary(outcomes: Sequence[Outcome], known: dict[str, str]) -> str:
    """What to read at the end."""
    lines = [""]
    for outcome in outcomes:
        how = "FAILED" if not outcome.passed else "passed, flaky" if outcome.flaky else "passed"
        lines.append(f"tests {outcome.part}: {how}")
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
    """Runs all parts; 1 if one failed, or more tests than may were flaky.

    Args:
        arguments: ``--all`` or ``--weekly``, if anything; and those of pytest.
    """
    # What a shell starts in the background ignores it, and so would the runs that are interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    known = known_flaky()
    is_weekly = "--weekly" in arguments
    parts, told = (WEEKLY_PARTS if is_weekly else PARTS), "all files"
    if is_weekly:
        os.environ.setdefault("HYPOTHESIS_PROFILE", "thorough")
    elif "--all" not in arguments:
        choice = choose()
        parts, told = chosen_of(parts, choice.left_out), choice.why
    more = [each for each in arguments if each not in ("--weekly", "--all")]
    sys.stdout.write(f"tests of {told}\n")
    sys.stdout.flush()
    compile_imports()
    outcomes = run_parts(parts, known, more=more)
    sys.stdout.write(f"{summary(outcomes, known)}\nThese were tests of {told}.\n")
    num_flaky = sum(len(outcome.flaky) for outcome in outcomes)
    too_many = num_flaky > (0 if is_weekly else MOST_FLAKY)
    return 0 if all(outcome.passed for outcome in outcomes) and not too_many else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
