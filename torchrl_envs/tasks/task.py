"""Task: data, tools and rewards, a limit of turns, and demonstrations if it has any.

Everything that a script trains on is a :class:`Task`, whether its environment has tools and a
state or only a question; :class:`TaskEnv` composes it.

Shape legend: B rows.
"""

import hashlib
import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Final

from torchrl.envs import Transform
from torchrl.envs.transforms import Compose, StepCounter

from torchrl_data.checks import check_columns
from torchrl_data.conversation import Conversations
from torchrl_data.conversation_io import read_conversations
from torchrl_data.messages import Message
from torchrl_data.templates.content_shown import ToolsNotShownError
from torchrl_data.templates.demonstrations import encode_demonstrations
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_envs.datasets.loading import load_rows
from torchrl_envs.datasets.options import DataOptions
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.datasets.prompt_limit import opening_messages
from torchrl_envs.datasets.row_checks import PROMPT_COLUMNS, prompt_error
from torchrl_envs.datasets.row_stream import NumberedRows
from torchrl_envs.episode.chat_env import ChatEnv
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_envs.episode.tool_source import ToolSource
from torchrl_envs.graders.answers import read_tags
from torchrl_envs.rewards.functions import RewardFunctions
from torchrl_envs.tools.environments import EnvironmentTools

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
    train_rows: Any = field(repr=False)
    """Rows, or whatever :class:`~torchrl_envs.DataLoadingPrimer` takes."""
    held_out_rows: Sequence[Row] = field(default=(), repr=False)
    """Rows that are not trained on."""
    environment: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None
    """Makes the environment of one rollout, or several by name; see ``EnvironmentTools``."""
    user: Callable[[], Transform | None] | None = None
    """Makes the user who answers the policy, where one is simulated; see ``SimulatedUser``."""
    tools: Callable[[bool], Sequence[Transform]] | None = None
    """Makes further sources of tools; told whether the prompt shows their schemas."""
    rewards: Callable[[], Sequence[Transform]] | None = None
    """Makes what scores, where the environment does not do it itself."""
    metrics: Sequence[Callable[..., Any]] = ()
    """Reward functions that are only logged."""
    solved_by: Sequence[str] = ()
    """The rewards that say whether an episode is solved, where several are added."""
    columns: Sequence[str] = ()
    """Columns that the data must have."""
    prompt_column: str | None = None
    """The column with the prompt; see :class:`~torchrl_envs.DataLoadingPrimer`."""
    map_row: MapRow | None = None
    """Makes a row out of a row of the data."""
    skip_bad_rows: bool = False
    """Leave out rows that can't be used; see :class:`~torchrl_envs.DataOptions`."""
    system_prompt: str | None = None
    demonstrations: Sequence[Sequence[Message]] = field(default=(), repr=False)
    """Conversations about training rows that show the format, and little of the skill."""
    demonstration_tools: Sequence[Sequence[dict[str, Any]] | None] = field(default=(), repr=False)
    """JSON schemas that each of them shows; none, or ``None``, for those of the environment."""
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
    phrases: Sequence[str] = field(default=(), repr=False)
    """Words and white space that such a tokenizer has as one token each."""
    game: Callable[[Mapping[str, Any]], Any] | None = None
    """Makes the game of a row that two policies can play; see the recipe self-play."""
    parts: Sequence[str] = ()
    """The names of the tasks that it is made of; a row's column ``environment`` has its own."""


def is_of_tasks(names: Sequence[str], episode: Episode) -> bool:
    """Return whether the row that an episode started from belongs to one of some tasks."""
    return (episode.example or {}).get(ROUTE_COLUMN) in names


def users_of(task: Task) -> list[Transform]:
    """Return who answers the policy in a task's episodes, if anybody does."""
    user = None if task.user is None else task.user()
    return [] if user is None else [user]


