"""Several losses on the tokens of one batch, from one forward pass.

Shape legend: B rows, K trained tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from objectives.batching.packed_batch import PackedBatch
from objectives.batching.ranks import Ranks
from objectives.batching.token_streams import (
    STREAMS,
    leave_out_of_stream,
    pack_streams,
    stream_part,
)
from objectives.losses.window import Window
from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import check_type
from torchrl_data.devices import on_device
from torchrl_data.token_scorer import TokenScores

from .kto import KTOLoss
from .pair_loss import PairLoss
from .token_loss import TokenLoss

_READ = ("read.tokens", "read.attention_mask", "read.assistant_mask")
_SAME = {what: attrgetter(what) for what in ("actor_network", "temperature", *_READ)}
"""What all streams have in common."""


@dataclass(frozen=True)
class MixedLossOutput:
    """Terms and metrics of :class:`~objectives.MixedLoss`: what each of its losses gives back."""

    streams: Mapping[str, Any]
    """By the stream's name, the output of its loss."""

    def total(self) -> Tensor:
        """The objective: the sum of those of the streams."""
        return torch.stack([output.total() for output in self.streams.values()]).sum()

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Terms and metrics, as ``"stream.term"``."""
        for name, output in self.streams.items():
            for key, value in output.items():
                if value is not None:
                    yield f"{name}.{key}", value

    @classmethod
    def combine(
        cls, outputs: Sequence[MixedLossOutput], *, ranks: Ranks | None = None
    ) -> MixedLossOutput:
        """The output of a whole window from those of its micro-batches, detached.

        Args:
            outputs: at least one, each computed with the window's counts.
            ranks: also over all of these, each of which calls it.

        Returns:
            What one call on all rows would have given.

        Raises:
            ValueError: there are no outputs.
        """
        if not outputs:
            raise ValueError("combine needs at least one output.")
        names = outputs[0].streams
        parts = {name: [output.streams[name] for output in outputs] for name in names}
        return cls({name: type(each[0]).combine(each, ranks=ranks) for name, each in parts.items()})


class MixedLoss(ChecksAttributes, TensorDictModuleBase):
    """Reinforcement learning, fine-tuning and distillation as streams of tokens of one batch.

    Each stream is a loss of its own with its own normaliser: what it divides by is counted over
    its tokens and its rows alone, so that the gradient of a mixed batch is the sum of those of
    separate batches. All tokens are scored in one pass. ``("streams", name)`` says which tokens
    take part and with what weight (:func:`~objectives.write_streams`); a row without it takes no
    part, and needs none of the stream's entries::

        loss = MixedLoss({"rl": DAPO(policy), "ce": SFTLoss(policy)})
        write_streams(rollouts, rl="assistant", ce=("observation", 0.05))  # ECHO
        write_streams(demonstrations, ce="assistant")
        packed = loss.pack(lazy_stack([*rollouts.unbind(0), *demonstrations.unbind(0)]))
        window = loss.measure_window(packed)
        for part in packed.micro_batches(max_tokens=8192):
            loss(part, window=window).total().backward()

    Args:
        streams: losses by name, such as ``"rl"``, ``"ce"``, ``"ref_kl"``; all of one actor and one
            temperature, and with the same names for tokens and masks.

    Raises:
        TypeError: a stream is no loss over tokens.
        ValueError: there are no streams, they differ in what has to be the same, or an option of
            one can take no effect on weighed tokens.

    See Also:
        Shrivastava et al., 2026 (ECHO), arXiv:2605.24517.
    """

    def __init__(self, streams: Mapping[str, TokenLoss[Any, Any]]) -> None:
        super().__init__()
        if not streams:
            raise ValueError("MixedLoss needs at least one stream, {'rl': GRPOLoss(policy)}.")
        for name, loss in streams.items():
            check_type(f"stream {name!r}", loss, TokenLoss, who="MixedLoss")
            if loss.network_name != TokenLoss.network_name:
                raise TypeError(
                    f"MixedLoss: stream {name!r} is a {type(loss).__name__}, which trains a model "
                    "of its own and not the policy. Call it beside MixedLoss."
                )
        self.streams = torch.nn.ModuleDict(streams)
        self._check_streams()

    def _check_streams(self) -> None:
        """Check that the streams fit together, whose options may have been set meanwhile."""
        for name, loss in self._losses():
            _check_weighable(name, loss)
        (first, one), *others = self._losses()
        for name, loss in others:
            other = [what for what, of in _SAME.items() if of(loss) != of(one)]
            if other:
                raise ValueError(
                    f"MixedLoss: streams {first!r} and {name!r} differ in {', '.join(other)}. One "
                    "pass scores the tokens of all streams: give them the same."
                )

    @property
    def in_keys(self) -> list[NestedKey]:  # type: ignore[override]
        """Entries that the streams read, by their options as they are."""
        keys = [key for _, loss in self._losses() for key in loss.in_keys]
        weights: list[NestedKey] = [(STREAMS, name) for name in self.streams]
        return list(dict.fromkeys([*keys, *weights]))

    @property
    def out_keys(self) -> list[str]:  # type: ignore[override]
        """Terms of all streams, as ``"stream.term"``."""
        return [f"{name}.{key}" for name, loss in self._losses() for key in loss.out_keys]

    @property
    def _first(self) -> TokenLoss[Any, Any]:
        return next(iter(self.streams.values()))  # type: ignore[return-value]

    @property
    def on_scores(self) -> Callable[[PackedBatch, TokenScores], None] | None:
        """Told of the scores of the tokens of all streams, detached, whenever it has them."""
        return self._first.on_scores

    @on_scores.setter
    def on_scores(self, function: Callable[[PackedBatch, TokenScores], None] | None) -> None:
        self._first.on_scores = function

    def _losses(self) -> Iterable[tuple[str, TokenLoss[Any, Any]]]:
        return self.streams.items()  # type: ignore[return-value]

    def pack(self, batch: TensorDictBase | PackedBatch) -> PackedBatch:
        """Read what the streams need of a batch, without padding.

        Args:
            batch: ``[B]``, ragged or padded; rows may differ in their entries.

        Returns:
            The packed batch; one that is packed already as it is.

        Raises:
            MissingEntryError: a row lacks an entry of a stream in which it takes part.
            TypeError: the batch is no TensorDict.
            ValueError: entries are not aligned with the tokens, or the batch is not ``[B]``.
        """
        self._check_streams()
        if isinstance(batch, PackedBatch):
            return batch
        packed = pack_streams(
            batch,
            self._first.read,
            {name: loss._entries() for name, loss in self._losses()},
            who="MixedLoss",
        )
        for name, loss in self._losses():
            unfit = loss.fit(stream_part(packed, name).batch).left_out
            if bool(unfit.any()):
                packed = leave_out_of_stream(packed, name, unfit)
        return packed

    def measure_window(
        self,
        batches: TensorDictBase | PackedBatch | Iterable[TensorDictBase | PackedBatch],
        *,
        ranks: Ranks | None = None,
    ) -> dict[str, Window]:
        """Count what an accumulation window will train, stream by stream.

        Args:
            batches: all rows of the window that this process trains, as one batch or several.
            ranks: train the window together; each of them calls it.

        Returns:
            The counts of each stream, for ``window=``.

        Raises:
            MissingEntryError: an entry is missing.
        """
        parts = [batches] if isinstance(batches, TensorDictBase | PackedBatch) else batches
        packed = [self.pack(rows) for rows in parts]
        streams = {
            name: [stream_part(rows, name).batch for rows in packed] for name in self.streams
        }
        return {n: loss.measure_window(streams[n], ranks=ranks) for n, loss in self._losses()}

    def has_signal(self, packed: PackedBatch) -> bool:
        """Return whether an optimizer step on a batch can follow from any of its streams.

        Args:
            packed: what :meth:`pack` gave.
        """
        for name, loss in self._losses():
            part = stream_part(packed, name).batch
            check = getattr(loss, "has_signal", None)
            if check(part) if check is not None else part.num_targets > 0:
                return True
        return False

    def forward(
        self,
        tensordict: TensorDictBase | PackedBatch,
        *,
        window: Mapping[str, Window] | None = None,
    ) -> MixedLossOutput:
        """Compute the terms of all streams.

        Args:
            tensordict: ``[B]``, ragged or padded; or packed.
            window: counts of the whole accumulation window; None: this batch is all of it.

        Returns:
            What each loss gives back; ``.total()`` is what to call ``backward`` on. A stream
            without a token has loss 0.

        Raises:
            MissingEntryError: a row lacks an entry of a stream in which it takes part.
            ValueError: entries are not aligned with the tokens, the batch is not ``[B]``, or the
                window lacks a stream.
        """
        packed = self.pack(tensordict)
        if window is not None and window.keys() != set(self.streams):
            raise ValueError(
                f"MixedLoss: the window has counts of {sorted(window)}, the streams are "
                f"{sorted(self.streams)}. loss.measure_window(...) gives them."
            )
        wants_entropy = any(loss.wants_entropy for _, loss in self._losses())
        scores = self._first._score(packed, entropy=wants_entropy)
        outputs = {}
        for name, loss in self._losses():
            part, index = stream_part(packed, name)
            counts = Window(part.num_targets, part.num_rows) if window is None else window[name]
            counts = counts.check(part.num_targets, part.num_rows, f"MixedLoss, stream {name!r}")
            index = on_device(index, scores.log_prob.device)
            entropy = scores.entropy if loss.wants_entropy else None
            own = TokenScores(scores.log_prob[index], None if entropy is None else entropy[index])
            outputs[name] = loss.of_scores(part, own, counts)
        return MixedLossOutput(outputs)


def _check_weighable(name: str, loss: TokenLoss[Any, Any]) -> None:
    """Check that every term of a loss can be weighed by token."""
    options = getattr(loss, "options", None)
    for bad, what in (
        (loss.aggregation == "none", "aggregation='none' gives no number that could be added up"),
        (getattr(loss, "loss_function", "") == "minor_sft", "minor SFT goes by whole answers"),
        (isinstance(loss, PairLoss), "preferences go by pairs of whole answers"),
        (isinstance(loss, KTOLoss), "labels go by whole answers"),
        (
            getattr(options, "skip_rows_without_signal", False),
            "skip_rows_without_signal has no effect where another stream may score the row",
        ),
        (
            loss.masking_strategy != "assistant",
            f"masking_strategy={loss.masking_strategy!r} has no effect: the weights say which "
            "tokens take part",
        ),
    ):
        if bad:
            raise ValueError(f"MixedLoss: stream {name!r}: {what}.")
