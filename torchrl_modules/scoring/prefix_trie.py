"""Packed sequences as a trie: what they begin with in common is there once.

The tokens of the trie lie in depth-first order, so the descendants of a segment follow it, and a
token at ``q`` sees one at ``k`` if and only if ``k <= q < subtree_end[k]``.

Shape legend: N packed tokens, B sequences, M tokens of the trie.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

_WORTH: Final = 32
"""A shared token saves a pass through the model; a token behind it pays about 1/32 of one, for a
second piece of attention."""


class Segment(NamedTuple):
    """Neighbouring tokens of the trie that the same sequences share."""

    start: int
    end: int
    subtree_end: int
    """Where the tokens of its descendants end; ``end`` when it has none."""


@dataclass(frozen=True)
class PrefixTrie:
    """What the model reads, and where the packed tokens are in it."""

    ids: Tensor
    """int64 ``[M]``."""
    positions: Tensor
    """int64 ``[M]``, of each token in its sequence."""
    node: Tensor
    """int64 ``[N]``: where each packed token is in the trie; -1 where nobody needs it."""
    segments: tuple[Segment, ...]
    """In depth-first order; they cover ``[0, M)``."""

    @property
    def is_shared(self) -> bool:
        """Whether any segment has descendants."""
        return any(segment.subtree_end > segment.end for segment in self.segments)

    @cached_property
    def subtree_end(self) -> Tensor:
        """int64 ``[M]``: the token is seen by those from itself up to here, and no others."""
        ends = torch.tensor([s.subtree_end for s in self.segments], device=self.ids.device)
        sizes = torch.tensor([s.end - s.start for s in self.segments], device=self.ids.device)
        return ends.repeat_interleave(sizes)

    @cached_property
    def block_mask(self) -> Any:
        """The mask of the trie for flex attention; all layers share it."""
        from torch.nn.attention.flex_attention import create_block_mask

        ends, size = self.subtree_end, len(self.ids)

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # noqa: ARG001
            return (k <= q) & (q < ends[k])

        return create_block_mask(sees, None, None, size, size, device=str(self.ids.device))


def build_trie(ids: Tensor, lengths: Tensor, ends: Tensor, *, share: bool) -> PrefixTrie:
    """Lay packed sequences out as a trie."""
    # ids: int64 [N].
    # lengths: int64 [B], summing to N.
    # ends: int64 [B]: only this many tokens of each sequence are needed; at most its length.
    # share: put what sequences begin with in common there once, where it saves more than it costs;
    # `False` keeps every sequence for itself.
    # Gives the trie, on the device of `ids`. Segments beside each other without descendants are
    # sorted by length.
    values = ids.cpu().numpy()
    sizes, needed = lengths.tolist(), ends.tolist()
    starts = np.concatenate([[0], np.cumsum(sizes)])[:-1].tolist()
    rows = [
        _Row(start, values[start : start + end])
        for start, end in zip(starts, needed, strict=True)
        if end
    ]
    nodes = _shared_nodes(rows) if share else _own_nodes(rows)
    node_of = np.full(len(values), -1)
    tokens, positions, segments = [], [], []
    start = 0
    for node in nodes:
        end = start + node.last - node.first
        for row in node.rows:
            node_of[row.start + node.first : row.start + node.last] = np.arange(start, end)
        tokens.append(node.rows[0].ids[node.first : node.last])
        positions.append(np.arange(node.first, node.last))
        segments.append((start, end))
        start = end
    ends_of = _subtree_ends(nodes, segments)
    device = ids.device
    return PrefixTrie(
        ids=_join(tokens, device),
        positions=_join(positions, device),
        node=torch.from_numpy(node_of).to(device),
        segments=tuple(Segment(s[0], s[1], end) for s, end in zip(segments, ends_of, strict=True)),
    )


def _join(parts: Sequence[np.ndarray], device: torch.device) -> Tensor:
    joined = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return torch.from_numpy(joined).to(device)


class _Row(NamedTuple):
    start: int
    """In the packed tokens."""
    ids: np.ndarray


class _Node(NamedTuple):
    rows: Sequence[_Row]
    """Those that share it."""
    first: int
    """It holds tokens from here ..."""
    last: int
    """... to before here of its rows."""
    depth: int
    """How many ancestors it has."""


def _subtree_ends(nodes: Sequence[_Node], segments: Sequence[tuple[int, int]]) -> list[int]:
    ends = [end for _, end in segments]
    for i, node in enumerate(nodes):
        if i + 1 < len(nodes) and nodes[i + 1].depth > node.depth:
            behind = (j for j in range(i + 1, len(nodes)) if nodes[j].depth <= node.depth)
            ends[i] = segments[next(behind, len(nodes)) - 1][1]
    return ends


def _own_nodes(rows: Sequence[_Row]) -> list[_Node]:
    by_length = sorted(rows, key=lambda row: len(row.ids))
    return [_Node([row], 0, len(row.ids), 0) for row in by_length]


def _shared_nodes(rows: Sequence[_Row]) -> list[_Node]:
    """Nodes in depth-first order."""
    # As bytes, most significant first, token ids sort as numbers do.
    ordered = sorted(rows, key=lambda row: row.ids.astype(">i8").tobytes())
    common = [_common_length(a.ids, b.ids) for a, b in pairwise(ordered)]
    nodes: list[_Node] = []
    # Ranges of rows that agree up to `first`, of which the node before holds all.
    waiting = [_Range(0, len(ordered), 0, 0)] if ordered else []
    while waiting:
        here = waiting.pop()
        last = min(common[here.low : here.high - 1], default=len(ordered[here.low].ids))
        parts = list(_split(here, common, last))
        some = ordered[here.low : here.high]
        if last == here.first or not _is_worth_it(some, here.first, last, len(parts)):
            below = [_Range(low, high, here.first, here.depth) for low, high in parts]
        else:
            nodes.append(_Node(some, here.first, last, here.depth))
            below = [
                _Range(low, high, last, here.depth + 1)
                for low, high in parts
                if len(ordered[high - 1].ids) > last
            ]
        # Single rows last and by length, so that those of one length are beside each other.
        below.sort(key=lambda r: (r.high - r.low == 1, len(ordered[r.low].ids)), reverse=True)
        waiting += below
    return nodes


class _Range(NamedTuple):
    low: int
    high: int
    first: int
    depth: int


def _split(here: _Range, common: Sequence[int], last: int) -> Iterator[tuple[int, int]]:
    """Runs of rows that agree in more than their first ``last`` tokens."""
    low = here.low
    for i in range(here.low, here.high - 1):
        if common[i] == last:
            yield low, i + 1
            low = i + 1
    yield low, here.high


def _is_worth_it(rows: Sequence[_Row], first: int, last: int, num_parts: int) -> bool:
    if num_parts == 1 or all(len(row.ids) == last for row in rows):
        return True
    behind = sum(len(row.ids) - last for row in rows)
    return _WORTH * (last - first) * (num_parts - 1) >= behind


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    differ = (a[:size] != b[:size]).nonzero()[0]
    return int(differ[0]) if len(differ) else size
