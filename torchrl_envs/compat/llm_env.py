"""Text or token ids that a model goes on with, as they are: no roles, no chat template.

Shape legend: B rows, T tokens of a row (ragged).
"""

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from torchrl_data.conversation import Conversations, EncodedMessages, Turn
from torchrl_data.conversation_io import read_conversations
from torchrl_data.foreign_conversations import encode_texts, prompt_of_tokens
from torchrl_data.keys import PROMPT, TEXT, TOKENS
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.episode.chat_env import ChatEnv
from torchrl_envs.episode.episode_env import EpisodeEnv


class LLMEnv(ChatEnv):
    """Environment that appends a response to its prompt, and nothing else.

    TorchRL's forerunner of :class:`~torchrl_envs.ChatEnv`, for completion rather than conversation:
    ``reset`` takes a ``query`` (or ``text``) as the whole prompt, ``step`` appends the response,
    with its stop token if it was sampled. By itself it never ends; with a transform
    (:meth:`append_transform`, :meth:`from_dataloader`) it is an
    :class:`~torchrl_envs.EpisodeEnv`, whose episodes end with the first turn that
    nobody answers. Control tokens that a prompt spells are control tokens; use ``ChatEnv`` for what
    others have written.

    Args:
        tokenizer: the policy's.
        from_text: whether prompts are shown as strings, ``("text", "prompt")``, or as token ids,
            ``("tokens", "prompt")``, int64 ``[T]`` per row. Queries are strings in both, and ids
            too with ``from_text=False``.
        batch_size: as of ``ChatEnv``.

    Raises:
        ValueError: the batch has no row.

    Examples:
        >>> env = LLMEnv(tokenizer=tokenizer, batch_size=1)
        >>> batch = env.reset(TensorDict({"query": ["Once upon"]}, batch_size=[1]))
        >>> batch["text_response"] = [" a time"]
        >>> env.step(batch)["next", "text"].prompt
        ['Once upon a time']
    """

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        from_text: bool = True,
        batch_size: Sequence[int] | int = (1,),
    ) -> None:
        mode = TEXT if from_text else TOKENS
        super().__init__(input_mode=mode, batch_size=batch_size, tokenizer=tokenizer)

    @classmethod
    def from_dataloader(
        cls,
        dataloader: Any,
        *,
        tokenizer: PreTrainedTokenizerBase,
        from_text: bool = True,
        batch_size: Sequence[int] | int = (1,),
        repeats: int = 1,
        **kwargs: Any,
    ) -> EpisodeEnv:
        """An environment whose prompts come from data.

        Args:
            dataloader: whatever a ``DataLoadingPrimer`` takes; the batches of a torch
                ``DataLoader`` are taken apart.
            tokenizer: see the class.
            from_text: see the class.
            batch_size: see the class.
            repeats: rollouts of one row, which form a group.
            **kwargs: of the ``DataLoadingPrimer``.
        """
        env = cls(tokenizer=tokenizer, from_text=from_text, batch_size=batch_size)
        return env.append_transform(DataLoadingPrimer(dataloader, group_size=repeats, **kwargs))

    def _with_text(self, batch: TensorDictBase, texts: Sequence[str]) -> Conversations:
        """The prompts with what somebody handed in, as it is."""
        prompt = read_conversations(batch, PROMPT, who="LLMEnv.step")
        rows = encode_texts(texts, self.encoder)
        turns = [
            Turn(ids, None, {"role": "assistant", "content": text})
            for ids, text in zip(rows, texts, strict=True)
        ]
        return prompt.append_turns(turns)

    def _write_prompt(self, batch: TensorDictBase, prompt: Conversations) -> None:
        """The next token is the policy's, without a generation header."""
        super()._write_prompt(batch, _awaiting(prompt))

    def open(self, query: Any, tools: Any) -> Conversations:
        """See :meth:`ChatEnv.open`; queries are prompts, to the token."""
        del tools
        if isinstance(query, str):
            rows = encode_texts([query], self.encoder)
        elif self.input_mode == TOKENS and isinstance(query, Tensor | Sequence):
            rows = [[int(index) for index in query]]
        else:
            also = " or token ids" if self.input_mode == TOKENS else ""
            raise TypeError(
                f"LLMEnv.reset: a query is a string{also}, got {type(query).__name__}: "
                f"{query!r:.80}. Messages need roles: use ChatEnv."
            )
        return _awaiting(prompt_of_tokens(rows, self.encoder))


def _awaiting(prompt: Conversations) -> Conversations:
    nothing = EncodedMessages([], [])
    return prompt.append_encoded([None if p.awaits_response else nothing for p in prompt.positions])
