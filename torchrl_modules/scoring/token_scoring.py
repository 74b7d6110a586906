"""Log-probabilities of tokens under a Transformers model, packed, head on the targets only.

Shape legend: N packed tokens, B sequences, T tokens of the longest, K target tokens, D hidden size.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_data.protocols import TokenScores
from torchrl_data.ragged.packed import cumulative_lengths, pad, sequence_index, unpack
from torchrl_modules.adapters import is_linear, model_inside
from torchrl_modules.sampling.logit_warping import warped_head_log_prob, warped_log_prob
from torchrl_modules.sampling.params import SamplingParameters
from torchrl_modules.sampling.token_history import TargetHistory

from .chunked_head import chunked_log_prob
from .packed_attention import PackedInputLost, can_share, packed_input, use_packed_attention
from .prefix_trie import PrefixTrie, build_trie

# Settings by which some models change the logits after the head; those use the model's own head.
_LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class PackedScorer:
    """Scores packed sequences with one causal language model.

    Args:
        model: a causal language model of Transformers, with or without adapters of PEFT that are
            layers of it. Switched to the packed attention where it supports registered attentions;
            scored padded otherwise.
        micro_batch_tokens: most tokens of one forward pass when no gradient is needed; ``None``
            for no limit.
        share_prefixes: run what sequences of a pass begin with in common through the model once,
            where the model's attention allows it. Values and gradients are the same.

    Raises:
        ValueError: ``micro_batch_tokens`` is not positive.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        micro_batch_tokens: int | None = None,
        share_prefixes: bool = True,
    ) -> None:
        if micro_batch_tokens is not None and micro_batch_tokens < 1:
            raise ValueError(
                f"PackedScorer: micro_batch_tokens must be at least 1, got {micro_batch_tokens}."
            )
        self.model = model_inside(model)
        self.packed = use_packed_attention(self.model)
        self.micro_batch_tokens = micro_batch_tokens
        self.share_prefixes = share_prefixes
        self._head = _plain_head(self.model)

    def score_packed(
        self,
        ids: Tensor,
        lengths: Tensor,
        target_mask: Tensor,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        truncation: SamplingParameters | None = None,
        untempered: bool = False,
    ) -> TokenScores:
        """See :class:`torchrl_data.protocols.TokenScorer`.

        Args:
            ids: int64 ``[N]``.
            lengths: int64 ``[B]``.
            target_mask: bool ``[N]``.
            temperature: of the softmax.
            entropy: also give it.
            truncation: its top-k, top-p and min-p leave tokens out of the distribution (the
                targets themselves are always in it), and its penalties change it; each run of
                targets is then a turn, and what comes before it in its sequence the turn's prompt.
            untempered: also give the log-probs under the model's own softmax.

        Raises:
            ValueError: the shapes disagree, a sequence is empty, a first token is a target, or an
                id is outside the vocabulary.
        """
        _check_packed(ids, lengths, target_mask)
        table = next(self.model.get_input_embeddings().parameters())
        _check_ids(ids, lengths, table.shape[0])
        device = self.model.device
        lengths = lengths.to(device)
        ids, target_mask = ids.to(device), target_mask.to(device)
        drawn_from = replace(
            truncation or SamplingParameters(),
            temperature=temperature,
            entropy=entropy,
            untempered_log_probs=untempered,
        )
        if self.micro_batch_tokens is None or torch.is_grad_enabled():
            return self._score(ids, lengths, target_mask, drawn_from)
        parts = [
            self._score(ids[a:b], lengths[i:j], target_mask[a:b], drawn_from)
            for i, j, a, b in _token_budget_splits(lengths, self.micro_batch_tokens)
        ]
        return TokenScores(
            torch.cat([part.log_prob for part in parts]),
            _cat([part.entropy for part in parts]),
            _cat([part.untempered_log_prob for part in parts]),
        )

    def logits(self, ids: Tensor, lengths: Tensor, target_mask: Tensor) -> Tensor:
        """The model's logits for each target: memory of K x V.

        Args:
            ids: int64 ``[N]``.
            lengths: int64 ``[B]``.
            target_mask: bool ``[N]``.

        Returns:
            ``[K, V]``, float32, differentiable.

        Raises:
            ValueError: as for :meth:`score_packed`.
        """
        _check_packed(ids, lengths, target_mask)
        device = self.model.device
        ids, lengths, target_mask = ids.to(device), lengths.to(device), target_mask.to(device)
        predictors = target_mask.nonzero().squeeze(1) - 1
        if len(predictors) == 0:
            return torch.zeros(0, self.model.config.get_text_config().vocab_size, device=device)
        outputs = self._read(ids, lengths, target_mask, predictors)
        return (outputs if self._head is None else self._head(outputs)).float()

    def _score(
        self, ids: Tensor, lengths: Tensor, target_mask: Tensor, drawn_from: SamplingParameters
    ) -> TokenScores:
        # The token at position t is predicted by the hidden state at t - 1.
        predictors = target_mask.nonzero().squeeze(1) - 1
        targets = ids[target_mask]
        if len(targets) == 0:
            empty = torch.zeros(0, device=ids.device)
            return TokenScores(
                empty,
                empty if drawn_from.entropy else None,
                empty if drawn_from.untempered_log_probs else None,
            )
        outputs = self._read(ids, lengths, target_mask, predictors)
        history = None
        if drawn_from.changes_logits:
            history = TargetHistory.of(ids, lengths, target_mask)
        log_prob, entropy = self._head_scores(outputs, targets, drawn_from, history)
        untempered = None
        if drawn_from.untempered_log_probs:
            own = SamplingParameters()
            plain = drawn_from.is_own_softmax
            untempered = log_prob if plain else self._head_scores(outputs, targets, own)[0]
        return TokenScores(log_prob, entropy if drawn_from.entropy else None, untempered)

    def _head_scores(
        self,
        outputs: Tensor,
        targets: Tensor,
        drawn_from: SamplingParameters,
        history: TargetHistory | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """From hidden states ``[K, D]``, or from logits ``[K, V]`` of a head of another kind."""
        head = self._head
        if head is None:
            tokens = history and history.read(outputs.shape[1], drawn_from)
            return warped_log_prob(outputs, targets, drawn_from, tokens)
        if drawn_from.truncates or drawn_from.changes_logits:
            return warped_head_log_prob(
                outputs, head.weight, targets, drawn_from, bias=head.bias, history=history
            )
        return chunked_log_prob(
            outputs,
            head.weight,
            targets,
            bias=head.bias,
            temperature=drawn_from.temperature,
            entropy=drawn_from.entropy,
        )

    def _read(
        self, ids: Tensor, lengths: Tensor, target_mask: Tensor, predictors: Tensor
    ) -> Tensor:
        """Hidden states ``[K, D]``, or logits ``[K, V]`` of a head of another kind."""
        read = self._hidden if self._head is not None else self._own_logits
        try:
            return read(ids, lengths, target_mask, predictors)
        except PackedInputLost:  # by the first layer, the first time
            self.packed = False
            return read(ids, lengths, target_mask, predictors)

    def _hidden(
        self, ids: Tensor, lengths: Tensor, target_mask: Tensor, predictors: Tensor
    ) -> Tensor:
        """Last hidden states at some packed positions, ``[K, D]``."""
        decoder = self.model.base_model
        if not self.packed:
            inputs, keep = _padded_inputs(ids, lengths)
            return decoder(**inputs, use_cache=False).last_hidden_state[keep][predictors]
        trie = self._trie(ids, lengths, target_mask)
        with packed_input():
            output = decoder(**_packed_inputs(trie), use_cache=False)
        # Shared positions repeat: the backward of indexing would add them up in any order.
        return output.last_hidden_state[0].index_select(0, trie.node[predictors])

    def _own_logits(
        self, ids: Tensor, lengths: Tensor, target_mask: Tensor, predictors: Tensor
    ) -> Tensor:
        """Float32 logits of the model's own head at some packed positions, ``[K, V]``."""
        if not self.packed:
            inputs, keep = _padded_inputs(ids, lengths)
            return self.model(**inputs, use_cache=False).logits[keep][predictors].float()
        trie = self._trie(ids, lengths, target_mask)
        nodes, shared = trie.node[predictors].unique(return_inverse=True)
        with packed_input():
            output = self.model(**_packed_inputs(trie), use_cache=False, logits_to_keep=nodes)
        return output.logits[0].float().index_select(0, shared)

    def _trie(self, ids: Tensor, lengths: Tensor, target_mask: Tensor) -> PrefixTrie:
        # What comes after the predictor of the last target of a sequence is needed by nobody.
        ends = _last_targets(lengths, target_mask)
        share = self.share_prefixes and can_share(self.model, int(ends.max()))
        return build_trie(ids, lengths, ends, share=share)


def _plain_head(model: PreTrainedModel) -> nn.Linear | None:
    """The head, if the logits are this product with the decoder's output and nothing else."""
    head = model.get_output_embeddings()
    is_changed = any(
        getattr(model.config, name, None) not in (None, 1, 1.0) for name in _LOGIT_SETTINGS
    )
    # A head inside another module comes after something else; a model may be its own base.
    is_last = any(child is head for child in model.children()) and model.base_model is not model
    return head if is_linear(head) and is_last and not is_changed else None


def _cat(parts: list[Tensor | None]) -> Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def _last_targets(lengths: Tensor, target_mask: Tensor) -> Tensor:
    """Position of the last target in each sequence, 0 where there is none; int64 ``[B]``."""
    starts = cumulative_lengths(lengths)[:-1]
    at = target_mask.nonzero().squeeze(1)
    row = sequence_index(lengths)[at]
    last = torch.zeros_like(lengths)
    return last.scatter_reduce(0, row, at - starts[row], "amax")


def _packed_inputs(trie: PrefixTrie) -> dict[str, Any]:
    return {"input_ids": trie.ids[None], "position_ids": trie.positions[None], "trie": trie}


def _padded_inputs(ids: Tensor, lengths: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    rows = unpack(ids, lengths)
    keep = pad([torch.ones_like(row, dtype=torch.bool) for row in rows], value=False)
    return {"input_ids": pad(rows, value=0), "attention_mask": keep.long()}, keep


def _token_budget_splits(lengths: Tensor, budget: int) -> list[tuple[int, int, int, int]]:
    """Runs of whole sequences of at most ``budget`` tokens: sequences i:j, tokens a:b."""
    splits, first, start, total = [], 0, 0, 0
    for i, length in enumerate(lengths.tolist()):
        if total and total + length > budget:
            splits.append((first, i, start, start + total))
            first, start, total = i, start + total, 0
        total += length
    splits.append((first, len(lengths), start, start + total))
    return splits


def _check_ids(ids: Tensor, lengths: Tensor, vocab_size: int) -> None:
    unknown = (ids < 0) | (ids >= vocab_size)
    if bool(unknown.any()):
        at = int(unknown.nonzero()[0])
        row = int(sequence_index(lengths)[at])
        raise ValueError(
            f"score_packed: token {at - int(lengths[:row].sum())} of sequence {row} has the id "
            f"{int(ids[at])}, but the model's vocabulary ends at {vocab_size - 1}. Was it encoded "
            "with another tokenizer?"
        )


def _check_packed(ids: Tensor, lengths: Tensor, target_mask: Tensor) -> None:
    if ids.ndim != 1 or ids.shape != target_mask.shape or int(lengths.sum()) != len(ids):
        raise ValueError(
            f"score_packed takes ids [N], lengths that sum to N and a mask [N]; got ids "
            f"{tuple(ids.shape)}, lengths that sum to {int(lengths.sum())}, mask "
            f"{tuple(target_mask.shape)}."
        )
    if bool((lengths < 1).any()):
        raise ValueError(f"score_packed: a sequence is empty; lengths are {lengths.tolist()}.")
    starts = cumulative_lengths(lengths)[:-1].to(target_mask.device)
    if bool(target_mask[starts].any()):
        raise ValueError(
            "score_packed: the first token of a sequence is a target, but nothing comes before "
            "it to predict it."
        )
