"""Values before tokens and at the end of rows, under a model with a head of one number.

Shape legend: N packed tokens, B sequences, K target tokens, D hidden size.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import check_counts
from torchrl_data.devices import on_host
from torchrl_modules.compiled_layers import settle_compilation
from torchrl_modules.transformers_releases import forward_parameters

from .model_reader import (
    Layout,
    ModelReader,
    Targets,
    check_packed,
    empty_pass,
    ends_of,
    passes_within,
    targets_of,
)
from .packed_attention import use_packed_attention
from .rope_factors import check_longest, settle_rope_factors
from .trial import ReadingTrial, find_first, packed_rows, tolerance_of, trial_rows
from .wrapped_models import (
    check_wrapped_whole,
    evaluation_mode,
    is_distributed,
    precision,
    run_inside,
    unwrapped,
)


class ValueScorer(ChecksAttributes):
    """Gives the value before each target of packed sequences, or after each, with one model.

    Args:
        model: of Transformers, with a linear head ``score`` of one number, in
            `DistributedDataParallel` or not, sharded by `fully_shard` or not. It is read packed
            where that gives its own hidden states, which is tried on a few short rows; otherwise
            padded; otherwise rows of one length at a time.
        micro_batch_tokens: most tokens of one forward pass when no gradient is needed; ``None``
            for no limit.
        share_prefixes: run what sequences of a pass begin with in common through the model once,
            where the model's attention allows it. Values and gradients are the same.
        autocast_dtype: compute in this type, with the parameters as they are; the head computes in
            float32.
        max_model_len: most tokens of a row; for models whose rotary factors depend on it.
        compile_layers: see :func:`~torchrl_modules.compiled_layers.compile_layers`.

    Raises:
        TypeError: a wrapper around the model can't be gone through, or is around a part of it; or
            the model has no head of one number.
        ValueError: ``micro_batch_tokens`` is not positive, or no way to read several rows gives
            what the model gives of one alone.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        micro_batch_tokens: int | None = None,
        share_prefixes: bool = True,
        autocast_dtype: torch.dtype | None = None,
        max_model_len: int | None = None,
        compile_layers: bool | None = None,
    ) -> None:
        who = type(self).__name__
        self.model = unwrapped(model, who=who)
        check_wrapped_whole(model, who=who)
        self._head = value_head(self.model, who=who)
        self.micro_batch_tokens: int | None = self._checked_change(
            "micro_batch_tokens", micro_batch_tokens
        )
        self._wrapped = model
        self._autocast_dtype = autocast_dtype
        self._longest = settle_rope_factors(self.model, max_model_len, who=who)
        with torch.no_grad():  # or shards would stay whole until a backward pass that never comes
            layout = run_inside(model, partial(_find_layout, self.model, self._head, who=who))
        self._reader = ModelReader(
            self.model, layout=layout, head=self._head, share_prefixes=share_prefixes
        )
        settle_compilation(model, self.model, compile_layers)

    changeable = frozenset({"micro_batch_tokens"})

    def _checked_change(self, name: str, value: Any) -> Any:
        check_counts(type(self).__name__, **{name: value})
        return value

    @property
    def layout(self) -> Layout:
        """How the model reads rows."""
        return self._reader.layout

    @property
    def packed(self) -> bool:
        """Whether rows are read without padding, beside each other."""
        return self.layout is Layout.PACKED

    @property
    def share_prefixes(self) -> bool:
        """Whether what sequences of a pass begin with in common is read once."""
        return self._reader.share_prefixes

    @property
    def vocab_size(self) -> int:
        """Rows of the model's table of embeddings; ids lie below it."""
        return next(self.model.get_input_embeddings().parameters()).shape[0]

    @property
    def is_distributed(self) -> bool:
        """Whether other ranks take part in every pass, so that all have to make equally many."""
        return is_distributed(self._wrapped)

    # Rows become a trie on the host, and no two batches have the same one: nothing to compile.
    @torch.compiler.disable()
    def value_packed(self, ids: Tensor, lengths: Tensor, target_mask: Tensor) -> Tensor:
        """Give the value of the state before each target: of all tokens before it in its sequence.

        Args:
            ids: int64 ``[N]``, the sequences one after the other, without padding.
            lengths: int64 ``[B]``, summing to N.
            target_mask: bool ``[N]``; no first token of a sequence.

        Returns:
            float32 ``[K]`` in packed order, differentiable in the model's parameters.

        Raises:
            ValueError: the shapes disagree, a sequence is empty, a first token is a target, an id
                is outside the vocabulary, or a row is longer than ``max_model_len``.
        """
        ids, lengths, target_mask = on_host(ids, lengths, target_mask)
        self._check(ids, lengths, target_mask, what="value_packed")
        return torch.cat(
            [
                self._values(targets_of(ids[a:b], lengths[i:j], target_mask[a:b]))
                for i, j, a, b in self._passes(lengths)
            ]
        )

    @torch.compiler.disable()
    def reward_packed(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Give the value after each sequence, as Transformers' sequence classification does.

        Args:
            ids: int64 ``[N]``, the sequences one after the other, without padding.
            lengths: int64 ``[B]``, summing to N.

        Returns:
            float32 ``[B]``, differentiable in the model's parameters. Where sequences end with the
            padding token of the model's configuration, that of the last token which is another.

        Raises:
            ValueError: the shapes disagree, a sequence is empty, an id is outside the vocabulary,
                or a row is longer than ``max_model_len``.
        """
        ids, lengths = on_host(ids, lengths)
        none = torch.zeros_like(ids, dtype=torch.bool)
        self._check(ids, lengths, none, what="reward_packed")
        pad_id: int | None = self.model.config.get_text_config().pad_token_id
        return torch.cat(
            [
                self._values(ends_of(ids[a:b], lengths[i:j], pad_id))
                for i, j, a, b in self._passes(lengths)
            ]
        )

    def _check(self, ids: Tensor, lengths: Tensor, target_mask: Tensor, *, what: str) -> None:
        check_packed(*(ids, lengths, target_mask), self.vocab_size, None, None, what=what)
        check_longest(self.model, lengths, self._longest, what=what, who="the critic")

    def _passes(self, lengths: Tensor) -> list[tuple[int, int, int, int]]:
        """Sequences and tokens of each pass; of one, where gradients are needed."""
        most = self.micro_batch_tokens
        if most is None or torch.is_grad_enabled():
            return [(0, len(lengths), 0, int(lengths.sum()))]
        return passes_within(lengths, most, self._wrapped)

    def _values(self, targets: Targets) -> Tensor:
        if not len(targets.rows):
            if self.is_distributed:  # a pass that others wait for, with a gradient of 0
                return self._values(targets_of(*empty_pass()))[:0]
            return torch.zeros(0, device=self.model.device)

        def read() -> Tensor:
            with precision(self.model, self._autocast_dtype):
                hidden = self._reader.read(targets)
            return head_values(self._head, hidden)

        return run_inside(self._wrapped, read)


def value_head(model: PreTrainedModel, *, who: str) -> nn.Linear:
    """The head of one number, as Transformers' models for sequence classification have it.

    Args:
        model: without wrappers; with adapters of PEFT the head is the copy that is trained.
        who: the component that asks, named in the error.

    Raises:
        TypeError: it has none, or one of several numbers.
    """
    head: Any = getattr(model, "score", None)
    if (copies := getattr(head, "modules_to_save", None)) is not None:  # of PEFT
        head = copies[head.active_adapter]
    if isinstance(head, nn.Linear) and head.out_features == 1 and head.bias is None:
        return head
    has = "no head 'score'" if head is None else f"the head {head}"
    raise TypeError(
        f"{who}: {type(model).__name__} has {has}, and a critic has a linear one that gives one "
        "number: Transformers' AutoModelForSequenceClassification with num_labels=1. A causal "
        "language model becomes one with value_model_of(model)."
    )


def head_values(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Values in float32 at least, ``[K]``, of hidden states ``[K, D]``."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        return nn.functional.linear(hidden.to(wide), head.weight.to(wide)).squeeze(-1)


def _find_layout(model: PreTrainedModel, head: nn.Linear, *, who: str) -> Layout:
    """The fastest way to read rows that gives the hidden states of each alone."""
    # A head may be 0, and hide what is wrong: hidden states are looked at from a direction.
    own_attention = use_packed_attention(model)
    rows = trial_rows(model)
    options = {"use_cache": False} if "use_cache" in forward_parameters(model.base_model) else {}
    size = head.in_features
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(size, generator=generator, dtype=torch.float64) / size**0.5

    def seen(hidden: Tensor) -> Tensor:
        return hidden.double() @ probe.to(hidden.device)

    with evaluation_mode(model):
        own = [
            seen(model.base_model(input_ids=row[None], **options).last_hidden_state[0, :-1])
            for row in rows
        ]
    trial = ReadingTrial(rows, own, tolerance_of(model))
    ids, lengths, mask = packed_rows(rows)
    layouts = [x for x in Layout if x is not Layout.PACKED or own_attention is not None]

    def read(layout: Layout) -> tuple[Tensor, ...]:
        hidden = ModelReader(model, layout=layout, head=head).read(targets_of(ids, lengths, mask))
        return seen(hidden).split((lengths - 1).tolist())

    at, _, _ = find_first(
        model,
        trial,
        [(layout.value, partial(read, layout)) for layout in layouts],
        f"{who}: {type(model).__name__} can't be a critic: no way to read several rows gives what "
        "it makes of one row alone",
    )
    if layouts[at] is not Layout.PACKED and own_attention is not None:
        model.set_attn_implementation(own_attention)
    return layouts[at]
