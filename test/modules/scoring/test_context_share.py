"""Tokens that ranks share out: who has which, and what each adds to attention and its gradients.

Ranks compute one after the other here; test/ranks has those that talk to each other.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_modules.scoring import trie_attention
from torchrl_modules.scoring.context_share import ContextShare, TargetShare
from torchrl_modules.scoring.trie_attention import Segment, build_trie, pieces_of, share_out

from .test_flash_pieces import varlen_backward, varlen_forward

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=6)
SIZES = st.sampled_from([2, 3, 4])


def shares_of(size, num_tokens):
    each = -(-num_tokens // (2 * size))
    return [ContextShare(None, rank, size, 2 * size * each) for rank in range(size)]


def trie_of(rows):
    ids = torch.tensor([token for row in rows for token in row])
    lengths = torch.tensor([len(row) for row in rows])
    return build_trie(ids, lengths, lengths, share=True)


def visible(segments):
    ends = torch.tensor([s.subtree_end for s in segments for _ in range(s.end - s.start)])
    at = torch.arange(len(ends))
    return (at <= at[:, None]) & (at[:, None] < ends)


@given(st.integers(1, 5), st.integers(1, 60))
def test_each_token_is_read_by_one_rank_and_each_rank_reads_as_many(size, num_tokens):
    shares = shares_of(size, num_tokens)
    every = torch.arange(shares[0].num_tokens)
    parts = [share.own(every) for share in shares]
    assert {len(part) for part in parts} == {len(every) // size}
    assert torch.equal(torch.cat(parts).sort().values, every)
    for share, part in zip(shares, parts, strict=True):
        before = [share.count_before(token) for token in range(len(every) + 1)]
        assert before == [int((part < token).sum()) for token in range(len(every) + 1)]


def test_a_long_row_is_as_much_work_for_every_rank():
    """Pairs of a query and a key that it sees: of 48 tokens 48 * 49 / 2, over four ranks."""
    sees = visible([Segment(0, 48, 48)])
    assert [int(share.own(sees).sum()) for share in shares_of(4, 48)] == [48 * 49 // 8] * 4


@settings(max_examples=60, deadline=None)
@given(ROWS, SIZES)
def test_the_pieces_of_all_ranks_are_what_tokens_see_each_pair_once(monkeypatch_worth, rows, size):
    trie = trie_of(rows)
    shares = shares_of(size, len(trie.ids))
    segments = share_out(trie, shares[0]).segments
    sees = visible(segments)
    assert len(sees) == shares[0].num_tokens
    for share in shares:
        own, across = pieces_of(segments, share)
        count = torch.zeros(len(share.own(sees)), len(sees), dtype=torch.int64)
        places = share.own(torch.arange(len(sees)))
        assert [0, *(s.end for s in own)] == [*(s.start for s in own), len(count)]
        for start, end, _ in own:
            at = places[start:end]
            assert torch.equal(at, torch.arange(at[0], at[0] + len(at)))
            count[start:end, at] += torch.ones(len(at), len(at), dtype=torch.int64).tril()
        for queries, keys, _ in across:
            count[slice(*queries), slice(*keys)] += 1
        assert torch.equal(count, share.own(sees.long()))
        for level in {piece.level for piece in across}:
            some = [piece for piece in across if piece.level == level]
            for name in ("queries", "keys"):
                taken = [i for piece in some for i in range(*getattr(piece, name))]
                assert len(taken) == len(set(taken)), f"{name} of one level"


class Told(ContextShare):
    """A share that is told the keys and values of all tokens, and notes what it would send."""

    def gather_heads(self, key, value):
        for own, every in zip((key, value), self.everything, strict=True):
            assert torch.equal(own, self.own(every))
        return self.everything

    def sum_heads(self, key, value):
        self.sent.append((key, value))
        return tuple(torch.zeros_like(self.own(x)) for x in (key, value))


@pytest.fixture(scope="module")
def monkeypatch_worth():
    """Rows share whatever they begin with in common."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trie_attention, "_WORTH", 1 << 20)
        yield


@pytest.fixture(scope="module", params=["as on a CPU", "as on a GPU"])
def is_flash(request, monkeypatch_worth):
    del monkeypatch_worth
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "as on a GPU":
            patch.setattr(trie_attention, "has_flash_attention", lambda *_: True)
            patch.setattr(trie_attention, "varlen_forward", varlen_forward)
            patch.setattr(trie_attention, "_varlen_backward", varlen_backward)
        yield


@settings(max_examples=30, deadline=None)
@given(ROWS, SIZES)
def test_ranks_attend_and_differentiate_as_one_with_a_mask(is_flash, rows, size):
    trie = trie_of(rows)
    shares = shares_of(size, len(trie.ids))
    num_tokens = shares[0].num_tokens
    segments = share_out(trie, shares[0]).segments
    draw = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    leaves = [random(1, n, num_tokens, 8).requires_grad_() for n in (4, 2, 2)]
    slope = random(1, num_tokens, 4, 8)
    query, key, value = leaves
    keys, values = (x.repeat_interleave(2, 1) for x in (key, value))
    scores = (query @ keys.mT * 8**-0.5).masked_fill(~visible(segments), -torch.inf)
    expected = (scores.softmax(-1) @ values).transpose(1, 2)
    due = torch.autograd.grad((expected * slope).sum(), leaves)

    found = torch.zeros_like(expected)
    totals = [torch.zeros_like(x) for x in leaves]
    everything = tuple(x.detach()[0].transpose(0, 1).contiguous() for x in (key, value))
    for share in shares:
        told = Told(None, share.rank, size, num_tokens)
        object.__setattr__(told, "everything", everything)
        object.__setattr__(told, "sent", [])
        here = share.own(torch.arange(num_tokens))
        own = [x.detach()[:, :, here].requires_grad_() for x in leaves]
        out = trie_attention.trie_attention(*own, share_out(trie, told))
        found[:, here] = out.detach()
        grads = torch.autograd.grad((out * slope[:, here]).sum(), own)
        for total, grad in zip(totals, grads, strict=True):
            total[:, :, here] += grad
        ((more_keys, more_values),) = told.sent  # once, whatever there is to send
        totals[1] += more_keys.transpose(0, 1)[None]
        totals[2] += more_values.transpose(0, 1)[None]
    for a, b in zip([found, *totals], [expected, *due], strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


@given(st.data(), SIZES, st.integers(1, 30))
def test_targets_are_scored_by_who_reads_their_predictor(data, size, num_tokens):
    at = torch.tensor(data.draw(st.lists(st.integers(0, num_tokens - 1), min_size=1, max_size=12)))
    shares = [TargetShare.of(share, at) for share in shares_of(size, num_tokens)]
    counts = shares[0].counts
    assert sum(counts) == len(at)
    told = torch.full((size, max(counts)), -1)
    for rank, share in enumerate(shares):
        assert share.counts == counts
        assert len(share.index) == len(share.columns) == max(1, counts[rank])
        if counts[rank]:
            tokens = share.context.own(torch.arange(share.context.num_tokens))
            assert torch.equal(tokens[share.columns], at[share.index])
            told[rank, : counts[rank]] = share.index
    assert all(torch.equal(told.flatten()[share.order], torch.arange(len(at))) for share in shares)
