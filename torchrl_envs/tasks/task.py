"""What a task brings: data, tools and rewards, a limit of turns, and demonstrations if it has any.

Everything that a script trains on is a :class:`Task`, whether its environment has tools and a state
or only a question; :class:`TaskEnv` composes it.

Shape legend: B rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from torchrl.envs import Transform
from torchrl.envs.transforms import Compose, StepCounter

from torchrl_data.conversation.conversations import Message
from torchrl_envs.datasets.loading import load_rows
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.episode.chat_env import ChatEnv
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_envs.graders.answers import read_tags
from torchrl_envs.rewards.functions import RewardFunctions
from torchrl_envs.tools.environment_tools import EnvironmentTools

Row = dict[str, Any]
MapRow = Callable[[Row], Mapping[str, Any]]
ROUTE_COLUMN: Final = "environment"
"""The column that names a row's task, where there are several."""
_HELD_OUT_SEED: Final = 1 << 32
"""Added to the seed of held-out rows: their groups' seeds are never those of training rows."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Everything about a task that a training script needs."""

    name: str
    train_rows: Any
    """Rows, or whatever :class:`~torchrl_envs.DataLoadingPrimer` takes."""
    held_out_rows: Sequence[Row] = ()
    """Rows that are not trained on."""
    environment: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None
    """Makes the environment of one rollout, or several by name; see ``EnvironmentTools``."""
    tools: Callable[[bool], Sequence[Transform]] | None = None
    """Makes further sources of tools; told whether the prompt shows their schemas."""
    rewards: Callable[[], Sequence[Transform]] | None = None
    """Makes what scores, where the environment does not do it itself."""
    metrics: Sequence[Callable[..., Any]] = ()
    """Reward functions that are only logged."""
    columns: Sequence[str] = ()
    """Columns that the data must have."""
    prompt_column: str | None = None
    """The column with the prompt; see :class:`~torchrl_envs.DataLoadingPrimer`."""
    map_row: MapRow | None = None
    """Makes a row out of a row of the data."""
    system_prompt: str | None = None
    demonstrations: Sequence[Sequence[Message]] = ()
    """Conversations about training rows that show the format, and little of the skill."""
    num_warm_steps: int | None = None
    """Steps of the warm start on them, for the embedded model; ``None`` for the recipe's."""
    entropy_coeff: float | None = None
    """Weight of an entropy bonus, for the embedded model; ``None`` for the recipe's."""
    max_turns: int = 1
    """Most turns of the policy in an episode."""
    max_new_tokens: int = 256
    """Most tokens of a turn, for a model whose tokenizer was trained on the task's texts."""
    final_answer: Callable[[str], str | None] | None = None
    """The answer in what the policy said last, equal for answers that are; for a majority vote."""
    isolated: str = r"\d"
    """What a tokenizer made for this task never merges, a regular expression."""
    phrases: Sequence[str] = ()
    """Words and white space that such a tokenizer has as one token each."""
    game: Callable[[Mapping[str, Any]], Any] | None = None
    """Makes the game of a row that two policies can play; see the recipe self-play."""
    parts: Sequence[str] = ()
    """The names of the tasks that it is made of; a row's column ``environment`` has its own."""


@dataclass(frozen=True)
class OfTasks:
    """Says whether an episode is of one of some tasks."""

    names: tuple[str, ...]

    def __call__(self, episode: Episode) -> bool:
        """Read it off the row that the episode started from."""
        return (episode.example or {}).get(ROUTE_COLUMN) in self.names


class TaskEnv(EpisodeEnv):
    """The environment of a task: a :class:`~torchrl_envs.ChatEnv` with data, tools and rewards.

    Args:
        task: what to do.
        held_out: whether to ask the held-out rows instead of the training rows.
        num_envs: rows of the environment, B.
        repeats: rollouts of one draw, which form a group; 1 when not given.
        shuffle: whether to draw in random order.
        seed: of the order and the groups' seeds.
        max_steps: most turns of the policy; the task's when not given.
        num_epochs: passes over the data; ``None`` goes on for ever.
        map_row: makes a row out of a row; the task's when not given.
        compute_reward: whether to score.
        show_schemas: whether the chat template shows the tools to the model.
        **kwargs: see :class:`~torchrl_envs.ChatEnv`.

    Raises:
        ValueError: a setting is out of range, the data lack a column, or no rows are held out.
    """

    def __init__(
        self,
        task: Task,
        *,
        held_out: bool = False,
        num_envs: int = 1,
        repeats: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        max_steps: int | None = None,
        num_epochs: int | None = None,
        map_row: MapRow | None = None,
        compute_reward: bool = True,
        show_schemas: bool = True,
        **kwargs: Any,
    ) -> None:
        if held_out and not len(task.held_out_rows):
            raise ValueError(f"The task {task.name} holds no rows out: give it num_held_out.")
        primer = DataLoadingPrimer(
            task.held_out_rows if held_out else task.train_rows,
            group_size=repeats or 1,
            shuffle=shuffle,
            seed=seed + _HELD_OUT_SEED if held_out else seed,
            num_epochs=num_epochs,
            prompt_column=task.prompt_column,
            map_row=map_row or task.map_row,
        )
        missing = [column for column in task.columns if column not in primer.columns]
        if missing:
            raise ValueError(
                f"{type(self).__name__} needs the columns {missing}; the data set has "
                f"{sorted(primer.columns)}."
            )
        parts: list[Any] = [primer]
        if task.environment is not None:
            environments = EnvironmentTools(task.environment, show_schemas=show_schemas)
            if task.parts:  # not all of them need have one
                environments.only_for = OfTasks(tuple(environments.factories))
            parts.append(environments)
        if task.tools is not None:
            parts.extend(task.tools(show_schemas))
        if compute_reward and task.rewards is not None:
            parts.extend(task.rewards())
        if compute_reward and task.metrics:
            parts.append(RewardFunctions(task.metrics, weights=[0.0] * len(task.metrics)))
        parts.append(StepCounter(max_steps=task.max_turns if max_steps is None else max_steps))
        kwargs.setdefault("system_prompt", task.system_prompt)
        super().__init__(ChatEnv(batch_size=num_envs, **kwargs), Compose(*parts))
        self.check()
        self.task = task


