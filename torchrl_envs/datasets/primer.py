"""Rows of a data set become the beginnings of episodes, in groups.

Shape legend: B rows of the environment.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from torchrl_data.stop_reasons import NO_DATA
from torchrl_data.validation import check_counts, check_not_none
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeTransform
from torchrl_envs.episode.tool_source import ToolSource

from .checks import (
    PromptLimit,
    RowCheck,
    SkippedRow,
    SkippedRows,
    check_same,
    columns_of,
    digest,
    find_prompt_column,
    opening_messages,
    prompt_error,
    refuse_bad_rows,
    row_error,
    sample_rows,
    with_plain_prompt,
)
from .difficulty import IDS_PER_EPOCH, DifficultyPools
from .loading import load_rows, one_of
from .options import DataOptions
from .prepare import BadRow, PrepareRow
from .sources import Frontier, Item, Place, RowStream, open_source

if TYPE_CHECKING:
    from torchrl_data.templates.encoder import ConversationEncoder
    from torchrl_envs.episode.episode_transform import EpisodeEnvironment

_SAMPLE_ROWS: Final = 16
_log = logging.getLogger(__name__)


class DataExhaustedError(StopIteration):
    """A finite data set has no rows left."""


class Draw(NamedTuple):
    """One rollout's share of a data row."""

    row: dict[str, Any]
    group_id: int
    seed: int
    place: Place


