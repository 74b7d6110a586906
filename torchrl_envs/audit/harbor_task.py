"""Audit of tasks in Harbor's format: agents that deserve nothing, and the reference solution.

They work in machines and are scored by tests, so that this kind has checks of its own.
"""

import io
import re
import shlex
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from torchrl_envs.harbor.folders import HarborTask
from torchrl_envs.harbor.machines import CommandResult, MachineError
from torchrl_envs.harbor.trial import NoRewardError, Trial

from .findings import Finding, Report

NOT_ASKED: Final = {
    "seed": "a task has no seed",
    "endless": "the limits of the task end it",
    "after the end": "the machine is gone",
    "beside": "each machine is its own",
}
"""Checks that tasks of this kind can't be asked, and why."""

_PATH: Final = re.compile(r"(?<![\w/.])(/[\w.-]+(?:/[\w.-]+)+)")
_COMMAND_S: Final = 20.0
_LEAST_BYTES: Final = 24
"""Shorter files say too little to be called a copy of another."""
# It keeps writing rewards, and tests that give them, from before the tests begin; each in the place
# of another at once, so that nobody reads a part of one.
_TAMPER: Final = r"""
mkdir -p /logs/verifier /tests
cat > /tmp/.writes.sh <<'END'
good='mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt'
put() { cat > "$1.new" && chmod +x "$1.new" && mv -f "$1.new" "$1"; }
while :; do
  echo 1 | put /logs/verifier/reward.txt; echo '{"reward": 1}' | put /logs/verifier/reward.json
  for script in /tests/*.sh; do
    [ -f "$script" ] && printf '#!/bin/bash\n%s\n' "$good" | put "$script"
  done
  for script in /tests/*.py; do
    [ -f "$script" ] && printf 'import os\nos.system("%s")\n' "$good" | put "$script"
  done
done 2>/dev/null
END
chmod +x /tmp/.writes.sh
setsid nohup bash /tmp/.writes.sh > /dev/null 2>&1 < /dev/null &
sleep 0.1
"""


def audit_task(task: HarborTask, *, machine: str = "bubblewrap", repeats: int = 2) -> Report:
    """Let a task be done by agents that deserve nothing, and by its own solution.

    Args:
        task: what is audited.
        machine: the kind of machine.
        repeats: how often the solution and the agent that does nothing are run, to see whether
            the tests give the same each time.

    Raises:
        MachineError: this kind of machine can't run it.
    """
    audit = _Audit(task, machine)
    audit.leaks()
    nothing = [audit.reward("nothing", lambda _: None) for _ in range(repeats)]
    solved: list[float | None] = [None]
    if all(step.solution is not None for step in task.steps):
        solved = [audit.reward("solution", lambda trial: trial.solve()) for _ in range(repeats)]
        audit.reward("solution, files of 2099", audit.dated("2099-01-01"))
        audit.reward("solution, files of 1971", audit.dated("1971-01-01"))
    else:
        audit.find(
            "unsolvable", "it has no reference solution, so nothing shows that it can be solved"
        )
    audit.reward("constants", audit.writes("1\n"))
    audit.reward("constants, true", audit.writes("true\n"))
    audit.reward("echo", audit.writes(None))
    audit.reward("tampering", lambda trial: _run(trial, _TAMPER))
    audit.carry_over()
    audit.judge(nothing, solved)
    return audit.report()


