"""The ``History`` of TorchRL: messages as a tensorclass, rendered by a template and parsed back.

``History`` is a view for people, rewards and tools. The loop itself keeps tokens (see
``conversation``); nothing that is trained on is made from a ``History`` again.

Shape legend: B rows, M messages of a row (ragged).
"""

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

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

from .batched_object import value_stack
from .chat_encoders import byte_tokenizer, chat_tensors, rendered_chats
from .content import ContentBase
from .images import with_plain_images
from .message_fields import FIELDS, OPTIONAL, message_of, plain, plain_parts
from .messages import Message, check_messages
from .ragged.packed import entries_of
from .templates.registry import resolve_template
from .tensorclass import documented

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase


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
        return message_of({field: getattr(self, field) for field in FIELDS})

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
            texts = rendered_chats(rows, template, {**special, **kwargs}, **options)
            return texts[0] if single else texts
        return chat_tensors(
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
        from .display.terminal import show_messages
        from .display.text import rewards_of_rows

        chats = self._rows()
        for chat, value in zip(chats, rewards_of_rows(reward, rewards, len(chats)), strict=True):
            show_messages(chat, reward=value, console=console)

    def to_html(
        self,
        *,
        reward: float | torch.Tensor | None = None,
        rewards: Sequence[float | None] | torch.Tensor | None = None,
    ) -> str:
        """A self-contained HTML page that runs nothing, whatever the messages spell.

        Args:
            reward: of a single conversation.
            rewards: of each conversation of a batch.

        Raises:
            ValueError: there are not as many rewards as conversations.
        """
        from .display.html import messages_html

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
        """Return what a notebook shows: the page of :meth:`to_html` in a frame of its own."""
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
    """Return whether it is a ``History`` of TorchRL's, which is asked without importing it."""
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
            message = {**message, "content": [new for part in parts for new in plain_parts(part)]}
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
