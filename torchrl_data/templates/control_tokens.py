"""Content can't forge control tokens: scaffold and content are told apart before tokens are made.

A chat template writes control tokens (``<|im_start|>``) around content that others wrote. Content
that happens to spell a control token is escaped before the template is rendered, so that only the
template's own control tokens are found in the rendered text; the text between them is unescaped
and encoded by a copy of the tokenizer that has no control tokens. Known tokens and texts to be
encoded are runs, each with who wrote it.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tokenizers import Tokenizer

from torchrl_data.conversation import EncodedMessages, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Printable and without case, so that a template's filters leave them alone; content that holds
# them is escaped like content that holds a control token.
_OPEN: Final = "\ua720"
_CLOSE: Final = "\ua721"
_NOTHING: Final = f"{_OPEN}{_CLOSE}"
_ESCAPED = re.compile(f"{_OPEN}([0-9]*){_CLOSE}")
_ORDINARY = re.compile(r"[\w\s]*")


class RunStart(IntEnum):
    """The context before a run of text, as some tokenizers mark the beginning of a text."""

    TEXT = 0
    """Nothing: the run begins the text."""
    CONTROL = 1
    """A control token."""
    RUN = 2
    """Another run of text, from which this one was cut."""


class TextPiece(NamedTuple):
    """A run of text between two control tokens, or a control token by itself."""

    text: str
    """What is to be encoded; the token's spelling when it is a control token."""
    control_id: int | None
    """The id of the control token, or ``None`` for plain text."""
    start: int
    """Where the piece starts in the rendered (escaped) text, in characters."""
    before: RunStart = RunStart.CONTROL
    """What is before a run of text."""


