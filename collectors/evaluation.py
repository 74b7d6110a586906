"""Evaluation of a policy by several samples of each prompt, with intervals over the prompts.

Shape legend: P prompts, N samples of each.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_data.keys import GROUP_ID, REWARD, REWARDS
from torchrl_envs.entries.rewards import reward_of_row, several_rewards, solving_rewards
from torchrl_envs.entries.whole_episodes import rows_by_episode, whole_episode


class Estimate(NamedTuple):
    """A mean over prompts, and the interval of its bootstrap."""

    value: float
    low: float
    high: float
    num_prompts: int
    """That have enough samples."""


def pass_at_k(correct: Tensor, valid: Tensor | None = None, *, k: int) -> Tensor:
    """The chance that at least one of k samples is correct: ``1 - C(n - c, k) / C(n, k)``.

    The mean over all subsets of k of a prompt's n samples, c of them correct, so unbiased.

    Args:
        correct: bool ``[P, N]``.
        valid: False where there is no verdict, bool ``[P, N]``; those are no samples.
        k: size of the subsets.

    Returns:
        float64 ``[P]``; NaN for a prompt with fewer than k samples.

    Raises:
        ValueError: k is below 1, or the shapes differ.

    See Also:
        Chen et al., 2021, arXiv:2107.03374, eq. 1.

    Example:
        >>> correct = torch.tensor([[True, False, False, False], [True, True, True, True]])
        >>> pass_at_k(correct, k=2)  # 1 - C(3, 2) / C(4, 2) = 0.5 for the first prompt
        tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    count, right = _counts(correct, valid, k)
    return 1 - _choose_ratio(count - right, count, k)


def pass_hat_k(correct: Tensor, valid: Tensor | None = None, *, k: int) -> Tensor:
    """The chance that all of k samples are correct (pass^k): ``C(c, k) / C(n, k)``.

    Args:
        correct: bool ``[P, N]``.
        valid: False where there is no verdict, bool ``[P, N]``; those are no samples.
        k: size of the subsets.

    Returns:
        float64 ``[P]``; NaN for a prompt with fewer than k samples.

    Raises:
        ValueError: k is below 1, or the shapes differ.

    See Also:
        Yao et al., 2024, arXiv:2406.12045, section 4.
    """
    count, right = _counts(correct, valid, k)
    return _choose_ratio(right, count, k)


def mean_at_n(values: Tensor, valid: Tensor | None = None) -> Tensor:
    """The mean over the samples of each prompt.

    Args:
        values: rewards, or whether a sample is correct, ``[P, N]``.
        valid: False where there is no value, bool ``[P, N]``.

    Returns:
        float64 ``[P]``; NaN for a prompt without a sample.

    Raises:
        ValueError: the shapes differ.
    """
    valid = _valid(values, valid)
    kept = torch.where(valid, values.double(), 0.0)
    return kept.sum(1) / valid.sum(1)


