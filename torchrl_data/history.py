"""The ``History`` of TorchRL: messages as a tensorclass, rendered by a template and parsed back."""

import html
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, Self, get_args
from weakref import WeakKeyDictionary

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)

from .conversation import EncodedMessages, Source
from .messages import (
    PLACEHOLDER_ROLE,
    Message,
    check_messages,
    cut_at_end_mark,
    with_end_mark,
    with_plain_images,
)
from .ragged import documented, entries_of, pad, value_stack
from .templates.encoder import ConversationEncoder
from .templates.template import (
    Suspects,
    control_literals,
    dropped_entries,
    refusal,
    render_template,
    resolve_template,
)

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase


# Parts of a message that are not only text: images, audio, video, files, function calls.

ContentType = Literal["text", "image", "audio", "video", "file", "function_call"]


@documented
class ContentBase(TensorClass["nocast", "shadow"]):
    """One part of a message's content.

    Parts are stacked along a last dimension, one more than the message has.

    Examples:
        >>> from tensordict import lazy_stack
        >>> text = ContentBase(type="text", text="What is this?")
        >>> image = ContentBase(type="image", url="https://example.com/cat.jpg")
        >>> list(lazy_stack([text, image]).type)
        ['text', 'image']

    Raises:
        ValueError: the type is not one of ``text``, ``image``, ``audio``, ``video``, ``file``,
            ``function_call``.
    """

    _documentation = __doc__

    type: ContentType  # type: ignore[override]
    """What the part is."""
    text: str | None = None
    """The text of a ``text`` part."""
    url: str | None = None
    """Where the medium is."""
    data: str | None = None  # type: ignore[override]
    """The medium itself, in base 64."""
    mime_type: str | None = None
    """For instance ``"image/jpeg"``."""
    name: str | None = None
    """File name or description."""
    size: int | None = None  # type: ignore[override]
    """Bytes of a file."""
    function_name: str | None = None
    """The function that a ``function_call`` calls."""
    function_args: dict | None = None
    """Its arguments."""

    def __post_init__(self) -> None:
        types = [*get_args(ContentType)]
        for kind in self.type if isinstance(self.type, list) else [self.type]:
            if isinstance(kind, str) and kind not in types:
                raise ValueError(f"ContentBase has the unknown type {kind!r}; they are {types}.")

    def to_part(self) -> dict[str, Any]:
        """The part as a dictionary of the fields that are set.

        Raises:
            RuntimeError: this is a batch of parts.
        """
        if self.batch_dims:
            raise RuntimeError(
                f"to_part converts one part, this is a batch of shape {tuple(self.batch_size)}; "
                "use to_parts."
            )
        fields = {name: getattr(self, name) for name in type(self).__annotations__}
        return {name: value for name, value in fields.items() if value is not None}

    def to_parts(self) -> list[dict[str, Any]]:
        """The parts of a stack ``[P]``, as dictionaries."""
        return [part.to_part() for part in self.unbind(0)]


# The fields of a ``History``, and how a message in the chat format maps to them.

OPTIONAL: Final = (
    *("tool_calls", "tool_responses", "tool_call_id", "name", "reasoning_content", "metadata"),
)
"""Fields that most messages lack."""
FIELDS: Final = ("role", "content", "is_complete", *OPTIONAL)
"""All fields, in order."""


