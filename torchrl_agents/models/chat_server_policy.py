"""A policy behind OpenAI's protocol, to be evaluated: messages go out, text comes back."""

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

from torchrl_data import import_package
from torchrl_data.checks import POSITIVE, check_numbers
from torchrl_data.conversation import Conversations, Turn, waiting_rows
from torchrl_modules import LLMWrapperBase

MAX_CONCURRENT: Final = 64
"""Requests that are open at the same time."""


class ChatServerPolicy(LLMWrapperBase):
    """Asks a server for the next turn of each conversation.

    The server's tokens are not known: the tokens of the rows are those of ``tokenizer``, and their
    log-probs are 0. So nothing can be trained on what it says.

    Args:
        url: of the server, ``http://host:port/v1``.
        model: its name there.
        timeout_s: deadline of one turn, with all that is tried again for it.
        **arguments: of :class:`~torchrl_modules.LLMWrapperBase`; the tokenizer counts tokens, and
            writes what the server says down.

    Raises:
        ImportError: the package ``openai`` is not installed.
        ValueError: a sampling parameter is not in the protocol.
    """

    def __init__(self, url: str, model: str, *, timeout_s: float = 600.0, **arguments: Any) -> None:
        openai = import_package("openai", who="engine=chat", install="pip install openai")
        engine: Any = SimpleNamespace(version=0, max_model_len=None)  # it draws no tokens
        super().__init__(engine, **arguments)
        if self.sampling.top_k or self.sampling.min_p:
            raise ValueError("OpenAI's protocol has no top_k and no min_p: leave them out.")
        check_numbers("engine=chat", POSITIVE, timeout_s=timeout_s)
        self._model, self._url, self._timeout_s = model, url, timeout_s
        key = os.environ.get("OPENAI_API_KEY") or "none"
        about = {"base_url": url, "api_key": key, "max_retries": 3, "timeout": timeout_s}
        # A client belongs to the event loop that it was first used on.
        self._client: Any = partial(openai.AsyncOpenAI, **about)

    def _checked_engine(self, engine: Any) -> Any:
        return engine  # a version alone: turns come from the server

    def respond(
        self,
        prompt: Conversations,
        *,
        max_new_tokens: Sequence[int] | None = None,
        agents: Sequence[str] | None = None,
    ) -> tuple[Conversations, Conversations, list[str]]:
        """A turn of the server in each conversation, see :meth:`LLMWrapperBase.respond`."""
        del agents  # one model speaks for all of them
        limits = max_new_tokens or [self.sampling.max_new_tokens] * len(prompt)
        said = asyncio.run(self._ask_all(prompt, limits))
        turns: list[Turn | None] = [None] * len(prompt)
        for row, (text, reason) in enumerate(said):
            if text is not None:
                ids, content = self.encoder.encode_turn(text, close=reason == "stop")
                message: Any = {"role": "assistant", "content": content}
                turns[row] = Turn(ids, [0.0] * len(ids), message)
        prompt = self.encoder.encode_waiting(prompt)
        return prompt, prompt.append_turns(turns), [reason for _, reason in said]

    async def _ask_all(
        self, prompt: Conversations, limits: Sequence[int]
    ) -> list[tuple[str | None, str]]:
        """Return what the server says in each row, and why it ended."""
        free = asyncio.Semaphore(MAX_CONCURRENT)
        async with self._client() as client:

            async def ask(row: int) -> tuple[str | None, str]:
                tools = prompt.tools(row)
                if waiting_rows(prompt)[row].goes_on:  # type: ignore[union-attr]
                    why = "a server of OpenAI's protocol does not go on in the turn of a prompt"
                    return None, f"error: {why}"
                async with free:
                    try:
                        async with asyncio.timeout(self._timeout_s):
                            reply = await client.chat.completions.create(
                                model=self._model,
                                messages=prompt.messages(row),
                                max_tokens=limits[row],
                                stop=list(self.sampling.stop) or None,
                                temperature=self.sampling.temperature,
                                top_p=self.sampling.top_p,
                                **({"tools": list(tools)} if tools else {}),
                            )
                        return _text_of(reply.choices[0])
                    except Exception as error:  # what the server does ends this rollout alone
                        return None, self._failure(error)

            return list(await asyncio.gather(*map(ask, range(len(prompt)))))

    def _failure(self, error: Exception) -> str:
        """Return the reason of a turn that failed, and what to do about it."""
        said = str(error)
        if isinstance(error, TimeoutError):
            said = (
                f"no answer within {self._timeout_s:g} s "
                "(+engine.engine_kwargs.timeout_s=... waits longer)"
            )
        advice = _ADVICE.get(getattr(error, "status_code", 0), "")
        return f"error: {self._url}, model {self._model!r}: {said}{advice}"


_ADVICE: Final = {
    401: ". OPENAI_API_KEY of the environment has to be the server's key.",
    404: ". engine.url ends in /v1 as a rule, and policy.model is the model's name there.",
}
"""By the status of an answer."""


def _text_of(choice: Any) -> tuple[str, str]:
    """A turn of a server as text, its calls in the format of the embedded template."""
    text = choice.message.content or ""
    # vLLM says which text of `stop` ended the turn, which it leaves out.
    if isinstance(ended_by := getattr(choice, "stop_reason", None), str):
        text += ended_by
    for call in choice.message.tool_calls or ():
        function = call.function
        arguments = function.arguments or "{}"
        with suppress(json.JSONDecodeError):  # the parser of calls says what is wrong with it
            arguments = json.dumps(json.loads(arguments))
        said = f'{{"name": {json.dumps(function.name)}, "arguments": {arguments}}}'
        text += f"\n<tool_call>\n{said}\n</tool_call>"
    return text.lstrip("\n"), "length" if choice.finish_reason == "length" else "stop"
