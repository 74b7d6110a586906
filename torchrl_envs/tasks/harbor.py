"""Harbor's tasks: by our model with a shell, or by an agent that people use."""

import functools
import logging
import os
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from torchrl_data.checks import POSITIVE, check_counts, check_numbers
from torchrl_envs.agents.agent_command import AgentEndpoint, AgentProgramError
from torchrl_envs.agents.agent_program import AgentProgram
from torchrl_envs.agents.known import find_agent, installed, started
from torchrl_envs.harbor.folders import HarborTask
from torchrl_envs.harbor.machines import MachineError, machine_type
from torchrl_envs.harbor.rows import found_tasks
from torchrl_envs.harbor.trial import Trial
from torchrl_envs.tools.environments import EnvironmentTools

from .task import Task

SYSTEM_PROMPT: Final = (
    "You work in a terminal on Linux. Call the tool shell to run commands. When the task is done, "
    "answer without a call."
)
_log: Final = logging.getLogger(__name__)
_SHOWN_BYTES: Final = 8192
_DAY_S: Final = 86400.0
_SOME_ENDPOINT: Final = "127.0.0.1:1"
"""For the question whether an agent could reach one; nobody is asked there."""
_SCORE_S: Final = 60.0
"""Beside the tests' own limit, for what copies files and starts a machine."""


class HarborTerminal:
    """The machine of a task, with a shell."""

    def __init__(
        self, tasks: dict[str, HarborTask], machine: str, command_timeout_s: float, reward_key: str
    ) -> None:
        self._tasks, self._machine = tasks, machine
        self._command_timeout_s, self._reward_key = command_timeout_s, reward_key
        self._trial: Trial | None = None

    def reset(self, *, task: str) -> None:
        """Start the machine of a row's task."""
        self._trial = Trial(self._tasks[task], machine=self._machine)
        self._trial.start()

    def shell(self, command: str) -> str:
        """Run a command in the terminal.

        Args:
            command: For bash.
        """
        trial = self._running()
        limit_s = self._command_timeout_s
        done = trial.run(command, timeout_s=limit_s, max_output_bytes=_SHOWN_BYTES)
        said = done.stdout + done.stderr
        if done.status is None:
            return f"{said}\n[stopped: it ran longer than {limit_s:g} s]"
        return said if done.status == 0 else f"{said}\n[exit status {done.status}]"

    def get_reward(self) -> float:
        """Run the tests of what is left to be scored."""
        trial = self._running()
        while not trial.is_over:
            trial.finish_step()
        return trial.reward(self._reward_key)

    def close(self) -> None:
        """End the machine."""
        if self._trial is not None:
            self._trial.stop()

    def _running(self) -> Trial:
        if self._trial is None:
            raise RuntimeError("there is no machine")
        return self._trial


class HarborSteps(HarborTerminal):
    """The same of a task with several steps."""

    def next_step(self) -> str:
        """Say that this step is done, and read the next one."""
        trial = self._running()
        if trial.is_over:
            raise RuntimeError("the task is over: answer without a call")
        instruction = trial.finish_step()
        return "The task is over." if instruction is None else instruction


