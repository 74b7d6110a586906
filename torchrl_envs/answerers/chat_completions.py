"""A model behind OpenAI's protocol that answers questions."""

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from torchrl_data import import_package
from torchrl_data.checks import POSITIVE, check_counts, check_numbers
from torchrl_data.messages import Message

from .answerer import Answers

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_FAULTS: Final[ContextVar[list[str]]] = ContextVar("faults of the server")
"""What the server answered to the attempts of one question that failed."""


class ChatCompletions:
    """A model behind OpenAI's protocol: ``vllm serve``, OpenAI, and most other servers.

    The questions of a step are asked at once. Busy servers, lost connections and errors of the
    server are tried again with growing pauses (by the package ``openai``). Needs that package.

    Args:
        model: its name at the server.
        base_url: of the server, ``"http://localhost:8000/v1"`` say; OpenAI's when not given.
        api_key: the environment variable ``OPENAI_API_KEY`` when not given; local servers need
            none.
        timeout_s: deadline of one answer, with all attempts, from when it is asked.
        max_concurrent: questions that are open at the same time.
        max_retries: attempts after the first, at growing intervals: 8 bridge about half a minute.
        **generation: of the request: ``temperature`` (0 when not given), ``max_tokens``,
            ``response_format``, ``extra_body`` and so on.

    Raises:
        ImportError: the package ``openai`` is not installed.
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 50.0,
        max_concurrent: int = 64,
        max_retries: int = 8,
        **generation: Any,
    ) -> None:
        openai = import_package("openai", who="ChatCompletions", install="pip install openai")
        check_numbers("ChatCompletions", POSITIVE, timeout_s=timeout_s)
        check_counts("ChatCompletions", max_concurrent=max_concurrent)
        check_counts("ChatCompletions", 0, max_retries=max_retries)
        self.model = model
        self.base_url = base_url
        self.timeout_s = timeout_s
        self.max_concurrent = max_concurrent
        self.generation = {"temperature": 0.0, **generation}
        self._client: Callable[[], AsyncOpenAI] = lambda: openai.AsyncOpenAI(
            base_url=base_url,
            api_key=api_key or os.environ.get("OPENAI_API_KEY") or "none",
            max_retries=max_retries,
            timeout=timeout_s,
            http_client=openai.DefaultAsyncHttpxClient(event_hooks={"response": [_note_fault]}),
        )
        self._unreached: type[Exception] = openai.APIConnectionError

    async def __call__(
        self,
        questions: Sequence[Sequence[Message]],
        *,
        tools: Sequence[Sequence[dict[str, Any]]] | None = None,
    ) -> Answers:
        """Ask all at once.

        Args:
            questions: messages each.
            tools: JSON schemas of what each answer may call; such an answer is a message.
        """
        free = asyncio.Semaphore(self.max_concurrent)
        # A client belongs to the event loop that it was first used on.
        async with self._client() as client:

            async def ask(
                messages: Sequence[Message], schemas: Sequence[dict[str, Any]]
            ) -> str | Message | Exception:
                chat: Any = [_as_sent(message) for message in messages]
                offered: Any = {"tools": list(schemas)} if schemas else {}
                complete = client.chat.completions.create
                _FAULTS.set([])
                async with free:
                    try:
                        async with asyncio.timeout(self.timeout_s):
                            reply = await complete(
                                model=self.model, messages=chat, **offered, **self.generation
                            )
                        return _said(reply, self.model, offers_tools=bool(schemas))
                    except TimeoutError:
                        why = "".join(f"; it last said {fault}" for fault in _FAULTS.get()[-1:])
                        late = f"no answer within {self.timeout_s:g} s{why}"
                        return TimeoutError(f"{self.model}: {late}")
                    except self._unreached as error:
                        where = str(client.base_url)
                        return ConnectionError(f"{self.model}: {where} can't be reached: {error}")
                    except Exception as error:  # whatever the server does is this rollout's error
                        return error

            offers = [()] * len(questions) if tools is None else tools
            return list(await asyncio.gather(*map(ask, questions, offers)))


async def _note_fault(response: Any) -> None:
    """Remember an answer of the server that another attempt follows."""
    if response.status_code >= 400:
        _FAULTS.get().append(f"HTTP {response.status_code} {response.reason_phrase}".strip())


def _said(reply: Any, model: str, *, offers_tools: bool) -> str | Message:
    """Return what a server answered.

    Raises:
        ValueError: nothing, a part, or nothing but thoughts.
    """
    if not reply.choices:
        raise ValueError(f"{model} gave no answer at all")
    choice = reply.choices[0]
    if choice.finish_reason == "length":
        raise ValueError(f"{model}: the answer was cut; raise max_tokens")
    if choice.finish_reason == "content_filter":
        raise ValueError(f"{model}: the answer was cut by the server's filter of contents")
    said = choice.message
    if offers_tools and said.tool_calls:
        return said.model_dump(exclude_none=True)
    if said.content:
        return said.content
    if refusal := getattr(said, "refusal", None):
        raise ValueError(f"{model} refuses: {refusal!r:.200}")
    thoughts = getattr(said, "reasoning_content", None) or getattr(said, "reasoning", None)
    if thoughts:
        raise ValueError(
            f"{model} gave reasoning and no answer after it: {thoughts[-200:]!r}. Does the server "
            "have the reasoning parser of another model?"
        )
    return ""


def _as_sent(message: Message) -> Message:
    """A message as a server takes it: the arguments of calls are JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = [{**call, "function": {**call["function"]}} for call in message["tool_calls"]]
    for function in (call["function"] for call in calls):
        if not isinstance(function.get("arguments"), str):
            function["arguments"] = json.dumps(function.get("arguments") or {})
    return {**message, "tool_calls": calls}
