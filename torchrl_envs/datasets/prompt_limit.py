"""Limit of a prompt's length: rows that are longer are refused or skipped."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from torchrl_data.checks import check_counts, check_not_none
from torchrl_data.conversation import Conversations
from torchrl_data.templates.encoder import ConversationEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(eq=False, repr=False)
class PromptLimit:
    """Most tokens that a prompt may have, as the conversation that it opens.

    The system prompt and the chat template count, schemas of tools do not.

    Args:
        max_tokens: rows with a longer prompt are skipped.
        tokenizer: counts.
        chat_template_name: with which built-in template; the tokenizer's own when not given.

    Raises:
        ValueError: ``max_tokens`` is no positive number, or there is no such template.

    Example:
        >>> rows = [{"prompt": "2 + 2?"}, {"prompt": "2 + 2? " * 100}]
        >>> data = DataLoadingPrimer(rows, prompt_limit=PromptLimit(64, tokenizer))
        >>> batch = ChatEnv(batch_size=(2,)).append_transform(data).reset()
        >>> [messages[0]["content"] for messages in batch["history"].prompt.to_chats()]
        ['2 + 2?', '2 + 2?']
        >>> data.skipped.counts
        Counter({'too_long': 1})
    """

    max_tokens: int
    tokenizer: "PreTrainedTokenizerBase"
    _: KW_ONLY
    chat_template_name: str | None = None

    def __post_init__(self) -> None:
        check_not_none("PromptLimit", max_tokens=self.max_tokens)
        check_counts("PromptLimit", max_tokens=self.max_tokens)
        named: Any = {"chat_template_name": self.chat_template_name}
        self._encoder = ConversationEncoder(self.tokenizer, **named)

    def error(self, prompt: str | list[dict[str, Any]], system_prompt: str | None) -> str:
        """That a prompt is too long, or ``""``."""
        return length_error(self._encoder, self.max_tokens, prompt, system_prompt)


def length_error(
    encoder: ConversationEncoder,
    max_tokens: int,
    prompt: str | list[dict[str, Any]],
    system_prompt: str | None,
) -> str:
    """That a prompt has more tokens than are allowed, or ``""``."""
    messages = opening_messages(prompt, system_prompt)
    opened = encoder.encode_rows(Conversations.from_messages([messages], goes_on=True))
    length = opened.conversations.num_tokens(
        0
    )  # 0 of one that can't be encoded, which is told then
    if length <= max_tokens:
        return ""
    return f"the prompt has {length} tokens, {max_tokens} are allowed"


def opening_messages(prompt: str | Sequence[Any], system_prompt: str | None) -> list[Any]:
    """The conversation that a prompt opens, after the system prompt unless it has its own."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system_prompt is not None and messages[0]["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *messages]
    return list(messages)
