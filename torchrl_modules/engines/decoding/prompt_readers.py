"""How a model continues rows: what it keeps of the tokens that it has read.

Shape legend: A rows, T tokens so far, V vocabulary.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_columns
from transformers import DynamicCache, PreTrainedModel

from torchrl_data.ragged.packed import pad

_CACHES = ("past_key_values", "cache_params", "state")


class PromptReader(ABC):
    """Reads prompts, and then one token of each row at a time.

    Args:
        model: a causal language model in evaluation mode.
    """

    needs_one_length: ClassVar[bool]
    """Its prompts have to be of one length."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @abstractmethod
    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Read prompts; logits of the next token, ``[A, V]``."""

    @abstractmethod
    def advance(self, tokens: Tensor) -> Tensor:
        """Read one more token of each row, int64 ``[A]``; logits of the next, ``[A, V]``."""

    @property
    def can_drop(self) -> bool:
        """Whether rows can be left out."""
        return True

    @abstractmethod
    def keep(self, index: Tensor) -> None:
        """Go on with some of the rows, int64 ``[A']``."""


class PaddedReader(PromptReader):
    """A cache of keys and values, prompts padded on the left; equal prompts are read once."""

    needs_one_length = False

    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See :class:`PromptReader`."""
        rows, index = _different(prompts, self.model.device)
        mask = pad([torch.ones_like(row) for row in rows], value=0, side="left")
        self._cache = DynamicCache(config=self.model.config)
        output = self.model(
            input_ids=pad(rows, value=0, side="left"),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if len(rows) < len(prompts):
            self._cache.batch_select_indices(index)
        self._mask = mask[index]
        self._lengths = self._mask.sum(1)
        return output.logits[index, -1]

    def advance(self, tokens: Tensor) -> Tensor:
        """See :class:`PromptReader`."""
        self._mask = pad_columns(self._mask, (0, 1), value=1)
        output = self.model(
            input_ids=tokens[:, None],
            attention_mask=self._mask,
            position_ids=self._lengths[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self._lengths = self._lengths + 1
        return output.logits[:, -1]

    def keep(self, index: Tensor) -> None:
        """See :class:`PromptReader`."""
        self._cache.batch_select_indices(index)
        self._mask, self._lengths = self._mask[index], self._lengths[index]


class OwnCacheReader(PromptReader):
    """Whatever a model keeps itself (recurrent states, convolutions), rows of one length.

    No mask and no positions are given: the model computes a batch as it does a row alone.
    """

    needs_one_length = True
    _gives_positions: ClassVar[bool] = False

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        named = inspect.signature(model.forward).parameters
        self._name = next((name for name in _CACHES if name in named), _CACHES[0])
        self._cache: Any = None
        self._num_read = 0

    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See :class:`PromptReader`."""
        rows, index = _different(prompts, self.model.device)
        logits = self._call(torch.stack(rows))
        if len(rows) == len(prompts):
            return logits
        if self.can_drop:
            self.keep(index)
            return logits[index]
        self._cache, self._num_read = None, 0
        return self._call(torch.stack(rows)[index])

    def advance(self, tokens: Tensor) -> Tensor:
        """See :class:`PromptReader`."""
        return self._call(tokens[:, None])

    def _call(self, ids: Tensor) -> Tensor:
        given = {} if self._cache is None else {self._name: self._cache}
        if self._gives_positions:
            end = self._num_read + ids.shape[1]
            given["position_ids"] = torch.arange(self._num_read, end, device=ids.device)[None]
            self._num_read = end
        output = self.model(input_ids=ids, use_cache=True, **given)
        self._cache = getattr(output, self._name)
        if self._cache is None:
            raise TypeError(f"{type(self.model).__name__} keeps nothing under {self._name}")
        return output.logits[:, -1]

    @property
    def can_drop(self) -> bool:
        """See :class:`PromptReader`."""
        return hasattr(self._cache, "reorder_cache")

    def keep(self, index: Tensor) -> None:
        """See :class:`PromptReader`."""
        self._cache.reorder_cache(index)


class OwnCachePositionsReader(OwnCacheReader):
    """For models that count their positions wrongly when their first layer keeps no keys."""

    _gives_positions = True


class WholeRowReader(PromptReader):
    """Nothing is kept: every token reads its whole row again, as scoring does."""

    needs_one_length = True

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        named = inspect.signature(model.forward).parameters
        self._no_cache = {"use_cache": False} if "use_cache" in named else {}

    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See :class:`PromptReader`."""
        self._ids = torch.tensor([list(prompt) for prompt in prompts], device=self.model.device)
        return self._logits()

    def advance(self, tokens: Tensor) -> Tensor:
        """See :class:`PromptReader`."""
        self._ids = torch.cat([self._ids, tokens[:, None]], 1)
        return self._logits()

    def _logits(self) -> Tensor:
        return self.model(input_ids=self._ids, **self._no_cache).logits[:, -1]

    def keep(self, index: Tensor) -> None:
        """See :class:`PromptReader`."""
        self._ids = self._ids[index]


def _different(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[list[Tensor], Tensor]:
    """The different prompts, and which of them each row has, int64 ``[A]``."""
    places = {tuple(prompt): i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    index = torch.tensor([places[tuple(prompt)] for prompt in prompts], device=device)
    return [torch.tensor(prompt, device=device) for prompt in places], index
