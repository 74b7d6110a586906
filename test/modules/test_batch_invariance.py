"""Batch invariance: what is drawn and what is scored are equal to the bit, in any batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import MistralConfig, MistralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from torchrl_data.conversation import Conversations
from torchrl_modules import TransformersWrapper
from torchrl_modules.batch_invariance import (
    BatchInvariance,
    check_batch_invariance,
    invariant_attention,
    invariant_linear,
)

SAMPLING = {"max_new_tokens": 20, "stop_token_ids": (), "seed": 5}
QUESTIONS = [f"{'What is it? ' * (i % 7)}{i} + {i}?" for i in range(33)]


@pytest.fixture
def policy_of(make_tiny_model, chatml_tokenizer):
    def build(*, batch_invariant=True, model=None, **sampling):
        return TransformersWrapper(
            model or make_tiny_model(0),
            tokenizer=chatml_tokenizer,
            generate_kwargs={**SAMPLING, **sampling},
            batch_invariant=batch_invariant,
        )

    return build


def drawn(policy, questions, turns=2):
    rows = Conversations.from_messages([[{"role": "user", "content": q}] for q in questions])
    for turn in range(turns):
        if turn:
            rows = rows.append_messages([[{"role": "user", "content": "again"}]] * len(rows))
        _, rows, _ = policy.respond(rows)
    return [
        (rows.token_ids(i), rows.assistant_mask(i), rows.log_probs(i)) for i in range(len(rows))
    ]


@torch.no_grad()
def scored(policy, rows):
    ids, masks = torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows])
    lengths = torch.tensor([len(row[0]) for row in rows])
    temperature = policy.sampling.temperature
    return policy.score_packed(ids, lengths, masks, temperature=temperature).log_prob


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.7}, {"top_p": 0.8, "repetition_penalty": 1.2}]
)
def test_what_is_scored_is_what_was_drawn_to_the_bit(sampling, policy_of):
    policy = policy_of(**sampling)
    rows = drawn(policy, QUESTIONS)
    own = torch.cat([log_probs[mask] for _, mask, log_probs in rows])
    assert torch.equal(scored(policy, rows), own)
    assert torch.equal(torch.cat([scored(policy, [row]) for row in rows[:5]]), own[: 5 * 40])
    # Without it, most are others.
    plain = policy_of(batch_invariant=False, **sampling)
    rows = drawn(plain, QUESTIONS)
    own = torch.cat([log_probs[mask] for _, mask, log_probs in rows])
    assert (scored(plain, rows) != own).double().mean() > 0.3


def test_a_row_is_drawn_alike_in_any_batch(policy_of):
    policy = policy_of(seed=None)
    prompts = [[3, 5, 7, 9][: 1 + i % 4] * (1 + i % 9) for i in range(33)]
    seeds = list(range(33))
    together = policy.engine.generate(prompts, policy.sampling, seeds=seeds)
    for i in (0, 7, 32):
        [alone] = policy.engine.generate([prompts[i]], policy.sampling, seeds=[i])
        assert alone.ids == together[i].ids
        assert alone.log_probs == together[i].log_probs


def test_a_mixture_of_experts_is_scored_as_it_was_drawn(policy_of, chatml_tokenizer):
    config = Qwen3MoeConfig(
        vocab_size=len(chatml_tokenizer),
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        initializer_range=0.2,
        experts_implementation="eager",
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config).eval()
    policy = policy_of(model=model)
    rows = drawn(policy, QUESTIONS[:9])
    own = torch.cat([log_probs[mask] for _, mask, log_probs in rows])
    assert torch.equal(scored(policy, rows), own)


def test_gradients_are_those_of_plain_scoring(policy_of):
    policy, plain = policy_of(), policy_of(batch_invariant=False)
    rows = drawn(policy, QUESTIONS[:4], turns=1)
    ids, masks = torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows])
    lengths = torch.tensor([len(row[0]) for row in rows])
    for each in (policy, plain):
        score = each.score_packed(ids, lengths, masks).log_prob
        (score * torch.linspace(-1, 1, len(score))).sum().backward()
    pairs = zip(policy.model.parameters(), plain.model.parameters(), strict=True)
    for own, other in pairs:
        assert own.grad is not None
        torch.testing.assert_close(own.grad, other.grad, atol=2e-5, rtol=1e-3)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 3),
    st.sampled_from([(1, 1), (4, 2)]),
    st.integers(1, 70),
    st.booleans(),
    st.integers(0, 1 << 30),
)
def test_attention_is_that_of_torch_and_a_row_that_of_itself(batch, heads, size, is_left, seed):
    draw = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(batch, n, size, 8, generator=draw) for n in (heads[0], *heads[1:] * 2)
    )
    lengths = torch.randint(1, size + 1, (batch,), generator=draw)
    at = torch.arange(size)
    own = at >= size - lengths[:, None] if is_left else at < lengths[:, None]
    mask = (own[:, None] & (at <= at[:, None]))[:, None]
    out = invariant_attention(query, key, value, mask, enable_gqa=True)
    expected = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
    for row, places in enumerate(own):
        torch.testing.assert_close(
            out[row, :, places], expected[row, :, places], atol=1e-5, rtol=1e-5
        )
        alone = invariant_attention(
            *(x[row : row + 1, :, places] for x in (query, key, value)), is_causal=True
        )
        assert torch.equal(out[row : row + 1, :, places], alone)
        last = invariant_attention(
            query[row : row + 1, :, places][:, :, -1:],
            key[row : row + 1, :, places],
            value[row : row + 1, :, places],
        )
        assert torch.equal(alone[:, :, -1:], last)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 70), st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_a_linear_layer_is_that_of_torch_and_a_row_that_of_itself(rows, width, out, has_bias):
    draw = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 2, width, generator=draw), torch.randn(out, width, generator=draw)
    bias = torch.randn(out, generator=draw) if has_bias else None
    found = invariant_linear(x, weight, bias)
    torch.testing.assert_close(found, F.linear(x, weight, bias), atol=1e-4, rtol=1e-4)
    for row in range(rows):
        assert torch.equal(invariant_linear(x[row], weight, bias), found[row])


def test_functions_of_elements_are_the_same_at_odd_ends():
    x = torch.linspace(-4, 4, 1001)
    with BatchInvariance():
        for function in (F.silu, F.gelu, torch.sigmoid, F.softplus):
            one = torch.cat([function(x[i : i + 1]) for i in range(len(x))])
            assert torch.equal(function(x), one)
            torch.testing.assert_close(one, function(x.double()).float())


class Mixing(torch.nn.Module):
    """Adds to each row a little of the others."""

    def forward(self, x):
        return x + 1e-3 * x.mean(0, keepdim=True)


def test_what_can_not_be_invariant_is_refused_by_name(make_tiny_model, policy_of):
    model = make_tiny_model(0)
    model.model.layers[1].mlp.act_fn = Mixing()
    with pytest.raises(ValueError, match=r"beside other rows than alone.*layers\.1\.mlp\.act_fn"):
        check_batch_invariance(model)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    window = MistralForCausalLM(MistralConfig(**sizes, sliding_window=16))
    with pytest.raises(ValueError, match="sliding window"):
        check_batch_invariance(window)
    eager = MistralForCausalLM(MistralConfig(**sizes, attn_implementation="eager"))
    with pytest.raises(ValueError, match=r"torch's matmul.*attn_implementation=sdpa"):
        check_batch_invariance(eager)
    with pytest.raises(ValueError, match="bfloat16 on cpu"):
        policy_of(model=make_tiny_model(0).bfloat16())
    with pytest.raises(ValueError, match="goes without autocast_dtype"):
        TransformersWrapper(
            make_tiny_model(0),
            tokenizer=policy_of().tokenizer,
            autocast_dtype=torch.bfloat16,
            batch_invariant=True,
        )
