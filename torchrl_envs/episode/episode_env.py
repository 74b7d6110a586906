"""An environment of episodes: in batches as TorchRL steps them, or each at its own pace."""

import functools
import inspect
import logging
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, Self, TypeVar

from tensordict import TensorDict, TensorDictBase
from torchrl.envs import EnvBase, StepCounter, Transform, TransformedEnv
from torchrl.envs.transforms import Compose

from torchrl_data import page
from torchrl_data.batch_io import one_dimension, read_conversations
from torchrl_data.batch_objects import read_objects, write_objects
from torchrl_data.checks import check_counts, check_numbers
from torchrl_data.conversation import Conversations
from torchrl_data.keys import GROUP_ID, PROMPT, QUERY, REWARD, ROW, SEED, TOOLS
from torchrl_data.stop_reasons import ERROR, kind_of
from torchrl_data.tool_calls import parse_tool_calls
from torchrl_envs.concurrency import ConcurrentCalls, run_all
from torchrl_envs.entries import REWARD_KEYS, RewardSource

from . import runner
from .episode import Episode, LoopDriver, Resources, run_event
from .tool_source import ToolDispatcher, ToolSource, check_tool_names
from .transform import EpisodeTransform, overrides

# A chat environment with transforms: TorchRL's face of the loop through episodes.
#
# Shape legend: B rows.


class TooManyRewardErrors(RuntimeError):
    """More of the recent rollouts could not be scored than the limit allows."""


class RewardErrorLimit(Transform):
    """Stops the run when the rewards of more than a fraction of the recent rollouts fail.

    Every :class:`~torchrl_envs.EpisodeEnv` has one with the defaults; append another
    to change them.

    Args:
        max_error_fraction: of the last ``window`` rollouts. A run stops as soon as the number of
            errors that this allows is exceeded, before ``window`` rollouts were seen too; 1 never
            stops.
        window: number of rollouts.

    Raises:
        ValueError: the fraction is not in [0, 1], or the window is not positive.
    """

    def __init__(self, max_error_fraction: float = 0.05, *, window: int = 200) -> None:
        super().__init__()
        check_numbers("RewardErrorLimit", "[0, 1]", max_error_fraction=max_error_fraction)
        check_counts("RewardErrorLimit", window=window)
        self.max_error_fraction = max_error_fraction
        self._recent: deque[str] = deque(maxlen=window)

    def record(self, episodes: Sequence[Episode]) -> None:
        """Take note of rollouts that have just ended.

        Args:
            episodes: with their scores.

        Raises:
            TooManyRewardErrors: the limit is exceeded; the message counts the kinds of errors.
        """
        self._recent.extend(episode.score.error for episode in episodes)
        failed = [error for error in self._recent if error]
        window = self._recent.maxlen or 1
        if len(failed) <= self.max_error_fraction * window:
            return
        # What errors of a kind have in common: who failed, and the last line of the traceback.
        kinds: Counter[str] = Counter()
        for first, *more in (error.splitlines() for error in failed):
            kinds[f"{first.split(' raised ')[0]} raised {more[-1]}" if more else first] += 1
        summary = "\n".join(f"  {count} x {kind}" for kind, count in kinds.most_common(5))
        raise TooManyRewardErrors(
            f"The rewards of {len(failed)} of the last {len(self._recent)} rollouts failed; "
            f"{self.max_error_fraction:.0%} of {window} are allowed:\n{summary}\nThe last one:\n"
            f"{failed[-1]}\nMend the reward, or allow more with collector.max_error_fraction= of a "
            f"recipe, or RewardErrorLimit(max_error_fraction=...). See {page('docs/rewards.md')}."
        )

    def get_extra_state(self) -> list[str]:
        """The errors of the recent rollouts, part of ``state_dict()``."""
        return list(self._recent)

    def set_extra_state(self, state: list[str]) -> None:
        """Go back to a state; what ``load_state_dict()`` calls.

        Args:
            state: what :meth:`get_extra_state` gave.
        """
        self._recent = deque(state, maxlen=self._recent.maxlen)

    @staticmethod
    def deal_extra_states(states: Sequence[list[str]], count: int) -> list[list[str]]:
        """What copies of it remember, dealt out to another number of copies.

        Args:
            states: what :meth:`get_extra_state` gave, of each.
            count: how many there are now.

        Returns:
            A state for each of them; every error is in one.
        """
        errors = [error for state in states for error in state]
        return [errors[number::count] for number in range(count)]


T = TypeVar("T", bound=Transform)


