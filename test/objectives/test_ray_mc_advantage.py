"""Group advantages shared through a Ray actor; skipped where Ray is missing."""

import os
import re
import subprocess
import sys
import warnings

import psutil
import pytest
import torch
from forked_ray_workers import forked_workers
from tensordict import TensorDict, lazy_stack

from objectives import MCAdvantage, RayMCAdvantage

# Ray's own clean-up closes sockets and pipes late.
pytestmark = pytest.mark.filterwarnings("ignore")


def make_row(group, reward):
    return TensorDict(
        {"group_id": torch.tensor(group), "reward": torch.tensor([[reward]])}, batch_size=[]
    )


@pytest.fixture(scope="module")
def ray():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray = pytest.importorskip("ray")
        with forked_workers():
            RayMCAdvantage(2, ray_init_config={"num_cpus": 1, "log_to_driver": False}).close()
            yield ray
            ray.shutdown()


@pytest.mark.slow
def test_two_writers_complete_one_group(ray):
    options = {"actor_name": "advantages", "unscorable": "refill"}
    first, second = (RayMCAdvantage(2, **options) for _ in range(2))
    assert first.inv(lazy_stack([make_row(1, 0.0)])) is None
    state = first.state_dict()
    out = second.inv(lazy_stack([make_row(1, 1.0), make_row(2, float("nan"))]))
    local = MCAdvantage(2)
    want = local.inv(lazy_stack([make_row(1, 0.0), make_row(1, 1.0)]))
    assert out["advantage"].equal(want["advantage"])
    assert first.take_refills() == {2: 1}
    second.load_state_dict(state)
    assert len(first.inv(lazy_stack([make_row(1, 1.0)]))) == 2
    first.close()
    ray.kill(ray.get_actor("advantages"))


@pytest.mark.slow
def test_A16_a_ray_that_is_started_here_listens_on_loopback_alone(ray):
    @ray.remote
    def work():
        return os.getpid()

    worker = ray.get(work.remote())
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    assert worker in [process.pid for process in family]
    listening = [
        (process.name(), connection.laddr.ip.removeprefix("::ffff:"))
        for process in family
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {"gcs_server", "raylet"} <= {name for name, _ in listening}
    assert {address for _, address in listening} == {"127.0.0.1"}


CONNECTS = """
import ray
from objectives.advantages.ray_mc_advantage import start_ray
start_ray({"num_cpus": 1, "log_to_driver": False})
print(ray.get_runtime_context().gcs_address)
"""


@pytest.mark.slow
@pytest.mark.weekly
def test_another_program_does_not_join_a_ray_that_ends_with_this_one(ray, pytestconfig):
    environment = dict(os.environ)
    command = [sys.executable, "-W", "ignore", "-c", CONNECTS]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.strip() != ray.get_runtime_context().gcs_address
    environment["RAY_ADDRESS"] = "127.0.0.1:1"
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1
    assert re.search(r"Connecting to existing Ray cluster at address: \S+:1\.\.\.", refused.stderr)
    assert "num_cpus and num_gpus must not be provided" in refused.stderr


def test_bad_options_raise_before_ray_is_needed():
    with pytest.raises(ValueError, match="refill"):
        RayMCAdvantage(2, zero_variance="skip")