def scoring_of(task: Task) -> list[Transform]:
    """Return what scores a task's episodes, and measures them."""
    parts = [] if task.rewards is None else list(task.rewards())
    if task.metrics:
        parts.append(RewardFunctions(task.metrics, weights=[0.0] * len(task.metrics)))
    return parts


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
            options=DataOptions(skip_bad_rows=task.skip_bad_rows),
        )
        primer.require_columns(type(self).__name__, task.columns)
        parts: list[Any] = [primer, *users_of(task)]
        if task.environment is not None:
            environments = EnvironmentTools(task.environment, show_schemas=show_schemas)
            if task.parts:  # not all of them need have one
                environments.only_for = partial(is_of_tasks, tuple(environments.factories))
            parts.append(environments)
        if task.tools is not None:
            parts.extend(task.tools(show_schemas))
        if compute_reward:
            parts.extend(scoring_of(task))
        parts.append(StepCounter(max_steps=task.max_turns if max_steps is None else max_steps))
        kwargs.setdefault("system_prompt", task.system_prompt)
        try:
            chat = ChatEnv(batch_size=num_envs, **kwargs)
        except TypeError as error:  # an argument that nobody takes
            raise TypeError(str(error).replace("ChatEnv", type(self).__name__, 1)) from error
        super().__init__(chat, Compose(*parts))
        self.check()
        self.task = task
        self._opening = kwargs["system_prompt"]

    def encode_demonstrations(
        self,
        encoder: ConversationEncoder,
        *,
        faults: dict[int, str] | None = None,
        only: Sequence[int] | None = None,
        as_scored: bool = False,
    ) -> Conversations:
        """The task's demonstrations, with the very prompts that its episodes have.

        A conversation without a system prompt gets the task's, and one without tools of its own
        those that the prompts of this environment show.

        Args:
            encoder: with the chat template.
            faults: is told of those that can't be encoded, by their place, and they are left out;
                ``None`` raises for the first one.
            only: the places of those to encode; all of them when not given.
            as_scored: as :class:`~torchrl_envs.RewardModel` reads an episode: with all that the
                template writes at the end, and without the schemas of tools.

        Raises:
            ValueError: as :func:`~torchrl_data.encode_demonstrations`; or there are several
                environments, so that nobody knows which tools a conversation is about.
        """
        task, tools, shown = self.task, self.task.demonstration_tools, None
        places = range(len(task.demonstrations)) if only is None else only
        chats: Any = [opening_messages(task.demonstrations[i], self._opening) for i in places]
        sources = () if as_scored else self.transforms_of(ToolSource)
        shows = any(source.show_schemas for source in sources)
        if shows and (not tools or None in tools):  # those in the prompt of an episode
            if task.parts or len(getattr(task.environment, "keys", tuple)()) > 1:
                raise ValueError(
                    "there are several environments with tools of their own, and nothing says "
                    "which of them a demonstration is about: give its schemas (a column 'tools'), "
                    "or show none (show_schemas=False; in a recipe policy.show_tool_schemas=false)."
                )
            is_held_out = len(task.held_out_rows) > 0
            with closing(TaskEnv(task, held_out=is_held_out, compute_reward=False)) as env:
                shown = read_conversations(env.reset(), "prompt", who="TaskEnv").tools(0)
        known: Any = [] if as_scored else tools
        schemas = [(known[i] if known else None) or shown for i in places]
        try:
            return encode_demonstrations(encoder, chats, tools=schemas, keep_end=as_scored)
        except ToolsNotShownError:
            raise
        except (ValueError, TypeError):
            if faults is None and only is None:
                raise
        kept: list[Conversations] = []
        numbers = getattr(task.demonstrations, "numbers", range(len(task.demonstrations)))
        for place, chat, own in zip(places, chats, schemas, strict=True):
            options: Any = {"first_row": numbers[place], "keep_end": as_scored}
            try:
                kept.append(encode_demonstrations(encoder, [chat], tools=[own], **options))
            except (ValueError, TypeError) as error:
                if faults is None:
                    raise
                faults[place] = str(error)
        return Conversations.cat(kept) if kept else Conversations.from_messages([])


def split_rows(
    rows: Sequence[Row],
    num_held_out: int,
    prompt_column: str = "prompt",
    *,
    told_apart_by: Sequence[str] | None = None,
) -> tuple[Any, NumberedRows]:
    """Rows without repetitions, split into training and held-out rows.

    Where there are enough different prompts, each held-out row has one of its own, and no row with
    that prompt is trained on. Otherwise only whole rows are never in both, and the ``note`` of the
    held-out rows says so. The ``note`` of the training rows says how many repeat an earlier one,
    unless ``told_apart_by`` is given.

    Args:
        rows: with a prompt each.
        num_held_out: how many are held out.
        prompt_column: the column with the prompt.
        told_apart_by: rows that agree in these columns are the same row; all columns when not
            given.

    Returns:
        Training rows, a list unless ``rows`` have ``select``, and held-out rows; ``numbers`` of
        each are those in ``rows``. What is no prompt is kept, for
        :class:`~torchrl_envs.DataLoadingPrimer` to name.

    Raises:
        ValueError: too few different rows are there to hold that many out and train on others.
    """
    first: dict[bytes, int] = {}
    by_prompt: dict[bytes, list[int]] = {}
    for number, row in enumerate(rows):
        prompt = digest_of(row.get(prompt_column), number)
        whole = row if told_apart_by is None else {name: row.get(name) for name in told_apart_by}
        if first.setdefault(digest_of(whole, number), number) == number:
            by_prompt.setdefault(prompt, []).append(number)
    distinct, note = [*first.values()], ""
    if len(distinct) < 2 * num_held_out:
        most = len(distinct) // 2
        fewer = (
            f", or hold out at most {most}: num_held_out, evaluate.num_prompts={most} of a recipe"
        )
        raise ValueError(
            f"Only {len(distinct)} of {len(rows)} rows are different, too few to hold "
            f"{num_held_out} out and keep as many. Give more rows{fewer if most else ''}; "
            "held_out_split=train tests on a file as it is, rows that are trained on included."
        )
    if len(by_prompt) >= 2 * num_held_out:
        held = [numbers[0] for numbers in [*by_prompt.values()][:num_held_out]]
        kept = sorted(n for numbers in [*by_prompt.values()][num_held_out:] for n in numbers)
    else:
        held, kept = distinct[:num_held_out], distinct[num_held_out:]
        note = (
            f"{len(distinct)} different rows have {len(by_prompt)} prompt(s) in all: the held-out "
            "rows differ from the training rows, but have the same prompts."
        )
    select: Any = getattr(rows, "select", lambda its: NumberedRows(rows[n] for n in its))
    train, held_out = select(kept), NumberedRows(rows[n] for n in held)
    train.numbers, held_out.numbers, held_out.note = kept, held, note
    train.note = "" if told_apart_by else _note_of_repeats(len(rows), len(rows) - len(distinct))
    return train, held_out