def majority_at_n(correct: Tensor, answer: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return whether the answer that most samples give is correct (self-consistency).

    Where several answers are given most often, one of them is drawn at random, and this is what
    is to be expected of it. Where samples with one answer have several verdicts, it counts as
    their mean. Where no sample has an answer, nothing is correct.

    Args:
        correct: bool ``[P, N]``.
        answer: integers ``[P, N]``, equal where a prompt's answers are; negative where a sample
            has none, which then has no vote.
        valid: False where there is no verdict, bool ``[P, N]``; those have no vote.

    Returns:
        float64 ``[P]``; NaN for a prompt without a sample.

    Raises:
        ValueError: the shapes differ.

    See Also:
        Wang et al., 2022, arXiv:2203.11171.
    """
    valid = _valid(correct, valid)
    if answer.shape != correct.shape:
        raise ValueError(f"answer is {list(answer.shape)}, but correct {list(correct.shape)}.")
    results = []
    for verdicts, answers, is_valid in zip(
        correct.tolist(), answer.tolist(), valid.tolist(), strict=True
    ):
        votes: dict[int, list[bool]] = defaultdict(list)
        for verdict, each, counts in zip(verdicts, answers, is_valid, strict=True):
            if counts and each >= 0:
                votes[each].append(verdict)
        most = max(map(len, votes.values()), default=0)
        tied = [sum(each) / most for each in votes.values() if len(each) == most]
        results.append(sum(tied) / len(tied) if tied else 0.0)
    found = torch.tensor(results, dtype=torch.float64)
    return found.masked_fill(~valid.any(1), float("nan"))


def bootstrap_interval(
    values: Tensor, *, level: float = 0.95, num_resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of a mean over prompts: the prompts are drawn anew, with replacement.

    Args:
        values: one per prompt, finite, ``[P]``.
        level: fraction of the resampled means that lies between the ends.
        num_resamples: how often the prompts are drawn.
        seed: of the draws.

    Returns:
        The lower and the upper end.

    Raises:
        ValueError: there are no values, one is not finite, or a setting is out of range.

    Example:
        >>> bootstrap_interval(torch.tensor([1.0, 1.0, 1.0]))
        (1.0, 1.0)
        >>> low, high = bootstrap_interval(torch.tensor([0.0, 1.0, 1.0, 0.0]))
        >>> low < 0.5 < high
        True
    """
    if values.ndim != 1 or not len(values) or not bool(values.isfinite().all()):
        raise ValueError("bootstrap_interval takes at least one value, all finite, [P].")
    if not 0 < level < 1 or num_resamples < 1:
        raise ValueError(
            f"level must be in (0, 1) and num_resamples at least 1, got {level}, {num_resamples}."
        )
    generator = torch.Generator().manual_seed(seed)
    values = values.double().cpu()
    means = []
    for start in range(0, num_resamples, 1000):  # a bound of the memory
        shape = (min(1000, num_resamples - start), len(values))
        means.append(values[torch.randint(len(values), shape, generator=generator)].mean(1))
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.cat(means).quantile(tails).tolist()
    return low, high


def evaluation_estimates(
    trajectories: TensorDictBase,
    *,
    ks: Sequence[int],
    solved_at: float = 1.0,
    solved_by: str | Sequence[str] | None = None,
    answer_of: Callable[[TensorDictBase], str | None] | None = None,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Return what an evaluation with several samples a prompt says.

    Args:
        trajectories: rows ``[B]``, as a collector gives them; those of a prompt share
            ``group_id``. A rollout that could not be scored is no sample; an episode of several
            rows is one, and its answer is in the row in which it ended.
        ks: sizes of the subsets.
        solved_at: the reward from which on a rollout is correct.
        solved_by: the reward that is asked, by its name and without its weight, or several, of
            which each that applies has to be so high; ``"reward"`` is the weighted sum. A rollout
            to which none of them applies is no sample of what is correct. ``None``: the one reward
            that there is.
        answer_of: the answer in a row, for the vote; ``None``: there is none.
        level: of the intervals.
        seed: of the bootstrap.

    Returns:
        ``reward`` and ``mean@n``, ``pass@k`` and ``pass^k`` for each k, and with ``answer_of``
        ``maj@n``, each over the prompts that have enough samples that could be scored; NaN where
        none has. n is the most that one has.

    Raises:
        ValueError: k is below 1; rewards are added, and ``solved_by`` names none of them; or no
            rollout has a reward of a name.
    """
    asked = [solved_by] if isinstance(solved_by, str) else solved_by
    _check_names(trajectories, asked)
    groups: dict[int, list[TensorDictBase]] = defaultdict(list)
    for own in rows_by_episode(trajectories.reshape(-1).unbind(0)):
        row = whole_episode(own)
        groups[int(row.get(GROUP_ID))].append(row)
    most = max(map(len, groups.values()), default=0)
    reward = torch.zeros(len(groups), most, dtype=torch.float64)
    valid, correct, judged = torch.zeros(3, *reward.shape, dtype=torch.bool)
    answer = torch.full(reward.shape, -1)
    for i, rows in enumerate(groups.values()):
        numbers: dict[str, int] = {}
        for j, row in enumerate(rows):
            total, rewards = reward_of_row(row), solving_rewards(row, asked)
            if asked is None and len(rewards) > 1:
                raise ValueError(f"evaluation_estimates: {several_rewards(rewards, 'solved_by')}")
            valid[i, j], judged[i, j] = not math.isnan(total), bool(rewards)
            reward[i, j] = total
            # A sum of parts may be a rounding below.
            correct[i, j] = min(rewards.values(), default=-math.inf) >= solved_at - 1e-6
            text = None if answer_of is None else answer_of(row)
            if text is not None:
                answer[i, j] = numbers.setdefault(text, len(numbers))
    found = {"reward": mean_at_n(reward, valid), f"mean@{most}": mean_at_n(correct, judged)}
    found |= {f"pass@{k}": pass_at_k(correct, judged, k=k) for k in ks}
    found |= {f"pass^{k}": pass_hat_k(correct, judged, k=k) for k in ks}
    if answer_of is not None:
        found[f"maj@{most}"] = majority_at_n(correct, answer, judged)
    estimates = dict.fromkeys(found, Estimate(math.nan, math.nan, math.nan, 0))
    for name, values in found.items():
        kept = values[~values.isnan()]
        if len(kept):
            low, high = bootstrap_interval(kept, level=level, seed=seed)
            estimates[name] = Estimate(float(kept.mean()), low, high, len(kept))
    return estimates


def _check_names(trajectories: TensorDictBase, asked: Sequence[str] | None) -> None:
    """Rewards that are asked for by name are there."""
    groups = [row.get(REWARDS, None) for row in trajectories.reshape(-1).unbind(0)]
    names = {str(name) for group in groups if group is not None for name in group.keys()}  # noqa: SIM118
    if missing := [name for name in asked or () if name not in {*names, REWARD}]:
        raise ValueError(
            f"evaluation_estimates: no rollout has the reward {missing[0]!r}, which solved_by= "
            f"names; there are {sorted(names)}, and {REWARD!r} for their sum."
        )


def _valid(values: Tensor, valid: Tensor | None) -> Tensor:
    if values.ndim != 2 or (valid is not None and valid.shape != values.shape):
        raise ValueError(
            f"Samples are [P, N], got {list(values.shape)}"
            + ("." if valid is None else f" with valid {list(valid.shape)}.")
        )
    return torch.ones_like(values, dtype=torch.bool) if valid is None else valid


def _counts(correct: Tensor, valid: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """Samples of each prompt, NaN where they are fewer than k, and the correct ones."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}.")
    valid = _valid(correct, valid)
    count = valid.sum(1).double()
    return count.masked_fill(count < k, float("nan")), (correct & valid).sum(1).double()


def _choose_ratio(chosen: Tensor, total: Tensor, k: int) -> Tensor:
    """``C(chosen, k) / C(total, k)``; NaN where ``total`` is."""
    ratio = torch.ones_like(total)
    for i in range(k):
        ratio = ratio * ((chosen - i).clamp(min=0) / (total - i))
    return ratio
