"""Values of collected rows that are recorded.

Shape legend: T tokens of a row.
"""

import json
import math
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_data.conversation_io import read_conversations
from torchrl_data.display.text import visible
from torchrl_data.images import images_of
from torchrl_data.keys import (
    EPISODE_ID,
    FULL,
    GROUP_ID,
    PARENT_SEGMENT,
    SEGMENT,
)
from torchrl_envs.datasets.difficulty_pools import IDS_PER_EPOCH
from torchrl_envs.entries.rewards import reward_of_row
from torchrl_envs.entries.whole_episodes import episode_key


def content_text(message: Mapping[str, Any]) -> str:
    """Text of a message, and of its parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = [part.get("text", "") for part in content or [] if isinstance(part, Mapping)]
    return "\n".join(str(part) for part in parts)


_DIGITS = 5
_PROMPT_CHARACTERS = 160


def column_values(values: Tensor, mask: Tensor, *, exact: bool = False) -> list[Any]:
    """A value per token, ``None`` outside of the mask.

    Args:
        values: ``[T]``.
        mask: bool ``[T]``.
        exact: with the digits that tell each number of float32 from its neighbours.
    """
    pairs = zip(values.tolist(), mask.tolist(), strict=True)
    if exact:
        return [
            _shortest(value) if here and math.isfinite(value) else None for value, here in pairs
        ]
    if values.is_floating_point():
        return [rounded(value) if here else None for value, here in pairs]
    return [value if here else None for value, here in pairs]


def _shortest(value: float) -> float:
    """The shortest decimal of which float32 makes the same number."""
    return float(str(np.float32(value)))


def rounded(value: float) -> float | None:
    """A value with the digits that are recorded; None where it is not finite."""
    return round(value, _DIGITS) if math.isfinite(value) else None


def number(value: Tensor) -> float | None:
    """The sum of a tensor; ``None`` for what is not finite."""
    total = float(value.sum())
    return total if math.isfinite(total) else None


def reward_of(row: TensorDictBase) -> float | None:
    """Reward of its episode; ``None`` where it could not be scored."""
    reward = reward_of_row(row)
    return reward if math.isfinite(reward) else None


def group_name(group_id: int) -> str:
    """``epoch/row`` of the data."""
    return "/".join(map(str, divmod(group_id, IDS_PER_EPOCH)))


def group_of(row: TensorDictBase) -> str:
    """The name of its group; of the episode, where there are no groups."""
    group = row.get(GROUP_ID, None)
    return f"episode {int(row.get(EPISODE_ID))}" if group is None else group_name(int(group))


def row_key(row: TensorDictBase) -> tuple[int, int, int]:
    """Return which row of which episode of which group it is."""
    return *episode_key(row), int(row.get(SEGMENT, 0))


def opens_episode(row: TensorDictBase) -> bool:
    """Return whether its episode begins with it; others left a row, such as that of a helper."""
    return int(row.get(PARENT_SEGMENT, -1)) == -1


def recorded_prompt(row: TensorDictBase) -> tuple[str, str]:
    """A digest of the prompt's tokens and images, and the beginning of its last message."""
    conversation = read_conversations(row, FULL, who="RolloutRecorder")
    ids = conversation.ids(0)[: conversation.num_tokens_before_policy(0)]
    messages = conversation.messages(0)[: conversation.first_response(0)]
    images = images_of(messages)
    shown = [ids, images] if images else ids
    digest = blake2b(json.dumps(shown).encode(), digest_size=6).hexdigest()
    content = content_text(messages[-1]) if messages else ""
    text = visible(" ".join(content[: 4 * _PROMPT_CHARACTERS].split()))
    if len(text) > _PROMPT_CHARACTERS:
        text = text[: _PROMPT_CHARACTERS - 1] + "…"
    return digest, text
