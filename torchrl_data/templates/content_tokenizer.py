"""A copy of a tokenizer that can't produce control tokens, whatever the text spells."""

import json
import secrets
from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import Any

from tokenizers import Tokenizer


class RunStart(IntEnum):
    """What is before a run of text, as some tokenizers mark the beginning of a text."""

    TEXT = 0
    """Nothing: the run begins the text."""
    CONTROL = 1
    """A control token."""
    RUN = 2
    """Another run of text, from which this one was cut."""


class PlainTokenizer:
    """Encodes runs of text without control tokens."""

    # The control tokens are renamed to something that nobody can guess, both where they are added
    # and where the model's own vocabulary holds them, so that their ids never come out of text.

    def __init__(self, backend: Tokenizer, control_ids: Collection[int]) -> None:
        description = json.loads(backend.to_str())
        description.update(post_processor=None, truncation=None, padding=None)
        _rename_controls(description, frozenset(control_ids))
        self._variants: list[Tokenizer] = []
        previous = None
        for start in RunStart:
            changed = _without_prefix(description, start)
            if self._variants and changed == previous:
                self._variants.append(self._variants[-1])
            else:
                self._variants.append(Tokenizer.from_str(json.dumps({**description, **changed})))
            previous = changed

    @property
    def depends_on_start(self) -> bool:
        """Whether what is before a run changes its tokens."""
        return self._variants[0] is not self._variants[-1]

    def encode(
        self, texts: Sequence[str], starts: Sequence[RunStart] | None = None
    ) -> list[list[int]]:
        """Encode runs of text in one batch."""
        if not texts:
            return []
        if not self.depends_on_start or starts is None:
            return self._encode(texts, RunStart.CONTROL)
        results: list[list[int]] = [[] for _ in texts]
        for start in set(starts):
            which = [i for i, s in enumerate(starts) if s == start]
            for i, ids in zip(which, self._encode([texts[i] for i in which], start), strict=True):
                results[i] = ids
        return results

    def _encode(self, texts: Sequence[str], start: RunStart) -> list[list[int]]:
        variant = self._variants[start]
        if len(texts) == 1:
            return [variant.encode(texts[0], add_special_tokens=False).ids]
        encodings = variant.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


def _rename_controls(description: dict[str, Any], control_ids: frozenset[int]) -> None:
    secret = secrets.token_hex(16)
    names = {index: f"\ue000{secret}:{index}\ue001" for index in control_ids}
    for token in description["added_tokens"]:
        if token["id"] in names:
            token.update(
                content=names[token["id"]],
                single_word=False,
                lstrip=False,
                rstrip=False,
                normalized=False,
                special=False,
            )
    model = description["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        renamed = {key: names[index] for key, index in vocabulary.items() if index in names}
        model["vocab"] = {renamed.get(key, key): index for key, index in vocabulary.items()}
        if model.get("unk_token") in renamed:
            model["unk_token"] = renamed[model["unk_token"]]
        if renamed and "merges" in model:
            model["merges"] = [m for m in model["merges"] if not _makes(m, renamed)]
    elif isinstance(vocabulary, list):
        for index in control_ids:
            if index < len(vocabulary):
                vocabulary[index][0] = names[index]


def _makes(merge: Sequence[str] | str, names: Collection[str]) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left in names or right in names or left + right in names


def _without_prefix(description: dict[str, Any], start: RunStart) -> dict[str, Any]:
    """Normalizer and pre-tokenizer for a run that does not begin the text."""
    return {name: _stage(description.get(name), start) for name in ("normalizer", "pre_tokenizer")}


def _stage(stage: Any, start: RunStart) -> Any:
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
