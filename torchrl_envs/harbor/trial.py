"""A rollout of a task: its machine, its steps, and the tests that score it."""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Final

from .folders import HarborTask, Health, Step, resolved
from .machines import MAX_OUTPUT_BYTES, CommandResult, Machine, file_of, machine_type

REWARD_FILES: Final = ("reward.json", "reward.txt")
_LOGS: Final = "/logs/verifier"
_START_S: Final = 30.0


class NoRewardError(RuntimeError):
    """The tests gave no reward; the message says why."""


class Trial:
    """A task being done.

    Args:
        task: what is to be done.
        machine: the kind of machine, see :data:`~torchrl_envs.harbor.machines.MACHINES`.
        endpoint: ``host:port`` of the policy, for programs inside.
        readable: folders that programs inside can read.

    Raises:
        MachineError: this kind of machine can't be what the task needs.
        ValueError: there is no such kind.
    """

    def __init__(
        self,
        task: HarborTask,
        *,
        machine: str = "bubblewrap",
        endpoint: str | None = None,
        readable: Sequence[str] = (),
    ) -> None:
        self.task = task
        self._type = machine_type(machine)
        self.machine: Machine = self._type(task.place, endpoint=endpoint, readable=readable)
        self._number = 0
        self._deadline = math.inf
        self.rewards: list[dict[str, float]] = []
        """Of the steps that were scored."""
        self.is_over = False

    @property
    def step(self) -> Step:
        """The step that is being done."""
        return self.task.steps[self._number]

    @property
    def time_left_s(self) -> float:
        """Seconds that the agent has left in this step."""
        return max(0.0, self._deadline - time.monotonic())

    def start(self) -> str:
        """Start the machine; gives the first instruction.

        Raises:
            MachineError: it can't be started, or does not become healthy.
        """
        self.machine.start()
        try:
            _await_health(self.machine, self.task.place.health)
            return self._begin()
        except BaseException:
            self.machine.stop()
            raise

    def _begin(self) -> str:
        step = self.step
        if step.workdir is not None:
            self.machine.upload(step.workdir, self.machine.workdir)
            if (step.workdir / "setup.sh").is_file():
                done = self.machine.run(
                    "bash setup.sh", timeout_s=self.task.place.build_timeout_s, user=step.user
                )
                if done.status != 0:
                    said = done.stderr.strip()[-300:]
                    raise NoRewardError(f"setup.sh of the step {step.name} failed: {said}")
        _await_health(self.machine, step.health)
        self._deadline = math.inf if step.timeout_s is None else time.monotonic() + step.timeout_s
        return step.instruction

    def run(
        self, command: str, *, timeout_s: float, max_output_bytes: int = MAX_OUTPUT_BYTES
    ) -> CommandResult:
        """Run a command for the agent, within its time.

        Args:
            command: for bash.
            timeout_s: of this command.
            max_output_bytes: how much of each stream is kept.

        Raises:
            TimeoutError: the agent's time is over.
            MachineError: the machine is lost.
        """
        left = self.time_left_s
        if left <= 0:
            raise TimeoutError(f"the task's time ({self.step.timeout_s:g} s) is over")
        limits = {"timeout_s": min(timeout_s, left), "max_output_bytes": max_output_bytes}
        return self.machine.run(command, user=self.step.user, **limits)  # type: ignore[arg-type]

    def solve(self) -> CommandResult:
        """Run the reference solution of this step in the agent's place.

        Raises:
            FileNotFoundError: there is none.
        """
        folder = self.step.solution
        if folder is None:
            raise FileNotFoundError(f"{self.task.name} has no solution/solve.sh.")
        self.machine.upload(folder, "/solution")
        return self.machine.run(
            _runs("/solution/solve.sh"),
            timeout_s=min(self.time_left_s, 3600.0),
            user=self.step.user,
            variables=resolved(self.task.solution_variables, os.environ),
        )

    def finish_step(self) -> str | None:
        """Score what was done, and begin the next step.

        Returns:
            The next instruction; nothing where the task is over.

        Raises:
            NoRewardError: the tests gave no reward, or the next step can't be prepared.
            MachineError: the machine is lost.
        """
        step = self.step
        rewards = self._score(step)
        self.rewards.append(rewards)
        is_last = self._number + 1 == len(self.task.steps)
        missed = any(rewards.get(name, -math.inf) < x for name, x in step.min_reward.items())
        if is_last or missed:
            self.is_over = True
            return None
        if step.tests.place is None:  # the next step must not see what scored this one
            _made_anew(self.machine, f"rm -rf /tests {_LOGS}")
        self._number += 1
        return self._begin()

    def reward(self, key: str = "reward") -> float:
        """The reward of the whole task, by Harbor's rule for several steps.

        Args:
            key: which one, where the tests give several.

        Raises:
            NoRewardError: the tests gave no such reward.
        """
        if not self.rewards:
            raise NoRewardError("no step was scored")
        found = self.rewards
        if self.task.strategy == "final" or len(found) == 1:
            return self._value(found[-1], key)
        return sum(rewards.get(key, 0.0) for rewards in found) / len(found)

    def _value(self, rewards: Mapping[str, float], key: str) -> float:
        if key in rewards:
            return rewards[key]
        raise NoRewardError(
            f"{self.task.name}: the tests give {sorted(rewards)}, and no {key!r}: set reward_key."
        )

    def stop(self) -> None:
        """End the machine with everything in it."""
        self.machine.stop()

    # Scoring ------------------------------------------------------------------------------------

    def _score(self, step: Step) -> dict[str, float]:
        tests = step.tests
        for command, limit_s, user in tests.collect:
            done = self.machine.run(command, timeout_s=limit_s, user=user)
            if done.status != 0:
                raise NoRewardError(
                    f"the collect hook `{command:.80}` failed: {done.stderr[-300:]}"
                )
        if tests.place is None:
            return self._run_tests(self.machine, step)
        machine = self._type(tests.place)
        machine.start()
        try:
            _await_health(machine, tests.place.health)
            for path in tests.artifacts:
                data = self.machine.download(path)
                if data is not None:
                    machine.upload_tar(data, path.rpartition("/")[0] or "/")
            return self._run_tests(machine, step)
        finally:
            machine.stop()

    def _run_tests(self, machine: Machine, step: Step) -> dict[str, float]:
        tests, whose = step.tests, f"{self.task.name}{step.name and ' ' + step.name}"
        names = " ".join(f"{_LOGS}/{name}" for name in REWARD_FILES)
        wanted = "" if tests.place is not None and tests.place.has_tests else "/tests"
        # What an agent has put in the place of these goes: a link, or a file of rewards.
        links = f"for path in /logs {_LOGS}; do [ -L $path ] && rm -f -- $path; done"
        _made_anew(machine, f"{links}; rm -rf -- {wanted} {names}")
        for folder in tests.folders:
            machine.upload(folder, "/tests")
        script = f"/tests/{tests.script}"
        done = machine.run(
            f"({_runs(script)}) > {_LOGS}/test-stdout.txt 2>&1",
            timeout_s=tests.timeout_s,
            variables=resolved(tests.variables, os.environ),
            user=tests.user,
        )
        if done.status is None:
            raise NoRewardError(f"{whose}: the tests did not end within {tests.timeout_s:g} s")
        found = machine.download(_LOGS)
        for name in REWARD_FILES:
            data = file_of(found, name)
            if data is not None:
                return read_rewards(name, data, whose)
        said = (file_of(found, "test-stdout.txt") or b"").decode(errors="replace").strip()[-300:]
        raise NoRewardError(f"{whose}: the tests wrote no {' and no '.join(REWARD_FILES)}: {said}")


