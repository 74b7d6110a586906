"""Checks of the course of a reward: with the length, its sources, held-out prompts, and jumps."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from statistics import fmean, pstdev
from typing import Final

import numpy as np

from .evidence import RolloutFacts, RunEvidence
from .rollout_checks import ids_of
from .run_finding import RunFinding
from .window_change import LARGE, Groups, WindowChange, change_between, has_risen, rollout_reward

_NUM_PAIRED: Final = 8
"""Groups that have rollouts of different lengths."""
_BY_LENGTH: Final = 0.75
_LONGER: Final = 1.3
_NUM_TESTED: Final = 16
"""Held-out prompts, of which an interval says something."""
_JUMP: Final = 5.0
"""Times the range of all rewards before."""
_NUM_REWARDS: Final = 50
_NUM_VALUES: Final = 10
"""Different rewards, from which on a reward is a measure and no mark."""
_NUM_JUMPS: Final = 3


def reward_by_length(run: RunEvidence) -> RunFinding | None:
    """A reward that goes to the longer of two rollouts, while rollouts grow longer."""
    first, last = run.early_groups, run.late_groups
    if not has_risen(first, last):
        return None
    length = change_between(first, last, _length)
    if not length.is_sure or length.after < _LONGER * length.before:
        return None
    # Where all have grown as long as they may, the first steps say what the reward follows.
    differ = sum(_differ(min(g, key=_length), max(g, key=_length)) for g in last)
    share, error = _longer_is_better(last if differ >= _NUM_PAIRED else first)
    if not share >= _BY_LENGTH or share - 3 * error <= 0.5:
        return None
    return RunFinding(
        code="reward_by_length",
        explains=share,
        what=f"The reward follows the length: of two rollouts of a prompt that differ in length, "
        f"the longer one has the higher reward in {share:.0%} (equal ones count half), and "
        f"rollouts grew from {length.before:.3g} to {length.after:.3g} characters.",
        change="If length is not what is wanted, let the reward (task.rewards) not depend on it: "
        "score a right answer and the same with padding; or set a limit, policy.max_new_tokens.",
        numbers={"longer_is_better": share, "before": length.before, "after": length.after},
        rows=ids_of(sorted(run.last_rollouts, key=_length, reverse=True)),
    )


def _length(row: RolloutFacts) -> float:
    """Characters that the policy wrote, which is what a grader sees."""
    return float(len(row.said))


def _differ(short: RolloutFacts, long: RolloutFacts) -> bool:
    """Return whether one of two rollouts is longer by a tenth."""
    return _length(long) > 1.1 * _length(short)


def _longer_is_better(groups: Groups) -> tuple[float, float]:
    """The share of pairs in which the longer rollout has more reward, and its standard error.

    Of pairs of equal turns that differ in length; equal rewards count half. NaN where fewer than
    eight groups have such a pair.
    """
    shares = []
    for group in groups:
        wins = []
        for pair in combinations(group, 2):
            short, long = sorted(pair, key=_length)
            if long.sample.num_turns == short.sample.num_turns and _differ(short, long):
                more = rollout_reward(long) - rollout_reward(short)
                wins.append(0.5 if more == 0 else float(more > 0))
        if wins:
            shares.append(fmean(wins))
    if len(shares) < _NUM_PAIRED:
        return math.nan, math.nan
    return fmean(shares), pstdev(shares) / math.sqrt(len(shares))


def sources_part(run: RunEvidence) -> RunFinding | None:
    """The reward has risen, and one of those that it is made of has fallen."""
    first, last = run.early_groups, run.late_groups
    rows = [row for group in (*first, *last) for row in group]
    names = sorted({name for row in rows for name in row.sample.rewards})
    if len(names) < 2 or not has_risen(first, last):
        return None
    given = run.setting("evaluate.solved_by", [])
    asked = [name for name in ([given] if isinstance(given, str) else given) if name in names]
    weights = _weights(rows, names)
    falls: dict[str, WindowChange] = {}
    for name in asked or names:
        counts = name in asked or weights.get(name, 0.0) > 0
        value_of = partial(_of_source, name=name)
        values = [value for row in rows if (value := value_of(row)) is not None]
        if not counts or max(values, default=0.0) <= 0:  # a cost may grow with what it buys
            continue
        change = change_between(first, last, value_of)
        if change.is_sure and -change.gain > LARGE * pstdev(values):
            falls[name] = change
    if not falls:
        return None
    told = [f"{n} fell from {x.before:.3g} to {x.after:.3g}" for n, x in falls.items()]
    total = change_between(first, last, rollout_reward)
    worst = min(falls, key=lambda name: falls[name].gain)
    row_value = partial(_of_source, name=worst)
    late = [row for group in last for row in group if row_value(row) is not None]
    below = [row for row in late if (row_value(row) or 0.0) < falls[worst].before]
    return RunFinding(
        code="sources_part",
        explains=len(below) / len(late),
        what=f"The reward has risen from {total.before:.3g} to {total.after:.3g}, but "
        f"{' and '.join(told)}: another one pays for it.",
        change=f"If {worst} is what is wanted, raise its weight (task.reward_weights), or give the "
        "others only where it is there: their product in place of their sum.",
        numbers={f"{n}/{end}": v for n, x in falls.items() for end, v in _both(x)},
        rows=ids_of(sorted(below, key=lambda row: -rollout_reward(row))),
    )


def _both(change: WindowChange) -> tuple[tuple[str, float], tuple[str, float]]:
    return ("before", change.before), ("after", change.after)


def _of_source(row: RolloutFacts, name: str) -> float | None:
    return row.sample.rewards.get(name)


def _weights(rows: Sequence[RolloutFacts], names: Sequence[str]) -> dict[str, float]:
    """The weight of each source in the sum, by least squares: settings do not name them all."""
    table = np.array([[row.sample.rewards.get(name) or 0.0 for name in names] for row in rows])
    found = np.linalg.lstsq(table, np.array([rollout_reward(row) for row in rows]), rcond=None)[0]
    return {name: float(w) if abs(w) > 1e-4 else 0.0 for name, w in zip(names, found, strict=True)}


def held_out_parts(run: RunEvidence) -> RunFinding | None:
    """A training reward that rises, where that on held-out prompts does not rise half as far.

    Both are counted from before the first update, and at the ends of their intervals of 95 %.
    """
    first, last = run.early_groups, run.late_groups
    chooses = ("collector.refill", "train.drop_solved_at", "train.pools")
    tests = [] if any(map(run.setting, chooses)) else run.held_out
    if len(tests) < 2 or tests[0][0] > 0 or not has_risen(first, last):
        return None
    (_, before), (step, after) = tests[0], tests[-1]
    begin = _interval([group for group in first if group[0].id.step == first[0][0].id.step])
    end = _interval(last)
    if step < last[0][0].id.step or before.num_prompts < _NUM_TESTED:
        return None
    gain, held_out_gain = end[0] - begin[0], after.value - before.value
    margin = math.hypot(before.high - before.low, after.high - after.low) / 2
    if held_out_gain + margin >= 0.5 * (gain - math.hypot(begin[1], end[1])):
        return None
    return RunFinding(
        code="held_out_parts",
        explains=1 - max(held_out_gain, 0.0) / gain,
        what=f"The reward in training has risen from {begin[0]:.3g} to {end[0]:.3g}, but on "
        f"held-out prompts it went from {before.value:.3g} to {after.value:.3g} (step {step}).",
        change="The policy learns these prompts, or what gives their answers away: take more of "
        "them, look for answers in what the policy is shown, or stop earlier (train.num_steps).",
        numbers={
            "before": begin[0],
            "after": end[0],
            "held_out/before": before.value,
            "held_out/after": after.value,
        },
        rows=ids_of(run.last_rollouts),
    )


def _interval(groups: Groups) -> tuple[float, float]:
    """The mean reward, and half of its interval of 95 %."""
    means = [fmean(map(rollout_reward, group)) for group in groups]
    return fmean(means), 1.96 * pstdev(means) / math.sqrt(len(means))


def reward_jump(run: RunEvidence) -> RunFinding | None:
    """Rewards far above all that were seen before: a gap that a few rollouts have found."""
    seen: list[float] = []
    bound = math.inf
    for step in run.record.steps if run.record else ():
        rewards = [r for group in step.groups for r in group.rewards if r is not None]
        if len(seen) >= _NUM_REWARDS and len({*seen}) >= _NUM_VALUES:
            low, high = min(seen), max(seen)
            if max(rewards, default=high) > high + _JUMP * (high - low):
                bound = high + _JUMP * (high - low)
                break
        seen += rewards
    rows = [row for group in run.late_groups for row in group if rollout_reward(row) > bound]
    if len(rows) < _NUM_JUMPS:
        return None
    highest = max(map(rollout_reward, rows))
    return RunFinding(
        code="reward_jump",
        explains=len(rows) / len(run.last_rollouts),
        what=f"{len(rows)} of the last rollouts have rewards of up to {highest:.3g}, where in "
        f"{len(seen)} rollouts before it was at most {max(seen):.3g}.",
        change="See what they do. If the reward (task.rewards) has a gap there, mend it, and bound "
        "what it gives.",
        numbers={"highest": highest, "highest_before": max(seen), "num_before": len(seen)},
        rows=ids_of(sorted(rows, key=lambda row: -rollout_reward(row))),
    )
