"""Collected rows as the values that are recorded.

Shape legend: T tokens of a row.
"""

import json
import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_data.conversation.batched_object import read_objects
from torchrl_data.conversation.conversations import Conversations
from torchrl_data.conversation.images import described, images_of
from torchrl_data.display.display_text import token_texts, visible
from torchrl_data.keys import (
    ENTROPY,
    EPISODE_ID,
    FULL,
    GROUP_ID,
    NUM_SEGMENTS,
    NUM_TOOL_ERRORS,
    POLICY_VERSION,
    REWARD,
    REWARDS,
    ROW,
    SCORABLE,
    SEGMENT,
    STOP_REASON,
    TOOL_CALLS,
    TRUNCATED,
)
from torchrl_data.layout.conversation_io import read_conversations
from torchrl_envs.datasets.primer import IDS_PER_EPOCH
from torchrl_envs.entries.rewards import REWARD_ERRORS
from torchrl_envs.rewards.calls import LOGGED_EXTRA, LOGGED_METRICS

from .provenance import token_spans
from .samples import RecordedToolCall, RolloutSample, SampleTokens
from .scores import RowScores, TrainerScores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DIGITS = 5
_PROMPT_CHARACTERS = 160


class RowReader:
    """Reads rows of a collector.

    Args:
        tokenizer: spells tokens.
        scores: of the trainer.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", scores: TrainerScores) -> None:
        self._tokenizer = tokenizer
        self._scores = scores
        self._known_texts: dict[int, str] = {}

    def sample(
        self, row: TensorDictBase, step: int, index: int, advantage: Tensor | None
    ) -> RolloutSample:
        """A row as it is recorded.

        Args:
            row: of a batch, without batch size.
            step: of training.
            index: of its episode in the group.
            advantage: that it was trained with, if it was.
        """
        conversation = conversation_of(row)
        mask = conversation.assistant_mask(0)
        calls = (read_objects(row, TOOL_CALLS)[0] or {"calls": []})["calls"]
        logged = {
            str(name): value
            for key in (LOGGED_METRICS, LOGGED_EXTRA)
            for name, value in (read_objects(row, key)[0] or {}).items()
        }
        errors = row.get(NUM_TOOL_ERRORS, None)
        tokens = self._tokens(conversation, mask, advantage)
        return RolloutSample(
            step=step,
            group_id=group_of(row),
            index=index,
            segment=int(row.get(SEGMENT, 0)),
            num_segments=int(row.get(NUM_SEGMENTS, 1)),
            reward=reward_of(row),
            rewards={str(name): number(value) for name, value in row.get(REWARDS, {}).items()},
            reward_errors=_text(read_objects(row, REWARD_ERRORS, "")[0]),
            advantage=_advantage_of_row(advantage, mask),
            stop_reason=str(read_objects(row, STOP_REASON, "")[0]),
            is_truncated=bool(row.get(TRUNCATED).any()),
            num_turns=int(row.get("num_turns")),
            policy_version=_version(row.get(POLICY_VERSION)),
            prompt_tokens=conversation.num_tokens_before_policy(0),
            sampled_tokens=int(mask.sum()),
            total_tokens=len(mask),
            tool_calls=[RecordedToolCall(**call) for call in calls],
            num_tool_errors=0 if errors is None else int(errors),
            messages=described(conversation.messages(0)),
            row=described(read_objects(row, ROW)[0]),
            logged=logged,
            tokens=tokens,
        )

    def _tokens(
        self, conversation: Conversations, mask: Tensor, advantage: Tensor | None
    ) -> SampleTokens:
        ids = conversation.token_ids(0)
        texts = token_texts(ids.tolist(), self._tokenizer, self._known_texts)
        scores = self._scores.of(ids)
        entropy = conversation.extra(0).get(ENTROPY)
        advantages = None
        if advantage is not None and advantage.numel() > 1:
            advantages = _column(advantage.reshape(-1), mask)
        return SampleTokens(
            ids=ids.tolist(),
            texts=texts,
            spans=token_spans(conversation.sources(0).tolist(), texts, conversation.messages(0)),
            log_probs=_column(conversation.log_probs(0), mask),
            versions=_column(conversation.policy_versions(0), mask),
            trainer_log_probs=None if scores is None else _scored(scores, scores.log_prob),
            entropy=_scored_entropy(scores) if entropy is None else _column(entropy, mask),
            advantages=advantages,
        )


def conversation_of(row: TensorDictBase) -> Conversations:
    """The one conversation of a row."""
    return read_conversations(row, FULL, who="RolloutRecorder")


def _scored(scores: RowScores, values: Tensor) -> list[float | None]:
    column = torch.zeros(len(scores.trained))
    column[scores.trained] = values
    return _column(column, scores.trained)


def _scored_entropy(scores: RowScores | None) -> list[float | None] | None:
    if scores is None or scores.entropy is None:
        return None
    return _scored(scores, scores.entropy)


def _column(values: Tensor, mask: Tensor) -> list[Any]:
    """One value per token, ``None`` outside of the mask."""
    pairs = zip(values.tolist(), mask.tolist(), strict=True)
    if values.is_floating_point():
        return [_rounded(value) if here else None for value, here in pairs]
    return [value if here else None for value, here in pairs]


def _rounded(value: float) -> float | None:
    return round(value, _DIGITS) if math.isfinite(value) else None


def number(value: Tensor) -> float | None:
    """The sum of a tensor; ``None`` for what is not finite."""
    total = float(value.sum())
    return total if math.isfinite(total) else None


def reward_of(row: TensorDictBase) -> float | None:
    """Of its episode; ``None`` where it could not be scored."""
    scorable = row.get(SCORABLE, None)
    if scorable is not None and not bool(scorable.all()):
        return None
    return number(row.get(REWARD))


def _advantage_of_row(advantage: Tensor | None, mask: Tensor) -> float | None:
    if advantage is None:
        return None
    values = advantage.reshape(-1)
    if len(values) > 1:
        values = values[mask]
    return _rounded(float(values.mean())) if len(values) else None


def _version(value: Any) -> int | str:
    return int(value) if isinstance(value, Tensor) else str(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def group_name(group_id: int) -> str:
    """``epoch/row`` of the data."""
    return "/".join(map(str, divmod(group_id, IDS_PER_EPOCH)))


def group_of(row: TensorDictBase) -> str:
    """The name of its group; of the episode, where there are no groups."""
    group = row.get(GROUP_ID, None)
    return f"episode {int(row.get(EPISODE_ID))}" if group is None else group_name(int(group))


def row_key(row: TensorDictBase) -> tuple[int, int]:
    """Which row of which episode it is."""
    return int(row.get(EPISODE_ID)), int(row.get(SEGMENT, 0))


def prompt_of(row: TensorDictBase) -> tuple[str, str]:
    """A digest of the prompt's tokens and images, and the beginning of its last message."""
    conversation = conversation_of(row)
    ids = conversation.ids(0)[: conversation.num_tokens_before_policy(0)]
    messages = conversation.messages(0)[: conversation.first_response(0)]
    images = images_of(messages)
    shown = [ids, images] if images else ids
    digest = blake2b(json.dumps(shown).encode(), digest_size=6).hexdigest()
    return digest, _beginning(messages)


def _beginning(messages: Sequence[Mapping[str, Any]]) -> str:
    content = messages[-1].get("content") if messages else ""
    if not isinstance(content, str):
        content = " ".join(
            str(part.get("text", "")) for part in content or [] if isinstance(part, Mapping)
        )
    text = visible(" ".join(content[: 4 * _PROMPT_CHARACTERS].split()))
    return text if len(text) <= _PROMPT_CHARACTERS else text[: _PROMPT_CHARACTERS - 1] + "…"
