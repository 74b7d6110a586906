"""Conversations as a TensorClass: what people, rewards and tools look at.

``History`` is a view for whoever asks. The loop itself keeps tokens (see ``conversation``); nothing
that is trained on is made from a ``History`` again.

Shape legend: B rows, M messages of a row (ragged).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

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

from torchrl_data.conversation.content import ContentBase
from torchrl_data.conversation.record import Message, check_messages
from torchrl_data.conversation.tensorclass_utils import documented
from torchrl_data.ragged.groups import value_stack
from torchrl_data.ragged.packed import entries_of

from .fields import FIELDS, OPTIONAL, message_fields, plain, to_message, with_plain_parts

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
        return cls._from_nested(chats, ())

    @classmethod
    def _from_nested(cls, chats: Sequence[Any], place: tuple[int, ...]) -> Self:
        row = place[0] if len(place) == 1 else place or None
        if not len(chats):
            none = "got none" if row is None else f"row {row} has none"
            raise ValueError(f"from_chats needs at least one message a row, {none}.")
        if _is_batch(chats):
            rows = [cls._from_nested(chat, (*place, i)) for i, chat in enumerate(chats)]
            return lazy_stack(rows)  # type: ignore[return-value]
        messages = [with_plain_parts(message) for message in chats]
        check_messages(messages, row=row)
        return cls._from_messages(messages)

    @classmethod
    def _from_messages(cls, messages: Sequence[Message]) -> Self:
        rows = [message_fields(message) for message in messages]
        size = torch.Size([len(rows)])
        entries = {}
        for field in FIELDS:
            values = [row[field] for row in rows]
            if field in OPTIONAL and all(value is None for value in values):
                entries[field] = NonTensorData(None, batch_size=size)
            else:
                entries[field] = value_stack(values)
        return cls._from_tensordict(TensorDict._new_unsafe(entries, batch_size=size), {})

    def to_chats(self) -> Message | list[Message] | list[list[Message]]:
        """The messages in the chat format, the inverse of :meth:`from_chats`.

        Returns:
            A message for ``[]``, a list of them for ``[M]``, a list of lists for ``[B, M]``.
        """
        if not self.batch_dims:
            return to_message({field: getattr(self, field) for field in FIELDS})
        return [item.to_chats() for item in self.unbind(0)]  # type: ignore[misc]

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
        from torchrl_data.tool_calls.template_parsers import inverse_parser

        parse = inverse_parser(chat_template_name, chat_template, tokenizer)
        if not isinstance(text, str):
            return lazy_stack([cls._parsed(parse(row)) for row in text])  # type: ignore[return-value]
        return cls._parsed(parse(text))

    @classmethod
    def _parsed(cls, result: "Self | Sequence[Message]") -> Self:
        return result if isinstance(result, cls) else cls._from_messages(result)  # type: ignore[arg-type]

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
        from .rendering import RenderingOptions, render_chats

        if not self.batch_dims:
            raise ValueError(
                "A chat template renders conversations, this History is a single message. Call "
                "unsqueeze(0) first."
            )
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        options = RenderingOptions(
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
            chat_template_name=chat_template_name,
            continue_final_message=continue_final_message,
            tokenize=tokenize,
            padding=padding,
            truncation=truncation,
            return_tensors=return_tensors,
            return_dict=return_dict,
            return_assistant_tokens_mask=return_assistant_tokens_mask,
        )
        return render_chats(self._rows(), tokenizer, options, kwargs, single=self.batch_dims == 1)

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
        return self._concatenate(_unbind(history, dim), dim, inplace)

    def _concatenate(self, items: Sequence["History"], dim: int, inplace: bool) -> "History":
        joined = _joined(self, items, dim)
        if inplace:
            self.__dict__["_tensordict"] = joined
            return self
        return type(self)._from_tensordict(joined, {})

    # For people ---------------------------------------------------------------------------------

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
        from torchrl_data.display.display_text import rewards_of_rows
        from torchrl_data.display.terminal import show_messages

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
        from torchrl_data.display.html_page import messages_html

        return messages_html(self._rows(), reward=reward, rewards=rewards)

    def _rows(self) -> list[list[Message]]:
        chats: Any = self.to_chats()
        return chats if self.batch_dims > 1 else [chats if self.batch_dims else [chats]]

    # Where TensorDict needs to know -------------------------------------------------------------

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
        return _spec(cls, torch.Size(shape))


def _spec(kind: type[History], size: torch.Size) -> Any:
    from torchrl.data import Composite, NonTensor

    examples = {"role": "user", "content": "", "is_complete": True}
    leaves = {field: NonTensor(example_data=examples.get(field), shape=size) for field in FIELDS}
    return Composite(leaves, shape=size[:-1], data_cls=kind)


def _joined(history: History, items: Sequence[History], dim: int) -> TensorDictBase:
    if dim == 0:
        return lazy_stack([*entries_of(history).unbind(0), *map(entries_of, items)])
    # A ragged batch is a stack of rows: each row grows by its share of every item.
    rows, others = history.unbind(0), [item.unbind(0) for item in items]
    return lazy_stack([_joined(r, [o[i] for o in others], dim - 1) for i, r in enumerate(rows)])


def _is_batch(chats: Sequence[Any]) -> bool:
    first = chats[0]
    return isinstance(first, Sequence) and not isinstance(first, str)


def _unbind(history: History, dim: int) -> list[History]:
    if dim == 0:
        return list(history.unbind(0))
    lengths = {len(row) for row in history.unbind(0)}
    if len(lengths) > 1:
        raise ValueError(
            f"extend along dimension {dim} needs rows of one length, got {sorted(lengths)}. "
            "Extend each row by itself."
        )
    return list(history.unbind(dim))
