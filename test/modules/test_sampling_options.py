"""Penalties, bias, least tokens, seeds and stop strings: what is drawn, reported and scored."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_reference import OPTIONS, STOPS, turn_log_probs
from tensordict import TensorDict, lazy_stack
from torchrl.envs.utils import ExplorationType, set_exploration_type

from objectives import GRPOLoss
from torchrl_data.conversation import Conversations
from torchrl_data.conversation_io import write_conversations
from torchrl_modules import SamplingParameters, TransformersEngine, TransformersWrapper
from torchrl_modules.engines.blocking_engine import BlockingEngine
from torchrl_modules.engines.drawn_tokens import drawn_at
from torchrl_modules.engines.open_async import open_async
from torchrl_modules.sampling import distribution as sampling_distribution
from torchrl_modules.sampling.stop_strings import StopStrings

PROMPTS = [[5], [9, 8, 7, 6, 5, 4, 3], [20, 21, 22], [40] * 12] * 3


def draw(model, params, prompts=PROMPTS, seed=0, **kwargs):
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return TransformersEngine(model).generate(prompts, params, **kwargs)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_log_probs_are_those_of_the_distribution_drawn_from(make_tiny_model, options):
    model = make_tiny_model()
    params = SamplingParameters(max_new_tokens=16, stop_token_ids=STOPS, **options)
    rows = draw(model, params)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        expected = turn_log_probs(model, params, prompt, row.ids)
        torch.testing.assert_close(
            torch.tensor(row.log_probs).double(), expected.double(), rtol=0, atol=1e-5
        )  # float32 model, sums in another order
        stops = [i for i, token in enumerate(row.ids) if token in STOPS]
        assert stops in ([], [len(row.ids) - 1])
        assert all(i >= params.min_tokens for i in stops)
    if options.get("logit_bias", {}).get(2):
        assert any(row.finish_reason == "stop" for row in rows), "no stop token was in question"


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_ratio_of_unchanged_weights_is_one_over_several_turns(
    make_tiny_model, chatml_tokenizer, monkeypatch, options
):
    monkeypatch.setattr(sampling_distribution, "_TILE_BYTES", 4 * 5 * 360)  # several tiles
    torch.manual_seed(0)
    policy = TransformersWrapper(
        make_tiny_model(),
        tokenizer=chatml_tokenizer,
        generate_kwargs={"max_new_tokens": 9, **options},
        untempered_log_probs=True,
        entropy=True,
    )
    full = Conversations.from_messages(
        [[{"role": "user", "content": text}] for text in ("hi", "a longer question", "x")]
    )
    for question in ("and then?", None):
        _, full, _ = policy.respond(full)
        if question is not None:
            full = full.append_messages([[{"role": "user", "content": question}]] * 3)
    batch = TensorDict(batch_size=[3])
    write_conversations(batch, "full", full)
    policy._write_turns(batch, full, full)
    stored = {
        name: [row[name, "full"].clone() for row in batch.unbind(0)]
        for name in ("log_probs", "entropy", "untempered_log_probs")
    }
    policy.generate = False
    scored = policy(batch.select("tokens", "masks"))
    for name, rows in stored.items():
        for row, expected in zip(scored.unbind(0), rows, strict=True):
            torch.testing.assert_close(row[name, "full"], expected, rtol=1e-4, atol=2e-5)
    distribution = policy.get_dist(batch.select("tokens", "masks"))
    for i, expected in enumerate(stored["log_probs"]):
        ids = torch.zeros(distribution.mask.shape, dtype=torch.int64)
        ids[i, : len(expected)] = batch[i]["tokens", "full"]
        found = distribution.log_prob(ids)[i, : len(expected)]
        torch.testing.assert_close(found.detach(), expected, rtol=1e-4, atol=2e-5)
    rows = [row.select("tokens", "masks", "log_probs") for row in batch.unbind(0)]
    for row, log_probs in zip(rows, stored["log_probs"], strict=True):
        row["log_probs", "full"] = log_probs
        row["advantage"] = torch.ones(1, 1)
    output = GRPOLoss(policy, temperature=policy.temperature or 1.0)(lazy_stack(rows))
    torch.testing.assert_close(output.ratio_mean, torch.tensor(1.0), rtol=0, atol=2e-5)
    output.loss_objective.backward()
    gradients = [p.grad for p in policy.model.parameters()]
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_a_penalty_is_what_makes_the_difference(make_tiny_model):
    """Without the history the scores would be wrong by more than the tests' tolerance."""
    model = make_tiny_model()
    plain = SamplingParameters(max_new_tokens=16, stop_token_ids=STOPS)
    for name in ("repetition penalty", "presence penalty", "frequency penalty", "logit bias"):
        params = SamplingParameters(max_new_tokens=16, stop_token_ids=STOPS, **OPTIONS[name])
        gaps = [
            (turn_log_probs(model, plain, prompt, row.ids) - torch.tensor(row.log_probs)).abs()
            for prompt, row in zip(PROMPTS, draw(model, params), strict=True)
        ]
        assert torch.cat(gaps).max() > 0.01, name


