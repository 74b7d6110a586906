"""Transforms of the tokens of finished trajectories, wherever trajectories pass.

Shape legend: B rows, T tokens of a row (ragged).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

from torchrl_data.batched_object import read_objects
from torchrl_data.conversation import Conversations
from torchrl_data.conversation_io import read_conversations
from torchrl_data.keys import AGENT, ASSISTANT_MASK, FULL, LOG_PROBS_FULL, REWARD
from torchrl_data.missing_entry import MissingEntryError
from torchrl_data.ragged.packed import read_images, read_sampling_masks
from torchrl_data.ragged.token_entries import TokenEntries
from torchrl_envs.entries.rewards import RowReward, dense_reward
from torchrl_envs.entries.trajectories import copied_rows, joined_rows

from .episode import Episode
from .episode_transform import EpisodeTransform


@dataclass
class ScoredRow:
    """A trajectory: its tokens, what is known of each, and what a transform adds."""

    ids: Tensor
    """int64 ``[T]``."""
    assistant_mask: Tensor
    """bool ``[T]``, True on sampled tokens."""
    find: Callable[[NestedKey], Tensor | None]
    """Looks an entry up, ``[T]`` or ``None``."""
    who: str
    """The transform, named in errors."""
    images: Sequence[str] = ()
    """Of its prompt, in base 64."""
    sampling_masks: Sequence[bytes] = ()
    """The set that each token was drawn from; none where they were not recorded."""
    results: dict[NestedKey, Tensor] = field(default_factory=dict)
    """Entries to be written, ``[T]`` each."""
    penalty: Tensor | None = None
    """What the reward gets in addition, float32 ``[T]``."""
    conversation: Callable[[], Conversations] | None = None
    """Gives its messages and tokens, a snapshot of one row; ``None`` where it is made by hand."""
    agent: str = ""
    """Its author, where a program names its agents."""

    def sets_of(self, targets: Tensor) -> list[bytes]:
        """The sets that some tokens were drawn from, an empty one where none was recorded.

        Args:
            targets: which, bool ``[T]``.
        """
        at = targets.nonzero().squeeze(1).tolist()
        return [self.sampling_masks[t] if self.sampling_masks else b"" for t in at]

    def read(self, key: NestedKey) -> Tensor:
        """An entry aligned with the tokens, ``[T]``.

        Raises:
            MissingEntryError: nobody has written it.
        """
        value = self.results.get(key)
        value = self.find(key) if value is None else value
        if value is None:
            raise MissingEntryError(
                f"{self.who} reads {key!r}, which nobody has written. Run the transform that "
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

    def score(self, rows: Sequence[ScoredRow]) -> None:
        """Add results, and perhaps a penalty, to each row."""
        raise NotImplementedError

    # In an environment --------------------------------------------------------------------------

    def finish_batch(self, episodes: Sequence[Episode]) -> None:
        """Work on the trajectories that have just ended, every row of each."""
        found: list[list[ScoredRow]] = []
        for episode in episodes:
            found.append([])
            end = 0
            for row, origin in zip(episode.rows, episode.origins, strict=True):
                start, end = end, end + row.num_tokens(0)
                known = {key: values[start:end] for key, values in episode.token_entries.items()}
                find = {**known, LOG_PROBS_FULL: row.log_probs(0)}.get
                ids, mask = row.token_ids(0), row.assistant_mask(0)
                further: dict[str, Any] = {
                    "images": row.images(0),
                    "sampling_masks": row.sampling_masks(0),
                    "conversation": functools.partial(_itself, row),
                    "agent": origin.agent,
                }
                found[-1].append(ScoredRow(ids, mask, find, self._get_name(), **further))
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
        rows = copied_rows(tensordict)
        if self.results and all(rows[0].get(_next(key), None) is not None for key in self.results):
            return tensordict
        who = self._get_name()
        entries = TokenEntries(tensordict, FULL, who=who)
        masks = entries.aligned(ASSISTANT_MASK)  # type: ignore[arg-type]
        if masks is None:
            raise MissingEntryError(
                f"{who} reads {ASSISTANT_MASK}, which the batch lacks: it says which tokens the "
                "policy sampled."
            )
        keeps: Sequence[Tensor | None] = entries.keep or [None] * len(rows)
        ids = entries.ids()
        found = [
            ScoredRow(
                torch.tensor(own),
                mask.bool(),
                functools.partial(_find, row, keep),
                who,
                images=[image for its in read_images(row) or () for image in its],
                sampling_masks=sets,
                conversation=functools.partial(read_conversations, row, FULL, who=who),
                agent=str(read_objects(row, AGENT, "")[0] or ""),
            )
            for own, mask, row, keep, sets in zip(
                ids, masks, rows, keeps, _sets_of_rows(tensordict, ids, keeps, who), strict=True
            )
        ]
        self.score(found)
        for row, tokens, keep in zip(rows, found, keeps, strict=True):
            for key in self.results:
                row.set(_next(key), _padded(tokens.results[key], keep))
            if tokens.penalty is not None:
                self._add_penalty(row, tokens.penalty.detach(), tokens.assistant_mask, keep)
        return joined_rows(rows, tensordict.batch_size)

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        # An environment passes what a step starts from: there is nothing to do yet.
        if tensordict is None or self.in_environment:
            return tensordict
        return self.forward(tensordict)

    def _add_penalty(
        self, row: TensorDictBase, penalty: Tensor, mask: Tensor, keep: Tensor | None
    ) -> None:
        key = REWARD if row.get(REWARD, None) is not None else ("next", REWARD)
        reward = row.get(key, None)
        if reward is None:
            raise MissingEntryError(
                f"{self._get_name()} adds to {REWARD!r}, which the batch lacks. Use "
                "add_to_reward=False to keep the entry only."
            )
        if not self.dense and reward.numel() == 1:
            row.set(key, reward + penalty.sum())
            return
        if not self.dense:
            penalty = dense_reward(penalty.sum(), None, mask).squeeze(-1)
        if keep is not None and reward.numel() == len(keep):
            reward = reward[keep]
        row.set(key, _padded(dense_reward(reward, penalty, mask), keep))


def _next(key: NestedKey) -> NestedKey:
    return unravel_key(("next", key))  # type: ignore[return-value]


def _find(row: TensorDictBase, keep: Tensor | None, key: NestedKey) -> Tensor | None:
    value = row.get(_next(key), None)
    value = row.get(key, None) if value is None else value
    return value if keep is None or value is None else value[keep]


def _sets_of_rows(
    batch: TensorDictBase,
    ids: Sequence[Sequence[int]],
    keeps: Sequence[Tensor | None],
    who: str,
) -> list[list[bytes]]:
    """The sampling masks of the tokens of each row; none of a batch without."""
    sizes = [len(own if keep is None else keep) for own, keep in zip(ids, keeps, strict=True)]
    masks = read_sampling_masks(batch, sizes, who=who)
    if masks is None:
        return [[] for _ in ids]
    sets = iter(masks.sets())
    rows = [[*islice(sets, size)] for size in sizes]
    return [
        own
        if keep is None
        else [each for each, real in zip(own, keep.tolist(), strict=True) if real]
        for own, keep in zip(rows, keeps, strict=True)
    ]


def _itself(row: Conversations) -> Conversations:
    return row


def _padded(values: Tensor, keep: Tensor | None) -> Tensor:
    """Values back among the padding, 0 there."""
    if keep is None:
        return values
    out = values.new_zeros(len(keep), *values.shape[1:])
    return out.index_put((keep.nonzero().squeeze(-1),), values)
