"""A policy behind OpenAI's protocol, to be evaluated: messages go out, text comes back."""

import asyncio
import json
import os
from collections.abc import Sequence
from typing import Any, Final

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from transformers import PreTrainedTokenizerBase

from torchrl_data.conversation.batched_object import write_objects
from torchrl_data.conversation.conversations import Conversations
from torchrl_data.conversation.record import Turn
from torchrl_data.keys import FINISH_REASON, FULL, HISTORY, MAX_NEW_TOKENS, PROMPT
from torchrl_data.layout.conversation_io import (
    active_rows,
    read_conversations,
    write_conversations,
)
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_modules import SamplingParameters

MAX_CONCURRENT: Final = 64
"""Requests that are open at the same time."""


class ChatServerPolicy(TensorDictModuleBase):
    """Asks a server for the next turn of each conversation.

    The server's tokens are not known: the tokens of the rows are those of ``tokenizer``, and their
    log-probs are 0. So nothing can be trained on what it says.

    Args:
        url: of the server, ``http://host:port/v1``.
        model: its name there.
        tokenizer: counts tokens, and writes what the server says down.
        sampling: temperature, nucleus and length of a turn.
        timeout_s: deadline of one turn.

    Raises:
        ImportError: the package ``openai`` is not installed.
        ValueError: a sampling parameter is not in the protocol.
    """

    policy_version = 0

    def __init__(
        self,
        url: str,
        model: str,
        *,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParameters,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__()
        try:
            import openai
        except ImportError as error:
            raise ImportError(
                "engine=chat needs the package openai: pip install openai."
            ) from error
        if sampling.top_k or sampling.min_p:
            raise ValueError("OpenAI's protocol has no top_k and no min_p: leave them out.")
        self.encoder = ConversationEncoder(tokenizer)
        self.sampling = sampling
        self.in_keys: list[Any] = [(HISTORY, PROMPT)]  # pyright: ignore[reportIncompatibleVariableOverride]
        self.out_keys: list[Any] = [(HISTORY, FULL), FINISH_REASON]  # pyright: ignore[reportIncompatibleVariableOverride]
        self.tokenizer = tokenizer
        self._model = model
        # A client belongs to the event loop that it was first used on.
        self._client = lambda: openai.AsyncOpenAI(
            base_url=url,
            api_key=os.environ.get("OPENAI_API_KEY") or "none",
            max_retries=3,
            timeout=timeout_s,
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add a turn to every row that is not done."""
        prompt = read_conversations(tensordict, PROMPT, who="ChatServerPolicy")
        active = active_rows(tensordict)
        budgets = tensordict.get(MAX_NEW_TOKENS, None)
        limits = [self.sampling.max_new_tokens] * len(prompt)
        if budgets is not None:
            limits = [min(n, int(b)) for n, b in zip(limits, budgets.view(-1), strict=True)]
        asked = [row for row, is_active in enumerate(active.tolist()) if is_active and limits[row]]
        said = asyncio.run(self._ask_all(prompt, asked, limits))
        turns: list[Turn | None] = [None] * len(prompt)
        reasons = [""] * len(prompt)
        for row, (text, reason) in zip(asked, said, strict=True):
            reasons[row] = reason
            if text is not None:
                ids, content = self.encoder.encode_turn(text, close=reason == "stop")
                message: Any = {"role": "assistant", "content": content}
                turns[row] = Turn(ids, [0.0] * len(ids), message)
        spoken = {row for row, turn in enumerate(turns) if turn is not None}
        index = [row if row in spoken else len(prompt) + row for row in range(len(prompt))]
        prompt = Conversations.cat([self.encoder.encode_waiting(prompt), prompt])[index]
        full = prompt.append_turns(turns)
        for which, value in ((PROMPT, prompt), (FULL, full)):
            write_conversations(tensordict, which, value, mode=HISTORY, encoder=self.encoder)
        write_objects(tensordict, FINISH_REASON, reasons)
        return tensordict

    async def _ask_all(
        self, prompt: Conversations, rows: Sequence[int], limits: Sequence[int]
    ) -> list[tuple[str | None, str]]:
        free = asyncio.Semaphore(MAX_CONCURRENT)
        async with self._client() as client:

            async def ask(row: int) -> tuple[str | None, str]:
                async with free:
                    try:
                        return await self._ask(client, prompt, row, limits[row])
                    except Exception as error:  # what the server does ends this rollout alone
                        return None, f"error: {error}"

            return list(await asyncio.gather(*map(ask, rows)))

    async def _ask(
        self, client: Any, prompt: Conversations, row: int, limit: int
    ) -> tuple[str | None, str]:
        tools = prompt.tools(row)
        reply = await client.chat.completions.create(
            model=self._model,
            messages=prompt.messages(row),
            max_tokens=limit,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            **({"tools": list(tools)} if tools else {}),
        )
        choice = reply.choices[0]
        text = choice.message.content or ""
        for call in choice.message.tool_calls or ():
            function = call.function
            said = {"name": function.name, "arguments": json.loads(function.arguments or "{}")}
            text += f"\n<tool_call>\n{json.dumps(said)}\n</tool_call>"
        return text.lstrip("\n"), "length" if choice.finish_reason == "length" else "stop"
