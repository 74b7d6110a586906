"""Sampling by the client of Tinker: tokens, log-probs, stops, seeds, and whose weights draw."""

import threading
import time

import pytest
import tinker
import torch
from tinker import types

from torchrl_agents.training_service.adapted_model import AdaptedModel
from torchrl_agents.training_service.device_thread import DeviceJob
from torchrl_modules.engines.joined_engine import JoinedEngine

from .conftest import NAME
from .test_training import ADAM, datum

PROMPT = [5, 9, 33, 40, 12, 7]
INPUT = types.ModelInput.from_ints(PROMPT)


def params(**settings):
    return types.SamplingParams(**{"max_tokens": 8, "seed": 3, "stop": [], **settings})


def trained(run, steps=3):
    for _ in range(steps):
        run.forward_backward([datum(PROMPT, 1)], "cross_entropy")
        run.optim_step(ADAM)
    return run


def log_probs_of(run, ids):
    told = run.forward([datum(ids, 1)], "cross_entropy").result().loss_fn_outputs[0]
    return told["logprobs"].to_torch()


def test_sampled_log_probs_are_those_that_training_computes(served):
    """So the ratio is 1 at the first step, here over four sequences of a trained adapter."""
    run = trained(served.client.create_lora_training_client(NAME, rank=4, seed=1).result())
    sampler = run.save_weights_and_get_sampling_client().result()
    told = sampler.sample(INPUT, 4, params()).result()
    assert len({tuple(one.tokens) for one in told.sequences}) > 1
    assert len({one.sequence_id for one in told.sequences}) == 4
    for one in told.sequences:
        assert (len(one.tokens), one.stop_reason) == (8, "length")
        now = log_probs_of(run, PROMPT + one.tokens)[len(PROMPT) - 1 :]
        torch.testing.assert_close(torch.tensor(one.logprobs), now, atol=2e-5, rtol=1e-5)


