"""The log-prob of every sampled token is that of the distribution that it was drawn from."""

import math

import pytest
import torch

from torchrl_modules import SamplingParameters, TransformersEngine
from torchrl_modules.sampling.distribution import warped_log_softmax

PROMPTS = [[5], [9, 8, 7, 6, 5, 4, 3], [20, 21, 22], [40] * 12]


def sample(
    model, prompts=PROMPTS, *, seed=0, stops=(2,), max_new_tokens=12, budgets=None, **kwargs
):
    params = SamplingParameters(stop_token_ids=stops, max_new_tokens=max_new_tokens, **kwargs)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return TransformersEngine(model).generate(prompts, params, max_new_tokens=budgets)


@torch.no_grad()
def step_logits(model, prompt, response):
    """Float64 logits that each token of a response was drawn from, one row, no cache."""
    logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0].double()
    return logits[len(prompt) - 1 : -1]


def keep_top_k(logits, k):
    return logits >= logits.sort(descending=True).values[k - 1]


def keep_top_p(logits, p):
    """The smallest set of most likely tokens whose probability is at least p."""
    order = logits.argsort(descending=True)
    total, keep = 0.0, torch.zeros_like(logits, dtype=torch.bool)
    for token in order.tolist():
        keep[token] = True
        total += logits.softmax(-1)[token].item()
        if total >= p:
            break
    return keep


def keep_min_p(logits, p):
    probability = logits.softmax(-1)
    return probability >= p * probability.max()


@pytest.mark.parametrize(
    ("settings", "keep"),
    [
        pytest.param({}, None, id="temperature 1"),
        pytest.param({"temperature": 0.7}, None, id="temperature 0.7"),
        pytest.param({"top_k": 5}, lambda x: keep_top_k(x, 5), id="top-k"),
        pytest.param({"top_p": 0.8}, lambda x: keep_top_p(x, 0.8), id="top-p"),
        pytest.param({"min_p": 0.2}, lambda x: keep_min_p(x, 0.2), id="min-p"),
        pytest.param(
            {"min_p": 0.2, "top_p": 0.8},
            lambda x: keep_top_p(x.masked_fill(~keep_min_p(x, 0.2), -math.inf), 0.8),
            id="min-p comes before top-p, which sees what is left",
        ),
        pytest.param(
            {"temperature": 0.7, "top_p": 0.8},
            lambda x: keep_top_p(x, 0.8),
            id="the temperature comes before top-p",
        ),
    ],
)
def test_every_token_has_the_log_prob_that_it_was_drawn_with(make_tiny_model, settings, keep):
    model = make_tiny_model()
    temperature = settings.get("temperature", 1.0)
    for prompt, generation in zip(PROMPTS, sample(model, **settings), strict=True):
        logits = step_logits(model, prompt, generation.ids) / temperature
        expected = []
        for token, row in zip(generation.ids, logits, strict=True):
            kept = row if keep is None else row.masked_fill(~keep(row), -math.inf)
            expected.append(kept.log_softmax(-1)[token])
        torch.testing.assert_close(
            torch.tensor(generation.log_probs), torch.stack(expected).float(), rtol=0, atol=1e-5
        )  # float32 model, sums in another order
        assert min(generation.log_probs) < -0.01, "nothing was drawn at random"


def test_top_p_counts_what_min_p_has_left():
    # min-p keeps 0.4 and 0.3, which are 4/7 and 3/7 then: the first is half of it already.
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    log_p = warped_log_softmax(logits, SamplingParameters(min_p=0.6, top_p=0.5))
    assert log_p.exp().tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_tokens_are_drawn_from_the_model(make_tiny_model):
    model = make_tiny_model()
    drawn = [g.ids[0] for g in sample(model, [PROMPTS[1]] * 4000, max_new_tokens=1)]
    probability = step_logits(model, PROMPTS[1], [0])[0].softmax(-1)
    counts = torch.bincount(torch.tensor(drawn), minlength=len(probability))
    # Chi-square over the tokens expected often enough: mean n, standard deviation sqrt(2 n).
    often = probability * 4000 > 5
    expected = probability[often] * 4000
    statistic = ((counts[often] - expected) ** 2 / expected).sum().item()
    assert statistic < often.sum() + 5 * math.sqrt(2 * often.sum())


def test_temperature_zero_takes_the_most_likely_token(make_tiny_model):
    model = make_tiny_model()
    for prompt, generation in zip(PROMPTS, sample(model, temperature=0.0), strict=True):
        logits = step_logits(model, prompt, generation.ids)
        assert generation.ids == logits.argmax(-1).tolist()


def test_a_row_is_sampled_as_if_it_were_alone(make_tiny_model):
    model = make_tiny_model()
    together = sample(model, temperature=0.0)
    for prompt, generation in zip(PROMPTS, together, strict=True):
        assert sample(model, [prompt], temperature=0.0)[0].ids == generation.ids


def test_a_turn_ends_with_its_stop_token_or_at_its_own_budget(make_tiny_model):
    model = make_tiny_model()
    free = sample(model, temperature=0.0, stops=(), budgets=[3, 12, 1, 7])
    assert [len(g.ids) for g in free] == [3, 12, 1, 7]
    assert [len(g.log_probs) for g in free] == [3, 12, 1, 7]
    assert {g.finish_reason for g in free} == {"length"}

    stop = free[1].ids[4]
    stopped = sample(model, [PROMPTS[1]], temperature=0.0, stops=(stop,))[0]
    end = free[1].ids.index(stop) + 1
    assert stopped.ids == free[1].ids[:end], "the stop token is part of the response"
    assert len(stopped.log_probs) == end
    assert stopped.finish_reason == "stop"