def test_a_budget_below_the_least_tokens_ends_the_turn_before_a_stop_token(make_tiny_model):
    params = SamplingParameters(
        max_new_tokens=8, min_tokens=6, stop_token_ids=STOPS, logit_bias={2: 100.0}
    )
    rows = draw(make_tiny_model(), params, max_new_tokens=[3, 8] * 6)
    assert [row.finish_reason for row in rows] == ["length", "stop"] * 6
    assert [len(row.ids) for row in rows] == [3, 7] * 6


def test_a_seed_repeats_a_call_and_leaves_the_generator_alone(make_tiny_model):
    model = make_tiny_model()

    def ids(seed, global_seed):
        params = SamplingParameters(max_new_tokens=6, stop_token_ids=(), seed=seed)
        return [row.ids for row in draw(model, params, [PROMPTS[1]] * 4, seed=global_seed)]

    first = ids(3, 0)
    assert ids(3, 1) == first != ids(4, 0)
    assert len({tuple(row) for row in first}) == 4, "rows of one prompt differ"
    torch.manual_seed(0)
    TransformersEngine(model).generate([[5]], SamplingParameters(max_new_tokens=2, seed=1))
    after = torch.rand(())
    torch.manual_seed(0)
    assert torch.rand(()) == after


TEXTS = st.text(alphabet="ab \n🙂é<|>_imend", min_size=1, max_size=12)


