"""How packed rows go through a model: what they must be, and which tokens it reads together.

Shape legend: N packed tokens, B sequences, T tokens of the longest, K target tokens, D hidden
size, V vocabulary.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch.distributed
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_data.devices import on_device
from torchrl_data.ragged.packed import cumulative_lengths, pad, sequence_index
from torchrl_data.routed_experts import unknown_expert
from torchrl_data.templates.image_processor import ImageProcessor
from torchrl_modules.transformers_releases import forward_parameters

from .context_share import ContextShare, TargetShare
from .expert_routes import ExpertRoutes, replayed_layers
from .packed_attention import can_share, drops_out, no_mask, packed_input
from .trie_attention import PrefixTrie, build_trie, share_out
from .wrapped_models import call, is_distributed


class Layout(Enum):
    """The ways in which a model reads tokens together, the fastest first."""

    PACKED = "packed"
    """All rows one after the other, what they begin with in common once."""
    PADDED = "padded"
    """Rows padded on the right, with a mask."""
    BY_LENGTH = "by length"
    """Rows of one length at a time, as the model computes a row alone."""


class Targets(NamedTuple):
    """What is to be predicted, and from where; on the host."""

    ids: Tensor
    """int64 ``[N]``."""
    starts: Tensor
    """int64 ``[B]``, of each row in the packed tokens."""
    ends: Tensor
    """int64 ``[B]``: this many tokens of each row have to be read."""
    rows: Tensor
    """int64 ``[K]``: the row of each target."""
    positions: Tensor
    """int64 ``[K]``, in the row, of the token that predicts each target."""
    lengths: Tensor
    """int64 ``[B]``."""

    def beginnings(self, rows: Tensor) -> list[Tensor]:
        """The tokens of some rows that have to be read."""
        starts, ends = self.starts[rows].tolist(), self.ends[rows].tolist()
        return [self.ids[a : a + n] for a, n in zip(starts, ends, strict=True)]


def targets_of(ids: Tensor, lengths: Tensor, target_mask: Tensor) -> Targets:
    """The targets of packed rows."""
    # ids: int64 [N]; lengths: int64 [B]; target_mask: bool [N]; no first token of a row.
    starts = cumulative_lengths(lengths)[:-1]
    at = torch.from_numpy(np.flatnonzero(target_mask.numpy()))
    rows = sequence_index(lengths)[at]
    # The token at position t is predicted by the hidden state at t - 1, and what comes after the
    # predictor of a row's last target is needed by nobody.
    positions = at - starts[rows] - 1
    ends = torch.zeros_like(lengths).scatter_reduce(0, rows, positions + 1, "amax")
    return Targets(ids, starts, ends, rows, positions, lengths)


def ends_of(ids: Tensor, lengths: Tensor, pad_id: int | None) -> Targets:
    """The end of each packed row as what is to be predicted from its last token.

    Args:
        ids: int64 ``[N]``.
        lengths: int64 ``[B]``, none of them 0.
        pad_id: tokens of it count for nothing at the end of a row, as Transformers has it; ``None``
            where there is none. A row that holds nothing else ends with its first token.

    Returns:
        One target for each row.
    """
    starts, row = cumulative_lengths(lengths)[:-1], sequence_index(lengths)
    positions = torch.arange(len(ids)) - starts[row]
    if pad_id is not None:
        positions = positions.masked_fill(ids == pad_id, 0)
    last = torch.zeros_like(lengths).scatter_reduce(0, row, positions, "amax")
    return Targets(ids, starts, last + 1, torch.arange(len(lengths)), last, lengths)


def passes_within(
    lengths: Tensor, most_tokens: int, wrapped: nn.Module
) -> list[tuple[int, int, int, int]]:
    """Runs of whole sequences within a number of tokens, equally many on all ranks of a model.

    Args:
        lengths: int64 ``[B]``.
        most_tokens: of a run; a longer sequence is a run of its own.
        wrapped: the model, with what wraps it.

    Returns:
        ``(i, j, a, b)``: sequences i to j with tokens a to b; nothing at the end, where another
        rank has more.
    """
    splits, first, start, total = [], 0, 0, 0
    for i, length in enumerate(lengths.tolist()):
        if total and total + length > most_tokens:
            splits.append((first, i, start, start + total))
            first, start, total = i, start + total, 0
        total += length
    splits.append((first, len(lengths), start, start + total))
    if is_distributed(wrapped):  # as many passes as the rank that has most
        device = next(wrapped.parameters()).device
        most = torch.tensor(len(splits), device=device)
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
        splits += [(0, 0, 0, 0)] * (int(most) - len(splits))
    return splits


def empty_pass() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, lengths and targets of a pass that other ranks wait for, where this one has none."""
    return torch.zeros(2, dtype=torch.int64), torch.tensor([2]), torch.tensor([False, True])


