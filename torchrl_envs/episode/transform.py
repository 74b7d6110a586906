"""What takes part in an episode.

Transforms with events, of one episode or of whole trajectories.
"""

from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.envs import Transform

from torchrl_data.checks import MissingEntryError
from torchrl_data.keys import ASSISTANT_MASK, FULL, LOG_PROBS_FULL, REWARD
from torchrl_data.ragged import TokenEntries, read_images
from torchrl_envs.concurrency import Call, ConcurrentCalls, Outcome
from torchrl_envs.entries import RowReward, copied_rows, dense_reward, joined_rows

from .episode import Episode, PendingCall, PendingCalls, Resources

# What a transform can do in the course of an episode, beside transforming entries.
#
# Shape legend: B rows.

T = TypeVar("T", bound=Transform)
Event = Awaitable[None] | None
"""What an event returns: nothing, or a coroutine that awaits ``self.call(...)``."""


class EpisodeEnvironment(Protocol):
    """An environment that runs episodes."""

    base_env: Any
    """A :class:`~torchrl_envs.ChatEnv`, usually."""

    @property
    def calls(self) -> ConcurrentCalls:
        """Runs the calls of tools, environments and rewards."""
        ...

    @property
    def batch_size(self) -> torch.Size:
        """Of the episodes that run at once."""
        ...

    def transforms_of(self, kind: type[T]) -> Iterator[T]:
        """The transforms of a class, in order."""
        ...

    def resources_in(self, row: int) -> Resources:
        """What the episode holds that runs in a row; nothing if none does."""
        ...

    def run_after_turn(self, transform: Any, next_batch: TensorDictBase) -> None:
        """Run one transform's ``after_turn`` on the episodes of the step that is under way."""
        ...


