"""Weights broadcast to a server's workers, and what becomes of them when one breaks off."""

import threading
import time

import peft
import pytest
import torch

from collectors.weight_update import vLLMUpdater
from torchrl_modules import vLLMWrapper
from torchrl_modules.engines.blocking_engine import BlockingEngine
from torchrl_modules.engines.fleet import EngineFleet
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.vllm.async_engine import AsyncVLLMEngine
from torchrl_modules.weights.expected_weights import UpdateRefused

PROMPTS = [[5, 6, 7, 8] * 10, [9, 10], [11] * 40, [12, 13, 14]]
PARAMS = SamplingParameters(max_new_tokens=24, stop_token_ids=())
NORM = "model.norm.weight"

pytestmark = pytest.mark.vllm


@pytest.fixture
def policy(server_engine, chatml_tokenizer):
    return vLLMWrapper(server_engine, tokenizer=chatml_tokenizer)


@pytest.fixture
def updater(policy):
    updater = vLLMUpdater(policy, transfer="c10d")
    updater.init()
    policy.engine._transfer._bucket_bytes = 40_000  # several buckets
    yield updater
    updater.close()
    updater.close()


@torch.no_grad()
def log_probs_under(model, prompt, ids):
    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]


def assert_from(model, policy):
    assert_serves(model, policy.engine)


def assert_serves(model, engine):
    for prompt, row in zip(PROMPTS, engine.generate(PROMPTS, PARAMS), strict=True):
        expected = log_probs_under(model, prompt, row.ids)
        # vLLM's kernels sum in another order.
        torch.testing.assert_close(torch.tensor(row.log_probs), expected, atol=5e-5, rtol=0)


def test_a_broadcast_changes_the_outputs_and_a_wrong_one_is_refused_whole(
    policy, updater, model, other_model
):
    assert_from(model, policy)
    version = updater.version
    assert updater.push(other_model) == updater.version == policy.policy_version == version + 1
    assert_from(other_model, policy)
    for spoil in (
        {NORM: torch.ones(3)},
        {NORM: torch.full((64,), torch.nan)},
        {"extra": torch.ones(1)},
    ):
        with pytest.raises(ValueError, match=r"shape \(3,\)|not finite|no use for"):
            updater.push({**model.state_dict(), **spoil})
        assert updater.version == version + 1
        assert_from(other_model, policy)
    assert updater.push(model.state_dict()) == version + 2
    assert_from(model, policy)


def test_a_model_with_adapters_is_served_as_it_computes(policy, updater, build_model, model):
    settings = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        trained = peft.get_peft_model(build_model(0), peft.LoraConfig(**settings)).eval()
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    updater.push(trained)
    assert_from(trained, policy)
    with pytest.raises(AssertionError):
        assert_from(model, policy)
    assert all(torch.equal(before[name], value) for name, value in trained.state_dict().items())


def test_another_trainer_may_take_over(policy, updater, server, chatml_tokenizer, other_model):
    with pytest.raises(ValueError, match="'direct' or 'c10d'"):
        vLLMUpdater(policy, transfer="ipc")
    with pytest.raises(ValueError, match=r"weight_transfer must be one of.*'nccl'"):
        vLLMWrapper(server, tokenizer=chatml_tokenizer, engine_kwargs={"weight_transfer": "nccl"})
    settings = {"weight_transfer": "c10d"}  # as a recipe's engine.engine_kwargs
    successor = vLLMWrapper(server, tokenizer=chatml_tokenizer, engine_kwargs=settings)
    successor.update_weights(other_model.state_dict())
    assert not successor.engine._transfer.is_closed
    assert_from(other_model, successor)
    successor.engine.close()


def test_a_broadcast_that_breaks_off_is_made_good_by_the_next(
    policy, updater, server_engine, model, other_model, monkeypatch
):
    """The trainer's end fails after the first bucket; the workers have loaded a part."""
    updater.push(model)
    transfer, version = server_engine._transfer, updater.version
    broadcast, sent = transfer._group.broadcast, []

    def breaks(tensor):
        sent.append(tensor)
        if len(sent) > 1:
            raise RuntimeError("the network is gone")
        broadcast(tensor)

    monkeypatch.setattr(transfer._group, "broadcast", breaks)
    with pytest.raises(RuntimeError, match=r"the network is gone|failed|Connection"):
        updater.push(other_model)
    assert transfer.is_closed
    assert updater.version == version
    with pytest.raises(RuntimeError, match="mixture"):
        server_engine.generate(PROMPTS, PARAMS)
    assert updater.push(other_model) == version + 1
    assert server_engine._transfer is not transfer
    assert_from(other_model, policy)


