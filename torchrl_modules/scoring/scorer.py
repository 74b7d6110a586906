"""Log-probabilities of tokens under a Transformers model, packed, head on the targets only.

Shape legend: N packed tokens, B sequences, T tokens of the longest, K target tokens, D hidden
size.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import check_counts
from torchrl_data.devices import on_device, on_host
from torchrl_data.ragged.packed import cumulative_lengths
from torchrl_data.sampling_masks import SamplingMasks
from torchrl_data.templates.image_processor import ImageProcessor
from torchrl_data.token_scorer import TokenScores
from torchrl_modules.batch_invariance import (
    BatchInvariance,
    check_batch_invariance,
    invariant_linear,
    refuse_beside_invariance,
)
from torchrl_modules.compiled_layers import settle_compilation
from torchrl_modules.sampling.distribution import warped_head_log_prob, warped_log_prob
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.sampling.token_history import TargetHistory
from torchrl_modules.transformers_releases import recomputes_activations

from .chunked_log_prob import chunked_log_prob
from .expert_routes import expert_counts, replayed_layers
from .head_product import head_product, plain_head
from .image_reading import check_image_reading, read_with_images
from .model_reader import Layout, ModelReader, check_packed, empty_pass, passes_within, targets_of
from .packed_attention import use_packed_attention
from .rope_factors import check_longest, settle_rope_factors
from .split_head import whole_head
from .trial import ROUNDED, Difference, find_first, packed_rows, run_trial
from .wrapped_models import (
    check_wrapped_whole,
    evaluation_mode,
    is_distributed,
    is_split,
    precision,
    run_inside,
    unwrapped,
)


class Reading(NamedTuple):
    """How a model is read, found by :mod:`~torchrl_modules.scoring.trial`."""

    layout: Layout
    has_plain_head: bool
    """The logits are the product of the last hidden states with the head, so tiles of it do."""
    difference: Difference
    """From the model's own log-probs of a row alone, on a few short rows, in nats."""
    rejected: tuple[str, ...]
    """Faster ways that do not give the model's log-probs, and why."""


