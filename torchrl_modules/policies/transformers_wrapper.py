"""A policy over a Transformers model: generates, and scores what was generated."""

from collections.abc import Sequence
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

from torchrl_data.keys import ENTROPY, FULL, LOG_PROBS_FULL, UNTEMPERED_LOG_PROBS
from torchrl_data.protocols import TokenScores
from torchrl_data.ragged.packed import pad
from torchrl_modules.engines.transformers_engine import TransformersEngine
from torchrl_modules.sampling.logit_warping import warped_log_softmax
from torchrl_modules.sampling.params import SamplingParameters, untruncated
from torchrl_modules.sampling.token_history import TargetHistory
from torchrl_modules.scoring.distribution import TokenDistribution
from torchrl_modules.scoring.token_scoring import PackedScorer

from .base import LLMWrapperBase
from .outputs import write_scores


class TransformersWrapper(LLMWrapperBase):
    """Samples with ``generate`` of Transformers and scores packed sequences.

    Args:
        model: a causal language model, or a hub id or local path to load one from.
        tokenizer: its tokenizer; loaded beside the model when ``model`` is a string.
        generate: ``True`` to sample in :meth:`forward`, ``False`` to score ``full``.
        max_model_len: most tokens of a row; the model's own limit when not given.
        micro_batch_tokens: most tokens of one scoring pass when no gradient is needed.
        score_truncated: scores are those of the distribution that is sampled from, top-k, top-p
            and min-p included, so that with the sampler's weights they are the sampler's; a token
            that was drawn is always in the distribution. ``False`` leaves no token out. Penalties,
            a bias and ``min_tokens`` count in any case: a turn is a run of scored tokens.
        **kwargs: see :class:`~torchrl_modules.policies.base.LLMWrapperBase`.

    Raises:
        TypeError: ``model`` is a model and no tokenizer is given, or it has adapters of PEFT that
            are not layers of it, such as prompts.
    """

    def __init__(
        self,
        model: PreTrainedModel | str,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        generate: bool = True,
        max_model_len: int | None = None,
        micro_batch_tokens: int | None = None,
        score_truncated: bool = True,
        **kwargs: Any,
    ) -> None:
        SamplingParameters.from_kwargs(dict(kwargs.get("generate_kwargs") or {}))  # before loading
        if isinstance(model, str):
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(model)
            model = AutoModelForCausalLM.from_pretrained(model)
        if tokenizer is None:
            raise TypeError("TransformersWrapper needs the tokenizer of the model: tokenizer=...")
        engine = TransformersEngine(model, max_model_len=max_model_len)
        super().__init__(engine, tokenizer=tokenizer, **kwargs)
        self.model = model
        self.generate = generate
        self.score_truncated = score_truncated
        self.scorer = PackedScorer(model, micro_batch_tokens=micro_batch_tokens)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Sample a turn (``generate=True``) or score ``full`` (``generate=False``).

        Args:
            tensordict: ``(input_mode, "prompt")`` to generate; ``(input_mode, "full")`` or
                ``("tokens", "full")``, with the assistant mask if it is known, to score.

        Returns:
            The same TensorDict. Scoring writes ``("log_probs", "full")``, float32, aligned with the
            tokens, 0 where nothing was scored: outside the assistant mask or, without one, outside
            the response (the whole row where no prompt says what the response is); NaN instead of
            the scores of a row that holds a token outside the model's vocabulary; and likewise
            ``("entropy", "full")`` and ``("untempered_log_probs", "full")`` where they were asked
            for.
        """
        if self.generate:
            return super().forward(tensordict)
        rows = self.reads.rows_to_score(tensordict)
        scores = self._score_own(*rows.packed())
        columns = {
            LOG_PROBS_FULL: scores.log_prob,
            (ENTROPY, FULL): scores.entropy,
            (UNTEMPERED_LOG_PROBS, FULL): scores.untempered_log_prob,
        }
        write_scores(
            tensordict,
            rows,
            {key: rows.spread(values) for key, values in columns.items() if values is not None},
        )
        return tensordict

    def _score_own(self, ids: Tensor, lengths: Tensor, mask: Tensor) -> TokenScores:
        """Scores under the distribution that this policy samples from."""
        return self.scorer.score_packed(
            ids,
            lengths,
            mask,
            temperature=self.sampling.temperature or 1.0,
            entropy=self.sampling.entropy,
            truncation=self._truncation,
            untempered=self.sampling.untempered_log_probs,
        )

    @property
    def _truncation(self) -> SamplingParameters:
        return self.sampling if self.score_truncated else untruncated(self.sampling)

    def score_packed(
        self,
        ids: Tensor,
        lengths: Tensor,
        target_mask: Tensor,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> TokenScores:
        """See :class:`torchrl_data.protocols.TokenScorer`.

        The temperature is the caller's; penalties, top-k, top-p and min-p are those of the sampling
        parameters, the last three unless ``score_truncated`` is off.
        """
        return self.scorer.score_packed(
            ids,
            lengths,
            target_mask,
            temperature=temperature,
            entropy=entropy,
            truncation=self._truncation,
        )

    def log_prob(self, tensordict: TensorDictBase) -> Tensor:
        """Log-probs of what :meth:`forward` would score, differentiable; nothing is written.

        Args:
            tensordict: as for :meth:`forward` with ``generate=False``.

        Returns:
            float32 ``[*B, T]`` in nats, 0 where nothing is scored, NaN where it can't be. Ragged
            rows are padded on the right to the longest; padded ones keep their columns.
        """
        rows = self.reads.rows_to_score(tensordict)
        scores = self._score_own(*rows.packed())
        padded = _as_columns(rows.spread(scores.log_prob), rows.keep)
        return padded.reshape(*tensordict.batch_size, -1)

    def get_dist(self, tensordict: TensorDictBase) -> TokenDistribution:
        """The distributions of what :meth:`forward` would score: memory of K x V logits.

        Args:
            tensordict: as for :meth:`forward` with ``generate=False``.

        Returns:
            One distribution per scored position of the batch ``[*B, T]``, laid out as in
            :meth:`log_prob`; differentiable.
        """
        rows = self.reads.rows_to_score(tensordict)
        ids, lengths, mask = rows.packed()
        logits = self.scorer.logits(ids, lengths, mask)
        ids, lengths, mask = (one.to(logits.device) for one in (ids, lengths, mask))
        history = TargetHistory.of(ids, lengths, mask).read(logits.shape[1], self._truncation)
        log_p = warped_log_softmax(logits, self._truncation, ids[mask], history)
        columns = _as_columns(rows.scored, rows.keep)
        return TokenDistribution(log_p, columns.reshape(*tensordict.batch_size, -1))


def _as_columns(rows: Sequence[Tensor], keep: Sequence[Tensor] | None) -> Tensor:
    """Rows without padding as ``[B, T]``, in the columns that they came in if they were padded."""
    if keep is None:
        return pad(rows, value=0)
    placed = [
        row.new_zeros(len(where)).masked_scatter(where.to(row.device), row)
        for row, where in zip(rows, keep, strict=True)
    ]
    return torch.stack(placed)