class ControlTokenGuard:
    """Splits rendered text at the template's control tokens, and never at the content's.

    Control tokens are the added tokens of a tokenizer, special or not (``<think>``,
    ``<tool_call>``), but for ordinary words and white space that were added and are not special.

    Args:
        tokenizer: a fast tokenizer; it is not changed.

    Raises:
        TypeError: the tokenizer has no fast backend.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TypeError(
                f"{type(tokenizer).__name__} has no fast backend, which is needed to encode "
                "content apart from control tokens. Load it with AutoTokenizer."
            )
        added = {
            index: token
            for index, token in tokenizer.added_tokens_decoder.items()
            if token.content and (token.special or not _ORDINARY.fullmatch(token.content))
        }
        self.control_ids: dict[str, int] = {token.content: i for i, token in added.items()}
        self._flags = {token.content: token for token in added.values()}
        spellings = sorted(self.control_ids, key=len, reverse=True)
        pattern = "|".join(map(re.escape, spellings)) or r"(?!)"
        self._control = re.compile(pattern)
        self._escapable = [*spellings, _OPEN, _CLOSE]
        self._codes = {text: f"{_OPEN}{i}{_CLOSE}" for i, text in enumerate(self._escapable)}
        self._needs_escape = re.compile(f"{pattern}|{_OPEN}|{_CLOSE}")
        self._heads = {text[:n] for text in spellings for n in range(1, len(text))}
        self._tails = {text[-n:] for text in spellings for n in range(1, len(text))}
        self._longest = max(map(len, spellings), default=0)
        # Encode runs of text by what is before them. The control tokens are renamed to something
        # that nobody can guess, both where they are added and where the model's own vocabulary
        # holds them, so that their ids never come out of text.
        description = json.loads(backend.to_str())
        description.update(post_processor=None, truncation=None, padding=None)
        _rename_controls(description, frozenset(self.control_ids.values()))
        self._variants: list[Tokenizer] = []
        previous = None
        for start in RunStart:
            names = ("normalizer", "pre_tokenizer")
            changed = {name: _stage(description.get(name), start) for name in names}
            if self._variants and changed == previous:
                self._variants.append(self._variants[-1])
            else:
                self._variants.append(Tokenizer.from_str(json.dumps({**description, **changed})))
            previous = changed

    def escape(self, value: Any) -> Any:
        """Escape every string inside a message, so that none of it spells a control token.

        Args:
            value: a string, or nested mappings and sequences of strings and plain values.

        Returns:
            The same structure; mapping keys are escaped too.
        """
        if isinstance(value, str):
            escaped = self._needs_escape.sub(lambda found: self._codes[found.group()], value)
            # Half of a control token at an edge could be completed by what the template writes
            # there.
            if any(escaped[:n] in self._tails for n in range(1, self._longest)):
                escaped = _NOTHING + escaped
            if any(escaped[-n:] in self._heads for n in range(1, self._longest)):
                escaped += _NOTHING
            return escaped
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.escape(item) for item in value]
        return value

    def unescape(self, text: str) -> str:
        """Undo :meth:`escape` on rendered text.

        Args:
            text: what a template rendered, or a part of it that cuts no escape in two.
        """
        if _OPEN not in text:
            return text
        return _ESCAPED.sub(
            lambda found: self._escapable[int(found.group(1))] if found.group(1) else "", text
        )

    def split(self, rendered: str, boundaries: Sequence[int] = ()) -> list[TextPiece]:
        """Cut rendered text into control tokens and runs of plain text.

        White space beside a control token that takes it in (``lstrip``, ``rstrip``) is left out, as
        the tokenizer does.

        Args:
            rendered: the output of a template on escaped messages.
            boundaries: character positions where a run must be cut too.

        Returns:
            Pieces in order, their text unescaped.
        """
        pieces: list[TextPiece] = []
        cuts = sorted({position for position in boundaries if 0 < position < len(rendered)})
        position = 0
        for match in self._control.finditer(rendered):
            token = self._flags[match.group()]
            start, end = match.span()
            beside = rendered[start - 1 : start] + rendered[end : end + 1]
            if token.single_word and any(c == "_" or c.isalnum() for c in beside):
                continue
            until = len(rendered[position:start].rstrip()) + position if token.lstrip else start
            self._add_runs(pieces, rendered, position, until, cuts)
            pieces.append(TextPiece(match.group(), self.control_ids[match.group()], start))
            position = end
            if token.rstrip:
                position += len(rendered) - end - len(rendered[end:].lstrip())
        self._add_runs(pieces, rendered, position, len(rendered), cuts)
        return pieces

    def _add_runs(
        self, pieces: list[TextPiece], rendered: str, start: int, end: int, cuts: Sequence[int]
    ) -> None:
        inner = [position for position in cuts if start < position < end]
        before = RunStart.CONTROL if pieces else RunStart.TEXT
        for left, right in zip([start, *inner], [*inner, end], strict=True):
            text = self.unescape(rendered[left:right])
            if text:
                pieces.append(TextPiece(text, None, left, before))
                before = RunStart.RUN

    def encode_texts(
        self, texts: Sequence[str], starts: Sequence[RunStart] | None = None
    ) -> list[list[int]]:
        """Encode plain text; no control id comes out, whatever the text spells.

        Args:
            texts: unescaped text.
            starts: what is before each; a control token when not given.

        Returns:
            Token ids per text.
        """
        if not texts:
            return []
        if starts is None or self._variants[0] is self._variants[-1] or len(set(starts)) < 2:
            variant = self._variants[RunStart.CONTROL if not starts else starts[0]]
            if len(texts) == 1:
                return [variant.encode(texts[0], add_special_tokens=False).ids]
            encodings = variant.encode_batch_fast(list(texts), add_special_tokens=False)
            return [encoding.ids for encoding in encodings]
        results: list[list[int]] = [[] for _ in texts]
        for start in set(starts):
            which = [i for i, s in enumerate(starts) if s == start]
            runs = self.encode_texts([texts[i] for i in which], [start] * len(which))
            for i, ids in zip(which, runs, strict=True):
                results[i] = ids
        return results


def _rename_controls(description: dict[str, Any], control_ids: frozenset[int]) -> None:
    secret = secrets.token_hex(16)
    names = {index: f"\ue000{secret}:{index}\ue001" for index in control_ids}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    for token in description["added_tokens"]:
        if token["id"] in names:
            token.update(flags, content=names[token["id"]])
    model = description["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        renamed = {key: names[index] for key, index in vocabulary.items() if index in names}
        model["vocab"] = {renamed.get(key, key): index for key, index in vocabulary.items()}
        if model.get("unk_token") in renamed:
            model["unk_token"] = renamed[model["unk_token"]]
        if renamed and "merges" in model:
            pairs = [m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"]]
            model["merges"] = [
                merge
                for merge, (left, right) in zip(model["merges"], pairs, strict=True)
                if renamed.keys().isdisjoint((left, right, left + right))
            ]
    elif isinstance(vocabulary, list):
        for index in control_ids:
            if index < len(vocabulary):
                vocabulary[index][0] = names[index]


def _stage(stage: Any, start: RunStart) -> Any:
    """A normalizer or pre-tokenizer for a run that does not begin the text."""
    if not isinstance(stage, dict) or start == RunStart.TEXT:
        return stage
    kind = stage.get("type")
    if kind == "Sequence":
        for name in ("normalizers", "pretokenizers"):
            if name in stage:
                inner = [_stage(item, start) for item in stage[name]]
                return {**stage, name: [item for item in inner if item is not None]}
    if kind == "Metaspace" and (stage.get("prepend_scheme") == "first" or start == RunStart.RUN):
        return {**stage, "prepend_scheme": "never"}
    if start == RunStart.RUN:
        if kind == "Prepend":
            return None
        if kind == "ByteLevel" and stage.get("add_prefix_space"):
            return {**stage, "add_prefix_space": False}
    return stage


ROW_ERRORS: Final = (ValueError, TypeError, RecursionError)
"""What a row's own messages may raise: odd content, odd calls, text that is no Unicode."""


