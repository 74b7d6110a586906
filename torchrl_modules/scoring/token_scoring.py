"""Log-probabilities of tokens under a Transformers model, packed, head on the targets only.

Shape legend: N packed tokens, B sequences, T tokens of the longest, K target tokens, D hidden size.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torchrl_data.protocols import TokenScores
from torchrl_data.ragged.packed import cumulative_lengths, pack
from torchrl_data.templates.image_processor import ImageProcessor
from torchrl_modules.sampling.logit_warping import warped_head_log_prob, warped_log_prob
from torchrl_modules.sampling.params import SamplingParameters
from torchrl_modules.sampling.token_history import TargetHistory

from .chunked_head import chunked_log_prob
from .image_rows import check_image_reading, read_with_images
from .model_reader import Layout, ModelReader, check_packed, plain_head, targets_of
from .packed_attention import use_packed_attention
from .ranks_in_step import check_wrapped_whole, most_of_ranks
from .rope_factors import settle_rope_factors
from .self_test import Difference, find_first, run_trial
from .wrapped_models import is_distributed, run_inside, unwrapped

Method = TypeVar("Method", bound=Callable[..., Any])


def _uncompiled(method: Method) -> Method:
    return torch.compiler.disable(method)  # type: ignore[return-value]


class Reading(NamedTuple):
    """How a model is read, found by :mod:`~torchrl_modules.scoring.self_test`."""

    layout: Layout
    has_plain_head: bool
    """The logits are the product of the last hidden states with the head, so tiles of it do."""
    difference: Difference
    """From the model's own log-probs of a row alone, on a few short rows, in nats."""
    rejected: tuple[str, ...]
    """Faster ways that do not give the model's log-probs, and why."""


