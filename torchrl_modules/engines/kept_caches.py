"""Caches of what a model has read of conversations, kept for their next turns.

Shape legend: H heads, T tokens, D head size.
"""

import itertools
import sys
import threading
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from torch import Tensor

RowCache: TypeAlias = list[tuple[Tensor, Tensor]]
"""Keys and values of one row, ``[H, T, D]`` each, of every layer."""


class _Kept(NamedTuple):
    tokens: bytes
    number: int
    """Rows are counted in the order in which they came."""
    cache: RowCache
    is_anonymous: bool

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


class Found(NamedTuple):
    """What is kept of the beginning of a row."""

    num_tokens: int = 0
    cache: RowCache | None = None
    """Of at least so many tokens; ``None`` without any."""
    used_up: Hashable = None
    """The key of what nobody needs any more once this row has it, or ``None``."""


_MAX_BYTES: Final = 1 << 30


class KeptCaches:
    """Caches of rows by their tokens, the latest used ones.

    They are looked up by tokens alone: what is found is always what was read of these tokens, by
    the present weights, as long as `clear` is called when those change. Any thread may call it.

    Args:
        max_tokens: most tokens that are kept; ``None`` for as many as take 1 GiB.
    """

    def __init__(self, max_tokens: int | None) -> None:
        self.max_tokens = max_tokens
        self._lock = threading.RLock()
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        # In the order of their tokens, so that those that begin alike are neighbours; the number
        # of each makes them different.
        self._index: list[tuple[bytes, int, Hashable]] = []
        self._numbers = itertools.count()
        self.num_tokens = 0
        """Tokens that are kept."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy keeps nothing yet."""
        return type(self), (self.max_tokens,)

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, ids: Sequence[int]) -> Found:
        """What is kept of the beginning of a row, but for its last token.

        Args:
            ids: of the row.
        """
        with self._lock:
            if not self._index:
                return Found()
            tokens = tokens_as_bytes(ids[:-1])
            at = bisect_left(self._index, (tokens,))
            near = [key for _, _, key in self._index[max(0, at - 1) : at + 1]]
            lengths = [num_shared(self._kept[key].tokens, tokens) for key in near]
            longest = max(lengths)
            if not longest:
                return Found()
            key = near[lengths.index(longest)]
            self._kept.move_to_end(key)
            kept = self._kept[key]
            used_up = kept.is_anonymous and kept.num_tokens == longest
            return Found(longest, kept.cache, key if used_up else None)

    def keep(self, key: Hashable, ids: Sequence[int], cache: RowCache) -> None:
        """Keep a row in the place of what its key had.

        Args:
            key: of the conversation; without one it is forgotten once another row goes on from it.
            ids: the tokens that were read.
            cache: of these; it is not copied.
        """
        with self._lock:
            is_anonymous = key is None
            key = object() if is_anonymous else key
            self.end(key)
            if not len(ids):
                return
            if self.max_tokens is None:
                num_bytes = sum(k.nbytes + v.nbytes for k, v in cache) // len(ids)
                self.max_tokens = _MAX_BYTES // max(1, num_bytes)
            if len(ids) > self.max_tokens:
                return
            kept = _Kept(tokens_as_bytes(ids), next(self._numbers), cache, is_anonymous)
            self._kept[key] = kept
            insort(self._index, (kept.tokens, kept.number, key))
            self.num_tokens += kept.num_tokens
            while self.num_tokens > self.max_tokens:
                self.end(next(iter(self._kept)))

    def end(self, key: Hashable) -> None:
        """Forget what a conversation has."""
        with self._lock:
            kept = self._kept.pop(key, None)
            if kept is None:
                return
            del self._index[bisect_left(self._index, (kept.tokens, kept.number))]
            self.num_tokens -= kept.num_tokens

    def clear(self) -> None:
        """Forget everything: the weights have changed."""
        with self._lock:
            for key in list(self._kept):
                self.end(key)


def tokens_as_bytes(ids: Sequence[int]) -> bytes:
    """Bytes that are in the order of the tokens, and of which a beginning is one of the tokens."""
    tokens = array("I", ids)
    if sys.byteorder == "little":
        tokens.byteswap()
    return tokens.tobytes()


def num_shared(left: bytes, right: bytes) -> int:
    """The number of tokens that two rows have in common at their beginning."""
    low, high = 0, min(len(left), len(right)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if left[: 4 * middle] == right[: 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low
