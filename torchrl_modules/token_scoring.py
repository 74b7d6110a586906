"""Log-probabilities of tokens under a Transformers model, packed, head on the targets only.

Shape legend: N packed tokens, B sequences, T tokens of the longest, K target tokens, D hidden size.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_data.packed import cumulative_lengths, pad, sequence_index, unpack
from torchrl_data.protocols import TokenScores

from .chunked_head import chunked_log_prob
from .packed_attention import packed_input, use_packed_attention

# Settings by which some models change the logits after the head; those use the model's own head.
_LOGIT_SETTINGS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


class PackedScorer:
    """Scores packed sequences with one causal language model.

    Args:
        model: a causal language model of Transformers. Switched to the packed attention where it
            supports registered attentions; scored padded otherwise.
        micro_batch_tokens: most tokens of one forward pass when no gradient is needed; ``None``
            for no limit.
    """

    def __init__(self, model: PreTrainedModel, *, micro_batch_tokens: int | None = None) -> None:
        self.model = model
        self.packed = use_packed_attention(model)
        self.micro_batch_tokens = micro_batch_tokens
        head = model.get_output_embeddings()
        plain = type(head) is nn.Linear and not any(
            getattr(model.config, name, None) not in (None, 1, 1.0) for name in _LOGIT_SETTINGS
        )
        self._head = head if plain else None

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

        Raises:
            ValueError: the shapes disagree, a sequence is empty, or a first token is a target.
        """
        _check_packed(ids, lengths, target_mask)
        device = self.model.device
        lengths = lengths.to(device)
        ids, target_mask = ids.to(device), target_mask.to(device)
        if self.micro_batch_tokens is None or torch.is_grad_enabled():
            return self._score(ids, lengths, target_mask, temperature, entropy)
        parts = [
            self._score(ids[a:b], lengths[i:j], target_mask[a:b], temperature, entropy)
            for i, j, a, b in _token_budget_splits(lengths, self.micro_batch_tokens)
        ]
        return TokenScores(
            torch.cat([part.log_prob for part in parts]),
            torch.cat([part.entropy for part in parts if part.entropy is not None])
            if entropy
            else None,
        )

    def _score(
        self, ids: Tensor, lengths: Tensor, target_mask: Tensor, temperature: float, entropy: bool
    ) -> TokenScores:
        order = _length_order(ids, lengths)
        ids, target_mask, lengths = ids[order], target_mask[order], lengths.sort(stable=True).values
        # The token at position t is predicted by the hidden state at t - 1.
        predictors = target_mask.nonzero().squeeze(1) - 1
        targets = ids[target_mask]
        if len(targets) == 0:
            empty = torch.zeros(0, device=ids.device)
            return TokenScores(empty, empty if entropy else None)
        if self._head is None:
            log_p = torch.log_softmax(self._own_logits(ids, lengths, predictors) / temperature, -1)
            log_prob = log_p.gather(1, targets[:, None]).squeeze(1)
            entropies = torch.special.entr(log_p.exp()).sum(-1)
        else:
            hidden = self._hidden(ids, lengths)[predictors]
            log_prob, entropies = chunked_log_prob(
                hidden,
                self._head.weight,
                targets,
                bias=self._head.bias,
                temperature=temperature,
            )
        # Back in the order in which the tokens came.
        back = order[target_mask].argsort()
        return TokenScores(log_prob[back], entropies[back] if entropy else None)

    def _hidden(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Last hidden states of packed sequences, ``[N, D]``."""
        decoder = self.model.base_model
        if not self.packed:
            inputs, keep = _padded_inputs(ids, lengths)
            return decoder(**inputs, use_cache=False).last_hidden_state[keep]
        with packed_input():
            output = decoder(
                input_ids=ids[None],
                position_ids=_positions(lengths)[None],
                segment_lengths=lengths.tolist(),
                use_cache=False,
            )
        return output.last_hidden_state[0]

    def _own_logits(self, ids: Tensor, lengths: Tensor, predictors: Tensor) -> Tensor:
        """Float32 logits of the model's own head at some packed positions, ``[K, V]``."""
        if not self.packed:
            inputs, keep = _padded_inputs(ids, lengths)
            return self.model(**inputs, use_cache=False).logits[keep][predictors].float()
        with packed_input():
            output = self.model(
                input_ids=ids[None],
                position_ids=_positions(lengths)[None],
                segment_lengths=lengths.tolist(),
                use_cache=False,
                logits_to_keep=predictors,
            )
        return output.logits[0].float()


def _length_order(ids: Tensor, lengths: Tensor) -> Tensor:
    """Where each token comes from when the sequences are sorted by length, int64 ``[N]``."""
    starts = cumulative_lengths(lengths)[:-1]
    by_length = lengths.argsort(stable=True)
    sorted_lengths = lengths[by_length]
    shift = starts[by_length] - cumulative_lengths(sorted_lengths)[:-1]
    return torch.arange(len(ids), device=ids.device) + shift.repeat_interleave(sorted_lengths)


def _positions(lengths: Tensor) -> Tensor:
    starts = cumulative_lengths(lengths)[:-1]
    index = sequence_index(lengths)
    return torch.arange(len(index), device=lengths.device) - starts[index]


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
