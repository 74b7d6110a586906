"""Messages and tokens as text for people: what is invisible is made visible."""

import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from torchrl_data.conversation.images import image_label, is_image
from torchrl_data.conversation.record import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEPT: Final = "\n\t"
_REPLACEMENT: Final = "\ufffd"
_MAX_BYTES: Final = 4
_SUSPECT = re.compile(r"[^\x20-\x7e\n\t]")


def visible(text: str) -> str:
    """Text whose control, direction and format characters are spelled out."""
    # Nobody can hide a terminal's escape sequence or turn the direction of a line with the result.
    return _SUSPECT.sub(lambda match: _visible(match.group()), text)


def _visible(character: str) -> str:
    # Zero-width joiners make emoji what they are.
    if character in _KEPT or character == "\u200d":
        return character
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return f"\\u{ord(character):04x}"
    return character


def message_title(message: Message) -> str:
    """Role, and name if there is one."""
    title = visible(str(message["role"]))
    return f"{title} ({visible(str(message['name']))})" if message.get("name") else title


def message_text(message: Message) -> str:
    """What a message says, with its reasoning and its tool calls."""
    parts: list[str] = []
    if message.get("reasoning_content"):
        parts.append(f"(reasoning) {message['reasoning_content']}")
    content: Any = message.get("content")
    if isinstance(content, str):
        parts.append(content)
    else:
        parts += [_part_text(part) for part in content or []]
    for call in message.get("tool_calls") or []:
        function = call.get("function", call) if isinstance(call, dict) else {"name": call}
        parts.append(f"-> {function.get('name')}({function.get('arguments')})")
    return visible("\n".join(part for part in parts if part))


def _part_text(part: Any) -> str:
    if is_image(part):
        return image_label(part)
    if isinstance(part, dict):
        return str(part.get("text") or f"[{part.get('type', 'part')}: {part.get('url') or '...'}]")
    return str(part)


def rewards_of_rows(reward: Any, rewards: Any, num_rows: int) -> list[float | None]:
    """One reward per row, from ``reward`` (of a single row) or ``rewards`` (of each)."""
    if reward is not None and rewards is not None:
        raise ValueError("Give either reward, of a single conversation, or rewards, of each.")
    if rewards is None:
        rewards = [None] * num_rows if reward is None else [reward]
    elif isinstance(rewards, Tensor):
        rewards = rewards.reshape(-1)
    if len(rewards) != num_rows:
        raise ValueError(f"There are {num_rows} rows, but {len(rewards)} rewards.")
    return [None if value is None else float(value) for value in rewards]


def token_texts(
    ids: Sequence[int],
    tokenizer: "PreTrainedTokenizerBase",
    known: dict[int, str] | None = None,
) -> list[str]:
    """The text of each token; tokens that only together make a character share it.

    ``known`` keeps what single tokens spell from call to call.
    """
    known = {} if known is None else known
    if new := sorted(set(ids) - known.keys()):
        decoded = tokenizer.batch_decode([[i] for i in new], clean_up_tokenization_spaces=False)
        known.update(zip(new, decoded, strict=True))
    single = [known[i] for i in ids]
    texts: list[str] = []
    while len(texts) < len(ids):
        at = len(texts)
        texts += _character(ids, at, single[at], tokenizer)
    return [visible(text) for text in texts]


def _character(
    ids: Sequence[int], at: int, single: str, tokenizer: "PreTrainedTokenizerBase"
) -> list[str]:
    if _REPLACEMENT in single:
        for count in range(2, _MAX_BYTES + 1):
            joined = str(tokenizer.decode(list(ids[at : at + count])))
            if _REPLACEMENT not in joined and at + count <= len(ids):
                return [joined] + [""] * (count - 1)
    return [single]
