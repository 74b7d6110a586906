"""One step of an environment: its episodes are read once, their events run, and written once.

Shape legend: B rows.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from tensordict import TensorDictBase
from torchrl.envs import Transform
from torchrl.envs.transforms import Compose

from torchrl_data.conversation.batched_object import read_objects
from torchrl_data.conversation.conversations import Conversations
from torchrl_data.keys import FINISH_REASON, PROMPT, REWARD
from torchrl_data.layout.conversation_io import (
    active_rows,
    one_dimension,
    read_conversations,
    write_conversations,
)

from .entries import EpisodeEntries, Flags, flags_of, read_episodes, read_flags, write_flags
from .episode import Episode
from .episode_transform import EpisodeTransform, overrides
from .runner import EpisodeRunner, take_over

_WHO: Final = "EpisodeEnv.step"


class EpisodeStep:
    """The episodes of a step that is under way.

    Args:
        runner: runs the events.
        entries: writes what the episodes have become.
        tensordict: what the step started from.
        next_batch: what the base environment made of it.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        entries: EpisodeEntries,
        tensordict: TensorDictBase,
        next_batch: TensorDictBase,
    ) -> None:
        self.ended: list[Episode] = []
        """Episodes that this step ended."""
        self._runner = runner
        self._entries = entries
        self._given = tensordict
        self._episodes = read_episodes(tensordict)
        self._shown = read_conversations(next_batch, PROMPT, who=_WHO)
        self._flags = read_flags(next_batch)
        self._active: list[Episode] = []
        self._turns: list[Episode] = []
        """Those of them that have just taken a turn."""
        self._find_turns()
        if entries.has_tools:
            runner.run(runner.dispatcher.after_turn, self._turns)
        self._write_prompts(next_batch)
        if any(episode.is_done for episode in self._turns):
            self._write_flags(next_batch)

    def _find_turns(self) -> None:
        is_active = active_rows(self._given).tolist()
        held = self._flags if all(is_active) else read_flags(self._given)
        reasons = read_objects(self._given, FINISH_REASON, "")
        for row, episode in enumerate(self._episodes):
            episode.row = row
            episode.share(self._shown, row)
            flags = self._flags if is_active[row] else held
            _, episode.is_terminated, episode.is_truncated = flags[row]
            if not is_active[row]:
                continue
            self._active.append(episode)
            episode.resources = self._runner.resources_of(episode)
            episode.finish_reason = reasons[row]
            if not episode.stop_reason:
                episode.num_turns += 1
                if not episode.is_done:
                    self._turns.append(episode)

    def after_turn(self, transform: EpisodeTransform, next_batch: TensorDictBase) -> None:
        """Run one transform's ``after_turn`` on the episodes that have just taken a turn.

        Args:
            transform: which.
            next_batch: read before and written after, for the transforms of TorchRL's.
        """
        self._read_changes(next_batch)
        self._runner.run(transform.after_turn, transform.concerned(self._turns))
        self._write_prompts(next_batch)
        self._write_flags(next_batch)

    def end(self, next_batch: TensorDictBase) -> TensorDictBase:
        """End episodes, score them, and give back what they hold.

        Args:
            next_batch: what all transforms but those of rewards made of it.
        """
        batch = one_dimension(next_batch)
        self._read_changes(batch)
        for episode in self._turns:
            episode.end_unanswered()
        self._runner.before_turn([episode for episode in self._turns if not episode.is_done])
        self.ended += [episode for episode in self._active if episode.settle()]
        self._runner.finish(self.ended)
        self._write_prompts(batch)
        self._write_flags(batch)
        self._entries.write_results(batch, self.ended)
        self._entries.write_values(batch, self._episodes, given=one_dimension(self._given))
        self._runner.close(self.ended)
        return in_shape(batch, next_batch.batch_size)

    # Between episodes and entries ---------------------------------------------------------------

    def _read_changes(self, batch: TensorDictBase) -> None:
        """What TorchRL's transforms did to the episodes since they were last written."""
        shown = read_conversations(batch, PROMPT, who=_WHO)
        if shown is not self._shown:
            self._shown = shown
            for row, episode in enumerate(self._episodes):
                take_over(episode, shown.row(row))
                episode.share(shown, row)
        flags = read_flags(batch)
        if flags != self._flags:
            self._flags = flags
            for episode in self._active:
                is_done, episode.is_terminated, episode.is_truncated = flags[episode.row]
                episode.is_terminated |= is_done and not episode.is_truncated

    def _write_prompts(self, batch: TensorDictBase) -> None:
        self._shown = written(batch, self._episodes, self._shown)

    def _write_flags(self, batch: TensorDictBase) -> None:
        flags: Flags = flags_of(self._episodes)
        if flags != self._flags:
            self._flags = flags
            write_flags(batch, self._episodes)


def written(
    batch: TensorDictBase, episodes: Sequence[Episode], shown: Conversations
) -> Conversations:
    """Write the conversations of episodes, if one of them has changed.

    Args:
        batch: of B rows.
        episodes: B.
        shown: what the batch shows.

    Returns:
        What it shows now.
    """
    if all(episode.shares(shown) for episode in episodes):
        return shown
    shown = Conversations.cat([episode.conversation for episode in episodes])
    write_conversations(batch, PROMPT, shown)
    for row, episode in enumerate(episodes):
        episode.share(shown, row)
    return shown


class StepOrder(Compose):
    """The transforms of an environment; those that read the reward come once it is there."""

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        """What the base environment gets; TorchRL's own also takes entries one by one."""
        return self._inv_call(tensordict.clone(recurse=False))

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        env: Any = self.container
        step = EpisodeStep(env.runner, env.entries, tensordict, next_tensordict)
        env.step_under_way = step
        late: list[Transform] = []
        try:
            for transform in self.transforms:
                if REWARD in (transform.in_keys or ()):  # type: ignore[operator]
                    late.append(transform)  # type: ignore[arg-type]
                elif not _is_idle(transform):
                    next_tensordict = transform._step(tensordict, next_tensordict)  # type: ignore[operator]
            next_tensordict = step.end(next_tensordict)
        finally:
            env.step_under_way = None
        env.record_ends(step.ended)
        for transform in late:
            next_tensordict = transform._step(tensordict, next_tensordict)
        return next_tensordict


def _is_idle(transform: Any) -> bool:
    """Whether a transform has nothing to do between the turn and the end of a step."""
    return (
        isinstance(transform, EpisodeTransform)
        and type(transform)._step is EpisodeTransform._step
        and not overrides(transform, "after_turn")
    )


def flat_transforms(transform: Transform) -> list[Transform]:
    """A transform by itself, or those of a plain ``Compose``."""
    parts: list[Any] = list(transform) if type(transform) is Compose else [transform]  # type: ignore[arg-type]
    for part in parts:
        part.reset_parent()
    return parts


def in_shape(batch: TensorDictBase, shape: torch.Size) -> TensorDictBase:
    """A batch of a shape; itself if it has that already."""
    return batch if batch.batch_size == shape else batch.reshape(shape)