class OwnSignature:
    """The arguments of a class's constructor, which TorchRL's metaclass hides from ``help``."""

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        """Of whichever class has it, or inherits it; an instance is called otherwise."""
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
        parts = runner.flat_transforms(transform)
        entries = runner.EpisodeEntries()
        super().__init__(env, runner.StepOrder(entries, *parts))  # type: ignore[arg-type]
        self._calls = ConcurrentCalls()
        self._checked = False
        self.error_limit = RewardErrorLimit()
        self.runner = runner.EpisodeRunner(
            self._calls, ToolDispatcher(getattr(env, "parse_turn", parse_tool_calls))
        )
        self.entries = entries
        self.step_under_way: runner.EpisodeStep | None = None
        """While transforms see it."""
        self._find_parts()

    @property
    def calls(self) -> ConcurrentCalls:
        """Runs the calls of tools, environments and rewards."""
        return self._calls

    def append_transform(self, transform: Transform) -> Self:  # type: ignore[override]
        """Add a transform, or those of a ``Compose``.

        Raises:
            ValueError: it offers a tool whose name another source's has.
        """
        for part in runner.flat_transforms(transform):
            super().append_transform(part)
        self._find_parts()
        self._checked = False
        return self

    def _find_parts(self) -> None:
        """Tell the parts of our own what the others are."""
        dispatcher = self.runner.dispatcher
        dispatcher.sources = list(self.transforms_of(ToolSource))
        check_tool_names(dispatcher.sources)
        transforms = list(self.episode_transforms())
        self.runner.set_transforms(transforms)
        self.entries.reward_names = self.reward_names
        self.entries.dense = any(part.by_token for part in transforms)
        self.entries.loads_data = any(overrides(part, "draw") for part in transforms)
        self.entries.has_tools = bool(dispatcher.sources)
        self.entries.has_sources = any(isinstance(part, RewardSource) for part in transforms)
        self.entries.exporting = [part for part in transforms if overrides(part, "export")]
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

    def resources_in(self, row: int) -> Resources:
        """What the episode holds that runs in a row; nothing if none does."""
        return self.runner.resources_in(row)

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
        self.entries.reward_names = self.reward_names
        self.empty_cache()

    # Reset --------------------------------------------------------------------------------------

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
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
        episodes = new if len(new) == size else runner.read_episodes(batch)
        for episode in new:
            episodes[episode.row] = episode
        try:
            reset = one_dimension(self._begin(batch, new, **kwargs))
            shown = read_conversations(reset, PROMPT, who="EpisodeEnv.reset")
            for row, episode in enumerate(episodes):
                episode.share(shown, row)
            self.runner.run(self.runner.before_turn, new)
            for episode in new:
                if episode.stop_reason:
                    episode.max_new_tokens = 0
            runner.written(reset, episodes, shown)
        except BaseException:
            self.close_episodes(rows)
            raise
        self.entries.write_values(reset, episodes)
        return runner.in_shape(reset, self.batch_size)

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
        batch = runner.in_shape(batch, self.batch_size)
        reset = self.base_env._reset(batch, **kwargs)
        self.base_env._complete_done(self.base_env.full_done_spec, reset)
        return self.transform._reset(batch, reset)

    # Step ---------------------------------------------------------------------------------------

    def run_after_turn(self, transform: EpisodeTransform, next_batch: TensorDictBase) -> None:
        """Run one transform's ``after_turn`` on the episodes that have just taken a turn.

        Args:
            transform: which.
            next_batch: read before and written after, for the transforms of TorchRL's.
        """
        assert self.step_under_way is not None
        self.step_under_way.after_turn(transform, next_batch)

    def record_ends(self, episodes: Sequence[Episode]) -> None:
        """Stop the run if the rewards of too many episodes failed.

        Args:
            episodes: that have just ended.

        Raises:
            TooManyRewardErrors: the limit is exceeded.
        """
        if episodes:
            next(self.transforms_of(RewardErrorLimit), self.error_limit).record(episodes)

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
                self._calls.close,
            ]
        )


# The loop through one episode in an event loop, where none waits for another.
#
# Shape legend: N episodes of a group.

_HARMLESS: Final = (runner.EpisodeEntries, RewardErrorLimit, Compose)
_log = logging.getLogger(__name__)


class Prompt(NamedTuple):
    """What a group was drawn with."""

    example: Mapping[str, Any] | None
    query: Any
    group_id: int


def prompt_of(episode: Episode) -> Prompt:
    """What an episode was drawn with, before it begins.

    Args:
        episode: drawn.
    """
    return Prompt(episode.example, episode.query, episode.group_id)


class TurnTaker(Protocol):
    """Takes the policy's turns; :class:`~torchrl_modules.AsyncPolicy` is one."""

    async def take_turn(
        self,
        conversation: Conversations,
        *,
        max_new_tokens: int | None = None,
        session: Hashable = None,
    ) -> tuple[Conversations, str]:
        """The conversation with a turn more, and why the turn ended."""
        ...


