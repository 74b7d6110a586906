"""Tasks of users: an environment or an agent by its entry point, and an agent as an example."""

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, Final

from torchrl_data import import_package
from torchrl_data.checks import check_counts
from torchrl_data.import_path import import_callable
from torchrl_envs.agents.agent_program import AgentProgram
from torchrl_envs.agents.programs import AgentCommand, AgentEndpoint
from torchrl_envs.concurrency.calls import accepted_arguments
from torchrl_envs.concurrency.own_random import OwnRandom
from torchrl_envs.rewards.functions import RewardFunctions
from torchrl_envs.tools.functions import FunctionTools
from torchrl_envs.tools.step_environments import StepEnvironments, protocol_of

from .reasoning_gym import TOOLS, calculator_task, score_answer
from .task import Task, load_task_rows

# A function of the user's as a task: it makes an environment of any known protocol, or a task.

PROMPT: Final = "Act in the environment: each of your messages is one action."
_OF_TASK: Final = ("prompt_column", "skip_bad_rows", "system_prompt", "max_turns", "max_new_tokens")


def environment_task(
    *,
    factory: str | None = None,
    tools: Any = (),
    rewards: Any = (),
    reward_weights: Sequence[float] = (),
    arguments: Any = None,
    row_argument: str | None = None,
    reset_columns: Sequence[str] = (),
    reward: str = "sum",
    global_random: bool = False,
    prompt: str = PROMPT,
    dataset: Any = None,
    name: str | None = None,
    split: str | None = None,
    held_out_split: str | None = None,
    prompt_column: str = "prompt",
    skip_bad_rows: bool = False,
    system_prompt: str | None = None,
    max_turns: int = 8,
    max_new_tokens: int = 256,
    num_rows: int = 4096,
    num_held_out: int = 64,
    seed: int = 0,
) -> Task:
    """A task of the user's own parts: an environment, tools, reward functions, data.

    At least one of ``factory``, ``tools`` and ``rewards`` is given; they go together.

    Args:
        factory: ``package.module:name``; what it makes is known by its methods: an environment
            with tools (``EnvironmentTools``) or steps (``StepEnvironments``), or a ``Task``.
        tools: functions that the policy can call (``FunctionTools``): one ``module:name``, or a
            list of them.
        rewards: functions that score (``RewardFunctions``): one ``module:name``, or a list.
        reward_weights: of these, in the same order; 1 each when not given.
        arguments: that the factory is called with, by name.
        row_argument: the argument that gets the row of the data, if one does.
        reset_columns: columns that are ``options`` of ``reset``, of environments with steps.
        reward: the sum of the steps' rewards, or the last one.
        global_random: see :class:`~torchrl_envs.StepEnvironments`.
        prompt: what every episode begins with where there are no data: they differ in their seed.
        dataset: a hub id, a local path, or rows with a prompt each.
        name: of the configuration, for a hub id.
        split: which to train on.
        held_out_split: which to test on; when not given, rows of ``split``.
        prompt_column: the column with the prompts.
        skip_bad_rows: leave out rows that can't be used, and log how many; else they are refused.
        system_prompt: begins every episode.
        max_turns: most turns of the policy.
        max_new_tokens: most tokens of a turn, for the embedded model.
        num_rows: training rows, where there are no data.
        num_held_out: rows held out.
        seed: given to a function that makes a task.

    Raises:
        ValueError: no such function, too few rows, nothing that scores, or a setting has no effect
            on what the factory makes.
        TypeError: what it makes follows no known protocol.
    """
    settings: Any = dict(locals())
    check_counts("environment", max_turns=max_turns, max_new_tokens=max_new_tokens)
    called, scores = _functions("tools", tools), _functions("rewards", rewards)
    reward_weights = list(reward_weights)
    if reward_weights and len(reward_weights) != len(scores):
        raise ValueError(f"reward_weights={reward_weights} are for {len(scores)} rewards.")
    if factory is None and not (dataset and (called or scores)):
        raise ValueError(
            "give it factory=, or tools= or rewards= (each module:name) with dataset=, rows with a "
            "prompt each."
        )
    rows: Any = [{prompt_column: prompt}] * num_rows, [{prompt_column: prompt}] * num_held_out
    if dataset is not None:
        of_data = ("name", "split", "held_out_split", "num_held_out")
        names = (*of_data, "prompt_column", "skip_bad_rows")
        rows = load_task_rows(dataset, **{name: settings[name] for name in names})
    steps: Any = {"reset_columns": reset_columns, "reward": reward, "global_random": global_random}
    of_row, parts = {"row_argument": row_argument}, dict[str, Any]()
    sources: list[Any] = [functools.partial(FunctionTools, called)] if called else []
    if factory is None:
        _refuse("no factory= is given", {**steps, **of_row, "arguments": arguments})
        is_scored = False
    else:
        sizes, row = {"seed": seed, "num_held_out": num_held_out}, next(iter(rows[0]))
        make, made = _tried(factory, arguments, row_argument, row, **sizes)
        whose = f"factory={factory!r} makes"
        if isinstance(made, Task):
            others = settings.keys() - {"factory", "arguments", "num_held_out", "seed"}
            its = {name: settings[name] for name in sorted(others)}
            _refuse(f"{whose} a task, which has all of its own", its)
            return made
        is_scored = hasattr(made, "get_reward")
        if protocol_of(made) is not None and not is_scored:
            sources.append(lambda **_: StepEnvironments(make, **steps))
            is_scored = True
        else:
            _refuse(f"{whose} an environment with tools", {**steps, **of_row})
            parts["environment"] = make
    if not (is_scored or scores):
        raise ValueError(
            "nothing scores an episode: give it rewards=module:name, or a factory= whose class has "
            "get_reward()."
        )
    if sources:
        parts["tools"] = lambda shown: [source(show_schemas=shown) for source in sources]
    if scores:
        parts["rewards"] = lambda: [RewardFunctions(scores, weights=reward_weights or None)]
    return Task(
        name="environment",
        train_rows=rows[0],
        held_out_rows=rows[1],
        columns=(prompt_column, *reset_columns),
        **{name: settings[name] for name in _OF_TASK},
        **parts,
    )


