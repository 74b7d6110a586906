"""Baselines of one rollout a prompt, by exact arithmetic."""

import math
from itertools import permutations

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer

from objectives import BatchMean, MCAdvantage, SourceMean
from torchrl_data.batched_object import write_objects

NAN = math.nan


def rows_of(rewards, sources=None):
    rows = []
    for number, reward in enumerate(rewards):
        row = TensorDict({"reward": torch.tensor([[reward]]), "group_id": torch.tensor(number)})
        if sources is not None:
            write_objects(row, "row", [{"environment": sources[number]}])
        rows.append(row)
    return lazy_stack(rows)


def advantages(transform, rewards, sources=None):
    buffer = ReplayBuffer(storage=LazyStackStorage(64), transform=transform)
    buffer.extend(rows_of(rewards, sources))
    return buffer[:]["advantage"].flatten().tolist()


@pytest.mark.parametrize(
    ("settings", "rewards", "expected"),
    [
        # The mean is 1/2, the deviation sqrt(4 * 1/4 / 3).
        pytest.param({}, [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5], id="by the deviation"),
        pytest.param({}, [1, 0, NAN, 0, 1], [0.5, -0.5, 0, -0.5, 0.5], id="a row without a reward"),
    ],
)
def test_batch_mean_compares_with_all_rows_of_the_batch(settings, rewards, expected):
    found = advantages(MCAdvantage(1, estimator="batch_mean", **settings), rewards)
    deviation = math.sqrt(1 / 3) + 1e-4
    assert found == pytest.approx([x / deviation for x in expected])
    assert advantages(MCAdvantage(1, estimator="batch_mean", scale="none"), rewards) == expected


def test_batch_mean_takes_groups_of_any_size():
    # A group whose rewards are equal is better or worse than the batch, and is not dropped.
    transform = MCAdvantage(2, estimator=BatchMean(scale="none"), zero_variance="drop")
    rows = rows_of([4.0, 4.0, 1.0, 3.0])
    rows["group_id"] = torch.tensor([0, 0, 1, 1])
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=transform)
    buffer.extend(rows)
    assert buffer[:]["advantage"].flatten().tolist() == [1.0, 1.0, -2.0, 0.0]


def test_running_mean_is_by_source_of_the_batches_before():
    transform = MCAdvantage(1, estimator=SourceMean(decay=0.5))
    # Both are new: their baselines are the means of this batch, 2 and 10.
    assert advantages(transform, [1, 3, 10], ["a", "a", "b"]) == [-1, 1, 0]
    # And 2 and 10 are the baselines of the next one, in which c is new.
    found = advantages(transform, [4, 6, 10, NAN, 7], ["a", "b", "b", "a", "c"])
    assert found == [2, -4, 0, 0, 0]
    # 2/2 + 4/2, 10/2 + 8/2, and 7.
    assert transform.estimator.baselines == {"a": 3, "b": 9, "c": 7}


def test_running_mean_does_not_depend_on_the_order_of_a_batch():
    found = set()
    for order in permutations(range(3)):
        transform = MCAdvantage(1, estimator=SourceMean(decay=0.5))
        advantages(transform, [1, 3], ["a", "a"])
        values = [([5, 1, 6][i], ["a", "a", "b"][i]) for i in order]
        each = advantages(transform, *map(list, zip(*values, strict=True)))
        in_order = [each[order.index(i)] for i in range(3)]
        found.add((*in_order, *sorted(transform.estimator.baselines.items())))
    assert found == {(3.0, -1.0, 0.0, ("a", 2.5), ("b", 6.0))}


def test_rows_without_the_column_share_a_baseline():
    transform = MCAdvantage(1, estimator="running_mean")
    assert advantages(transform, [1.0, 3.0]) == [-1.0, 1.0]
    assert transform.estimator.baselines == {"": 2.0}
    # decay is 0.9 when not given: 1.8 + 0.4.
    assert advantages(transform, [4.0]) == [2.0]
    assert transform.estimator.baselines[""] == pytest.approx(2.2)


def test_baselines_go_on_in_a_resumed_run_and_with_their_own_column_alone():
    first, second = (MCAdvantage(1, estimator=SourceMean(decay=0.5)) for _ in range(2))
    advantages(first, [1, 3], ["a", "b"])
    second.set_extra_state(first.get_extra_state())
    for each in (first, second):
        assert advantages(each, [5, 5], ["a", "b"]) == [4, 2]
    other = MCAdvantage(1, estimator=SourceMean(column="task"))
    with pytest.raises(ValueError, match="saved baselines are by environment, these by task"):
        other.set_extra_state(first.get_extra_state())


def test_settings_that_cannot_work_raise():
    with pytest.raises(ValueError, match="scale"):
        MCAdvantage(1, estimator="batch_mean", scale="tokens")
    with pytest.raises(ValueError, match="scale has no effect on estimator 'running_mean'"):
        MCAdvantage(1, estimator="running_mean", scale="batch")
    with pytest.raises(ValueError, match="decay"):
        SourceMean(decay=1.0)