def test_requests_in_flight_go_on_under_the_new_weights(
    server_engine, chatml_tokenizer, model, other_model
):
    updater = vLLMUpdater(vLLMWrapper(server_engine, tokenizer=chatml_tokenizer), transfer="c10d")
    updater.init()
    endless = SamplingParameters(max_new_tokens=80, stop_token_ids=())
    for delay_s in (0.1, 0.05, 0.02, 0.01, 0.0) * 4:
        old, rows = updater.version, []
        caller = threading.Thread(
            target=lambda kept: kept.extend(server_engine.generate(PROMPTS, endless)), args=(rows,)
        )
        caller.start()
        time.sleep(delay_s)
        updater.push(other_model)
        caller.join(timeout=60)
        if all(len(row.versions) == 2 for row in rows):
            break
        updater.push(model)  # it came before or after them: once more
    else:
        pytest.fail("no update met the requests in flight")
    updater.close()
    for prompt, row in zip(PROMPTS, rows, strict=True):
        versions = torch.tensor(row.token_versions(otherwise=-1))
        assert len(versions) == 80
        for weights, version in ((model, old), (other_model, old + 1)):
            drawn = versions == version
            gap = log_probs_under(weights, prompt, row.ids) - torch.tensor(row.log_probs)
            assert gap[drawn].abs().max() < 5e-5


def test_an_engine_of_this_process_is_updated_directly(vllm_engine, chatml_tokenizer):
    served = AsyncVLLMEngine(vllm_engine)
    policy = vLLMWrapper(served, tokenizer=chatml_tokenizer)
    for each in (policy, vLLMWrapper(vllm_engine, tokenizer=chatml_tokenizer)):
        with pytest.raises(TypeError, match=r"transfer=.direct.*weight_transfer=.c10d"):
            vLLMUpdater(each, transfer="c10d")
    policy.engine.close()
    served.close()


@pytest.mark.parametrize("kind", ["in process", "server", "fleet"])
def test_an_engine_that_sleeps_serves_nothing_until_it_is_updated(
    kind, request, monkeypatch, model, other_model
):
    """vLLM on a CPU keeps its memory; what its workers and routes are told is the same."""
    told = []
    if kind == "in process":
        engine = request.getfixturevalue("vllm_engine")
        executor = engine._llm.llm_engine.engine_core.engine_core.model_executor
        workers = executor.collective_rpc
        monkeypatch.setattr(
            executor,
            "collective_rpc",
            lambda method, *args, **options: (
                told.append((getattr(method, "__name__", method), options.get("kwargs"))),
                workers(method, *args, **options),
            )[1],
        )
        expected = [
            ("sleep", {"level": 2}),
            ("wake_up", {"tags": ["weights"]}),
            ("load_weights", None),
            ("wake_up", {"tags": None}),
        ]
    else:
        engine = client = request.getfixturevalue("server_engine")
        if kind == "fleet":
            engine = BlockingEngine(EngineFleet([client._client.url]))
            request.addfinalizer(engine.close)
            client = engine.inside._members[0].engine._client
        post = client._post
        monkeypatch.setattr(
            client,
            "_post",
            lambda path, *args, **query: (told.append((path, query)), post(path, *args, **query))[
                1
            ],
        )
        refused = [("/wake_up", {"tags": "weights"}), ("/collective_rpc", {})]
        expected = [("/sleep", {"level": "2"}), *refused, *refused, ("/wake_up", {})]
    engine.sleep()
    with pytest.raises(UpdateRefused, match="no use for"):
        engine.update_weights({**other_model.state_dict(), "extra": torch.ones(1)})
    if kind != "fleet":
        with pytest.raises(RuntimeError, match="it sleeps"):
            engine.generate(PROMPTS, PARAMS)
    engine.update_weights(other_model.state_dict())
    assert [call for call in told if call[0] in dict(expected)] == expected
    assert_serves(other_model, engine)
    engine.update_weights(model.state_dict())
    assert_serves(model, engine)
