"""Images in messages: read from whatever they come as, kept as plain values, shown as their size.

In a conversation an image is the file's bytes in base 64 (``data``) and its ``mime_type``, so
that it compares, is saved and travels like text; rows that share an image share the string.
"""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import numpy as np

from . import import_package
from .messages import Message

_SOURCES: Final = ("image", "data", "url")
_LABEL: Final = re.compile(r"\[image(?: \d+x\d+|: .{1,60})\]", re.DOTALL)
"""See :func:`image_label`."""
_ORIENTATION: Final = 0x0112
"""Of the tags of EXIF: how a picture is to be turned."""


def image_part(image: Any) -> dict[str, Any]:
    """A part of a message's content that holds an image, as plain values.

    Args:
        image: a ``PIL.Image.Image``, the bytes of a file, its path, a ``data:`` URL, or what
            ``datasets`` keeps of one (``{"bytes": ..., "path": ...}``).

    Returns:
        ``{"type": "image", "data": ..., "mime_type": ...}``; ``data`` is base 64, of the file as it
        is, or of a PNG of an image in memory.

    Raises:
        ValueError: it can't be read, or would have to be fetched from the network.
        TypeError: it is none of these.
        ImportError: Pillow is not installed.
    """
    file = _file_of(image)
    data = base64.b64encode(file).decode()
    return {"type": "image", "data": data, "mime_type": _header(file)[1]}


def with_plain_images(message: Any) -> Any:
    """A message whose images are plain values; one that can't be read stays as it is.

    Whoever encodes the message refuses what is left, and says why.
    """
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list | tuple):
        return message
    parts = []
    for part in content:
        try:
            parts.append(read_part(part) if is_image(part) else part)
        except (ValueError, TypeError, ImportError):
            parts.append(part)
    if all(new is old for new, old in zip(parts, content, strict=True)):
        return message
    return {**message, "content": parts}


def read_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """The image of a part as plain values; the part itself where they are.

    Raises:
        ValueError: it can't be read.
        TypeError: it is of no known type.
    """
    if isinstance(part.get("data"), str) and "mime_type" in part and "image" not in part:
        return part
    for source in _SOURCES:
        value = part.get(source)
        if value is None:
            continue
        if source == "data" and isinstance(value, str) and not value.startswith("data:"):
            value = _from_base64(value)
        return {**{k: v for k, v in part.items() if k not in _SOURCES}, **image_part(value)}
    raise ValueError(
        f"An image part holds no image, only {sorted(part)}. Give it 'image' (a PIL image, bytes "
        "or a path), 'data' (base 64) or 'url' (data: or file:)."
    )


def images_of(messages: Sequence[Message]) -> list[str]:
    """The images of messages in order, in base 64.

    Raises:
        ValueError: one can't be read.
        TypeError: one is of no known type.
    """
    return [
        read_part(part)["data"]
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
        if is_image(part)
    ]


def without_data(message: Message) -> Message:
    """A message with images of which only the place is left, for a template."""
    content: Any = message.get("content")
    if not isinstance(content, list) or not any(map(is_image, content)):
        return message
    parts = [{"type": "image"} if is_image(part) else part for part in content]
    return {**message, "content": parts}


def decoded(data: str) -> Any:
    """The ``PIL.Image.Image`` (RGB, turned upright) of an image in base 64.

    Raises:
        ValueError: the file is broken.
    """
    pillow, upright = _pillow(), import_module("PIL.ImageOps").exif_transpose
    try:
        with pillow.open(BytesIO(base64.b64decode(data))) as image:
            return upright(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise ValueError(f"An image of {len(data)} characters is broken: {error}") from error


def as_rgb_url(data: str) -> str:
    """A ``data:`` URL of an image in base 64 that every reader sees as :func:`decoded` gives it.

    A file of another mode than RGB, or one that is to be turned, is written anew, as a PNG: readers
    differ in what they make of transparency and of turns.

    Raises:
        ValueError: the file is broken.
    """
    file = base64.b64decode(data)
    mime_type = _header(file)[1]
    with _pillow().open(BytesIO(file)) as image:
        is_plain = image.mode == "RGB" and image.getexif().get(_ORIENTATION, 1) == 1
    part = {"data": data, "mime_type": mime_type} if is_plain else image_part(decoded(data))
    return f"data:{part['mime_type']};base64,{part['data']}"


def is_picture(value: object) -> bool:
    """Return whether a value is a ``PIL.Image.Image``; Pillow need not be installed."""
    kinds = ((kind.__module__, kind.__name__) for kind in type(value).__mro__)
    return ("PIL.Image", "Image") in kinds


def image_label(part: Mapping[str, Any]) -> str:
    """Return what is shown of an image: ``[image 32x32]``."""
    try:
        (width, height), _ = _header(base64.b64decode(part["data"]))
    except (KeyError, TypeError, ValueError, ImportError):
        return f"[image: {str(part.get('url') or '...')[:60]}]"
    return f"[image {width}x{height}]"


def described(value: Any) -> Any:
    """Nested messages in which each image is only described, for a record or a page."""
    if is_image(value):
        return {"type": "text", "text": image_label(value)}
    if isinstance(value, Mapping):
        return {key: described(item) for key, item in value.items()}
    return [described(item) for item in value] if isinstance(value, list | tuple) else value


def is_described_image(part: Any) -> bool:
    """Return whether a part of a content is what :func:`described` left of an image."""
    is_text = isinstance(part, Mapping) and part.get("type") == "text"
    return is_text and _LABEL.fullmatch(str(part.get("text"))) is not None


def is_image(part: Any) -> bool:
    """Return whether a part of a content is an image."""
    return isinstance(part, Mapping) and part.get("type") == "image"


def _file_of(image: Any) -> bytes:
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes | bytearray):
        return bytes(image)
    if hasattr(image, "save") and hasattr(image, "convert"):
        buffer = BytesIO()
        mode = image.mode if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA") else "RGB"
        (image if mode == image.mode else image.convert(mode)).save(buffer, format="PNG")
        return buffer.getvalue()
    if not isinstance(image, str | Path):
        raise TypeError(
            f"An image is a PIL image, the bytes of a file, a path or a data: URL, got "
            f"{type(image).__name__}: {image!r:.80}."
        )
    place = str(image)
    if place.startswith("data:"):
        head, _, body = place.partition(",")
        return _from_base64(body) if head.endswith(";base64") else unquote(body).encode("latin-1")
    if place.startswith("file://"):
        place = unquote(place.removeprefix("file://"))
    if "://" in place[:12]:
        raise ValueError(
            f"An image is at {place[:80]!r}, and images are not fetched from the network. Load it "
            "where the data are prepared (map_row=)."
        )
    try:
        return Path(place).read_bytes()
    except (OSError, ValueError) as error:
        raise ValueError(f"An image can't be read from {place[:80]!r}: {error}") from error


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"The data of an image are no base 64: {error}") from error


def _header(file: bytes) -> tuple[tuple[int, int], str]:
    """Width and height in pixels, and the type, of a file."""
    pillow = _pillow()
    try:
        with pillow.open(BytesIO(file)) as image:
            return image.size, pillow.MIME.get(image.format, "application/octet-stream")
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise ValueError(f"{len(file)} bytes are no image that can be read: {error}") from error


def noise_image(seed: int, size: tuple[int, int] = (64, 64)) -> str:
    """An image of noise in base 64, to try a model with."""
    values = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return image_part(_pillow().fromarray(values))["data"]


def _pillow() -> Any:
    return import_package("PIL.Image", who="An image in a message", install="pip install pillow")
