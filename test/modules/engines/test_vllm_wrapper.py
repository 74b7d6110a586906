"""One policy over every deployment of vLLM: same layout, same log-probs, versions to the token."""

import threading
import time

import peft
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import LLMCollector, StreamingCollector
from collectors.weight_update import vLLMUpdater
from objectives import GRPOLoss
from torchrl_data.batched_object import read_objects
from torchrl_data.conversation import Conversations
from torchrl_data.conversation_io import write_conversations
from torchrl_envs import ChatEnv, DataLoadingPrimer, RewardFunctions, StepCounter
from torchrl_modules import TransformersWrapper, vLLMWrapper
from torchrl_modules.vllm.async_engine import AsyncVLLMEngine

pytestmark = pytest.mark.vllm

STOP = 3  # what the model of these tests names as its end, and no template
CHATS = [[{"role": "user", "content": text}] for text in ("hi", "a longer question", "x")]
ENDLESS = {"max_new_tokens": 80, "stop_token_ids": ()}


def make_batch(chats=CHATS):
    batch = TensorDict(batch_size=[len(chats)])
    write_conversations(batch, "prompt", Conversations.from_messages(chats))
    return batch


@pytest.fixture(
    params=[
        pytest.param("engine", id="engine in this process"),
        pytest.param("LLM", id="a vllm.LLM that was built elsewhere"),
        pytest.param("async", id="asynchronous engine"),
        pytest.param("url", id="URL of a server"),
    ]
)
def make_policy(request, chatml_tokenizer, model):
    closers = []

    def make(**kwargs):
        if request.param == "url":
            request.getfixturevalue("server_engine")  # gives the server the weights of `model`
            source = request.getfixturevalue("server")
        else:
            source = request.getfixturevalue("vllm_engine")
        if request.param == "LLM":
            source = source._llm
        if request.param == "async":
            source = AsyncVLLMEngine(source)
            closers.append(source.close)
        policy = vLLMWrapper(source, tokenizer=chatml_tokenizer, **kwargs)
        if request.param in ("async", "url"):
            closers.insert(0, policy.engine.close)
        return policy

    yield make
    for close in closers:
        close()


def assert_from(model, ids, log_probs, mask):
    """Recorded log-probs are a Transformers model's on the same ids; the sums' order differs."""
    with torch.no_grad():
        expected = model(ids[None]).logits[0, :-1].log_softmax(-1)
    expected = expected.gather(1, ids[1:, None]).squeeze(1)[mask[1:]]
    torch.testing.assert_close(log_probs[mask], expected, atol=5e-5, rtol=0)


def test_every_deployment_writes_the_same_layout(make_policy, model):
    policy = make_policy(generate_kwargs={"max_new_tokens": 12})
    batch = policy(make_batch())
    for row in batch.unbind(0):
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        response = row["tokens", "response"]
        assert torch.equal(ids, torch.cat([row["tokens", "prompt"], response]))
        assert mask.tolist() == [False] * (len(ids) - len(response)) + [True] * len(response)
        versions = row["policy_versions", "full"]
        assert torch.equal(versions, torch.where(mask, policy.policy_version, -1))
        assert_from(model, ids, row["log_probs", "full"], mask)


def test_a_row_that_cannot_be_served_is_marked_alone(make_policy):
    policy = make_policy(generate_kwargs={"max_new_tokens": 4})
    long = [{"role": "user", "content": "word " * 200}]
    batch = policy(make_batch([CHATS[0], long]))
    good, bad = read_objects(batch, "finish_reason")
    assert good in ("stop", "length")
    assert bad.startswith("error: The prompt has")
    assert len(batch[0]["tokens", "response"]) >= 1


def test_the_collector_tracks_the_version_that_the_engine_acknowledged(
    make_policy, model, other_model
):
    policy = make_policy(generate_kwargs={"max_new_tokens": 6})
    rows = [{"prompt": f"question <{i}>"} for i in range(4)]
    env = ChatEnv(batch_size=4).append_transform(
        Compose(
            DataLoadingPrimer(rows, group_size=2),
            RewardFunctions([lambda completions: [float(len(completions))] * len(completions)]),
            StepCounter(max_steps=1),
        )
    )
    start = policy.policy_version
    collector = LLMCollector(
        env,
        policy=policy,
        weight_updater=vLLMUpdater(),
        track_policy_version=True,
        total_trajectories=8,
    )
    # init the updater
    metadata = {name: (value.dtype, value.shape) for name, value in model.state_dict().items()}
    collector.weight_updater.init(metadata)
    # the version is incremented after each weight update
    collector.update_policy_weights_(state_dict=other_model.state_dict())
    assert collector.policy_version_tracker.version == start + 1
    # the policy version is written in the data
    num_batches = 0
    for data in collector:
        num_batches += 1
        assert data["policy_version"].tolist() == [start + 1] * 4
        for row in data.unbind(0):
            mask = row["masks", "all_assistant_mask"]
            assert_from(other_model, row["tokens", "full"], row["log_probs", "full"], mask)
    assert num_batches == 2
    with pytest.raises(ValueError, match=r"shape|as init"):
        collector.update_policy_weights_(
            state_dict={**model.state_dict(), "model.norm.weight": torch.ones(3)}
        )
    assert collector.policy_version_tracker.version == start + 1