@given(
    text=st.text(alphabet="ab \n🙂é<|>_imend", max_size=40),
    stops=st.lists(TEXTS, min_size=1, max_size=3),
    min_tokens=st.integers(0, 5),
    noise=st.lists(st.integers(0, 336), max_size=6),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_response_is_cut_at_the_token_that_completes_a_stop_string(
    chatml_tokenizer, text, stops, min_tokens, noise
):
    ids = chatml_tokenizer(text, add_special_tokens=False)["input_ids"] + noise
    ids += chatml_tokenizer(stops[0], add_special_tokens=False)["input_ids"]

    def decode(count):
        return chatml_tokenizer.decode(
            ids[:count], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    expected = None
    before = len(decode(min_tokens))
    for count in range(min_tokens + 1, len(ids) + 1):
        said = decode(count)
        ends = [
            begin + len(stop)
            for stop in stops
            for begin in range(len(said))
            if said.startswith(stop, begin)
        ]
        if any(end > before for end in ends):
            expected = count
            break
    finder = StopStrings(chatml_tokenizer, stops, min_tokens)
    assert finder.num_kept(ids) == expected
    if expected is not None:
        assert finder.just_ended(ids[:expected])
        assert not any(finder.just_ended(ids[:count]) for count in range(expected))


def test_a_stop_string_ends_a_turn_and_the_ids_are_those_that_were_drawn(
    make_tiny_model, chatml_tokenizer
):
    model = make_tiny_model()
    free = draw(model, SamplingParameters(max_new_tokens=12, stop_token_ids=()))
    stop = chatml_tokenizer.decode(free[1].ids[3:5])
    params = SamplingParameters(max_new_tokens=12, stop_token_ids=(), stop=(stop,), seed=None)
    with pytest.raises(ValueError, match=r"can't find stop=.*with_tokenizer"):
        draw(model, params)
    with pytest.raises(ValueError, match="stop must be texts"):
        SamplingParameters(stop="abc")
    (row,) = draw(model, SamplingParameters(temperature=0.0, stop_token_ids=()), [PROMPTS[1]])
    stop = chatml_tokenizer.decode(row.ids[3:5])
    params = SamplingParameters(temperature=0.0, stop_token_ids=(), stop=(stop,))
    (cut,) = draw(model, params.with_tokenizer(chatml_tokenizer), [PROMPTS[1]])
    assert cut.finish_reason == "stop"
    assert cut.ids == row.ids[: len(cut.ids)]
    torch.testing.assert_close(cut.log_probs, row.log_probs[: len(cut.ids)])
    assert stop in chatml_tokenizer.decode(cut.ids)
    assert stop not in chatml_tokenizer.decode(cut.ids[:-1])
    policy = TransformersWrapper(
        model, tokenizer=chatml_tokenizer, generate_kwargs={"stop": stop, "temperature": 0}
    )
    assert policy.sampling.stop_matcher is not None


@pytest.mark.parametrize(
    ("given_kwargs", "expected"),
    [
        pytest.param({"max_tokens": 7, "top_k": None}, {"max_new_tokens": 7}, id="vLLM"),
        pytest.param({"n": 1, "use_beam_search": False, "logprobs": 0}, {}, id="that say nothing"),
        pytest.param(
            {"max_completion_length": 9, "repetition_penalty": 1.1, "min_p": None},
            {"max_new_tokens": 9, "repetition_penalty": 1.1},
            id="TRL",
        ),
        pytest.param(
            {"do_sample": True, "min_new_tokens": 2, "stop_strings": ["a"]},
            {"min_tokens": 2, "stop": ("a",)},
            id="Transformers",
        ),
        pytest.param({"logit_bias": {"5": 1.0}}, {"logit_bias": {5: 1.0}}, id="JSON"),
        pytest.param({"stop": "ab"}, {"stop": ("ab",)}, id="one stop string"),
    ],
)
def test_other_libraries_spellings(given_kwargs, expected):
    assert SamplingParameters.from_kwargs(given_kwargs) == SamplingParameters(**expected)


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        pytest.param({"n": 4}, TypeError, "Use num_samples of the wrapper", id="n"),
        pytest.param({"num_return_sequences": 4}, TypeError, "num_samples", id="HF's n"),
        pytest.param({"best_of": 4}, TypeError, "num_samples.*TopKRewardSelector", id="best of"),
        pytest.param({"use_beam_search": True}, TypeError, "num_samples", id="beams"),
        pytest.param({"num_beams": 4}, TypeError, "num_samples", id="HF's beams"),
        pytest.param({"do_sample": False}, TypeError, "temperature=0", id="greedy"),
        pytest.param({"logprobs": 5}, TypeError, "generate=False", id="log-probs"),
        pytest.param({"bad_words": ["x"]}, TypeError, "logit_bias", id="bad words"),
        pytest.param(
            {"include_stop_str_in_output": False}, TypeError, "always kept", id="without the stop"
        ),
        pytest.param(
            {"repetition_penalty": 0.0},
            ValueError,
            r"repetition_penalty must be a finite number in \(0, inf\)",
            id="repetition 0",
        ),
        pytest.param({"presence_penalty": 3.0}, ValueError, r"\[-2, 2\]", id="presence"),
        pytest.param({"frequency_penalty": float("nan")}, ValueError, "frequency", id="NaN"),
        pytest.param({"min_tokens": 300}, ValueError, "max_new_tokens 256", id="min > max"),
        pytest.param({"logit_bias": {5: 200}}, ValueError, r"logit_bias\[5\]", id="bias"),
        pytest.param({"logit_bias": {-1: 1}}, ValueError, "logit_bias", id="no token"),
        pytest.param({"seed": -1}, ValueError, "seed", id="seed"),
        pytest.param({"stop": ["a", ""]}, ValueError, "stop must be texts", id="empty stop"),
    ],
)
def test_what_can_not_be_had_says_what_to_write_instead(kwargs, error, words):
    with pytest.raises(error, match=words):
        SamplingParameters.from_kwargs(kwargs)


