"""Answers in texts: found, normalised, compared; and whether a text has the format asked for.

The reward functions here have TRL's signature: see ``RewardFunctions``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from torchrl_data.messages import Message

F = TypeVar("F", bound=Callable[..., Any])
_THINK: Final = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_ANSWER: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOTH: Final = re.compile(
    r"\s*<think>((?:(?!</?think>|</?answer>).)*)</think>\s*"
    r"<answer>((?:(?!</?think>|</?answer>).)*)</answer>\s*",
    re.DOTALL,
)


class Tagged(NamedTuple):
    """The contents of the ``<think>`` and ``<answer>`` blocks of a text."""

    think: str
    """In the first block, stripped; empty where there is none."""
    answer: str
    """In the last block, stripped; empty where there is none."""
    thinks: list[str]
    """In all blocks, as it is."""
    answers: list[str]


def text_of_message(message: Mapping[str, Any] | None) -> str:
    """The text of a message; of content parts, that of the text parts."""
    content = None if message is None else message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def final_text(completion: Sequence[Message]) -> str:
    """Return what the policy said last: the text of the last message if it is the assistant's."""
    last = completion[-1] if completion else None
    return text_of_message(last) if last is not None and last["role"] == "assistant" else ""


def as_opened(messages: Sequence[Mapping[str, Any]], opened: str) -> list[Message]:
    """Messages in which the assistant's texts begin with what the prompt opened of them.

    Args:
        messages: what the policy said, and what it was answered.
        opened: such as ``<think>``; see ``ConversationEncoder.opened_text``. What begins with it
            already stays.
    """
    shown: list[Message] = []
    for message in messages:
        content = message.get("content")
        is_own = message["role"] == "assistant" and isinstance(content, str)
        if is_own and not str(content).lstrip().startswith(opened.strip()):
            message = {**message, "content": f"{opened}{content}"}
        shown.append(dict(message))
    return shown


def read_tags(text: str) -> Tagged:
    """The reasoning and the answer of a text."""
    thinks, answers = _THINK.findall(text), _ANSWER.findall(text)
    return Tagged(
        think=thinks[0].strip() if thinks else "",
        answer=answers[-1].strip() if answers else "",
        thinks=thinks,
        answers=answers,
    )


def hash_answer(text: str) -> str | None:
    """Text after the last ``####``, up to the end of its line; GSM8K's format."""
    if "####" not in text:
        return None
    return text.rsplit("####", 1)[1].strip().split("\n")[0].strip()


def normalize_number(text: str) -> str:
    """A number as it is compared: ``"$1,200.50 "`` is ``"1200.5"``, ``"+07"`` is ``"7"``."""
    # Anything that is no decimal number comes back stripped and otherwise as it is.
    plain = text.strip()
    for sign in ",$%":
        plain = plain.replace(sign, "")
    match = re.fullmatch(r"([+-]?)([0-9]*)\.?([0-9]*)\.?", plain.strip())
    if match is None or not (match[2] or match[3]):
        return text.strip()
    whole, fraction = match[2].lstrip("0") or "0", match[3].rstrip("0")
    minus = "-" if match[1] == "-" and (whole != "0" or fraction) else ""
    return f"{minus}{whole}.{fraction}" if fraction else f"{minus}{whole}"


def reads_messages(function: F) -> F:
    """Mark a reward function that gets messages where the data's prompts are strings, too."""
    function.needs_messages = True  # type: ignore[attr-defined]
    return function


@reads_messages
def exact_match(
    completions: Sequence[Sequence[Message]], answer: Sequence[Any], **_: Any
) -> list[float]:
    """1 where the last message is the answer, but for white space around it."""
    return [
        float(final_text(completion).strip() == str(right).strip())
        for completion, right in zip(completions, answer, strict=True)
    ]


@reads_messages
def hash_answer_match(
    completions: Sequence[Sequence[Message]], answer: Sequence[str], **_: Any
) -> list[float]:
    """1 where the number after the last ``####`` is that of the answer."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        found, expected = hash_answer(final_text(completion)), hash_answer(right)
        wanted = normalize_number(right if expected is None else expected)
        rewards.append(float(found is not None and normalize_number(found) == wanted))
    return rewards


@reads_messages
def think_answer_format(completions: Sequence[Sequence[Message]], **_: Any) -> list[float]:
    """1 where the last message is one ``<think>`` block and one ``<answer>`` block."""
    return [float(_BOTH.fullmatch(final_text(chat)) is not None) for chat in completions]