def plain(value: Any) -> Any:
    """Plain lists instead of the lists that write through to a TensorDict."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return value


def _plain_parts(part: Any) -> list[Any]:
    """A part of a content, or a stack of them, without :class:`ContentBase`."""
    if not isinstance(part, ContentBase):
        return [part]
    return part.to_parts() if part.batch_dims else [part.to_part()]


def _message(fields: dict[str, Any]) -> Message:
    """The message in the chat format, without the fields that say nothing."""
    if isinstance(fields["content"], ContentBase):
        fields["content"] = _plain_parts(fields["content"])
    if fields["is_complete"] is not False:
        del fields["is_complete"]
    more = plain(fields.pop("metadata") or {})
    said = {k: plain(v) for k, v in fields.items() if v is not None or k == "content"}
    return said | more


# Chats as text or tokens, with a chat template.
#
# Shape legend: B rows, M messages of a row, T tokens of a row.


def _rendered(
    rows: Sequence[Sequence[Message]],
    template: str,
    variables: Mapping[str, Any],
    *,
    continue_final_message: bool,
    **options: Any,
) -> list[str]:
    """The text of each chat; ``options`` are the tools and whether a turn is opened."""
    known: Suspects = {}
    texts = []

    def render(messages: Sequence[Message]) -> str:
        return render_template(template, messages, variables=variables, **options).text

    for messages in rows:
        text = render(messages)
        if dropped := dropped_entries(messages, render, known):
            raise ValueError(refusal(dropped, messages))
        if continue_final_message:
            text = cut_at_end_mark(render([*messages[:-1], with_end_mark(messages[-1])]))
        texts.append(text)
    return texts


def _tensors(
    rows: Sequence[Sequence[Message]],
    tokenizer: "PreTrainedTokenizerBase",
    template: str,
    variables: dict[str, Any],
    options: dict[str, Any],
    *,
    single: bool,
    padding: bool,
    truncation: bool,
    as_dict: bool,
    with_mask: bool,
) -> Any:
    """Ids, or a TensorDict of them with their masks: a list, one of padded rows, or of one row."""
    max_length = variables.pop("max_length", None)
    chats = [[m for m in row if m["role"] != PLACEHOLDER_ROLE] for row in rows]
    encoded = encoder_for(tokenizer, template, variables).encode_chats(chats, **options)
    if truncation:
        if max_length is None:
            raise ValueError("truncation needs max_length, the most tokens of a row.")
        encoded = [EncodedMessages(r.ids[:max_length], r.sources[:max_length]) for r in encoded]
    columns = {"input_ids": [torch.tensor(row.ids, dtype=torch.int64) for row in encoded]}
    if as_dict:
        columns["attention_mask"] = [torch.ones_like(row) for row in columns["input_ids"]]
    if as_dict and with_mask:
        sampled = [torch.tensor(row.sources) == Source.MODEL for row in encoded]
        columns["assistant_masks"] = [mask.to(torch.int64) for mask in sampled]
    if padding and not single:
        index = tokenizer.pad_token_id
        fill = {"input_ids": index if isinstance(index, int) else 0}
        padded = {
            name: pad(rows, value=fill.get(name, 0), side=tokenizer.padding_side)
            for name, rows in columns.items()
        }
        return TensorDict(padded, batch_size=[len(encoded)]) if as_dict else padded["input_ids"]
    if not as_dict:
        return columns["input_ids"][0] if single else columns["input_ids"]
    dicts = [
        TensorDict(dict(zip(columns, values, strict=True)), batch_size=[])
        for values in zip(*columns.values(), strict=True)
    ]
    return dicts[0] if single else lazy_stack(dicts)


# Encoders are kept, as making one reads the whole vocabulary --------------------------------------

_encoders: WeakKeyDictionary[Any, dict[Any, ConversationEncoder]] = WeakKeyDictionary()


def encoder_for(
    tokenizer: "PreTrainedTokenizerBase", template: str, variables: Mapping[str, Any]
) -> ConversationEncoder:
    """The encoder of a tokenizer and a template; it is kept for the next call."""
    kept = _encoders.setdefault(tokenizer, {})
    key = (template, repr(sorted(variables.items())), len(tokenizer))
    if key not in kept:
        kept[key] = ConversationEncoder(
            tokenizer, chat_template=template, chat_template_kwargs=dict(variables)
        )
    return kept[key]


@cache
def byte_tokenizer(template: str) -> "PreTrainedTokenizerBase":
    """A tokenizer of UTF-8 bytes, and of the control tokens that a template spells."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    control: list[Any] = control_literals(template)
    made.add_tokens(control, special_tokens=True)
    return made


# Conversations as a TensorClass: what people, rewards and tools look at.
#
# ``History`` is a view for whoever asks. The loop itself keeps tokens (see ``conversation``);
# nothing that is trained on is made from a ``History`` again.
#
# Shape legend: B rows, M messages of a row (ragged).


