"""Environment of conversations: a prompt on reset, and a message for each step.

Shape legend: B rows.
"""

import reprlib
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor
from torchrl.data import Binary, Composite, NonTensor
from torchrl.envs import EnvBase, Transform
from transformers import PreTrainedTokenizerBase

from torchrl_data import keys
from torchrl_data.batched_object import read_objects
from torchrl_data.checks import one_of
from torchrl_data.conversation import Conversations, Turn, waiting_rows
from torchrl_data.conversation_io import (
    active_rows,
    read_conversations,
    stored_conversations,
    write_conversations,
)
from torchrl_data.foreign_conversations import (
    chats_of,
    has_entry,
    prompt_of_tokens,
    read_fulls,
)
from torchrl_data.history import History
from torchrl_data.keys import HISTORY
from torchrl_data.messages import Message
from torchrl_data.missing_entry import MissingEntryError, known_entries
from torchrl_data.ragged.packed import first_entries, read_rows
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_data.tool_calls.parser import (
    TurnParser,
    tool_call_parser,
)

from .episode_env import EpisodeEnv, OwnSignature, check_reset


def _queries(batch: TensorDictBase) -> list[Any] | None:
    """Return what each row asks, in whatever form it is stored; ``None`` where there is nothing."""
    first = first_entries(batch)
    # The text of a query may be called text, as long as that is not the group of the text mode.
    held = [key for key in (keys.QUERY, keys.TEXT) if key in first.keys()]  # noqa: SIM118
    key = next((key for key in held if key == keys.QUERY or is_non_tensor(first.get(key))), None)
    if key is None:
        return None
    value = first.get(key)
    if isinstance(value, Tensor):
        rows = read_rows(batch, key)
        return None if rows is None else list(rows.split())
    if isinstance(value, History):
        return chats_of(batch.get(key), batch.numel(), who="ChatEnv.reset")
    return read_objects(batch, key)


def is_ids(query: Any) -> bool:
    """Return whether a prompt is token ids: a tensor or a list of at least one."""
    if isinstance(query, Tensor):
        return query.ndim == 1 and not query.is_floating_point()
    return isinstance(query, Sequence) and set(map(type, query)) == {int}


def _with_message(prompt: Conversations, message: Message) -> Conversations:
    """A conversation with an assistant's message, which may go on in one that was begun."""
    if not waiting_rows(prompt)[0].goes_on:  # type: ignore[union-attr]
        return prompt.append_messages([[message]])
    *before, begun = prompt.messages(0)
    message = {**message, "content": begun["content"] + message["content"]}
    return Conversations.from_messages([[*before, message]], [prompt.tools(0)])


_EXAMPLE = [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]


class _PartSpec(NonTensor):
    """A part of conversations, in whatever form; the ids of a single row are a tensor."""

    def is_in(self, val: Any) -> bool:
        return isinstance(val, torch.Tensor) or super().is_in(val)


