"""What sequences begin with in common is computed once, and nothing changes by it."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from torchrl_data.ragged.packed import pack
from torchrl_modules.scoring.scorer import PackedScorer
from torchrl_modules.scoring.trie_attention import PrefixTrie, Segment, build_trie, trie_attention

# Few tokens, so that sequences often begin alike.
ROWS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=8)


def trie_of(rows, *, share=True, ends=None):
    ids, lengths = pack([torch.tensor(row) for row in rows])
    ends = lengths if ends is None else torch.tensor(ends)
    return build_trie(ids, lengths, ends, share=share)


def ancestors(trie, at):
    """Tokens that a token of the trie sees, itself included, by the rule of the trie."""
    return [k for k in range(at + 1) if at < trie.subtree_end[k]]


@settings(max_examples=300, deadline=None)
@given(rows=ROWS, share=st.booleans(), data=st.data())
def test_every_sequence_is_a_path_of_the_trie(rows, share, data):
    ends = [data.draw(st.integers(0, len(row))) for row in rows]
    trie = trie_of(rows, share=share, ends=ends)
    nodes = iter(trie.node.tolist())
    for row, end in zip(rows, ends, strict=True):
        path = [next(nodes) for _ in row]
        assert path[end:] == [-1] * (len(row) - end), "what nobody needs is not there"
        path = path[:end]
        assert trie.ids[path].tolist() == row[:end]
        assert trie.positions[path].tolist() == list(range(end))
        for i, node in enumerate(path):
            assert ancestors(trie, node) == path[: i + 1]
    used = set(trie.node.tolist()) - {-1}
    assert used == set(range(len(trie.ids))), "every token of the trie is somebody's"
    if not share:
        assert len(trie.ids) == sum(ends)


def test_a_group_has_its_prompt_once_and_forks_are_a_trie():
    system, first, second = [9] * 40, [1, 2, 3] * 10, [4, 5] * 10
    rows = [
        system + first + [6, 7],
        system + first + [6, 8, 8],
        system + second + [7],
        system + second + [8],
        system + second + [8],
    ]
    trie = trie_of(rows)
    assert len(trie.ids) == 40 + (30 + 1 + 1 + 2) + (20 + 1 + 1)
    depth_first = [(s.end - s.start, s.subtree_end) for s in trie.segments]
    assert depth_first[0] == (40, len(trie.ids))


def test_a_prefix_that_costs_more_than_it_saves_is_not_shared():
    assert len(trie_of([[0, *range(10, 60)], [0, *range(70, 120)]]).segments) == 2
    trie = trie_of([[0, 1, 2, 3, *range(10, 60)], [0, 1, 2, 3, *range(70, 120)]])
    assert trie.segments[0] == (0, 4, 104)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]), seed=st.integers(0, 99))
def test_attention_over_the_trie_is_masked_attention(rows, heads, seed):
    trie = trie_of(rows)
    size = len(trie.ids)
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn(1, size, h, 8, generator=generator, dtype=torch.float64)
        .transpose(1, 2)
        .requires_grad_()
        for h in (heads[0], heads[1], heads[1])
    ]
    weight = torch.randn(1, size, heads[0], 8, generator=generator, dtype=torch.float64)
    mask = torch.zeros(size, size, dtype=torch.bool)
    for at in range(size):
        mask[at, ancestors(trie, at)] = True
    expected = torch.nn.functional.scaled_dot_product_attention(
        *inputs, attn_mask=mask, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    found = trie_attention(*inputs, trie, scale=0.3)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, weight), torch.autograd.grad(expected, inputs, weight)
    )


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 400), st.integers(0, 2), st.integers(1, 300)),
        min_size=1,
        max_size=6,
    )
)
def test_the_mask_for_flex_attention_is_that_of_the_trie(rows):
    """Block by block what PyTorch makes of the dense mask; rows share up to 400 tokens."""
    trie = trie_of([[7] * common + [kind] * rest for common, kind, rest in rows])
    mask, size = trie.block_mask, len(trie.ids)
    at = torch.arange(size)
    dense = (at <= at[:, None]) & (at[:, None] < trie.subtree_end)
    sees = lambda b, h, q, k: dense[q, k]  # noqa: ARG005, E731
    expected = create_block_mask(sees, None, None, size, size, "cpu")
    assert mask.shape == expected.shape
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(expected, name)), name
    for count, places in (
        ("kv_num_blocks", "kv_indices"),
        ("full_kv_num_blocks", "full_kv_indices"),
        ("q_num_blocks", "q_indices"),
        ("full_q_num_blocks", "full_q_indices"),
    ):
        found, known = getattr(mask, places)[0, 0], getattr(expected, places)[0, 0]
        for block, number in enumerate(getattr(mask, count)[0, 0].tolist()):
            assert torch.equal(found[block, :number], known[block, :number]), places
    seen = create_mask(mask.mask_mod, 1, 1, size, size, device="cpu")[0, 0]
    assert torch.equal(seen, dense)


@pytest.mark.parametrize("size", [8192, 32768, 131072])
def test_the_mask_for_flex_attention_takes_memory_of_its_blocks(size):
    """All it allocates is 256 bytes for a pair of blocks, of which a dense mask has 128 * 128."""
    prompt, rest = list(range(size // 2)), size // 8
    trie = trie_of([prompt + [size + i] * rest for i in range(4)])
    assert len(trie.ids) == size
    with torch.profiler.profile(profile_memory=True) as profile:
        trie.block_mask  # noqa: B018
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    assert size * 8 < allocated < 256 * (size // 128) ** 2


SMALL = {"vocab_size": 16, "bos_token_id": None, "eos_token_id": None}
MODELS = {
    "plain": lambda: MistralForCausalLM(
        MistralConfig(
            **SMALL,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            initializer_range=0.3,
            sliding_window=None,
        )
    ),
    "sliding window": lambda: MistralForCausalLM(
        MistralConfig(
            **SMALL,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            initializer_range=0.3,
            sliding_window=4,
        )
    ),
    "learnt positions": lambda: GPT2LMHeadModel(
        GPT2Config(**SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)
    ),
}


def build(name):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return MODELS[name]().double().eval()


@pytest.fixture(scope="module")
def models():
    return {name: build(name) for name in MODELS}


def scores_and_gradients(model, rows, masks, *, share_prefixes):
    read = []
    scorer = PackedScorer(model, share_prefixes=share_prefixes)
    hook = model.base_model.register_forward_pre_hook(
        lambda *given: read.append(given[2]["input_ids"].numel()), with_kwargs=True
    )
    ids, lengths = pack(rows)
    scores = scorer.score_packed(ids, lengths, torch.cat(masks), temperature=0.8, entropy=True)
    hook.remove()
    weights = torch.linspace(-1, 2, len(scores.log_prob), dtype=scores.log_prob.dtype)
    loss = scores.log_prob @ weights + 0.3 * scores.entropy.sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [scores.log_prob.detach(), scores.entropy.detach()], gradients, sum(read)


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    groups=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3),
    seed=st.integers(0, 999),
)
@pytest.mark.parametrize("name", MODELS)
def test_sharing_changes_neither_values_nor_gradients(models, name, prompts, groups, seed):
    generator = torch.Generator().manual_seed(seed)
    rows, masks = [], []
    for length, responses in zip(prompts, groups, strict=False):
        prompt = torch.randint(0, 16, (length,), generator=generator)
        for size in responses:
            response = torch.randint(0, 2, (size,), generator=generator)
            rows.append(torch.cat([prompt, response]))
            masks.append(torch.arange(length + size) >= length)
    assume(rows)
    values, gradients, num_read = scores_and_gradients(
        models[name], rows, masks, share_prefixes=True
    )
    alone, gradients_alone, num_alone = scores_and_gradients(
        models[name], rows, masks, share_prefixes=False
    )
    # The norms of these models are computed in float32.
    torch.testing.assert_close(values, alone, rtol=1e-4, atol=1e-5)
    for found, expected in zip(gradients, gradients_alone, strict=True):
        scale = max(expected.abs().max().item(), 1.0)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5 * scale)
    assert num_read <= num_alone


def test_a_prompt_is_read_once_by_models_that_allow_it(models):
    prompt = torch.arange(12) % 16
    rows = [torch.cat([prompt, torch.tensor([i, 3, 4])]) for i in range(4)]
    masks = [torch.arange(15) >= 12] * 4
    read = {
        name: scores_and_gradients(models[name], rows, masks, share_prefixes=True)[2]
        for name in MODELS
    }
    # Of each response the last token predicts nothing. A window of 4 hides part of the prompt.
    assert read == {"plain": 12 + 4 * 2, "sliding window": 4 * 14, "learnt positions": 12 + 4 * 2}


def test_sharing_can_be_switched_off_later_and_a_misspelt_setting_is_refused(models):
    prompt = torch.arange(12) % 16
    rows = [torch.cat([prompt, torch.tensor([i, 3, 4])]) for i in range(4)]
    ids, lengths = pack(rows)
    mask, _ = pack([torch.arange(15) >= 12] * 4)
    scorer, read = PackedScorer(models["plain"]), []
    hook = scorer.model.base_model.register_forward_pre_hook(
        lambda _, __, inputs: read.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    for share in (True, False):
        scorer.share_prefixes = share
        scorer.score_packed(ids, lengths, mask)
    hook.remove()
    assert read == [12 + 4 * 2, 4 * 14]
    with pytest.raises(AttributeError, match=r"no attribute 'share_prefix' .*'share_prefixes'"):
        scorer.share_prefix = False
    with pytest.raises(AttributeError, match="head_dtype is fixed when it is made"):
        scorer.head_dtype = torch.float64


def test_dropout_is_drawn_for_every_sequence():
    model = build("learnt positions").train()
    prompt = torch.arange(12)
    rows = [torch.cat([prompt, torch.tensor([i, 3])]) for i in range(4)]
    masks = [torch.arange(14) >= 12] * 4
    _, _, read = scores_and_gradients(model, rows, masks, share_prefixes=True)
    assert read == 4 * 13


def test_segments_without_descendants_of_one_length_are_neighbours():
    trie = trie_of([[1, 2, 3], [4], [5, 6, 7], [8]])
    assert isinstance(trie, PrefixTrie)
    assert trie.segments == (
        Segment(0, 1, 1),
        Segment(1, 2, 2),
        Segment(2, 5, 5),
        Segment(5, 8, 8),
    )
