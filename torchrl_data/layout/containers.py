"""The layout of a batch: ``prompt``, ``response`` and ``full`` of whatever a batch holds.

``full = prompt + response``, always, to the token. Rows are ragged; padded, nested and packed are
views (see ``ragged``). The arithmetic of the conversions is in ``columns``.

Shape legend: B rows, T tokens of a row (ragged), M messages of a row (ragged).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from tensordict import (
    TensorClass,
    TensorDict,
    lazy_stack,
)
from torch import Tensor

from torchrl_data.conversation.batched_object import snapshot_of
from torchrl_data.conversation.conversations import Conversations
from torchrl_data.conversation.tensorclass_utils import attribute_reader, documented
from torchrl_data.history.history import History
from torchrl_data.history.rendering import encoder_for
from torchrl_data.keys import FULL, LOG_PROBS, MASKS, PROMPT, RESPONSE, TOKENS
from torchrl_data.ragged.groups import value_stack
from torchrl_data.ragged.packed import entries_of

from .columns import (
    PARTS,
    chat_columns,
    conversation_columns,
    decode_columns,
    encode_columns,
    pad_columns,
    unpad_columns,
)
from .export import HistoryView
from .token_rows import TokenRows, indexed_by_name, is_padded, read_token_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@documented
@indexed_by_name
@attribute_reader(read_token_rows)
class Tokens(TokenRows, TensorClass["nocast"]):
    """Token ids, int64: ragged, or padded (prompt on the left, response on the right).

    Ragged entries read as lists of B tensors ``[T_i]``, padded ones as tensors ``[B, T]``.
    """

    _documentation = __doc__

    prompt: Tensor | None = None
    """Shape ``[B, T]``."""
    response: Tensor | None = None
    """Shape ``[B, T]``."""
    full: Tensor | None = None
    """Prompt, then response; shape ``[B, T]``."""
    padded: bool | None = None
    """Whether the rows are padded."""

    def to_text(
        self, tokenizer: "PreTrainedTokenizerBase", skip_special_tokens: bool = False
    ) -> "Text":
        """Decode ragged rows.

        Args:
            tokenizer: decodes.
            skip_special_tokens: leave special tokens out.

        Raises:
            ValueError: the rows are padded (a pad id may be a real token too).
        """
        if is_padded(self):
            raise ValueError(
                "Padded tokens can't be decoded, as a pad id may be a real token too. Call "
                "to_ragged(masks) first."
            )
        columns = {name: self.rows(name) for name in _present_parts(self)}
        return Text.from_rows(**decode_columns(columns, tokenizer, skip_special_tokens))

    def to_history(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        chat_template_name: str | None = None,
        skip_special_tokens: bool = False,
    ) -> "ChatHistory":
        """Decode and parse: see :meth:`to_text` and :meth:`Text.to_history`."""
        text = self.to_text(tokenizer, skip_special_tokens)
        return text.to_history(tokenizer, chat_template_name)

    def to_padded(self, pad_token_id: int) -> "tuple[Tokens, Masks]":
        """Padded tokens: prompt on the left, response on the right, full is both.

        Args:
            pad_token_id: fills the gaps.

        Returns:
            The tokens ``[B, T]`` and their attention mask, without which padding can't be told
            from tokens.
        """
        dense = pad_columns(self.rows(PROMPT), self.rows(RESPONSE), pad_token_id)
        size = torch.Size([len(dense.prompt)])
        tokens = Tokens(
            prompt=dense.prompt,
            response=dense.response,
            full=torch.cat([dense.prompt, dense.response], -1),
            padded=True,
            batch_size=size,
        )
        masks = Masks(all_attention_mask=dense.attention_mask, padded=True, batch_size=size)
        return tokens, masks

    def to_ragged(self, masks: "Masks") -> "Tokens":
        """Undo :meth:`to_padded`.

        Args:
            masks: what :meth:`to_padded` gave beside the tokens.
        """
        entries = entries_of(self)
        mask = entries_of(masks).get("all_attention_mask")
        width = entries.get(PROMPT).shape[-1]
        return Tokens.from_rows(**unpad_columns(entries.get(FULL), mask, width))


@documented
@indexed_by_name
@attribute_reader(read_token_rows)
class LogProbs(TokenRows, TensorClass["nocast"]):
    """Log-probabilities, float32 in nats, aligned with the tokens of the same name.

    Ragged entries read as lists of B tensors ``[T_i]``, padded ones as tensors ``[B, T]``.
    """

    _documentation = __doc__

    prompt: Tensor | None = None
    """Shape ``[B, T]``."""
    response: Tensor | None = None
    """Shape ``[B, T]``."""
    full: Tensor | None = None
    """Shape ``[B, T]``; 0 where the policy did not sample."""
    padded: bool | None = None
    """Whether the rows are padded."""


@documented
@indexed_by_name
@attribute_reader(read_token_rows)
class Masks(TokenRows, TensorClass["nocast"]):
    """Masks over ``("tokens", "full")``, bool.

    Ragged entries read as lists of B tensors ``[T_i]``, padded ones as tensors ``[B, T]``.
    """

    _documentation = __doc__

    all_attention_mask: Tensor | None = None
    """True on tokens, False on padding; shape ``[B, T]``."""
    all_assistant_mask: Tensor | None = None
    """True on what the policy sampled, end-of-turn token included; shape ``[B, T]``."""
    padded: bool | None = None
    """Whether the rows are padded."""


TOKEN_GROUPS: Final[dict[str, Any]] = {TOKENS: Tokens, LOG_PROBS: LogProbs, MASKS: Masks}
"""The class of each group of token rows; others are TensorDicts."""


@documented
class Text(TensorClass["nocast"]):
    """Strings, one per row."""

    _documentation = __doc__

    prompt: str | list[str] | None = None
    response: str | list[str] | None = None
    full: str | list[str] | None = None

    @classmethod
    def from_rows(cls, **columns: Sequence[str]) -> Self:
        """A group of strings.

        Args:
            **columns: for each entry, one string a row; at least one entry.
        """
        size = torch.Size([len(next(iter(columns.values())))])
        leaves = {name: value_stack(values) for name, values in columns.items()}
        return cls._from_tensordict(TensorDict(leaves, batch_size=size), {})

    def _columns(self) -> dict[str, list[str]]:
        columns = {}
        for name in _present_parts(self):
            value = getattr(self, name)
            columns[name] = [value] if isinstance(value, str) else list(value)
        return columns

    def to_tokens(self, tokenizer: "PreTrainedTokenizerBase") -> Tokens:
        """Tokenise: prompt and response each by itself, full is their concatenation.

        Args:
            tokenizer: encodes, without adding special tokens.
        """
        return Tokens.from_rows(**encode_columns(self._columns(), tokenizer))

    def to_history(
        self, tokenizer: "PreTrainedTokenizerBase", chat_template_name: str | None = None
    ) -> "ChatHistory":
        """Parse what a chat template rendered.

        Args:
            tokenizer: decides the inverse parser.
            chat_template_name: decides it instead.

        Raises:
            ValueError: a text can't be parsed.
        """
        columns = self._columns()
        parsed: dict[str, list[Any]] = {
            name: [History.from_text(row, chat_template_name, tokenizer=tokenizer) for row in rows]
            for name, rows in columns.items()
            if name != RESPONSE or len(columns) == 1
        }
        if PROMPT in parsed and FULL in parsed:
            pairs = zip(parsed[PROMPT], parsed[FULL], strict=True)
            parsed[RESPONSE] = [full[len(prompt) :] for prompt, full in pairs]
        size = [len(next(iter(parsed.values())))]
        return ChatHistory.of({name: lazy_stack(rows) for name, rows in parsed.items()}, size)

    @classmethod
    def default_spec(cls, shape: Sequence[int] = (-1,), keys: Sequence[str] | None = None) -> Any:
        """A spec of such a group; ``shape`` is that of the batch, ``keys`` the entries."""
        from torchrl.data import Composite, NonTensor

        size = torch.Size(shape)
        leaves = {key: NonTensor(shape=size, example_data="") for key in keys or PARTS}
        return Composite(leaves, shape=size[:-1], data_cls=cls, step_mdp_static=True)


def _read_history(group: Any, name: str, read: Callable[[Any, str], Any]) -> Any:
    if name not in PARTS:
        return read(group, name)
    conversations = snapshot_of(group._tensordict.get(name, None), Conversations)
    if conversations is None:
        return read(group, name)
    return HistoryView(name).show(conversations, group.batch_size)


@documented
@attribute_reader(_read_history)
class ChatHistory(TensorClass["nocast"]):
    """Messages of ``prompt``, ``response`` and ``full``, each a ``History [B, M]``.

    Inside the loop each is one opaque :class:`Conversations` for the whole batch; reading an
    attribute builds the ``History`` of the rows that are asked for.
    """

    _documentation = __doc__

    prompt: History | None = None
    """The conversation so far."""
    response: History | None = None
    """What the policy answered."""
    full: History | None = None
    """Both."""

    def __post_init__(self) -> None:
        entries = entries_of(self)
        for name in PARTS:
            value: Any = entries.get(name, None)
            if isinstance(value, History) and self.batch_dims and value.ndim == self.batch_dims:
                # One message a row.
                entries.set(name, value.unsqueeze(-1))

    @classmethod
    def of(cls, parts: Mapping[str, Any], batch_size: Sequence[int]) -> "ChatHistory":
        """Build from leaves or histories, unchecked.

        Args:
            parts: values by name.
            batch_size: of the batch, ``[B]``.
        """
        entries = TensorDict._new_unsafe(dict(parts), batch_size=torch.Size(batch_size))
        return cls._from_tensordict(entries, {})

    def get(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        """The stored leaf, as TensorDict's ``get``; attributes build a ``History`` instead."""
        return entries_of(self).get(key, *args, **kwargs)

    def apply_chat_template(self, **kwargs: Any) -> Any:
        """Render the prompt, or the full conversation if there is none: see :class:`History`."""
        history = self.prompt if self.prompt is not None else self.full
        if history is None:
            raise ValueError("This ChatHistory has neither a prompt nor a full conversation.")
        return history.apply_chat_template(**kwargs)

    def to_tokens(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        chat_template_name: str | None = None,
        chat_template: str | None = None,
    ) -> Tokens:
        """Tokenise; conversations that have their tokens give exactly those.

        Args:
            tokenizer: encodes.
            chat_template_name: which template, instead of the tokenizer's.
            chat_template: Jinja source, instead of the tokenizer's.

        Raises:
            ValueError: the full conversation does not start with the prompt.
        """
        for name in (FULL, PROMPT):
            conversations = snapshot_of(entries_of(self).get(name, None), Conversations)
            if conversations is not None and any(p.num_tokens for p in conversations.positions):
                return Tokens.from_rows(**conversation_columns(conversations))
        if self.prompt is None and self.full is None:
            raise ValueError("This ChatHistory has neither a prompt nor a full conversation.")
        encoder = encoder_for(tokenizer, chat_template_name, chat_template)
        prompt: Any = None if self.prompt is None else self.prompt.to_chats()
        full: Any = None if self.full is None else self.full.to_chats()
        return Tokens.from_rows(**chat_columns(prompt, full, encoder))

    def to_text(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        chat_template_name: str | None = None,
        chat_template: str | None = None,
    ) -> Text:
        """The text of :meth:`to_tokens`."""
        return self.to_tokens(tokenizer, chat_template_name, chat_template).to_text(tokenizer)

    @classmethod
    def default_spec(cls, shape: Sequence[int] = (-1,), keys: Sequence[str] | None = None) -> Any:
        """A spec of such a group; ``shape`` is that of the batch, ``keys`` the entries."""
        from torchrl.data import Composite

        size = torch.Size(shape)
        leaves = {key: History.default_spec((*size, -1)) for key in keys or PARTS}
        return Composite(leaves, shape=size[:-1], data_cls=cls, step_mdp_static=True)


def _refuse_state_dict(group: Any, *_: Any, **__: Any) -> Any:
    del group
    raise RuntimeError(
        "TensorDict's state_dict keeps tensors only: it would leave out the messages, texts and "
        "data rows, and so does a replay buffer's. RunState(buffer=buffer) of collectors saves a "
        "buffer whole, in a CheckpointStore, and loads it without pickle."
    )


# TensorClass writes its own over that of the class body.
ChatHistory.state_dict = _refuse_state_dict  # type: ignore[method-assign]


def _present_parts(group: Any) -> list[str]:
    names = set(entries_of(group).keys())
    return [name for name in PARTS if name in names]