def _functions(setting: str, given: Any) -> list[Callable[..., Any]]:
    """The functions that a setting names, one or several."""
    names = [given] if isinstance(given, str) else list(given or ())
    return [import_callable(setting, str(name)) for name in names]


def _tried(
    factory: str, arguments: Any, row_argument: str | None, row: Mapping[str, Any], **sizes: int
) -> tuple[Callable[..., Any], Any]:
    """Factory of an environment, or of a task of so many rows, and its result for the first row.

    That one is to see what it is; an environment is closed again.
    """
    make = import_callable("factory", factory)
    if arguments is not None and not isinstance(arguments, Mapping):
        raise ValueError(f"arguments must be {{name: value}}, got {arguments!r}.")
    given = {str(name): value for name, value in (arguments or {}).items()}
    try:
        makes_task = inspect.signature(make).return_annotation in (Task, "Task")
    except ValueError:  # a class that is not written in Python
        makes_task = False
    if makes_task:
        given = {**accepted_arguments(make, sizes), **given}

    def make_of(row: Mapping[str, Any] | None = None) -> Any:
        return make(**given, **({} if row_argument is None else {row_argument: dict(row or {})}))

    try:
        with OwnRandom(sizes["seed"])():  # not the caller's
            made = make_of(row)
    except Exception as error:
        raise ValueError(f"factory={factory!r} failed: {type(error).__name__}: {error}") from error
    if hasattr(made, "close"):
        made.close()
    if not isinstance(made, Task) and not hasattr(made, "reset") and protocol_of(made) is None:
        raise TypeError(
            f"factory={factory!r} made a {type(made).__name__}, which has neither reset() with "
            "tools, nor reset() and step(), nor init() and step()."
        )
    return make_of, made


