"""An OpenEnv server as a task: it brings the tools, the state and the reward."""

from collections.abc import Sequence
from typing import Any, Final

from torchrl_envs.entries.rewards import RewardOf
from torchrl_envs.openenv.tools import OpenEnvTools

from .task import Row, Task, load_task_rows

PROMPT: Final = "Use the tools until the environment says that it is done."


def openenv_task(
    *,
    base_url: str,
    prompt: str = PROMPT,
    dataset: Any = None,
    name: str | None = None,
    split: str | None = None,
    held_out_split: str | None = None,
    skip_bad_rows: bool = False,
    reset_columns: Sequence[str] = (),
    reward: RewardOf = "sum",
    timeout_s: float = 60.0,
    system_prompt: str | None = None,
    max_turns: int = 8,
    num_rows: int = 4096,
    num_held_out: int = 64,
) -> Task:
    """A session of an OpenEnv server in each rollout; see :class:`OpenEnvTools`.

    Args:
        base_url: of the server, which must allow as many sessions as a step has rollouts.
        prompt: what every episode begins with where there are no data: they differ in their seed.
        dataset: a hub id, a local path, or rows with a ``prompt`` each.
        name: of the configuration, for a hub id.
        split: which to train on; the only one, or ``"train"``, when not given.
        held_out_split: which to test on; when not given, rows of ``split`` are held out.
        skip_bad_rows: leave out rows that can't be used, and log how many; else they are refused.
        reset_columns: columns of the data that ``reset`` gets, beside the group's seed.
        reward: ``"sum"`` of the steps' rewards, or the ``"last"`` one that the server gave.
        timeout_s: deadline of one answer of the server.
        system_prompt: begins every episode.
        max_turns: most turns of the policy.
        num_rows: training rows, where there are no data.
        num_held_out: rows held out.

    Raises:
        ValueError: there are too few rows, no such split, or the URL is wrong.
    """
    train: Any = [{"prompt": prompt}] * num_rows
    held_out: Sequence[Row] = [{"prompt": prompt}] * num_held_out
    if dataset is not None:
        splits: Any = {"name": name, "split": split, "held_out_split": held_out_split}
        splits |= {"num_held_out": num_held_out, "skip_bad_rows": skip_bad_rows}
        train, held_out = load_task_rows(dataset, **splits)
    settings: Any = {"reset_columns": reset_columns, "reward": reward, "timeout_s": timeout_s}
    return Task(
        name="openenv",
        train_rows=train,
        held_out_rows=held_out,
        tools=lambda shown: [OpenEnvTools(base_url, show_schemas=shown, **settings)],
        columns=("prompt", *reset_columns),
        prompt_column="prompt",
        skip_bad_rows=skip_bad_rows,
        system_prompt=system_prompt,
        max_turns=max_turns,
    )
