"""What starts conversations: strings, messages or token ids, one per row.

Shape legend: B rows, T tokens of a query (ragged).
"""

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase, is_non_tensor
from torch import Tensor

from torchrl_data.conversation.batched_object import read_objects
from torchrl_data.conversation.conversations import Conversations, Message
from torchrl_data.errors import MissingEntryError
from torchrl_data.history.history import History
from torchrl_data.keys import QUERY, TEXT, TOKENS, TOOLS
from torchrl_data.layout.ingest import chats_of, prompt_of_tokens
from torchrl_data.ragged.reading import first_entries, read_rows
from torchrl_data.templates.encoder import ConversationEncoder


class QueryReader:
    """Opens conversations from the queries of a batch.

    Args:
        mode: input mode of the environment; token ids are queries in the mode ``"tokens"`` only.
        encoder: of the environment's tokenizer.
        system_prompt: content of a first message, unless the query brings its own.
        system_role: that message's role.
        user_role: the role of a query that is a string.
    """

    def __init__(
        self,
        mode: str,
        encoder: ConversationEncoder | None,
        *,
        system_prompt: str | None,
        system_role: str,
        user_role: str,
    ) -> None:
        self.mode = mode
        self.encoder = encoder
        self.system_prompt = system_prompt
        self.system_role = system_role
        self.user_role = user_role

    def read(self, batch: TensorDictBase | None, rows: Sequence[int]) -> Conversations:
        """The conversations that some rows start with.

        Args:
            batch: with ``query`` (or ``text``) for the rows, and ``tools`` if there are any.
            rows: which.

        Returns:
            As many conversations, in their order.

        Raises:
            MissingEntryError: there is no query.
            TypeError: a query is of the wrong type.
        """
        queries = None if batch is None else _values(batch)
        if batch is None or queries is None:
            raise MissingEntryError(
                "ChatEnv.reset reads 'query', which the input lacks. Append a DataLoadingPrimer, "
                'or call env.reset(TensorDict({"query": ["..."]}, batch_size=env.batch_size)).'
            )
        tools = read_objects(batch, TOOLS)
        return Conversations.cat([self.open(queries[row], tools[row]) for row in rows])

    def open(self, query: Any, tools: Any) -> Conversations:
        """The conversation that one query starts.

        Args:
            query: a string, messages or token ids.
            tools: JSON schemas that the prompt shows, or ``None``.

        Raises:
            TypeError: the query is of the wrong type.
        """
        if isinstance(query, str):
            messages = [{"role": self.user_role, "content": query}]
        elif _is_chat(query):
            messages = [dict(message) for message in query]
        elif self.mode == TOKENS and _is_ids(query):
            return self._open_tokens([int(index) for index in query])
        else:
            also = ", or token ids" if self.mode == TOKENS else ""
            raise TypeError(
                "ChatEnv.reset: a query is a string or a list of messages "
                f'({{"role": ..., "content": ...}}){also}, got {type(query).__name__}: '
                f"{query!r:.80}."
            )
        if self.system_prompt is not None and messages[0].get("role") != self.system_role:
            messages = [self._system_message(), *messages]
        return Conversations.from_messages([messages], [tools])

    def _system_message(self) -> Message:
        return {"role": self.system_role, "content": self.system_prompt}

    def _open_tokens(self, ids: list[int]) -> Conversations:
        """Token ids are the prompt as they are, after the system prompt if there is one."""
        assert self.encoder is not None
        if self.system_prompt is not None:
            ids = [*self.encoder.encode_chats([[self._system_message()]])[0].ids, *ids]
        return prompt_of_tokens([ids], self.encoder)


def _values(batch: TensorDictBase) -> list[Any] | None:
    first = first_entries(batch)
    # The text of a query may be called text, as long as that is not the group of the text mode.
    held = [key for key in (QUERY, TEXT) if key in first.keys()]  # noqa: SIM118
    key = next((key for key in held if key == QUERY or is_non_tensor(first.get(key))), None)
    if key is None:
        return None
    value = first.get(key)
    if isinstance(value, Tensor):
        rows = read_rows(batch, key)
        return None if rows is None else list(rows.split())
    if isinstance(value, History):
        return chats_of(batch.get(key), batch.numel(), who="ChatEnv.reset")
    return read_objects(batch, key)


def _is_chat(query: Any) -> bool:
    return (
        isinstance(query, Sequence)
        and len(query) > 0
        and all(isinstance(message, dict) for message in query)
    )


def _is_ids(query: Any) -> bool:
    if isinstance(query, Tensor):
        return query.ndim == 1 and not query.is_floating_point()
    return isinstance(query, Sequence) and all(type(index) is int for index in query)
