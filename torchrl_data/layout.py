"""Layout of a batch: ``prompt``, ``response`` and ``full``, as text, tokens, masks and log-probs.

``full = prompt + response``, always, to the token. Rows are ragged; padded, nested and packed are
views (see :mod:`torchrl_data.ragged`).

Shape legend: B rows, T tokens of a row (ragged), M messages of a row (ragged).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from tensordict import TensorClass, TensorDict, lazy_stack
from torch import Tensor

from .batched_object import snapshot_of, value_stack
from .chat_encoders import encoder_for
from .conversation import Conversations, Source
from .conversation_view import PARTS, ConversationView, split_columns
from .history import History
from .keys import FULL, LOG_PROBS, MASKS, PROMPT, RESPONSE, TOKENS
from .ragged.packed import entries_of, pad
from .ragged.token_rows import TokenRows, is_padded, token_rows
from .templates.registry import resolve_template
from .tensorclass import documented

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@token_rows
class Tokens(TokenRows, TensorClass["nocast"]):
    """Token ids, int64: ragged, or padded (prompt on the left, response on the right).

    Ragged entries read as lists of B tensors ``[T_i]``, padded ones as tensors ``[B, T]``.

    Example:
        >>> tokens = Tokens.from_rows(
        ...     prompt=[torch.tensor([5, 6]), torch.tensor([7])],
        ...     response=[torch.tensor([8]), torch.tensor([9, 10])],
        ... )
        >>> tokens.response
        [tensor([8]), tensor([ 9, 10])]
        >>> padded, masks = tokens.to_padded(pad_token_id=0)
        >>> padded.full  # [B, T]: prompts on the left, responses on the right
        tensor([[ 5,  6,  8,  0],
                [ 0,  7,  9, 10]])
        >>> masks.all_attention_mask[0]
        tensor([ True,  True,  True, False])
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
        texts = {
            name: tokenizer.batch_decode(
                [row.tolist() for row in self.rows(name)],
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
            for name in _present_parts(self)
        }
        return Text.from_rows(**texts)

    def to_history(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        chat_template_name: str | None = None,
        skip_special_tokens: bool = False,
    ) -> "ChatHistory":
        """Decode and parse: see :meth:`to_text` and :meth:`Text.to_history`."""
        return self.to_text(tokenizer, skip_special_tokens).to_history(
            tokenizer, chat_template_name
        )

    def to_padded(self, pad_token_id: int) -> "tuple[Tokens, Masks]":
        """Padded tokens: prompt on the left, response on the right, full is both.

        Args:
            pad_token_id: fills the gaps.

        Returns:
            The tokens ``[B, T]`` and their attention mask, without which padding can't be told
            from tokens.
        """
        parts, real = [], []
        for name, side in ((PROMPT, "left"), (RESPONSE, "right")):
            rows = self.rows(name)
            ones = [torch.ones_like(row, dtype=torch.bool) for row in rows]
            parts.append(pad(rows, value=pad_token_id, side=side))
            real.append(pad(ones, value=False, side=side))
        whole: dict[str, Any] = {"padded": True, "batch_size": parts[0].shape[:1]}
        tokens = Tokens(prompt=parts[0], response=parts[1], full=torch.cat(parts, -1), **whole)
        return tokens, Masks(all_attention_mask=torch.cat(real, -1), **whole)

    def to_ragged(self, masks: "Masks") -> "Tokens":
        """Undo :meth:`to_padded`.

        Args:
            masks: what :meth:`to_padded` gave beside the tokens.
        """
        entries = entries_of(self)
        mask = entries_of(masks).get("all_attention_mask")
        width = entries.get(PROMPT).shape[-1]
        full = [row[real] for row, real in zip(entries.get(FULL), mask, strict=True)]
        return Tokens.from_rows(**split_columns(full, mask[:, :width].sum(-1).tolist()))


@token_rows
class LogProbs(TokenRows, TensorClass["nocast"]):
    """Log-probabilities, float32 in nats, aligned with the tokens of the same name.

    Ragged entries read as lists of B tensors ``[T_i]``, padded ones as tensors ``[B, T]``.

    Example:
        >>> response = [torch.tensor([-0.5, -1.0]), torch.tensor([-2.0])]
        >>> log_probs = LogProbs.from_rows(response=response)
        >>> [values.shape for values in log_probs.response]
        [torch.Size([2]), torch.Size([1])]
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


@token_rows
class Masks(TokenRows, TensorClass["nocast"]):
    """Masks over ``("tokens", "full")``, bool.

    Ragged entries read as lists of B tensors ``[T_i]``, padded ones as tensors ``[B, T]``.

    Example:
        >>> mask = torch.tensor([False, True, True])
        >>> masks = Masks.from_rows(all_assistant_mask=[mask, mask[1:]])
        >>> masks.all_assistant_mask
        [tensor([False,  True,  True]), tensor([True, True])]
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
        columns = {}
        for name, rows in self._columns().items():
            encoded: Any = tokenizer(rows, add_special_tokens=False)["input_ids"]
            columns[name] = [torch.tensor(ids, dtype=torch.int64) for ids in encoded]
        if PROMPT in columns and RESPONSE in columns:
            pairs = zip(columns[PROMPT], columns[RESPONSE], strict=True)
            columns[FULL] = [torch.cat(pair) for pair in pairs]
        return Tokens.from_rows(**columns)

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


@documented
class ChatHistory(TensorClass["nocast"]):
    """Messages of ``prompt``, ``response`` and ``full``, each a ``History [B, M]``.

    Inside the loop each is one opaque :class:`Conversations` for the whole batch; reading an
    attribute builds the ``History`` of the rows that are asked for.

    Example:
        >>> prompt = History.from_chats([[{"role": "user", "content": "hello"}]])
        >>> batch = TensorDict(batch_size=[1])
        >>> batch["history"] = ChatHistory(prompt=prompt, batch_size=[1])
        >>> batch["history"].prompt.shape  # [B, M]
        torch.Size([1, 1])
        >>> batch["history"].prompt.to_chats()
        [[{'role': 'user', 'content': 'hello'}]]
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

    def _read_attribute(self, name: str, read: Callable[[Any, str], Any]) -> Any:
        group: Any = self
        leaf = group._tensordict.get(name, None) if name in PARTS else None
        conversations = snapshot_of(leaf, Conversations)
        if conversations is None:
            return read(self, name)
        return ConversationView(name).show(conversations, self.batch_size)

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
                return conversation_tokens(conversations)[0]
        if self.prompt is None and self.full is None:
            raise ValueError("This ChatHistory has neither a prompt nor a full conversation.")
        template = resolve_template(
            tokenizer, chat_template=chat_template, chat_template_name=chat_template_name
        )
        encoder = encoder_for(tokenizer, template, {})
        columns: dict[str, list[Tensor]] = {}
        for name, history in ((PROMPT, self.prompt), (FULL, self.full)):
            chats: Any = [] if history is None else history.to_chats()
            for chat, row in zip(
                chats,
                encoder.encode_chats(chats, add_generation_prompt=name == PROMPT),
                strict=True,
            ):
                end = len(row.ids)
                if name == FULL and chat[-1]["role"] == "assistant" and Source.MODEL in row.sources:
                    end -= row.sources[::-1].index(Source.MODEL)  # where a policy's response ends
                ids = torch.tensor(row.ids[:end], dtype=torch.int64)
                columns.setdefault(name, []).append(ids)
        if len(columns) < 2:
            return Tokens.from_rows(**columns)
        for row, (start, ids) in enumerate(zip(columns[PROMPT], columns[FULL], strict=True)):
            if not torch.equal(ids[: len(start)], start):
                raise ValueError(
                    f"Row {row}: the full conversation does not begin with the tokens of the "
                    f"prompt ({len(start)} tokens), so there is no response to tell apart. The "
                    "messages of the prompt must be the first of the full conversation."
                )
        starts = [len(start) for start in columns[PROMPT]]
        return Tokens.from_rows(**split_columns(columns[FULL], starts))

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


def _refuse_state_dict(*_: Any, **__: Any) -> Any:
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


def conversation_tokens(conversations: Conversations) -> tuple[Tokens, Masks, LogProbs]:
    """The ragged groups of conversations, with exactly the tokens that they hold.

    Args:
        conversations: B rows.

    Returns:
        Tokens, masks and log-probs, each ``[B, T]``.
    """
    rows = range(len(conversations))
    starts = [position.response_start for position in conversations.positions]
    tokens = split_columns([conversations.token_ids(i) for i in rows], starts)
    log_probs = split_columns([conversations.log_probs(i) for i in rows], starts)
    masks = Masks.from_rows(
        all_attention_mask=[torch.ones_like(ids, dtype=torch.bool) for ids in tokens[FULL]],
        all_assistant_mask=[conversations.assistant_mask(i) for i in rows],
    )
    return Tokens.from_rows(**tokens), masks, LogProbs.from_rows(**log_probs)
