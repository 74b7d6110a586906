"""Token by token, with a hash of everything so far: for search trees and for pruning duplicates.

Shape legend: B rows, T tokens so far.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Categorical, Composite, NonTensor, SipHash, Unbounded
from torchrl.envs import EnvBase

from torchrl_data.conversation.batched_object import write_objects
from torchrl_data.errors import MissingEntryError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LLMHashingEnv(EnvBase):
    """An action is the next token; ``hashing`` names the token sequence that it leads to.

    A hash is that of the hash before and the new token, so hashing costs the same however long the
    sequence, and equal continuations of equal prompts have equal hashes. It never ends an episode.

    Args:
        vocab_size: number of tokens; the tokenizer's when not given.
        hashing_module: int64 ``[B, 2]`` to int64 ``[B]`` (of a prompt ``[B, T]``); TorchRL's
            ``SipHash`` when not given, whose values are those of one process (of all processes
            with the same ``PYTHONHASHSEED``).
        observation_key: the tokens so far, int64 ``[B, T]``.
        text_output: whether to write the text as well.
        tokenizer: decodes the text.
        text_key: the text, a string per row.
        batch_size: B.

    Raises:
        TypeError: there is neither ``vocab_size`` nor a tokenizer, or text is asked for without a
            tokenizer.
    """

    def __init__(
        self,
        vocab_size: int | None = None,
        *,
        hashing_module: Callable[[Tensor], Tensor] | None = None,
        observation_key: str = "observation",
        text_output: bool = True,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        text_key: str = "text",
        batch_size: int = 1,
    ) -> None:
        if vocab_size is None and tokenizer is not None:
            vocab_size = len(tokenizer)
        if vocab_size is None or (text_output and tokenizer is None):
            raise TypeError("LLMHashingEnv needs a tokenizer, or vocab_size and text_output=False.")
        super().__init__(batch_size=(batch_size,))
        self.vocab_size = vocab_size
        self._hash: Any = hashing_module or SipHash()
        self._tokenizer = tokenizer
        self.observation_key = observation_key
        self.text_key = text_key if text_output else None
        size = self.batch_size
        one = torch.Size((*size, 1))
        entries: dict[str, Any] = {
            observation_key: Unbounded(torch.Size((*size, -1)), dtype=torch.int64),
            "hashing": Unbounded(one, dtype=torch.int64),
        }
        if self.text_key is not None:
            entries[self.text_key] = NonTensor(shape=size, example_data="text")
        self.observation_spec = Composite(entries, shape=size)
        self.action_spec = Categorical(vocab_size, shape=one, dtype=torch.int64)
        self.full_reward_spec = Composite(shape=size)
        self.full_done_spec = Composite(
            {key: Binary(1, one, dtype=torch.bool) for key in ("done", "terminated")}, shape=size
        )

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        del kwargs
        tokens = None if tensordict is None else tensordict.get(self.observation_key, None)
        if tokens is None:
            raise MissingEntryError(
                f"LLMHashingEnv.reset reads {self.observation_key!r}, the tokens of the prompt."
            )
        if tokens.shape[:-1] != self.batch_size or not tokens.shape[-1]:
            raise ValueError(
                f"LLMHashingEnv.reset: {self.observation_key!r} must have the shape [B, T] with "
                f"B = {self.batch_size.numel()} and at least one token, got {list(tokens.shape)}."
            )
        return self._observed(tokens, self._hash(tokens))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        action = tensordict.get("action")
        tokens = torch.cat([tensordict.get(self.observation_key), action], -1)
        return self._observed(
            tokens, self._hash(torch.cat([tensordict.get("hashing"), action], -1))
        )

    def _observed(self, tokens: Tensor, hashing: Tensor) -> TensorDictBase:
        out = TensorDict(self.full_done_spec.zero(), batch_size=self.batch_size)
        out.set(self.observation_key, tokens)
        out.set("hashing", hashing.view(*self.batch_size, 1))
        if self.text_key is not None and self._tokenizer is not None:
            write_objects(out, self.text_key, self._tokenizer.batch_decode(tokens))
        return out

    def _set_seed(self, seed: int | None) -> None:
        """Nothing is random here."""