class ChatEnv(EnvBase):
    """A batch of conversations.

    ``reset`` opens each with the system prompt and the query; ``step`` makes the ``full``
    conversation the next ``prompt``. Transforms add data, tools, rewards and limits: with
    :meth:`append_transform` the result is an :class:`~torchrl_envs.EpisodeEnv`. By
    itself the environment never ends an episode, except for a row that could not be generated.

    ``reset`` reads ``query``, a string or a list of messages per row (in the mode ``"tokens"`` also
    token ids, which are the prompt as they are), ``step`` reads ``(input_mode, "full")`` and writes
    ``("next", input_mode, "prompt")``. In every mode the truth is one append-only record of tokens;
    text and token ids are what it looks like. A ``full`` that somebody else wrote is taken over to
    the token. Without a policy, ``text_response``, a string per row, is the assistant's turn.

    Args:
        input_mode: what prompts look like: ``"history"`` (messages), ``"text"`` (what the chat
            template renders) or ``"tokens"`` (its ids).
        batch_size: any shape, ``()`` too; B is the number of its elements.
        tokenizer: spells conversations out; needed for text and tokens. The policy must have the
            same.
        system_prompt: content of a first message of the system role.
        template_kwargs: passed to the chat template.
        system_role: name of the system's role.
        user_role: the role of a query that is a string.
        tool_call_format: how the model writes tool calls, see
            :func:`~torchrl_data.tool_calls.parser.tool_call_parser`; what the chat template
            teaches when not given: the tokenizer's, or without one that of the policy that a
            collector has.

    Raises:
        ValueError: there is no such mode, it needs a tokenizer, the batch has no row, or
            there is no such format.
        TypeError: the system prompt is no string.

    Examples:
        >>> env = ChatEnv(batch_size=(2,), system_prompt="Be brief.")
        >>> batch = env.reset(TensorDict({"query": ["Hello", "Bye"]}, batch_size=[2]))
        >>> [list(contents) for contents in batch["history"].prompt.content]
        [['Be brief.', 'Hello'], ['Be brief.', 'Bye']]
    """

    __signature__ = OwnSignature()

    def __init__(
        self,
        *,
        input_mode: str = HISTORY,
        batch_size: Sequence[int] | int = (1,),
        tokenizer: PreTrainedTokenizerBase | None = None,
        system_prompt: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
        system_role: str = "system",
        user_role: str = "user",
        tool_call_format: str | TurnParser | None = None,
    ) -> None:
        size = torch.Size((batch_size,) if isinstance(batch_size, int) else tuple(batch_size))
        if size.numel() < 1 or min(size, default=1) < 1:
            raise ValueError(f"ChatEnv: batch_size must have at least one row, got {tuple(size)}.")
        one_of("input_mode", input_mode, keys.INPUT_MODES, who="ChatEnv")
        if not isinstance(system_prompt, str | None):
            raise TypeError(f"ChatEnv: system_prompt must be a string, got {system_prompt!r:.80}.")
        if tokenizer is None and input_mode != HISTORY:
            raise ValueError(
                f"ChatEnv: input_mode={input_mode!r} shows what the tokenizer's chat template "
                "makes of a conversation: give tokenizer=."
            )
        super().__init__(batch_size=size)
        self.input_mode = input_mode
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs
        self._encoder: ConversationEncoder | None = None
        self.system_prompt = system_prompt
        self.parse_turn: TurnParser = tool_call_parser(tool_call_format, tokenizer)
        self.takes_format_of_policy: bool = tool_call_format is None and tokenizer is None
        """Nothing says yet how the model writes tool calls; the policy's chat template does."""
        self._system_role, self._user_role = system_role, user_role
        example: Any = Conversations.from_messages([_EXAMPLE] * size.numel())
        self._speller = None if input_mode == HISTORY else self.encoder
        if self._speller is not None:
            ids = self._speller.encode_chats([_EXAMPLE])[0].ids
            row = self._speller.decode([ids])[0] if input_mode == keys.TEXT else ids
            example = [row] * size.numel()
        part = _PartSpec(shape=size, example_data=example)
        for spec, which in (("observation_spec", keys.PROMPT), ("full_action_spec", keys.FULL)):
            parts = Composite({which: part.clone()}, shape=size)
            setattr(self, spec, Composite({input_mode: parts}, shape=size))
        self.full_reward_spec = Composite(shape=size)
        flag = Binary(n=1, shape=torch.Size((*size, 1)), dtype=torch.bool)
        flags = {key: flag.clone() for key in (keys.DONE, keys.TERMINATED, keys.TRUNCATED)}
        self.full_done_spec = Composite(flags, shape=size)

    @property
    def encoder(self) -> ConversationEncoder:
        """Spells conversations out; made when it is first used.

        Raises:
            ValueError: the environment has no tokenizer.
        """
        if self._encoder is None:
            if self.tokenizer is None:
                raise ValueError("ChatEnv needs a tokenizer for this: give tokenizer=.")
            self._encoder = ConversationEncoder(
                self.tokenizer, chat_template_kwargs=self.template_kwargs
            )
        return self._encoder

    def __repr__(self) -> str:
        told = {"batch_size": tuple(self.batch_size), "input_mode": self.input_mode}
        if self.system_prompt is not None:
            told["system_prompt"] = reprlib.repr(self.system_prompt).strip("'\"")
        values = ", ".join(f"{name}={value!r}" for name, value in told.items())
        return f"{type(self).__name__}({values})"

    def append_transform(self, transform: Transform) -> EpisodeEnv:  # type: ignore[override]
        """Add a transform.

        Returns:
            An environment with the transform appended.
        """
        return EpisodeEnv(self, transform)

    def open(self, query: Any, tools: Any) -> Conversations:
        """The conversation that one query starts.

        Args:
            query: a string, messages or token ids, as ``reset`` reads it.
            tools: JSON schemas that the prompt shows, or ``None``.

        Raises:
            TypeError: the query is of the wrong type.
        """
        system = {"role": self._system_role, "content": self.system_prompt}
        if isinstance(query, str):
            messages = [{"role": self._user_role, "content": query}]
        elif isinstance(query, Sequence) and query and all(isinstance(m, dict) for m in query):
            messages = [dict(message) for message in query]
        elif self.input_mode == keys.TOKENS and is_ids(query):
            # Token ids are the prompt as they are, after the system prompt if there is one.
            ids = [int(index) for index in query]
            if self.system_prompt is not None:
                ids = [*self.encoder.encode_chats([[system]])[0].ids, *ids]
            return prompt_of_tokens([ids], self.encoder)
        else:
            also = ", or token ids" if self.input_mode == keys.TOKENS else ""
            raise TypeError(
                'ChatEnv.reset: a query is a string or a list of messages ({"role": ..., '
                f'"content": ...}}){also}, got {type(query).__name__}: {query!r:.80}.'
            )
        if self.system_prompt is not None and messages[0].get("role") != self._system_role:
            messages = [system, *messages]
        return Conversations.from_messages([messages], [tools], goes_on=True)

    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """Begin a conversation in each row: see ``EnvBase.reset`` of TorchRL.

        Args:
            tensordict: ``query``, a string or messages for each row, and perhaps ``tools``.
            **kwargs: as TorchRL's.

        Raises:
            MissingEntryError: there is no query.
            TypeError: it is no TensorDict.
        """
        check_reset(tensordict)
        return super().reset(tensordict, **kwargs)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        del kwargs
        size = self.batch_size.numel()
        queries = None if tensordict is None else _queries(tensordict)
        if tensordict is None or queries is None:
            raise MissingEntryError(
                "ChatEnv.reset reads 'query', which the input lacks. Append a DataLoadingPrimer, "
                'or call env.reset(TensorDict({"query": ["..."]}, batch_size=env.batch_size)).'
            )
        mask = tensordict.get("_reset", None)
        rows = list(range(size)) if mask is None else mask.view(-1).nonzero().view(-1).tolist()
        tools = read_objects(tensordict, keys.TOOLS)
        prompt = Conversations.cat([self.open(queries[row], tools[row]) for row in rows])
        if len(rows) < size:
            # TorchRL hides the rows that go on from the reset, and puts them back itself.
            kept = Conversations.from_messages([[]] * size)
            if has_entry(tensordict, (self.input_mode, keys.PROMPT)):
                kept = read_conversations(tensordict, keys.PROMPT, who="ChatEnv.reset")
            index = list(range(size))
            for new, row in enumerate(rows):
                index[row] = size + new
            prompt = Conversations.cat([kept, prompt])[index]
        out = TensorDict(self.full_done_spec.zero(), batch_size=self.batch_size)
        self._write_prompt(out, prompt)
        return out

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        full = self._read_full(tensordict)
        active = active_rows(tensordict)
        if not bool(active.all()):
            # Rows that take no part in a step stay where they were.
            prompt = read_conversations(tensordict, keys.PROMPT, who="ChatEnv.step")
            own = torch.arange(len(full))
            full = Conversations.cat([full, prompt])[torch.where(active, own, own + len(full))]
        # A row that nobody answered could not be generated, or its messages not be encoded.
        failed = (torch.tensor(full.lack_turns()) & active).view(*self.batch_size, 1)
        flags = {
            keys.DONE: failed,
            keys.TERMINATED: torch.zeros_like(failed),
            keys.TRUNCATED: failed.clone(),
        }
        out = TensorDict(flags, batch_size=self.batch_size)
        self._write_prompt(out, full)
        return out

    def _read_full(self, batch: TensorDictBase) -> Conversations:
        stored = stored_conversations(batch, self.input_mode, keys.FULL)
        if stored is not None:
            return stored.conversations
        if has_entry(batch, (self.input_mode, keys.FULL)):
            return read_fulls(batch, self.input_mode, encoder=self._speller, who="ChatEnv.step")
        if batch.get(keys.TEXT_RESPONSE, None) is None:
            raise MissingEntryError(
                f"ChatEnv.step reads {(self.input_mode, keys.FULL)}, which a policy writes, or "
                f"{keys.TEXT_RESPONSE!r}, a string per row. The batch holds {known_entries(batch)}."
            )
        return self._with_text(batch, read_objects(batch, keys.TEXT_RESPONSE))

    def _with_text(self, batch: TensorDictBase, texts: Sequence[str]) -> Conversations:
        """The prompts with what somebody said as the assistant."""
        prompt = read_conversations(batch, keys.PROMPT, who="ChatEnv.step")
        if self.tokenizer is not None:
            texts = [self.encoder.without_end(text) for text in texts]
        said = [{"role": "assistant", "content": text} for text in texts]
        if self.input_mode == HISTORY and not any(at.awaits_response for at in prompt.positions):
            # Nothing has shown its tokens yet: they are made when a policy asks.
            return Conversations.cat(
                [_with_message(prompt.row(row), message) for row, message in enumerate(said)]
            )
        ids = [self.encoder.encode_turn(text, close=True)[0] for text in texts]
        turns = [Turn(own, None, message) for own, message in zip(ids, said, strict=True)]
        return self.encoder.encode_waiting(prompt).append_turns(turns)

    def _write_prompt(self, batch: TensorDictBase, prompt: Conversations) -> None:
        write_conversations(batch, keys.PROMPT, prompt, mode=self.input_mode, encoder=self._speller)

    def _set_seed(self, seed: int | None) -> None:
        """Nothing is random here; data loading and the policy have their own seeds."""
