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

    Raises:
        ValueError: the number is negative.

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
    ) -> None:
        check_counts("PolicyAnswers", 0, max_remembered=max_remembered)
        self.policy = policy
        self.max_remembered = max_remembered
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Conversations] = OrderedDict()
        """Conversations that ended with an answer, by a digest of their messages."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy has a policy of its own, and remembers nothing."""
        return {"policy": self.policy, "max_remembered": self.max_remembered}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["policy"], max_remembered=state["max_remembered"])

    def __call__(self, questions: Sequence[Sequence[Message]]) -> Answers:
        """Answer all in one batch.

        Args:
            questions: messages each.
        """
        with self._lock:
            batch = TensorDict({}, batch_size=[len(questions)])
            chats = Conversations.cat([self._taken_up(list(each)) for each in questions])
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
                answers.append(text)
                said: Message = {"role": "assistant", "content": text}
                self._remember([*question, said], full.row(row))
        return answers

    def _taken_up(self, question: list[Message]) -> Conversations:
        """Return the conversation that a question goes on with, or a new one."""
        answered = max(
            (i + 1 for i, m in enumerate(question) if m["role"] == "assistant"), default=0
        )
        held = self._known.get(_digest(question[:answered])) if answered else None
        if held is None or answered == len(question):
            return Conversations.from_messages([question])
        return held.append_messages([question[answered:]])

    def _remember(self, messages: Sequence[Message], conversation: Conversations) -> None:
        if self.max_remembered:
            self._known[_digest(messages)] = conversation
            while len(self._known) > self.max_remembered:
                self._known.popitem(last=False)


def _digest(messages: Sequence[Mapping[str, Any]]) -> bytes:
    said = json.dumps(list(messages), sort_keys=True, default=repr)
    return hashlib.blake2b(said.encode(), digest_size=16).digest()