def test_every_stop_token_stops_and_what_an_ended_row_draws_on_is_not_counted(make_tiny_model):
    model = make_tiny_model()
    free = sample(model, temperature=0.0, stops=())
    first, second = free[0].ids[3], free[1].ids[5]
    stopped = sample(model, temperature=0.0, stops=(first, second))
    ends = []
    for row, alone in zip(stopped, free, strict=True):
        ends.append(next((i for i, x in enumerate(alone.ids) if x in (first, second)), None))
        assert row.ids == alone.ids[: len(alone.ids) if ends[-1] is None else ends[-1] + 1]
        assert row.finish_reason == ("length" if ends[-1] is None else "stop")
    assert ends[0] == 3
    assert ends[1] == 5

    # Rows whose budget has ended stay in the batch while few have: here beside three that run.
    stop = free[0].ids[2]
    budgets = [2, 12, 12, 12]
    short = sample(
        model, [PROMPTS[0], *PROMPTS[1:]], temperature=0.0, stops=(stop,), budgets=budgets
    )
    assert short[0].ids == free[0].ids[:2], "it would have drawn the stop token next"
    assert short[0].finish_reason == "length"
    assert len(short[0].log_probs) == 2


def test_rows_that_can_not_be_served_are_marked_and_the_others_served(make_tiny_model):
    model = make_tiny_model(max_position_embeddings=32)
    outside = model.config.vocab_size
    prompts = [[], PROMPTS[1], [3] * 21, [outside], [-1], PROMPTS[2], [3] * 20]
    generations = sample(model, prompts, temperature=0.0)
    reasons = [g.finish_reason for g in generations]
    assert [i for i, reason in enumerate(reasons) if reason == "error"] == [0, 2, 3, 4]
    for i, words in {0: "empty", 2: "takes 32", 3: "vocabulary", 4: "vocabulary"}.items():
        assert words in generations[i].error
        assert generations[i].ids == generations[i].log_probs == []
    alone = sample(model, [prompts[1], prompts[5], prompts[6]], temperature=0.0)
    assert [generations[i].ids for i in (1, 5, 6)] == [g.ids for g in alone]
    assert len(generations[6].ids) == 12, "20 + 12 tokens just fit into 32"
    assert sample(model, [[]])[0].finish_reason == "error", "no row at all can be served"


def test_generating_changes_neither_mode_nor_settings_of_the_model(make_tiny_model):
    model = make_tiny_model().train()
    model.generation_config.top_k = 1
    greedy = sample(model.eval(), temperature=0.0, stops=())
    model.train()
    seeds = [sample(model, stops=(), seed=seed) for seed in range(3)]
    model.model.layers[0].eval()
    sample(model)
    modes = {name: module.training for name, module in model.named_modules()}
    kept = {name for name in modes if name.startswith("model.layers.0")}
    assert {name for name, training in modes.items() if not training} == kept
    assert all(ids != [g.ids for g in greedy] for ids in ([g.ids for g in s] for s in seeds)), (
        "the model's own top_k=1 took part"
    )


def test_the_same_seed_draws_the_same_tokens(make_tiny_model):
    model = make_tiny_model()
    assert sample(model, seed=3) == sample(model, seed=3)
    assert sample(model, seed=3) != sample(model, seed=4)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        pytest.param({"temprature": 1.0}, TypeError, "'temprature'.*'temperature'", id="misspelt"),
        pytest.param({"temperature": -1.0}, ValueError, "temperature must be", id="temperature"),
        pytest.param({"temperature": math.nan}, ValueError, "temperature must be", id="NaN"),
        pytest.param(
            {"top_p": 0.0}, ValueError, r"top_p must be a finite number in \(0, 1\]", id="top_p"
        ),
        pytest.param(
            {"top_k": -1}, ValueError, "top_k must be a whole number, at least 0", id="top_k"
        ),
        pytest.param(
            {"min_p": 1.5}, ValueError, r"min_p must be a finite number in \[0, 1\]", id="min_p"
        ),
        pytest.param(
            {"max_tokens": 0},
            ValueError,
            "max_new_tokens must be a whole number, at least 1",
            id="0",
        ),
        pytest.param(
            {"max_tokens": 3, "max_new_tokens": 3}, ValueError, "given twice", id="two spellings"
        ),
    ],
)
def test_wrong_sampling_parameters_are_named(settings, error, words):
    with pytest.raises(error, match=words):
        SamplingParameters.from_kwargs(settings)


def test_a_token_that_was_drawn_is_never_left_out():
    # The weights have moved since it was drawn: of 1, 2 and 5 parts, top-k alone would keep the 5.
    logits = torch.tensor([[1.0, 2.0, 5.0]]).log()
    log_p = warped_log_softmax(logits, SamplingParameters(top_k=1), torch.tensor([0]))
    torch.testing.assert_close(log_p.exp(), torch.tensor([[1 / 6, 0.0, 5 / 6]]))
