"""Decoding with a Transformers model, one step for the whole batch at a time.

A step is a :class:`~.drawn_tokens.TokenDraw` (the distribution, the draw, and what is reported of
it) and a :class:`PromptReader` that goes on. Beside what ``generate`` does, a prompt that rows
share is read once, rows that have ended cost nothing where the model's cache can leave them out,
and the log-probability of each sampled token is kept without keeping any logits.

Shape legend: A rows that still run, V vocabulary.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_data.devices import on_device
from torchrl_modules.sampling.parameters import SamplingParameters

from .drawn_tokens import (
    AlikeRows,
    DrawnRow,
    TokenDraw,
    advancing,
    draw_block,
    look,
    start_history,
)
from .engine import Generation

_COMPACT_BELOW = 0.75
"""Rows that have ended are dropped from the batch once fewer than this fraction still run."""


def last_position(model: PreTrainedModel) -> int:
    """The last position that a model names; a large number where it names none."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return (limit or 1 << 62) - 1


class PromptReader(ABC):
    """Reads prompts, and then one token of each row at a time.

    Args:
        model: a causal language model in evaluation mode.
    """

    needs_one_length: ClassVar[bool]
    """Its prompts have to be of one length."""
    can_drop = True
    """Rows can be left out."""
    keeps_rows = False
    """What was read of a row that leaves may serve a later turn."""
    reads_past_ends: ClassVar[bool] = False
    """Rows that have ended can be read on, behind the last position of the model, without use."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @abstractmethod
    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts; logits of the next token, ``[A, V]``."""

    @abstractmethod
    def advance(self, tokens: Tensor) -> Tensor:
        """Read one more token of each row, int64 ``[A]``; logits of the next, ``[A, V]``."""

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Go on with some of the rows, in this order."""

    def expect(self, num_tokens: int) -> None:  # noqa: B027
        """Rows that have been read may become so long, prompt included."""

    def leave_behind(self, row: int, ids: Sequence[int], key: Hashable = None) -> None:
        """Keep what was read of a row, where :attr:`keeps_rows`."""
        raise NotImplementedError(type(self).__name__)


def decode(
    reader: PromptReader,
    prompts: Sequence[Sequence[int]],
    params: SamplingParameters,
    budgets: Sequence[int],
    seeds: Sequence[int] | None = None,
    *,
    per_look: int = 1,
    marks: Sequence[int] | None = None,
) -> list[Generation]:
    """Continue one batch of prompts until every row has drawn a stop token or used up its budget.

    Args:
        reader: of a model in evaluation mode.
        prompts: token ids of each row, none empty.
        params: the distribution and the stop tokens.
        budgets: most new tokens of each row.
        seeds: of each row's stream; torch's generator draws when not given.
        per_look: so many tokens are drawn of each row before the host looks at them. With seeds a
            row is the same whatever the number. Torch's generator also draws for rows that have
            ended and are still in the batch, so without seeds it decides which numbers others get.
        marks: of each row, see :class:`~.joined_model.JoinedModel`; 0 when not given.
    """
    rows = [
        DrawnRow(tokens=[*prompt], params=params, budget=budget, mark=mark)
        for prompt, budget, mark in zip(prompts, budgets, marks or [0] * len(prompts), strict=True)
    ]
    streams = None if seeds is None else [random.Random(seed) for seed in seeds]
    # Row of each batch element; elements leave the batch when their rows have ended.
    here = list(range(len(rows)))
    logits = reader.read(prompts if marks is None else [row.marked for row in rows])
    draw, num_drawn, advance = TokenDraw(params), 0, reader.advance
    if marks is not None:
        advance = advancing(reader.advance, rows, logits.device)
    reader.expect(max(len(row.tokens) + row.budget for row in rows))
    seen, counts = start_history(prompts, logits) if params.penalises else (None, None)
    while True:
        batch = AlikeRows(
            draw,
            [num_drawn] * len(here),
            streams=streams and [streams[row] for row in here],
            seen=seen,
            counts=counts,
        )
        left = [rows[row].budget for row in here if rows[row].finish_reason is None]
        num_steps = min(per_look, (max if reader.reads_past_ends else min)(left) - num_drawn)
        drawn, tokens = draw_block([batch], logits, None, advance, num_steps)
        num_drawn += num_steps
        (steps,) = look(drawn, logits.shape[-1])
        for element, row in enumerate(here):
            rows[row].take(steps, element)
        if any(row.finish_reason == "error" for row in rows):
            raise RuntimeError(
                f"{type(reader.model).__name__} gives logits that are not finite, so no token can "
                "be drawn. Are its weights loaded, or did training diverge?"
            )
        keep = [k for k, row in enumerate(here) if rows[row].finish_reason is None]
        if not keep:
            break
        if len(keep) < _COMPACT_BELOW * len(here) and reader.can_drop:
            _leave_behind(reader, [rows[row] for row in here], ended=True)
            reader.keep(keep)
            at = on_device(keep, tokens.device, torch.int64)
            tokens, here = tokens[at], [here[k] for k in keep]
            if seen is not None and counts is not None:
                seen, counts = seen[at], counts[at]
            if marks is not None:
                advance = advancing(reader.advance, [rows[row] for row in here], logits.device)
        logits = advance(tokens)
    _leave_behind(reader, [rows[row] for row in here], ended=False)
    return [row.generation() for row in rows]


def _leave_behind(reader: PromptReader, rows: Sequence[DrawnRow], *, ended: bool) -> None:
    """Rows of a batch leave, all or those that have ended; what was read may serve later turns."""
    for element, row in enumerate(rows) if reader.keeps_rows else ():
        if not ended or row.finish_reason is not None:
            reader.leave_behind(element, row.marked)
