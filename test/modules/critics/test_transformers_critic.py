"""A critic over a model of Transformers: its values are those of the model itself."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict, lazy_stack
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from torchrl_data.missing_entry import MissingEntryError
from torchrl_modules import (
    TransformersCritic,
    TransformersWrapper,
    load_value_model,
    value_model_of,
)
from torchrl_modules.scoring.model_reader import Layout

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}


def with_head(causal, seed=1):
    model = value_model_of(causal)
    generator = torch.Generator().manual_seed(seed)
    torch.nn.init.normal_(model.score.weight, generator=generator)
    return model


def a_model(kind="llama"):
    torch.manual_seed(0)
    made = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
        "gemma 2": lambda: Gemma2ForCausalLM(Gemma2Config(**SMALL, sliding_window=4)),
        "hybrid": lambda: Qwen3NextForCausalLM(
            Qwen3NextConfig(
                **SMALL,
                layer_types=["linear_attention", "full_attention"],
                linear_num_key_heads=2,
                linear_num_value_heads=2,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                num_experts=2,
                num_experts_per_tok=1,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=16,
            )
        ),
    }
    return made[kind]().eval()


def rows_of_a_group(count=4, prompt=6):
    """Rows that begin alike, each with two turns, and one of them without a sampled token."""
    generator = torch.Generator().manual_seed(3)
    begin = torch.randint(5, 97, (prompt,), generator=generator)
    rows = []
    for i in range(count):
        ids = torch.cat([begin, torch.randint(5, 97, (3 + 2 * i,), generator=generator)])
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[prompt:] = True
        mask[prompt + 1] = False
        rows.append((ids, mask if i else torch.zeros_like(mask)))
    return rows


def packed(rows):
    ids, masks = zip(*rows, strict=True)
    return torch.cat(ids), torch.tensor([len(x) for x in ids]), torch.cat(masks)


def own_values(model, rows):
    """One row at a time, one prefix at a time, by the model's own forward."""
    return torch.stack(
        [
            model(input_ids=ids[None, :place]).logits[0, 0]
            for ids, mask in rows
            for place in mask.nonzero().flatten().tolist()
        ]
    )


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("llama", Layout.PACKED), ("gemma 2", Layout.PACKED), ("hybrid", Layout.PADDED)],
)
def test_values_and_gradients_are_the_models_own(kind, layout):
    dtype = torch.float32 if kind == "hybrid" else torch.float64  # experts take no float64
    model, rows = with_head(a_model(kind).to(dtype)), rows_of_a_group()
    critic = TransformersCritic(model, micro_batch_tokens=12)
    assert critic.scorer.layout is layout
    expected = own_values(model, rows)
    expected.square().sum().backward()
    own = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    found = critic.value_packed(*packed(rows))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found.square().sum().backward()
    for name, p in model.named_parameters():
        if name in own:
            torch.testing.assert_close(p.grad, own[name], rtol=1e-3, atol=1e-3, msg=name)
    with torch.no_grad():  # in passes of 12 tokens
        again = critic.value_packed(*packed(rows))
    torch.testing.assert_close(again, found.detach(), rtol=1e-4, atol=1e-4)


def test_what_rows_begin_with_in_common_is_read_once():
    model, rows = with_head(a_model()), rows_of_a_group()
    critic, read = TransformersCritic(model), []
    model.base_model.register_forward_pre_hook(
        lambda _, __, given: read.append(given["input_ids"].numel()), with_kwargs=True
    )
    critic.value_packed(*packed(rows))
    lasts = [int(mask.nonzero()[-1]) if mask.any() else 0 for _, mask in rows]
    # The prompt of 6 once, and of each row what comes before its last sampled token.
    assert read == [6 + sum(last - 6 for last in lasts if last)]


