"""A chat environment whose conversations begin with the rows of a data set.

Shape legend: B rows.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from torchrl_envs.datasets.loading import load_rows
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.datasets.tables import one_source_of
from torchrl_envs.episode.chat_env import ChatEnv
from torchrl_envs.episode.episode_env import EpisodeEnv

CollateFn = Callable[[list[dict[str, Any]]], Any]


class DatasetChatEnv(EpisodeEnv):
    """A :class:`~torchrl_envs.ChatEnv` with a :class:`~torchrl_envs.DataLoadingPrimer`.

    Append rewards, tools and limits as to any environment.

    Args:
        dataset: anything that a ``DataLoadingPrimer`` takes: a hub id, a path, data.
        num_envs: rows of the environment, B; a multiple of the group size.
        group_size: rollouts of one draw; 1 when not given.
        repeats: TorchRL's name of the same.
        shuffle: whether to draw in random order.
        seed: of the order and the groups' seeds.
        name: of the configuration, for a hub id or a path; :func:`~torchrl_envs.load_rows` has
            more settings.
        split: which split.
        num_epochs: passes over the data; ``None`` goes on for ever.
        collate_fn: changes rows as in TorchRL: gets a list of one row, gives a list of one row, a
            row, or columns of one value.
        system_prompt: of all conversations; the class's ``SYSTEM_PROMPT`` when not given.
        primer_kwargs: further arguments of the ``DataLoadingPrimer``, such as ``prompt_column``.
        **kwargs: of the :class:`~torchrl_envs.ChatEnv`: ``tokenizer``, ``input_mode``, ...

    Raises:
        ValueError: a setting is out of range, or the data can't be used.
    """

    SYSTEM_PROMPT: ClassVar[str | None] = None

    def __init__(
        self,
        *,
        dataset: Any,
        num_envs: int = 1,
        group_size: int | None = None,
        repeats: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        name: str | None = None,
        split: str | None = None,
        num_epochs: int | None = None,
        collate_fn: CollateFn | None = None,
        system_prompt: str | None = None,
        primer_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        primer = DataLoadingPrimer(
            load_rows(dataset, name=name, split=split),
            group_size=one_source_of(group_size=group_size, repeats=repeats, default=1),
            map_row=None if collate_fn is None else functools.partial(_collated, collate_fn),
            shuffle=shuffle,
            seed=seed,
            num_epochs=num_epochs,
            **(primer_kwargs or {}),
        )
        env = ChatEnv(
            batch_size=(num_envs,), system_prompt=system_prompt or self.SYSTEM_PROMPT, **kwargs
        )
        super().__init__(env, primer)
        primer.check(self)

    @classmethod
    def from_dataloader(
        cls, dataloader: Any, *, batch_size: int | Sequence[int] = 1, **kwargs: Any
    ) -> Self:
        """An environment over a torch ``DataLoader`` or another iterable, in its own order.

        Args:
            dataloader: its batches are taken apart.
            batch_size: of the environment: one number, B.
            **kwargs: of the class.
        """
        (rows,) = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
        return cls(dataset=dataloader, num_envs=rows, **{"shuffle": False, **kwargs})


def _collated(collate_fn: CollateFn, row: dict[str, Any]) -> Mapping[str, Any]:
    """Return what a collate function makes of one row."""
    collated = collate_fn([row])
    if isinstance(collated, Mapping):
        if all(isinstance(v, list) and len(v) == 1 for v in collated.values()):
            return {name: column[0] for name, column in collated.items()}
        return collated
    (only,) = collated
    return only
