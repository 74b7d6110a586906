"""A model from a path: where it goes, its type, its attention and how many positions it has."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)

from torchrl_agents.models.loading import load_model
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.schema import PolicyConfig
from torchrl_modules import SamplingParameters, TransformersEngine, TransformersWrapper
from torchrl_modules.scoring.scorer import PackedScorer

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture
def path(make_tiny_model, chatml_tokenizer, tmp_path):
    make_tiny_model().bfloat16().save_pretrained(tmp_path)
    chatml_tokenizer.save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_checkpoint_of_bfloat16_is_trained_in_float32_unless_told_otherwise(path):
    model = TransformersWrapper(path).model
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.float32, "cpu")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    changed = sum(
        (a != b).sum().item() for a, b in zip(before, model.parameters(), strict=True)
    ) / sum(a.numel() for a in before)
    assert changed > 0.9, "a step of 1e-6 is lost in bfloat16"
    kept = TransformersWrapper(path, dtype="auto", device="cpu").model
    assert {p.dtype for p in kept.parameters()} == {torch.bfloat16}


def missing(weights, file):
    """Two weights are not there."""
    del weights["model.layers.1.mlp.down_proj.weight"], weights["model.norm.weight"]


def misshapen(weights, file):
    """A weight has another shape."""
    weights["model.norm.weight"] = torch.zeros(3, 5)


def infinite(weights, file):
    """A token that no prompt has is embedded as infinity."""
    weights["model.embed_tokens.weight"][-1, 0] = float("inf")


def pickled(weights, file):
    """A pickle with an object that is no tensor in the place of the file."""
    torch.save({**weights, "path": file}, file.with_name("pytorch_model.bin"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (missing, r": model.layers.1.mlp.down_proj.weight is missing; model.norm.weight is miss"),
        (misshapen, r"model.norm.weight has shape \(3, 5\), not \(\d+,\)\. Is"),
        (infinite, "model.embed_tokens.weight holds values that are not finite"),
        (pickled, "are a pickle that holds more than tensors.* Save them as safetensors"),
    ],
)
def test_a_model_with_weights_that_cannot_be_used_is_refused_by_their_names(path, damage, words):
    file = Path(path, "model.safetensors")
    weights = load_file(file)
    file.unlink()
    damage(weights, file)
    if damage is not pickled:
        save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=words):
        TransformersWrapper(path)
    if damage is misshapen:
        model_kwargs = {"ignore_mismatched_sizes": True}
        assert TransformersWrapper(path, model_kwargs=model_kwargs).model is not None
    with pytest.raises(SettingsError, match=f"policy.model=.* can't be loaded: .*{words}"):
        load_model(PolicyConfig(model=path, device="cpu"), path)


def test_weights_that_are_tied_are_not_missing(make_tiny_model, chatml_tokenizer, tmp_path):
    model = make_tiny_model()
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = True
    type(model)(config).save_pretrained(tmp_path)
    chatml_tokenizer.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    TransformersWrapper(str(tmp_path))


def test_an_attention_that_is_chosen_is_kept(path):
    eager = TransformersWrapper(path, attn_implementation="eager")
    assert eager.model.config._attn_implementation == "eager"
    assert eager.scorer.reading.layout.value == "padded"
    packed = TransformersWrapper(path, attn_implementation="sdpa")
    assert packed.scorer.packed
    ids, mask = torch.arange(4, 16), torch.arange(12) % 6 > 0
    scores = [
        policy.score_packed(ids, torch.tensor([6, 6]), mask).log_prob for policy in (eager, packed)
    ]
    torch.testing.assert_close(*scores)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param(
            {"dtype": torch.float32}, "dtype= applies only when the wrapper loads", id="dtype"
        ),
        pytest.param(
            {"device": "cpu", "model_kwargs": {}}, "device=, model_kwargs= apply only", id="two"
        ),
        pytest.param(
            {"attn_implementation": "eager"}, "attn_implementation= applies only", id="attention"
        ),
    ],
)
def test_a_model_that_is_built_is_not_loaded(make_tiny_model, chatml_tokenizer, settings, words):
    with pytest.raises(TypeError, match=words):
        TransformersWrapper(make_tiny_model(), tokenizer=chatml_tokenizer, **settings)


def test_arguments_reach_the_model_and_are_given_once(path):
    model = TransformersWrapper(path, model_kwargs={"attention_dropout": 0.25}).model
    assert model.config.attention_dropout == 0.25
    with pytest.raises(TypeError, match=r"model_kwargs has \['device_map', 'dtype'\]"):
        TransformersWrapper(path, model_kwargs={"dtype": "auto", "device_map": "auto"})


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel], ids=["compile", "DP"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_wrapper_that_would_take_no_effect_is_refused(make_tiny_model, chatml_tokenizer, wrap):
    words = r"torch.compile\(model\) would take no effect|DataParallel cuts"
    with pytest.raises(TypeError, match=words):
        TransformersWrapper(wrap(make_tiny_model()), tokenizer=chatml_tokenizer)


# Positions ----------------------------------------------------------------------------------------


def test_rows_longer_than_the_models_positions_are_refused_at_construction(make_tiny_model):
    model = make_tiny_model(max_position_embeddings=32)
    assert TransformersEngine(model, max_model_len=32).max_model_len == 32
    with pytest.raises(ValueError, match=r"max_model_len=33, but .* positions for 32 tokens"):
        TransformersEngine(model, max_model_len=33)


def test_learnt_positions_begin_behind_the_padding_index():
    settings = {**SMALL, "pad_token_id": 1, "max_position_embeddings": 20}
    model = RobertaForCausalLM(RobertaConfig(**settings, is_decoder=True)).eval()
    engine = TransformersEngine(model)
    assert engine.max_model_len == 18
    params = SamplingParameters(max_new_tokens=4, stop_token_ids=())
    fits, beyond = engine.generate([[5] * 14, [5] * 15], params)
    assert (fits.finish_reason, beyond.finish_reason) == ("length", "error")


def phi3():
    factors = [1.0 + i for i in range(4)]
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Phi3ForCausalLM(
            Phi3Config(
                **SMALL,
                max_position_embeddings=64,
                original_max_position_embeddings=16,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 10000.0,
                    "short_factor": factors,
                    "long_factor": [4 * x for x in factors],
                    "original_max_position_embeddings": 16,
                },
            )
        ).eval()


def longrope_scores(lengths, max_model_len):
    rows = [torch.arange(1, n + 1) for n in lengths]
    scorer = PackedScorer(phi3(), max_model_len=max_model_len)
    mask = torch.cat([torch.arange(n) > 0 for n in lengths])
    scores = scorer.score_packed(torch.cat(rows), torch.tensor(lengths), mask).log_prob
    return scores.split([n - 1 for n in lengths])


def test_rotary_factors_that_change_with_the_length_are_chosen_once():
    with pytest.raises(ValueError, match="more than 16 tokens with other rotary factors"):
        PackedScorer(phi3())
    ids = torch.arange(1, 10)[None]
    short = phi3()(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(longrope_scores([9], 16)[0], short)

    alone = longrope_scores([9], 64)[0]
    assert (alone - short).abs().max() > 0.01, "the long factors are others"
    together = longrope_scores([9, 20], 64)
    torch.testing.assert_close(together[0], alone, msg="a neighbour changes nothing")
    # What a token is worth does not depend on how its row goes on: past the change, too.
    torch.testing.assert_close(together[1][:8], alone)


def test_sampled_rows_that_grow_past_the_change_keep_their_log_probs():
    model = phi3()
    engine = TransformersEngine(model, max_model_len=64)
    params = SamplingParameters(max_new_tokens=12, stop_token_ids=())
    torch.manual_seed(0)
    (drawn,) = engine.generate([[5] * 10], params)
    ids = torch.tensor([5] * 10 + drawn.ids)
    scorer = PackedScorer(model, max_model_len=64)
    scores = scorer.score_packed(ids, torch.tensor([22]), torch.arange(22) > 9).log_prob
    torch.testing.assert_close(scores, torch.tensor(drawn.log_probs), rtol=0, atol=1e-5)


def test_short_factors_are_for_short_rows():
    model = phi3()
    scorer = PackedScorer(model, max_model_len=16)
    with pytest.raises(ValueError, match=r"a row has 17 tokens, but .* rows of at most 16"):
        scorer.score_packed(torch.arange(17), torch.tensor([17]), torch.arange(17) > 0)
    PackedScorer(model, max_model_len=17)
    with pytest.raises(ValueError, match="another policy has set this model to its long ones"):
        PackedScorer(model, max_model_len=16)


# Capped attention scores --------------------------------------------------------------------------


def gemma2(attention):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        config = Gemma2Config(
            **SMALL,
            head_dim=8,
            sliding_window=4,
            query_pre_attn_scalar=8,
            attn_logit_softcapping=0.3,
            final_logit_softcapping=2.0,
        )
        return Gemma2ForCausalLM._from_config(config, attn_implementation=attention).eval()


def test_capped_scores_are_capped_by_sampler_and_scorer_though_sdpa_leaves_it_out():
    ids = torch.arange(3, 15)

    def log_probs(attention):
        return gemma2(attention)(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)

    reference, kinds = log_probs("eager"), ["eager"]
    if Gemma2ForCausalLM._supports_sdpa:  # Transformers refuses it from 5.21 on
        assert (reference - log_probs("sdpa")).abs().max() > 1e-3
        kinds.append("sdpa")
    own = reference.gather(1, ids[1:, None]).squeeze(1)
    scorer = PackedScorer(gemma2(kinds[-1]))
    assert scorer.packed
    scores = scorer.score_packed(ids, torch.tensor([12]), torch.arange(12) > 0).log_prob
    torch.testing.assert_close(scores, own, rtol=0, atol=1e-5)

    for attention in kinds:
        engine = TransformersEngine(gemma2(attention))
        params = SamplingParameters(max_new_tokens=6, temperature=0.0, stop_token_ids=())
        prompts = [ids.tolist(), ids[:5].tolist()]
        for prompt, drawn in zip(prompts, engine.generate(prompts, params), strict=True):
            row = torch.tensor([*prompt, *drawn.ids])
            with torch.no_grad():
                logits = gemma2("eager")(input_ids=row[None]).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, row[len(prompt) :, None]).squeeze(1)
            torch.testing.assert_close(torch.tensor(drawn.log_probs), expected, rtol=0, atol=1e-5)


def test_sdpa_that_is_asked_for_where_scores_are_capped_is_refused(chatml_tokenizer, tmp_path):
    gemma2("eager").save_pretrained(tmp_path)
    chatml_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"caps its attention scores at 0\.3"):
        TransformersWrapper(str(tmp_path), attn_implementation="sdpa")
