"""Reward functions: plain functions of finished episodes.

Shape legend: B rows.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDictBase

from torchrl_data.keys import PROMPT, ROW
from torchrl_data.loop_state import read_conversations
from torchrl_data.row_values import read_row_values
from torchrl_envs.accepted_arguments import accepted_arguments
from torchrl_envs.concurrent_calls import Call, ConcurrentCalls, Outcome
from torchrl_envs.rewards import RewardSource, add_rewards

from .environment_tools import EnvironmentTools
from .episode_transform import EpisodeTransform

RewardFunction = Callable[..., Any]


class RewardFunctions(EpisodeTransform, RewardSource):
    """Scores finished episodes with functions of TRL's signature.

    A function gets lists, one item per episode that has just finished: ``prompts`` (what came
    before the policy's first turn) and ``completions`` (everything after it), both lists of
    messages, ``environments`` (``None`` where there is none), and every column of the data. It
    returns as many rewards; ``None`` means that it does not apply. It may be ``async``.

    Args:
        functions: the functions.
        weights: one per function; 1 for each when not given.
        timeout_s: deadline of one call.

    Raises:
        ValueError: there is no function, or not as many weights as functions.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        *,
        weights: Sequence[float] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__()
        if not functions:
            raise ValueError("RewardFunctions needs at least one function.")
        if weights is not None and len(weights) != len(functions):
            raise ValueError(
                f"RewardFunctions: {len(functions)} functions but {len(weights)} weights."
            )
        self.functions = _unique_names(functions)
        self.weights = list(weights) if weights is not None else [1.0] * len(functions)
        self._calls = ConcurrentCalls(timeout_s=timeout_s)

    @property
    def reward_names(self) -> list[str]:
        """Unique name of each function."""
        return list(self.functions)

    def finish_episodes(
        self, batch: TensorDictBase, next_batch: TensorDictBase, rows: Sequence[int]
    ) -> None:
        """Score the rows; a function that fails makes them unscorable."""
        inputs = self._inputs(batch, next_batch, rows)
        calls = [[_bind(function, inputs)] for function in self.functions.values()]
        for (name, weight), outcomes in zip(
            zip(self.functions, self.weights, strict=True), self._calls.run(calls), strict=True
        ):
            add_rewards(
                next_batch,
                name,
                rows,
                _per_row(outcomes[0], len(rows), name),
                weight=weight,
                who=name,
            )

    def _inputs(
        self, batch: TensorDictBase, next_batch: TensorDictBase, rows: Sequence[int]
    ) -> dict[str, list[Any]]:
        final = read_conversations(next_batch, PROMPT, who=type(self).__name__)
        chats = [final.messages(row) for row in rows]
        starts = [_first_turn(chat) for chat in chats]
        tools = self.env_transforms(EnvironmentTools)
        inputs: dict[str, list[Any]] = {
            "prompts": [chat[:i] for chat, i in zip(chats, starts, strict=True)],
            "completions": [chat[i:] for chat, i in zip(chats, starts, strict=True)],
            "environments": [tools[0].instance(row) if tools else None for row in rows],
        }
        data = read_row_values(batch, ROW, {})
        for column in data[rows[0]]:
            inputs.setdefault(column, [data[row].get(column) for row in rows])
        return inputs

    def close(self) -> None:
        """Stop the threads."""
        self._calls.close()


def _unique_names(functions: Sequence[RewardFunction]) -> dict[str, RewardFunction]:
    """Functions by name; a name that comes again gets a number."""
    named: dict[str, RewardFunction] = {}
    for function in functions:
        base = getattr(function, "__name__", type(function).__name__)
        name, count = base, 1
        while name in named:
            count += 1
            name = f"{base}_{count}"
        named[name] = function
    return named


def _first_turn(chat: Sequence[dict[str, Any]]) -> int:
    roles = [message["role"] for message in chat]
    return roles.index("assistant") if "assistant" in roles else len(roles)


def _per_row(outcome: Outcome, num_rows: int, name: str) -> list[Outcome]:
    if outcome.error is not None:
        return [outcome] * num_rows
    values = outcome.value
    try:
        values = list(values)
    except TypeError:
        values = None
    if values is None or len(values) != num_rows:
        error = ValueError(
            f"The reward function {name} must return one reward per completion: expected a list of "
            f"{num_rows}, got {outcome.value!r:.80}."
        )
        return [Outcome(error=error)] * num_rows
    return [Outcome(value) for value in values]


def _bind(function: RewardFunction, inputs: dict[str, list[Any]]) -> Call:
    """The function with the inputs that it names, or all if it takes any."""
    return functools.partial(function, **accepted_arguments(function, inputs))
