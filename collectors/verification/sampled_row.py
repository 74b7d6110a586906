"""Rows whose sampled tokens can be computed again: of a record, or of other libraries' files.

Shape legend: T tokens of a row, S experts of a token.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Self

from tensordict import TensorDictBase
from torch import Tensor

from collectors.record.replay_columns import experts_from_json, masks_from_json
from collectors.record.samples import RolloutSample
from torchrl_data.conversation_io import read_conversations
from torchrl_data.keys import FULL, KEPT_COUNTS
from torchrl_modules.scoring.expert_routes import replayed_layers


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledRow:
    """A row of tokens, some of which a policy sampled and gave log-probs for.

    Raises:
        ValueError: a column has not one value for each token, or nothing was sampled.
    """

    name: str
    """Where it is, for people."""
    ids: Sequence[int]
    """T."""
    sampled: Sequence[bool]
    """Which tokens count as sampled, T."""
    log_probs: Sequence[float]
    """Of the sampler, in nats, T; NaN where none was recorded. Others than the sampled ones are not
    read."""
    versions: Sequence[int | None]
    """Of the weights that sampled each token, T; ``None`` where it is not known."""
    messages: Sequence[Mapping[str, Any]] = ()
    """That the tokens spell; none where they are not known."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Schemas that the template showed."""
    trained: Sequence[bool] | None = None
    """Which tokens the loss scored, T; ``None`` where that was not recorded."""
    kept_counts: Sequence[int | None] | None = None
    """How many tokens top-k, top-p and min-p left, of which each was drawn, T; ``None`` where that
    was not recorded."""
    experts: Sequence[Tensor] | None = None
    """Those that each token went to, of each layer with experts int64 ``[T, S]``, negative where it
    is not known; ``None`` where it was not recorded, or the model has none."""
    sampling_masks: Sequence[bytes] = ()
    """The set that each token was drawn from, T, see :class:`~torchrl_data.SamplingMasks`; none
    where they were not recorded."""
    batch: str = ""
    """Rows of one batch, which may have been drawn together, have the same."""
    targets: list[int] = field(init=False)
    """The places of the sampled tokens that can be computed, in order: all but the first token,
    which has nothing before it."""

    def __post_init__(self) -> None:
        names = ("sampled", "log_probs", "versions", "trained", "kept_counts")
        columns = {n: getattr(self, n) for n in names}
        for name, column in columns.items():
            if column is not None and len(column) != len(self.ids):
                raise ValueError(f"{self.name}: {len(self.ids)} tokens, but {len(column)} {name}.")
        if not any(self.sampled):
            raise ValueError(f"{self.name}: no token of it was sampled.")
        places = [t for t, here in enumerate(self.sampled) if here and t > 0]
        object.__setattr__(self, "targets", places)

    @property
    def turns(self) -> list[range]:
        """The runs of sampled tokens, in order."""
        runs, start = [], 0
        for is_sampled, run in groupby(self.sampled):
            end = start + sum(1 for _ in run)
            if is_sampled:
                runs.append(range(start, end))
            start = end
        return runs

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the first that was sampled."""
        return next(t for t, here in enumerate(self.sampled) if here)

    @classmethod
    def of_collected(cls, row: TensorDictBase, *, name: str = "") -> Self:
        """A row as a collector gives it.

        Args:
            row: with its conversation.
            name: where it is, for people.

        Raises:
            ValueError: nothing of it was sampled.
        """
        conversation = read_conversations(row, FULL, who="SampledRow")
        sampled = conversation.assistant_mask(0).tolist()
        kept = conversation.extra(0).get(KEPT_COUNTS)
        experts = conversation.routed_experts(0)
        pairs = zip(conversation.policy_versions(0).tolist(), sampled, strict=True)
        return cls(
            name=name,
            ids=conversation.ids(0),
            sampled=sampled,
            log_probs=conversation.log_probs(0).tolist(),
            versions=[version if here else None for version, here in pairs],
            messages=conversation.messages(0),
            tools=conversation.tools(0),
            kept_counts=None if kept is None else [int(count) for count in kept],
            experts=None if experts is None else replayed_layers(experts),
            sampling_masks=conversation.sampling_masks(0),
        )

    @classmethod
    def of_sample(cls, sample: RolloutSample) -> Self:
        """A rollout of a record.

        Args:
            sample: of a :class:`~collectors.record.RunRecord`.

        Raises:
            ValueError: nothing of it was sampled, or its sets or experts are damaged.
        """
        tokens = sample.tokens
        scored = tokens.trainer_log_probs
        experts = experts_from_json(tokens.routed_experts, len(tokens.ids))
        return cls(
            name=place_of_sample(sample),
            ids=tokens.ids,
            sampled=[version is not None for version in tokens.versions],
            log_probs=[math.nan if each is None else each for each in tokens.log_probs],
            versions=tokens.versions,
            messages=sample.messages,
            tools=sample.tools,
            kept_counts=tokens.kept_counts,
            experts=None if experts is None else replayed_layers(experts),
            sampling_masks=masks_from_json(tokens.sampling_masks, len(tokens.ids)),
            trained=None if scored is None else [each is not None for each in scored],
            batch=f"step {sample.step}",
        )


def place_of_sample(sample: RolloutSample) -> str:
    """Place of a sample in its run, for people.

    Args:
        sample: of a record.
    """
    segment = f", segment {sample.segment}" if sample.num_segments > 1 else ""
    return f"step {sample.step}, group {sample.group_id}, sample {sample.index}{segment}"
