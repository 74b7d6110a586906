"""A policy over a Transformers model: generates, and scores what was generated."""

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from torchrl_data.keys import LOG_PROBS_FULL
from torchrl_data.packed import pack, unpack
from torchrl_data.protocols import TokenScores

from .policy_outputs import write_scores
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
            tensordict: ``(input_mode, "prompt")`` to generate; ``(input_mode, "full")`` or
                ``("tokens", "full")``, with the assistant mask if it is known, to score.

        Returns:
            The same TensorDict. Scoring writes ``("log_probs", "full")``, float32, aligned with the
            tokens, 0 where nothing was scored: outside the assistant mask or, without one, outside
            the response (the whole row where no prompt says what the response is).
        """
        if self.generate:
            return super().forward(tensordict)
        rows = self.reads.rows_to_score(tensordict)
        ids, lengths = pack(rows.ids)
        mask, _ = pack(rows.masks)
        scores = self.score_packed(ids, lengths, mask, temperature=self.sampling.temperature or 1.0)
        flat = torch.zeros(len(ids), device=scores.log_prob.device)
        flat = flat.masked_scatter(mask.to(flat.device), scores.log_prob)
        write_scores(tensordict, rows, {LOG_PROBS_FULL: unpack(flat, lengths)})
        return tensordict

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
