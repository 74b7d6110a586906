"""Policies over models with adapters of PEFT: scored, sampled and served as the model computes."""

import contextlib

import peft
import pytest
import torch
from tensordict import TensorDict

from torchrl_data import Tokens
from torchrl_modules import TransformersWrapper
from torchrl_modules.scoring.scorer import PackedScorer

# PEFT's own, about adapters of tied weights
pytestmark = pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")

ROWS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11], [12, 13, 14], [5, 6, 7, 8, 9, 15, 16, 17]]
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
ADAPTERS = {
    "LoRA": LORA,
    "DoRA": LORA | {"use_dora": True},
    "on the head": LORA | {"target_modules": ["v_proj", "lm_head"]},
    "a head that is trained whole": LORA | {"modules_to_save": ["lm_head"]},
    "a head that is trained whole, tied": LORA | {"modules_to_save": ["lm_head"]},
    "on the tied embedding": LORA | {"target_modules": ["embed_tokens", "o_proj"]},
    "new tokens": LORA | {"trainable_token_indices": [5, 9, 16]},
}


def build(make_model, name):
    tied = "tied" in name or "modules_to_save" not in ADAPTERS[name]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = make_model(1, tied)
        trained = peft.get_peft_model(
            model, peft.LoraConfig(task_type="CAUSAL_LM", **ADAPTERS[name])
        )
        for key, value in trained.named_parameters():
            if "modules_to_save" in key or "trainable_tokens" in key:
                torch.nn.init.normal_(value)
    return trained.eval()


@pytest.fixture
def make(make_tiny_model):
    def make_model(seed, tied):
        model = make_tiny_model(seed)
        if not tied:
            model.config.tie_word_embeddings = False
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        return model

    return lambda name: build(make_model, name)


def by_hand(model, rows=ROWS):
    """The log-probs of all tokens but the first, from the model's own logits, a row at a time."""
    scores = []
    for row in rows:
        logits = model(input_ids=torch.tensor([row])).logits[0, :-1].float()
        scores.append(logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0])
    return scores


def gradients(model, scores):
    weights = [torch.linspace(-1, 1, len(row)) for row in scores]
    loss = sum((w * row).sum() for w, row in zip(weights, scores, strict=True))
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {
        key: torch.zeros_like(value) if grad is None else grad
        for (key, value), grad in zip(trained.items(), grads, strict=True)
    }


@pytest.mark.parametrize("name", ADAPTERS)
def test_scores_and_gradients_are_the_models_own(make, chatml_tokenizer, name):
    model = make(name)
    expected = by_hand(model)
    wanted = gradients(model, expected)
    policy = TransformersWrapper(model, tokenizer=chatml_tokenizer)
    given = {"tokens": Tokens.from_rows(full=[torch.tensor(row) for row in ROWS])}
    found = policy.log_prob(TensorDict(given, len(ROWS)))
    rows = [scores[1 : len(row)] for row, scores in zip(ROWS, found, strict=True)]
    for mine, own in zip(rows, expected, strict=True):
        torch.testing.assert_close(mine, own, rtol=1e-4, atol=1e-5)
    got = gradients(model, rows)
    assert any(grad.abs().max() > 1e-3 for grad in wanted.values())
    for key, grad in got.items():
        torch.testing.assert_close(grad, wanted[key], rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.parametrize("name", ["LoRA", "a head that is trained whole"])
def test_the_head_never_makes_all_logits(make, chatml_tokenizer, name):
    policy = TransformersWrapper(make(name), tokenizer=chatml_tokenizer)
    assert policy.scorer.packed
    assert policy.scorer.reading.has_plain_head


def test_turned_off_adapters_take_no_part(make, chatml_tokenizer, make_tiny_model):
    model = make("a head that is trained whole")
    policy = TransformersWrapper(model, tokenizer=chatml_tokenizer)
    batch = TensorDict({"tokens": Tokens.from_rows(full=[torch.tensor(ROWS[0])])}, 1)
    with model.disable_adapter():
        found = policy.log_prob(batch)
    (expected,) = by_hand(make_tiny_model(1), ROWS[:1])
    torch.testing.assert_close(found[0, 1:], expected, rtol=1e-4, atol=1e-5)
    assert (policy.log_prob(batch) - found).abs().max() > 0.01


def test_dropout_of_adapters_is_drawn_for_every_sequence(make_tiny_model, chatml_tokenizer):
    config = peft.LoraConfig(lora_dropout=0.5, **LORA)
    model = peft.get_peft_model(make_tiny_model(1), config).train()
    policy = TransformersWrapper(model, tokenizer=chatml_tokenizer)
    ids = torch.tensor([*range(5, 17)] * 2)
    mask = (torch.arange(24) % 12) > 9
    torch.manual_seed(0)
    first, second = policy.score_packed(ids, torch.tensor([12, 12]), mask).log_prob.view(2, 2)
    assert (first - second).abs().min() > 1e-4
    model.eval()
    first, second = policy.score_packed(ids, torch.tensor([12, 12]), mask).log_prob.view(2, 2)
    torch.testing.assert_close(first, second)


def test_samples_are_the_models_own(make, chatml_tokenizer):
    model = make("on the head")
    policy = TransformersWrapper(
        model,
        tokenizer=chatml_tokenizer,
        generate_kwargs={"max_new_tokens": 8, "temperature": 0.0, "stop_token_ids": ()},
    )
    for prompt, drawn in zip(ROWS, policy.engine.generate(ROWS, policy.sampling), strict=True):
        with torch.no_grad():
            (scores,) = by_hand(model, [prompt + drawn.ids])
        expected = scores[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(drawn.log_probs), expected, rtol=1e-4, atol=1e-5)
        own = model.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None
        )
        assert own[0, len(prompt) :].tolist() == drawn.ids


