"""Rows of a data set become the beginnings of episodes, in groups.

Shape legend: B rows of the environment.
"""

import hashlib
import heapq
import json
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from torchrl_data.checks import check_columns, check_counts, check_not_none
from torchrl_data.conversation import stream_number
from torchrl_data.stop_reason import StopReason
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeTransform, overrides
from torchrl_envs.episode.tool_source import ToolSource

from .difficulty_pools import IDS_PER_EPOCH, DifficultyPools
from .lazy_rows import SKIP, LazyRows
from .loading import load_rows
from .options import DataOptions
from .prepare import BadRow
from .prompt_limit import PromptLimit, length_error, opening_messages
from .row_checks import (
    RowCheck,
    SkippedRow,
    SkippedRows,
    column_error,
    columns_of,
    find_prompt_column,
    prompt_error,
    row_error,
    with_plain_prompt,
)
from .row_stream import Frontier, Item, Place, RowStream
from .tables import TableStream, one_source_of

if TYPE_CHECKING:
    from torchrl_data.templates.encoder import ConversationEncoder
    from torchrl_envs.episode.episode_transform import EpisodeEnvironment


_SAMPLE_ROWS: Final = 16
_SHOWN_ERRORS: Final = 5
_MOST_ENCODED: Final = 256
"""Of the longest prompts, to tell beforehand which are too long."""
_MAX_TOKENS_PER_CHARACTER: Final = 8
"""Bytes of a character, with room for what a chat template adds."""
_log = logging.getLogger(__name__)


class DataExhaustedError(StopIteration):
    """A finite data set has no rows left."""


