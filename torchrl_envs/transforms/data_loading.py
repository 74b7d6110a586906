"""Rows of a data set become the beginnings of episodes, in groups.

Shape legend: B rows of the environment.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from torchrl_data.keys import GROUP_ID, QUERY, ROW, SEED
from torchrl_data.row_values import read_row_values, write_row_values

from .episode_transform import EpisodeTransform

if TYPE_CHECKING:
    from torchrl_envs.episode_env import EpisodeEnv

PROMPT_COLUMNS = ("prompt", "query", "question", "messages")
"""Where the prompt is looked for when no column is named."""
CARRIED = (GROUP_ID, SEED, ROW)


class DataExhaustedError(StopIteration):
    """A finite data set has no rows left."""


class Draw(NamedTuple):
    """One rollout's share of a data row."""

    row: dict[str, Any]
    group_id: int
    seed: int


class DataLoadingPrimer(EpisodeTransform):
    """Starts each episode from a data row; ``group_size`` episodes start from the same draw.

    The rollouts of one draw share ``group_id`` and ``seed``. A row that is drawn again in another
    epoch is another group.

    Args:
        dataset: a ``datasets.Dataset``, or any sequence of dictionaries with the same keys.
        group_size: rollouts of one draw.
        prompt_column: the column that holds the prompt, a string or a list of messages; the first
            of ``prompt``, ``query``, ``question``, ``messages`` when not given.
        shuffle: whether to draw in random order, another one each epoch.
        seed: of the order and of the groups' seeds.
        num_epochs: stop after this many passes; ``None`` goes on for ever.

    Raises:
        ValueError: the data set is empty, lacks the column, or a count is not positive.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        group_size: int = 1,
        prompt_column: str | None = None,
        shuffle: bool = False,
        seed: int = 0,
        num_epochs: int | None = None,
    ) -> None:
        super().__init__()
        if group_size < 1 or (num_epochs is not None and num_epochs < 1):
            raise ValueError(
                "DataLoadingPrimer: group_size and num_epochs must be at least 1, got "
                f"{group_size} and {num_epochs}."
            )
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ValueError(
                "DataLoadingPrimer takes a datasets.Dataset or a sequence of dictionaries, got "
                f"{type(dataset).__name__}."
            )
        if len(dataset) == 0:
            raise ValueError("DataLoadingPrimer: the data set has no rows.")
        self.dataset = dataset
        self.columns = tuple(dataset[0])
        self.group_size = group_size
        self.prompt_column = _find_prompt_column(self.columns, prompt_column)
        self.shuffle = shuffle
        self.seed = seed
        self.num_epochs = num_epochs
        self._draws = self._stream()

    def column(self, name: str) -> Iterable[Any]:
        """One column of the data set."""
        if hasattr(self.dataset, "column_names"):
            return self.dataset[name]
        return [row[name] for row in self.dataset]

    def rewind(self) -> None:
        """Start from the first draw again, with the same groups and seeds."""
        self._draws = self._stream()

    def _stream(self) -> Iterator[Draw]:
        group_id = 0
        epoch = 0
        while self.num_epochs is None or epoch < self.num_epochs:
            for index in self._order(epoch):
                row = dict(self.dataset[int(index)])
                group_seed = int(np.random.SeedSequence([self.seed, group_id]).generate_state(1)[0])
                for _ in range(self.group_size):
                    yield Draw(row, group_id, group_seed)
                group_id += 1
            epoch += 1

    def _order(self, epoch: int) -> Iterable[int]:
        if not self.shuffle:
            return range(len(self.dataset))
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.dataset))

    def check(self, env: "EpisodeEnv") -> None:
        """The batch must hold whole groups.

        Raises:
            ValueError: it does not.
        """
        size = env.batch_size.numel()
        if size % self.group_size:
            raise ValueError(
                f"DataLoadingPrimer: a batch of {size} rows does not hold whole "
                f"groups of {self.group_size}. Make the batch size a multiple of group_size."
            )

    def draw_rows(self, batch: TensorDictBase, rows: Sequence[int]) -> None:
        """Write ``query``, ``row``, ``group_id`` and ``seed`` for some rows.

        Raises:
            DataExhaustedError: the data set is finite and used up.
            TypeError: a prompt is neither a string nor a list of messages.
        """
        size = batch.batch_size[0]
        queries: list[Any] = [""] * size
        held = read_row_values(batch, ROW)
        group_id = _held(batch, GROUP_ID, size)
        seed = _held(batch, SEED, size)
        for i in rows:
            draw = next(self._draws, None)
            if draw is None:
                raise DataExhaustedError(
                    f"DataLoadingPrimer: the data set's {len(self.dataset)} rows were drawn "
                    f"{self.num_epochs} times."
                )
            queries[i] = _query(draw.row[self.prompt_column], self.prompt_column)
            held[i], group_id[i], seed[i] = draw.row, draw.group_id, draw.seed
        write_row_values(batch, QUERY, queries)
        write_row_values(batch, ROW, held)
        batch.set(GROUP_ID, group_id)
        batch.set(SEED, seed)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        return _carry(tensordict, tensordict_reset)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return _carry(tensordict, next_tensordict)


def _find_prompt_column(columns: Sequence[str], asked: str | None) -> str:
    candidates = PROMPT_COLUMNS if asked is None else (asked,)
    for column in candidates:
        if column in columns:
            return column
    wanted = " or ".join(map(repr, candidates))
    raise ValueError(
        f"DataLoadingPrimer: the data set has no prompt column {wanted}; its columns are "
        f"{list(columns)}. Name the one that holds the prompt with prompt_column=."
    )


def _query(value: Any, column: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str) or (
        isinstance(value, list) and value and all(isinstance(m, Mapping) for m in value)
    ):
        return value
    raise TypeError(
        f"DataLoadingPrimer: the column {column!r} must hold strings or lists of messages, got "
        f"{type(value).__name__}: {value!r:.80}."
    )


def _held(batch: TensorDictBase, key: str, size: int) -> torch.Tensor:
    value = batch.get(key, None)
    return torch.zeros(size, dtype=torch.int64) if value is None else value.clone()


def _carry(source: TensorDictBase, target: TensorDictBase) -> TensorDictBase:
    for key in CARRIED:
        value = source.get(key, None)
        if value is not None:
            target.set(key, value)
    return target
