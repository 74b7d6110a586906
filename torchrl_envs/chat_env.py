"""The conversation environment: a response comes in, the next prompt goes out.

Shape legend: B rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Composite, NonTensor
from torchrl.envs import EnvBase, Transform
from transformers import PreTrainedTokenizerBase

from torchrl_data.conversation import Conversations, Message
from torchrl_data.errors import MissingEntryError
from torchrl_data.keys import DONE, FULL, HISTORY, PROMPT, QUERY, TERMINATED, TOOLS, TRUNCATED
from torchrl_data.loop_state import active_rows, read_conversations, write_conversations
from torchrl_data.row_values import read_row_values
from torchrl_data.tool_calls import TurnParser, tool_call_parser

from .episode_env import EpisodeEnv


class ChatEnv(EnvBase):
    """A batch of conversations.

    ``reset`` opens each with the system prompt and the query; ``step`` makes the policy's ``full``
    conversation the next ``prompt``. Transforms add data, tools, rewards and limits: with
    :meth:`append_transform` the result is an :class:`~torchrl_envs.episode_env.EpisodeEnv`. By
    itself the environment never ends an episode, except for a row that could not be generated.

    Args:
        batch_size: one number, B.
        tokenizer: shown with the conversations; the policy brings its own.
        system_prompt: content of a first message of the system role.
        system_role: that role's name.
        user_role: the role of a query that is a string.
        tool_call_format: how the model writes tool calls, see
            :func:`~torchrl_data.tool_calls.tool_call_parser`; what the tokenizer's chat template
            teaches when not given.

    Raises:
        ValueError: the batch size is not one positive number, or there is no such format.
    """

    def __init__(
        self,
        *,
        batch_size: Sequence[int] | int = (1,),
        tokenizer: PreTrainedTokenizerBase | None = None,
        system_prompt: str | None = None,
        system_role: str = "system",
        user_role: str = "user",
        tool_call_format: str | TurnParser | None = None,
    ) -> None:
        size = torch.Size((batch_size,) if isinstance(batch_size, int) else tuple(batch_size))
        if len(size) != 1 or size[0] < 1:
            raise ValueError(
                f"ChatEnv: batch_size must be one positive number of rows, got {tuple(size)}."
            )
        super().__init__(batch_size=size)
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.system_role = system_role
        self.user_role = user_role
        self.parse_turn: TurnParser = tool_call_parser(tool_call_format, tokenizer)
        example = Conversations.from_messages([[]] * size[0])
        entry = NonTensor(shape=size, example_data=example)
        self.observation_spec = Composite(
            {HISTORY: Composite({PROMPT: entry}, shape=size)}, shape=size
        )
        self.full_action_spec = Composite(
            {HISTORY: Composite({FULL: entry.clone()}, shape=size)}, shape=size
        )
        self.full_reward_spec = Composite(shape=size)
        flag = Binary(n=1, shape=torch.Size((*size, 1)), dtype=torch.bool)
        self.full_done_spec = Composite(
            {DONE: flag, TERMINATED: flag.clone(), TRUNCATED: flag.clone()}, shape=size
        )

    def append_transform(self, transform: Transform) -> EpisodeEnv:  # type: ignore[override]
        """Add a transform.

        Returns:
            An environment with the transform appended.
        """
        return EpisodeEnv(self, transform)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        del kwargs
        reset = None if tensordict is None else tensordict.get("_reset", None)
        tools: list[Any] = []
        queries: list[Any] | None = None
        if tensordict is not None and tensordict.get(QUERY, None) is not None:
            queries = read_row_values(tensordict, QUERY)
            tools = read_row_values(tensordict, TOOLS)
        if queries is None:
            raise MissingEntryError(
                "ChatEnv.reset reads 'query', which the input lacks. Append a DataLoadingPrimer, "
                'or call env.reset(TensorDict({"query": ["..."]}, batch_size=env.batch_size)).'
            )
        fresh = Conversations.from_messages([self._opening(query) for query in queries], tools)
        if reset is not None and tensordict is not None and not bool(reset.all()):
            kept = read_conversations(tensordict, PROMPT, who="ChatEnv.reset")
            both = Conversations.cat([kept, fresh])
            size = len(fresh)
            fresh = both[[i + size * int(flag) for i, flag in enumerate(reset.view(-1))]]
        out = TensorDict(self.full_done_spec.zero(), batch_size=self.batch_size)
        write_conversations(out, PROMPT, fresh)
        return out

    def _opening(self, query: Any) -> list[Message]:
        if isinstance(query, str):
            messages = [{"role": self.user_role, "content": query}]
        elif isinstance(query, Sequence) and query and all(isinstance(m, dict) for m in query):
            messages = [dict(message) for message in query]
        else:
            raise TypeError(
                "ChatEnv.reset: a query is a string or a list of messages "
                f'({{"role": ..., "content": ...}}), got {type(query).__name__}: {query!r:.80}.'
            )
        if self.system_prompt is None or messages[0].get("role") == self.system_role:
            return messages
        return [{"role": self.system_role, "content": self.system_prompt}, *messages]

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        full = read_conversations(tensordict, FULL, who="ChatEnv.step")
        out = TensorDict(self.full_done_spec.zero(), batch_size=self.batch_size)
        # A row that still awaits a response could not be generated.
        failed = torch.tensor([full.position(i).awaits_response for i in range(len(full))])
        failed &= active_rows(tensordict)
        out.set(TRUNCATED, failed.view(-1, 1))
        out.set(DONE, failed.view(-1, 1).clone())
        write_conversations(out, PROMPT, full)
        return out

    def _set_seed(self, seed: int | None) -> None:
        """Nothing is random here; data loading and the policy have their own seeds."""
