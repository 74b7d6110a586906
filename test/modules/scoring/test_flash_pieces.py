"""Attention over a trie in pieces of a kernel for rows of many lengths, which is written here."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_modules.scoring import flash_kernel, trie_attention
from torchrl_modules.scoring.trie_attention import build_trie


def scores_of(query, key, scale, causal, window):
    groups = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(groups, 1)) * scale
    at = torch.arange(len(query))[:, None] - torch.arange(len(key))
    if causal:
        scores = scores.masked_fill(at < 0, -torch.inf)
    return scores if window is None else scores.masked_fill(at >= window, -torch.inf)


def pieces(cumulative):
    queries, keys = (x.tolist() for x in cumulative)
    for i in range(len(queries) - 1):
        yield slice(queries[i], queries[i + 1]), slice(keys[i], keys[i + 1])


def varlen_forward(heads, cumulative, longest, scale, *, causal, window=None):
    query, key, value = heads
    assert longest[0] >= max(2, *(a.stop - a.start for a, _ in pieces(cumulative)))
    assert longest[1] >= max(b.stop - b.start for _, b in pieces(cumulative))
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
    for q, k in pieces(cumulative):
        scores = scores_of(query[q], key[k], scale, causal, window)
        groups = query.shape[1] // key.shape[1]
        out[q] = torch.einsum(
            "hqk,khd->qhd", scores.softmax(-1), value[k].repeat_interleave(groups, 1)
        )
        lse[:, q] = scores.logsumexp(-1)
    return out, lse


def varlen_backward(
    grad, heads, out, lse, cumulative, longest, scale, *, causal, window=None
):  # of the softmax over a row's whole sum, as flash attention has it
    query, key, value = heads
    totals = [torch.zeros_like(x) for x in heads]
    groups = query.shape[1] // key.shape[1]
    for q, k in pieces(cumulative):
        keys, values = (x[k].repeat_interleave(groups, 1) for x in (key, value))
        p = (scores_of(query[q], key[k], scale, causal, window) - lse[:, q, None]).exp()
        of_p = torch.einsum("qhd,khd->hqk", grad[q], values)
        delta = (grad[q] * out[q]).sum(-1).T[..., None]
        of_scores = p * (of_p - delta) * scale
        totals[0][q] = torch.einsum("hqk,khd->qhd", of_scores, keys)
        for total, found in (
            (totals[1], torch.einsum("hqk,qhd->khd", of_scores, query[q])),
            (totals[2], torch.einsum("hqk,qhd->khd", p, grad[q])),
        ):
            total[k] = found.unflatten(1, (-1, groups)).sum(2)
    return totals


def attended(rows, share, window, seed, groups=2):
    """By the pieces, and with a mask: outputs and gradients."""
    ids = torch.tensor([token for row in rows for token in row])
    lengths = torch.tensor([len(row) for row in rows])
    trie = build_trie(ids, lengths, lengths, share=share)
    size, draw = len(trie.ids), torch.Generator().manual_seed(seed)
    shapes = [(1, 2 * groups, size, 8), (1, 2, size, 8), (1, 2, size, 8)]
    leaves = [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes]
    leaves = [x.requires_grad_() for x in leaves]
    slope = torch.randn(1, size, 2 * groups, 8, generator=draw, dtype=torch.float64)
    out = trie_attention.flash_attention(*leaves, trie.varlen_plan, None, window)
    found = [out, *torch.autograd.grad((out * slope).sum(), leaves)]
    at, ends = torch.arange(size), trie.subtree_end
    sees = (at <= at[:, None]) & (at[:, None] < ends)
    if window is not None:
        sees &= at[:, None] - at < window
    query, key, value = leaves
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = (query @ key.transpose(-2, -1) * 8**-0.5).masked_fill(~sees, -torch.inf)
    expected = (scores.softmax(-1) @ value).transpose(1, 2)
    return found, [expected, *torch.autograd.grad((expected * slope).sum(), leaves)], trie


@pytest.fixture(autouse=True, scope="module")
def _kernel_of_this_file():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trie_attention, "varlen_forward", varlen_forward)
        patch.setattr(trie_attention, "_varlen_backward", varlen_backward)
        yield


def assert_alike(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def test_rows_that_share_at_several_depths_give_what_a_mask_gives(monkeypatch):
    monkeypatch.setattr(trie_attention, "_WORTH", 1 << 20)  # whatever is shared
    a, b = [1] * 9, [2] * 5
    rows = [a + b + [3] * 7, a + b + [4] * 10, a + [5] * 9, [6] * 7, a + b]
    found, expected, trie = attended(rows, True, None, 0)
    assert len(trie.varlen_plan.levels) == 2
    assert_alike(found, expected)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([1, 3]),
)
def test_any_rows_give_what_a_mask_gives(rows, share, groups):
    found, expected, _ = attended(rows, share, None, 1, groups)
    assert_alike(found, expected)


@pytest.mark.parametrize("window", [1, 4, 100])
def test_rows_that_share_nothing_are_seen_through_a_window(window):
    rows = [[1] * 9, [2] * 3, [3] * 9, [4]]
    assert_alike(*attended(rows, False, window, 2)[:2])


def test_a_kernel_that_is_wrong_is_told_once_and_not_used(monkeypatch):
    def wrong(grad, *args, **kwargs):
        query, *others = varlen_backward(grad, *args, **kwargs)
        return [1.2 * query, *others]

    device, check = torch.device("cpu"), trie_attention._flash_is_right.__wrapped__
    monkeypatch.setattr(flash_kernel, "_GAP", 0.1)
    assert check(device, torch.bfloat16, 2, 8)
    monkeypatch.setattr(trie_attention, "_varlen_backward", wrong)
    with pytest.warns(UserWarning, match="heads of 8, 2 to a key: it is off by 0.2"):
        assert not check(device, torch.bfloat16, 2, 8)

    def fail(*_, **__):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(trie_attention, "varlen_forward", fail)
    with pytest.warns(UserWarning, match="RuntimeError: no kernel image. Flex attention"):
        assert not check(device, torch.bfloat16, 2, 8)
