"""A real vLLM engine draws for the service: several adapters at once, log-probs as computed."""

import warnings

import pytest
import tinker
import torch
from tinker import types

from torchrl_agents.training_service.adapted_model import AdaptedModel
from torchrl_agents.training_service.checkpoint_folder import CheckpointFolder
from torchrl_agents.training_service.sampling_engine import engine_of_server
from torchrl_agents.training_service.service import TrainingService
from torchrl_agents.training_service.serving import load_adapted_model, serve_at_free_port

from .conftest import NAME
from .test_sampling import INPUT, PROMPT, log_probs_of, params, trained

pytestmark = [
    pytest.mark.vllm,
    # Building an engine collects garbage, whoever left it.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SETTINGS = {
    "max_lora_rank": 8,
    "max_loras": 2,
    "max_model_len": 256,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,
}


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory, make_tiny_model, chatml_tokenizer):
    """A model whose heads are large enough for vLLM on a CPU; its head is tied."""
    folder = tmp_path_factory.mktemp("wide")
    make_tiny_model(head_dim=32).save_pretrained(folder)
    chatml_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def service(wide_folder, tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own, while it is imported and built
        model = load_adapted_model(
            NAME, wide_folder, device="cpu", engine="vllm", engine_kwargs=SETTINGS
        )
    return TrainingService([model], CheckpointFolder(tmp_path_factory.mktemp("saved")))


@pytest.fixture(scope="module")
def url(service):
    with serve_at_free_port(service) as url:  # which ends the engine, too
        yield url


@pytest.fixture
def client(url, monkeypatch):
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    client = tinker.ServiceClient(base_url=url, api_key="tml-any")
    yield client
    client.close("success").result()


def gap(run, told):
    """The largest distance of sampled log-probs from those that a run computes now."""
    gaps = []
    for one in told.sequences:
        now = log_probs_of(run, PROMPT + one.tokens)[len(PROMPT) - 1 :]
        gaps.append(float((now - torch.tensor(one.logprobs)).abs().max()))
    return max(gaps)


def test_each_of_several_adapters_draws_what_it_computes(client):
    """Two runs of other shapes and the model as it is, drawn with at the same time."""
    runs = [
        trained(client.create_lora_training_client(NAME, rank=8, seed=1).result()),
        trained(client.create_lora_training_client(NAME, rank=3, seed=2, train_mlp=False).result()),
        client.create_lora_training_client(NAME, rank=2, seed=3).result(),  # changes nothing yet
    ]
    samplers = [run.save_weights_and_get_sampling_client().result() for run in runs[:2]]
    samplers.append(client.create_sampling_client(base_model=NAME).result())
    asked = [sampler.sample(INPUT, 6, params(max_tokens=20)) for sampler in samplers]
    for i, future in enumerate(asked):
        told = future.result()
        assert [len(one.tokens) for one in told.sequences] == [20] * 6
        assert len({tuple(one.tokens) for one in told.sequences}) > 1
        gaps = [gap(run, told) for run in runs]
        assert gaps[i] < 1e-4
        assert min(gaps[:i] + gaps[i + 1 :]) > 0.05


def test_more_samplers_than_the_engine_holds_and_one_that_follows(client, service):
    run = client.create_lora_training_client(NAME, rank=4, seed=1).result()
    follows = run.save_weights_and_get_sampling_client(kind="inflight").result()
    snapshots, expected = [], []
    for _ in range(4):
        trained(run, steps=1)
        snapshots.append(run.save_weights_and_get_sampling_client().result())
        run.save_weights_and_get_sampling_client(kind="inflight").result()
        assert gap(run, follows.sample(INPUT, 1, params()).result()) < 1e-4
        expected.append(snapshots[-1].sample(INPUT, 1, params()).result().sequences[0])
    for i in (0, 3, 1, 2, 0):
        (again,) = snapshots[i].sample(INPUT, 1, params()).result().sequences
        assert again.tokens == expected[i].tokens
        assert again.logprobs == pytest.approx(expected[i].logprobs, abs=1e-4)
    assert len(service.models[NAME].sampling_engine._kept) == 2


def test_seeds_ends_and_scores(client, chatml_tokenizer):
    sampler = client.create_sampling_client(base_model=NAME).result()
    first, second = (
        sampler.sample(INPUT, 2, params(max_tokens=12)).result().sequences for _ in range(2)
    )
    assert [one.tokens for one in first] == [one.tokens for one in second]
    assert first[0].tokens != first[1].tokens
    free = first[0].tokens
    told = sampler.sample(INPUT, 1, params(max_tokens=12, stop=[free[5]])).result().sequences[0]
    assert (told.tokens, told.stop_reason) == (free[: free.index(free[5]) + 1], "stop")
    text = chatml_tokenizer.decode(free[:5])
    told = sampler.sample(INPUT, 1, params(max_tokens=12, stop=text)).result().sequences[0]
    assert (told.tokens, told.stop_reason) == (free[: len(told.tokens)], "stop")
    run = trained(client.create_lora_training_client(NAME, rank=4, seed=1).result())
    sampler = run.save_weights_and_get_sampling_client().result()
    told = sampler.sample(
        *(INPUT, 1, params(max_tokens=3)), include_prompt_logprobs=True, topk_sample_logprobs=400
    ).result()
    assert told.prompt_logprobs[1:] == pytest.approx(log_probs_of(run, PROMPT).tolist(), abs=1e-4)
    (one,) = told.sequences
    for token, log_prob, pairs in zip(one.tokens, one.logprobs, one.topk_logprobs, strict=True):
        assert dict(pairs)[token] == pytest.approx(log_prob, abs=1e-4)


def test_adapters_that_it_can_not_draw_with_are_refused_before_they_are_trained(client, service):
    with pytest.raises(tinker.RequestFailedError, match=r"rank 16, but .*max_lora_rank=8"):
        client.create_lora_training_client(NAME, rank=16).result()
    assert not any("16" in name for name in service.runs())
    sampler = client.create_sampling_client(base_model=NAME).result()
    with pytest.raises(tinker.APIStatusError, match="takes 255 here"):
        sampler.sample(types.ModelInput.from_ints([5] * 300), 1, params()).result()


def test_an_engine_of_other_weights_is_refused(
    service, make_tiny_model, chatml_tokenizer, wide_folder
):
    other = make_tiny_model(1, head_dim=32)
    adapted = AdaptedModel("other", other, chatml_tokenizer, wide_folder)
    with pytest.raises(ValueError, match=r"has other weights than other: .* nats"):
        adapted.draw_with(service.models[NAME].sampling_engine)
    assert adapted.sampling_engine is None


def test_a_run_begins_as_it_would_alone_while_the_engine_draws(client, service):
    """On a CPU vLLM draws from the generator of the process, by which adapters begin, too."""

    def first_weights():
        run = client.create_lora_training_client(NAME, rank=2, seed=7).result()
        return service.checkpoints.load(
            service.checkpoints.find(run.save_state("first").result().path)
        ).tensors

    alone = first_weights()
    sampler = client.create_sampling_client(base_model=NAME).result()
    for _ in range(4):
        drawing = sampler.sample(INPUT, 8, params(max_tokens=60, seed=None))
        beside = first_weights()
        assert len(drawing.result().sequences) == 8
        assert all(torch.equal(alone[name], value) for name, value in beside.items())


@pytest.mark.slow
def test_a_server_draws_and_gives_the_place_of_adapters_back(serve, wide_folder):
    from torchrl_modules.vllm.server import start_server

    with start_server(wide_folder, dtype="float32", enable_lora=True, **SETTINGS) as at:
        model = load_adapted_model(
            NAME, wide_folder, device="cpu", engine="vllm", engine_url=at, max_model_len=128
        )
        served = serve(model)
        make = served.client.create_lora_training_client
        runs = [trained(make(NAME, rank=4, seed=seed).result()) for seed in (1, 2)]
        runs.append(make(NAME, rank=2).result())  # changes nothing yet
        samplers = [run.save_weights_and_get_sampling_client().result() for run in runs[:2]]
        samplers.append(served.client.create_sampling_client(base_model=NAME).result())
        asked = [sampler.sample(INPUT, 4, params(max_tokens=20)) for sampler in samplers]
        for i, future in enumerate(asked):
            gaps = [gap(run, future.result()) for run in runs]
            assert gaps[i] < 1e-4
            assert min(gaps[:i] + gaps[i + 1 :]) > 0.05
        with pytest.raises(tinker.RequestFailedError, match=r"rank 16, but .*--max-lora-rank 8"):
            make(NAME, rank=16).result()
        model.sampling_engine.close()
        again = engine_of_server(at)
        listed = again._engine._post("/v1/models", method="GET")["data"]
        again.close()
        assert not [one["id"] for one in listed if one["id"].startswith("version-")]
