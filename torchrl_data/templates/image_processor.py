"""Images as a vision-language model reads them: their places in the tokens, and their pixels.

Shape legend: T tokens of a row.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from torchrl_data.conversation import Source
from torchrl_data.images import decoded

from .control_tokens import TokenRun

MAX_KEPT_BYTES: Final = 1 << 28
"""Of the pixels of images that were processed last."""


class Processed(NamedTuple):
    """The output of a processor for the images of a row."""

    ids: list[int]
    """The tokens that stand for them."""
    tensors: dict[str, Tensor]
    """Their pixels, and whatever else the model's forward takes of them."""
    aligned: tuple[str, ...]
    """Inputs ``[T]`` that say of each token whether it is an image's."""
    num_bytes: int
    """Of the pixels."""


class ImageProcessor:
    """A processor of Transformers, asked for images alone.

    Args:
        processor: of the model; it has a tokenizer and an image processor.

    Raises:
        TypeError: it processes no images.
    """

    def __init__(self, processor: Any) -> None:
        token, token_id = (
            getattr(processor, name, None) for name in ("image_token", "image_token_id")
        )
        if getattr(processor, "image_processor", None) is None or not isinstance(token, str):
            raise TypeError(
                "processor= takes the processor of a vision-language model, with an image "
                "processor and an image token (AutoProcessor.from_pretrained), got "
                f"{type(processor).__name__}."
            )
        ids = processor.tokenizer.convert_tokens_to_ids
        self.processor = processor
        self.token_id: int = ids(token) if token_id is None else token_id
        """Stands for a piece of an image, in the model's forward."""
        self.place: str = getattr(processor, "boi_token", None) or token
        """What a template writes where an image is."""
        self.place_id: int = ids(self.place)
        media = (getattr(processor, f"{kind}_token_id", None) for kind in ("video", "audio"))
        self.never_drawn = (self.token_id, *(i for i in media if isinstance(i, int)))
        """Tokens that stand for media: a policy that drew one would see nothing there."""
        self._kept: OrderedDict[tuple[str, ...], Processed] = OrderedDict()
        self._num_bytes = 0
        # Engines ask in threads of their own, and a fast tokenizer takes one caller at a time.
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__ | {"_kept": OrderedDict(), "_num_bytes": 0}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._lock = threading.Lock()

    def process(self, images: Sequence[str]) -> Processed:
        """Pixels of the images of a row, in order.

        Args:
            images: in base 64, one at least.

        Raises:
            ValueError: one is broken.
        """
        with self._lock:
            return self._process(tuple(images))

    def _process(self, key: tuple[str, ...]) -> Processed:
        found = self._kept.get(key)
        if found is None:
            output = self.processor(
                text=self.place * len(key),
                images=[decoded(image) for image in key],
                return_tensors="pt",
                add_special_tokens=False,
            )
            ids = output.pop("input_ids")
            output.pop("attention_mask", None)
            aligned = tuple(name for name, value in output.items() if value.shape == ids.shape)
            tensors = {name: value for name, value in output.items() if name not in aligned}
            num_bytes = sum(value.numel() * value.element_size() for value in tensors.values())
            found = self._kept[key] = Processed(ids[0].tolist(), tensors, aligned, num_bytes)
            self._num_bytes += num_bytes
        self._kept.move_to_end(key)
        while self._num_bytes > MAX_KEPT_BYTES and len(self._kept) > 1:
            self._num_bytes -= self._kept.popitem(last=False)[1].num_bytes
        return found

    def count(self, ids: Sequence[int] | Tensor) -> int:
        """Pieces of images that tokens stand for."""
        return int((torch.as_tensor(ids) == self.token_id).sum())

    def fault(self, ids: Sequence[int] | Tensor, images: Sequence[str]) -> str | None:
        """Return why tokens and images don't belong together, or ``None``."""
        here = self.count(ids)
        expected = self.count(self.process(images).ids) if images else 0
        if here == expected:
            return None
        return (
            f"it holds {here} tokens that stand for images ({self.token_id}), where its "
            f"{len(images)} images have {expected}: its images were lost, or changed, on the way"
        )

    def collapse(self, ids: Sequence[int], images: Sequence[str]) -> list[int]:
        """Tokens with one placeholder for each image, from which the same tokens can be made again.

        Args:
            ids: of a row.
            images: of the row in order, in base 64.

        Raises:
            ValueError: the tokens are not those of the images.

        Example:
            >>> processor.collapse(encoded.ids, images)  # doctest: +SKIP
        """
        collapsed: list[int] = []
        end = 0
        for number, image in enumerate(images):
            expanded = self.process([image]).ids
            first = expanded.index(self.token_id)
            try:
                start = ids.index(self.token_id, end) - first
            except ValueError:
                start = -1
            if start < end or list(ids[start : start + len(expanded)]) != expanded:
                raise ValueError(
                    f"the {len(expanded)} tokens of image {number} are not in the row where they "
                    "should be: the images were lost, or changed, on the way"
                )
            collapsed += [*ids[end:start], self.place_id]
            end = start + len(expanded)
        rest = list(ids[end:])
        if self.token_id in rest:
            raise ValueError(str(self.fault(ids, images)))
        return collapsed + rest

    def inputs(self, ids: Tensor, images: Sequence[Sequence[str]]) -> dict[str, Tensor]:
        """Return what a model's forward takes beside rows of one length.

        Args:
            ids: int64 ``[B, T]``.
            images: of each row; of one :meth:`shape`.
        """
        rows = [self.process(row) for row in images]
        names = rows[0].tensors
        inputs = {name: torch.cat([row.tensors[name] for row in rows]) for name in names}
        if rows[0].aligned:
            kinds = torch.tensor(self.processor.create_mm_token_type_ids(ids.tolist()))
            inputs |= dict.fromkeys(rows[0].aligned, kinds)
        return {name: value.to(ids.device) for name, value in inputs.items()}

    def shape(self, images: Sequence[str]) -> tuple[Any, ...]:
        """Rows with the same can be read together."""
        tensors = self.process(images).tensors
        return tuple((name, tuple(value.shape[1:])) for name, value in tensors.items())


def with_image_runs(
    runs: list[TokenRun], images: Sequence[str], processor: ImageProcessor | None
) -> list[TokenRun]:
    """Runs of a rendered template, with the tokens of images at their places."""
    if processor is None:
        if images:
            raise ValueError(
                "The messages hold images, and nothing here reads images: give the "
                "policy the processor of a vision-language model, TransformersWrapper(model, "
                "tokenizer=..., processor=...)."
            )
        return runs
    places = [i for i, run in enumerate(runs) if run.ids == (processor.place_id,) and not run.text]
    if len(places) != len(images):
        raise ValueError(
            f"The chat template writes {processor.place!r} {len(places)} times for messages that "
            f"hold {len(images)} images. Use the template of the model's processor."
        )
    runs = list(runs)
    for i, image in zip(places, images, strict=True):
        runs[i] = TokenRun(tuple(processor.process([image]).ids), Source.CONTENT)
    return runs
