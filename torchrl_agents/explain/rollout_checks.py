"""Checks of recorded rollouts: no rewards, no differences, cuts, calls that nobody can read."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Final

from torchrl_data.stop_reason import StopReason, kind_of
from torchrl_envs.entries.rewards import error_kind

from .evidence import RolloutFacts, RunEvidence
from .run_finding import RolloutId, RunFinding

NUM_ROWS: Final = 3
"""So many rollouts are named with a finding."""
_LENGTH_SETTINGS: Final = {
    StopReason.RESPONSE_LENGTH: "policy.max_new_tokens",
    StopReason.CONTEXT_LENGTH: "policy.max_model_len",
    StopReason.TOKEN_BUDGET: "collector.max_episode_tokens",
    StopReason.MAX_STEPS: "collector.max_turns",
}
_CALL_SIGNS: Final = {
    "<tool_call>": "hermes",
    "<function=": "qwen3_coder",
    "<arg_key>": "glm",
    "[TOOL_CALLS]": "mistral",
    "<|tool_call|>": "phi4mini",
    "<TOOLCALL>": "nemotron",
    "<|tool_call_begin|>": "kimi",
    "<minimax:tool_call>": "minimax",
    "<|python_tag|>": "llama3",
    '"parameters":': "llama3",
}
"""What shows in a text that a call was meant, and in which format."""


def ids_of(rows: Sequence[RolloutFacts]) -> list[RolloutId]:
    """Of the first few."""
    return [row.id for row in rows[:NUM_ROWS]]


def unscorable(run: RunEvidence) -> RunFinding | None:
    """Rollouts without a reward."""
    share = run.mean("reward/unscorable_fraction", run.last)
    if not share >= 0.1:
        return None
    rows = [row for row in run.last_rollouts if row.sample.reward is None]
    told = [row.sample.reward_errors for row in rows]
    errors = Counter(error_kind(each) for each in told if each)
    ends = Counter(kind_of(row.sample.stop_reason) for row in rows)
    if errors:
        why = f"The error that comes most often is: {errors.most_common(1)[0][0]:.240}"
    else:
        ways = ", ".join(f"{count} by {reason}" for reason, count in ends.most_common(3))
        why = f"No reward function applied to them; they ended {ways}"
    return RunFinding(
        code="unscorable",
        explains=share,
        what=f"{share:.0%} of the rollouts have no reward, so they are not trained. {why}.",
        change="Mend the reward function (task.rewards), so that it gives a number for each "
        "rollout; None says that it does not apply, and NaN is an error.",
        numbers={"unscorable_fraction": share},
        rows=ids_of(rows),
    )


def cut(run: RunEvidence) -> RunFinding | None:
    """Answers that end at a limit, and are worse for it."""
    rows = [row for row in run.last_rollouts if row.sample.reward is not None]
    reasons = Counter(
        kind
        for row in rows
        if (kind := kind_of(row.sample.stop_reason)) in _LENGTH_SETTINGS and row.sample.is_truncated
    )
    if not reasons:
        return None
    reason, count = reasons.most_common(1)[0]
    is_cut = [kind_of(row.sample.stop_reason) == reason for row in rows]
    share = count / len(rows)
    of_cut = [row.sample.reward or 0.0 for row, its in zip(rows, is_cut, strict=True) if its]
    others = [row.sample.reward or 0.0 for row, its in zip(rows, is_cut, strict=True) if not its]
    if len(others) > 0.05 * len(rows):
        is_worse = max(of_cut) < fmean(others)
    else:
        lowest = run.reward_range[0]
        is_lowest = sum(reward == lowest for reward in of_cut) >= 0.9 * count
        is_worse = (
            is_lowest and lowest < run.setting("evaluate.solved_at", 1.0) and not run.has_improved
        )
    if share < 0.3 or not is_worse:
        return None
    where = _limit_of(rows, is_cut)
    unit = "turns" if reason == StopReason.MAX_STEPS else "tokens"
    beside = f", {fmean(others):.3g} where they end by themselves" if others else ""
    setting = _LENGTH_SETTINGS[StopReason(reason)]
    return RunFinding(
        code="cut",
        explains=share,
        what=f"{share:.0%} of the answers are cut at {where} {unit} ({reason}). Their mean reward "
        f"is {fmean(of_cut):.3g}{beside}.",
        change=f"Raise {setting}"
        + (f", which is {run.setting(setting)}" if run.setting(setting) else "")
        + ", or ask for shorter answers.",
        numbers={"cut_fraction": share, "limit": where, "reward_of_cut": fmean(of_cut)},
        rows=ids_of([row for row, its in zip(rows, is_cut, strict=True) if its]),
    )


def _limit_of(rows: Sequence[RolloutFacts], is_cut: Sequence[bool]) -> int:
    """The limit at which most were cut."""
    told = [
        row.sample.stop_limit if row.sample.stop_limit >= 0 else row.sample.sampled_tokens
        for row, its in zip(rows, is_cut, strict=True)
        if its
    ]
    return Counter(told).most_common(1)[0][0]


def unread_calls(run: RunEvidence) -> RunFinding | None:
    """Tool calls that can't be read, or that are written in another format than is read."""
    rows = run.last_rollouts
    if not rows or not any("tool_calls" in step for step in run.last):
        return None
    broken = [row for row in rows if any(not call.tool for call in row.sample.tool_calls)]
    is_read = run.mean("tool_calls", run.last) >= 0.1  # a call that ends an episode has no answer
    silent = [row for row in rows if not (is_read or row.sample.tool_calls or row.is_answered)]
    meant = [(row, sign) for row in silent if (sign := _sign(row.said))]
    bad = broken if len(broken) >= len(meant) else [row for row, _ in meant]
    share = len(bad) / len(rows)
    if share < 0.3:
        return None
    read = run.setting("policy.tool_call_format") or "the format that the chat template teaches"
    if bad is broken:
        what = f"{share:.0%} of the rollouts write a tool call that can't be read (as {read})."
        change = (
            "Look at what the policy writes; set policy.tool_call_format to the format in which it "
            "writes calls, or teach it the format (warm_start.num_steps, or recipe sft)."
        )
    else:
        sign = Counter(sign for _, sign in meant).most_common(1)[0][0]
        what = (
            f"{share:.0%} of the rollouts write {sign!r}, as calls of {_CALL_SIGNS[sign]} look, "
            f"but no call is found: calls are read as {read}."
        )
        change = f"Set policy.tool_call_format={_CALL_SIGNS[sign]}."
    return RunFinding(
        code="unread_calls",
        explains=share,
        what=what,
        change=change,
        numbers={"unread_fraction": share},
        rows=ids_of(bad),
    )