class TokenRun(NamedTuple):
    """Tokens that are known, or a text to be encoded."""

    ids: tuple[int, ...]
    """The tokens; for a text, those of the scaffold that it begins with."""
    source: Source
    text: str | None = None
    start: RunStart = RunStart.CONTROL
    tail: tuple[int, ...] = ()
    """Tokens of the scaffold that a text ends with."""


def label_pieces(pieces: Sequence[TextPiece], spans: Sequence[tuple[int, int]]) -> list[TokenRun]:
    """Say who wrote each piece: the model inside the spans."""
    runs = []
    for piece in pieces:
        ids = () if piece.control_id is None else (piece.control_id,)
        text = piece.text if piece.control_id is None else None
        if any(start <= piece.start < end for start, end in spans):
            source = Source.MODEL
        else:
            source = Source.TEMPLATE if text is None else Source.CONTENT
        runs.append(TokenRun(ids, source, text, piece.before))
    return runs


def encode_runs(
    rows: Sequence[Sequence[TokenRun]], guard: ControlTokenGuard
) -> list[EncodedMessages | Exception]:
    """Encode the text of all rows in one call of the tokenizer; an error for a row it refuses."""
    try:
        return _encode(rows, guard)
    except ROW_ERRORS as error:
        if len(rows) == 1:
            text = "".join(run.text or "" for run in rows[0])
            return [
                ValueError(
                    f"The tokenizer can't encode {text!r:.80}: {error}. Text must be Unicode, "
                    "without half of a surrogate pair, say."
                )
            ]
    return [result for row in rows for result in encode_runs([row], guard)]


def _encode(
    rows: Sequence[Sequence[TokenRun]], guard: ControlTokenGuard
) -> list[EncodedMessages | Exception]:
    texts = [run for row in rows for run in row if run.text is not None]
    encoded = iter(
        guard.encode_texts([run.text or "" for run in texts], [run.start for run in texts])
    )
    results: list[EncodedMessages | Exception] = []
    for row in rows:
        ids: list[int] = []
        sources: list[Source] = []
        for run in row:
            new = run.ids if run.text is None else next(encoded)
            start = len(ids)
            ids += new
            sources += [run.source] * len(new)
            if run.text is not None:  # the scaffold at the ends of a text is the template's
                head, tail = len(run.ids), len(run.tail)
                if head and tuple(new[:head]) == run.ids:
                    sources[start : start + head] = [Source.TEMPLATE] * head
                if tail and tail <= len(new) - head and tuple(new[-tail:]) == run.tail:
                    sources[-tail:] = [Source.TEMPLATE] * tail
        results.append(EncodedMessages(ids, sources))
    return results
