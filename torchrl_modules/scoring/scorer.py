"""Log-probs and entropies of given tokens, without all logits in memory at once."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributions import Distribution
from torch.nn.functional import linear

from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import POSITIVE, check_counts, check_numbers
from torchrl_data.devices import on_device, on_host
from torchrl_data.ragged.packed import cumulative_lengths, pack
from torchrl_data.sampling_masks import SamplingMasks
from torchrl_data.templates.image_processor import ImageProcessor
from torchrl_data.token_scorer import TokenScores
from torchrl_modules.batch_invariance import (
    BatchInvariance,
    check_batch_invariance,
    invariant_linear,
    refuse_beside_invariance,
)
from torchrl_modules.compilation import Compiled
from torchrl_modules.compiled_layers import settle_compilation
from torchrl_modules.sampling.distribution import warped_head_log_prob, warped_log_prob
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.sampling.token_history import TargetHistory

from .expert_routes import expert_counts, replayed_layers
from .models import (
    Difference,
    Layout,
    ModelReader,
    check_image_reading,
    check_packed,
    check_wrapped_whole,
    find_first,
    head_product,
    is_distributed,
    plain_head,
    precision,
    read_with_images,
    run_inside,
    run_trial,
    settle_rope_factors,
    targets_of,
    unwrapped,
)
from .packed_attention import use_packed_attention
from .split_head import head_part, sum_gradient, whole_head

# Log-probabilities of chosen tokens without ever holding ``[tokens, vocabulary]`` logits.
#
# Shape legend: K target tokens, D hidden size, V vocabulary.

_CPU_TILE: Final = (256, 1024)
"""Tokens and vocabulary of a tile: 1 MB of float32 logits stays in the cache of a core."""
_GPU_TILE: Final = (8192, 16384)
"""Of bfloat16 256 MB: a tile's product takes longer than its few kernels take to be launched."""


class HeadScores(NamedTuple):
    """What :func:`chunked_log_prob` gives, in nats, ``[K]`` each."""

    log_prob: Tensor
    entropy: Tensor | None
    """Only when asked for."""


def chunked_log_prob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    entropy: bool = False,
    compute_dtype: torch.dtype | None = None,
) -> HeadScores:
    """Log-probability of each target under ``softmax(hidden @ weight.T / temperature)``.

    The logits are computed tile by tile, some tokens and part of the vocabulary at a time, and
    again in the backward pass, so the memory is that of one tile instead of K x V.

    Args:
        hidden: ``[K, D]``.
        weight: ``[V, D]``; of a ``DTensor`` in equal parts of rows each rank computes its part of
            the logits, and all have the same ``hidden`` and ``targets``.
        targets: int64 ``[K]``.
        bias: ``[V]`` or ``None``.
        temperature: positive.
        entropy: also give the entropy of each distribution.
        compute_dtype: of the products, such as float32 for weights of bfloat16, which are then
            converted tile by tile; ``None`` for that of ``hidden``, or of ``torch.autocast``.

    Returns:
        Log-probabilities and entropies, float32 (float64 for such inputs), differentiable.

    Raises:
        ValueError: the temperature is not positive.
    """
    check_numbers("chunked_log_prob", POSITIVE, temperature=temperature)
    kind = hidden.device.type
    if compute_dtype is None and torch.is_autocast_enabled(kind):
        compute_dtype = torch.get_autocast_dtype(kind)
    hidden = hidden.to(compute_dtype or hidden.dtype)
    part, at = head_part(weight, bias), targets
    if part is not None:  # of the vocabulary, and so of the gradient of the hidden states
        hidden, at = sum_gradient(hidden, part.group), targets - part.first
        weight, bias = part.weight, part.bias
    # The tiles convert the weights themselves: forward and backward alike.
    with torch.autocast(kind, enabled=False):
        log_prob, entropies, lse = _ChunkedLogProb.apply(  # type: ignore[misc]
            hidden, weight, bias, at, temperature, entropy
        )
    if part is not None:
        log_prob, entropies = part.join(targets, log_prob, entropies, lse)
    return HeadScores(log_prob, entropies if entropy else None)


def _slices(size: int, step: int) -> Iterator[slice]:
    return (slice(start, start + step) for start in range(0, size, step))


def _tiling(hidden: Tensor) -> tuple[int, int, torch.dtype]:
    """Tokens and vocabulary of a tile, and the type of its sums: float32 at least."""
    num_rows, num_columns = _CPU_TILE if hidden.device.type == "cpu" else _GPU_TILE
    return num_rows, num_columns, torch.promote_types(hidden.dtype, torch.float32)


