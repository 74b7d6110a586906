"""Parts of a message that are not only text: images, audio, video, files, function calls."""

from typing import Any, Literal, get_args

from tensordict import (
    TensorClass,
)

from .tensorclass import documented

ContentType = Literal["text", "image", "audio", "video", "file", "function_call"]


@documented
class ContentBase(TensorClass["nocast", "shadow"]):
    """A part of a message's content.

    Parts are stacked along a last dimension, one more than the message has.

    Examples:
        >>> from tensordict import lazy_stack
        >>> text = ContentBase(type="text", text="What is this?")
        >>> image = ContentBase(type="image", url="https://example.com/cat.jpg")
        >>> list(lazy_stack([text, image]).type)
        ['text', 'image']

    Raises:
        ValueError: the type is not one of ``text``, ``image``, ``audio``, ``video``, ``file``,
            ``function_call``.
    """

    _documentation = __doc__

    type: ContentType  # type: ignore[override]
    """What the part is."""
    text: str | None = None
    """The text of a ``text`` part."""
    url: str | None = None
    """Where the medium is."""
    data: str | None = None  # type: ignore[override]
    """The medium itself, in base 64."""
    mime_type: str | None = None
    """For instance ``"image/jpeg"``."""
    name: str | None = None
    """File name or description."""
    size: int | None = None  # type: ignore[override]
    """Bytes of a file."""
    function_name: str | None = None
    """The function that a ``function_call`` calls."""
    function_args: dict | None = None
    """Its arguments."""

    def __post_init__(self) -> None:
        types = [*get_args(ContentType)]
        for kind in self.type if isinstance(self.type, list) else [self.type]:
            if isinstance(kind, str) and kind not in types:
                raise ValueError(f"ContentBase has the unknown type {kind!r}; they are {types}.")

    def to_part(self) -> dict[str, Any]:
        """The part as a dictionary of the fields that are set.

        Raises:
            RuntimeError: this is a batch of parts.
        """
        if self.batch_dims:
            raise RuntimeError(
                f"to_part converts one part, this is a batch of shape {tuple(self.batch_size)}; "
                "use to_parts."
            )
        fields = {name: getattr(self, name) for name in type(self).__annotations__}
        return {name: value for name, value in fields.items() if value is not None}

    def to_parts(self) -> list[dict[str, Any]]:
        """The parts of a stack ``[P]``, as dictionaries."""
        return [part.to_part() for part in self.unbind(0)]