def _sign(text: str) -> str | None:
    return next((sign for sign in _CALL_SIGNS if sign in text), None)


def constant_reward(run: RunEvidence) -> RunFinding | None:
    """Reward functions that give all rollouts of a prompt the same, in the whole run."""
    if not run.compares_groups:
        return None
    rollouts = {row.id: row for row in (*run.first_rollouts, *run.last_rollouts)}
    groups = run.groups([*rollouts.values()])
    if len(groups) < 2 or sum(map(len, groups)) < 8:
        return None
    groups = [group for group in groups if _num_texts(group) > 1]
    if not groups:
        return None  # no reward could differ: another finding says why
    total = _constant(groups, lambda row: row.sample.reward)
    names = sorted({name for group in groups for row in group for name in row.sample.rewards})
    flat = {
        name: values
        for name in names
        if (values := _constant(groups, lambda row, n=name: row.sample.rewards.get(n))) is not None
    }
    if total is None or not all(map(_is_flat, groups)):
        return None
    told = [_constant_words(name, values) for name, values in (flat or {"reward": total}).items()]
    value = min(total)
    return RunFinding(
        code="constant_reward",
        explains=1.0,
        what=f"In none of {len(groups)} groups does any reward differ between rollouts, though "
        f"what they wrote does: {'; '.join(told)}.",
        change="Call the reward function (task.rewards) with an answer that is right and one that "
        "is wrong. If it tells them apart, the task is too hard or too easy for this model: take "
        "easier or harder prompts, give partial rewards, or warm the model up.",
        numbers={"num_groups": len(groups), "lowest": value, "highest": max(total)},
        rows=ids_of(groups[-1]),
    )


def _num_texts(group: Sequence[RolloutFacts]) -> int:
    return len({row.sampled_ids for row in group})


def _constant(
    groups: Sequence[Sequence[RolloutFacts]], value_of: Callable[[RolloutFacts], float | None]
) -> set[float] | None:
    """The values of the groups, where each group has one alone; ``None`` where they differ."""
    found: set[float] = set()
    for group in groups:
        values = {value for row in group if (value := value_of(row)) is not None}
        if len(values) > 1:
            return None
        found |= values
    return found or None


def _constant_words(name: str, values: set[float]) -> str:
    if len(values) == 1:
        return f"{name} is always {min(values):.3g}"
    return f"{name} is one number for each prompt, from {min(values):.3g} to {max(values):.3g}"