def test_seeds_name_what_is_drawn_whatever_is_drawn_beside_it(served):
    sampler = served.client.create_sampling_client(base_model=NAME).result()
    alone = sampler.sample(INPUT, 2, params()).result()
    other = types.ModelInput.from_ints([8, 9, 10])
    beside = [sampler.sample(other, 3, params(seed=9)), sampler.sample(INPUT, 2, params())]
    beside.append(sampler.sample(INPUT, 2, params(seed=4)))
    _, again, fourth = (one.result() for one in beside)
    drawn = [[one.tokens for one in told.sequences] for told in (alone, again, fourth)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_requests_that_wait_are_drawn_at_once(served, monkeypatch):
    calls, engine = [], served.model._engine
    generate = engine.generate

    def counted(prompts, *arguments, **settings):
        calls.append(len(prompts))
        return generate(prompts, *arguments, **settings)

    monkeypatch.setattr(type(engine), "generate", staticmethod(counted))
    sampler = served.client.create_sampling_client(base_model=NAME).result()
    asked = [sampler.sample(INPUT, 2, params(seed=i)) for i in range(10)]
    asked.append(sampler.sample(INPUT, 1, params(temperature=0.5)))
    assert all(one.result() for one in asked)
    assert sum(calls) == 21
    assert len(calls) <= 4  # the first may be alone; another temperature is


def test_requests_of_several_runs_are_drawn_at_once_each_with_its_own_weights(served, monkeypatch):
    runs = [
        trained(served.client.create_lora_training_client(NAME, rank=rank, seed=rank).result(), 4)
        for rank in (2, 4, 4)
    ]
    samplers = [run.save_weights_and_get_sampling_client().result() for run in runs]
    samplers.append(served.client.create_sampling_client(base_model=NAME).result())
    asked = [(sampler, params(seed=i)) for i in range(3) for sampler in samplers]
    apart = [sampler.sample(INPUT, 2, own).result() for sampler, own in asked]
    batches, generate = [], JoinedEngine.generate

    def counted(engine, prompts, *arguments, **settings):
        batches.append(len(prompts))
        return generate(engine, prompts, *arguments, **settings)

    monkeypatch.setattr(JoinedEngine, "generate", counted)
    device, all_wait = served.service._device, threading.Event()
    device.submit(DeviceJob(lambda _: [all_wait.wait(60)]))
    waiting = [sampler.sample(INPUT, 2, own) for sampler, own in asked]
    while len(device._jobs) < len(asked):
        time.sleep(0.01)
    all_wait.set()
    for own, told in zip(apart, [one.result() for one in waiting], strict=True):
        for one, other in zip(own.sequences, told.sequences, strict=True):
            assert one.tokens == other.tokens
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert batches == [24]
    ids = {tuple(told.sequences[0].tokens) for told in apart[:4]}
    assert len(ids) > 2  # the weights are others


def test_what_ends_a_sequence(served, chatml_tokenizer):
    sampler = served.client.create_sampling_client(base_model=NAME).result()
    free = sampler.sample(INPUT, 1, params(max_tokens=30)).result().sequences[0].tokens
    token = free[5]
    told = sampler.sample(INPUT, 1, params(max_tokens=30, stop=[token])).result().sequences[0]
    first = free.index(token)
    assert (told.tokens, told.stop_reason) == (free[: first + 1], "stop")
    text = chatml_tokenizer.decode(free[:5])
    assert text.strip()
    told = sampler.sample(INPUT, 1, params(max_tokens=30, stop=text)).result().sequences[0]
    assert text in chatml_tokenizer.decode(told.tokens)
    assert told.tokens == free[: len(told.tokens)]
    assert told.stop_reason == "stop"


def test_the_end_of_a_sequence_is_implied_and_an_empty_list_takes_it_away(
    serve, make_tiny_model, chatml_tokenizer, tiny_folder
):
    """A model that says nothing but its end: it ends at once, or says it eight times."""
    model = make_tiny_model()
    end = chatml_tokenizer.eos_token_id
    with torch.no_grad():
        model.model.norm.weight.zero_()
        model.lm_head = torch.nn.Linear(32, len(chatml_tokenizer))
        model.lm_head.bias.zero_()[end] = 50.0
    served = serve(AdaptedModel(NAME, model, chatml_tokenizer, str(tiny_folder)))
    sampler = served.client.create_sampling_client(base_model=NAME).result()
    implied = sampler.sample(INPUT, 1, params(stop=None)).result().sequences[0]
    assert (implied.tokens, implied.stop_reason) == ([end], "stop")
    none = sampler.sample(INPUT, 1, params(stop=[])).result().sequences[0]
    assert (none.tokens, none.stop_reason) == ([end] * 8, "length")


def test_log_probs_of_the_prompt(served, make_tiny_model, reference_log_probs):
    sampler = served.client.create_sampling_client(base_model=NAME).result()
    expected = reference_log_probs(make_tiny_model(), PROMPT)
    told = sampler.compute_logprobs(INPUT).result()
    assert told[0] is None
    torch.testing.assert_close(torch.tensor(told[1:]), expected[1:], atol=2e-5, rtol=0)
    last = sampler.sample(
        INPUT, 1, params(), include_prompt_logprobs=True, prompt_logprobs_last_n=2
    ).result()
    assert last.prompt_logprobs[:4] == [None] * 4
    assert last.prompt_logprobs[4:] == pytest.approx(told[4:], abs=2e-5)


def test_the_most_likely_tokens(served, make_tiny_model):
    sampler = served.client.create_sampling_client(base_model=NAME).result()
    told = sampler.sample(
        *(INPUT, 1, params(max_tokens=3)),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
    ).result()
    (one,) = told.sequences
    with torch.no_grad():
        logits = make_tiny_model()(input_ids=torch.tensor([PROMPT + one.tokens])).logits[0]
    best = logits.log_softmax(-1).topk(3)
    assert told.topk_prompt_logprobs[0] is None
    for i, pairs in enumerate(told.topk_prompt_logprobs[1:]):
        assert [token for token, _ in pairs] == best.indices[i, :2].tolist()
        assert [p for _, p in pairs] == pytest.approx(best.values[i, :2].tolist(), abs=2e-5)
    for i, pairs in enumerate(one.topk_logprobs, len(PROMPT) - 1):
        assert [token for token, _ in pairs] == best.indices[i].tolist()


def test_a_snapshot_stays_and_an_inflight_sampler_follows(served):
    run = trained(served.client.create_lora_training_client(NAME, rank=4, seed=1).result())
    snapshot = run.save_weights_and_get_sampling_client().result()
    follows = run.save_weights_and_get_sampling_client(kind="inflight").result()
    first = [client.compute_logprobs(INPUT).result()[1:] for client in (snapshot, follows)]
    assert first[0] == first[1]
    trained(run)
    newer = run.save_weights_and_get_sampling_client(kind="inflight").result()
    later = [c.compute_logprobs(INPUT).result()[1:] for c in (snapshot, follows, newer)]
    assert later[0] == first[0]
    assert later[1] == later[2] != first[0]
    now = log_probs_of(run, PROMPT).tolist()
    assert later[1] == pytest.approx(now, abs=2e-5)


def test_more_samplers_than_fit_in_the_model(served):
    """Each draws with its own weights, whoever was used last; the oldest ones are gone."""
    run = served.client.create_lora_training_client(NAME, rank=2, seed=1).result()
    clients, expected = [], []
    for _ in range(18):
        trained(run, steps=1)
        clients.append(run.save_weights_and_get_sampling_client().result())
        expected.append(log_probs_of(run, PROMPT).tolist())
    for i in (2, 17, 5, 9, 13, 3, 17, 2):
        told = clients[i].compute_logprobs(INPUT).result()[1:]
        assert told == pytest.approx(expected[i], abs=5e-5)
    with pytest.raises(tinker.NotFoundError, match="newest 16 without a name"):
        clients[1].compute_logprobs(INPUT).result()


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        ([], {}, "The prompt has no token"),
        ([5, 999_999], {}, "outside the vocabulary"),
        (PROMPT, {"temperature": -1.0}, "temperature"),
        (PROMPT, {"top_p": 0.0}, "top_p"),
        (PROMPT, {"max_tokens": 0}, "max_tokens must be at least 1"),
        ([5] * 2000, {}, "takes 1023 here"),
    ],
)
def test_what_can_not_be_drawn_is_refused(served, prompt, settings, words):
    sampler = served.client.create_sampling_client(base_model=NAME).result()
    with pytest.raises(tinker.APIStatusError, match=words):
        sampler.sample(types.ModelInput.from_ints(prompt), 1, params(**settings)).result()


def test_what_is_asked_beyond_it_is_refused_by_name(served):
    sampler = served.client.create_sampling_client(base_model=NAME).result()
    with pytest.raises(tinker.APIStatusError, match="prompt_alt_tokens_k is not served"):
        sampler.sample(INPUT, 1, params(), prompt_alt_tokens_k=2).result()
    with pytest.raises(tinker.NotFoundError, match="there is mine/tiny"):
        served.client.create_sampling_client(base_model="other").result()