def test_a_token_that_the_generation_config_names_ends_a_turn(make_policy):
    policy = make_policy(generate_kwargs={"max_new_tokens": 6, "logit_bias": {STOP: 100.0}})
    assert policy.encoder.end_of_turn_id != STOP
    batch = policy(make_batch())
    assert read_objects(batch, "finish_reason") == ["stop"] * 3
    assert [row["tokens", "response"].tolist() for row in batch.unbind(0)] == [[STOP]] * 3


@pytest.mark.parametrize("kind", [LLMCollector, StreamingCollector])
def test_with_a_seed_every_rollout_of_a_run_differs(make_policy, kind):
    policy = make_policy(generate_kwargs={"max_new_tokens": 12, "stop_token_ids": (), "seed": 7})
    rows = [{"prompt": "question"}, {"prompt": "tool"}]
    env = ChatEnv(batch_size=8).append_transform(
        Compose(
            DataLoadingPrimer(rows, group_size=4),
            RewardFunctions([lambda completions: [1.0] * len(completions)]),
            StepCounter(max_steps=1),
        )
    )
    said = []
    with kind(env, policy) as collector:
        for _ in range(3):
            for row in collector.collect().unbind(0):
                mask = row["masks", "all_assistant_mask"]
                said.append(tuple(row["tokens", "full"][mask].tolist()))
    assert len(set(said)) == len(said) == 24


def test_rollout_buffer_and_loss_with_a_ratio_of_one(make_policy, chatml_tokenizer, model):
    policy = make_policy(generate_kwargs={"max_new_tokens": 6})
    rows = ReplayBuffer(storage=LazyStackStorage(3), batch_size=3)
    batch = policy(make_batch()).exclude("history", "finish_reason")
    batch.set("advantage", torch.ones(3, 1, 1))
    rows.extend(batch)
    actor = TransformersWrapper(model, tokenizer=chatml_tokenizer, generate=False)
    loss = GRPOLoss(actor)(rows.sample())
    # The gap between the engines: 9e-6 nats a token was the largest seen.
    torch.testing.assert_close(loss.kl_approx, torch.zeros(()), atol=1e-5, rtol=0)
    torch.testing.assert_close(loss.ESS, torch.ones(()), atol=1e-4, rtol=0)


def test_a_turn_that_spans_two_versions_says_so_token_by_token(
    chatml_tokenizer, vllm_engine, model, other_model
):
    served = AsyncVLLMEngine(vllm_engine)
    policy = vLLMWrapper(served, tokenizer=chatml_tokenizer, generate_kwargs=ENDLESS)
    for delay_s in (0.1, 0.05, 0.02, 0.01, 0.0) * 4:
        old, batch = policy.policy_version, make_batch()
        turn = threading.Thread(target=policy, args=(batch,))
        turn.start()
        while not served._steps.has_work:
            time.sleep(0.001)
        time.sleep(delay_s)
        policy.update_weights(other_model.state_dict())
        turn.join(timeout=60)
        masks = [row["masks", "all_assistant_mask"] for row in batch.unbind(0)]
        drawn = [row["policy_versions", "full"] for row in batch.unbind(0)]
        if all(
            versions[mask].unique_consecutive().tolist() == [old, old + 1]
            for versions, mask in zip(drawn, masks, strict=True)
        ):
            break
        policy.update_weights(model.state_dict())  # it came before or after them: once more
    else:
        pytest.fail("no update met the requests in flight")
    policy.engine.close()
    served.close()
    for row, versions in zip(batch.unbind(0), drawn, strict=True):
        ids = row["tokens", "full"]
        for weights, version in ((model, old), (other_model, old + 1)):
            assert_from(weights, ids, row["log_probs", "full"], versions == version)


def test_a_model_with_adapters_is_pushed_merged(chatml_tokenizer, vllm_engine, build_model):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    trained = peft.get_peft_model(build_model(0), config)
    policy = vLLMWrapper(
        vllm_engine, tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 12}
    )
    updater = vLLMUpdater(policy)
    with pytest.raises(ValueError, match="holds adapters"):
        updater.push(peft.get_peft_model_state_dict(trained))
    assert updater.push(trained) == policy.policy_version
    for row in policy(make_batch()).unbind(0):
        mask = row["masks", "all_assistant_mask"]
        assert_from(trained, row["tokens", "full"], row["log_probs", "full"], mask)
