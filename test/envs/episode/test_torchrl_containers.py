"""What TorchRL puts around environments takes these, too."""

import sys
import warnings
from functools import partial
from importlib import import_module
from multiprocessing import forkserver

import pytest
import torch.multiprocessing as mp
from torchrl.envs import AsyncEnvPool, ParallelEnv, SerialEnv

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


MODULE = """
from torchrl.envs.transforms import Compose

from torchrl_envs import ChatEnv, DataLoadingPrimer, RewardFunctions, StepCounter


def worth_of(worth, **_):
    return [float(each) for each in worth]


def make_env(*batch_size):
    rows = [{"prompt": f"question <{i}>", "worth": i} for i in range(8)]
    parts = [DataLoadingPrimer(rows), RewardFunctions([worth_of]), StepCounter(max_steps=1)]
    return ChatEnv(batch_size=batch_size).append_transform(Compose(*parts))
"""


@pytest.fixture(scope="module", autouse=True)
def processes():
    """Start them in forks of a process that has imported what they would."""
    mp.set_forkserver_preload(["pytest", "torchrl.envs", "torchrl_envs.episode.chat_env"])
    mp.set_start_method("forkserver", force=True)
    yield
    mp.set_start_method(None, force=True)
    forkserver._forkserver._stop()


@pytest.fixture
def make_env(tmp_path, monkeypatch):
    """Of a module that other processes can import."""
    (tmp_path / "episodes_in_processes.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("episodes_in_processes").make_env
    del sys.modules["episodes_in_processes"]


def test_serial_env_steps_environments_side_by_side(policy, make_env):
    env = SerialEnv(2, partial(make_env, 2))
    rollout = env.rollout(2, policy, break_when_any_done=False)
    env.close()
    # each of the two begins with its own rows 0 and 1, and goes on with 2 and 3
    assert rollout["next", "reward"][..., 0].squeeze(-1).tolist() == [[[0, 2], [1, 3]]] * 2


def test_parallel_env_steps_environments_in_processes(policy, make_env):
    env = ParallelEnv(2, partial(make_env, 2), use_buffers=False, consolidate=False)
    rollout = env.rollout(2, policy, break_when_any_done=False)
    env.close()
    assert rollout["next", "reward"][..., 0].squeeze(-1).tolist() == [[[0, 2], [1, 3]]] * 2
    said = [row["tokens", "response"] for row in rollout.reshape(-1).unbind(0)]
    assert len({len(ids) for ids in said}) > 1


@pytest.mark.filterwarnings("ignore:(?s).*explicitly implemented for tensorclass")
def test_a_consolidated_batch_that_lost_its_tokens_is_refused_with_what_to_do(policy, make_env):
    env = ParallelEnv(2, partial(make_env, 2), use_buffers=False)
    with pytest.raises(TypeError, match="ParallelEnv with use_buffers=False and consolidate=False"):
        env.rollout(2, policy)
    env.close()


@pytest.mark.parametrize(
    "options", [{"backend": "threading"}, {"backend": "multiprocessing", "exchange": "queue"}]
)
def test_an_async_pool_steps_environments_without_a_batch(policy, make_env, options):
    env = AsyncEnvPool([make_env, make_env], stack="lazy", **options)
    rollout = env.rollout(2, policy, break_when_any_done=False)
    env.close()
    assert rollout["next", "reward"].flatten().tolist() == [0.0, 1.0, 0.0, 1.0]


def test_torchrl_collector_collects_steps(policy, make_env):
    collector = Collector(
        partial(make_env, 2),
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