class PackedScorer(ChecksAttributes):
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
        compile_layers: see :func:`~torchrl_modules.compiled_layers.compile_layers`.
        batch_invariant: log-probs are the same to the bit whatever is scored beside a row, and the
            same that an engine with this setting reports. Rows are read padded, and not packed.
        context_group: ranks that share out the tokens of each pass (context parallelism), of
            ``torch.distributed``; all of them call this with the same rows, and get the scores of
            all tokens. Gradients are those of the mean over all ranks.

    Raises:
        TypeError: a wrapper around the model can't be gone through, or is around a part of it.
        ValueError: ``micro_batch_tokens`` is not positive, or the model is none that can be scored:
            it has no weights, its own forward fails, or it sees what comes after a token; or it is
            not ``batch_invariant``, or something is asked for beside that which can't be; or its
            tokens can't be shared out over a ``context_group``.

    See Also:
        Grattafiori et al., 2024, arXiv:2407.21783, section 3.3.2, for context parallelism whose
        ranks gather keys and values.
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
        compile_layers: bool | None = None,
        batch_invariant: bool = False,
        context_group: Any = None,
    ) -> None:
        self.model = unwrapped(model, who="PackedScorer")
        check_wrapped_whole(model, who="PackedScorer")
        if batch_invariant:
            refuse_beside_invariance(
                autocast_dtype=autocast_dtype,
                head_dtype=head_dtype,
                compile_layers=compile_layers,
                images=images,
                **{"gradient checkpointing": recomputes_activations(model)},
            )
            check_batch_invariance(self.model)
        self.batch_invariant = batch_invariant
        self.micro_batch_tokens: int | None = self._checked_change(
            "micro_batch_tokens", micro_batch_tokens
        )
        self._wrapped = model
        self._autocast_dtype = autocast_dtype
        self._head_dtype = head_dtype
        self._longest = settle_rope_factors(self.model, max_model_len, who="PackedScorer")
        self.reading = find_reading(self._wrapped, self.model, pack=pack and not batch_invariant)
        """How the model is read, and how far its scores are from its own."""
        self._reader = ModelReader(
            self.model,
            layout=self.reading.layout,
            head=plain_head(self.model) if self.reading.has_plain_head else None,
            share_prefixes=share_prefixes,
        )
        settle_compilation(model, self.model, compile_layers)
        self._images = images
        if images is not None:
            if self.is_distributed:
                raise ValueError(
                    "PackedScorer: rows with images take a pass for each of their shapes, and "
                    f"{type(model).__name__} needs equally many on every rank. Train a "
                    "vision-language model in one process, or leave processor= out."
                )
            check_image_reading(self._reader, images, who="PackedScorer")
        self._context_group = context_group
        if context_group is not None:
            self._check_context()

    changeable = frozenset({"micro_batch_tokens"})

    def _checked_change(self, name: str, value: Any) -> Any:
        check_counts("PackedScorer", **{name: value})
        return value

    @property
    def share_prefixes(self) -> bool:
        """Whether what sequences of a pass begin with in common is read once; it may be set."""
        return self._reader.share_prefixes

    @share_prefixes.setter
    def share_prefixes(self, share: bool) -> None:
        self._reader.share_prefixes = share

    @property
    def packed(self) -> bool:
        """Whether rows are read without padding, beside each other."""
        return self.reading.layout is Layout.PACKED

    @property
    def is_distributed(self) -> bool:
        """Whether other ranks take part in every pass, so that all have to make equally many."""
        return is_distributed(self._wrapped)

    @property
    def is_compiled(self) -> bool:
        """Whether layers of the model are compiled."""
        every: Any = self.model.modules()
        return any(module._compiled_call_impl is not None for module in every)

    # Rows become a trie on the host, and no two batches have the same one: nothing to compile.
    @torch.compiler.disable()
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
        targets: Tensor | None = None,
        sampling_masks: SamplingMasks | None = None,
        routed_experts: Tensor | None = None,
    ) -> TokenScores:
        """See :class:`torchrl_data.TokenScorer`.

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
            targets: int64 ``[K]``, scored in place of the sequences' own tokens at the mask, each
                after what comes before it there.
            sampling_masks: the sets that the K targets were drawn from; a target with one has the
                distribution over that set, whatever the truncation.
            routed_experts: the experts to which a mixture sends the N tokens, ``[N, L, S]``; the
                router's scores weigh them, and have a gradient.

        Raises:
            ValueError: the shapes disagree, a sequence is empty, a first token is a target, an
                id is outside the vocabulary, tokens and images do not belong together, or a
                target is not in the set that it was drawn from; ``targets`` are given beside
                penalties, which read the sequences' own tokens; or experts are given that can't be
                replayed.
        """
        packed = self._checked(ids, lengths, target_mask, images)
        if targets is None:
            scored = packed[0][packed[2]]
        else:
            scored = self._checked_targets(targets, packed[2], truncation)
        if routed_experts is not None:
            routed_experts = routed_experts.cpu()
            self._check_experts(routed_experts, len(ids), images)
        if sampling_masks is not None:
            sampling_masks.check_targets(scored)
        drawn_from = replace(
            truncation or SamplingParameters(),
            temperature=temperature,
            entropy=entropy,
            untempered_log_probs=untempered,
        )
        if self.micro_batch_tokens is None or torch.is_grad_enabled():
            return self._score(*packed, drawn_from, images, scored, sampling_masks, routed_experts)
        ids, lengths, target_mask = packed
        splits = passes_within(lengths, self.micro_batch_tokens, self._wrapped)
        before = cumulative_lengths(target_mask.long()).tolist()
        own = [slice(before[a], before[b]) for *_, a, b in splits]  # targets
        parts = [
            self._score(
                *(ids[a:b], lengths[i:j], target_mask[a:b], drawn_from, images and images[i:j]),
                scored[some],
                sampling_masks and sampling_masks.take(some),
                None if routed_experts is None else routed_experts[a:b],
            )
            for (i, j, a, b), some in zip(splits, own, strict=True)
        ]
        # What was not asked for is None in every part.
        scores: list[Any] = [
            None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)
        ]
        return TokenScores(*scores)

    @torch.compiler.disable()
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
        packed = self._checked(ids, lengths, target_mask, images)
        if not bool(target_mask.any()):
            vocab_size = self.model.config.get_text_config().vocab_size
            return torch.zeros(0, vocab_size, device=self.model.device)

        def read() -> Tensor:
            head, dtype = self._reader.head, self._head_dtype
            with precision(self.model, self._autocast_dtype):
                outputs = self._read(packed, images)
                if head is None or dtype is None:
                    return (outputs if head is None else head(outputs)).float()
            hidden, weight, bias = head_product(head, outputs)
            bias = None if bias is None else whole_head(bias).to(dtype)
            return nn.functional.linear(
                hidden.to(dtype), whole_head(weight).to(dtype), bias
            ).float()

        with self._kernels():
            return run_inside(self._wrapped, read)

    def _check_context(self) -> None:
        """Check that ranks can share out the tokens of a pass, by a trial of it."""
        model, who = self.model, "PackedScorer"
        name = type(model).__name__
        if not self.packed:
            raise ValueError(
                f"{who}: context_group needs rows that are read packed, and {name} is read "
                f"{self.reading.layout.value} ({'; '.join(self.reading.rejected) or 'as asked'})."
            )
        if is_split(model):
            raise ValueError(
                f"{who}: context_group and split_model(tensor_parallel_size=...) do not go "
                "together. Leave one of them out."
            )
        is_trained = any(value.requires_grad for value in model.parameters())
        if is_trained and not self.is_distributed:
            raise ValueError(
                f"{who}: each rank of a context_group has a part of the gradient. Give {name} in "
                "DistributedDataParallel or after fully_shard, which add the parts up."
            )
        if self._images is not None:
            raise ValueError(f"{who}: context_group is not for a model that reads images.")
        trial = run_inside(self._wrapped, lambda: run_trial(model, who=who))
        ids, lengths, mask = packed_rows(trial.rows)

        with torch.no_grad(), evaluation_mode(model):
            found = self.score_packed(ids, lengths, mask).log_prob
        gap = trial.difference(found.split((lengths - 1).tolist()))
        allowed = trial if self._autocast_dtype is None else trial._replace(tolerance=ROUNDED)
        if not allowed.allows(gap):
            raise ValueError(
                f"{who}: {name} computes other log-probs where ranks share out its tokens: off by "
                f"{gap}. Leave context_group out."
            )

    def _kernels(self) -> AbstractContextManager[Any]:
        """Kernels of products and attention."""
        return BatchInvariance() if self.batch_invariant else nullcontext()

    def _check_experts(
        self, experts: Tensor, num_tokens: int, images: Sequence[Sequence[str]] | None
    ) -> None:
        """Check that experts can be replayed, for as many tokens."""
        counts = expert_counts(self.model)
        name = type(self.model).__name__
        if counts is None or experts.ndim != 3 or experts.shape[2] != counts[1]:
            has = "no experts" if counts is None else f"{counts[1]} of {counts[0]} for a token"
            raise ValueError(
                f"score_packed: routed_experts {tuple(experts.shape)} are [N, L, S], and {name} "
                f"has {has}. Were they recorded with another model?"
            )
        highest = max(int(layer.max()) for layer in replayed_layers(experts)) if num_tokens else 0
        if len(experts) != num_tokens or highest >= counts[0]:
            raise ValueError(
                f"score_packed: routed_experts are of {len(experts)} tokens and up to number "
                f"{highest}; there are {num_tokens} tokens, and {name} has {counts[0]} experts."
            )
        if images and any(images):
            raise ValueError("score_packed: routed_experts of rows with images are not replayed.")
        if recomputes_activations(self.model) and torch.is_grad_enabled():
            raise ValueError(
                f"score_packed: {name} computes its layers again in the backward pass (gradient "
                "checkpointing), where routed_experts would not be replayed. Switch one off."
            )
        if self.is_compiled:
            raise ValueError(
                f"score_packed: the layers of {name} are compiled, and routed_experts are replayed "
                "in layers that are not. Build the policy with compile_layers=False."
            )

    def _read(
        self,
        packed: tuple[Tensor, Tensor, Tensor],
        images: Sequence[Sequence[str]] | None,
        experts: Tensor | None = None,
    ) -> Tensor:
        if self._images is None or not images or not any(images):
            return self._reader.read(targets_of(*packed), experts)
        return read_with_images(self._reader, self._images, packed, images)

    def _score(
        self,
        ids: Tensor,
        lengths: Tensor,
        target_mask: Tensor,
        drawn_from: SamplingParameters,
        images: Sequence[Sequence[str]] | None,
        targets: Tensor,
        masks: SamplingMasks | None = None,
        experts: Tensor | None = None,
    ) -> TokenScores:
        if len(targets) == 0:
            empty = torch.zeros(0, device=self.model.device)
            if self.is_distributed:  # a pass that others wait for, with a gradient of 0
                zero = torch.zeros(1, dtype=torch.int64)
                empty = self._score(*empty_pass(), drawn_from, None, zero).log_prob[:0]
            nothing = empty.detach()
            entropy = nothing if drawn_from.entropy else None
            return TokenScores(empty, entropy, nothing if drawn_from.untempered_log_probs else None)

        history = None
        if drawn_from.changes_logits:
            history = TargetHistory.of(ids, lengths, target_mask)

        def score() -> TokenScores:
            packed = (ids, lengths, target_mask)
            with precision(self.model, self._autocast_dtype):
                if self._context_group is None:
                    outputs = self._read(packed, images, experts)
                    return self._scores_of(outputs, targets, drawn_from, history, masks)
                outputs, share = self._reader.read_share(
                    targets_of(*packed), self._context_group, experts
                )
                own = share.index
                scores = self._scores_of(
                    *(outputs, targets[own], drawn_from),
                    history and history.part(own),
                    masks and masks.take(own),
                )
            each = iter(share.join(torch.stack([x for x in scores if x is not None])))
            log_prob, others = next(each), scores[1:]
            return TokenScores(log_prob, *(None if x is None else next(each) for x in others))

        with self._kernels():
            return run_inside(self._wrapped, score)

    def _scores_of(
        self,
        outputs: Tensor,
        targets: Tensor,
        drawn_from: SamplingParameters,
        history: TargetHistory | None,
        masks: SamplingMasks | None,
    ) -> TokenScores:
        """Scores of targets, on the host, by what predicts them."""
        targets = on_device(targets, self.model.device)
        log_prob, entropy = self._head_scores(outputs, targets, drawn_from, history, masks)
        untempered = None
        if drawn_from.untempered_log_probs:
            untempered = log_prob
            if not drawn_from.is_own_softmax:
                untempered, _ = self._head_scores(outputs, targets, SamplingParameters())
        return TokenScores(log_prob, entropy if drawn_from.entropy else None, untempered)

    def _head_scores(
        self,
        outputs: Tensor,
        targets: Tensor,
        drawn_from: SamplingParameters,
        history: TargetHistory | None = None,
        masks: SamplingMasks | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """From hidden states ``[K, D]``, or from logits ``[K, V]`` of a head of another kind."""
        head = self._reader.head
        if head is None:
            tokens = history and history.read(outputs.shape[1], drawn_from, outputs.device)
            return warped_log_prob(outputs, targets, drawn_from, tokens, masks)
        hidden, weight, bias = head_product(head, outputs)
        is_plain = not (drawn_from.truncates or drawn_from.changes_logits or masks is not None)
        if not is_plain or self.batch_invariant:
            weight, bias = whole_head(weight), None if bias is None else whole_head(bias)
        options: dict[str, Any] = {"bias": bias, "compute_dtype": self._head_dtype}
        if self.batch_invariant:  # the softmax that an engine takes, over whole rows of logits
            options["linear"] = invariant_linear
        if not is_plain or self.batch_invariant:
            options |= {"history": history, "masks": masks}
            return warped_head_log_prob(hidden, weight, targets, drawn_from, **options)
        return chunked_log_prob(
            hidden,
            weight,
            targets,
            temperature=drawn_from.temperature,
            entropy=drawn_from.entropy,
            **options,
        )

    def _checked_targets(
        self, targets: Tensor, target_mask: Tensor, truncation: SamplingParameters | None
    ) -> Tensor:
        """Tokens that are scored in place of the sequences' own, on the host."""
        if truncation is not None and truncation.changes_logits:
            raise ValueError("score_packed: targets= goes without penalties and logit_bias.")
        (targets,) = on_host(targets)
        vocab_size = self.model.config.get_text_config().vocab_size
        due = (int(target_mask.sum()),)
        if tuple(targets.shape) != due or targets.dtype != torch.int64:
            raise ValueError(
                f"score_packed: targets must be int64 {due}, one for each True of target_mask, "
                f"got {targets.dtype} {tuple(targets.shape)}."
            )
        if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < vocab_size:
            raise ValueError(f"score_packed: a target is outside the vocabulary of {vocab_size}.")
        return targets

    def _checked(
        self,
        ids: Tensor,
        lengths: Tensor,
        target_mask: Tensor,
        images: Sequence[Sequence[str]] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Packed sequences on the host, where their shapes are settled."""
        ids, lengths, target_mask = on_host(ids, lengths, target_mask)
        table = next(self.model.get_input_embeddings().parameters())
        check_packed(ids, lengths, target_mask, table.shape[0], self._images, images)
        check_longest(self.model, lengths, self._longest, what="score_packed", who="the policy")
        return ids, lengths, target_mask


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
    ways = [(layout, x) for layout in layouts for x in ((None,) if head is None else (head, None))]

    def way(layout: Layout, head: nn.Linear | None) -> tuple[str, Callable[[], Sequence[Tensor]]]:
        log_probs = partial(_trial_log_probs, model, layout, head, trial.rows)
        name = layout.value if head is not None else f"{layout.value}, its own logits"
        return name, partial(run_inside, wrapped, log_probs)

    at, difference, wrong = find_first(
        model,
        trial,
        [way(*one) for one in ways],
        f"PackedScorer: {type(model).__name__} can't be scored: no way to read several rows "
        "gives what its forward says of one row alone",
    )
    if ways[at][0] is not Layout.PACKED and own_attention is not None:
        model.set_attn_implementation(own_attention)
    # Packed, or with the head in tiles: ways that only a kernel can spoil.
    lost = head is not None and ways[at][1] is None
    is_kernel = [each.is_error and (each.name.startswith("packed") or lost) for each in wrong]
    if failed := [each for each, counts in zip(wrong, is_kernel, strict=True) if counts]:
        warnings.warn(
            f"PackedScorer: {type(model).__name__} is read {ways[at][0].value}, "
            f"{'with its head in tiles' if ways[at][1] is not None else 'by its own logits'}, "
            f"which is slower, because a faster way failed when it was tried: {failed[0]}. (A "
            "kernel that is compiled needs a C compiler, say.)",
            stacklevel=3,
        )
    rejected = tuple(map(str, wrong))
    reading = Reading(ways[at][0], ways[at][1] is not None, difference, rejected)
    _found[model] = ((*state[:-1], model.config._attn_implementation), reading)
    return reading


def _trial_log_probs(
    model: Any, layout: Layout, head: nn.Linear | None, rows: Sequence[Tensor]
) -> Sequence[Tensor]:
    ids, lengths, mask = packed_rows(rows)
    outputs = ModelReader(model, layout=layout, head=head).read(targets_of(ids, lengths, mask))
    at = on_device(ids[mask], outputs.device)
    if head is None:
        log_p = outputs.double().log_softmax(-1).gather(1, at[:, None]).squeeze(1)
    else:  # in tiles, whose kernels are compiled on a GPU
        hidden, weight, bias = head_product(head, outputs)
        log_p = chunked_log_prob(hidden, weight, at, bias=bias).log_prob.double()
    return log_p.split((lengths - 1).tolist())