class EpisodeTransform(Transform):
    """A transform that an :class:`~torchrl_envs.EpisodeEnv` tells about its episodes.

    The events of an :class:`~torchrl_envs.Episode`, in this order, whatever the order in which
    transforms were appended:

    1. ``draw``: the episode gets its example, group and seed;
    2. ``begin``: it starts, and may add to the query; an episode in which that raises takes part
       in nothing more, and its first step ends it;
    3. ``before_turn``: the next turn is bounded, or is not to be;
    4. ``after_turn``: the policy has spoken, and the calls of all :class:`ToolSource` have run;
       it may answer, end the episode, or let it go on;
    5. ``finish``: an episode that is over is scored. Then what it held is given back.

    An event works on one episode. It may be ``async`` and ``await self.call(...)``: what many
    episodes wait for runs at once. What is cheaper for many at once overrides ``finish_batch``. An
    episode in which ``before_turn`` or ``after_turn`` raises ends there, truncated and unscorable,
    and the others go on; what ``finish`` raises, or ``draw``, ends the run.

    Example:
        >>> class Doubt(EpisodeTransform):
        ...     def after_turn(self, episode):
        ...         if episode.num_turns == 1:
        ...             episode.say({"role": "user", "content": "Are you sure?"})
        >>> data = DataLoadingPrimer([{"prompt": "2 + 2?"}])
        >>> env = ChatEnv(batch_size=(1,)).append_transform(data).append_transform(Doubt())
        >>> out = env.step(env.reset().set("text_response", ["4"]))["next"]
        >>> [message["content"] for message in out["history"].prompt.to_chats()[0]]
        ['2 + 2?', '4', 'Are you sure?']
    """

    only_for: Callable[[Episode], bool] | None = None
    """Says in which episodes it takes part; ``None``: in all."""

    def concerned(self, episodes: Sequence[Episode]) -> Sequence[Episode]:
        """Those of some episodes in which it takes part.

        Args:
            episodes: with their examples.
        """
        if self.only_for is None:
            return episodes
        return [episode for episode in episodes if self.only_for(episode)]

    @property
    def by_token(self) -> bool:
        """Whether it can make ``reward`` dense, ``[B, T, 1]``, at the end of an episode."""
        return False

    # Events -------------------------------------------------------------------------------------

    def check(self, env: EpisodeEnvironment) -> None:
        """Raise if the composition can't work; called before the first reset."""

    def check_policy(self, policy: Any) -> None:
        """Raise if what the policy says would be misread; called by a collector at construction."""

    def draw(self, episodes: Sequence[Episode]) -> None:
        """Give some episodes their ``example``, ``query``, ``group_id`` and ``seed``, in order."""

    def begin(self, episode: Episode) -> Event:
        """Start an episode; may change its ``query`` and ``tools``, and add to its resources.

        Raises:
            Exception: it can't begin: it ends by itself, with ``stop_reason``
                ``"environment_error: <where>: <type>: <message>"``.
        """

    def before_turn(self, episode: Episode) -> Event:
        """Bound the next turn of an episode (``max_new_tokens``), or truncate it."""

    def after_turn(self, episode: Episode) -> Event:
        """The policy has spoken: answer, end the episode, or let it go on."""

    def over(self, episode: Episode) -> None:
        """An episode is over; others of its group may run on before it is scored. Comes twice."""

    def finish(self, episode: Episode) -> Event:
        """Score an episode that is over."""

    def finish_batch(self, episodes: Sequence[Episode]) -> None:
        """The same for several episodes, where that is cheaper."""

    def export(self, batch: TensorDictBase, episodes: Sequence[Episode]) -> None:
        """Write further entries of a step, of the episodes that have just ended in it.

        Args:
            batch: ``[B]``; what is written is declared in ``transform_reward_spec``.
            episodes: their ``row`` is that of the batch; may be none.
        """

    # What it works with -------------------------------------------------------------------------

    @property
    def key(self) -> str:
        """Its name in the environment: where it keeps what it remembers of an episode."""
        return self.__dict__.get("_key", type(self).__name__)

    @key.setter
    def key(self, name: str) -> None:
        self.__dict__["_key"] = name

    def call(
        self, *functions: Call, timeout_s: float, lane: Hashable = None
    ) -> Awaitable[list[Outcome]]:
        """Run functions without arguments, sync or ``async``, one after the other.

        Args:
            *functions: sync ones run on the environment's threads, async ones on its loop.
            timeout_s: deadline of each, in seconds from when it starts; none starts after one that
                missed its own.
            lane: calls of this transform with equal lanes run one after the other, also those of
                several episodes; the episode's own when not given.

        Returns:
            An outcome for each.
        """
        own = lane if lane is not None else object()
        return PendingCalls([PendingCall(f, timeout_s, (id(self), own)) for f in functions])

    def call_all(self, *functions: Call, timeout_s: float) -> Awaitable[list[Outcome]]:
        """Run functions without arguments, sync or ``async``, all at once; see :meth:`call`.

        Returns:
            An outcome for each.
        """
        return PendingCalls([PendingCall(f, timeout_s, None) for f in functions])

    @property
    def calls(self) -> ConcurrentCalls:
        """Runs calls, sync and async, on the threads and the one loop of the environment."""
        return self._environment().calls

    @property
    def in_environment(self) -> bool:
        """Whether it belongs to an environment, and not to a replay buffer or nothing."""
        try:
            return self.container is not None
        except ValueError:  # TorchRL's, for a Compose that belongs to no environment.
            return False

    def env_transforms(self, kind: type[T]) -> list[T]:
        """The transforms of a class in the environment that this one belongs to."""
        return list(self._environment().transforms_of(kind))

    def _environment(self) -> EpisodeEnvironment:
        container: Any = self.container
        if container is None or not hasattr(container, "run_after_turn"):
            raise self._misplaced()
        return container

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Where it stands among TorchRL's transforms, its ``after_turn`` runs."""
        del tensordict
        if type(self).after_turn is not EpisodeTransform.after_turn:
            self._environment().run_after_turn(self, next_tensordict)
        return next_tensordict

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        del tensordict
        return tensordict_reset

    def _reset_env_preprocess(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Called by a plain ``TransformedEnv`` only, which would leave the episodes out: raises."""
        del tensordict
        raise self._misplaced()

    def _misplaced(self) -> RuntimeError:
        return RuntimeError(
            f"{type(self).__name__} works inside an EpisodeEnv only: use "
            "ChatEnv(...).append_transform(...) instead of TransformedEnv(...)."
        )


def overrides(transform: EpisodeTransform, event: str) -> bool:
    """Whether a transform takes part in an event.

    Args:
        transform: any.
        event: the name of the method.
    """
    return getattr(type(transform), event) is not getattr(EpisodeTransform, event)


class EpisodeStartError(Exception):
    """An episode can't begin.

    Args:
        where: what failed: an environment and what was called, a server.
    """

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


# Transforms of the tokens of finished trajectories, wherever trajectories pass.
#
# Shape legend: B rows, T tokens of a row (ragged).


class TokenRow:
    """One trajectory: its tokens, what is known of each, and what a transform adds.

    Args:
        ids: int64 ``[T]``.
        assistant_mask: bool ``[T]``, True on sampled tokens.
        find: looks an entry up, ``[T]`` or ``None``.
        who: the transform, named in errors.
        images: of its prompt, in base 64.
    """

    def __init__(
        self,
        ids: Tensor,
        assistant_mask: Tensor,
        find: Callable[[NestedKey], Tensor | None],
        who: str,
        images: Sequence[str] = (),
    ) -> None:
        self.ids = ids
        self.assistant_mask = assistant_mask
        self.images = images
        self.results: dict[NestedKey, Tensor] = {}
        """Entries to be written, ``[T]`` each."""
        self.penalty: Tensor | None = None
        """What the reward gets in addition, float32 ``[T]``."""
        self._find = find
        self._who = who

    def read(self, key: NestedKey) -> Tensor:
        """An entry aligned with the tokens, ``[T]``.

        Raises:
            MissingEntryError: nobody has written it.
        """
        value = self.results.get(key)
        value = self._find(key) if value is None else value
        if value is None:
            raise MissingEntryError(
                f"{self._who} reads {key!r}, which nobody has written. Run the transform that "
                "writes it first (RetrieveLogProb, say)."
            )
        return value


class TrajectoryTransform(EpisodeTransform):
    """Adds per-token entries to trajectories, and perhaps a penalty to their rewards.

    It can stand in three places, and does the same work once in each:

    - in an environment: at the end of an episode, on that trajectory;
    - as the ``postproc`` of a collector, or called by hand: on a batch of trajectories;
    - in a replay buffer: when trajectories come in (before ``MCAdvantage``, if that stands before
      it in a ``Compose``, because inverse transforms run last to first), or, for rows that lack the
      entries, when they are sampled.

    Entries go under ``"next"``, as TorchRL's losses read them. The input is not changed.
    """

    results: tuple[NestedKey, ...] = ()
    """The entries that :meth:`score` adds."""
    penalty_name = "penalty"
    """What the penalty is called among the rewards."""
    dense = True
    """Whether the penalty stays with its tokens, or is summed over the trajectory."""

    @property
    def by_token(self) -> bool:
        """Whether a penalty stays with its tokens."""
        return self.dense

    def score(self, rows: Sequence[TokenRow]) -> None:
        """Add results, and perhaps a penalty, to each row."""
        raise NotImplementedError

    # In an environment --------------------------------------------------------------------------

    def finish_batch(self, episodes: Sequence[Episode]) -> None:
        """Work on the trajectories that have just ended, every row of each."""
        found = [
            [_token_row(episode, i, self._get_name()) for i in range(len(episode.rows))]
            for episode in episodes
        ]
        self.score([row for rows in found for row in rows])
        for episode, rows in zip(episodes, found, strict=True):
            for key in self.results:
                episode.token_entries[key] = torch.cat([row.results[key].detach() for row in rows])
            penalties = [row.penalty.detach() for row in rows if row.penalty is not None]
            if penalties:
                total = torch.cat(penalties)
                reward = RowReward(total if self.dense else float(total.sum()))
                episode.score.add(self.penalty_name, reward, scores=False)

    # On a batch of trajectories -----------------------------------------------------------------

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Work on trajectories that lack the results; give the others back as they are.

        Args:
            tensordict: rows with ``("tokens", "full")``, ``("masks", "all_assistant_mask")`` and
                what the transform reads, ragged or padded (with an attention mask).

        Returns:
            A batch of the same size with the results.
        """
        held = copied_rows(tensordict)[0]
        if self.results and all(held.get(_next(key), None) is not None for key in self.results):
            return tensordict
        return self._work(tensordict)

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        # An environment passes what a step starts from: there is nothing to do yet.
        if tensordict is None or self.in_environment:
            return tensordict
        return self.forward(tensordict)

    def _work(self, batch: TensorDictBase) -> TensorDictBase:
        who = self._get_name()
        entries = TokenEntries(batch, FULL, who=who)
        masks = entries.aligned(ASSISTANT_MASK)  # type: ignore[arg-type]
        if masks is None:
            raise MissingEntryError(
                f"{who} reads {ASSISTANT_MASK}, which the batch lacks: it says which tokens the "
                "policy sampled."
            )
        rows = copied_rows(batch)
        keeps: Sequence[Tensor | None] = entries.keep or [None] * len(rows)
        found = [
            TokenRow(
                torch.tensor(ids),
                mask.bool(),
                _finder(row, keep),
                who,
                images=[image for its in read_images(row) or () for image in its],
            )
            for ids, mask, row, keep in zip(entries.ids(), masks, rows, keeps, strict=True)
        ]
        self.score(found)
        for row, tokens, keep in zip(rows, found, keeps, strict=True):
            for key in self.results:
                row.set(_next(key), _padded(tokens.results[key], keep))
            if tokens.penalty is not None:
                self._add_penalty(row, tokens, keep)
        return joined_rows(rows, batch.batch_size)

    def _add_penalty(self, row: TensorDictBase, tokens: TokenRow, keep: Tensor | None) -> None:
        assert tokens.penalty is not None
        key = REWARD if row.get(REWARD, None) is not None else ("next", REWARD)
        reward = row.get(key, None)
        if reward is None:
            raise MissingEntryError(
                f"{self._get_name()} adds to {REWARD!r}, which the batch lacks. Use "
                "add_to_reward=False to keep the entry only."
            )
        if not self.dense and reward.numel() == 1:
            row.set(key, reward + tokens.penalty.detach().sum())
            return
        penalty = tokens.penalty.detach()
        if not self.dense:
            penalty = dense_reward(penalty.sum(), None, tokens.assistant_mask).squeeze(-1)
        if keep is not None and reward.numel() == len(keep):
            reward = reward[keep]
        row.set(key, _padded(dense_reward(reward, penalty, tokens.assistant_mask), keep))


def _token_row(episode: Episode, number: int, who: str) -> TokenRow:
    """One row of an episode that has ended."""
    rows = episode.rows
    row, start = rows[number], sum(earlier.num_tokens(0) for earlier in rows[:number])

    def find(key: NestedKey) -> Tensor | None:
        if key == LOG_PROBS_FULL:
            return row.log_probs(0)
        value = episode.token_entries.get(key)
        return None if value is None else value[start : start + row.num_tokens(0)]

    return TokenRow(row.token_ids(0), row.assistant_mask(0), find, who, images=row.images(0))


def _next(key: NestedKey) -> NestedKey:
    return unravel_key(("next", key))  # type: ignore[return-value]


def _finder(row: TensorDictBase, keep: Tensor | None) -> Callable[[NestedKey], Tensor | None]:
    def find(key: NestedKey) -> Tensor | None:
        value = row.get(_next(key), None)
        value = row.get(key, None) if value is None else value
        return value if keep is None or value is None else value[keep]

    return find


def _padded(values: Tensor, keep: Tensor | None) -> Tensor:
    """Values back among the padding, 0 there."""
    if keep is None:
        return values
    out = values.new_zeros(len(keep), *values.shape[1:])
    return out.index_put((keep.nonzero().squeeze(-1),), values)
