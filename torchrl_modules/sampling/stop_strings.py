"""Stop strings: at which sampled token a response ends."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopStrings:
    """Finds the token that completes one of some texts; nothing is ever re-tokenised."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], min_tokens: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = tuple(texts)
        self._first = min_tokens + 1
        # A token has at least one byte, and a character at most four.
        self._num_tail = 4 + max(len(text.encode()) for text in texts)
        # What a text may end in: its last character, or a part of one.
        self._last = ("\ufffd", *{text[-1] for text in texts})
        self._may_end: dict[int, bool] = {}

    def num_kept(self, ids: Sequence[int]) -> int | None:
        """Number of tokens up to the one that completes a text; ``None`` if none does."""
        if len(ids) < self._first:
            return None
        ids, begin = list(ids), len(self._decode(ids[: self._first - 1]))
        counts = range(self._first, len(ids) + 1)
        index = bisect_left(counts, True, key=lambda count: self._ends(ids[:count], begin))
        return None if index == len(counts) else counts[index]

    def may_end(self, token: int) -> bool:
        """Whether a token can complete a text at all; few can, and the others cost nothing."""
        known = self._may_end.get(token)
        if known is None:
            # Alone, and behind another one: tokenizers write the first of a text differently.
            said = self._decode([token]) + self._decode([token, token])
            known = self._may_end[token] = any(last in said for last in self._last)
        return known

    def just_ended(self, ids: Sequence[int]) -> bool:
        """Whether the last token, most likely, completes a text; after each token, and fast."""
        if not ids or not self.may_end(ids[-1]):
            return False
        tail = self._decode(ids[-self._num_tail :])
        return any(text in tail for text in self._texts) and self.num_kept(ids) is not None

    def _ends(self, ids: list[int], begin: int) -> bool:
        text = self._decode(ids)
        return any(text.find(stop, max(0, begin - len(stop) + 1)) >= 0 for stop in self._texts)

    def _decode(self, ids: Sequence[int]) -> str:
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(ids), **options))
