"""A policy of this process that answers questions, and remembers the conversations it was in."""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase

from torchrl_data.batched_object import read_objects
from torchrl_data.checks import check_counts
from torchrl_data.conversation import Conversations
from torchrl_data.conversation_io import read_conversations, write_conversations
from torchrl_data.keys import FINISH_REASON, FULL, PROMPT
from torchrl_data.messages import Message
from torchrl_data.tool_calls.call_messages import message_with_calls
from torchrl_data.tool_calls.parser import TurnParser, tool_call_parser
from torchrl_data.tool_calls.records import MalformedCall, ParsedTurn, ToolCall
from torchrl_envs.tool_schemas import typed_arguments

from .answerer import Answers


class PolicyAnswers:
    """A policy of this process, asked in text: a ``vLLMWrapper`` or a ``TransformersWrapper``.

    Its input mode is ``"history"``. One batch is answered at a time. A question that goes on with
    an earlier one (its messages, the answer to it, and new messages) continues that conversation:
    only what is new is encoded, and an engine that keeps what it has read reads no more.

    Args:
        policy: from a batch with ``("history", "prompt")`` to one with ``("history", "full")``.
        max_remembered: conversations that can be gone on with; the one that was used longest ago
            is forgotten first, and encoded anew where it is gone on with all the same.
        tool_call_format: how its calls of tools are written, where it is offered any, see
            :func:`~torchrl_data.tool_calls.parser.tool_call_parser`; what its chat template
            teaches when not given.

    Raises:
        ValueError: the number is negative, or there is no such format.

    Example:
        >>> judge = PolicyAnswers(TransformersWrapper("smollm2"))  # doctest: +SKIP
        >>> judge([[{"role": "user", "content": "What is 2 + 2?"}]])  # doctest: +SKIP
        ['2 + 2 = 4']
    """

    def __init__(
        self,
        policy: Callable[[TensorDictBase], TensorDictBase],
        *,
        max_remembered: int = 1024,
        tool_call_format: str | TurnParser | None = None,
    ) -> None:
        check_counts("PolicyAnswers", 0, max_remembered=max_remembered)
        self.policy = policy
        self.max_remembered = max_remembered
        self.tool_call_format = tool_call_format
        tokenizer = getattr(getattr(policy, "encoder", None), "tokenizer", None)
        self._parse = tool_call_parser(tool_call_format, tokenizer)
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Conversations] = OrderedDict()
        """Conversations that ended with an answer, by a digest of their messages."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy has a policy of its own, and remembers nothing."""
        names = ("policy", "max_remembered", "tool_call_format")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def __call__(
        self,
        questions: Sequence[Sequence[Message]],
        *,
        tools: Sequence[Sequence[dict[str, Any]]] | None = None,
        streams: Sequence[int | None] | None = None,
    ) -> Answers:
        """Answer all in one batch.

        Args:
            questions: messages each.
            tools: JSON schemas of what each answer may call; such an answer is a message. The
                prompt shows them from the first question of a conversation on.
            streams: by which the random numbers of each are told apart, where the policy's
                sampling has a seed: an answer then follows from the seed, the stream and the
                question, whatever is asked beside it.
        """
        offers = [()] * len(questions) if tools is None else tools
        own = [None] * len(questions) if streams is None else streams
        with self._lock:
            batch = TensorDict({}, batch_size=[len(questions)])
            chats = Conversations.cat(list(map(self._taken_up, questions, offers, own)))
            write_conversations(batch, PROMPT, chats)
            batch = self.policy(batch)
            full = read_conversations(batch, FULL, who=type(self).__name__)
            reasons = read_objects(batch, FINISH_REASON, "")
            answers: Answers = []
            for row, (question, reason) in enumerate(zip(questions, reasons, strict=True)):
                if reason not in ("", "stop"):
                    answers.append(ValueError(f"the answer did not end: {reason}"))
                    continue
                text = str(full.last_message(row)["content"])
                said: Message = {"role": "assistant", "content": text}
                try:
                    called = self._calls(text, offers[row])
                except ValueError as error:
                    answers.append(error)
                    continue
                answers.append(text if called is None else called)
                self._remember([*question, called or said], own[row], full.row(row))
        return answers

    def _calls(self, text: str, tools: Sequence[dict[str, Any]]) -> Message | None:
        """Return a turn as a message with the calls in it; ``None`` where it calls nothing.

        Raises:
            ValueError: a call can't be read.
        """
        turn = self._parse(text) if tools else ParsedTurn(text, [])
        calls: list[ToolCall] = []
        for call in turn.calls:
            if isinstance(call, MalformedCall):
                raise ValueError(f"a call of the answer can't be read: {call.error}: {text!r:.80}")
            if call.is_text:
                named = (t["function"] for t in tools if t["function"]["name"] == call.name)
                schema = next(named, {}).get("parameters")
                call = call._replace(arguments=typed_arguments(call.arguments, schema))
            calls.append(call)
        return message_with_calls({"role": "assistant"}, turn.content, calls) if calls else None

    def _taken_up(
        self, given: Sequence[Message], tools: Sequence[dict[str, Any]], stream: int | None
    ) -> Conversations:
        """Return the conversation that a question goes on with, or a new one."""
        question = list(given)
        answered = max(
            (i + 1 for i, m in enumerate(question) if m["role"] == "assistant"), default=0
        )
        held = self._known.get(_digest(question[:answered], stream)) if answered else None
        if held is None or answered == len(question):
            begun = Conversations.from_messages([question], [list(tools) or None])
            return begun if stream is None else begun.with_streams([stream])
        return held.append_messages([question[answered:]])

    def _remember(
        self, messages: Sequence[Message], stream: int | None, conversation: Conversations
    ) -> None:
        if self.max_remembered:
            self._known[_digest(messages, stream)] = conversation
            while len(self._known) > self.max_remembered:
                self._known.popitem(last=False)


def _digest(messages: Sequence[Mapping[str, Any]], stream: int | None) -> bytes:
    # Conversations of two streams are two, even where the same was said in them so far.
    said = json.dumps([stream, *messages], sort_keys=True, default=repr)
    return hashlib.blake2b(said.encode(), digest_size=16).digest()