class DataLoadingPrimer(EpisodeTransform):
    """Starts each episode from a data row; ``group_size`` episodes start from the same draw.

    The rollouts of one draw share ``group_id`` (epoch, and number of the row in the user's data,
    whatever it says) and ``seed`` (of ``seed``, epoch, and place among the rows drawn from), so
    two rows with the same prompt, and one row in two epochs, are different groups. A batch that is
    reset as a whole holds whole groups: where finite data end inside it, the rows left over take
    no part (``stop_reason`` is ``"no_data"``).

    The position is part of ``state_dict()``: a resumed run draws the groups that were under way
    again, then goes on as it would have. A state of other data or settings is refused.

    Args:
        dataset: a ``datasets.Dataset``, ``IterableDataset`` or sequence of dictionaries; a torch
            ``DataLoader`` (its batches are taken apart, its random order follows ``seed``) or any
            iterable that starts anew each time; a function that returns one; a hub id or a path,
            for which :func:`~torchrl_envs.load_rows` has settings.
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
        ValueError: the data have no rows, can be walked through once, lack the prompt's column or
            hold bad rows; a number is out of range; or a setting could not take effect.
        TypeError: ``dataset`` holds no rows.

    Example:
        >>> data = DataLoadingPrimer([{"prompt": "2 + 2?"}, {"prompt": "3 + 3?"}], group_size=2)
        >>> batch = ChatEnv(batch_size=(4,)).append_transform(data).reset()
        >>> batch["history"].prompt.to_chats()[3], batch["group_id"]
        ([{'role': 'user', 'content': '3 + 3?'}], tensor([0, 0, 1, 1]))
    """

    _prompt_bounds: Sequence[int] = ()
    """The longest prompts after which the parts of the environment begin a turn."""
    _told_system = False

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
        self.group_size: int = one_source_of(group_size=group_size, repeats=repeats, default=1)
        check_counts("DataLoadingPrimer", group_size=self.group_size, num_epochs=num_epochs)
        check_not_none("DataLoadingPrimer", num_workers=num_workers, seed=seed)
        check_counts("DataLoadingPrimer", 0, num_workers=num_workers, seed=seed)
        self.options = options or DataOptions()
        dataset = one_source_of(dataset=dataset, dataloader=dataloader)
        self.dataset = load_rows(dataset, skip_bad_rows=self.options.skip_bad_rows)
        self.shuffle = shuffle
        self.seed = seed
        self.num_epochs = num_epochs
        self.skipped = SkippedRows()
        self.left_out: dict[int, str] = {}
        """Why rows are not used that were found bad before anything was drawn, by their number."""
        order: Any = {"shuffle": shuffle, "seed": seed, "num_epochs": num_epochs}
        self._rows = RowStream(
            self.dataset, map_row, self.options, num_workers=num_workers, **order
        )
        self._prompt_limit = prompt_limit
        self.pools: DifficultyPools | None = None
        """What :meth:`admit_by` was given."""
        self._system_prompt: str | None = None
        self._keeps_prompts = False
        self._model_limit: tuple[ConversationEncoder, int] | None = None
        self._num_rows = 1
        self._shown_tools: list[str] = []
        sample = [row for _, row in self._rows.sample(_SAMPLE_ROWS)]
        # Of what lies in memory and of a file of JSON all rows count, of others the sample.
        every = self.dataset if isinstance(self.dataset, list | tuple) else ()
        first = self._rows.sample(max(1, self.options.num_checked_rows))
        declared: Sequence[str] = ()
        if isinstance(self.dataset, LazyRows | TableStream) and not map_row:
            declared = list(self.dataset.columns)
        self.columns = columns_of(first, [*sample, *(() if map_row else every)], declared)
        """Those that a row may have."""
        self.prompt_column = find_prompt_column(self.columns, prompt_column)
        self._checks: dict[str, RowCheck] = {}
        self._common: frozenset[str] | None = None
        buffered = shuffle and self._rows.num_rows is None
        content = hashlib.sha256(getattr(self.dataset, "digest", "").encode())
        for row in (*sample, *every):
            shown = json.dumps(row, default=lambda value: type(value).__name__, skipkeys=True)
            content.update(shown.encode())
        self.content = content.hexdigest()[:16]
        """A digest of the rows; of a stream, or what is no list and no file of JSON, of some."""
        self._settings: dict[str, Any] = {
            "num_rows": self._rows.num_rows,
            "columns": list(self.columns),
            "content": self.content,
            "group_size": self.group_size,
            "prompt_column": self.prompt_column,
            "shuffle": shuffle,
            "shuffle_buffer_size": self.options.shuffle_buffer_size if buffered else None,
            "seed": seed,
            "max_prompt_tokens": prompt_limit and prompt_limit.max_tokens,
        }
        """What a saved position belongs to."""
        self.require("prompt", partial(prompt_error, column=self.prompt_column))
        self._start()

    def _start(self) -> None:
        self._frontier = Frontier()
        # Of the group, each with the group's seed and its own place.
        self._members: deque[tuple[Item, int, int]] = deque()
        """One for each rollout of a group that is still to come."""
        self._last_good_epoch = 0

    # What the data are --------------------------------------------------------------------------

    def require(self, who: str, check: RowCheck, do: str = "") -> None:
        """Check rows: a number of them now, and each one before it is used.

        Args:
            who: whose check it is; a later one of the same name replaces it.
            check: gives what is wrong with a row, or ``""``.
            do: what else may be done than to mend the rows; a sentence after a space.

        Raises:
            ValueError: rows are bad, unless bad rows are to be skipped; the message names some.
        """
        self._checks[who] = check
        sample = list(self._rows.sample(self.options.num_checked_rows))
        if self._common is None:  # what all rows have is looked up once
            readable = [frozenset(row) for _, row in sample if not isinstance(row, BadRow)]
            self._common = frozenset.intersection(*readable) if readable else frozenset()
        errors = ((number, row_error(row, [check])) for number, row in sample)
        if bad := {number: error for number, error in errors if error}:
            first = [f"row {n}: {why.removesuffix('.')}" for n, why in bad.items()][:_SHOWN_ERRORS]
            shown = "; ".join(first) + ("; ..." if len(bad) > _SHOWN_ERRORS else "")
            if self.options.skip_bad_rows:
                self.left_out |= bad
                told = (
                    "%d of %d rows are left out, which can't be used (the first row is row 0): %s"
                )
                _log.warning(told, len(bad), len(sample), shown)
                return
            raise ValueError(
                f"DataLoadingPrimer: {len(bad)} row(s) can't be used: {shown}. (The first row is "
                f"row 0.) Mend the data, or leave such rows out with {SKIP}.{do}"
            )

    def sample_rows(self, count: int | None = None) -> Iterator[dict[str, Any]]:
        """Rows that can be used, spread evenly over the data; nothing is drawn.

        Args:
            count: how many are looked at, at most; as many as are checked when not given.
        """
        most = self.options.num_checked_rows if count is None else count
        for _, row in self._rows.sample(max(1, most)):
            if not isinstance(row, BadRow):
                yield row

    def require_columns(
        self,
        who: str,
        columns: Sequence[str],
        do: str = "",
        *,
        of: Callable[[Mapping[str, Any]], bool] | None = None,
    ) -> None:
        """Check that the data have columns, and that each row has them.

        Args:
            who: needs them, as an error names it.
            columns: their names.
            do: what may be done where some are missing; a sentence after a space.
            of: which rows have to have them; all when not given.

        Raises:
            ValueError: the data lack a column; or rows do, unless bad rows are to be skipped; the
                message names some.
        """
        check_columns(who, self.columns, columns, do)
        name, check = f"columns of {who}", partial(column_error, who, columns, of)
        if (self._common or frozenset()).issuperset(columns):
            self._checks[name] = check
        else:
            self.require(name, check, do)

    def check(self, env: "EpisodeEnvironment") -> None:
        """The batch must hold whole groups, and its prompts tell of the tools that are shown.

        Raises:
            ValueError: it does not; another loader draws, too; the data lack a column that a
                transform requires; or, a ``ToolsNotShownError``, its chat template leaves tools out
                and no prompt names them.
        """
        if (count := len(list(env.transforms_of(DataLoadingPrimer)))) > 1:
            raise ValueError(
                f"DataLoadingPrimer: the environment has {count} of them, and the rows of the last "
                "one would take the place of the others'. Append one: its data may be several sets "
                "in one list, which a column tells apart."
            )
        size = env.batch_size.numel()
        if size % self.group_size:
            raise ValueError(
                f"DataLoadingPrimer: a batch of {size} rows does not hold whole "
                f"groups of {self.group_size}. Make the batch size a multiple of group_size."
            )
        for part in env.transforms_of(EpisodeTransform):
            self.require_columns(part._get_name(), part.required_columns, of=part.takes_part_in_row)
        self._num_rows = size
        self._keeps_prompts = all(
            part.keeps_prompt or not (overrides(part, "begin") or overrides(part, "before_turn"))
            for part in env.transforms_of(EpisodeTransform)
        )
        self._prompt_bounds = [
            part.longest_prompt
            for part in env.transforms_of(EpisodeTransform)
            if part.longest_prompt is not None
        ]
        base: Any = env.base_env
        self._system_prompt = getattr(base, "system_prompt", None)
        if self._system_prompt is not None:
            for number, row in self._rows.sample(_SAMPLE_ROWS):
                self._tell_system_message(number, row)
        sources = [source for source in env.transforms_of(ToolSource) if source.show_schemas]
        self._shown_tools = [name for source in sources for name in source.tool_names()]
        if getattr(base, "tokenizer", None) is not None:
            self._check_tools_shown(base.encoder)

    def check_policy(self, policy: Any) -> None:
        """The policy's prompts tell it of the tools that are shown, and its model takes them.

        Rows whose prompt is as long as the model takes, or longer, are skipped when they are drawn;
        so are those after which a budget leaves no turn. A warning says of how many this is known.

        Raises:
            ToolsNotShownError: its chat template leaves tools out, and no prompt names them.
            ValueError: its model takes no prompt of the data.
        """
        encoder = getattr(policy, "encoder", None)
        if encoder is not None:
            self._check_tools_shown(encoder)
        most = getattr(getattr(policy, "engine", None), "max_model_len", None)
        bounds = [*self._prompt_bounds, *([] if most is None else [most - 1])]
        if encoder is not None and bounds and self._keeps_prompts:
            told = self._model_limit is not None and self._model_limit[1] == min(bounds)
            self._model_limit = encoder, min(bounds)
            if not told:
                self._tell_too_long()

    def _tell_too_long(self) -> None:
        """Say which prompts the model does not take; of many rows the longest are looked at.

        Raises:
            ValueError: it takes none of them.
        """
        shortest: tuple[int, int, Any] | None = None
        longest: list[tuple[int, int, Any]] = []
        for number, row in self._rows.sample(self.options.num_checked_rows):
            if isinstance(row, BadRow) or row_error(row, self._checks.values()):
                continue
            prompt = row[self.prompt_column]
            found = (len(str(prompt)), number, prompt)  # numbers differ, so no prompts are compared
            shortest = found if shortest is None else min(shortest, found)
            change = heapq.heappush if len(longest) < _MOST_ENCODED else heapq.heappushpop
            change(longest, found)
        bad: dict[int, str] = {}
        num_fitting = 0
        for _, number, prompt in sorted(longest, reverse=True):
            if reason := self._length_error(prompt):
                bad[number] = reason
            else:
                num_fitting += 1
                if num_fitting == _SAMPLE_ROWS:
                    break  # what has fewer characters may have more tokens, but hardly ever so many
        if not bad or shortest is None:
            return
        shown = "; ".join(f"row {n}: {bad[n]}" for n in sorted(bad)[:_SHOWN_ERRORS])
        shown += "; ..." if len(bad) > _SHOWN_ERRORS else ""
        is_finite = self._rows.num_rows is not None  # of a stream only the first rows are seen
        if is_finite and not num_fitting and self._length_error(shortest[2]):
            raise ValueError(
                f"DataLoadingPrimer: no prompt is short enough: {shown}. (The first row is row 0.) "
                "Shorten the prompts, or allow more tokens with max_model_len (of a recipe "
                "policy.max_model_len)."
            )
        self.left_out |= bad
        told = "%s%d row(s) are left out, whose prompts are too long (the first row is row 0): %s"
        _log.warning(told, "at least " if len(bad) == _MOST_ENCODED else "", len(bad), shown)

    def _check_tools_shown(self, encoder: "ConversationEncoder") -> None:
        messages: list[dict[str, Any]] = []
        for number, row in self._rows.sample(_SAMPLE_ROWS):
            if not isinstance(row, BadRow) and not self._checks["prompt"](row):
                opening = opening_messages(row[self.prompt_column], self._system_prompt)
                try:
                    encoder.check_prompt(opening, row=number)
                except ValueError as error:
                    if not self.options.skip_bad_rows:
                        raise
                    self.left_out[number] = str(error)
                    self._checks["chat template"] = partial(self._template_error, encoder)
                messages += opening
        encoder.check_tools([{"name": name} for name in self._shown_tools], messages)

    def _template_error(self, encoder: "ConversationEncoder", row: Mapping[str, Any]) -> str:
        """Return why a chat template can't show the prompt of a row, or ``""``."""
        try:
            prompt = opening_messages(row[self.prompt_column], self._system_prompt)
            encoder.check_prompt(prompt)
        except ValueError as error:
            return str(error)
        return ""

    # Drawing ------------------------------------------------------------------------------------

    def rewind(self) -> None:
        """Start from the first draw again, with the same groups and seeds."""
        self._rows.seek(0, 0)
        self._start()

    def _next_good_item(self) -> Item | None:
        for item in self._rows:
            if self._frontier.has_ended((item.epoch, item.place)):
                continue
            kind, reason = self._fault(item)
            if not reason:
                self._last_good_epoch = item.epoch
                self._tell_system_message(item.row_id, item.row)
                return item._replace(row=with_plain_prompt(item.row, self.prompt_column))
            if kind:
                if not self.skipped.counts[kind]:
                    _log.warning("Row %d of the data is skipped: %s", item.row_id, reason)
                self.skipped.rows.append(SkippedRow(item.epoch, item.row_id, reason))
                self.skipped.counts[kind] += 1
            if item.epoch > self._last_good_epoch + 1:
                raise ValueError(
                    "DataLoadingPrimer: a whole pass over the data gave no row that can be used; "
                    f"the last one, row {item.row_id}: {reason}."
                )
        return None

    def admit_by(self, pools: DifficultyPools) -> None:
        """Draw rows by their solve rate; the pools are part of ``state_dict()`` then.

        Args:
            pools: which rows; somebody tells them of finished rollouts.

        Raises:
            RuntimeError: rows were drawn, or there are pools.
        """
        if self._frontier.counts["drawn"] or self.pools is not None:
            raise RuntimeError(
                "DataLoadingPrimer.admit_by comes once, before the first draw, or no resumed run "
                "could go through the same order."
            )
        self.pools, self._settings["pools"] = pools, pools.settings

    def _fault(self, item: Item) -> tuple[str, str]:
        """Reason why a row is not drawn: the kind (``"bad"``, ``"too_long"``) and words."""
        pools = self.pools
        if pools and not pools.admits(item.row_id, epoch=item.epoch, seed=self.seed):
            return "", "the difficulty pools leave it out"
        if error := row_error(item.row, self._checks.values()):
            return "bad", error
        assert isinstance(item.row, dict)
        prompt, reason = item.row[self.prompt_column], ""
        if self._prompt_limit is not None:
            reason = self._prompt_limit.error(prompt, self._system_prompt)
        return "too_long", reason or self._length_error(prompt)

    def _tell_system_message(self, number: int, row: Any) -> None:
        """Warn, once, of a row whose own system message takes the place of the environment's."""
        if self._told_system or self._system_prompt is None or isinstance(row, BadRow):
            return
        prompt = row.get(self.prompt_column)
        first = prompt[0] if isinstance(prompt, Sequence) and prompt else None
        if not isinstance(first, Mapping) or first.get("role") != "system":
            return
        if first.get("content") != self._system_prompt:
            self._told_system = True
            _log.warning(
                "Row %d of the data begins with a system message of its own, %.60r. It takes the "
                "place of the environment's system_prompt, %.60r, and so does that of any other "
                "row. Leave one of the two out, if that is not meant.",
                *(number, first.get("content"), self._system_prompt),
            )

    def _length_error(self, prompt: Any) -> str:
        """That a prompt is too long for the model, or ``""``."""
        if self._model_limit is None:
            return ""
        encoder, most = self._model_limit
        # A token has a byte at least: what is short need not be encoded to know it.
        length = len(str(prompt)) + len(self._system_prompt or "")
        if length <= most // _MAX_TOKENS_PER_CHARACTER:
            return ""
        return length_error(encoder, most, prompt, self._system_prompt)

    def extra_repr(self) -> str:
        """Return how many rows there are, in groups of how many rollouts, and in which order."""
        count = self._rows.num_rows
        rows = "a stream" if count is None else f"{count} rows"
        order = ", shuffle=True" if self._settings["shuffle"] else ""
        return f"{rows}, group_size={self.group_size}{order}"

    def draw(self, episodes: Sequence[Episode]) -> None:
        """Give episodes their ``example``, ``query``, ``group_id``, ``seed`` and ``stream``.

        Those for which there are no data left get a ``stop_reason`` instead, and -1 as their group.

        Raises:
            DataExhaustedError: there are none left for any of them, and no other one is running.
        """
        num_drawn = 0
        for episode in episodes:
            if not self._members and (found := self._next_good_item()) is not None:
                key = (self.seed, found.epoch, found.drawn_id)
                seed = int(np.random.SeedSequence(key).generate_state(1)[0])
                self._members.extend((found, seed, place) for place in range(self.group_size))
                self._frontier.open((found.epoch, found.place), self.group_size)
            if not self._members:
                episode.query, episode.example, episode.stop_reason = "", {}, StopReason.NO_DATA
                episode.group_id, episode.seed = -1, 0
                continue
            num_drawn += 1
            item, episode.seed, member = self._members.popleft()
            episode.stream = stream_number(episode.seed, member)
            place = (item.epoch, item.place)
            episode.resources.add(self, place, closing=self._frontier.begin(place))
            assert isinstance(item.row, dict)
            episode.query, episode.example = item.row[self.prompt_column], item.row
            episode.group_id = item.epoch * IDS_PER_EPOCH + item.row_id
        everything = len(episodes) >= self._num_rows
        if everything and not num_drawn and not self._frontier.num_in_flight:
            raise DataExhaustedError(
                f"DataLoadingPrimer: all rows of the data were drawn {self.num_epochs} times."
            )

    def close(self) -> None:
        """Stop the workers."""
        self._rows.seek(*self._rows.position)

    # Position -----------------------------------------------------------------------------------

    @property
    def ledger(self) -> dict[str, int]:
        """Rollouts ``drawn`` = ``ended`` + ``abandoned`` + ``in_flight``; rows skipped by kind."""
        kinds = {f"skipped_{kind}": self.skipped.counts[kind] for kind in ("bad", "too_long")}
        return {**self._frontier.counts, "in_flight": self._frontier.num_in_flight} | kinds

    def get_extra_state(self) -> dict[str, Any]:
        """The position, of plain Python values; part of ``state_dict()``."""
        state = self._frontier.state(self._rows.position)
        if self.pools is not None:
            state["pools"] = self.pools.state_dict()
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
        return self.get_extra_state() | {"next": list(place), "ended_after": []}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go on from a saved position; what ``load_state_dict()`` calls.

        Raises:
            ValueError: it belongs to other data or settings; the message names what differs.
        """
        saved = state["settings"]
        if other := [
            f"{name} is {value!r:.80} here and {saved.get(name)!r:.80} there"
            for name, value in {"pools": None, **self._settings}.items()
            if value != saved.get(name)
        ]:
            raise ValueError(
                "DataLoadingPrimer: the saved position belongs to other data or settings: "
                f"{'; '.join(other)}. (Where a row was changed, or two changed places, the content "
                "differs.) Go on with what it was made with, or begin anew."
            )
        if self.pools is not None:
            self.pools.load_state_dict(state["pools"])
        self._start()
        self._rows.seek(*self._frontier.load(state))
        self._last_good_epoch = self._rows.position[0]
        dict.update(self.skipped.counts, state["skipped"])  # a Counter's own would add
