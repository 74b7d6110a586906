"""Transforms of the tokens of finished trajectories, wherever trajectories pass.

Shape legend: B rows, T tokens of a row (ragged).
"""

from collections.abc import Callable, Sequence

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

from torchrl_data.errors import MissingEntryError
from torchrl_data.keys import ASSISTANT_MASK, FULL, LOG_PROBS_FULL, REWARD
from torchrl_data.layout.token_entries import TokenEntries
from torchrl_data.ragged.packed import read_images
from torchrl_envs.entries.rewards import RowReward, dense_reward
from torchrl_envs.entries.trajectory_batches import copied_rows, joined_rows

from .episode import Episode
from .episode_transform import EpisodeTransform


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
            penalty = self._penalty(rows)
            if penalty is not None:
                episode.score.add(self.penalty_name, RowReward(penalty), scores=False)

    def _penalty(self, rows: Sequence[TokenRow]) -> float | Tensor | None:
        penalties = [row.penalty.detach() for row in rows if row.penalty is not None]
        if not penalties:
            return None
        total = torch.cat(penalties)
        return total if self.dense else float(total.sum())

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
            penalty = _at_last(penalty.sum(), tokens.assistant_mask)
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


def _at_last(value: Tensor, assistant_mask: Tensor) -> Tensor:
    return dense_reward(value, None, assistant_mask).squeeze(-1)
