"""Chat environment with transforms: TorchRL's face of the loop through episodes.

Shape legend: B rows.
"""

import functools
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Self, TypeVar

from tensordict import TensorDict, TensorDictBase
from torchrl.data import Composite
from torchrl.envs import EnvBase, StepCounter, Transform, TransformedEnv
from torchrl.envs.transforms import Compose

from torchrl_data import keys
from torchrl_data.batched_object import read_objects, write_objects
from torchrl_data.conversation_io import (
    one_dimension,
    read_conversations,
)
from torchrl_data.foreign_conversations import (
    edited,
)
from torchrl_data.keys import GROUP_ID, PROMPT, QUERY, ROW, SEED, TOOLS
from torchrl_data.stop_reason import StopReason, kind_of
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_data.templates.registry import family_of
from torchrl_data.tool_calls.parser import (
    format_of_template,
    parse_tool_calls,
    tool_call_parser,
)
from torchrl_envs.concurrency.calls import ConcurrentCalls, run_all
from torchrl_envs.concurrency.outcome import CLOSED
from torchrl_envs.entries.rewards import REWARD_KEYS, RewardSource, UnscoredWatch

from .episode import Episode, share_all
from .episode_entries import EpisodeEntries, read_episodes
from .episode_step import StepOrder, flat_transforms, in_shape, role_of, written_batch
from .episode_transform import EpisodeTransform, overrides
from .resources import Resources
from .reward_error_limit import RewardErrorLimit
from .runner import EpisodeRunner
from .turn_point import TurnPoint

T = TypeVar("T", bound=Transform)