def _refuse(why: str, settings: Mapping[str, Any]) -> None:
    usual = inspect.signature(environment_task).parameters
    changed = [name for name, value in settings.items() if value != usual[name].default]
    if changed:
        raise ValueError(f"{changed[0]} has no effect: {why}.")


# An agent of the user's as a task: a program that owns its loop, see ``AgentProgram``.


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
    """
    check_counts("agent", max_turns=max_turns, max_new_tokens=max_new_tokens)
    if (program is None) == (command is None):
        raise ValueError(
            "agent takes one of program (package.module:name) and command (a list of words)."
        )
    if dataset is None:
        raise ValueError("agent needs a dataset: the rows that the agent works on.")
    if program is not None and (sandbox is not False or not prints_reward):
        raise ValueError("prints_reward and sandbox are for command: program runs in this process.")
    run: Any = import_callable("program", program) if program is not None else None
    if command is not None:
        run = AgentCommand(list(command), prints_reward=prints_reward, sandbox=sandbox)
    rewards: Any = {"error_reward": error_reward, "cut_reward": cut_reward}
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


# The calculator's questions, answered by an agent that owns its loop; to copy for one of yours.
#
# ``answer`` is what somebody might have written for a hosted model: its own prompt, its own reading
# of calls, its own tools, and OpenAI's client. Needs the package ``openai`` (``pip install torchrl-
# agents[graders]``).

MAX_REQUESTS: Final = 4
_CALL: Final = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@functools.lru_cache(maxsize=8)
def _client(base_url: str) -> Any:
    return import_module("openai").OpenAI(base_url=base_url, api_key="of each", max_retries=0)


def answer(endpoint: AgentEndpoint, *, prompt: str, entry: dict[str, Any], generator: str) -> float:
    """Answer one question with the calculator's tools.

    Args:
        endpoint: of the policy.
        prompt: the question.
        entry: reasoning-gym's, which scores.
        generator: of the question.

    Returns:
        1 for a right answer and 0 for another one.
    """
    client = _client(endpoint.base_url).with_options(api_key=endpoint.api_key)
    chat: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(MAX_REQUESTS):
        reply = client.chat.completions.create(model=endpoint.model, messages=chat)
        text = reply.choices[0].message.content
        chat.append({"role": "assistant", "content": text})
        call = _CALL.search(text)
        if call is None:
            return float(score_answer(text, {"entry": entry, "generator": generator}) >= 1.0)
        try:
            asked = json.loads(call[1])
            tool: Any = TOOLS[asked["name"]]
            result = tool(None, **asked["arguments"])
        except (ValueError, KeyError, TypeError, ArithmeticError) as error:
            result = f"error: {type(error).__name__}: {error}"
        chat.append({"role": "tool", "content": result})
    return 0.0


def calculator_agent_task(
    *, num_rows: int = 4096, num_held_out: int = 256, num_demonstrations: int = 8192, seed: int = 0
) -> Task:
    """The task ``calculator``, by an agent.

    Args:
        num_rows: most rows; as many for each tool.
        num_held_out: rows held out.
        num_demonstrations: conversations for the warm start.
        seed: of everything.

    Raises:
        ValueError: too few different questions to hold so many out.
        ImportError: the package ``openai`` is not installed.
    """
    install = "pip install 'torchrl-agents[graders]'"
    import_package("openai", who="calculator_agent", install=install)
    counts = {"num_held_out": num_held_out, "num_demonstrations": num_demonstrations}
    task = calculator_task(num_rows=num_rows, seed=seed, **counts)
    own: Any = {"name": "calculator_agent", "environment": None, "max_turns": MAX_REQUESTS}
    return replace(task, tools=lambda _: [AgentProgram(answer, timeout_s=60.0)], **own)