def _note_of_repeats(num_rows: int, num_repeated: int) -> str:
    if not num_repeated:
        return ""
    return (
        f"{num_repeated} of {num_rows} rows repeat an earlier row and are left out. To train on "
        "each as often as it comes, hold out rows of another split (held_out_split), or give the "
        "rows a column that tells them apart."
    )


def digest_of(value: Any, number: int) -> bytes:
    """A digest of a value of a row, equal where values are; of what has no content, of its number.

    Args:
        value: of plain values, dates, arrays, images and the like.
        number: of the row.
    """

    def plain(thing: Any) -> Any:
        if isinstance(thing, bytes | bytearray | memoryview):
            return hashlib.sha256(thing).hexdigest()
        if hasattr(thing, "tobytes"):  # an array, an image
            about = [str(getattr(thing, name, "")) for name in ("dtype", "shape", "mode", "size")]
            return [*about, hashlib.sha256(thing.tobytes()).hexdigest()]
        try:
            return hashlib.sha256(pickle.dumps(thing)).hexdigest()
        except Exception:  # the code of the user's objects
            return f"row {number}"

    try:
        text = json.dumps(value, default=plain, sort_keys=True)
    except (TypeError, ValueError):  # keys of several types, or a value that holds itself
        text = f"row {number}"
    return hashlib.sha256(text.encode()).digest()


def load_task_rows(
    dataset: Any,
    *,
    name: str | None = None,
    split: str | None = None,
    held_out_split: str | None = None,
    num_held_out: int = 0,
    prompt_column: str = "prompt",
    skip_bad_rows: bool = False,
    told_apart_by: Sequence[str] | None = None,
) -> tuple[Any, Sequence[Row]]:
    """The training and held-out rows of a data set.

    Args:
        dataset: a hub id, a local path, or what :class:`~torchrl_envs.DataLoadingPrimer` takes.
        name: of the configuration, for a hub id.
        split: which to train on; the only one, or ``"train"``, when not given.
        held_out_split: which to hold out; when not given, rows of ``split`` are held out.
        num_held_out: how many rows; 0 for none.
        prompt_column: the column with the prompt.
        skip_bad_rows: leave out lines that can't be read, see :func:`~torchrl_envs.load_rows`.
        told_apart_by: see :func:`split_rows`.

    Returns:
        Data to train on, as they are where nothing is held out of them; and held-out rows.

    Raises:
        ValueError: there are too few rows, no such split, or no column with the prompt.
    """
    options: dict[str, Any] = {"name": name, "skip_bad_rows": skip_bad_rows}
    train = load_rows(dataset, split=split, **options)
    if num_held_out == 0:
        return train, ()
    if held_out_split is None:
        rows = train if hasattr(train, "select") else [dict(row) for row in train]
        if len(rows):
            usual = next((column for column in PROMPT_COLUMNS if column in rows[0]), "...")
            hint = (
                f" {prompt_column!r} is to hold the prompts: rename a column, or name the one that "
                f"does with prompt_column={usual} (of a recipe task.prompt_column={usual})."
            )
            check_columns("the task", rows[0], [prompt_column], hint)
        return split_rows(rows, num_held_out, prompt_column, told_apart_by=told_apart_by)
    rows = load_rows(dataset, split=held_out_split, **options)
    held_out = NumberedRows(dict(row) for row in islice(rows, num_held_out))
    if held_out_split == (split or "train"):
        held_out.note = f"{held_out_split=}: the held-out rows are trained on, too."
    if len(held_out) < num_held_out:
        raise ValueError(
            f"{held_out_split=} has only {len(held_out)} rows, too few to hold {num_held_out} out."
        )
    return train, held_out


def with_solutions(task: Task, count: int, solution: Callable[[Row], str | None]) -> Task:
    """A task with the questions of its first rows, each with an answer, as demonstrations.

    Args:
        task: its ``prompt_column`` is the one with the question, or ``"prompt"``.
        count: most conversations.
        solution: what the assistant says, of a row; ``None`` leaves the row out.
    """
    column, system = task.prompt_column or "prompt", task.system_prompt
    rows = (row for row in islice(task.train_rows, count) if not prompt_error(row, column))
    chats: Any = [
        [*opening_messages(row[column], system), {"role": "assistant", "content": text}]
        for row in rows
        if (text := solution(row)) is not None
    ]
    return replace(task, demonstrations=chats)


def tagged_answer(text: str) -> str | None:
    """Content of the last ``<answer>`` block of a text, white space aside; none without one."""
    return " ".join(read_tags(text).answer.split()) or None