def test_a_bias_beyond_the_vocabulary_is_refused(make_tiny_model, chatml_tokenizer):
    with pytest.raises(ValueError, match=r"logit_bias \[99999\] are not in the vocabulary"):
        TransformersWrapper(
            make_tiny_model(),
            tokenizer=chatml_tokenizer,
            generate_kwargs={"logit_bias": {99999: 1.0}},
        )


@settings(max_examples=50, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-9, 1e-3, 0.3, 1.0]), min_size=1, max_size=700),
    uniform=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=4),
)
def test_a_number_draws_the_token_at_which_the_sum_of_probabilities_passes_it(weights, uniform):
    p = torch.tensor([*weights, 0.5, 0.0], dtype=torch.float64)
    p = (p / p.sum()).float().expand(len(uniform), -1)
    ends = p[0].double().cumsum(0)
    tokens = drawn_at(p, torch.tensor(uniform, dtype=torch.float64))
    assert tokens.shape == (len(uniform), 1)
    for token, number in zip(tokens[:, 0].tolist(), uniform, strict=True):
        assert p[0, token] > 0
        begin = ends[token] - p[0, token]
        assert begin - 1e-6 <= number * ends[-1] <= ends[token] + 1e-6


def test_a_small_probability_behind_a_large_one_is_not_lost():
    p = torch.tensor([[1.0, 1e-9, 0.0]])  # their sum in single precision is 1
    last = torch.tensor([1 - 1e-10], dtype=torch.float64)
    assert drawn_at(p, last).item() == 1


def test_logits_that_are_not_finite_are_refused(make_tiny_model):
    model = make_tiny_model()
    engine = TransformersEngine(model)
    params = SamplingParameters(max_new_tokens=2, stop_token_ids=())
    engine.generate([[1, 2]], params)
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(RuntimeError, match="logits that are not finite"):
        engine.generate([[1, 2]], params)


# A policy's settings that are set later.


def test_sampling_that_is_set_later_is_what_a_new_policy_draws_from(
    make_tiny_model, chatml_tokenizer
):
    def build(**sampling):
        kwargs = {"max_new_tokens": 6, "seed": 3, **sampling}
        return TransformersWrapper(
            make_tiny_model(), tokenizer=chatml_tokenizer, generate_kwargs=kwargs
        )

    asked = Conversations.from_messages([[{"role": "user", "content": "hi"}]] * 3)
    policy, want = build(), build(temperature=0.3)
    policy.temperature = 0.3
    assert policy.sampling == want.sampling
    policy.sampling = SamplingParameters(max_new_tokens=2, stop=("hello",))
    assert policy.sampling.stop_token_ids == want.sampling.stop_token_ids
    _, full, _ = policy.respond(asked)
    assert all(int(full.assistant_mask(i).sum()) <= 2 for i in range(3))
    assert policy.sampling.stop_matcher is not None, "stop strings are found"


@pytest.mark.parametrize(
    ("name", "value", "kind", "hint"),
    [
        ("temperature", -1.0, ValueError, "temperature must be a finite number"),
        ("sampling", {"temperature": 1.0}, TypeError, r"sampling takes SamplingParameters"),
        ("sampling", SamplingParameters(stop_token_ids=(9999,)), ValueError, "not in the vocab"),
        ("num_samples", 0, ValueError, "num_samples must be a whole number"),
        ("generate_kwargs", {"top_k": 3}, AttributeError, "generate_kwargs is fixed.*sampling"),
        ("input_mode", "text", AttributeError, "input_mode is fixed when it is made"),
        (
            "temprature",
            1.0,
            AttributeError,
            "no attribute 'temprature'.*Did you mean 'temperature'",
        ),
    ],
)
def test_what_a_policy_can_not_take_later_is_refused(
    make_tiny_model, chatml_tokenizer, name, value, kind, hint
):
    policy = TransformersWrapper(make_tiny_model(), tokenizer=chatml_tokenizer)
    before = policy.sampling
    with pytest.raises(kind, match=hint):
        setattr(policy, name, value)
    assert policy.sampling == before


