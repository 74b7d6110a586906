"""Rewards of whole rows: those of Transformers' sequence classification, and of ``RewardModel``."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import lazy_stack
from transformers import (
    AutoModelForSequenceClassification,
    Gemma2Config,
    LlamaConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from objectives import RewardModelLoss
from torchrl_data import ConversationEncoder, preference_rows, read_pair
from torchrl_envs import RewardModel
from torchrl_modules import TransformersCritic, TransformersWrapper, value_model_of
from torchrl_modules.scoring.model_reader import Layout, ends_of

PAD = 3
SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "num_labels": 1,
    "pad_token_id": PAD,
}
CONFIGS = {
    "llama": lambda **more: LlamaConfig(**SMALL | more),
    "gemma 2": lambda **more: Gemma2Config(**SMALL | more, sliding_window=4),
    "qwen 3": lambda **more: Qwen3Config(**SMALL | more),
    "hybrid": lambda **more: Qwen3NextConfig(
        **SMALL | more,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
}


def a_model(kind, **more):
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(CONFIGS[kind](**more)).eval()


def rows_that_begin_alike():
    """Of unequal lengths; one ends with padding tokens of its own, one is a part of another."""
    generator = torch.Generator().manual_seed(3)
    begin = torch.randint(5, 97, (6,), generator=generator)
    ends = [torch.randint(5, 97, (size,), generator=generator) for size in (1, 7, 4, 2)]
    ends[2][-2:] = PAD
    return [torch.cat([begin, end]) for end in ends] + [begin]


def theirs(model, rows):
    """What Transformers gives of the rows in one batch, padded on the right."""
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return model(input_ids=ids, attention_mask=mask).logits[:, 0]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("llama", Layout.PACKED),
        ("gemma 2", Layout.PACKED),
        ("qwen 3", Layout.PACKED),
        ("hybrid", Layout.PADDED),
    ],
)
def test_rewards_and_gradients_are_those_of_sequence_classification(kind, layout):
    model, rows = a_model(kind), rows_that_begin_alike()
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")  # PyTorch's has no soft cap, which Gemma 2 needs
    critic = TransformersCritic(model, micro_batch_tokens=12)
    assert critic.scorer.layout is layout
    alone = torch.stack([theirs(reference, [row])[0] for row in rows])
    if kind != "hybrid":  # whose linear attention takes padding for text
        torch.testing.assert_close(theirs(reference, rows), alone, rtol=1e-5, atol=1e-5)
    weight = torch.arange(1.0, 6.0)
    (alone * weight).sum().backward()
    packed = torch.cat(rows), torch.tensor([len(row) for row in rows])
    found = critic.reward_packed(*packed)
    torch.testing.assert_close(found, alone.detach(), rtol=1e-5, atol=1e-5)
    (found * weight).sum().backward()
    own = dict(model.named_parameters())
    for name, p in reference.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(own[name].grad, p.grad, rtol=1e-3, atol=1e-3, msg=name)
    with torch.no_grad():  # in passes of 12 tokens
        torch.testing.assert_close(critic.reward_packed(*packed), found, rtol=1e-5, atol=1e-5)
    nothing = torch.zeros(0, dtype=torch.int64)
    assert critic.reward_packed(nothing, nothing).shape == (0,)


def test_what_pairs_begin_with_is_read_once():
    critic, read = TransformersCritic(a_model("llama")), []
    critic.model.base_model.register_forward_pre_hook(
        lambda _, __, given: read.append(given["input_ids"].numel()), with_kwargs=True
    )
    rows = rows_that_begin_alike()
    critic.reward_packed(torch.cat(rows), torch.tensor([len(row) for row in rows]))
    assert read == [6 + 1 + 7 + 2 + 2]  # of the third row not the padding at its end


def test_a_head_is_drawn_as_transformers_draws_it(build_model, chatml_tokenizer):
    causal = build_model()
    causal.config.pad_token_id = None
    policy, state = TransformersWrapper(causal, tokenizer=chatml_tokenizer), torch.get_rng_state()
    critic = TransformersCritic.of_policy(policy, random_head=True)
    assert torch.equal(torch.get_rng_state(), state)
    config, weight = critic.scorer.model.config, critic.scorer.model.score.weight
    assert weight.std().item() == pytest.approx(config.initializer_range, rel=0.5)
    assert config.pad_token_id == chatml_tokenizer.pad_token_id is not None
    again = value_model_of(causal, random_head=True)
    assert torch.equal(again.score.weight, weight)  # which follow from the seed
    assert not value_model_of(causal).score.weight.any()
    own, policys = critic.scorer.model.model.norm.weight, causal.model.norm.weight
    assert torch.equal(own, policys)
    assert own is not policys


lengths = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@settings(deadline=None)
@given(st.data(), lengths, st.sampled_from([None, 0]))
def test_the_last_token_of_a_row(data, sizes, pad_id):
    rows = [data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)) for n in sizes]
    found = ends_of(torch.tensor([t for row in rows for t in row]), torch.tensor(sizes), pad_id)
    for number, row in enumerate(rows):
        due = len(row) - 1
        while pad_id is not None and due > 0 and row[due] == pad_id:
            due -= 1
        assert (found.rows[number], found.positions[number]) == (number, due)
        assert found.beginnings(torch.tensor([number]))[0].tolist() == row[: due + 1]


def test_rows_of_preferences_have_the_rewards_that_a_run_is_given(chatml_tokenizer, tmp_path):
    size, pad = len(chatml_tokenizer), chatml_tokenizer.pad_token_id
    model = a_model("llama", vocab_size=size, pad_token_id=pad)
    pairs = [
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "five, or nothing"},
        {"prompt": "A colour?", "chosen": "It is red, I think.", "rejected": "4"},
    ]
    rows = lazy_stack(preference_rows(ConversationEncoder(chatml_tokenizer), pairs))
    critic = TransformersCritic(model)
    loss = RewardModelLoss(critic)
    packed = loss.pack(rows)
    found = critic.reward_packed(packed.ids, packed.lengths)
    critic.save_pretrained(tmp_path)
    chatml_tokenizer.save_pretrained(tmp_path)
    sides = [side for pair in map(read_pair, pairs) for side in (pair.chosen, pair.rejected)]
    grader = RewardModel(str(tmp_path))
    given = grader([side[:1] for side in sides], [side[1:] for side in sides])
    assert found.tolist() == pytest.approx(given, abs=1e-5)
    assert len({round(reward, 3) for reward in given}) == 4
    difference = found[::2] - found[1::2]
    torch.testing.assert_close(
        loss(packed).total(), -torch.nn.functional.logsigmoid(difference).mean()
    )


def test_what_can_not_be_read_is_refused():
    critic = TransformersCritic(a_model("llama"))
    with pytest.raises(ValueError, match="reward_packed: a sequence is empty"):
        critic.reward_packed(torch.tensor([5, 6]), torch.tensor([2, 0]))
    with pytest.raises(ValueError, match="reward_packed: token 1 of sequence 0 has the id 97"):
        critic.reward_packed(torch.tensor([5, 97]), torch.tensor([2]))