def test_rows_get_their_values_ragged_and_padded():
    model, rows = with_head(a_model()), rows_of_a_group()
    critic, expected = TransformersCritic(model), own_values(model, rows)
    ragged = lazy_stack(
        [TensorDict({"tokens": {"full": i}, "masks": {"all_assistant_mask": m}}) for i, m in rows]
    )
    width = max(len(ids) for ids, _ in rows)

    def left(x):
        return torch.nn.functional.pad(x, (width - len(x), 0))

    padded = TensorDict(
        {
            "tokens": {"full": torch.stack([left(i) for i, _ in rows])},
            "masks": {
                "all_assistant_mask": torch.stack([left(m) for _, m in rows]),
                "all_attention_mask": torch.stack([left(torch.ones_like(m)) for _, m in rows]),
            },
        },
        batch_size=[len(rows)],
    )
    for batch in (critic(ragged), critic(padded)):
        own = [row["state_value"] for row in batch.unbind(0)]
        masks = [row["masks", "all_assistant_mask"] for row in batch.unbind(0)]
        assert all(value.shape == (len(mask), 1) for value, mask in zip(own, masks, strict=True))
        assert not any(value[~mask].any() for value, mask in zip(own, masks, strict=True))
        found = torch.cat([value[mask, 0] for value, mask in zip(own, masks, strict=True)])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    foreign = ragged[1].clone()
    foreign["tokens", "full"][0] = 97
    assert critic(lazy_stack([foreign]))["state_value"].isnan().sum() == rows[1][1].sum()
    with pytest.raises(MissingEntryError, match="all_assistant_mask"):
        critic(ragged.exclude(("masks", "all_assistant_mask")))


def test_a_critic_begins_as_the_policy_and_says_nothing_yet(chatml_tokenizer, build_model):
    causal, state = build_model(), torch.random.get_rng_state()
    value_model_of(causal)
    assert torch.equal(torch.random.get_rng_state(), state)  # a run draws what it would without
    adapted = get_peft_model(build_model(), LoraConfig(target_modules=["q_proj"], r=2))
    torch.nn.init.ones_(
        adapted.base_model.model.model.layers[0].self_attn.q_proj.lora_B.default.weight
    )
    policy = TransformersWrapper(causal, tokenizer=chatml_tokenizer)
    ids = torch.arange(5, 12)[None]
    for own in (causal, adapted):
        value = value_model_of(own)
        decoder = own.get_base_model().model if own is adapted else own.model
        hidden, found = (m(input_ids=ids).last_hidden_state for m in (decoder, value.base_model))
        torch.testing.assert_close(found, hidden, rtol=1e-4, atol=1e-4)
        assert all(p.requires_grad for p in value.parameters())
        assert not value.score.weight.any()
    critic = TransformersCritic.of_policy(policy)
    one = torch.tensor([False, True, True])
    assert not critic.value_packed(torch.arange(5, 8), torch.tensor([3]), one).any()
    assert critic.scorer.model.base_model.layers[0] is not causal.model.layers[0]


def test_reward_models_and_language_models_are_loaded(tmp_path):
    torch.manual_seed(0)
    rewards = with_head(a_model())
    critic = TransformersCritic(rewards)
    critic.save_pretrained(tmp_path / "critic")
    again = TransformersCritic(str(tmp_path / "critic"), device="cpu")
    rows = packed(rows_of_a_group())
    torch.testing.assert_close(again.value_packed(*rows), critic.value_packed(*rows))
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    assert theirs.config.num_labels == 1
    a_model().save_pretrained(tmp_path / "causal")
    fresh = load_value_model(str(tmp_path / "causal"))
    assert not fresh.score.weight.any()
    causal = AutoModelForCausalLM.from_pretrained(tmp_path / "causal")
    torch.testing.assert_close(fresh.model.norm.weight, causal.model.norm.weight)
    rewards.config.num_labels = 2
    rewards.score = torch.nn.Linear(32, 2, bias=False)
    rewards.save_pretrained(tmp_path / "two")
    with pytest.raises(ValueError, match="has 2 labels, and a critic gives one number"):
        load_value_model(str(tmp_path / "two"))


def test_what_is_no_critic_is_refused():
    with pytest.raises(TypeError, match=r"has no head 'score'.*value_model_of"):
        TransformersCritic(a_model())
    with pytest.raises(TypeError, match="device= and dtype= apply only"):
        TransformersCritic(with_head(a_model()), device="cpu")
    sizes = {name: value for name, value in SMALL.items() if name != "head_dim"}
    with pytest.raises(ValueError, match="is a granite, of which Transformers has no class"):
        value_model_of(GraniteForCausalLM(GraniteConfig(**sizes)))
    critic = TransformersCritic(with_head(a_model()))
    with pytest.raises(ValueError, match="value_packed: the first token of a sequence is a target"):
        critic.value_packed(torch.tensor([5, 6]), torch.tensor([2]), torch.tensor([True, False]))