class AsyncEpisodeRunner:
    """Runs episodes of an environment one by one, through the same events as its steps do.

    ``draw`` and ``finish`` take the episodes of a group; everything between is each one's own.

    Args:
        env: its events, data, tools and limits.

    Raises:
        ValueError: a transform works on batches of steps, and there are none.
    """

    def __init__(self, env: "EpisodeEnv") -> None:
        self._env = env
        self._runner = env.runner
        self._driver = LoopDriver(env.calls)
        self._turn_steps: list[Callable[[Episode], Any]] = []
        self._late: list[Transform] = []
        run, dispatcher = self._runner.run_safely, self._runner.dispatcher
        if dispatcher.sources:
            self._turn_steps.append(functools.partial(run, dispatcher, "after_turn"))
        for transform in env.transforms_of(Transform):
            if isinstance(transform, EpisodeTransform):
                if overrides(transform, "after_turn"):
                    self._turn_steps.append(functools.partial(run, transform, "after_turn"))
            elif isinstance(transform, StepCounter):
                if transform.max_steps is not None:
                    step = functools.partial(cut_after, max_turns=transform.max_steps)
                    self._turn_steps.append(step)
            elif REWARD in (transform.in_keys or ()):
                self._late.append(transform)
            elif not isinstance(transform, _HARMLESS):
                raise ValueError(
                    f"{type(transform).__name__} works on the steps of a batch, and here each "
                    "episode runs by itself. Write it as an EpisodeTransform, or collect in "
                    "batches (LLMCollector)."
                )

    def allow(self, num_episodes: int) -> None:
        """Let so many episodes run at once, none of which waits for another's thread."""
        self._env.calls.allow_threads(num_episodes)

    def abandon(self) -> None:
        """Who waits in a thread for rewards, or for what is given back, does so no longer."""
        self._env.calls.abandon()

    def draw(self, num_episodes: int) -> list[Episode]:
        """New episodes with their examples; that there are no data for has a ``stop_reason``.

        Args:
            num_episodes: of one group.
        """
        episodes = [Episode(row) for row in range(num_episodes)]
        self._runner.draw(episodes)
        return episodes

    def draw_again(self, prompt: Prompt, seed: int, num_episodes: int) -> list[Episode]:
        """New episodes of a prompt that was drawn before.

        Args:
            prompt: what :func:`prompt_of` gave.
            seed: of the episodes.
            num_episodes: of one group.
        """
        episodes = [Episode(row) for row in range(num_episodes)]
        for episode in episodes:
            episode.example, episode.query, episode.group_id = prompt
            episode.seed = seed
        self._runner.hold(episodes)
        return episodes

    async def run(self, episode: Episode, policy: TurnTaker) -> None:
        """Take a drawn episode to its end; it is not scored yet, and holds what it holds.

        Args:
            episode: its ``stop_reason`` says afterwards why it is over.
            policy: takes its turns.

        Raises:
            EngineDied: the engine of the policy is gone.
        """
        drive, events = self._driver.drive, self._runner
        await drive(events.start(episode))
        try:
            base: Any = self._env.base_env
            episode.conversation = base.open(episode.query, episode.tools)
        except Exception as error:
            runner.fail(episode, type(self._env.base_env).__name__, error)
        await drive(run_event(events.before_turn, episode))
        while not (episode.stop_reason or episode.is_done):
            episode.conversation, episode.finish_reason = await policy.take_turn(
                episode.conversation, max_new_tokens=episode.max_new_tokens, session=episode.id
            )
            episode.num_turns += 1
            if kind_of(episode.finish_reason) == ERROR:
                episode.truncate()
                continue
            for step in self._turn_steps:
                await drive(run_event(step, episode))
            episode.end_unanswered()
            await drive(run_event(events.before_turn, episode))
        episode.settle()
        events.over([episode])

    def finish(self, episodes: Sequence[Episode]) -> TensorDictBase:
        """Score the episodes of a group, and give back what they hold; may take its time.

        Args:
            episodes: N, all of them over.

        Returns:
            ``[N]``, the entries of the step in which they ended.

        Raises:
            TooManyRewardErrors: the rewards of too many recent episodes failed.
        """
        try:
            for row, episode in enumerate(episodes):
                episode.row = row
            self._runner.finish(episodes)
            batch: TensorDictBase = TensorDict({}, batch_size=[len(episodes)])
            start: TensorDictBase = TensorDict({}, batch_size=[len(episodes)])
            runner.write_flags(batch, episodes)
            self._env.entries.write_values(batch, episodes)
            self._env.entries.write_results(batch, episodes)
            for transform in self._late:
                start = transform._reset(start, start)
                batch = transform._step(start, batch)
        finally:
            self._runner.close(episodes)
        self._env.record_ends(episodes)
        return batch

    def give_up(self, episodes: Sequence[Episode]) -> None:
        """Give back what episodes hold that will not be finished; may take its time.

        Args:
            episodes: those that are closed already are left out.
        """
        self._runner.close(episodes)


def cut_after(episode: Episode, max_turns: int) -> None:
    """What TorchRL's ``StepCounter`` does after a turn."""
    if episode.num_turns >= max_turns and not episode.is_done:
        episode.truncate()
