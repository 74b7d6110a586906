"""Whether a program's conversation can be the policy's prompt; it is told where it can't."""

from collections.abc import Mapping
from typing import Any, Final

from torchrl_data.conversation import Conversations, waiting_rows
from torchrl_data.templates.content_shown import ToolsNotShownError
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_envs.agents import turns

_WHOLE_CHARACTERS: Final = 8
"""Prompts with at most so many characters for each token are encoded at once."""
_PIECE: Final = 4096
_CUT_TOKENS: Final = 8
"""What a cut through a text may add."""


def as_prompt(
    conversation: Conversations, encoder: ConversationEncoder | None, max_tokens: int
) -> Conversations:
    """A conversation as the policy's prompt.

    Args:
        conversation: one.
        encoder: the policy's; without one all may pass, as they are.
        max_tokens: of a prompt.

    Raises:
        RequestError: the chat template can't show it, or leaves some of it out.
        PromptTooLongError: there would be no room for an answer.
    """
    if encoder is None:
        return conversation
    _check_length(conversation, encoder, max_tokens)
    try:
        encoded, errors = encoder.encode_rows(conversation)
    except ToolsNotShownError as error:
        raise turns.RequestError(str(error)) from error
    for error in errors.values():
        raise turns.RequestError(f"the chat template can't show the messages: {error}") from error
    num_tokens = encoded.num_tokens(0)
    if num_tokens > max_tokens:
        raise turns.PromptTooLongError(num_tokens, max_tokens)
    return encoded


def _check_length(
    conversation: Conversations, encoder: ConversationEncoder, max_tokens: int
) -> None:
    """Refuse a long prompt as soon as enough of it is counted.

    To encode takes some 200 bytes of memory for each character. What has more than a few for each
    token that there is room for is counted piece by piece first, with the tokens that the cuts may
    add left out.
    """
    texts: list[str] = []
    values: list[Any] = list(waiting_rows(conversation))
    while values:
        value = values.pop()
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, list | tuple | Mapping):
            values.extend(value.values() if isinstance(value, Mapping) else value)
    if sum(map(len, texts)) <= _WHOLE_CHARACTERS * max_tokens:
        return
    text, num_tokens = "\n".join(texts), 0
    for start in range(0, len(text), _PIECE):
        (ids,) = encoder.guard.encode_texts([text[start : start + _PIECE]])
        num_tokens += len(ids) - _CUT_TOKENS
        if num_tokens > max_tokens:
            raise turns.PromptTooLongError(num_tokens, max_tokens)
