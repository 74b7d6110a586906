"""An environment of questions from a data set, each answered in words.

Shape legend: B rows.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchrl.envs import Transform
from torchrl.envs.transforms import Compose, StepCounter

from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.episode.chat_env import ChatEnv
from torchrl_envs.episode.episode_env import EpisodeEnv

MapRow = Callable[[dict[str, Any]], Mapping[str, Any]]


class QuestionEnv(EpisodeEnv):
    """A :class:`~torchrl_envs.ChatEnv` with data, rewards and a limit of turns.

    Args:
        dataset: rows, a hub id or a local path, as
            :class:`~torchrl_envs.datasets.primer.DataLoadingPrimer` takes them.
        rewards: transforms that score.
        columns: that the data must have.
        num_envs: rows of the environment, B.
        repeats: rollouts of one draw, which form a group; 1 when not given.
        shuffle: whether to draw in random order.
        seed: of the order and the groups' seeds.
        max_steps: most turns of the policy.
        num_epochs: passes over the data; ``None`` goes on for ever.
        prompt_column: the column with the prompt.
        map_row: makes a row out of a row.
        name: of the configuration, for a hub id.
        split: which split; the only one, or ``"train"``, when not given.
        **kwargs: see :class:`~torchrl_envs.ChatEnv`.

    Raises:
        ValueError: a setting is out of range, or the data lack a column.
    """

    def __init__(
        self,
        dataset: Any,
        rewards: Sequence[Transform],
        *,
        columns: Sequence[str] = (),
        num_envs: int = 1,
        repeats: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        max_steps: int = 1,
        num_epochs: int | None = None,
        prompt_column: str | None = None,
        map_row: MapRow | None = None,
        name: str | None = None,
        split: str | None = None,
        **kwargs: Any,
    ) -> None:
        primer = DataLoadingPrimer(
            dataset,
            group_size=repeats or 1,
            shuffle=shuffle,
            seed=seed,
            num_epochs=num_epochs,
            prompt_column=prompt_column,
            map_row=map_row,
            name=name,
            split=split,
        )
        missing = [column for column in columns if column not in primer.columns]
        if missing:
            raise ValueError(
                f"{type(self).__name__} needs the columns {missing}; the data set has "
                f"{sorted(primer.columns)}."
            )
        limit = StepCounter(max_steps=max_steps)
        parts = Compose(primer, *rewards, limit)  # type: ignore[call-arg]
        super().__init__(ChatEnv(batch_size=num_envs, **kwargs), parts)
        self.check()
