"""A reader that also writes down the experts to which a mixture sent each token that it read.

Shape legend: A rows, T tokens of a row, L layers with experts, S experts of a token.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_modules.scoring.expert_routes import ExpertRoutes, packed_experts

from .decoding import PromptReader
from .slot_reader import SlotReader


class RoutedReader(PromptReader):
    """Reads as another reader does, and sees the experts of each token.

    Args:
        inside: reads; it has read nothing yet, and keeps nothing of earlier rows.
        model: a mixture of experts in evaluation mode.
    """

    needs_one_length = False
    keeps_rows = True

    def __init__(self, inside: PromptReader, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._inside = inside
        self.reads_past_ends = inside.reads_past_ends  # type: ignore[misc]
        if isinstance(inside, SlotReader):
            inside._capture = None  # in a graph no expert is seen
        self._rows: list[list[Tensor]] = []
        """Of each row that still runs, parts ``[T, L, S]``."""
        self._order: list[int] = []
        self.found: dict[int, Tensor] = {}
        """By the number of a row that has left: the experts of the tokens that were read of it."""

    @property
    def can_drop(self) -> bool:  # type: ignore[override]
        """See :class:`PromptReader`."""
        return self._inside.can_drop

    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See :class:`PromptReader`."""
        logits, calls = self._seen(lambda: self._inside.read(prompts))
        known: dict[tuple[int, ...], Tensor] = {}
        for ids, mask, experts in calls:
            for row, real, own in zip(ids.cpu(), mask.cpu().bool(), experts, strict=True):
                known[tuple(row[real].tolist())] = own[real]
        self._order = list(range(len(prompts)))
        self._rows = [[known[tuple(prompt)]] for prompt in prompts]
        return logits

    def advance(self, tokens: Tensor) -> Tensor:
        """See :class:`PromptReader`."""
        logits, [(_, _, experts)] = self._seen(lambda: self._inside.advance(tokens))
        for parts, own in zip(self._rows, experts[:, -1:], strict=True):
            parts.append(own)
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        """See :class:`PromptReader`."""
        self._inside.keep(rows)
        self._rows = [self._rows[row] for row in rows]
        self._order = [self._order[row] for row in rows]

    def leave_behind(self, row: int, ids: Sequence[int], key: Hashable = None) -> None:
        """Take down the experts of all tokens of a row but the last, which was not read."""
        del key
        self.found[self._order[row]] = torch.cat(self._rows[row])[: len(ids) - 1]

    def _seen(self, run: Any) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor]]]:
        """What a call gives; of each pass ids and mask ``[A, T]`` and experts ``[A, T, L, S]``."""
        inputs: list[tuple[Tensor, Tensor]] = []

        def note(_: Any, __: Any, given: dict[str, Any]) -> None:
            ids, mask = given["input_ids"], given.get("attention_mask")
            if mask is None or mask.shape != ids.shape:
                mask = torch.ones_like(ids)
            inputs.append((ids, mask))

        hook = self.model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            with ExpertRoutes(self.model, margins=False) as routes:
                logits = run()
        finally:
            hook.remove()
        num_layers = len(routes.layers) // len(inputs)
        calls = []
        for number, (ids, mask) in enumerate(inputs):
            layers = routes.layers[number * num_layers : (number + 1) * num_layers]
            experts = packed_experts(layers, routes.num_experts)
            calls.append((ids, mask, experts.unflatten(0, tuple(ids.shape))))
        return logits, calls
