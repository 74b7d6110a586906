"""Group advantages shared through a Ray actor; skipped where Ray is missing."""

import warnings

import pytest
import torch
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
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
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


def test_bad_options_raise_before_ray_is_needed():
    with pytest.raises(ValueError, match="refill"):
        RayMCAdvantage(2, zero_variance="skip")
