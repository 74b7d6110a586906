"""Messages, their images, and the record of one conversation's tokens and turns."""

import base64
import binascii
import re
import secrets
from array import array
from collections.abc import Mapping, Sequence
from enum import IntEnum
from importlib import import_module
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import numpy as np

# The record of one conversation: every token with who wrote it, and the messages that they spell.
#
# Only ever appended to. Shape legend: T tokens.

Message = dict[str, Any]
"""``role`` and ``content``, and where they apply ``tool_calls``, ``tool_call_id``, ``name``,
``reasoning_content``."""

ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles that a message may have."""
PLACEHOLDER_ROLE: Final = "<none>"
"""Role of a message that only fills a gap in a batch; it is never rendered."""
_KNOWN_ROLES = frozenset((*ROLES, PLACEHOLDER_ROLE))


def check_messages(
    messages: Sequence[Message], *, first: int = 0, row: int | tuple[int, ...] | None = None
) -> None:
    """Check roles and contents, before anything is rendered.

    Args:
        messages: the messages to check.
        first: the number of the first of them, for the error.
        row: the row that they belong to, for the error.

    Raises:
        ValueError: a role is unknown, or a message has neither content nor tool calls.
        TypeError: a message, its role or its content has the wrong type.
    """
    for number, message in enumerate(messages, first):
        # The common case first, as this runs for every message of every step.
        if (
            type(message) is dict
            and message.get("role") in _KNOWN_ROLES
            and type(message.get("content")) is str
        ):
            continue
        where = f"Message {number}" if row is None else f"Message {number} of row {row}"
        _check_message(message, where)


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, Mapping):
        found = f"{type(message).__name__} ({message!r:.80})"
        raise TypeError(f"{where} is a {found}, not a dict with 'role' and 'content'.")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise TypeError(f"{where} has the role {role!r}; a role is a string, one of {list(ROLES)}.")
    if role not in _KNOWN_ROLES:
        raise ValueError(
            f"{where} has the unknown role {role!r}; the roles are {list(ROLES)}. Rename it, or "
            "put the name of the speaker in 'name'."
        )
    where = f"{where} ({role})"
    if content is None:
        if not message.get("tool_calls") and not message.get("reasoning_content"):
            raise ValueError(
                f"{where} has no content and no tool calls. Give it a string, which may be empty."
            )
    elif isinstance(content, Sequence) and not isinstance(content, str | bytes):
        for part in content:
            if not isinstance(part, Mapping) or "type" not in part:
                raise TypeError(
                    f"{where} has a content part {part!r:.80}; a part is a dict with a 'type', "
                    "such as {'type': 'text', 'text': ...}."
                )
    elif not isinstance(content, str):
        raise TypeError(
            f"{where} has content of type {type(content).__name__} ({content!r:.80}); content is "
            "a string or a list of parts. Convert it with str() or json.dumps()."
        )


class Source(IntEnum):
    """Who wrote a token."""

    TEMPLATE = 0
    """The chat template: control tokens and headers."""
    CONTENT = 1
    """A message that somebody else than the policy wrote: system, user or tool."""
    MODEL = 2
    """The policy sampled it."""


class EncodedMessages(NamedTuple):
    """Tokens of some messages, as they continue a conversation."""

    ids: list[int]
    sources: list[Source]


class Turn(NamedTuple):
    """What somebody said as the assistant: usually what an engine sampled.

    Args:
        ids: the tokens, stop token included.
        log_probs: one per token, in nats, of the distribution that it was drawn from; ``None``
            where the policy did not sample the turn.
        message: what the tokens spell.
        versions: the policy version that sampled them, or one per token when the weights changed
            meanwhile.
        extra: further values of the tokens by name, such as their entropy; one per token each.

    Example:
        >>> from torchrl_data import ConversationEncoder, Conversations
        >>> encoder = ConversationEncoder(tokenizer)
        >>> prompt = Conversations.from_messages([[{"role": "user", "content": "hello"}]])
        >>> ids = tokenizer.encode("world<|im_end|>")
        >>> message = {"role": "assistant", "content": "world"}
        >>> turn = Turn(ids, [-0.5] * len(ids), message, versions=3)
        >>> full = encoder.encode_waiting(prompt).append_turns([turn])
        >>> full.log_probs(0)[full.assistant_mask(0)].shape == (len(ids),)
        True
        >>> full.last_message(0)
        {'role': 'assistant', 'content': 'world'}
    """

    ids: Sequence[int]
    log_probs: Sequence[float] | None
    message: Message
    versions: int | Sequence[int] = -1
    extra: Mapping[str, Sequence[float]] = MappingProxyType({})

    def check(self, row: int) -> None:
        """Check that everything is aligned with the tokens.

        Args:
            row: whose turn it is, named in the error.

        Raises:
            ValueError: there are not as many log-probs, versions or further values, as ids.
        """
        aligned = {"log-probs": self.log_probs, **self.extra}
        if not isinstance(self.versions, int):
            aligned["policy versions"] = self.versions
        for name, values in aligned.items():
            if values is not None and len(values) != len(self.ids):
                raise ValueError(
                    f"Row {row} has {len(self.ids)} sampled tokens but {len(values)} {name}."
                )


class ConversationRecord:
    """One row: tokens and messages, only ever appended to."""

    __slots__ = (
        *("ids", "sources", "log_probs", "versions", "extra"),
        *("messages", "tools", "first_response"),
    )

    def __init__(self, tools: Sequence[dict[str, Any]] | None = None) -> None:
        self.ids = array("q")
        self.sources = bytearray()
        self.log_probs = array("f")
        self.versions = array("q")
        # Further values of sampled tokens by name; what lies past the end of a column is 0.
        self.extra: dict[str, array] = {}
        self.messages: list[Message] = []
        self.tools = tuple(tools) if tools else None
        self.first_response: int | None = None

    def extend_tokens(
        self,
        ids: Sequence[int],
        sources: Sequence[int],
        log_probs: Sequence[float] | None = None,
        version: int | Sequence[int] = -1,
        extra: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        """Append tokens; ``log_probs`` and ``extra`` are given for sampled tokens only."""
        for name, values in (extra or {}).items():
            column = self.extra.setdefault(name, array("f"))
            column.extend([0.0] * (len(self.ids) - len(column)))
            column.extend(values)
        self.ids.extend(ids)
        self.sources.extend(sources)
        self.log_probs.extend(log_probs if log_probs is not None else [0.0] * len(ids))
        self.versions.extend([version] * len(ids) if isinstance(version, int) else version)

    def append_turn(self, turn: Turn) -> "Position":
        """Append a turn of the assistant; how far the record has got."""
        start, count = len(self.ids), len(turn.ids)
        source = Source.CONTENT if turn.log_probs is None else Source.MODEL
        self.extend_tokens(turn.ids, [source] * count, turn.log_probs, turn.versions, turn.extra)
        if self.first_response is None:
            self.first_response = len(self.messages)
        self.messages.append(turn.message)
        num_messages = len(self.messages)
        return Position(len(self.ids), num_messages, num_messages, response_start=start)

    def copy_prefix(self, num_tokens: int, num_messages: int) -> "ConversationRecord":
        """A record of its own that starts like this one."""
        copy = ConversationRecord(self.tools)
        copy.ids = self.ids[:num_tokens]
        copy.sources = self.sources[:num_tokens]
        copy.log_probs = self.log_probs[:num_tokens]
        copy.versions = self.versions[:num_tokens]
        copy.extra = {name: column[:num_tokens] for name, column in self.extra.items()}
        copy.messages = self.messages[:num_messages]
        if self.first_response is not None and self.first_response < num_messages:
            copy.first_response = self.first_response
        return copy


class Waiting(NamedTuple):
    """What of a conversation has no tokens yet."""

    messages: list[Message]
    num_encoded: int
    """Messages before them."""
    last_id: int | None
    """The newest token; ``None`` before the first one."""
    tools: tuple[dict[str, Any], ...] | None
    """JSON schemas of the tools that the conversation was started with."""


class Position(NamedTuple):
    """How far a row had got when the snapshot was taken."""

    num_tokens: int = 0
    num_messages: int = 0
    num_encoded: int = 0
    """Messages that have their tokens; the others wait for the next encoding."""
    awaits_response: bool = False
    """The generation header is open: the next token is the policy's."""
    response_start: int = 0
    """Where the last response starts, in tokens."""