class PackedScorer:
    """Scores packed sequences with one causal language model.

    Args:
        model: a causal language model of Transformers, with or without adapters of PEFT that are
            layers of it, in `DistributedDataParallel` or not, sharded by `fully_shard` or not. It
            is read packed where that gives its own log-probs, which is tried on a few short rows;
            otherwise padded; otherwise rows of one length at a time. Where other ranks take part in
            its passes, one without a target is a pass as well.
        micro_batch_tokens: most tokens of one forward pass when no gradient is needed; ``None``
            for no limit.
        share_prefixes: run what sequences of a pass begin with in common through the model once,
            where the model's attention allows it. Values and gradients are the same.
        pack: ``False`` keeps the model's own attention, and reads rows padded.
        autocast_dtype: compute in this type, with the parameters as they are.
        head_dtype: of the logits' sums, such as float32 for a model of bfloat16; ``None`` for the
            type that the model computes in.
        max_model_len: most tokens of a row; for models whose rotary factors depend on it.
        images: what the images of a vision-language model become. Rows with images are read by the
            model's own forward, those of one length together.

    Raises:
        TypeError: a wrapper around the model can't be gone through, or is around a part of it.
        ValueError: ``micro_batch_tokens`` is not positive, or the model is none that can be scored:
            it has no weights, its own forward fails, or it sees what comes after a token.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        micro_batch_tokens: int | None = None,
        share_prefixes: bool = True,
        pack: bool = True,
        autocast_dtype: torch.dtype | None = None,
        head_dtype: torch.dtype | None = None,
        max_model_len: int | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        if micro_batch_tokens is not None and micro_batch_tokens < 1:
            raise ValueError(
                f"PackedScorer: micro_batch_tokens must be at least 1, got {micro_batch_tokens}."
            )
        self.model = unwrapped(model, who="PackedScorer")
        check_wrapped_whole(model, who="PackedScorer")
        self.micro_batch_tokens = micro_batch_tokens
        self._wrapped = model
        self._autocast_dtype = autocast_dtype
        self._head_dtype = head_dtype
        self._longest = settle_rope_factors(self.model, max_model_len, who="PackedScorer")
        self.reading = find_reading(self._wrapped, self.model, pack=pack)
        """How the model is read, and how far its scores are from its own."""
        self._reader = ModelReader(
            self.model,
            layout=self.reading.layout,
            head=plain_head(self.model) if self.reading.has_plain_head else None,
            share_prefixes=share_prefixes,
        )
        self._images = images
        if images is not None:
            if self.is_distributed:
                raise ValueError(
                    "PackedScorer: rows with images take a pass for each of their shapes, and "
                    f"{type(model).__name__} needs equally many on every rank. Train a "
                    "vision-language model in one process, or leave processor= out."
                )
            check_image_reading(self._reader, images, who="PackedScorer")

    @property
    def packed(self) -> bool:
        """Whether rows are read without padding, beside each other."""
        return self.reading.layout is Layout.PACKED

    @property
    def is_distributed(self) -> bool:
        """Whether other ranks take part in every pass, so that all have to make equally many."""
        return is_distributed(self._wrapped)

    # Rows become a trie on the host, and no two batches have the same one: nothing to compile.
    @_uncompiled
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
        images: Sequence[Sequence[str]] | None = None,
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
            images: of each sequence in order, in base 64.

        Raises:
            ValueError: the shapes disagree, a sequence is empty, a first token is a target, an
                id is outside the vocabulary, or tokens and images do not belong together.
        """
        self._check(ids, lengths, target_mask, images)
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
            return self._score(ids, lengths, target_mask, drawn_from, images)
        splits = _token_budget_splits(lengths, self.micro_batch_tokens)
        if self.is_distributed:
            splits += [(0, 0, 0, 0)] * (most_of_ranks(len(splits), device) - len(splits))
        parts = [
            self._score(
                ids[a:b], lengths[i:j], target_mask[a:b], drawn_from, images and images[i:j]
            )
            for i, j, a, b in splits
        ]
        return TokenScores(
            torch.cat([part.log_prob for part in parts]),
            _cat([part.entropy for part in parts]),
            _cat([part.untempered_log_prob for part in parts]),
        )

    @_uncompiled
    def logits(
        self,
        ids: Tensor,
        lengths: Tensor,
        target_mask: Tensor,
        images: Sequence[Sequence[str]] | None = None,
    ) -> Tensor:
        """The model's logits for each target: memory of K x V."""
        # ids: int64 [N]; lengths: int64 [B]; target_mask: bool [N].
        # Gives [K, V], float32, differentiable.
        self._check(ids, lengths, target_mask, images)
        device = self.model.device
        ids, lengths, target_mask = ids.to(device), lengths.to(device), target_mask.to(device)
        if not bool(target_mask.any()):
            return torch.zeros(0, self.model.config.get_text_config().vocab_size, device=device)

        def read() -> Tensor:
            with self._precision():
                outputs = self._read((ids, lengths, target_mask), images)
                head = self._reader.head
                if head is None:
                    return outputs.float()
                if self._head_dtype is None:
                    return head(outputs).float()
                bias = None if head.bias is None else head.bias.to(self._head_dtype)
            weight = head.weight.to(self._head_dtype)
            return nn.functional.linear(outputs.to(self._head_dtype), weight, bias).float()

        return run_inside(self._wrapped, read)

    def _read(
        self, packed: tuple[Tensor, Tensor, Tensor], images: Sequence[Sequence[str]] | None
    ) -> Tensor:
        if self._images is None or not images or not any(images):
            return self._reader.read(targets_of(*packed))
        return read_with_images(self._reader, self._images, packed, images)

    def _precision(self) -> Any:
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.model.device.type, dtype=self._autocast_dtype)

    def _score(
        self,
        ids: Tensor,
        lengths: Tensor,
        target_mask: Tensor,
        drawn_from: SamplingParameters,
        images: Sequence[Sequence[str]] | None = None,
    ) -> TokenScores:
        targets = ids[target_mask]
        if len(targets) == 0:
            return self._score_nothing(drawn_from)

        def score() -> TokenScores:
            history = None
            if drawn_from.changes_logits:
                history = TargetHistory.of(ids, lengths, target_mask)
            with self._precision():
                outputs = self._read((ids, lengths, target_mask), images)
                return self._scores(outputs, targets, drawn_from, history)

        return run_inside(self._wrapped, score)

    def _score_nothing(self, drawn_from: SamplingParameters) -> TokenScores:
        empty = torch.zeros(0, device=self.model.device)
        if self.is_distributed:  # a pass that others wait for, with a gradient of 0
            ids = torch.zeros(2, dtype=torch.int64, device=self.model.device)
            is_target = torch.tensor([False, True], device=ids.device)
            row = self._score(ids, torch.tensor([2], device=ids.device), is_target, drawn_from)
            empty = row.log_prob[:0]
        return TokenScores(
            empty,
            empty.detach() if drawn_from.entropy else None,
            empty.detach() if drawn_from.untempered_log_probs else None,
        )

    def _scores(
        self,
        outputs: Tensor,
        targets: Tensor,
        drawn_from: SamplingParameters,
        history: TargetHistory | None,
    ) -> TokenScores:
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
        head = self._reader.head
        if head is None:
            tokens = history and history.read(outputs.shape[1], drawn_from)
            return warped_log_prob(outputs, targets, drawn_from, tokens)
        if drawn_from.truncates or drawn_from.changes_logits:
            return warped_head_log_prob(
                outputs,
                head.weight,
                targets,
                drawn_from,
                bias=head.bias,
                history=history,
                compute_dtype=self._head_dtype,
            )
        return chunked_log_prob(
            outputs,
            head.weight,
            targets,
            bias=head.bias,
            temperature=drawn_from.temperature,
            entropy=drawn_from.entropy,
            compute_dtype=self._head_dtype,
        )

    def _check(
        self,
        ids: Tensor,
        lengths: Tensor,
        target_mask: Tensor,
        images: Sequence[Sequence[str]] | None,
    ) -> None:
        table = next(self.model.get_input_embeddings().parameters())
        check_packed(ids, lengths, target_mask, table.shape[0], self._images, images)
        if self._longest is None or not len(lengths):
            return
        longest = int(lengths.max())
        if longest > self._longest:
            raise ValueError(
                f"score_packed: a row has {longest} tokens, but {type(self.model).__name__} "
                f"computes with the rotary factors of rows of at most {self._longest}. Give the "
                "policy a larger max_model_len."
            )