def check_packed(
    ids: Tensor,
    lengths: Tensor,
    target_mask: Tensor,
    vocab_size: int,
    processor: ImageProcessor | None,
    images: Sequence[Sequence[str]] | None,
    *,
    what: str = "score_packed",
) -> None:
    """Check packed sequences, their targets, and that they have the images of their tokens."""
    if ids.ndim != 1 or ids.shape != target_mask.shape or int(lengths.sum()) != len(ids):
        raise ValueError(
            f"{what} takes ids [N], lengths that sum to N and a mask [N]; got ids "
            f"{tuple(ids.shape)}, lengths that sum to {int(lengths.sum())}, mask "
            f"{tuple(target_mask.shape)}."
        )
    if bool((lengths < 1).any()):
        raise ValueError(f"{what}: a sequence is empty; lengths are {lengths.tolist()}.")
    starts = cumulative_lengths(lengths)[:-1].to(target_mask.device)
    if bool(target_mask[starts].any()):
        raise ValueError(
            f"{what}: the first token of a sequence is a target, but nothing comes before "
            "it to predict it."
        )
    if processor is None and images and any(images):
        raise ValueError(
            f"{what}: the sequences have images, and the scorer reads none. Give it the "
            "processor of the vision-language model: TransformersWrapper(processor=...)."
        )
    if processor is not None and (images is not None or bool((ids == processor.token_id).any())):
        rows = ids.split(lengths.tolist())
        for i, (row, its) in enumerate(zip(rows, images or [[]] * len(rows), strict=True)):
            if fault := processor.fault(row, its):
                raise ValueError(
                    f"{what}: sequence {i} can't be scored: {fault}. A batch keeps them in "
                    "'images', which a loss hands on."
                )
    unknown = (ids < 0) | (ids >= vocab_size)
    if bool(unknown.any()):
        at = int(unknown.nonzero()[0])
        row = int(sequence_index(lengths)[at])
        raise ValueError(
            f"{what}: token {at - int(lengths[:row].sum())} of sequence {row} has the id "
            f"{int(ids[at])}, but the model's vocabulary ends at {vocab_size - 1}. Was it encoded "
            "with another tokenizer?"
        )