def harbor_task(
    *,
    dataset: Any = None,
    split: str | None = None,
    machine: str = "bubblewrap",
    agent: str | None = None,
    reward_key: str = "reward",
    skip_bad_tasks: bool = False,
    command_timeout_s: float = 60.0,
    ignored_parameters: Sequence[str] = (),
    timeout_s: float = 300.0,
    max_turns: int = 16,
    max_new_tokens: int = 512,
    num_held_out: int = 0,
) -> Task:
    """Tasks in Harbor's format, scored by their own tests.

    Args:
        dataset: a folder or an archive of tasks; or rows, each of which is a task (see
            :func:`~torchrl_envs.harbor.rows.tasks_of_rows`): a data file, what ``save_to_disk``
            wrote, with ``split`` an id on the hub, or the rows themselves.
        split: of rows that have several.
        machine: bubblewrap, docker, podman, or package.module:class of one of Harbor's
            environments.
        agent: claude-code, codex, mini-swe-agent, opencode or qwen-code, which runs inside the
            machine; when not given, the policy has a shell.
        reward_key: which reward counts, where the tests give several.
        skip_bad_tasks: leave out tasks that can't be read, or that the machine can't run; else
            they are refused.
        command_timeout_s: longest time of one command of the shell.
        ignored_parameters: of the agent's requests, beside those that are known of it.
        timeout_s: longest time between an answer and the agent's next request; the tests' own
            limit is added.
        max_turns: most turns of the policy.
        max_new_tokens: most tokens of a turn, for the embedded model.
        num_held_out: tasks held out, the last ones in the order of their paths.

    Raises:
        ValueError: there is no data set, task, machine or agent of that name, a task is broken, or
            too few are left.
        FileNotFoundError: there is no such folder, or the agent is not installed.
    """
    check_counts("harbor", max_turns=max_turns, max_new_tokens=max_new_tokens)
    check_numbers("harbor", POSITIVE, command_timeout_s=command_timeout_s, timeout_s=timeout_s)
    if dataset is None:
        raise ValueError("harbor needs a dataset: a folder or an archive of tasks, or rows.")
    if agent is None and ignored_parameters:
        raise ValueError("ignored_parameters are of an agent's requests: set agent, too.")
    found, _ = found_tasks(dataset, split=split, skip_bad=skip_bad_tasks)
    if unknown := Counter(key for task in found for key in task.unknown_keys):
        told = ", ".join(f"{key} (of {number} tasks)" for key, number in unknown.items())
        _log.warning("harbor: keys of task.toml that do not exist have no effect: %s", told)
    left = _runnable(found, machine, has_agent=agent is not None, skip_bad=skip_bad_tasks)
    # Where an archive or rows are unpacked differs between processes; the paths in there do not.
    top = os.path.commonpath([task.folder.parent for task in left])
    tasks = {str(task.folder.relative_to(top)): task for task in left}
    rows = [
        {"prompt": task.steps[0].instruction, "task": key, "name": task.name}
        for key, task in tasks.items()
    ]
    if not 0 <= num_held_out < len(rows):
        raise ValueError(
            f"harbor: {dataset!s:.80} has {len(rows)} tasks, too few to hold {num_held_out} out. "
            "Hold fewer out: num_held_out, or evaluate.num_prompts of a recipe."
        )
    tests_s = max(s.tests.timeout_s for task in tasks.values() for s in task.steps) + _SCORE_S
    build_s = max(task.place.build_timeout_s for task in tasks.values()) + _SCORE_S
    if agent is not None:
        run = named_program(agent, tasks, machine=machine, reward_key=reward_key)
        ignored = [*find_agent(agent).ignored, *ignored_parameters]
        limits: Any = {"timeout_s": timeout_s + tests_s + build_s, "end_timeout_s": tests_s}

        limits["ignored_parameters"] = ignored
        make_tools: Any = functools.partial(_agent_parts, run, limits)
    else:
        kinds = {HarborSteps if task.has_steps else HarborTerminal for task in tasks.values()}
        kind = HarborSteps if HarborSteps in kinds else HarborTerminal
        make = functools.partial(kind, tasks, machine, command_timeout_s, reward_key)
        num_steps = max(len(task.steps) for task in tasks.values())
        times: Any = {"timeout_s": num_steps * tests_s, "start_timeout_s": build_s}
        make_tools = functools.partial(_terminal_parts, make, times)
    num_trained = len(rows) - num_held_out
    return Task(
        name="harbor",
        tools=make_tools,
        train_rows=rows[:num_trained],
        held_out_rows=rows[num_trained:],
        columns=("prompt", "task"),
        prompt_column="prompt",
        system_prompt=None if agent is not None else SYSTEM_PROMPT,
        max_turns=max_turns,
        max_new_tokens=max_new_tokens,
    )


