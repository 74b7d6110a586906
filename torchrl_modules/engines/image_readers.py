"""Readers of rows with images.

Shape legend: A rows, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_data.devices import on_device
from torchrl_data.templates.image_processor import ImageProcessor
from torchrl_modules.scoring.image_reading import (
    RowPositions,
    alike,
    model_inputs,
    own_positions,
    run_image_trial,
)
from torchrl_modules.scoring.trial import ReadingTrial
from torchrl_modules.transformers_releases import with_cache

from .decoding import PromptReader
from .readers import FoundReaders, WholeRowReader, different_rows, fastest, stepped_cache

_found_with_images = FoundReaders()


class ImageRows(PromptReader):
    """Rows with images of one length.

    Args:
        model: a vision-language model in evaluation mode.
        processor: its own.
        images: of each prompt, in base 64, of one shape.
    """

    needs_one_length = True

    def __init__(
        self, model: PreTrainedModel, processor: ImageProcessor, images: Sequence[Sequence[str]]
    ) -> None:
        super().__init__(model)
        self._processor = processor
        self._images = [tuple(its) for its in images]
        self._positions = RowPositions(model)


class ImageReader(ImageRows):
    """A cache of keys and values; equal prompts with equal images are read once."""

    def read(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """See :class:`PromptReader`."""
        rows = zip(map(tuple, prompts), self._images, strict=True)
        different, index = different_rows(rows, self.model.device)
        ids = on_device([prompt for prompt, _ in different], self.model.device)
        self._cache = stepped_cache(self.model)
        self._positions.forget()
        output = self.model(
            input_ids=ids,
            **with_cache(self.model, self._cache),
            logits_to_keep=1,
            **model_inputs(self.model, self._processor, ids, [its for _, its in different]),
        )
        if len(different) < len(prompts):
            self._take(index)
        return output.logits[index, -1]

    def advance(self, tokens: Tensor) -> Tensor:
        """See :class:`PromptReader`."""
        output = self.model(input_ids=tokens[:, None], **with_cache(self.model, self._cache))
        return output.logits[:, -1]

    def keep(self, rows: Sequence[int]) -> None:
        """See :class:`PromptReader`."""
        self._take(on_device(rows, self.model.device, torch.int64))

    def _take(self, index: Tensor) -> None:
        self._cache.batch_select_indices(index)
        self._positions.take(index)


class WholeImageReader(ImageRows, WholeRowReader):
    """Nothing is kept: every token reads its whole row again, images included."""

    def _logits(self) -> Tensor:
        self._positions.forget()
        inputs = model_inputs(self.model, self._processor, self._ids, self._images)
        return self.model(input_ids=self._ids, use_cache=False, **inputs).logits[:, -1]

    def keep(self, rows: Sequence[int]) -> None:
        """See :class:`PromptReader`."""
        super().keep(rows)
        self._images = [self._images[i] for i in rows]


def find_image_reader(model: PreTrainedModel, processor: ImageProcessor) -> type[ImageRows]:
    """The fastest way to continue rows with images that gives the model's own log-probs."""
    run = partial(run_image_trial, model, processor, who="TransformersEngine")
    readers: list[type[ImageRows]] = [ImageReader, WholeImageReader]
    log_probs = partial(_continued_with_images, processor)
    return fastest(_found_with_images, model, readers, run, log_probs, "a row with images")


def _continued_with_images(
    processor: ImageProcessor, cls: type[ImageRows], model: PreTrainedModel, trial: ReadingTrial
) -> list[Tensor]:
    """Log-probs of the last tokens of rows, read one by one; the first row leaves on the way."""
    rows, results = trial.rows, [[] for _ in trial.rows]
    for group in alike(processor, [len(row) for row in rows], trial.images):
        here = group + group[:1]  # one row twice
        with own_positions(model):
            reader = cls(model, processor, [trial.images[i] for i in here])
            logits = reader.read([rows[i][:-2].tolist() for i in here])
            for step in (-2, -1):
                drawn = torch.stack([rows[i][step] for i in here])
                log_p = logits.double().log_softmax(-1).gather(1, drawn[:, None]).squeeze(1)
                for i, value in dict(zip(here, log_p, strict=True)).items():
                    results[i].append(value)
                if step == -2:
                    reader.keep(range(1, len(here)))
                    here = here[1:]
                    logits = reader.advance(drawn[1:])
    return [torch.stack(values) for values in results]
