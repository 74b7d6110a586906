"""A policy over a Transformers model: generates, and scores what was generated."""

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from torchrl_data.conversation import Conversations
from torchrl_data.keys import ASSISTANT_MASK, FULL, LOG_PROBS_FULL, TOKENS_FULL
from torchrl_data.loop_state import read_conversations
from torchrl_data.packed import pack, unpack
from torchrl_data.protocols import TokenScores

from .token_scoring import PackedScorer
from .transformers_engine import TransformersEngine
from .wrapper_base import LLMWrapperBase


class TransformersWrapper(LLMWrapperBase):
    """Samples with ``generate`` of Transformers and scores packed sequences.

    Args:
        model: a causal language model, or a hub id or local path to load one from.
        tokenizer: its tokenizer; loaded beside the model when ``model`` is a string.
        generate: ``True`` to sample in :meth:`forward`, ``False`` to score ``full``.
        max_model_len: most tokens of a row; the model's own limit when not given.
        micro_batch_tokens: most tokens of one scoring pass when no gradient is needed.
        **kwargs: see :class:`~torchrl_modules.wrapper_base.LLMWrapperBase`.

    Raises:
        TypeError: ``model`` is a model and no tokenizer is given.
    """

    def __init__(
        self,
        model: PreTrainedModel | str,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        generate: bool = True,
        max_model_len: int | None = None,
        micro_batch_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(model, str):
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
            model = AutoModelForCausalLM.from_pretrained(model)
        if tokenizer is None:
            raise TypeError("TransformersWrapper needs the tokenizer of the model: tokenizer=...")
        engine = TransformersEngine(model, max_model_len=max_model_len)
        super().__init__(engine, tokenizer=tokenizer, **kwargs)
        self.model = model
        self.generate = generate
        self.scorer = PackedScorer(model, micro_batch_tokens=micro_batch_tokens)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Sample a turn (``generate=True``) or score ``full`` (``generate=False``).

        Args:
            tensordict: ``("history", "prompt")`` to generate; ``("history", "full")`` or ragged
                ``("tokens", "full")`` with the assistant mask to score.

        Returns:
            The same TensorDict. Scoring writes ``("log_probs", "full")``, float32, aligned with the
            tokens, 0 outside the assistant mask.
        """
        if self.generate:
            return super().forward(tensordict)
        ids, mask = self._read_full(tensordict)
        flat_ids, lengths = pack(ids)
        flat_mask, _ = pack(mask)
        scores = self.score_packed(
            flat_ids, lengths, flat_mask, temperature=self.sampling.temperature or 1.0
        )
        flat = torch.zeros(len(flat_ids), device=scores.log_prob.device)
        flat = flat.masked_scatter(flat_mask.to(flat.device), scores.log_prob)
        rows = lazy_stack([_row({LOG_PROBS_FULL: r}) for r in unpack(flat, lengths)])
        return tensordict.update(rows.reshape(tensordict.batch_size))

    def _read_full(self, tensordict: TensorDictBase) -> tuple[list[Tensor], list[Tensor]]:
        if TOKENS_FULL in tensordict.keys(include_nested=True):
            flat = tensordict.reshape(-1)
            return (
                list(flat.get(TOKENS_FULL, as_list=True)),
                list(flat.get(ASSISTANT_MASK, as_list=True)),
            )
        full: Conversations = read_conversations(tensordict, FULL, who=self._get_name())
        rows = range(len(full))
        return [full.token_ids(i) for i in rows], [full.assistant_mask(i) for i in rows]

    def score_packed(
        self,
        ids: Tensor,
        lengths: Tensor,
        target_mask: Tensor,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> TokenScores:
        """See :class:`torchrl_data.protocols.TokenScorer`."""
        return self.scorer.score_packed(
            ids, lengths, target_mask, temperature=temperature, entropy=entropy
        )


def _row(entries: dict[Any, Tensor]) -> TensorDictBase:
    row = TensorDict({}, batch_size=[])
    for key, value in entries.items():
        row.set(key, value)
    return row