# Images in messages: read from whatever they come as, kept as plain values, shown as their size.
#
# In a conversation an image is the file's bytes in base 64 (``data``) and its ``mime_type``, so
# that it compares, is saved and travels like text; rows that share an image share the string.

_SOURCES: Final = ("image", "data", "url")


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
    parts = [_plain_part(part) for part in content]
    if all(new is old for new, old in zip(parts, content, strict=True)):
        return message
    return {**message, "content": parts}


def images_of(messages: Sequence[Message]) -> list[str]:
    """The images of messages in order, in base 64.

    Raises:
        ValueError: one can't be read.
        TypeError: one is of no known type.
    """
    return [
        _read(part)["data"]
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


def image_label(part: Mapping[str, Any]) -> str:
    """What is shown of an image: ``[image 32x32]``."""
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


def is_image(part: Any) -> bool:
    """Whether a part of a content is an image."""
    return isinstance(part, Mapping) and part.get("type") == "image"


def _plain_part(part: Any) -> Any:
    try:
        return _read(part) if is_image(part) else part
    except (ValueError, TypeError, ImportError):
        return part


def _read(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """The image of a part as plain values; the part itself where they are."""
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
    try:
        return import_module("PIL.Image")
    except ImportError as error:
        raise ImportError("Images in messages need Pillow: pip install pillow.") from error


# Small changes to messages before a template renders them.

_REASONING = re.compile(r"\s*<think>(.*?)</think>\n*", re.DOTALL)
_END_MARK: Final = f"\ua789{secrets.token_hex(8)}|"


def split_reasoning(message: Message) -> Message:
    """Move a ``<think>`` block that begins an assistant's content to ``reasoning_content``."""
    content = message.get("content")
    is_answer = message["role"] == "assistant" and message.get("reasoning_content") is None
    match = _REASONING.match(content) if is_answer and isinstance(content, str) else None
    if match is None:
        return message
    rest = match.string[match.end() :]
    return {**message, "reasoning_content": match[1].strip("\n"), "content": rest}


def with_end_mark(message: Message) -> Message:
    """Mark the end of a message's content, for :func:`cut_at_end_mark`."""
    content: Any = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _END_MARK}
    raise ValueError(
        f"continue_final_message continues the last message's text, but its content is "
        f"{content!r:.80}. Give it a string, or leave the option out."
    )


def cut_at_end_mark(rendered: str) -> str:
    """The rendered text up to the mark."""
    at = rendered.rfind(_END_MARK)
    if at < 0:
        raise ValueError("The chat template does not show the last message, so it can't end there.")
    return rendered[:at]