@dataclass(eq=False)
class ModelReader:
    """Reads packed rows with a model, and gives what predicts their targets."""

    model: PreTrainedModel
    layout: Layout
    head: nn.Linear | None
    share_prefixes: bool = True

    def __post_init__(self) -> None:
        takes = forward_parameters(self.model)
        any_name = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
        self._no_cache = {"use_cache": False} if any_name or "use_cache" in takes else {}
        self._picks_logits = "logits_to_keep" in takes

    def read(self, targets: Targets, experts: Tensor | None = None) -> Tensor:
        """Hidden states ``[K, D]`` that predict the targets, or float32 logits ``[K, V]``.

        Args:
            targets: what is to be predicted.
            experts: those to which the packed tokens are sent, ``[N, L, S]``; each router chooses
                when not given.
        """
        inputs: dict[str, Any]
        if self.layout is Layout.PACKED:
            trie, experts = self._lay_out(targets, experts)
            return self._read_trie(trie, _predictors(trie, targets), experts)
        if self.layout is Layout.PADDED:
            used = targets.ends.nonzero().squeeze(1)
            place = torch.zeros_like(targets.ends)
            place[used] = torch.arange(len(used))
            rows = targets.beginnings(used)
            mask = pad([torch.ones_like(row) for row in rows], value=0)
            inputs = {"input_ids": pad(rows, value=0), "attention_mask": mask}
            if experts is not None:
                experts = _padded_experts(experts, targets, used)
            return self.pick(inputs, place[targets.rows], targets.positions, experts)
        parts, order = [], []
        for end in targets.ends[targets.ends > 0].unique():
            used = (targets.ends == end).nonzero().squeeze(1)
            rows = torch.stack(targets.beginnings(used))
            mine = torch.isin(targets.rows, used).nonzero().squeeze(1)
            place = torch.searchsorted(used, targets.rows[mine])
            own = None if experts is None else _padded_experts(experts, targets, used)
            parts.append(self.pick({"input_ids": rows}, place, targets.positions[mine], own))
            order.append(mine)
        return torch.cat(parts)[on_device(torch.cat(order).argsort(), self.model.device)]

    def read_share(
        self, targets: Targets, group: Any, experts: Tensor | None = None
    ) -> tuple[Tensor, TargetShare]:
        """What predicts this rank's targets, of packed rows whose tokens ranks share out.

        Args:
            targets: the same on every rank.
            group: the ranks.
            experts: as for :meth:`read`.

        Returns:
            Hidden states or logits as of :meth:`read`, of the targets that the share names.

        Raises:
            ValueError: the model has dropout in training, which ranks would draw differently.
        """
        if drops_out(self.model):
            raise ValueError(
                f"score_packed: {type(self.model).__name__} is in training mode and has dropout, "
                "which the ranks that share out its rows would draw differently. Call eval() on "
                "it, or set its dropout to 0."
            )
        trie, experts = self._lay_out(targets, experts)
        context = ContextShare.of(group, len(trie.ids))
        share = TargetShare.of(context, _predictors(trie, targets))
        if experts is not None:
            filled = experts.new_zeros(context.num_tokens - len(experts), *experts.shape[1:])
            experts = context.own(torch.cat([experts, filled]))
        return self._read_trie(share_out(trie, context), share.columns, experts), share

    def _lay_out(
        self, targets: Targets, experts: Tensor | None
    ) -> tuple[PrefixTrie, Tensor | None]:
        """The tokens that are to be read, what rows have in common once, and their experts."""
        share = self.share_prefixes and can_share(self.model, int(targets.ends.max()))
        # Tokens are read once for several rows where they went to the same experts there.
        keys = targets.ids if experts is None else _ids_with_experts(targets.ids, experts)
        trie = build_trie(
            keys, targets.lengths, targets.ends, share=share, device=self.model.device
        )
        if experts is None:
            return trie, None
        read = (trie.node >= 0).nonzero().squeeze(1)
        first = torch.zeros(len(trie.ids), dtype=torch.int64)
        first[trie.node[read]] = read
        ids = on_device(targets.ids[first], self.model.device)
        return replace(trie, ids=ids), experts[first]

    def _read_trie(self, trie: PrefixTrie, at: Tensor, experts: Tensor | None) -> Tensor:
        """What the model gives at some tokens of a trie, ``[K, ...]``."""
        inputs: dict[str, Any] = {
            "input_ids": trie.ids[None],
            "position_ids": trie.positions[None],
        }
        if (nothing := no_mask(self.model.device)) is not None:
            inputs["attention_mask"] = nothing
        with packed_input():
            return self.pick({**inputs, "trie": trie}, torch.zeros_like(at), at, experts)

    def pick(
        self, inputs: dict[str, Any], rows: Tensor, columns: Tensor, experts: Tensor | None = None
    ) -> Tensor:
        """What the model gives at some rows and columns of its input, ``[K, ...]``."""
        if experts is not None:
            replay = replayed_layers(experts)
            with ExpertRoutes(self.model, replay, margins=False) as routes:
                picked = self.pick(inputs, rows, columns)
            if len(routes.layers) != len(replay):
                raise ValueError(
                    f"score_packed: routed_experts are of {len(replay)} layers, and "
                    f"{type(self.model).__name__} has {len(routes.layers)} with experts. Were they "
                    "recorded with another model?"
                )
            return picked
        device = self.model.device
        for name in ("input_ids", "attention_mask"):
            if name in inputs:
                inputs[name] = on_device(inputs[name], device)
        if self.head is not None:
            outputs = self.model.base_model(**inputs, **self._no_cache).last_hidden_state
        else:
            if self._picks_logits:
                kept, columns = columns.unique(return_inverse=True)
                inputs["logits_to_keep"] = on_device(kept, device)
            outputs = call(self.model, **inputs, **self._no_cache).logits.float()
        # One index and not two: its backward pass adds in a fixed order.
        index = on_device(rows * outputs.shape[1] + columns, device)
        return outputs.flatten(0, 1).index_select(0, index)


def _predictors(trie: PrefixTrie, targets: Targets) -> Tensor:
    """Where the token that predicts each target is in the trie, ``[K]``."""
    return trie.node[targets.starts[targets.rows] + targets.positions]


def _ids_with_experts(ids: Tensor, experts: Tensor) -> Tensor:
    """A number for each packed token, the same for those alike in id and experts, int64 ``[N]``."""
    columns = torch.cat([ids[:, None], experts.flatten(1).long()], 1)
    return columns.unique(dim=0, return_inverse=True)[1]


def _padded_experts(experts: Tensor, targets: Targets, rows: Tensor) -> Tensor:
    """Experts of some rows, padded on the right as they are: ``[rows x T, L, S]``."""
    starts, ends = targets.starts[rows].tolist(), targets.ends[rows].tolist()
    own = [experts[a : a + n] for a, n in zip(starts, ends, strict=True)]
    unknown = unknown_expert(experts.dtype)
    padded = torch.nn.utils.rnn.pad_sequence(own, batch_first=True, padding_value=unknown)
    return padded.flatten(0, 1)