@documented
class History(TensorClass["nocast"]):
    """A message, a conversation ``[M]``, or a batch of conversations ``[B, M]`` (M may be ragged).

    Examples:
        >>> history = History.from_chats(
        ...     [[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]]
        ... )
        >>> history.shape
        torch.Size([1, 2])
        >>> history[0].append(History(role="user", content="Bye")).role
        LinkedList(['user', 'assistant', 'user'])
        >>> history[..., -1].content
        LinkedList(['Hi!'])
    """

    _documentation = __doc__

    role: str | list[str] | list[list[str]]
    """Who speaks; ``"<none>"`` is a placeholder, which is never rendered."""
    content: str | ContentBase | list[Any] | None
    """What is said: a string, or parts (dictionaries or :class:`ContentBase`)."""
    is_complete: bool | list[Any] = True
    """False when the message was cut before its end-of-turn token."""
    tool_calls: list[Any] | None = None
    """The calls that an assistant's message makes, as dictionaries."""
    tool_responses: list[Any] | None = None
    """What the tools answered, when several answers share a message."""
    tool_call_id: str | list[Any] | None = None
    """The call that a tool's message answers."""
    name: str | list[Any] | None = None
    """The tool, or the speaker."""
    reasoning_content: str | list[Any] | None = None
    """The reasoning before the content of an assistant's message."""
    metadata: dict[str, Any] | list[Any] | None = None
    """Whatever other entries the message had, kept for :meth:`to_chats`."""

    def __post_init__(self) -> None:
        # TensorClass runs this on every index and stack too, not only on a new message.
        entries: Any = entries_of(self)
        if isinstance(entries, LazyStackedTensorDict):
            return
        unset = self.__dict__["_non_tensordict"]
        for field in [name for name, value in unset.items() if value is None]:
            del unset[field]
            entries.set(field, NonTensorData(None, batch_size=entries.batch_size))
        if not entries.batch_dims:
            # A single message holds its lists and dictionaries as values, not as batches.
            for field, value in list(entries.items()):
                if isinstance(value, NonTensorStack):
                    entries.set(field, NonTensorData(plain(value.tolist())))

    # From and to plain messages -----------------------------------------------------------------

    @classmethod
    def from_chats(cls, chats: Sequence[Any]) -> Self:
        """Build a history from messages in the chat format.

        Args:
            chats: the messages of one conversation, or of several, or of batches of them. The
                parts of a content are dictionaries or :class:`ContentBase`.

        Returns:
            ``[M]`` for one conversation, ``[B, M]`` for several, ``[*B, M]`` for nested batches.

        Raises:
            ValueError: there are no messages, or one has an unknown role or nothing in it.
            TypeError: a message, a role or a content has the wrong type.
        """
        return _nested(chats, ())

    @classmethod
    def from_torchrl(cls, history: Any) -> Self:
        """The conversations of a ``History`` of TorchRL's (``torchrl.data.llm``).

        Args:
            history: a message, a conversation ``[M]`` or a batch ``[*B, M]``.

        Returns:
            The same, as messages of this class.

        Raises:
            ValueError: there are no messages, or one has an unknown role or nothing in it.
            TypeError: it is none, or a message, a role or a content has the wrong type.

        Example:
            >>> import torchrl.data.llm
            >>> chats = [[{"role": "user", "content": "2 + 2?"}]]
            >>> theirs = torchrl.data.llm.History.from_chats(chats)
            >>> History.from_torchrl(theirs).to_chats()
            [[{'role': 'user', 'content': '2 + 2?'}]]
        """
        if not is_torchrl_history(history):
            raise TypeError(
                f"from_torchrl takes a History of torchrl.data.llm, got {history!r:.80}."
            )
        chats = _torchrl_chats(history)
        whole: Any = cls.from_chats(chats if history.batch_dims else [chats])
        return whole if history.batch_dims else whole[0]

    def to_torchrl(self) -> Any:
        """The messages as a ``History`` of TorchRL's (``torchrl.data.llm``).

        Returns:
            The same, of the same shape. ``name``, ``tool_call_id``, ``reasoning_content`` and
            ``metadata``, for which that class has no place, are left out.

        Example:
            >>> chats = [[{"role": "user", "content": "2 + 2?"}]]
            >>> [[*row] for row in History.from_chats(chats).to_torchrl().content]
            [['2 + 2?']]
        """
        from torchrl.data.llm import ContentBase
        from torchrl.data.llm import History as Theirs

        if self.batch_dims:
            return lazy_stack([item.to_torchrl() for item in self.unbind(0)])
        message: Any = self.to_chats()
        kept = {k: message[k] for k in _SHARED if k in message}
        if isinstance(message["content"], list):
            kept["content"] = lazy_stack([ContentBase(**part) for part in message["content"]])
        return Theirs(**kept)

    def to_chats(self) -> Message | list[Message] | list[list[Message]]:
        """The messages in the chat format, the inverse of :meth:`from_chats`.

        Returns:
            A message for ``[]``, a list of them for ``[M]``, a list of lists for ``[B, M]``.
        """
        if self.batch_dims:
            return [item.to_chats() for item in self.unbind(0)]  # type: ignore[misc]
        return _message({field: getattr(self, field) for field in FIELDS})

    @classmethod
    def from_text(
        cls,
        text: str | list[str],
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
    ) -> Self:
        """Parse what a chat template rendered.

        Args:
            text: one conversation, or one per row.
            chat_template_name: whose inverse parser to use; found from the tokenizer's family, or
                from the template, when not given.
            chat_template: Jinja source; the named template with the same source is used.
            tokenizer: whose family decides.

        Returns:
            ``[M]`` for one text, ``[B, M]`` for a list.

        Raises:
            ValueError: nothing could be parsed, or the template has no inverse parser.
        """
        from .inverse_parsers import inverse_parser

        parse = inverse_parser(chat_template_name, chat_template, tokenizer)
        results = [parse(row) for row in ([text] if isinstance(text, str) else text)]
        rows = [row if isinstance(row, cls) else history_of(row) for row in results]
        return rows[0] if isinstance(text, str) else lazy_stack(rows)  # type: ignore[return-value]

    def apply_chat_template(
        self,
        *,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        add_generation_prompt: bool | None = None,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        continue_final_message: bool = False,
        tokenize: bool | None = None,
        padding: bool | str = False,
        truncation: bool | str = False,
        return_tensors: str | None = None,
        return_dict: bool | None = None,
        return_assistant_tokens_mask: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Render the conversation as text or as tokens.

        Args:
            tokenizer: decides the template unless one is given. Without it the tokens are UTF-8
                bytes and each control token of the template has an id above 255: enough to look
                at a mask, of no use to a model.
            add_generation_prompt: end with the header of an assistant turn; ``True`` unless
                ``continue_final_message``.
            chat_template: Jinja source.
            chat_template_name: name of a built-in or added template.
            continue_final_message: end inside the last message, so that it is continued.
            tokenize: tokens instead of text; ``True`` when tensors or a mask are asked for.
            padding: pad rows on the right to the longest (only with a batch).
            truncation: cut rows to ``max_length`` tokens, which is then required.
            return_tensors: only ``"pt"``.
            return_dict: with tokens, a TensorDict instead of the ids alone.
            return_assistant_tokens_mask: add ``assistant_masks``: 1 on what the assistant wrote,
                end-of-turn token included.
            **kwargs: ``tools``, ``max_length``, and whatever else the template reads.

        Returns:
            Text: a string for ``[M]``, a list of strings for ``[B, M]``. Tokens: int64 ``[T]``, or
            a list of them; with ``return_dict`` a TensorDict with ``input_ids`` and
            ``attention_mask``, int64 ``[T]`` or ragged ``[B, T]``.

        Raises:
            ValueError: options contradict each other, or the template is unknown or unmarked.
        """
        if not self.batch_dims:
            raise ValueError(
                "A chat template renders conversations, this History is a single message. Call "
                "unsqueeze(0) first."
            )
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "add_generation_prompt opens a new turn and continue_final_message stays in the "
                "last one: ask for one of them."
            )
        if return_tensors not in (None, "pt"):
            raise ValueError(f"return_tensors is 'pt' or None, got {return_tensors!r}.")
        needs_tokens = return_assistant_tokens_mask or return_tensors is not None
        if tokenize is False and needs_tokens:
            raise ValueError("A mask or tensors need tokens: leave tokenize=False out.")
        rows, single = self._rows(), self.batch_dims == 1
        for row, messages in enumerate(rows):
            check_messages(messages, row=None if single else row)
        template = resolve_template(
            tokenizer, chat_template=chat_template, chat_template_name=chat_template_name
        )
        options: dict[str, Any] = {
            "tools": kwargs.pop("tools", None),
            "add_generation_prompt": not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        if not (needs_tokens if tokenize is None else tokenize):
            special = {} if tokenizer is None else tokenizer.special_tokens_map
            kwargs.pop("max_length", None)
            texts = _rendered(rows, template, {**special, **kwargs}, **options)
            return texts[0] if single else texts
        return _tensors(
            rows,
            tokenizer or byte_tokenizer(template),
            template,
            kwargs,
            options,
            single=single,
            padding=bool(padding),
            truncation=bool(truncation),
            as_dict=return_assistant_tokens_mask if return_dict is None else return_dict,
            with_mask=return_assistant_tokens_mask,
        )

    # Growing ------------------------------------------------------------------------------------

    def append(self, history: "History", *, inplace: bool = True, dim: int = -1) -> "History":
        """Add one item along a dimension.

        Args:
            history: what to add, with one dimension less than this one.
            inplace: change this history (its rows included, where it is a batch) or make another.
            dim: along which dimension.

        Returns:
            The longer history.

        Raises:
            ValueError: the dimensions do not fit.
        """
        if self.batch_dims != history.batch_dims + 1:
            raise ValueError(
                f"append adds an item with one dimension less: this history has shape "
                f"{tuple(self.batch_size)}, the item {tuple(history.batch_size)}. "
                "Use extend for several items, or unsqueeze(0) to make a message a conversation."
            )
        return self._concatenate([history], dim % self.batch_dims, inplace)

    def extend(self, history: "History", *, inplace: bool = True, dim: int = 0) -> "History":
        """Add several items along a dimension.

        Args:
            history: what to add, with as many dimensions as this one.
            inplace: change this history or make another.
            dim: along which dimension; 0 adds rows to a batch, -1 messages to every row.

        Returns:
            The longer history.

        Raises:
            ValueError: the dimensions do not fit.
        """
        if not self.batch_dims or self.batch_dims != history.batch_dims:
            raise ValueError(
                "extend joins histories of as many dimensions (at least 1): this one has shape "
                f"{tuple(self.batch_size)}, the other {tuple(history.batch_size)}."
            )
        dim %= self.batch_dims
        lengths = {len(row) for row in history.unbind(0)} if dim else set()
        if len(lengths) > 1:
            raise ValueError(
                f"extend along dimension {dim} needs rows of one length, got {sorted(lengths)}. "
                "Extend each row by itself."
            )
        return self._concatenate(list(history.unbind(dim)), dim, inplace)

    def _concatenate(self, items: Sequence["History"], dim: int, inplace: bool) -> "History":
        joined = _joined(self, items, dim)
        if inplace:
            self.__dict__["_tensordict"] = joined
            return self
        return type(self)._from_tensordict(joined, {})

    def show(
        self,
        *,
        reward: float | torch.Tensor | None = None,
        rewards: Sequence[float | None] | torch.Tensor | None = None,
        console: "Console | None" = None,
    ) -> None:
        """Print a conversation ``[M]``, or each of a batch, a panel per message.

        Args:
            reward: of a single conversation, printed at its end.
            rewards: of each conversation of a batch.
            console: where to print; a new one on standard output when not given.

        Raises:
            ValueError: there are not as many rewards as conversations.
        """
        from .display import rewards_of_rows, show_messages

        chats = self._rows()
        for chat, value in zip(chats, rewards_of_rows(reward, rewards, len(chats)), strict=True):
            show_messages(chat, reward=value, console=console)

    def to_html(
        self,
        *,
        reward: float | torch.Tensor | None = None,
        rewards: Sequence[float | None] | torch.Tensor | None = None,
    ) -> str:
        """One self-contained HTML page that runs nothing, whatever the messages spell.

        Args:
            reward: of a single conversation.
            rewards: of each conversation of a batch.

        Raises:
            ValueError: there are not as many rewards as conversations.
        """
        from .display import messages_html

        return messages_html(self._rows(), reward=reward, rewards=rewards)

    def _shown(self) -> str:
        """The beginning of each message of the first three conversations."""
        lines = []
        some: Any = self[:3] if self.batch_dims > 1 else self
        for chat in some._rows():
            said = [f"{one['role']}: {one.get('content')!r:.60}" for one in chat[:8]]
            lines.append(f"    {' | '.join([*said, *(['...'] if len(chat) > 8 else [])])},\n")
        if self.batch_dims > 1 and len(self) > len(lines):
            lines.append("    ...,\n")
        name, size = type(self).__name__, list(self.batch_size)
        return f"{name}(\n{''.join(lines)}    batch_size={size})"

    def _repr_html_(self) -> str:
        """What a notebook shows: the page of :meth:`to_html` in a frame of its own."""
        page = html.escape(self.to_html(), quote=True)
        style = "width: 100%; height: 24em; border: 1px solid #8884; resize: vertical"
        return f'<iframe sandbox="" style="{style}" srcdoc="{page}"></iframe>'

    def _rows(self) -> list[list[Message]]:
        chats: Any = self.to_chats()
        return chats if self.batch_dims > 1 else [chats if self.batch_dims else [chats]]

    def to_tensordict(self, *, retain_none: bool | None = None) -> TensorDictBase:
        """A TensorDict of the same entries; rows of unequal lengths stay rows.

        Args:
            retain_none: as in TensorDict.
        """
        if self.batch_dims < 2:
            return entries_of(self).to_tensordict(retain_none=retain_none)
        return lazy_stack([row.to_tensordict(retain_none=retain_none) for row in self.unbind(0)])

    @classmethod
    def default_spec(cls, shape: Sequence[int] = (-1,)) -> Any:
        """A spec of such a history, for environments and transforms.

        Args:
            shape: of the history; -1 where it varies.
        """
        from torchrl.data import Composite, NonTensor

        size, examples = torch.Size(shape), {"role": "user", "content": "", "is_complete": True}
        leaves = {name: NonTensor(example_data=examples.get(name), shape=size) for name in FIELDS}
        return Composite(leaves, shape=size[:-1], data_cls=cls)


# The fields that TorchRL's class has, too.
_SHARED: Final = ("role", "content", "is_complete", "tool_calls", "tool_responses")


def is_torchrl_history(value: Any) -> bool:
    """Whether it is a ``History`` of TorchRL's, which is asked without importing it."""
    kinds = type(value).__mro__
    return any((k.__module__, k.__name__) == ("torchrl.data.llm.history", "History") for k in kinds)


def _torchrl_chats(history: Any) -> Any:
    if history.batch_dims:
        return [_torchrl_chats(each) for each in history.unbind(0)]
    fields: dict[str, Any] = {name: getattr(history, name, None) for name in _SHARED}
    content = fields["content"]
    if hasattr(content, "batch_dims"):  # a part, or a stack of them
        parts = content.unbind(-1) if content.batch_dims else [content]
        fields["content"] = [
            {k: getattr(part, k) for k, v in part.items() if v is not None} for part in parts
        ]
    if fields["is_complete"] is not False:
        del fields["is_complete"]
    return {k: plain(v) for k, v in fields.items() if v is not None or k == "content"}


def _joined(history: History, items: Sequence[History], dim: int) -> TensorDictBase:
    if dim == 0:
        return lazy_stack([*entries_of(history).unbind(0), *map(entries_of, items)])
    # A ragged batch is a stack of rows: each row grows by its share of every item.
    rows, others = history.unbind(0), [item.unbind(0) for item in items]
    return lazy_stack([_joined(r, [o[i] for o in others], dim - 1) for i, r in enumerate(rows)])


def _nested(chats: Sequence[Any], place: tuple[int, ...]) -> Any:
    row = place[0] if len(place) == 1 else place or None
    if not len(chats):
        none = "got none" if row is None else f"row {row} has none"
        raise ValueError(f"from_chats needs at least one message a row, {none}.")
    if isinstance(chats[0], Sequence) and not isinstance(chats[0], str):
        return lazy_stack([_nested(chat, (*place, i)) for i, chat in enumerate(chats)])
    messages = []
    for message in chats:
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list | tuple) else [content]
        if any(isinstance(part, ContentBase) for part in parts):
            message = {**message, "content": [new for part in parts for new in _plain_parts(part)]}
        messages.append(with_plain_images(message))
    check_messages(messages, row=row)
    return history_of(messages)


def history_of(messages: Sequence[Message]) -> History:
    """The history ``[M]`` of a conversation, unchecked."""
    columns: dict[str, list[Any]] = {field: [None] * len(messages) for field in FIELDS}
    columns["is_complete"] = [True] * len(messages)
    for i, message in enumerate(messages):
        other = {}  # entries that are no field
        for key, value in message.items():
            if key in columns and key != "metadata":
                columns[key][i] = value
            else:
                other[key] = value
        columns["metadata"][i] = other or None
    size = torch.Size([len(messages)])
    entries = {
        field: NonTensorData(None, batch_size=size)
        if field in OPTIONAL and all(value is None for value in values)
        else value_stack(values)
        for field, values in columns.items()
    }
    return History._from_tensordict(TensorDict._new_unsafe(entries, batch_size=size), {})
