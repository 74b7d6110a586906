"""Whether a conversation can be the policy's prompt; who asks with another one is told so."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from torchrl_data.conversation.conversations import Conversations, waiting_rows
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_data.templates.tools_shown import ToolsNotShownError

from .turns import MOST_TOKENS, PromptTooLongError, RequestError

_WHOLE_CHARACTERS: Final = 8
"""Prompts with at most so many characters for each token are encoded at once."""
_PIECE: Final = 4096
_CUT_TOKENS: Final = 8
"""What a cut through a text may add."""


class PromptChecker:
    """Encodes conversations as the policy does, once it has been seen; until then all may pass."""

    def __init__(self) -> None:
        self._encoder: ConversationEncoder | None = None
        self._bound = self._max_tokens = MOST_TOKENS

    def __getstate__(self) -> dict[str, Any]:
        """What was seen of a policy does not travel: a copy sees its own."""
        return {"_encoder": None, "_bound": self._bound, "_max_tokens": self._bound}

    def bound(self, bounds: Iterable[int]) -> None:
        """What bounds prompts beside the policy's model.

        Args:
            bounds: most tokens of a prompt.
        """
        self._bound = min(bounds, default=MOST_TOKENS)
        self._max_tokens = min(self._max_tokens, self._bound)

    def read_policy(self, policy: Any) -> None:
        """How the policy encodes, and what its model takes.

        Args:
            policy: what answers; one without an encoder reads whatever there is.
        """
        self._encoder = getattr(policy, "encoder", None)
        limit = getattr(getattr(policy, "engine", None), "max_model_len", None)
        self._max_tokens = self._bound if limit is None else min(self._bound, limit - 1)

    def encode(self, conversation: Conversations) -> Conversations:
        """A conversation as a prompt.

        Args:
            conversation: one.

        Raises:
            RequestError: the chat template can't show it, or leaves some of it out.
            PromptTooLongError: there would be no room for an answer.
        """
        encoder = self._encoder
        if encoder is None:
            return conversation
        self._check_length(conversation, encoder)
        try:
            encoded, errors = encoder.encode_rows(conversation)
        except ToolsNotShownError as error:
            raise RequestError(str(error)) from error
        for error in errors.values():
            raise RequestError(f"the chat template can't show the messages: {error}") from error
        num_tokens = encoded.num_tokens(0)
        if num_tokens > self._max_tokens:
            raise PromptTooLongError(num_tokens, self._max_tokens)
        return encoded

    def _check_length(self, conversation: Conversations, encoder: ConversationEncoder) -> None:
        """Refuse a long prompt as soon as enough of it is counted.

        To encode takes some 200 bytes of memory for each character. What has more than a few for
        each token that there is room for is counted piece by piece first, with the tokens that the
        cuts may add left out.
        """
        texts, values = [], list(waiting_rows(conversation))
        while values:
            value = values.pop()
            if isinstance(value, str):
                texts.append(value)
            elif isinstance(value, list | tuple | Mapping):
                values.extend(value.values() if isinstance(value, Mapping) else value)
        if sum(map(len, texts)) <= _WHOLE_CHARACTERS * self._max_tokens:
            return
        text, num_tokens = "\n".join(texts), 0
        for start in range(0, len(text), _PIECE):
            (ids,) = encoder.guard.encode_texts([text[start : start + _PIECE]])
            num_tokens += len(ids) - _CUT_TOKENS
            if num_tokens > self._max_tokens:
                raise PromptTooLongError(num_tokens, self._max_tokens)