_found: "WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], Reading]]" = WeakKeyDictionary()


@torch.no_grad()
def find_reading(wrapped: nn.Module, model: Any, *, pack: bool) -> Reading:
    """The fastest way to read a model that gives its own log-probs; tried once per model."""
    head = plain_head(model)
    # A rank that knows the model from before it was wrapped tries it again, as the others do.
    known = (pack, is_distributed(wrapped), type(head), model.dtype, model.device)
    state = (*known, model.config._attn_implementation)
    earlier = _found.get(model)
    if earlier is not None and earlier[0] == state:
        return earlier[1]
    own_attention = use_packed_attention(model) if pack else None
    trial = run_inside(wrapped, lambda: run_trial(model, who="PackedScorer"))
    layouts = [x for x in Layout if x is not Layout.PACKED or own_attention is not None]
    ways = [(layout, x) for layout in layouts for x in (head, None) if x is not None or x is None]
    ways = [way for i, way in enumerate(ways) if way not in ways[:i]]
    names = [f"{layout.value}{'' if x is not None else ', its own logits'}" for layout, x in ways]

    def compute(layout: Layout, head: nn.Linear | None) -> Sequence[Tensor]:
        return run_inside(wrapped, lambda: _trial_log_probs(model, layout, head, trial.rows))

    at, difference, wrong = find_first(
        model,
        trial,
        [(name, lambda way=way: compute(*way)) for name, way in zip(names, ways, strict=True)],
    )
    if at is None or difference is None:
        raise ValueError(
            f"PackedScorer: {type(model).__name__} can't be scored: no way to read several rows "
            f"gives what its forward says of one row alone ({'; '.join(wrong)})."
        )
    if ways[at][0] is not Layout.PACKED and own_attention is not None:
        model.set_attn_implementation(own_attention)
    reading = Reading(ways[at][0], ways[at][1] is not None, difference, tuple(wrong))
    _found[model] = ((*state[:-1], model.config._attn_implementation), reading)
    return reading


def _trial_log_probs(
    model: Any, layout: Layout, head: nn.Linear | None, rows: Sequence[Tensor]
) -> Sequence[Tensor]:
    ids, lengths = pack(rows)
    lengths = lengths.to(ids.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[cumulative_lengths(lengths)[:-1]] = False
    outputs = ModelReader(model, layout=layout, head=head).read(targets_of(ids, lengths, mask))
    logits = outputs if head is None else head(outputs)
    log_p = logits.double().log_softmax(-1).gather(1, ids[mask][:, None]).squeeze(1)
    return log_p.split((lengths - 1).tolist())


def _cat(parts: list[Tensor | None]) -> Tensor | None:
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


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
