"""Bytes of the tokens of a vocabulary, and text beside the tokens that spell it.

A byte-level vocabulary cuts characters, so that the text of one token is not always Unicode; its
bytes are.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torchrl_data.templates.control_tokens import ControlTokenGuard

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WORD_MARK: Final = "\u2581"
"""The space of SentencePiece's vocabularies."""
_REPLACEMENT: Final = "\ufffd"
_PROBE: Final = "A b  c\n{7: \u65e5\u672c, \u00e9\U0001f642}"


class TokenBytes:
    """Spells each token of a tokenizer as bytes.

    Known are byte-level vocabularies (those of GPT-2, Qwen, Llama 3) and SentencePiece's, with or
    without byte fallback (Llama 2, Gemma, Mistral); an added token spells its content.

    Args:
        tokenizer: a fast tokenizer.

    Raises:
        TypeError: the tokenizer has no fast backend.
        ValueError: its vocabulary is of another kind, or its tokens do not spell the text that
            they encode, as where text is made lower case first.

    Example:
        >>> spelled = TokenBytes(tokenizer)
        >>> b"".join(spelled.of(tokenizer.encode("2 + 2?")))
        b'2 + 2?'
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        guard = ControlTokenGuard(tokenizer)
        backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        description = json.loads(backend.to_str())
        stages = list(_stages(description.get("decoder")))
        kinds = {stage.get("type") for stage in stages}
        is_byte_level = "ByteLevel" in kinds
        if not is_byte_level and not ({"Metaspace", "Replace"} & kinds):
            raise ValueError(
                f"{_name(tokenizer)}: its decoder ({', '.join(map(str, kinds)) or None}) is "
                "neither byte-level nor SentencePiece's, so the bytes of its tokens are not known. "
                "Take a model with such a vocabulary."
            )
        spell = _byte_level if is_byte_level else _sentence_piece
        vocabulary = backend.get_vocab(with_added_tokens=False)
        self._bytes = {index: spell(token) for token, index in vocabulary.items()}
        added = tokenizer.added_tokens_decoder
        self._bytes |= {index: token.content.encode() for index, token in added.items()}
        # A text's first space may be one that the tokenizer has put before it.
        self._strips = not is_byte_level and any(_strips(stage) for stage in stages)
        spelled = b"".join(self.of(guard.encode_texts([_PROBE])[0], text=_PROBE))
        if spelled != _PROBE.encode():
            raise ValueError(
                f"{_name(tokenizer)}: its tokens of {_PROBE!r} spell "
                f"{spelled.decode(errors='replace')!r}. A tokenizer that changes text, or has no "
                "token for some of it, can't be compared with another one byte by byte. Take a "
                "model with a byte-level vocabulary."
            )

    def of(
        self, ids: Sequence[int], *, text: str | None = None, begins: bool = True
    ) -> list[bytes]:
        """Bytes of each token of a run of text.

        Args:
            ids: of the run; those outside the vocabulary spell nothing.
            text: that was encoded, where it is known: a space that the tokenizer has put before it
                is left out.
            begins: where the text is not known: the run begins a text, of which the tokenizer's
                decoder may leave the first space out.
        """
        spelled = [self._bytes.get(index, b"") for index in ids]
        strips = self._strips and begins if text is None else not text.startswith(" ")
        first = next((i for i, part in enumerate(spelled) if part), None)
        if first is not None and strips and spelled[first][:1] == b" ":
            spelled[first] = spelled[first][1:]
        return spelled


class SpelledText(NamedTuple):
    """A text, and where the tokens end that spell it."""

    text: str
    """What is no Unicode is U+FFFD; half of a character at the end is left out."""
    ends: list[int | None]
    """Where each token ends, in bytes of the text in UTF-8; ``None`` inside of what is left out or
    stands as U+FFFD."""
    broken: list[tuple[int, int]]
    """From where to where the text has U+FFFD for what is none, in bytes."""


def spelled_text(tokens: Sequence[bytes]) -> SpelledText:
    r"""Put the bytes of tokens together to a text.

    Args:
        tokens: the bytes of each.

    Example:
        >>> spelled_text([b"a", b"\xc3", b"\xa9b"])  # the bytes of an accented e, apart
        SpelledText(text='aéb', ends=[1, 2, 4], broken=[])
    """
    whole = b"".join(tokens)
    parts: list[str] = []
    # Of each byte of the whole, by how much its place in the text differs; what is replaced has
    # no place.
    broken: list[tuple[int, int]] = []
    gaps: list[tuple[int, int]] = []
    shifts: list[tuple[int, int]] = [(0, 0)]
    at = place = 0
    while at < len(whole):
        try:
            text, bad = whole[at:].decode(), None
        except UnicodeDecodeError as error:
            text, bad = whole[at : at + error.start].decode(), error
        parts.append(text)
        place += len(text.encode())
        if bad is None:
            break
        start, stop = at + bad.start, at + bad.end
        if stop == len(whole) and bad.reason == "unexpected end of data":
            gaps.append((start, stop + 1))
            break
        parts.append(_REPLACEMENT)
        gaps.append((start, stop))
        broken.append((place, place + 3))
        place += 3
        shifts.append((stop, place - stop))
        at = stop
    ends: list[int | None] = []
    end = gap = shift = 0
    for token in tokens:
        end += len(token)
        while gap < len(gaps) and gaps[gap][1] <= end:
            gap += 1
        while shift + 1 < len(shifts) and shifts[shift + 1][0] <= end:
            shift += 1
        is_inside = gap < len(gaps) and gaps[gap][0] < end
        ends.append(None if is_inside else end + shifts[shift][1])
    return SpelledText("".join(parts), ends, broken)


def _stages(stage: Any) -> Iterator[dict[str, Any]]:
    if isinstance(stage, dict):
        if stage.get("type") == "Sequence":
            for inner in stage.get("decoders", ()):
                yield from _stages(inner)
        else:
            yield stage


def _strips(stage: dict[str, Any]) -> bool:
    if stage.get("type") == "Metaspace":
        return stage.get("prepend_scheme") != "never"
    return stage.get("type") == "Strip" and stage.get("content") == " " and stage["start"] > 0


@cache
def _bytes_of_letters() -> dict[str, int]:
    """Bytes of the letters that GPT-2 writes for them: itself, or one from U+0100 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): b for n, b in enumerate(hidden)}


def _byte_level(token: str) -> bytes:
    known = _bytes_of_letters()
    if all(letter in known for letter in token):
        return bytes(known[letter] for letter in token)
    return token.encode()


def _sentence_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_WORD_MARK, " ").encode()


def _name(tokenizer: "PreTrainedTokenizerBase") -> str:
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