class OwnSignature:
    """The arguments of a class's constructor, which TorchRL's metaclass hides from ``help``."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        """Signature of the class that has it, or inherits it; an instance is called otherwise."""
        if instance is not None:
            raise AttributeError("__signature__")
        return inspect.Signature([*inspect.signature(owner.__init__).parameters.values()][1:])


class EpisodeEnv(TransformedEnv):
    """Runs the episodes of a :class:`~torchrl_envs.ChatEnv` and its transforms.

    A row is done when the policy's turn is left without an answer (no tool result, no message of
    anybody else), when a transform such as ``StepCounter`` truncates it, or when it could not be
    generated. Then it is scored, whatever the order in which the transforms were appended, and what
    it held is given back. ``stop_reason`` says why it ended. A row that could not begin gets no
    turn: its first step ends it, truncated and unscorable. Transforms that read ``reward``, such as
    TorchRL's ``RewardScaling`` and ``RewardSum``, run once the episodes are scored.

    Args:
        env: the base environment.
        transform: one transform, or a ``Compose`` of several.
    """

    __signature__ = OwnSignature()

    def __init__(self, env: EnvBase, transform: Transform) -> None:
        parts = flat_transforms(transform)
        entries = EpisodeEntries()
        super().__init__(env, StepOrder(entries, *parts))  # type: ignore[arg-type]
        self.calls = ConcurrentCalls()
        """Runs the calls of tools, environments and rewards."""
        self._found: list[Any] = []
        self._watch = UnscoredWatch()
        self.error_limit = RewardErrorLimit()
        parse = getattr(env, "parse_turn", parse_tool_calls)
        self.runner = EpisodeRunner(self.calls, parse)
        self.entries = entries
        self._find_parts()

    def __repr__(self) -> str:
        base, lines = self.base_env, []
        for part in self.transforms_of(Transform):
            if isinstance(part, StepCounter):
                lines.append(f"StepCounter(max_steps={part.max_steps})")
            elif not isinstance(part, HARMLESS):
                lines.append(repr(part))
        inside = "".join(f"\n    {line}," for line in lines)
        return f"{type(self).__name__}(\n    {base!r},{inside}\n)"

    def append_transform(self, transform: Transform) -> Self:  # type: ignore[override]
        """Add a transform, or those of a ``Compose``.

        Raises:
            ValueError: it offers a tool whose name another source's has.
        """
        for part in flat_transforms(transform):
            super().append_transform(part)
        self._find_parts()
        return self

    def _find_parts(self) -> None:
        """Ask the transforms what they do, and tell the parts of our own, where there are others.

        Called before each reset and step: transforms may come and go in TorchRL's ways too.

        Raises:
            ValueError: two of them have a tool of the same name.
        """
        if self._found == (found := [*self.transform]):  # type: ignore[misc]
            return
        self._found, self._checked, self._plan = found, False, None
        transforms = list(self.episode_transforms())
        self.runner.set_transforms(transforms)
        counters = [c for c in self.transforms_of(StepCounter) if c.truncated_key == keys.TRUNCATED]
        limits = [counter.max_steps for counter in counters if counter.max_steps is not None]
        self.runner.max_turns = min(limits, default=None)
        self.entries.reward_names = self.reward_names
        self.entries.dense = any(part.by_token for part in transforms)
        self.entries.loads_data = any(overrides(part, "draw") for part in transforms)
        self.entries.has_tools = bool(self.runner.dispatcher.sources)
        self.entries.has_agents = any(part.names_agents for part in transforms)
        self.entries.has_sources = any(isinstance(part, RewardSource) for part in transforms)
        self.entries.exporting = [part for part in transforms if overrides(part, "export")]
        self._limit = next(self.transforms_of(RewardErrorLimit), self.error_limit)
        self.empty_cache()

    def episode_transforms(self) -> Iterator[EpisodeTransform]:
        """The transforms that take part in episodes, in order."""
        return self.transforms_of(EpisodeTransform)

    @property
    def reward_names(self) -> list[str]:
        """The names of the rewards of all sources, in order."""
        sources = [part for part in self.episode_transforms() if isinstance(part, RewardSource)]
        names = [name for source in sources for name in source.reward_names]
        return list(dict.fromkeys(names))  # sources of different episodes may have the same

    @property
    def reward_entries(self) -> list[str]:
        """Entries that other transforms declare, observed or with the rewards: rows keep them."""
        ours = self.entries.transform_observation_spec(Composite(shape=self.batch_size))
        own = {*ours.keys(), *self.base_env.observation_spec.keys(), keys.POLICY_VERSION}
        declared = [*self.full_reward_spec.keys(), *self.full_observation_spec.keys()]
        return [str(name) for name in declared if name not in own | _OWN]

    def transforms_of(self, kind: type[T]) -> Iterator[T]:
        """The transforms of a class, in order, inside nested ``Compose`` too."""
        pending: list[Transform] = [self.transform]
        while pending:
            transform = pending.pop(0)
            if isinstance(transform, Compose):
                pending = [*transform.transforms, *pending]  # type: ignore[list-item]
            elif isinstance(transform, kind):
                yield transform

    def resources_in(self, row: int) -> Resources:
        """Return what the episode holds that runs in a row; nothing if none does."""
        return self.runner.resources_in(row)

    def check(self) -> None:
        """Check that the composition can work: data, tools and a reward fit together.

        Called before the first reset; call it earlier to fail earlier.

        Raises:
            ValueError: something is missing or does not fit; the message names it.
        """
        for transform in self.episode_transforms():
            transform.check(self)
        self._checked, self._plan = True, None
        # Checking gives sources of rewards their final names.
        self.entries.reward_names = self.reward_names
        self.empty_cache()

    def read_calls_as(self, encoder: ConversationEncoder) -> None:
        """Read tool calls as a policy's chat template teaches, where nothing else says how.

        Args:
            encoder: of the policy.
        """
        base: Any = self.base_env
        if getattr(base, "takes_format_of_policy", False):
            family = family_of(encoder.tokenizer) or ""
            base.parse_turn = tool_call_parser(format_of_template(encoder.template, family=family))
            self.runner.dispatcher.parse = base.parse_turn

    # Reset --------------------------------------------------------------------------------------

    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """Begin an episode in each row: see ``EnvBase.reset`` of TorchRL.

        Args:
            tensordict: what the rows begin with, such as their ``query``.
            **kwargs: as TorchRL's.

        Raises:
            TypeError: it is no TensorDict.
        """
        check_reset(tensordict)
        return super().reset(tensordict, **kwargs)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self._find_parts()
        if not self._checked:
            self.check()
        size = self.batch_size.numel()
        batch = one_dimension(
            TensorDict({}, batch_size=self.batch_size) if tensordict is None else tensordict.copy()
        )
        mask = batch.get("_reset", None)
        rows = list(range(size)) if mask is None else mask.view(-1).nonzero().squeeze(-1).tolist()
        self.close_episodes(rows)
        new = [Episode(row) for row in rows]
        episodes = new if len(new) == size else read_episodes(batch)
        for episode in new:
            episodes[episode.row] = episode
        try:
            reset = one_dimension(self._begin(batch, new, **kwargs))
            shown = read_conversations(reset, PROMPT, who="EpisodeEnv.reset")
            begun = {episode.row for episode in new}
            for row, episode in enumerate(episodes):
                if row in begun:  # with a stream of random numbers of its own
                    episode.conversation = shown.row(row)
                else:
                    episode.share(shown, row)
            self.runner.run(self.runner.before_turn, new)
            for episode in new:
                if episode.stop_reason:
                    episode.max_new_tokens = 0
            written_batch(reset, episodes, shown)
        except BaseException:
            self.close_episodes(rows)
            raise
        self.entries.write_values(reset, episodes)
        return in_shape(reset, self.batch_size)

    def _begin(
        self, batch: TensorDictBase, new: Sequence[Episode], **kwargs: Any
    ) -> TensorDictBase:
        queries = read_objects(batch, QUERY)
        examples = read_objects(batch, ROW)
        for episode in new:
            episode.query, episode.example = queries[episode.row], examples[episode.row]
        for key in (GROUP_ID, SEED):
            value = batch.get(key, None)
            if value is not None:
                numbers = value.view(-1).tolist()
                for episode in new:
                    setattr(episode, key, int(numbers[episode.row]))
        self.runner.begin(new)
        for episode in new:
            queries[episode.row] = episode.query
        if any(query is not None for query in queries):
            write_objects(batch, QUERY, queries)
        if any(episode.tools for episode in new):
            tools = read_objects(batch, TOOLS)
            for episode in new:
                tools[episode.row] = episode.tools
            write_objects(batch, TOOLS, tools)
        batch = in_shape(batch, self.batch_size)
        reset = self.base_env._reset(batch, **kwargs)
        self.base_env._complete_done(self.base_env.full_done_spec, reset)
        run = functools.partial(self.transform._reset, batch)
        if {"edits", "reads the reward"}.isdisjoint(map(role_of, self._found)):
            return run(reset)
        return edited(reset, run, who="EpisodeEnv.reset")

    def branch(
        self, tensordict: TensorDictBase, turns: Mapping[int, Sequence[TurnPoint]]
    ) -> TensorDictBase:
        """Take episodes that have begun to where others of their draws were before a turn.

        Args:
            tensordict: ``[*B]``, after a reset or a step.
            turns: by the row of an episode whose first turn has not been taken, those of another
                one, from its first to the one that is to be taken anew.

        Returns:
            The batch, to go on from.
        """
        batch = one_dimension(tensordict).copy()
        episodes = read_episodes(batch)
        shown = read_conversations(batch, PROMPT, who="EpisodeEnv.branch")
        share_all(episodes, shown)
        chosen = [episodes[row] for row in turns]
        for episode in chosen:
            episode.resources = self.runner.resources_in(episode.row)

        def take(episode: Episode) -> Any:
            return self.runner.branch(episode, turns[episode.row])

        self.runner.run(take, chosen)
        written_batch(batch, episodes, shown)
        self.entries.write_values(batch, episodes, given=batch)
        for counter in self.transforms_of(StepCounter):
            counts = batch.get(counter.step_count_key).clone()
            for episode in chosen:
                counts.view(len(episodes), -1)[episode.row] = episode.num_turns
            batch.set(counter.step_count_key, counts)
        return in_shape(batch, self.batch_size)

    # Step ---------------------------------------------------------------------------------------

    def record_ends(self, episodes: Sequence[Episode]) -> None:
        """Stop the run if the rewards of too many episodes failed.

        Those whose scoring was given up, because the environment was closed meanwhile, don't count.
        Where none of the first episodes could be scored, a warning says so at once, and again
        after 2, 4, 8, ... such batches in a row.

        Args:
            episodes: that have just ended.

        Raises:
            TooManyRewardErrors: the limit is exceeded.
        """
        episodes = [each for each in episodes if CLOSED not in (each.score.error or "")]
        if self.entries.has_sources:
            ended = [each for each in episodes if kind_of(each.stop_reason) != StopReason.NO_DATA]
            self._watch.record([each.score for each in ended])
        if episodes:
            self._limit.record(episodes)

    # The end ------------------------------------------------------------------------------------

    def close_episodes(self, rows: Sequence[int] | None = None) -> None:
        """Give up the episodes that run in some rows, or all: what they hold is given back."""
        self.runner.close_rows(rows)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Give back what all rows hold, and close; an error on the way stops none of it."""
        self.is_closed = True
        run_all(
            [
                self.close_episodes,
                functools.partial(self.base_env.close, raise_if_closed=raise_if_closed),
                *[transform.close for transform in self.transforms_of(Transform)],
                self.calls.close,
            ]
        )


_OWN: Final = REWARD_KEYS | {"step_count"}
HARMLESS: Final = (EpisodeEntries, RewardErrorLimit, Compose, StepCounter)
_log = logging.getLogger(__name__)


def check_reset(given: object) -> None:
    """Refuse a reset that is given something else than a TensorDict."""
    if given is not None and not isinstance(given, TensorDictBase):
        raise TypeError(
            f"reset takes a TensorDict, or nothing, got {type(given).__name__}: {given!r:.60}. "
            'A prompt of your own is its query: TensorDict({"query": ["..."]}, batch_size=[1]).'
        )
