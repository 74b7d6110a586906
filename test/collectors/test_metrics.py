"""What a step is reduced to: values by hand."""

import math

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import nn

from collectors import (
    PhaseTimer,
    StepMetrics,
    evaluation_estimates,
    rollout_metrics,
    update_metrics,
)
from objectives import GRPOLossOutput
from objectives.batching.non_finite_gate import StepOutcome
from torchrl_data.sampling_masks import mask_entries, sets_of_ids


def trajectory(
    group, reward, *, log_probs=(-1.0,), stop="answered", scorable=True, turns=1, version=3
):
    """A row as a collector gives it: two tokens of prompt, then what was sampled."""
    sampled = len(log_probs)
    row = TensorDict(
        {
            ("masks", "all_assistant_mask"): torch.tensor([False] * 2 + [True] * sampled),
            ("log_probs", "full"): torch.tensor([0.0, 0.0, *log_probs]),
            "reward": torch.tensor([[reward]]),
            "scorable": torch.tensor([scorable]),
            "truncated": torch.tensor([stop == "max_steps"]),
            "group_id": torch.tensor(group),
            "num_turns": torch.tensor(turns),
            "num_tool_calls": torch.tensor([turns - 1]),
            "num_tool_errors": torch.tensor([0]),
            "policy_version": torch.tensor(version),
            "rewards": TensorDict({"own": torch.tensor([reward])}),
        }
    )
    row.set_non_tensor("stop_reason", stop)
    row.set_non_tensor("reward_errors", "" if scorable else "own: ValueError")
    return row


def as_parts(*rows, episode):
    """Rows of one episode, as a collector tells it."""
    for number, row in enumerate(rows):
        row["episode_id"], row["segment"] = torch.tensor(episode), torch.tensor(number)
        row["num_segments"] = torch.tensor(len(rows))
    return [*rows]


ROWS = [
    trajectory(0, 1.0, log_probs=(-0.5, -1.5)),
    trajectory(0, 1.0, log_probs=(-1.0,), turns=3),
    trajectory(1, 0.0, stop="max_steps"),
    trajectory(1, 1.0, version=5),
    trajectory(2, 0.5, stop="error: the prompt is empty"),
    trajectory(2, 7.0, scorable=False),
]


def test_rollouts_by_hand():
    metrics = rollout_metrics(lazy_stack(ROWS))
    assert metrics["reward"] == pytest.approx(3.5 / 5), "a row that can't be scored is left out"
    assert metrics["reward/std"] == pytest.approx(math.sqrt((3 * 0.09 + 0.49 + 0.04) / 4))
    assert metrics["reward/unscorable_fraction"] == pytest.approx(1 / 6)
    assert metrics["groups/without_signal_fraction"] == pytest.approx(2 / 3)
    assert metrics["groups/solve_all_fraction"] == pytest.approx(1 / 3)
    assert metrics["groups/solve_none_fraction"] == pytest.approx(1 / 3)
    assert metrics["sampled_tokens"] == pytest.approx(7 / 6)
    assert metrics["sampled_tokens/max"] == 2
    assert metrics["turns"] == pytest.approx(8 / 6)
    assert metrics["tool_calls"] == pytest.approx(2 / 6)
    assert metrics["truncated_fraction"] == pytest.approx(1 / 6)
    stops = {name: value for name, value in metrics.items() if name.startswith("stop/")}
    assert stops == pytest.approx(
        {"stop/answered": 4 / 6, "stop/max_steps": 1 / 6, "stop/error": 1 / 6}
    )
    assert metrics["entropy"] == pytest.approx((0.5 + 1.5 + 1 + 4) / 7)
    assert metrics["policy_version"] == pytest.approx(20 / 6)
    solved = rollout_metrics(lazy_stack(ROWS), solved_at=0.5)
    assert solved["groups/solve_none_fraction"] == 0