def unique_rows(rows: Sequence[Row], prompt_column: str = "prompt") -> list[Row]:
    """Rows without repeated prompts, in order."""
    return list({str(row[prompt_column]): row for row in rows}.values())


def split_rows(
    rows: Sequence[Row], num_held_out: int, prompt_column: str = "prompt"
) -> tuple[list[Row], list[Row]]:
    """Rows without repeated prompts, split into training and held-out rows.

    Args:
        rows: with a prompt each.
        num_held_out: how many are held out.
        prompt_column: the column with the prompt.

    Returns:
        Training rows and held-out rows; no prompt is in both.

    Raises:
        ValueError: too few different prompts are there to hold that many out and train on others.
    """
    distinct = unique_rows(rows, prompt_column)
    if len(distinct) < 2 * num_held_out:
        raise ValueError(
            f"Only {len(distinct)} of {len(rows)} rows have different prompts, too few to hold "
            f"{num_held_out} out. Generate more rows or hold out fewer."
        )
    return distinct[num_held_out:], distinct[:num_held_out]


def load_task_rows(
    dataset: Any,
    *,
    name: str | None = None,
    split: str | None = None,
    held_out_split: str | None = None,
    num_held_out: int = 0,
    prompt_column: str = "prompt",
) -> tuple[Any, Sequence[Row]]:
    """The training and held-out rows of a data set.

    Args:
        dataset: a hub id, a local path, or what :class:`~torchrl_envs.DataLoadingPrimer` takes.
        name: of the configuration, for a hub id.
        split: which to train on; the only one, or ``"train"``, when not given.
        held_out_split: which to hold out; when not given, rows of ``split`` are held out.
        num_held_out: how many rows; 0 for none.
        prompt_column: the column with the prompt.

    Returns:
        Data to train on, as they are where nothing is held out of them; and held-out rows.

    Raises:
        ValueError: there are too few rows, no such split, or no column with the prompt.
    """
    train = load_rows(dataset, name=name, split=split)
    if num_held_out == 0:
        return train, ()
    if held_out_split is None:
        rows = [dict(row) for row in train]
        if rows and prompt_column not in rows[0]:
            raise ValueError(
                f"The data have no column {prompt_column!r} with the prompts; their columns are "
                f"{sorted(rows[0])}."
            )
        return split_rows(rows, num_held_out, prompt_column)
    rows = load_rows(dataset, name=name, split=held_out_split)
    held_out = [dict(row) for row in islice(rows, num_held_out)]
    if len(held_out) < num_held_out:
        raise ValueError(
            f"The split {held_out_split!r} has only {len(held_out)} rows, too few to hold "
            f"{num_held_out} out."
        )
    return train, held_out


def demonstrate(
    rows: Any, count: int, *, prompt_column: str, system_prompt: str | None, answer: Callable
) -> list[list[Message]]:
    """Questions of the first rows, each with an answer.

    Args:
        rows: of the data.
        count: most conversations.
        prompt_column: the column with the question.
        system_prompt: begins each conversation, if there is one.
        answer: what the assistant says, of a row; ``None`` leaves the row out.
    """
    opening: list[Message] = (
        [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    )
    demonstrations = []
    for row in islice(rows, count):
        text = answer(row)
        if text is not None:
            question: Message = {"role": "user", "content": row[prompt_column]}
            response: Message = {"role": "assistant", "content": text}
            demonstrations.append([*opening, question, response])
    return demonstrations


def tagged_answer(text: str) -> str | None:
    """What stands in the last ``<answer>`` block of a text, white space aside; none without one."""
    return " ".join(read_tags(text).answer.split()) or None
