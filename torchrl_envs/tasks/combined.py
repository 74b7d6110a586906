"""Several tasks in one run: each row belongs to one, and meets its tools, rewards and limits."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from torchrl.envs import Transform

from torchrl_data.checks import check_columns
from torchrl_envs.datasets.lazy_rows import LazyRows
from torchrl_envs.datasets.prompt_limit import opening_messages
from torchrl_envs.datasets.row_checks import find_prompt_column
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeTransform

from .task import ROUTE_COLUMN, Row, Task, is_of_tasks, scoring_of, users_of


def combine_tasks(
    name: str, tasks: Sequence[Task], shares: Sequence[float] | None = None, *, seed: int = 0
) -> Task:
    """A task of several, whose rows say in their column ``environment`` which is theirs.

    An episode has the environment, tools, rewards, system prompt and limit of turns of its own
    task. Its rows' prompts are in the column ``prompt``. The entropy bonus acts on the tokens of
    all of them, and is the smallest that one asks for.

    Args:
        name: of the whole.
        tasks: of different names.
        shares: of the training prompts, in proportion; without them the tasks take turns, for as
            long as the shortest lasts. Held-out rows and demonstrations take turns in any case.
        seed: of the order, see :func:`draw_schedule`.

    Returns:
        The task; one pass over its training rows shows each row of each task at least once.

    Raises:
        ValueError: names repeat, a task has several environments already, its data can't be read
            by their number, or the shares don't fit.
    """
    names = [task.name for task in tasks]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"combine_tasks needs tasks of different names, got {names}.")
    for task in tasks:
        _check(task)
    prompts = {task.system_prompt for task in tasks}
    makers = [partial(_mixed_row, task, len(prompts) > 1) for task in tasks]
    pairs = list(zip(tasks, makers, strict=True))
    columns = dict.fromkeys(column for t, make in pairs for column in make(t.train_rows[0]))
    sizes = [len(task.train_rows) for task in tasks]
    in_turn = _in_turn([[(k, i) for i in range(size)] for k, size in enumerate(sizes)])
    order = np.array(in_turn if shares is None else draw_schedule(sizes, shares, seed))
    held_out = [[make(row) for row in task.held_out_rows] for task, make in pairs]
    environments = {task.name: task.environment for task in tasks if task.environment is not None}
    answers = {task.final_answer for task in tasks}
    bonuses = [task.entropy_coeff for task in tasks if task.entropy_coeff is not None]

    def tools(show_schemas: bool) -> list[Transform]:
        parts = []
        for task in tasks:
            own = [] if task.tools is None else list(task.tools(show_schemas))
            parts += _only_for(task, [*users_of(task), *own, TurnLimit(task.max_turns)])
        return parts

    return Task(
        name=name,
        environment=environments or None,  # type: ignore[arg-type]
        tools=tools,
        rewards=lambda: [each for task in tasks for each in _only_for(task, scoring_of(task))],
        solved_by=tuple(name for task in tasks for name in task.solved_by),
        train_rows=LazyRows(lambda k, i: makers[k](tasks[k].train_rows[i]), order, columns),
        held_out_rows=_in_turn(held_out),
        prompt_column="prompt",
        system_prompt=prompts.pop() if len(prompts) == 1 else None,
        demonstrations=_in_turn([task.demonstrations for task in tasks if task.demonstrations]),
        num_warm_steps=max(task.num_warm_steps or 0 for task in tasks) or None,
        entropy_coeff=min(bonuses, default=None),
        max_turns=max(task.max_turns for task in tasks),
        max_new_tokens=max(task.max_new_tokens for task in tasks),
        final_answer=answers.pop() if len(answers) == 1 else None,
        isolated="|".join(dict.fromkeys(task.isolated for task in tasks)),
        phrases=tuple(dict.fromkeys(phrase for task in tasks for phrase in task.phrases)),
        skip_bad_rows=any(task.skip_bad_rows for task in tasks),
        parts=tuple(names),
    )


def draw_schedule(
    sizes: Sequence[int], shares: Sequence[float], seed: int
) -> list[tuple[int, int]]:
    """Return which row of which task each prompt is.

    The j-th prompt of a task comes at a time drawn uniformly from ``[j, j + 1) / share``: random,
    and yet any stretch holds each task's share of it, give or take a few prompts. Each task goes
    through its rows in their order, and again from the first when they are used up.

    Args:
        sizes: rows of each task.
        shares: of each task, positive; in proportion.
        seed: of the times.

    Returns:
        Task and row of each prompt, for as long as it takes until every row was there.

    Raises:
        ValueError: there are not as many positive shares as tasks.
    """
    if len(shares) != len(sizes) or not all(np.isfinite(s) and s > 0 for s in shares):
        raise ValueError(
            f"draw_schedule needs a positive share for each of {len(sizes)} tasks, got "
            f"{list(shares)}."
        )
    parts = [share / sum(shares) for share in shares]
    length = max(size / part for size, part in zip(sizes, parts, strict=True))
    times: list[tuple[float, int, int]] = []
    for task, (size, part) in enumerate(zip(sizes, parts, strict=True)):
        draws = np.random.default_rng([seed, task]).random(int(np.ceil(length * part)))
        times += [((j + x) / part, task, j % size) for j, x in enumerate(draws)]
    return [(task, row) for _, task, row in sorted(times)]


class TurnLimit(EpisodeTransform):
    """Bounds the turns of its episodes, as ``StepCounter`` does for all of an environment."""

    def __init__(self, max_turns: int) -> None:
        super().__init__()
        self.max_turns = max_turns

    def begin(self, episode: Episode) -> None:
        """Say how many turns there are."""
        episode.limit_turns(self.max_turns)


def _mixed_row(task: Task, says_system: bool, row: Mapping[str, Any]) -> Row:
    """A row as it is among those of other tasks.

    Args:
        task: whose it is.
        says_system: whether its prompt has to bring the task's system prompt, because those of
            others differ.
        row: of the task's data.
    """
    own = dict(row if task.map_row is None else task.map_row(dict(row)))
    prompt = own[find_prompt_column(list(own), task.prompt_column)]
    if says_system and task.system_prompt is not None:
        prompt = opening_messages(prompt, task.system_prompt)
    return {**own, "prompt": prompt, ROUTE_COLUMN: task.name}


def _only_for(task: Task, transforms: Sequence[Transform]) -> Sequence[Transform]:
    """Transforms that take part in a task's own episodes alone."""
    for transform in transforms:
        if not isinstance(transform, EpisodeTransform):
            raise ValueError(
                f"combine_tasks: {type(transform).__name__} of {task.name} works on whole batches, "
                "so the episodes of other tasks can't be left out. Write it as an EpisodeTransform."
            )
        transform.only_for = partial(is_of_tasks, (task.name,))
    return transforms


def _check(task: Task) -> None:
    if isinstance(task.environment, Mapping):
        raise ValueError(
            f"combine_tasks: {task.name} has several environments already; one each is taken."
        )
    rows = task.train_rows
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")) or not len(rows):
        raise ValueError(
            f"combine_tasks needs rows that can be read by their number; those of {task.name} are "
            f"{type(rows).__name__}. Load them as a whole, without streaming."
        )
    check_columns(task.name, rows[0], task.columns)


def _in_turn(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """One of each part after the other, for as long as the shortest lasts."""
    return list(chain.from_iterable(zip(*parts, strict=False)))