def test_adapters_that_are_no_layers_are_refused(make_tiny_model, chatml_tokenizer):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(make_tiny_model(1), config)
    with pytest.raises(TypeError, match="PROMPT_TUNING, which are not layers"):
        TransformersWrapper(model, tokenizer=chatml_tokenizer)


def adapted_head(model, **settings):
    """Two adapters on the head alone, none of them 0, of which the second acts."""
    settings = {"target_modules": ["lm_head"], "task_type": "CAUSAL_LM"} | settings
    model = peft.get_peft_model(model, peft.LoraConfig(r=3, **settings), adapter_name="first")
    model.add_adapter("second", peft.LoraConfig(r=5, lora_alpha=20, **settings))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.3)
    model.set_adapter("second")
    return model


@pytest.mark.parametrize("state", ["second", "first", "both", "off"])
def test_adapters_of_the_head_are_scored_in_tiles(make_tiny_model, state):
    """Log-probs and gradients are those of PEFT's own logits, which are never held."""
    model = adapted_head(make_tiny_model())
    if state in ("first", "both"):
        model.base_model.set_adapter(["first", "second"] if state == "both" else "first")
    rows = [torch.tensor(row) for row in ([5, 9, 33, 40, 12], [5, 9, 7, 250])]
    scorer = PackedScorer(model)
    assert scorer.reading.has_plain_head
    lengths = torch.tensor([5, 4])
    mask = torch.tensor([False, True, True, True, True, False, True, True, True])
    weights = torch.linspace(-1, 1, 7)

    def gradients(log_probs):
        (log_probs * weights).sum().backward()
        own = {name: value.grad for name, value in model.named_parameters() if "lora" in name}
        model.zero_grad(set_to_none=True)
        return own

    with model.disable_adapter() if state == "off" else contextlib.nullcontext():
        scored = scorer.score_packed(torch.cat(rows), lengths, mask).log_prob
        plain = torch.cat(
            [
                model(input_ids=row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])
                for row in rows
            ]
        ).squeeze(1)
        torch.testing.assert_close(scored, plain, atol=1e-5, rtol=1e-5)
        if state == "off":
            return
        expected, found = gradients(plain), gradients(scored)
    acting = {"first", "second"} if state == "both" else {state}
    for name, value in expected.items():
        assert (value is not None) == any(f".{one}." in name for one in acting)
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_dropout": 0.1}])
def test_a_head_that_is_more_than_two_products_is_read_by_its_own_logits(make_tiny_model, settings):
    scorer = PackedScorer(adapted_head(make_tiny_model(), **settings).eval())
    assert not scorer.reading.has_plain_head
