"""What TorchRL puts around environments takes these, too."""

import sys
import warnings

import cloudpickle
import pytest
from torchrl.envs import AsyncEnvPool, ParallelEnv, SerialEnv
from torchrl.envs.transforms import Compose

from torchrl_envs import ChatEnv, DataLoadingPrimer, RewardFunctions, StepCounter
from torchrl_modules import TransformersWrapper
from torchrl_modules.tiny_model import tiny_qwen3

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TorchRL's own
    from torchrl.collectors import Collector


@pytest.fixture
def policy(chatml_tokenizer):
    model = tiny_qwen3(len(chatml_tokenizer), num_layers=1)
    # Turns of 1 to 24 tokens: one token in ten ends them.
    sampling = {"max_new_tokens": 24, "seed": 0, "stop_token_ids": list(range(0, 330, 10))}
    return TransformersWrapper(model, tokenizer=chatml_tokenizer, generate_kwargs=sampling)


def make_env():
    rows = [{"prompt": f"question <{i}>", "worth": i} for i in range(8)]
    return ChatEnv(batch_size=(2,)).append_transform(
        Compose(
            DataLoadingPrimer(rows),
            RewardFunctions([lambda worth, **_: [float(each) for each in worth]]),
            StepCounter(max_steps=1),
        )
    )


def test_serial_env_steps_environments_side_by_side(policy):
    env = SerialEnv(2, make_env)
    rollout = env.rollout(2, policy, break_when_any_done=False)
    env.close()
    # each of the two begins with its own rows 0 and 1, and goes on with 2 and 3
    assert rollout["next", "reward"][..., 0].squeeze(-1).tolist() == [[[0, 2], [1, 3]]] * 2


def test_torchrl_collector_collects_steps(policy):
    collector = Collector(
        make_env,
        policy,
        frames_per_batch=4,
        total_frames=8,
        auto_register_policy_transforms=False,
        use_buffers=False,  # of steps of one length
    )
    batches = list(collector)
    collector.shutdown()
    rewards = [batch["next", "reward"].flatten().tolist() for batch in batches]
    rows = [step for batch in batches for row in batch.unbind(0) for step in row.unbind(0)]
    assert len({len(row["tokens", "response"]) for row in rows}) > 1
    assert rewards == [[0.0, 2.0, 1.0, 3.0], [4.0, 6.0, 5.0, 7.0]]


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no package of a new process
WORTH = [{"prompt": f"question <{i}>", "worth": i} for i in range(8)]


def worth_of(worth, **_):
    return [float(each) for each in worth]


def make_one():
    """One conversation, of a function that a new process finds."""
    parts = (DataLoadingPrimer(WORTH), RewardFunctions([worth_of]), StepCounter(max_steps=1))
    return ChatEnv(batch_size=()).append_transform(Compose(*parts))


@pytest.mark.slow
def test_parallel_env_steps_environments_in_processes(policy):
    env = ParallelEnv(2, make_one, use_buffers=False, consolidate=False)
    try:
        out = env.step(policy(env.reset()))["next"]
        assert out["reward"].flatten().tolist() == [0.0, 0.0]
        again = env.step(policy(env.reset()))["next"]
    finally:
        env.close()
    assert again["reward"].flatten().tolist() == [1.0, 1.0]  # each goes on in its own data


def test_async_env_pool_steps_environments_of_one_conversation(policy):
    env = AsyncEnvPool([make_one, make_one], backend="threading")
    try:
        out = env.step(policy(env.reset()))["next"]
    finally:
        env.close()
    assert out["reward"].flatten().tolist() == [0.0, 0.0]
    assert len(out["stop_reason"]) == 2