def same_texts(run: RunEvidence) -> RunFinding | None:
    """Groups of which all rollouts are the same text, so that no reward can differ."""
    if not run.compares_groups:
        return None
    sampling = {
        name: run.setting(f"policy.{name}") for name in ("temperature", "top_k", "top_p", "min_p")
    }
    is_greedy = (
        (sampling["temperature"] or 1.0) <= 0.3
        or sampling["top_k"] == 1
        or (sampling["top_p"] or 1.0) <= 0.2
        or (sampling["min_p"] or 0.0) >= 0.5
    )
    groups, right = run.groups(run.last_rollouts), run.setting("evaluate.solved_at", 1.0)
    same = [g for g in groups if _num_texts(g) == 1]
    # The best reward of a run that does not explore is no sign that a prompt is solved.
    same = [g for g in same if (g[0].sample.reward < right if is_greedy else not run.is_solved(g))]
    if not groups or len(same) / len(groups) < 0.4:
        return None
    share = len(same) / len(groups)
    entropy = run.values("entropy")
    told = f"{share:.0%} of the groups all rollouts are one text, so none is better than another"
    numbers = {"same_text_fraction": share, "entropy": entropy[-1] if entropy else math.nan}
    if is_greedy:
        given = ", ".join(f"policy.{k}={v}" for k, v in sampling.items() if v is not None)
        return RunFinding(
            code="greedy_sampling",
            explains=share,
            what=f"In {told}: the policy samples almost greedily ({given}).",
            change="Sample with policy.temperature=1, without top_k, top_p or min_p.",
            numbers=numbers,
            rows=ids_of(same[0]),
        )
    fell = f" It was {entropy[0]:.3g} in the first step." if entropy else ""
    now = f"; the entropy is {entropy[-1]:.2g} nats per token." if entropy else "."
    return RunFinding(
        code="entropy_gone",
        explains=share,
        what=f"In {told}{now}{fell}",
        change="Begin again from before it fell, with loss.entropy_coeff=0.01 or a lower "
        "optim.learning_rate; a higher policy.temperature, too, makes rollouts differ.",
        numbers=numbers,
        rows=ids_of(same[0]),
    )


def no_signal(run: RunEvidence) -> RunFinding | None:
    """Groups of which all rollouts have the same reward, those that are solved left out."""
    if not run.compares_groups:
        return None
    groups = run.groups(run.last_rollouts)
    flat = [g for g in groups if _is_flat(g) and not run.is_solved(g)]
    is_refilled = run.setting("collector.refill") and any(run.values("optimizer_steps", run.last))
    if not groups or is_refilled or len(flat) / len(groups) < 0.6:
        return None
    share = len(flat) / len(groups)
    values = Counter(group[0].sample.reward for group in flat)
    value, count = values.most_common(1)[0]
    size = len(flat[0])
    return RunFinding(
        code="no_signal",
        explains=share,
        what=f"No signal in {share:.0%} of the groups: all rollouts of a prompt have the same "
        f"reward (in {count} of {len(flat)} it is {value:.3g}), and nothing is learnt from them.",
        change=f"Larger groups (collector.group_size, which is {size}), easier prompts, a reward "
        "that gives partial credit, or other groups in their place (collector.refill=true).",
        numbers={"no_signal_fraction": share, "group_size": size},
        rows=[group[0].id for group in flat[:NUM_ROWS]],
    )


def _is_flat(group: Sequence[RolloutFacts]) -> bool:
    # Agents with rewards of their own are told apart by these; their mean may never change.
    own = {tuple(sorted(row.sample.rewards.items())) for row in group if row.sample.agent}
    return len({row.sample.reward for row in group}) == 1 and len(own) < 2


def off_policy(run: RunEvidence) -> RunFinding | None:
    """Tokens that the trained model gives another probability than the policy that sampled them."""
    rows = [row for row in run.last_rollouts if math.isfinite(row.sampler_gap)]
    if not rows:
        return None
    gap = fmean(row.sampler_gap for row in rows)
    ages = [row.age for row in rows if math.isfinite(row.age)]
    age = fmean(ages) if ages else math.nan
    if gap < 0.2 or run.has_improved:
        return None
    rows = sorted(rows, key=lambda row: -row.sampler_gap)
    far = sum(row.sampler_gap >= 0.1 for row in rows) / len(rows)
    if age >= 1:
        why = f"Their tokens are {age:.1f} updates old in the mean."
        change = (
            "Hand the weights over after each step (collector.update_policy_weights_ in a loop of "
            "your own), lower collector.max_staleness, or lower optim.learning_rate."
        )
    else:
        why = "They are of the newest weights, so the two compute differently."
        change = (
            "Let both compute alike: policy.dtype and train.autocast, the engine's dtype and "
            "quantisation; or weigh the difference with loss.sampler_correction.level=token."
        )
    return RunFinding(
        code="off_policy",
        explains=far,
        what=f"The policy is off from the sampler: the trained model's log-probs of the sampled "
        f"tokens differ by {gap:.2g} nats per token. {why}",
        change=change,
        numbers={"sampler_gap": gap, "age": age},
        rows=ids_of(rows),
    )
