"""A chat environment with transforms, and the order of events in its episodes.

Shape legend: B rows.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Self, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase, Transform, TransformedEnv
from torchrl.envs.transforms import Compose

from torchrl_data.conversation.object_entries import read_objects, write_objects
from torchrl_data.keys import (
    DONE,
    FINISH_REASON,
    MAX_NEW_TOKENS,
    NO_LIMIT,
    PROMPT,
    STOP_REASON,
    TERMINATED,
    TRUNCATED,
)
from torchrl_data.layout.conversation_io import active_rows, one_dimension, read_conversations
from torchrl_data.stop_reasons import (
    ANSWERED,
    CUT_REASONS,
    ERROR,
    MAX_STEPS,
    RESPONSE_LENGTH,
    UNSCORABLE_REASONS,
    kind_of,
)
from torchrl_data.tool_calls.parse import parse_tool_calls
from torchrl_envs.concurrency.calls import ConcurrentCalls
from torchrl_envs.concurrency.cleanup import run_all
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.entries.rewards import (
    REWARD_ERRORS,
    REWARD_KEYS,
    RewardSource,
    RowReward,
    close_rewards,
    record_rewards,
)

from .episode_transform import EpisodeTransform
from .error_limit import RewardErrorLimit
from .export import EpisodeEntries
from .tool_dispatcher import ToolDispatcher
from .tool_source import ToolSource, check_tool_names

T = TypeVar("T", bound=Transform)


class EpisodeEnv(TransformedEnv):
    """Runs the episodes of a :class:`~torchrl_envs.ChatEnv` and its transforms.

    A row is done when the policy's turn is left without an answer (no tool result, no message of
    anybody else), when a transform such as ``StepCounter`` truncates it, or when it could not be
    generated. Then it is scored, whatever the order in which the transforms were appended, and what
    it held is given back. ``stop_reason`` says why it ended. A row that could not begin gets no
    turn: its first step ends it, truncated and unscorable.

    Args:
        env: the base environment.
        transform: one transform, or a ``Compose`` of several.
    """

    def __init__(self, env: EnvBase, transform: Transform) -> None:
        dispatcher = ToolDispatcher(getattr(env, "parse_turn", parse_tool_calls))
        parts = list(transform) if type(transform) is Compose else [transform]
        for part in parts:
            part.reset_parent()
        entries = EpisodeEntries()
        super().__init__(env, Compose(dispatcher, entries, *parts))  # type: ignore[arg-type]
        self._calls = ConcurrentCalls()
        self._checked = False
        self._error_limit = RewardErrorLimit()
        self._dispatcher = dispatcher
        self._entries = entries
        self._find_parts()

    @property
    def calls(self) -> ConcurrentCalls:
        """Runs the calls of tools, environments and rewards."""
        return self._calls

    def append_transform(self, transform: Transform) -> Self:  # type: ignore[override]
        """Add a transform.

        Raises:
            ValueError: it offers a tool whose name another source's has.
        """
        super().append_transform(transform)
        self._find_parts()
        self._checked = False
        return self

    def _find_parts(self) -> None:
        """Tell the transforms of our own what the others are."""
        self._dispatcher.sources = list(self.transforms_of(ToolSource))
        check_tool_names(self._dispatcher.sources)
        transforms = list(self.episode_transforms())
        self._entries.sources = [part for part in transforms if isinstance(part, RewardSource)]
        self._entries.dense = any(part.by_token for part in transforms)
        self._entries.loads_data = any(True for _ in self.transforms_of(DataLoadingPrimer))
        self.empty_cache()

    def episode_transforms(self) -> Iterator[EpisodeTransform]:
        """The transforms that take part in episodes, in order."""
        return self.transforms_of(EpisodeTransform)

    @property
    def reward_entries(self) -> list[str]:
        """What transforms declare in the reward spec beside the rewards, as TorchRL's do."""
        declared = map(str, self.full_reward_spec.keys())
        return [name for name in declared if name not in REWARD_KEYS]

    def transforms_of(self, kind: type[T]) -> Iterator[T]:
        """The transforms of a class, in order, inside nested ``Compose`` too."""
        pending: list[Transform] = [self.transform]
        while pending:
            transform = pending.pop(0)
            if isinstance(transform, Compose):
                pending = [*transform.transforms, *pending]  # type: ignore[list-item]
            elif isinstance(transform, kind):
                yield transform

    def check(self) -> None:
        """Check that the composition can work: data, tools and a reward fit together.

        Called before the first reset; call it earlier to fail earlier.

        Raises:
            ValueError: something is missing or does not fit; the message names it.
        """
        for transform in self.episode_transforms():
            transform.check(self)
        self._checked = True
        # Checking gives sources of rewards their final names.
        self.empty_cache()

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        if not self._checked:
            self.check()
        size = self.batch_size.numel()
        batch = one_dimension(
            TensorDict({}, batch_size=self.batch_size) if tensordict is None else tensordict.copy()
        )
        mask = batch.get("_reset", None)
        rows = list(range(size)) if mask is None else mask.view(-1).nonzero().squeeze(-1).tolist()
        reasons = read_objects(batch, STOP_REASON, "")
        for row in rows:
            reasons[row] = ""
        write_objects(batch, STOP_REASON, reasons)
        self.release_episodes(rows)
        try:
            reset = one_dimension(self._begin(batch, rows, **kwargs))
            reasons = read_objects(batch, STOP_REASON)
            write_objects(reset, STOP_REASON, reasons)
            self._limit_turns(batch, reset, [row for row in rows if not reasons[row]])
        except BaseException:
            self.release_episodes(rows)
            raise
        reasons = read_objects(reset, STOP_REASON)
        _no_turn(reset, [row for row in rows if reasons[row]])
        return _in_shape(reset, self.batch_size)

    def _begin(self, batch: TensorDictBase, rows: Sequence[int], **kwargs: Any) -> TensorDictBase:
        for transform in self.episode_transforms():
            transform.draw_rows(batch, rows)
        for transform in self.episode_transforms():
            reasons = read_objects(batch, STOP_REASON)
            transform.begin_episodes(batch, [row for row in rows if not reasons[row]])
        self._dispatcher.show_tools(batch, rows)
        batch = _in_shape(batch, self.batch_size)
        reset = self.base_env._reset(batch, **kwargs)
        self.base_env._complete_done(self.base_env.full_done_spec, reset)
        return self.transform._reset(batch, reset)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        next_batch = one_dimension(super()._step(tensordict))
        self._end_step(one_dimension(tensordict), next_batch)
        return _in_shape(next_batch, self.batch_size)

    def _end_step(self, tensordict: TensorDictBase, next_batch: TensorDictBase) -> None:
        """End episodes, score them, and give back what they hold."""
        active = active_rows(tensordict)
        if not bool(active.all()):
            _keep_flags(tensordict, next_batch, ~active)
        began = [not reason for reason in read_objects(tensordict, STOP_REASON, "")]
        self._end_unanswered(next_batch, active)
        part = active & torch.tensor(began)
        self._limit_turns(tensordict, next_batch, part.nonzero().squeeze(-1).tolist())
        over = [bool(reason) for reason in read_objects(next_batch, STOP_REASON, "")]
        over = torch.tensor(over) & ~next_batch.get(DONE).view(-1)
        _truncate(next_batch, active & (over | ~torch.tensor(began)))
        finished = next_batch.get(DONE).view(-1) & active
        rows = finished.nonzero().squeeze(-1).tolist()
        self._write_stop_reasons(tensordict, next_batch, rows)
        if rows:
            reasons = read_objects(next_batch, STOP_REASON)
            scored = [r for r in rows if began[r] and kind_of(reasons[r]) not in UNSCORABLE_REASONS]
            self._score(tensordict, next_batch, scored)
            self._mark_unscorable(next_batch, [row for row in rows if row not in scored])
            for transform in self.episode_transforms():
                transform.record_ends(rows)
            self.release_episodes(rows)
            limit = next(self.transforms_of(RewardErrorLimit), self._error_limit)
            limit.record(next_batch, rows)

    def _limit_turns(
        self, batch: TensorDictBase, next_batch: TensorDictBase, rows: Sequence[int]
    ) -> None:
        next_batch.set(MAX_NEW_TOKENS, torch.full(next_batch.batch_size, NO_LIMIT))
        for transform in self.episode_transforms():
            transform.limit_turns(batch, next_batch, rows)

    def _score(
        self, batch: TensorDictBase, next_batch: TensorDictBase, rows: Sequence[int]
    ) -> None:
        if rows:
            for transform in self.episode_transforms():
                transform.finish_episodes(batch, next_batch, rows)
            final = read_conversations(next_batch, PROMPT, who="EpisodeEnv.step")
            close_rewards(next_batch, rows, final)

    def _mark_unscorable(self, next_batch: TensorDictBase, rows: Sequence[int]) -> None:
        """Rows that failed, or never began, have no reward: their error says why."""
        if not rows:
            return
        for source in self.episode_transforms():
            for name in source.reward_names if isinstance(source, RewardSource) else ():
                record_rewards(next_batch, name, rows, [RowReward()] * len(rows))
        reasons = read_objects(next_batch, STOP_REASON)
        errors = read_objects(next_batch, REWARD_ERRORS, "")
        for row in rows:
            errors[row] = reasons[row] if kind_of(reasons[row]) in UNSCORABLE_REASONS else ""
        write_objects(next_batch, REWARD_ERRORS, errors)

    def release_episodes(self, rows: Sequence[int] | None = None) -> None:
        """Give back what some rows hold, or all; their episodes are over, finished or not."""
        rows = range(self.batch_size.numel()) if rows is None else rows
        run_all(
            functools.partial(transform.release_episodes, rows)
            for transform in self.episode_transforms()
        )

    def _end_unanswered(self, next_batch: TensorDictBase, active: torch.Tensor) -> None:
        """A conversation goes on only if somebody spoke after the policy."""
        prompt = read_conversations(next_batch, PROMPT, who="EpisodeEnv.step")
        silent = torch.tensor(
            [prompt.last_message(i).get("role") == "assistant" for i in range(len(prompt))]
        )
        ended = (silent & active).view(-1, 1) & ~next_batch.get(DONE)
        if bool(ended.any()):
            next_batch.set(TERMINATED, next_batch.get(TERMINATED) | ended)
            next_batch.set(DONE, next_batch.get(DONE) | ended)

    def _write_stop_reasons(
        self, batch: TensorDictBase, next_batch: TensorDictBase, rows: Sequence[int]
    ) -> None:
        reasons = read_objects(batch, STOP_REASON, "")
        held = read_objects(next_batch, STOP_REASON, "")
        finish = read_objects(batch, FINISH_REASON, "")
        truncated = next_batch.get(TRUNCATED).view(-1).tolist()
        for row in rows:
            reasons[row] = reasons[row] or held[row] or _stop_reason(finish[row], truncated[row])
        # A turn cut at its budget did not end by itself.
        _truncate(next_batch, torch.tensor([reason in CUT_REASONS for reason in reasons]))
        write_objects(next_batch, STOP_REASON, reasons)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Give back what all rows hold, and close; an error on the way stops none of it."""
        self.is_closed = True
        run_all(
            [
                self.release_episodes,
                functools.partial(self.base_env.close, raise_if_closed=raise_if_closed),
                *[transform.close for transform in self.transforms_of(Transform)],
                self._calls.close,
            ]
        )


def _keep_flags(batch: TensorDictBase, next_batch: TensorDictBase, rows: torch.Tensor) -> None:
    """Rows that took no part in the step are as done as they were."""
    for key in (DONE, TERMINATED, TRUNCATED):
        held = batch.get(key, None)
        if held is not None:
            next_batch.set(key, torch.where(rows.view(-1, 1), held, next_batch.get(key)))


def _truncate(batch: TensorDictBase, rows: torch.Tensor) -> None:
    """Some rows are done without having ended by themselves."""
    if bool(rows.any()):
        rows = rows.view(-1, 1)
        batch.set(TRUNCATED, batch.get(TRUNCATED) | rows)
        batch.set(DONE, batch.get(DONE) | rows)
        batch.set(TERMINATED, batch.get(TERMINATED) & ~rows)


def _stop_reason(finish_reason: str, truncated: bool) -> str:
    if kind_of(finish_reason) == ERROR:
        return finish_reason
    if truncated:
        return MAX_STEPS
    return RESPONSE_LENGTH if finish_reason == "length" else ANSWERED


def _no_turn(batch: TensorDictBase, rows: Sequence[int]) -> None:
    """The policy says nothing in some rows, which end at the next step."""
    if rows:
        budget = batch.get(MAX_NEW_TOKENS).clone()
        budget[list(rows)] = 0
        batch.set(MAX_NEW_TOKENS, budget)


def _in_shape(batch: TensorDictBase, shape: torch.Size) -> TensorDictBase:
    return batch if batch.batch_size == shape else batch.reshape(shape)