def _made_anew(machine: Machine, cleared: str) -> None:
    """Clear what an agent may have left, and have the folder of the rewards, for any user."""
    machine.run(f"{cleared}; mkdir -p {_LOGS}; chmod 777 {_LOGS}", timeout_s=_START_S, user="root")


def _runs(script: str) -> str:
    """Return what runs a script that may not be executable, by a user whose file it is not."""
    return f"chmod +x {script} 2> /dev/null; [ -x {script} ] && exec {script}; exec bash {script}"


def read_rewards(name: str, data: bytes, whose: str) -> dict[str, float]:
    """The rewards that tests wrote.

    Args:
        name: of the file.
        data: what it holds.
        whose: tests, for the error.

    Raises:
        NoRewardError: they are no finite numbers.
    """
    try:
        text = data.decode("utf-8")
        value = json.loads(text) if name.endswith(".json") else {"reward": float(text)}
    except ValueError as error:
        raise NoRewardError(f"{whose}: {name} can't be read: {error}") from error
    if not isinstance(value, dict) or not value:
        raise NoRewardError(f"{whose}: {name} must hold an object of numbers, got {text!r:.80}")
    for key, each in value.items():
        if not isinstance(each, int | float) or not math.isfinite(each):
            raise NoRewardError(f"{whose}: {name} must hold finite numbers, got {key}={each!r:.80}")
    return {key: float(each) for key, each in value.items()}


def _await_health(machine: Machine, health: Health | None) -> None:
    """Ask until the machine is healthy.

    Raises:
        NoRewardError: it does not become so.
    """
    if health is None:
        return
    begun, failed = time.monotonic(), 0
    while True:
        done = machine.run(health.command, timeout_s=health.timeout_s)
        if done.status == 0:
            return
        is_starting = time.monotonic() - begun < health.start_period_s
        failed += not is_starting
        if failed >= health.retries:
            said = done.stderr.strip()[-300:]
            raise NoRewardError(f"the machine is not healthy: `{health.command:.80}`: {said}")
        time.sleep(health.start_interval_s if is_starting else health.interval_s)
