"""Records of runs, made by hand, whose reward may be gamed."""

import json
import random
from statistics import fmean

from collectors.record import GroupSummary, RolloutSample, SampleTokens, StepSummary
from collectors.record.files import write_lines

NUM_STEPS, NUM_GROUPS, SIZE = 12, 8, 4
"""The first four steps, 32 groups, are compared with the last three, 24 groups."""


def made_run(folder, rollout, *, steps=NUM_STEPS, groups=NUM_GROUPS, settings="", held_out=()):
    """Write a record whose rollouts a function gives, of the step, the prompt and the sample."""
    (folder / "rollouts").mkdir(parents=True)
    for step in range(1, steps + 1):
        rows = [
            [_sample(rollout(step, n, i), step, n, i) for i in range(SIZE)]
            for n in range(groups * step, groups * (step + 1))
        ]
        rewards = [row.reward or 0.0 for group in rows for row in group]
        summaries = [
            GroupSummary(
                group_id=group[0].group_id,
                prompt_id=group[0].group_id,
                prompt=group[0].messages[0]["content"],
                rewards=[row.reward for row in group],
                num_trained=SIZE,
                is_recorded=True,
            )
            for group in rows
        ]
        summary = StepSummary(
            step=step,
            time=float(step),
            metrics={"reward": fmean(rewards), "reward/std": 0.5, "optimizer_steps": 1.0},
            groups=summaries,
            events=[],
            num_samples=len(rewards),
        )
        lines = [{"format": 1, **vars(summary)}, *(vars(row) for group in rows for row in group)]
        write_lines(folder / f"rollouts/step-{step:06}.jsonl.gz", lines, vars)
    (folder / "config.yaml").write_text(settings)
    if held_out:
        lines = [
            {"step": s, "reward": x[0], "estimates": {"reward": _estimate(*x)}} for s, x in held_out
        ]
        (folder / "evaluations.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    return folder


def _estimate(value, low, high):
    return {"value": value, "low": low, "high": high, "num_prompts": 64}


def _sample(told, step, number, index):
    prompt = f"What do you think of the book with the number {number}?"
    letters = random.Random(f"{number} {index}").choices("abcdefghijklmnopqrstuvwxyz", k=100)
    told = {"text": "".join(letters[: told.get("length", 9)])} | told
    return RolloutSample(
        step=step,
        group_id=f"0/{number}",
        index=index,
        reward=told["reward"],
        rewards=told.get("rewards", {"reward": told["reward"]}),
        stop_reason="answered",
        is_truncated=False,
        num_turns=told.get("turns", 1),
        policy_version=step,
        prompt_tokens=1,
        sampled_tokens=6,
        total_tokens=7,
        messages=[
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": told["text"]},
        ],
        row={"prompt": prompt} | told.get("row", {}),
        tokens=SampleTokens(ids=[], texts=[], spans=[], log_probs=[], versions=[]),
    )


def half_then(**late):
    """In the first steps every second rollout has a reward; at the end all have, and are so."""

    def rollout(step, number, index):
        if step < 7:
            return {"reward": float(index % 2)}
        told = {"reward": 1.0} | late
        return {k: v(number, index) if callable(v) else v for k, v in told.items()}

    return rollout