class _Audit:
    """The rollouts of one task."""

    def __init__(self, task: HarborTask, machine: str) -> None:
        self.task, self.machine = task, machine
        self.rewards: dict[str, float | None] = {}
        self.findings: list[Finding] = []
        self.starts: list[float] = []
        self.tests: list[float] = []
        self.not_asked: dict[str, str] = {**NOT_ASKED}

    def find(self, defect: str, what: str) -> None:
        self.findings.append(Finding(self.task.name, defect, what))

    def begun(self) -> Trial:
        trial, began = Trial(self.task, machine=self.machine), time.monotonic()
        trial.start()
        self.starts.append(time.monotonic() - began)
        return trial

    def reward(self, agent: str, act: Callable[[Trial], Any]) -> float | None:
        """Return what an agent is rewarded; of several steps it does each."""
        found = None
        trial = self.begun()
        try:
            while not trial.is_over:
                act(trial)
                began = time.monotonic()
                trial.finish_step()
                self.tests.append(time.monotonic() - began)
            names = list(trial.rewards[-1])
            found = trial.reward(names[0] if len(names) == 1 else "reward")
        except (NoRewardError, MachineError, KeyError) as error:
            if agent in ("nothing", "solution") and agent not in self.rewards:
                self.find("broken", f"the agent {agent!r} got no reward: {error}")
            elif isinstance(error, MachineError):
                self.not_asked[agent] = f"the machine failed: {error}"
        finally:
            trial.stop()
        self.rewards[agent] = found
        return found

    def writes(self, text: str | None) -> Callable[[Trial], Any]:
        """An agent that writes a text, or the instruction, to each path of the instruction."""

        def act(trial: Trial) -> None:
            instruction = trial.step.instruction
            said = instruction if text is None else text
            for path in dict.fromkeys(p.rstrip(".") for p in _PATH.findall(instruction)):
                quoted, folder = shlex.quote(path), shlex.quote(str(Path(path).parent))
                _run(
                    trial,
                    f"[ -e {quoted} ] || "
                    f"(mkdir -p {folder} && printf %s {shlex.quote(said)} > {quoted})",
                )
            _run(trial, f"printf %s {shlex.quote(said)}")

        return act

    def dated(self, date: str) -> Callable[[Trial], Any]:
        """The solution, with files that say that they are of another day."""

        def act(trial: Trial) -> None:
            trial.solve()
            where = shlex.quote(trial.machine.workdir)
            _run(trial, f"find {where} -xdev -type f -exec touch -d {date} {{}} +")

        return act

    def leaks(self) -> None:
        """Check that the agent does not find the tests or the solution in its machine."""
        secrets: dict[bytes, str] = {}
        for step in self.task.steps:
            folders = [*step.tests.folders, *([step.solution] if step.solution else [])]
            for path in (p for folder in folders for p in folder.rglob("*") if p.is_file()):
                data = path.read_bytes().strip()
                if len(data) >= _LEAST_BYTES:
                    secrets[data] = str(path.relative_to(self.task.folder))
        trial = self.begun()
        try:
            for path in ("/tests", "/solution"):
                if _run(trial, f"ls -A {path}").stdout.strip():
                    self.find("leak", f"the agent can read {path} before it begins")
            for where in dict.fromkeys((trial.machine.workdir, "/root", "/tmp", "/opt")):
                data = trial.machine.download(where) if where != "/" else None
                for name, text in _files_of(data):
                    if text.strip() in secrets:
                        self.find("leak", f"{name} of the machine is {secrets[text.strip()]}")
        finally:
            trial.stop()

    def carry_over(self) -> None:
        """Check that a rollout does not see what another one left."""
        name = ".left-by-another-rollout"
        paths = [f"{folder}/{name}" for folder in (self.task.place.workdir or "/root", "/tmp")]
        first = self.begun()
        try:
            _run(first, f"touch {' '.join(paths)}")
        finally:
            first.stop()
        second = self.begun()
        try:
            if _run(second, f"ls {' '.join(paths)}").stdout.strip():
                self.find("carry-over", "a rollout sees files that another one left")
        finally:
            second.stop()

    def judge(self, nothing: Sequence[float | None], solved: Sequence[float | None]) -> None:
        """Say what the rewards mean."""
        for agent, values in (("that does nothing", nothing), ("of the solution", solved)):
            if len({*values}) > 1:
                self.find("random", f"the tests give the agent {agent} {sorted(map(str, values))}")
        best = next((value for value in solved if value is not None), None)
        least = max((value for value in nothing if value is not None), default=None)
        if best is not None and (best <= 0 or (least is not None and best <= least)):
            self.find("unsolvable", f"its own solution gets {best:g}, and doing nothing {least}")
        worth = 1.0 if best is None or best <= 0 else best
        if least is not None and least >= worth:
            self.find("nothing", f"doing nothing gets {least:g}")
        told = {"constants": "constants", "constants, true": "constants", "echo": "echo"}
        for agent, defect in {**told, "tampering": "tampering"}.items():
            value = self.rewards.get(agent)
            is_more = value is not None and value > (least or 0.0)
            if is_more and value is not None and not any(f.defect == defect for f in self.findings):
                self.find(defect, f"the agent {agent!r} gets {value:g}, and doing nothing {least}")
        for agent, value in self.rewards.items():
            is_same = any(value == each for each in solved)
            is_known = any(f.defect == "clock" for f in self.findings)
            if agent.startswith("solution, files") and not is_same and not is_known:
                self.find("clock", f"the {agent} gets {value}, and else {best}")

    def report(self) -> Report:
        tests = sum(self.tests) / len(self.tests) if self.tests else 0.0
        start = sum(self.starts) / len(self.starts)
        times = {"reset": start, "reward": tests}
        return Report(self.task.name, self.rewards, self.findings, times, self.not_asked)


def _run(trial: Trial, command: str) -> CommandResult:
    """Run a command of an agent or of a check, whatever its status is.

    Raises:
        MachineError: it did not end in time, so that what it would have done is not known.
    """
    result = trial.machine.run(command, timeout_s=_COMMAND_S)
    if result.status is None:
        raise MachineError(f"a command did not end within {_COMMAND_S:g} seconds: {command:.60}")
    return result


def _files_of(data: bytes | None) -> list[tuple[str, bytes]]:
    if data is None:
        return []
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return [
            (member.name, file.read())
            for member in archive
            if member.isreg() and (file := archive.extractfile(member)) is not None
        ]
