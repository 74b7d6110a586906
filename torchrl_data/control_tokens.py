"""Content can't forge control tokens: scaffold and content are encoded by different tokenizers.

A chat template writes control tokens (``<|im_start|>``) around content that others wrote. Content
that happens to spell a control token is escaped before the template is rendered, so that only the
template's own control tokens are found in the rendered text; the text between them is unescaped and
encoded by a copy of the tokenizer that has no added tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

_ESCAPE = "\ue000"
_ESCAPED_ESCAPE = _ESCAPE + "0"
_BREAK = _ESCAPE + "1"


class TextPiece(NamedTuple):
    """A run of text between two control tokens, or a control token by itself."""

    text: str
    """What is to be encoded; the token's spelling when it is a control token."""
    control_id: int | None
    """The id of the control token, or ``None`` for plain text."""
    start: int
    """Where the piece starts in the rendered (escaped) text, in characters."""


class ControlTokenGuard:
    """Splits rendered text at the template's control tokens, and never at the content's.

    Args:
        tokenizer: a fast tokenizer; it is not changed.

    Raises:
        TypeError: the tokenizer has no fast backend.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TypeError(
                f"{type(tokenizer).__name__} has no fast backend, which is needed to encode "
                "content apart from control tokens. Load it with AutoTokenizer."
            )
        self.control_ids: dict[str, int] = {
            str(token): index for index, token in tokenizer.added_tokens_decoder.items()
        }
        spellings = sorted(self.control_ids, key=len, reverse=True)
        pattern = "|".join(re.escape(text) for text in spellings) or r"(?!)"
        self._control = re.compile(pattern)
        self._needs_escape = re.compile(f"{pattern}|{_ESCAPE}")
        description = json.loads(backend.to_str())
        description.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
        self._plain = Tokenizer.from_str(json.dumps(description))
        self._control_id_set = frozenset(self.control_ids.values())

    def escape(self, value: Any) -> Any:
        """Escape every string inside a message, so that none of it spells a control token.

        Args:
            value: a string, or nested mappings and sequences of strings and plain values.

        Returns:
            The same structure; mapping keys are escaped too.
        """
        if isinstance(value, str):
            return self._needs_escape.sub(_escape_match, value)
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.escape(item) for item in value]
        return value

    @staticmethod
    def unescape(text: str) -> str:
        """Undo :meth:`escape` on rendered text."""
        if _ESCAPE not in text:
            return text
        return text.replace(_BREAK, "").replace(_ESCAPED_ESCAPE, _ESCAPE)

    def split(self, rendered: str, boundaries: Sequence[int] = ()) -> list[TextPiece]:
        """Cut rendered text into control tokens and runs of plain text.

        Args:
            rendered: the output of a template on escaped messages.
            boundaries: character positions where a run must be cut too.

        Returns:
            Pieces in order, their text unescaped.
        """
        pieces: list[TextPiece] = []
        cuts = sorted({position for position in boundaries if 0 < position < len(rendered)})

        def add_text(start: int, end: int) -> None:
            inner = [position for position in cuts if start < position < end]
            for left, right in zip([start, *inner], [*inner, end], strict=True):
                if left < right:
                    pieces.append(TextPiece(self.unescape(rendered[left:right]), None, left))

        position = 0
        for match in self._control.finditer(rendered):
            add_text(position, match.start())
            pieces.append(TextPiece(match.group(), self.control_ids[match.group()], match.start()))
            position = match.end()
        add_text(position, len(rendered))
        return pieces

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode plain text; no control id comes out, whatever the text spells.

        Args:
            texts: unescaped text.

        Returns:
            Token ids per text.

        Raises:
            ValueError: the tokenizer's own vocabulary gives a control id for plain text.
        """
        if not texts:
            return []
        encodings = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        for text, row in zip(texts, ids, strict=True):
            if not self._control_id_set.isdisjoint(row):
                raise ValueError(
                    f"The tokenizer's vocabulary spells a control token in plain text {text!r}: "
                    "its model and its added tokens overlap. Remove the control tokens from the "
                    "model's vocabulary."
                )
        return ids


def _escape_match(match: re.Match[str]) -> str:
    found = match.group()
    return _ESCAPED_ESCAPE if found == _ESCAPE else found[0] + _BREAK + found[1:]