def _sums_of_tile(
    product: Tensor, at: Tensor, scale: float, with_entropy: bool
) -> tuple[Tensor, ...]:
    """Logits at ``at`` or 0, the largest, sums of ``exp(logit - largest)`` and of it x logit."""
    tile = _logits(product, scale)
    inside = (at >= 0) & (at < tile.shape[1])
    own = tile.gather(1, at.where(inside, 0)).where(inside, 0.0).squeeze(1)
    top = tile.amax(1).clamp_(min=torch.finfo(tile.dtype).min)
    logits = tile.clone() if with_entropy else None
    total = tile.sub_(top[:, None]).exp_().sum(1)
    if logits is None:
        return own, top, total, total
    # A part in which every token is forbidden holds nothing (0 x inf).
    return own, top, total, tile.mul_(logits.masked_fill_(tile == 0, 0.0)).sum(1)


def _gradient_of_tile(
    product: Tensor,
    lse: Tensor,
    g: Tensor,
    entropy: Tensor,
    g_entropy: Tensor | None,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """Of the logits, without what the target's own logit adds; computed in full precision."""
    tile = _logits(product, scale).sub_(lse[:, None])
    if g_entropy is None:
        return tile.exp_().mul_(-g[:, None]).to(dtype)
    p = tile.exp()
    # A forbidden token has log p = -inf and takes no part.
    tile.masked_fill_(p == 0, 0.0).add_(entropy[:, None])
    tile.mul_(g_entropy[:, None]).add_(g[:, None])
    return p.mul_(tile).neg_().to(dtype)


def _logits(product: Tensor, scale: float) -> Tensor:
    logits = product.to(torch.promote_types(product.dtype, torch.float32))
    return logits if scale == 1.0 else logits.mul_(scale)


_FUSED: Final = {"cuda"}
"""Devices on which what follows a product reads its tile once, in a kernel that is compiled: about
eight passes over float32 become one over the type of the product."""


@cache
def _kernel(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
    if kind not in _FUSED:
        return function
    name = f"the head's {function.__name__.strip('_').replace('_', ' ')}"
    slow = "each tile of logits is read about eight times"
    return Compiled(function, name, slow=slow, dynamic=True)


class _ChunkedLogProb(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rows, num_columns, dtype = _tiling(hidden)
        sums = _kernel(_sums_of_tile, hidden.device.type)
        lse = torch.full((len(hidden),), -torch.inf, dtype=dtype, device=hidden.device)
        mean, log_prob = torch.zeros_like(lse), torch.zeros_like(lse)
        for rows in _slices(len(hidden), num_rows):
            for columns in _slices(len(weight), num_columns):
                part = None if bias is None else bias[columns].to(hidden.dtype)
                tile = linear(hidden[rows], weight[columns].to(hidden.dtype), part)
                at = targets[rows, None] - columns.start
                own, top, total, weighted = sums(tile, at, 1 / temperature, with_entropy)
                log_prob[rows] += own
                both = torch.logaddexp(lse[rows], total.log() + top)
                if with_entropy:
                    # The mean logit so far, weighted by what each part of the vocabulary holds.
                    mean[rows] *= (lse[rows] - both).exp_().nan_to_num_()
                    mean[rows] += (weighted * (top - both).exp_()).nan_to_num_()
                lse[rows] = both
        log_prob -= lse
        entropy = lse - mean if with_entropy else mean
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_prob, entropy, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
            return _gradients(ctx, *grads)


def _gradients(
    ctx: Any,
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
    grad_hidden = torch.zeros_like(hidden)
    grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
    grad_bias = torch.zeros_like(bias) if bias is not None else None
    live = _live(grad_log_prob, grad_entropy, grad_lse)
    if len(live) == 0:
        return grad_hidden, grad_weight, grad_bias, None, None, None
    some, at, lse, entropy = hidden[live], targets[live], lse[live], entropy[live]
    of_own = torch.zeros_like(lse) if grad_log_prob is None else grad_log_prob[live]
    of_own = of_own / ctx.temperature
    g = of_own if grad_lse is None else of_own - grad_lse[live] / ctx.temperature
    g_entropy = None if grad_entropy is None else grad_entropy[live] / ctx.temperature
    gradient = _kernel(_gradient_of_tile, hidden.device.type)
    num_rows, num_columns, dtype = _tiling(hidden)
    # What comes from the target's own logit is added at the end.
    found = torch.zeros_like(some, dtype=dtype)
    for columns in _slices(len(weight), num_columns):
        part = None if bias is None else bias[columns].to(some.dtype)
        total = None if grad_weight is None else torch.zeros_like(weight[columns], dtype=dtype)
        for rows in _slices(len(some), num_rows):
            tile = linear(some[rows], weight[columns].to(some.dtype), part)
            of_entropy = None if g_entropy is None else g_entropy[rows]
            grad = gradient(
                *(tile, lse[rows], g[rows], entropy[rows], of_entropy, 1 / ctx.temperature),
                dtype if grad_bias is not None else hidden.dtype,
            )
            if grad_bias is not None:
                grad_bias[columns] += grad.sum(0).to(grad_bias.dtype)
                grad = grad.to(hidden.dtype)
            _add_product(found[rows], grad, weight[columns].to(grad.dtype))
            if total is not None:
                _add_product(total, grad.T, some[rows])
        if grad_weight is not None and total is not None:
            grad_weight[columns] = total
    # A target in another rank's part of the vocabulary has no logit here, and no gradient of it.
    g, at = of_own.to(hidden.dtype), at.clamp(0, len(weight) - 1)
    own = weight[at].to(found.dtype)
    grad_hidden[live] = found.addcmul_(own, g[:, None].to(found.dtype)).to(hidden.dtype)
    if grad_weight is not None:
        grad_weight.index_add_(0, at, (some * g[:, None]).to(grad_weight.dtype))
    if grad_bias is not None:
        grad_bias.index_add_(0, at, g.to(grad_bias.dtype))
    return grad_hidden, grad_weight, grad_bias, None, None, None


def _live(*grads: Tensor | None) -> Tensor:
    """Tokens with a gradient, int64: one without (a clipped one, say) costs nothing."""
    # What no gradient comes from at all is None, so that nobody has to look for it.
    live = [grad != 0 for grad in grads if grad is not None]
    return torch.stack(live).any(0).nonzero().squeeze(1)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a @ b``, where the total may be of a higher precision."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


# The distributions that the scored tokens of a batch were drawn from.
#
# Shape legend: B rows, T columns of the padded batch, K scored positions, V vocabulary.


class TokenDistribution(Distribution):
    """One categorical distribution per scored position of a padded batch.

    It holds logits for the scored positions alone; elsewhere there is nothing to draw, so
    log-probs and entropies are 0 there, and so are drawn tokens.

    Args:
        log_p: normalised log-probabilities, ``[K, V]``.
        mask: bool ``[*B, T]``: the K scored positions, in order.
    """

    def __init__(self, log_p: Tensor, mask: Tensor) -> None:
        self.log_p = log_p
        self.mask = mask.to(log_p.device)
        super().__init__(batch_shape=mask.shape, validate_args=False)

    @property
    def arg_constraints(self) -> dict[str, Any]:
        """None are checked."""
        return {}

    def _spread(self, values: Tensor) -> Tensor:
        """``[K, ...]`` to ``[*B, T, ...]``, 0 where nothing is scored."""
        out = values.new_zeros((*self.mask.shape, *values.shape[1:]))
        out[self.mask] = values
        return out

    @property
    def logits(self) -> Tensor:
        """Log-probabilities ``[*B, T, V]``, 0 where nothing is scored; made when asked for."""
        return self._spread(self.log_p)

    @property
    def probs(self) -> Tensor:
        """Probabilities ``[*B, T, V]``, 0 where nothing is scored; made when asked for."""
        return self._spread(self.log_p.exp())

    @property
    def mode(self) -> Tensor:
        """The most likely tokens, int64 ``[*B, T]``."""
        return self._spread(self.log_p.argmax(-1))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-prob of a token at each position, in nats, differentiable.

        Args:
            value: int64 ``[*B, T]``; what stands where nothing is scored is ignored.

        Returns:
            ``[*B, T]``.
        """
        chosen = value.to(self.mask.device)[self.mask][:, None]
        return self._spread(self.log_p.gather(1, chosen).squeeze(1))

    def entropy(self) -> Tensor:
        """Entropy in nats, ``[*B, T]``, differentiable."""
        finite = self.log_p.masked_fill(self.log_p == -torch.inf, 0.0)
        return self._spread(-(self.log_p.exp() * finite).sum(-1))

    def sample(self, sample_shape: Sequence[int] | torch.Size = ()) -> Tensor:
        """Draw a token at each scored position.

        Args:
            sample_shape: how often.

        Returns:
            int64 ``[*sample_shape, *B, T]``.
        """
        shape = torch.Size(sample_shape)
        drawn = torch.multinomial(self.log_p.detach().exp(), shape.numel(), replacement=True)
        rows = [self._spread(column) for column in drawn.unbind(1)]
        return torch.stack(rows).reshape(*shape, *self.mask.shape)


# Log-probabilities of tokens under a Transformers model, packed, head on the targets only.
#
# Shape legend: N packed tokens, B sequences, T tokens of the longest, K target tokens, D hidden
# size.


class Reading(NamedTuple):
    """How a model is read, found by :mod:`~torchrl_modules.scoring.models`."""

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

    Raises:
        TypeError: a wrapper around the model can't be gone through, or is around a part of it.
        ValueError: ``micro_batch_tokens`` is not positive, or the model is none that can be scored:
            it has no weights, its own forward fails, or it sees what comes after a token; or it is
            not ``batch_invariant``, or something is asked for beside that which can't be.
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
    ) -> None:
        self.model = unwrapped(model, who="PackedScorer")
        check_wrapped_whole(model, who="PackedScorer")
        if batch_invariant:
            refuse_beside_invariance(
                autocast_dtype=autocast_dtype,
                head_dtype=head_dtype,
                compile_layers=compile_layers,
                images=images,
                **{"gradient checkpointing": getattr(model, "is_gradient_checkpointing", False)},
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
        # Runs of whole sequences within the budget: sequences i:j, tokens a:b.
        splits, first, start, total = [], 0, 0, 0
        for i, length in enumerate(lengths.tolist()):
            if total and total + length > self.micro_batch_tokens:
                splits.append((first, i, start, start + total))
                first, start, total = i, start + total, 0
            total += length
        splits.append((first, len(lengths), start, start + total))
        if self.is_distributed:  # as many passes as the rank that has most
            most = torch.tensor(len(splits), device=self.model.device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            splits += [(0, 0, 0, 0)] * (int(most) - len(splits))
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
        if getattr(self.model, "is_gradient_checkpointing", False) and torch.is_grad_enabled():
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
                two, of_two = torch.zeros(2, dtype=torch.int64), torch.tensor([2])
                is_target = torch.tensor([False, True])
                empty = self._score(two, of_two, is_target, drawn_from, None, two[:1]).log_prob[:0]
            nothing = empty.detach()
            entropy = nothing if drawn_from.entropy else None
            return TokenScores(empty, entropy, nothing if drawn_from.untempered_log_probs else None)

        targets = on_device(targets, self.model.device)

        def score() -> TokenScores:
            history, untempered = None, None
            if drawn_from.changes_logits:
                history = TargetHistory.of(ids, lengths, target_mask)
            with precision(self.model, self._autocast_dtype):
                outputs = self._read((ids, lengths, target_mask), images, experts)
                log_prob, entropy = self._head_scores(outputs, targets, drawn_from, history, masks)
                if drawn_from.untempered_log_probs:
                    untempered = log_prob
                    if not drawn_from.is_own_softmax:
                        untempered, _ = self._head_scores(outputs, targets, SamplingParameters())
            return TokenScores(log_prob, entropy if drawn_from.entropy else None, untempered)

        with self._kernels():
            return run_inside(self._wrapped, score)

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
        longest = int(lengths.max()) if len(lengths) else 0
        if self._longest is not None and longest > self._longest:
            raise ValueError(
                f"score_packed: a row has {longest} tokens, but {type(self.model).__name__} "
                f"computes with the rotary factors of rows of at most {self._longest}. Give the "
                "policy a larger max_model_len."
            )
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
    ids, lengths = pack([row.cpu() for row in rows])
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[cumulative_lengths(lengths)[:-1]] = False
    outputs = ModelReader(model, layout=layout, head=head).read(targets_of(ids, lengths, mask))
    at = on_device(ids[mask], outputs.device)
    if head is None:
        log_p = outputs.double().log_softmax(-1).gather(1, at[:, None]).squeeze(1)
    else:  # in tiles, whose kernels are compiled on a GPU
        hidden, weight, bias = head_product(head, outputs)
        log_p = chunked_log_prob(hidden, weight, at, bias=bias).log_prob.double()
    return log_p.split((lengths - 1).tolist())
