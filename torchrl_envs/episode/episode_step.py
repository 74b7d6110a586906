"""A step of an environment: its episodes are read once, their events run, and written once.

Shape legend: B rows.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import StepCounter, Transform
from torchrl.envs.transforms import Compose

from torchrl_data import keys, page
from torchrl_data.batched_object import read_objects
from torchrl_data.conversation import Conversations, continues
from torchrl_data.conversation_io import (
    active_rows,
    one_dimension,
    read_conversations,
    write_conversations,
)
from torchrl_data.foreign_conversations import edited

from .episode import Episode, all_share, share_all
from .episode_entries import (
    FLAGS,
    WHO,
    EpisodeEntries,
    flags_of,
    read_episodes,
    read_flags,
    write_flags,
)
from .episode_transform import EpisodeTransform, overrides

_THEIRS: Final = ("torchrl.envs.llm", "torchrl.objectives.llm", "torchrl.data.llm")
_KNOWN: Final = ("torchrl.envs.transforms.", "torchrl_envs.")


class EpisodeStep:
    """The episodes of a step that is under way.

    Args:
        env: runs the events, and writes what the episodes have become.
        tensordict: what the step started from.
        next_batch: what the base environment made of it.
    """

    def __init__(self, env: Any, tensordict: TensorDictBase, next_batch: TensorDictBase) -> None:
        self.ended: list[Episode] = []
        """Episodes that this step ended."""
        self._runner = runner = env.runner
        self._entries: EpisodeEntries = env.entries
        self._given = tensordict
        self._episodes = read_episodes(tensordict)
        self._shown = read_conversations(next_batch, keys.PROMPT, who=WHO)
        self._flags = read_flags(next_batch)
        self._active: list[Episode] = []
        is_active = active_rows(tensordict).tolist()
        held = self._flags if all(is_active) else read_flags(tensordict)
        reasons = read_objects(tensordict, keys.FINISH_REASON, "")
        share_all(self._episodes, self._shown)
        for row, episode in enumerate(self._episodes):
            episode.row = row
            flags = self._flags if is_active[row] else held
            _, episode.is_terminated, episode.is_truncated = flags[row]
            if is_active[row]:
                self._active.append(episode)
        self._turns = runner.take_up(self._active, reasons)
        """Those of them that have just taken a turn."""

    def answer(self, parts: Sequence[EpisodeTransform]) -> None:
        """Answer the turns that have just been taken.

        Args:
            parts: those that answer, in order.
        """
        self._runner.run(functools.partial(self._runner.answer, parts=parts), self._turns)

    def edit(self, transform: Transform, batch: TensorDictBase, *, any_entry: bool) -> Any:
        """Let a transform of TorchRL's see the episodes as they stand, and change them.

        Args:
            transform: which.
            batch: of the rows as they are after the step.
            any_entry: whether it may put messages, text or ids in the place of conversations.

        Returns:
            The batch as the transform leaves it.
        """
        run = functools.partial(transform._step, self._given)
        self._write(batch)
        batch = edited(batch, run, who=WHO) if any_entry else run(batch)
        self._read_changes(batch)
        return batch

    def count(self, counter: StepCounter, next_batch: TensorDictBase) -> TensorDictBase:
        """Let a ``StepCounter`` count, after all others have answered.

        Whether an episode that has no turn left ended by itself is decided at the end of the step,
        so the flags stay as they were. Of one that takes no part in the step nothing is counted.

        Args:
            counter: which.
            next_batch: what it counts in.
        """
        held = {key: next_batch.get(key) for key in FLAGS}
        counted = counter._step(self._given, next_batch)
        over = [is_over for _, _, is_over in read_flags(counted)]
        for episode in self._active:
            if over[episode.row] and not episode.is_done:
                episode.limit_turns(episode.num_turns)
        if len(self._active) < len(self._episodes):
            key, waits = counter.step_count_key, torch.ones(len(self._episodes), dtype=torch.bool)
            waits[[episode.row for episode in self._active]] = False
            counts = counted.get(key).clone()
            before = self._given.get(key).expand_as(counts)
            counts.view(len(waits), -1)[waits] = before.reshape(len(waits), -1)[waits]
            held[key] = counts
        return counted.update(held)

    def end(self, next_batch: TensorDictBase) -> TensorDictBase:
        """End episodes, score them, and give back what they hold.

        Args:
            next_batch: what all transforms but those of rewards made of it.
        """
        batch = one_dimension(next_batch)
        for episode in self._turns:
            episode.end_turn()
        self._runner.run(self._runner.before_turn, self._turns)
        self.ended += [episode for episode in self._active if episode.settle()]
        if self.ended:
            self._runner.finish(self.ended)
        self._write(batch)
        self._entries.write_results(batch, self.ended)
        self._entries.write_values(batch, self._episodes, given=one_dimension(self._given))
        if self.ended:
            self._runner.close(self.ended)
        return in_shape(batch, next_batch.batch_size)

    # Between episodes and entries ---------------------------------------------------------------

    def _read_changes(self, batch: TensorDictBase) -> None:
        """Take over what TorchRL's transforms did to the episodes since they were last written."""
        shown = read_conversations(batch, keys.PROMPT, who=WHO)
        if shown is not self._shown:
            self._shown = shown
            for row, episode in enumerate(self._episodes):
                # One that rewrites the past is a new row.
                if continues(shown.row(row), episode.conversation):
                    episode.share(shown, row)
                else:
                    episode.replace_conversation(shown.row(row))
        flags = read_flags(batch)
        if flags != self._flags:
            self._flags = flags
            for episode in self._active:
                is_done, episode.is_terminated, episode.is_truncated = flags[episode.row]
                episode.is_terminated |= is_done and not episode.is_truncated

    def _write(self, batch: TensorDictBase) -> None:
        """Write the conversations and the flags, if they have changed."""
        self._shown = written_batch(batch, self._episodes, self._shown)
        now = flags_of(self._episodes)
        if now != self._flags:
            self._flags = now
            write_flags(batch, self._episodes)


