"""Messages and tokens as text for people: invisible characters are made visible."""

import math
import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from torchrl_data.images import image_label, is_image
from torchrl_data.messages import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_REPLACEMENT: Final = "\ufffd"
_SUSPECT = re.compile(r"[^\x20-\x7e\n\t\u200d]")  # zero-width joiners make emoji what they are


def visible(text: str) -> str:
    """Text whose control, direction and format characters are spelled out."""
    # Nobody can hide a terminal's escape sequence or turn the direction of a line with the result.
    suspects = set(_SUSPECT.findall(text))
    hidden = [c for c in suspects if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    return text.translate({ord(c): f"\\u{ord(c):04x}" for c in hidden}) if hidden else text


def message_title(message: Message) -> str:
    """Role, and name if there is one."""
    title = visible(str(message["role"]))
    return f"{title} ({visible(str(message['name']))})" if message.get("name") else title


def message_text(message: Message) -> str:
    """Return what a message says, with its reasoning and its tool calls."""
    parts: list[str] = []
    if message.get("reasoning_content"):
        parts.append(f"(reasoning) {message['reasoning_content']}")
    content: Any = message.get("content")
    pieces: Sequence[Any] = [content] if isinstance(content, str) else content or []
    for part in pieces:
        if is_image(part):
            parts.append(image_label(part))
        elif isinstance(part, dict):
            place = f"[{part.get('type', 'part')}: {part.get('url') or '...'}]"
            parts.append(str(part.get("text") or place))
        else:
            parts.append(str(part))
    for call in message.get("tool_calls") or []:
        function = call.get("function", call) if isinstance(call, dict) else {"name": call}
        parts.append(f"-> {function.get('name')}({function.get('arguments')})")
    return visible("\n".join(part for part in parts if part))


def rewards_of_rows(reward: Any, rewards: Any, num_rows: int) -> list[float | None]:
    """A reward per row, from ``reward`` (of a single row) or ``rewards`` (of each)."""
    if reward is not None and rewards is not None:
        raise ValueError("Give either reward, of a single conversation, or rewards, of each.")
    if rewards is None:
        rewards = [None] * num_rows if reward is None else [reward]
    elif isinstance(rewards, Tensor):
        rewards = rewards.reshape(-1)
    if len(rewards) != num_rows:
        raise ValueError(f"There are {num_rows} rows, but {len(rewards)} rewards.")
    return [None if value is None else float(value) for value in rewards]


def reward_text(reward: float) -> str:
    """The line that shows a reward; NaN stands for an episode that could not be scored."""
    return "reward: none (not scored)" if math.isnan(reward) else f"reward: {reward:g}"


def token_texts(
    ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase", known: dict[int, str] | None = None
) -> list[str]:
    """The text of each token; tokens that only together make a character share it.

    ``known`` keeps what single tokens spell from call to call.
    """
    known = {} if known is None else known
    if new := sorted(set(ids) - known.keys()):
        decoded = tokenizer.batch_decode([[i] for i in new], clean_up_tokenization_spaces=False)
        known.update(zip(new, decoded, strict=True))
    texts: list[str] = []
    while (at := len(texts)) < len(ids):
        text, end = known[ids[at]], at + 1
        while _REPLACEMENT in text and end < min(at + 4, len(ids)):  # bytes of a character
            end += 1
            text = str(tokenizer.decode(list(ids[at:end])))
        is_whole = _REPLACEMENT not in text
        texts += [text, *[""] * (end - at - 1)] if is_whole else [known[ids[at]]]
    return [visible(text) for text in texts]
