"""How a model continues rows with images.

Shape legend: A rows, V vocabulary.
"""

import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from torchrl_data.templates.image_processor import ImageProcessor
from torchrl_modules.scoring.image_rows import (
    ImageTrial,
    RowPositions,
    alike,
    model_inputs,
    run_image_trial,
)
from torchrl_modules.scoring.self_test import find_first

from .decode_loop import PromptReader
from .prompt_readers import WholeRowReader

_found: "WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], type[ImageRows]]]" = (
    WeakKeyDictionary()
)


class ImageRows(PromptReader):
    """Rows with images of one length.

    Args:
        model: a vision-language model in evaluation mode.
        processor: its own.
        images: of each prompt, in base 64, of one shape.
    """

    needs_one_length = True

    def __init__(
        self,
        model: PreTrainedModel,
        processor: ImageProcessor,
        images: Sequence[Sequence[str]],
    ) -> None:
        super().__init__(model)
        self._processor = processor
        self._images = [tuple(its) for its in images]
        self._positions = RowPositions(model)

    def close(self) -> None:
        """Rows that come later are not placed like these."""
        self._positions.forget()


class ImageReader(ImageRows):
    """A cache of keys and values; equal prompts with equal images are read once."""

    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See :class:`PromptReader`."""
        rows = [(tuple(prompt), its) for prompt, its in zip(prompts, self._images, strict=True)]
        places = {row: i for i, row in enumerate(dict.fromkeys(rows))}
        index = torch.tensor([places[row] for row in rows], device=self.model.device)
        ids = torch.tensor([prompt for prompt, _ in places], device=self.model.device)
        self._cache = DynamicCache(config=self.model.config)
        self._positions.forget()
        output = self.model(
            input_ids=ids,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
            **model_inputs(self.model, self._processor, ids, [its for _, its in places]),
        )
        if len(places) < len(rows):
            self.keep(index)
        return output.logits[index, -1]

    def advance(self, tokens: Tensor) -> Tensor:
        """See :class:`PromptReader`."""
        output = self.model(input_ids=tokens[:, None], past_key_values=self._cache, use_cache=True)
        return output.logits[:, -1]

    def keep(self, index: Tensor) -> None:
        """See :class:`PromptReader`."""
        self._cache.batch_select_indices(index)
        self._positions.take(index)


class WholeImageReader(ImageRows, WholeRowReader):
    """Nothing is kept: every token reads its whole row again, images included."""

    def _logits(self) -> Tensor:
        self._positions.forget()
        inputs = model_inputs(self.model, self._processor, self._ids, self._images)
        return self.model(input_ids=self._ids, use_cache=False, **inputs).logits[:, -1]

    def keep(self, index: Tensor) -> None:
        """See :class:`PromptReader`."""
        super().keep(index)
        self._images = [self._images[i] for i in index.tolist()]


def find_image_reader(model: PreTrainedModel, processor: ImageProcessor) -> type[ImageRows]:
    """The fastest way to continue rows with images that gives the model's own log-probs."""
    state = (model.dtype, model.device, model.config._attn_implementation)
    earlier = _found.get(model)
    if earlier is not None and earlier[0] == state:
        return earlier[1]
    who = "TransformersEngine"
    tried = run_image_trial(model, processor, who=who)
    readers: list[type[ImageRows]] = [ImageReader, WholeImageReader]
    at, _, wrong = find_first(
        model,
        tried.trial,
        [
            (cls.__name__, lambda cls=cls: _continued(cls, model, processor, tried))
            for cls in readers
        ],
    )
    if at is None:
        raise ValueError(
            f"{who}: {type(model).__name__} can't be sampled from with images: no way to continue "
            f"rows gives what its forward says of a whole row ({'; '.join(wrong)})."
        )
    if readers[at] is WholeImageReader:
        warnings.warn(
            f"{who}: what {type(model).__name__} keeps of a row with images does not give the "
            f"log-probs of its own forward ({'; '.join(wrong)}), so every token reads its whole "
            "row again, which is slow.",
            stacklevel=2,
        )
    _found[model] = (state, readers[at])
    return readers[at]


def _continued(
    cls: type[ImageRows], model: PreTrainedModel, processor: ImageProcessor, tried: ImageTrial
) -> list[Tensor]:
    """Log-probs of the last tokens of rows, read one by one; the first row leaves on the way."""
    rows, results = tried.trial.rows, [[] for _ in tried.trial.rows]
    for group in alike(processor, [len(row) for row in rows], tried.images):
        here = group + group[:1]  # one row twice
        reader = cls(model, processor, [tried.images[i] for i in here])
        logits = reader.read([rows[i][:-2].tolist() for i in here])
        for step in (-2, -1):
            drawn = torch.stack([rows[i][step] for i in here])
            log_p = logits.double().log_softmax(-1).gather(1, drawn[:, None]).squeeze(1)
            for i, value in dict(zip(here, log_p, strict=True)).items():
                results[i].append(value)
            if step == -2:
                left = torch.arange(1, len(here), device=drawn.device)
                reader.keep(left)
                here = here[1:]
                logits = reader.advance(drawn[left])
        reader.close()
    return [torch.stack(values) for values in results]