def test_what_is_missing_of_sets_and_experts_is_told():
    plain = trajectory(0, 1.0, log_probs=(-0.5, -1.5))
    names = {name.partition("/")[0] for name in rollout_metrics(lazy_stack([plain]))}
    assert not names & {"sampling_mask", "routed_experts"}
    row = trajectory(0, 1.0, log_probs=(-0.5, -1.5, -1.0))
    # Sets of 2 tokens (5 bytes) and of 4 (9 bytes); the third token has none.
    row["sampling_mask"] = mask_entries([b"", b"", *sets_of_ids([[1, 2], range(4), []], 500)])
    # Of the 4 tokens that were read to draw the others, one layer of the second is not known.
    experts = torch.zeros(5, 3, 2, dtype=torch.uint8)
    experts[1, 2] = experts[4] = 255
    row["routed_experts", "full"] = experts
    metrics = rollout_metrics(lazy_stack([row]))
    assert metrics["sampling_mask/missing_fraction"] == pytest.approx(1 / 3)
    assert metrics["sampling_mask/kept_tokens"] == 3
    assert metrics["sampling_mask/bytes_per_token"] == 7
    assert metrics["routed_experts/missing_fraction"] == pytest.approx(1 / 4)
    assert metrics["routed_experts/bytes_per_token"] == 6
    # Beside a row without any, both its tokens are missing.
    both = rollout_metrics(lazy_stack([row, plain]))
    assert both["sampling_mask/missing_fraction"] == pytest.approx(3 / 5)
    assert both["routed_experts/missing_fraction"] == pytest.approx((1 + 3) / (4 + 3))


def test_the_estimate_of_the_entropy_is_unbiased():
    """Sampled from a distribution, minus the mean log-prob is its entropy."""
    torch.manual_seed(0)
    log_p = torch.randn(7).log_softmax(0)
    drawn = torch.multinomial(log_p.exp(), 40_000, replacement=True)
    metrics = rollout_metrics(lazy_stack([trajectory(0, 1.0, log_probs=log_p[drawn].tolist())]))
    entropy = float(-(log_p.exp() * log_p).sum())
    assert metrics["entropy"] == pytest.approx(entropy, abs=0.02)  # four standard errors


def output(**values):
    names = "loss_objective clip_fraction clip_fraction_low clip_fraction_high kl_approx ESS "
    names += "ratio_mean kept_fraction num_active_tokens num_sequences"
    terms = {name: torch.tensor(float(values.get(name, 0.0))) for name in names.split()}
    return GRPOLossOutput.from_tensordict(TensorDict(terms))


def test_updates_are_means_over_all_optimizer_steps():
    outputs = [
        output(loss_objective=1, clip_fraction_low=0.1, ESS=1, ratio_mean=1, num_active_tokens=9),
        output(
            loss_objective=3, clip_fraction_high=0.4, ESS=0.5, ratio_mean=2, num_active_tokens=9
        ),
    ]
    outcomes = [StepOutcome(2.0), StepOutcome(math.nan, "not finite")]
    metrics = update_metrics(outputs, outcomes)
    assert metrics["loss"] == 2, "not only the last epoch's"
    assert metrics["clip_fraction/negative_advantage"] == pytest.approx(0.05)
    assert metrics["clip_fraction/positive_advantage"] == pytest.approx(0.2)
    assert (metrics["ESS/min"], metrics["ratio_mean/max"]) == (0.5, 2)
    assert (metrics["grad_norm"], metrics["grad_norm/max"]) == (2, 2)
    assert (metrics["optimizer_steps"], metrics["optimizer_steps/skipped"]) == (1, 1)
    assert update_metrics([], []) == {"optimizer_steps": 0, "optimizer_steps/skipped": 0}


def test_an_episode_of_several_rows_counts_once():
    """Of a group: a program with two helpers, cut, gets 1; one without helpers gets 0."""
    rows = [
        *as_parts(
            *[trajectory(0, 1.0, turns=4, stop="max_steps", log_probs=(-1.0,) * n) for n in (1, 2)],
            trajectory(0, 1.0, turns=4, stop="max_steps", log_probs=(-2.0,) * 3),
            episode=5,
        ),
        *as_parts(trajectory(0, 0.0, turns=2, log_probs=(-1.0, -1.0)), episode=6),
    ]
    metrics = rollout_metrics(lazy_stack([rows[i] for i in (3, 2, 0, 1)]))  # in any order
    assert metrics["reward"] == metrics["rewards/own/mean"] == 0.5
    assert metrics["reward/std"] == pytest.approx(math.sqrt(0.5))
    assert (metrics["turns"], metrics["tool_calls"]) == (3, 2)
    assert (metrics["truncated_fraction"], metrics["stop/max_steps"]) == (0.5, 0.5)
    assert (metrics["sampled_tokens"], metrics["sampled_tokens/max"]) == ((6 + 2) / 2, 6)
    assert metrics["entropy"] == pytest.approx((3 * 1 + 3 * 2 + 2 * 1) / 8)