def _agent_parts(run: Any, settings: dict[str, Any], shown: bool) -> list[AgentProgram]:
    del shown  # the agent has its own tools
    return [AgentProgram(run, **settings)]


def _terminal_parts(make: Any, settings: dict[str, Any], shown: bool) -> list[EnvironmentTools]:
    return [EnvironmentTools(make, show_schemas=shown, **settings)]


def _runnable(
    tasks: Sequence[HarborTask], machine: str, *, has_agent: bool, skip_bad: bool
) -> list[HarborTask]:
    """Those that a kind of machine can run.

    Raises:
        ValueError: there is no such kind, or it can't run one of them and none is left out.
    """
    kind, kept, faults = machine_type(machine), [], []
    endpoint = _SOME_ENDPOINT if has_agent else None
    for task in tasks:
        places = [s.tests.place for s in task.steps if s.tests.place is not None]
        try:
            kind(task.place, endpoint=endpoint)
            for place in places:
                kind(place)
        except MachineError as error:
            faults.append(str(error))
            continue
        kept.append(task)
    if faults and (not skip_bad or not kept):
        told = "\n".join(f"  {fault}" for fault in faults[:10])
        raise ValueError(
            f"harbor: machine={machine} can't run {len(faults)} of {len(tasks)} tasks. Leave them "
            f"out with skip_bad_tasks=true, or name another machine:\n{told}"
        )
    return kept


def named_program(
    agent: str,
    tasks: dict[str, HarborTask],
    *,
    machine: str = "bubblewrap",
    reward_key: str = "reward",
) -> Any:
    """An agent by its name, as a program of :class:`~torchrl_envs.AgentProgram`.

    It runs inside the machine of the row's task, where it reaches the policy and nothing else, and
    is asked once for each step.

    Args:
        agent: see :data:`~torchrl_envs.agents.known.AGENTS`.
        tasks: by the column ``task`` of the rows.
        machine: the kind of machine.
        reward_key: which reward counts.

    Raises:
        ValueError: there is no such agent.
        FileNotFoundError: it is not installed.
    """
    known, kind = find_agent(agent), machine_type(machine)
    own: tuple[str, tuple[str, ...]] = (known.program, ())
    program, readable = own if kind.has_own_programs else installed(known)

    def run_all(endpoint: AgentEndpoint, task: str) -> float:
        url = urlsplit(endpoint.base_url)
        place = f"{url.hostname}:{url.port}"
        trial = Trial(tasks[task], machine=machine, endpoint=place, readable=readable)
        try:
            instruction: str | None = trial.start()
            inside = endpoint._replace(base_url=_moved(endpoint.base_url, trial.machine.endpoint))
            while instruction is not None:
                how = started(known, inside, instruction, program)
                for path, text in how.files.items():
                    folder, own = (shlex.quote(str(p)) for p in (Path(path).parent, path))
                    trial.machine.run(
                        f"cd && mkdir -p {folder} && printf %s {shlex.quote(text)} > {own}",
                        timeout_s=10.0,
                        user=trial.step.user,
                    )
                done = trial.machine.run(
                    f"{shlex.join(how.command)} < /dev/null",
                    timeout_s=min(trial.time_left_s, _DAY_S),
                    variables=how.variables,
                    user=trial.step.user,
                )
                if done.status in (126, 127):
                    where = f": `{known.install}` in the image" if kind.has_own_programs else ""
                    said = done.stderr.strip()[-300:]
                    raise AgentProgramError(f"{agent} can't be started: {said}{where}")
                _log.debug("%s said %s", agent, done)
                instruction = trial.finish_step()
            return trial.reward(reward_key)
        finally:
            trial.stop()

    run_all.__name__ = agent.replace("-", "_")
    return run_all


def _moved(url: str, place: str | None) -> str:
    """Return the same page of another ``host:port``."""
    return url if place is None else urlsplit(url)._replace(netloc=place).geturl()