# End tokens that the model alone names.


def with_ends(model, *ends):
    model.generation_config.eos_token_id = list(ends)
    return model


@pytest.mark.parametrize("way", ["batch", "continuous"])
def test_a_token_that_the_generation_config_names_ends_a_turn(
    make_tiny_model, chatml_tokenizer, way
):
    end, other, unknown = 5, 9, 10_000
    model = with_ends(make_tiny_model(), end, other, unknown)
    engine = TransformersEngine(model)
    policy = TransformersWrapper(
        model,
        tokenizer=chatml_tokenizer,
        generate_kwargs={"max_new_tokens": 6, "logit_bias": {other: 100.0}},
    )
    assert set(policy.sampling.stop_token_ids) >= {end, other, policy.encoder.end_of_turn_id}
    if way == "continuous":
        policy.engine = BlockingEngine(open_async(engine))
    asked = Conversations.from_messages([[{"role": "user", "content": "hi"}]] * 2)
    _, full, reasons = policy.respond(asked)
    assert reasons == ["stop", "stop"]
    for row in range(2):
        assert full.token_ids(row)[full.assistant_mask(row)].tolist() == [other]
        assert full.last_message(row)["content"] == "", "the end is no part of what is said"
    policy.sampling = SamplingParameters(
        max_new_tokens=6, logit_bias={other: 100.0}, stop_token_ids=(end,)
    )
    assert policy.respond(asked)[2] == ["length", "length"], "what is asked for counts alone"
    getattr(policy.engine, "close", lambda: None)()


def test_an_end_that_the_template_writes_within_a_turn_ends_none_and_is_told(
    make_tiny_model, chatml_tokenizer, caplog
):
    inside, header = chatml_tokenizer.convert_tokens_to_ids(["<tool_call>", "<|im_start|>"])
    model = with_ends(make_tiny_model(), inside, header, 9)
    policy = TransformersWrapper(model, tokenizer=chatml_tokenizer)
    assert set(policy.sampling.stop_token_ids) & {inside, header, 9} == {9}
    assert f"<tool_call> ({inside})" in caplog.text
    assert f"<|im_start|> ({header})" in caplog.text


# TorchRL's exploration type.


@pytest.mark.parametrize("way", ["batch", "continuous"])
def test_a_deterministic_exploration_is_greedy(make_tiny_model, chatml_tokenizer, way):
    def build(**sampling):
        kwargs = {"max_new_tokens": 8, "stop_token_ids": (), **sampling}
        policy = TransformersWrapper(
            make_tiny_model(),
            tokenizer=chatml_tokenizer,
            generate_kwargs=kwargs,
            untempered_log_probs=True,
        )
        if way == "continuous":
            policy.engine = BlockingEngine(open_async(policy.engine))
        return policy

    def turns(policy):
        asked = Conversations.from_messages([[{"role": "user", "content": t}] for t in ("hi", "x")])
        _, full, _ = policy.respond(asked)
        getattr(policy.engine, "close", lambda: None)()
        rows = range(2)
        masks = [full.assistant_mask(i) for i in rows]
        return [
            (full.token_ids(i)[m].tolist(), full.log_probs(i)[m], full.extra(i))
            for i, m in zip(rows, masks, strict=True)
        ]

    want = turns(build(temperature=0.0))
    drawn = turns(build(temperature=0.7))
    for kind in (ExplorationType.DETERMINISTIC, ExplorationType.MODE):
        with set_exploration_type(kind):
            got = turns(build(temperature=0.7))
        for (ids, log_probs, extra), (own, own_log_probs, own_extra) in zip(got, want, strict=True):
            assert ids == own
            torch.testing.assert_close(log_probs, own_log_probs)
            torch.testing.assert_close(extra, own_extra)
    assert [ids for ids, _, _ in drawn] != [ids for ids, _, _ in want]
    with set_exploration_type(ExplorationType.RANDOM):
        assert build(temperature=0.7).drawn_by.temperature == 0.7
    with (
        set_exploration_type(ExplorationType.MEAN),
        pytest.raises(ValueError, match="tokens have no mean"),
    ):
        turns(build())