def test_dense_rewards_of_an_episode_are_those_of_all_its_rows():
    """The first row was paid 1, the second 0.5 and -0.25: 1.25, and not what one of them has."""
    first, second = (trajectory(0, 0.0, log_probs=(-1.0,) * n) for n in (1, 2))
    first["reward"] = torch.tensor([[0.0], [0.0], [1.0]])
    second["reward"] = torch.tensor([[0.0], [0.0], [0.5], [-0.25]])
    rows = lazy_stack(as_parts(first, second, episode=1))
    assert rollout_metrics(rows)["reward"] == 1.25
    estimates = evaluation_estimates(rows, ks=(), solved_by="reward")
    assert (estimates["reward"].value, estimates["mean@1"].value) == (1.25, 1.0)
    assert second["reward"].shape == (4, 1), "what is told does not change the rows"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_phases_do_not_overlap():
    clock = Clock()
    timer = PhaseTimer(clock)

    class Policy(nn.Module):
        def forward(self):
            clock.now += 5

    policy = Policy()
    timer.watch(policy, "generate")
    with timer("environment"):
        clock.now += 1
        policy()
        clock.now += 2
    clock.now += 100  # in no phase
    with timer("train"):
        clock.now += 4
        with pytest.raises(RuntimeError, match="'train' is still running"):
            timer.reset()
    assert timer.seconds == {"environment": 3, "generate": 5, "train": 4}


def test_a_call_that_fails_ends_its_phase():
    timer = PhaseTimer(Clock())

    class Broken(nn.Module):
        def forward(self):
            raise OSError("broken")

    broken = Broken()
    timer.watch(broken, "generate")
    with pytest.raises(OSError, match="broken"), timer("environment"):
        broken()
    timer.reset()


def test_a_step_is_reduced_to_one_table():
    clock = Clock()
    timer = PhaseTimer(clock)
    step = StepMetrics(timer)
    with timer("generate"):
        clock.now += 2
    rows = lazy_stack(ROWS)
    assert step.add_rollouts(rows) is rows
    with timer("train"):
        clock.now += 3
        for _ in range(2):
            step.add_update(output(num_active_tokens=9, ESS=1, ratio_mean=1), StepOutcome(1.0))
    metrics = step.reduce(learning_rate=0.5)
    assert metrics["learning_rate"] == 0.5
    assert (metrics["time/generate_s"], metrics["time/train_s"], metrics["time/step_s"]) == (
        2,
        3,
        5,
    )
    assert metrics["throughput/sampled_tokens_per_s"] == pytest.approx(3.5)
    assert metrics["throughput/trained_tokens_per_s"] == pytest.approx(6)
    assert {"reward", "loss", "entropy", "grad_norm"} <= metrics.keys()
    assert timer.seconds == {}, "the next step begins anew"
    with timer("wait"):  # tokens are drawn beside the training
        clock.now += 1
    step.add_rollouts(rows)
    with timer("train"):
        clock.now += 3
    assert step.reduce()["throughput/sampled_tokens_per_s"] == pytest.approx(7 / 4)


def test_solved_groups_are_those_of_the_reward_that_is_named():
    def two(group, valid, right):
        row = trajectory(group, valid + right)
        return row.set("rewards", TensorDict({"valid": [[valid]], "right": [[right]]}))

    rows = lazy_stack([two(0, 1.0, 0.0), two(0, 1.0, 0.0), two(1, 1.0, 1.0), two(1, 1.0, 1.0)])
    unnamed = rollout_metrics(rows)
    assert math.isnan(unnamed["groups/solve_all_fraction"]), "a sum does not say it"
    named = StepMetrics(solved_by="right")
    named.add_rollouts(rows)
    assert named.reduce()["groups/solve_all_fraction"] == 0.5
    assert named.reduce()["groups/solve_none_fraction"] == 0.5
