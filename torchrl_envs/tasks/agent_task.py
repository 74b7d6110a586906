"""An agent of the user's as a task: a program that owns its loop, see ``AgentProgram``."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torchrl_data.checks import check_counts, check_names
from torchrl_data.import_path import import_callable
from torchrl_envs.agents.agent_command import AgentCommand
from torchrl_envs.agents.agent_program import AgentProgram
from torchrl_envs.sandbox import Isolation, ProgramLimits

from .task import Task, load_task_rows


def agent_task(
    *,
    program: str | None = None,
    command: Sequence[str] | None = None,
    dataset: Any = None,
    name: str | None = None,
    split: str | None = None,
    held_out_split: str | None = None,
    prompt_column: str = "prompt",
    skip_bad_rows: bool = False,
    prints_reward: bool = True,
    sandbox: bool | Sequence[str] = False,
    isolation: Isolation | None = None,
    limits: Mapping[str, int] | None = None,
    agents: Sequence[str] = (),
    error_reward: float | None = None,
    cut_reward: float | None = 0.0,
    ignored_parameters: Sequence[str] = (),
    timeout_s: float = 300.0,
    max_turns: int = 16,
    max_new_tokens: int = 256,
    num_held_out: int = 64,
) -> Task:
    """An agent, as a function or a command, and the data that it gets.

    Args:
        program: ``package.module:name`` of a function, see :class:`~torchrl_envs.AgentProgram`.
        command: in its place, a command and its arguments, see
            :class:`~torchrl_envs.AgentCommand`.
        dataset: a hub id, a local path, or rows.
        name: of the configuration, for a hub id.
        split: which to train on.
        held_out_split: which to test on; when not given, rows of ``split``.
        prompt_column: the column that tells rows apart; what the policy reads is the agent's.
        skip_bad_rows: leave out rows that can't be used, and log how many; else they are refused.
        prints_reward: whether a command prints its reward.
        sandbox: whether a command runs in one; or which folders it can read there besides.
        isolation: of the sandbox: ``bubblewrap`` or ``landlock``; the first that works when not
            given.
        limits: of the sandbox, by the names of :class:`~torchrl_envs.sandbox.ProgramLimits`:
            ``task.limits={memory_bytes:17179869184}``.
        agents: names of agents that are rewarded by themselves, with loss.credit=agent.
        error_reward: what an episode is given whose agent raised; none leaves it out of training.
        cut_reward: the same of one that was cut by a limit.
        ignored_parameters: of the agent's requests, such as ``temperature``.
        timeout_s: longest time between an answer and the agent's next request.
        max_turns: most requests of an episode.
        max_new_tokens: most tokens of a turn, for the embedded model.
        num_held_out: rows held out.

    Raises:
        ValueError: there is not one of ``program`` and ``command``, no such function, no data, or
            too few rows.
        TypeError: there is no such limit.
    """
    check_counts("agent", max_turns=max_turns, max_new_tokens=max_new_tokens)
    if (program is None) == (command is None):
        raise ValueError(
            "agent takes one of program (package.module:name) and command (a list of words)."
        )
    if dataset is None:
        raise ValueError("agent needs a dataset: the rows that the agent works on.")
    is_confined = sandbox is not False or isolation is not None or limits is not None
    if program is not None and (is_confined or not prints_reward):
        raise ValueError(
            "prints_reward, sandbox, isolation and limits are for command: program runs in this "
            "process."
        )
    run: Any = import_callable("program", program) if program is not None else None
    if command is not None:
        confined: Any = {"sandbox": sandbox, "isolation": isolation}
        confined |= {"limits": None if limits is None else _program_limits(limits)}
        run = AgentCommand(list(command), prints_reward=prints_reward, **confined)
    rewards: Any = {"error_reward": error_reward, "cut_reward": cut_reward}
    rewards |= {"agents": list(agents)}
    rewards |= {"ignored_parameters": list(ignored_parameters), "timeout_s": timeout_s}
    splits: dict[str, Any] = {"split": split, "held_out_split": held_out_split}
    splits |= {"num_held_out": num_held_out, "prompt_column": prompt_column}
    splits |= {"name": name, "skip_bad_rows": skip_bad_rows}
    train_rows, held_out_rows = load_task_rows(dataset, **splits)
    return Task(
        name="agent",
        train_rows=train_rows,
        held_out_rows=held_out_rows,
        prompt_column=prompt_column,
        skip_bad_rows=skip_bad_rows,
        tools=lambda _: [AgentProgram(run, **rewards)],
        max_turns=max_turns,
        max_new_tokens=max_new_tokens,
    )


def _program_limits(given: Mapping[str, int]) -> ProgramLimits:
    check_names("agent: limits", given, [field.name for field in fields(ProgramLimits)])
    return ProgramLimits(**given)