class DataLoadingPrimer(EpisodeTransform):
    """Starts each episode from a data row; ``group_size`` episodes start from the same draw.

    The rollouts of one draw share ``group_id`` (epoch and number of the row, whatever it says) and
    ``seed`` (of ``seed``, epoch and number), so two rows with the same prompt, and one row in two
    epochs, are different groups. A batch that is reset as a whole holds whole groups: where finite
    data end inside it, the rows left over take no part (``stop_reason`` is ``"no_data"``).

    The position is part of ``state_dict()``, the environment's too: a resumed run draws again the
    groups that were under way, then goes on as it would have, with any number of workers. A state
    of other data or settings is refused.

    Args:
        dataset: a ``datasets.Dataset`` or any sequence of dictionaries; a
            ``datasets.IterableDataset``, a torch ``DataLoader`` (its batches are taken apart, its
            random order follows ``seed``) or any iterable that starts anew each time; a function
            that returns an iterable; a hub id or a path, for which :func:`~torchrl_envs.load_rows`
            has settings.
        dataloader: TorchRL's name of the same.
        group_size: rollouts of one draw.
        repeats: TorchRL's name of the same.
        prompt_column: the column that holds the prompt, a string or a list of messages; the first
            of ``prompt``, ``query``, ``question``, ``messages``, ``text`` when not given.
        map_row: makes a row out of a row, in a worker if there are workers.
        shuffle: whether to draw in random order, another one each epoch.
        seed: of the order and of the groups' seeds.
        num_epochs: stop after this many passes; ``None`` goes on for ever.
        num_workers: processes that load and map rows ahead; 0 does it here.
        prompt_limit: skip rows whose prompt is longer.
        options: how rows are read and checked.

    Raises:
        ValueError: the data have no rows, can be walked through only once, lack the prompt's
            column or hold bad rows; a number is out of range; or a setting could not take effect.
        TypeError: ``dataset`` holds no rows.
    """

    def __init__(
        self,
        dataset: Any = None,
        *,
        dataloader: Any = None,
        group_size: int | None = None,
        repeats: int | None = None,
        prompt_column: str | None = None,
        map_row: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        num_epochs: int | None = None,
        num_workers: int = 0,
        prompt_limit: PromptLimit | None = None,
        options: DataOptions | None = None,
    ) -> None:
        super().__init__()
        self.group_size: int = one_of(group_size=group_size, repeats=repeats, default=1)
        check_counts("DataLoadingPrimer", group_size=self.group_size, num_epochs=num_epochs)
        check_not_none("DataLoadingPrimer", num_workers=num_workers, seed=seed)
        check_counts("DataLoadingPrimer", 0, num_workers=num_workers, seed=seed)
        self.options = options or DataOptions()
        self.dataset = load_rows(one_of(dataset=dataset, dataloader=dataloader))
        self.shuffle = shuffle
        self.seed = seed
        self.num_epochs = num_epochs
        self.skipped = SkippedRows()
        self._source = open_source(
            self.dataset, shuffle=shuffle, buffer_size=self.options.shuffle_buffer_size, seed=seed
        )
        self._prepare = PrepareRow(self._source.rows, map_row)
        self._rows = RowStream(
            self._source,
            self._prepare,
            num_epochs=num_epochs,
            num_workers=num_workers,
            worker_timeout_s=self.options.worker_timeout_s,
        )
        self._prompt_limit = prompt_limit
        self._pools: DifficultyPools | None = None
        self._system_prompt: str | None = None
        self._num_rows = 1
        self._shown_tools: list[str] = []
        self.columns = columns_of(self._source, self._prepare, self.options.num_checked_rows)
        self.prompt_column = find_prompt_column(self.columns, prompt_column)
        self._checks: dict[str, RowCheck] = {}
        self._settings = self._describe()
        self.require("prompt", partial(prompt_error, column=self.prompt_column))
        self._start()

    def _start(self) -> None:
        self._frontier = Frontier()
        self._members: deque[Draw] = deque()
        self._last_good_epoch = 0

    # What the data are --------------------------------------------------------------------------

    def _describe(self) -> dict[str, Any]:
        """What a saved position belongs to."""
        is_stream = self._source.num_rows is None
        buffer_size = self.options.shuffle_buffer_size
        sample = sample_rows(self._source, self._prepare, _SAMPLE_ROWS)
        return {
            "num_rows": self._source.num_rows,
            "columns": list(self.columns),
            "content": digest([row for _, row in sample]),
            "group_size": self.group_size,
            "prompt_column": self.prompt_column,
            "shuffle": self.shuffle,
            "shuffle_buffer_size": buffer_size if is_stream and self.shuffle else None,
            "seed": self.seed,
            "max_prompt_tokens": self._prompt_limit and self._prompt_limit.max_tokens,
        }

    def require(self, who: str, check: RowCheck) -> None:
        """Check rows: a number of them now, and each one before it is used.

        Args:
            who: whose check it is; a later one of the same name replaces it.
            check: gives what is wrong with a row, or ``""``.

        Raises:
            ValueError: rows are bad, unless bad rows are to be skipped; the message names some.
        """
        self._checks[who] = check
        if not self.options.skip_bad_rows:
            count = self.options.num_checked_rows
            refuse_bad_rows(sample_rows(self._source, self._prepare, count), check)

    def check(self, env: "EpisodeEnvironment") -> None:
        """The batch must hold whole groups, and its prompts tell of the tools that are shown.

        Raises:
            ValueError: it does not; a ``ToolsNotShownError`` if its chat template leaves tools out
                and no prompt names them.
        """
        size = env.batch_size.numel()
        if size % self.group_size:
            raise ValueError(
                f"DataLoadingPrimer: a batch of {size} rows does not hold whole "
                f"groups of {self.group_size}. Make the batch size a multiple of group_size."
            )
        self._num_rows = size
        base: Any = env.base_env
        self._system_prompt = getattr(base, "system_prompt", None)
        sources = [source for source in env.transforms_of(ToolSource) if source.show_schemas]
        self._shown_tools = [name for source in sources for name in source.tool_names()]
        if getattr(base, "tokenizer", None) is not None:
            self._check_tools_shown(base.encoder)

    def check_policy(self, policy: Any) -> None:
        """The policy's prompts tell it of the tools that are shown.

        Raises:
            ToolsNotShownError: its chat template leaves tools out, and no prompt names them.
        """
        encoder = getattr(policy, "encoder", None)
        if encoder is not None:
            self._check_tools_shown(encoder)

    def _check_tools_shown(self, encoder: "ConversationEncoder") -> None:
        messages: list[dict[str, Any]] = []
        for number, row in sample_rows(self._source, self._prepare, _SAMPLE_ROWS):
            if not isinstance(row, BadRow) and not self._checks["prompt"](row):
                opening = opening_messages(row[self.prompt_column], self._system_prompt)
                encoder.check_prompt(opening, row=number)
                messages += opening
        encoder.check_tools([{"name": name} for name in self._shown_tools], messages)

    # Drawing ------------------------------------------------------------------------------------

    def rewind(self) -> None:
        """Start from the first draw again, with the same groups and seeds."""
        self._rows.seek(0, 0)
        self._start()

    def _next(self) -> Draw | None:
        if not self._members:
            item = self._next_good_item()
            if item is None:
                return None
            key = (self.seed, item.epoch, item.row_id)
            seed = int(np.random.SeedSequence(key).generate_state(1)[0])
            group_id = item.epoch * IDS_PER_EPOCH + item.row_id
            place = (item.epoch, item.place)
            assert isinstance(item.row, dict)
            self._members.extend([Draw(item.row, group_id, seed, place)] * self.group_size)
            self._frontier.open(place, self.group_size)
        return self._members.popleft()

    def _next_good_item(self) -> Item | None:
        for item in self._rows:
            if self._frontier.has_ended((item.epoch, item.place)):
                continue
            if not self._admits(item):
                self._check_progress(item, "the difficulty pools leave it out")
                continue
            kind, reason = self._fault(item)
            if not reason:
                self._last_good_epoch = item.epoch
                return item._replace(row=with_plain_prompt(item.row, self.prompt_column))
            if not self.skipped.counts[kind]:
                _log.warning("Row %d of the data is skipped: %s", item.row_id, reason)
            self.skipped.add(SkippedRow(item.epoch, item.row_id, reason), kind)
            self._check_progress(item, reason)
        return None

    def _check_progress(self, item: Item, reason: str) -> None:
        if item.epoch > self._last_good_epoch + 1:
            raise ValueError(
                "DataLoadingPrimer: a whole pass over the data gave no row that can be used; "
                f"the last one, row {item.row_id}: {reason}."
            )

    def admit_by(self, pools: DifficultyPools) -> None:
        """Draw rows by their solve rate; the pools are part of ``state_dict()`` then.

        Args:
            pools: which rows; somebody tells them of finished rollouts.

        Raises:
            RuntimeError: rows were drawn, or there are pools.
        """
        if self._frontier.counts["drawn"] or self._pools is not None:
            raise RuntimeError(
                "DataLoadingPrimer.admit_by comes once, before the first draw, or no resumed run "
                "could go through the same order."
            )
        self._pools, self._settings["pools"] = pools, pools.settings

    @property
    def pools(self) -> DifficultyPools | None:
        """What :meth:`admit_by` was given."""
        return self._pools

    def _admits(self, item: Item) -> bool:
        pools = self._pools
        return pools is None or pools.admits(item.row_id, epoch=item.epoch, seed=self.seed)

    def _fault(self, item: Item) -> tuple[str, str]:
        """What is wrong with a row: the kind (``"bad"``, ``"too_long"``), and in words."""
        error = row_error(item.row, list(self._checks.values()))
        if error:
            return "bad", error
        if self._prompt_limit is None:
            return "", ""
        assert isinstance(item.row, dict)
        prompt = item.row[self.prompt_column]
        return "too_long", self._prompt_limit.error(prompt, self._system_prompt)

    def draw(self, episodes: Sequence[Episode]) -> None:
        """Give episodes their ``example``, ``query``, ``group_id`` and ``seed``.

        Those for which there are no data left get a ``stop_reason`` instead, and -1 as their group.

        Raises:
            DataExhaustedError: there are none left for any of them, and no other one is running.
        """
        num_drawn = 0
        for episode in episodes:
            draw = self._next()
            if draw is None:
                episode.query, episode.example, episode.stop_reason = "", {}, NO_DATA
                episode.group_id, episode.seed = -1, 0
                continue
            num_drawn += 1
            self._frontier.draw()
            self._hold(episode, draw.place)
            episode.query, episode.example = draw.row[self.prompt_column], draw.row
            episode.group_id, episode.seed = draw.group_id, draw.seed
        everything = len(episodes) >= self._num_rows
        if everything and not num_drawn and not self._frontier.num_in_flight:
            raise DataExhaustedError(
                f"DataLoadingPrimer: all rows of the data were drawn {self.num_epochs} times."
            )

    def _hold(self, episode: Episode, place: Place) -> None:
        """Note how the rollout of a draw ends, when it is over."""
        frontier = self._frontier  # that of now: after a restart nobody waits for it any more

        def close(reason: str) -> None:
            frontier.close(place, "ended" if reason else "abandoned")

        episode.resources.add(self, place, closing=close)

    def close(self) -> None:
        """Stop the workers."""
        self._rows.close()

    # Position -----------------------------------------------------------------------------------

    @property
    def ledger(self) -> dict[str, int]:
        """Rollouts ``drawn`` = ``ended`` + ``abandoned`` + ``in_flight``; rows skipped by kind."""
        kinds = {f"skipped_{kind}": self.skipped.counts[kind] for kind in ("bad", "too_long")}
        return {**self._frontier.counts, "in_flight": self._frontier.num_in_flight} | kinds

    def get_extra_state(self) -> dict[str, Any]:
        """The position, of plain Python values; part of ``state_dict()``."""
        state = self._frontier.state(self._rows.position)
        if self._pools is not None:
            state["pools"] = self._pools.state_dict()
        return {**state, "settings": self._settings, "skipped": dict(self.skipped.counts)}

    @property
    def place(self) -> Place:
        """Epoch and place, in its order, of the row that is read next."""
        return self._rows.position

    def state_from(self, place: Place) -> dict[str, Any]:
        """A position like that of :meth:`get_extra_state`, from which on everything is drawn again.

        Args:
            place: what :attr:`place` was before a group was drawn.
        """
        counts = dict(self._frontier.counts)
        counts["drawn"] = counts["ended"] + counts["abandoned"]
        position = {"next": list(place), "ended_after": [], "counts": counts}
        return {**self.get_extra_state(), **position}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved position; what ``load_state_dict()`` calls.

        Raises:
            ValueError: it belongs to other data or settings; the message names what differs.
        """
        check_same({"pools": None, **self._settings}, state["settings"])
        if self._pools is not None:
            self._pools.load_state_dict(state["pools"])
        self._start()
        self._rows.seek(*self._frontier.load(state))
        self._last_good_epoch = self._rows.position[0]
        self.skipped.counts.update(
            {k: v - self.skipped.counts[k] for k, v in state["skipped"].items()}
        )