def written_batch(
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
    if all_share(episodes, shown):
        return shown
    shown = Conversations.cat([episode.conversation for episode in episodes])
    write_conversations(batch, keys.PROMPT, shown)
    share_all(episodes, shown)
    return shown


class StepOrder(Compose):
    """The transforms of an environment; those that read the reward come once it is there."""

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return what the base environment gets; TorchRL's own also takes entries one by one."""
        return self._inv_call(tensordict.clone(recurse=False))

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        env: Any = self.container
        env._find_parts()
        if env._plan is None:
            env._plan = StepPlan.of([*env.runner.dispatchers, *list[Any](self.transforms)])
        plan: StepPlan = env._plan
        step = EpisodeStep(env, tensordict, next_tensordict)
        for role, parts in plan.turn:
            if role == "answers":
                step.answer(parts)
            else:
                any_entry = role == "edits"
                with _telling_when_the_reward_is_there(parts[0]):
                    next_tensordict = step.edit(parts[0], next_tensordict, any_entry=any_entry)
        for counter in plan.counters:
            next_tensordict = step.count(counter, next_tensordict)
        next_tensordict = step.end(next_tensordict)
        env.record_ends(step.ended)
        for transform in plan.late:
            next_tensordict = transform._step(tensordict, next_tensordict)
            transform_past(transform, step.ended)
        return next_tensordict


@contextmanager
def _telling_when_the_reward_is_there(transform: Any) -> Iterator[None]:
    """Add to what a transform raises that reads the reward before the episodes are scored."""
    try:
        yield
    except KeyError as error:
        if f'"{keys.REWARD}"' in str(error):
            error.add_note(
                f"{type(transform).__name__} reads {keys.REWARD!r}, which is there once the "
                "episodes are scored. A transform that reads it says so, and comes then: "
                f"super().__init__(in_keys=[{keys.REWARD!r}])."
            )
        raise


class StepPlan(NamedTuple):
    """The transforms of a step in the order in which they run."""

    turn: Sequence[tuple[str, Sequence[Any]]]
    """What happens to turns: the role, and the transforms; those that answer one after the other
    are together, so that each episode goes through them by itself."""
    counters: Sequence[StepCounter]
    """They count when all others have answered."""
    late: Sequence[Transform]
    """They read the reward, once it is there."""

    @classmethod
    def of(cls, transforms: Iterable[Transform]) -> "StepPlan":
        """The plan of an environment.

        Args:
            transforms: what answers tools, and then those of the environment in their order.
        """
        turn: list[tuple[str, list[Any]]] = []
        by_role: dict[str, list[Any]] = {"counts": [], "reads the reward": []}
        for transform in transforms:
            role = role_of(transform)
            if role in by_role:
                by_role[role].append(transform)
            elif role == "answers" and turn and turn[-1][0] == role:
                turn[-1][1].append(transform)
            elif role:
                turn.append((role, [transform]))
        return cls(turn, *by_role.values())


def role_of(transform: Any) -> str:
    """Return what a transform does in a step; empty if nothing.

    It may edit messages if it is a user's, says that it reads them, or holds other ones.
    """
    if isinstance(transform, EpisodeEntries):
        return ""
    if type(transform)._step is EpisodeTransform._step:
        return "answers" if overrides(transform, "after_turn") else ""
    if keys.REWARD in (transform.in_keys or ()):
        return "reads the reward"
    if isinstance(transform, StepCounter):
        return "counts" if transform.max_steps is not None else "writes"
    is_known = type(transform).__module__.startswith(_KNOWN) and not isinstance(transform, Compose)
    reads = any(keys.HISTORY in key for key in transform.in_keys or ())
    may_edit = (reads or not is_known) and not isinstance(transform, EpisodeTransform)
    return "edits" if may_edit else "writes"


def transform_past(transform: Transform, episodes: Sequence[Episode]) -> None:
    """Let a transform of the reward change it in the rows before a rewritten past, too."""
    for own in (episode.token_entries for episode in episodes if episode.segments):
        if keys.REWARD in own and type(transform)._step is Transform._step:
            whole = TensorDict({keys.REWARD: own[keys.REWARD][None].clone()}, batch_size=[1])
            own[keys.REWARD] = transform._call(whole)[keys.REWARD][0]


def flat_transforms(transform: Transform) -> list[Transform]:
    """A transform by itself, or those of a ``Compose`` that only runs them, and those in these."""
    if not isinstance(transform, Transform):
        found = f"{transform!r:.80}"
        hint = " Make one of the class: call it." if isinstance(transform, type) else ""
        raise TypeError(f"append_transform takes a transform of an environment, got {found}.{hint}")
    kind = type(transform)
    if kind.__module__.startswith(_THEIRS):
        raise TypeError(
            f"{kind.__module__}.{kind.__name__} works on the batches of TorchRL's LLM layer. Take "
            f"what this library has instead: {page('docs/torchrl-arguments.md')}."
        )
    if {kind._step, kind._reset} == {Compose._step, Compose._reset}:
        return [part for each in transform.transforms for part in flat_transforms(each)]  # type: ignore[arg-type]
    transform.reset_parent()
    return [transform]


def in_shape(batch: TensorDictBase, shape: torch.Size) -> TensorDictBase:
    """A batch of a shape; itself if it has that already."""
    return batch if batch.batch_size == shape else batch.reshape(shape)
