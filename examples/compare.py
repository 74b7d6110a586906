# /// script
# requires-python = ">=3.11"
# dependencies = ["torchrl-agents"]
# ///
"""Two evaluations of the same prompts: the difference, its interval, and a paired test.

python examples/compare.py outputs/evaluate/gsm8k/before-001 outputs/evaluate/gsm8k/after-001
"""

import json
import sys

import torch

from collectors.record import RunRecord
from torchrl_agents import bootstrap_interval

NUM_DRAWS = 10_000


def rewards_of(folder):
    """The mean reward of each prompt's samples, and its parts; a prompt is its row of the data."""
    record, found, parts = RunRecord(folder), {}, set()
    for step in record.steps:
        for sample in record.samples(step.step):
            parts.update(sample.rewards or {})
            if sample.segment == 0 and sample.reward is not None:
                prompt = json.dumps(sample.row, sort_keys=True, default=str)
                found.setdefault(prompt, []).append(sample.reward)
    return {prompt: sum(rewards) / len(rewards) for prompt, rewards in found.items()}, parts


if len(sys.argv) != 3:
    sys.exit(__doc__)
(first, asked), (second, asked_then) = map(rewards_of, sys.argv[1:])
if asked != asked_then:
    sys.exit(
        f"compare.py: other rewards: {sys.argv[1]} has {sorted(asked)}, {sys.argv[2]} "
        f"has {sorted(asked_then)}. Evaluate both by the same ones."
    )
shared = sorted(first.keys() & second.keys())
if len(shared) < 2:
    sys.exit(
        f"compare.py: {sys.argv[1]} has {len(first)} prompts and {sys.argv[2]} has {len(second)}, "
        f"of which {len(shared)} are the same: evaluate both on the same task with the same seed."
    )
before, after = (
    torch.tensor([rewards[prompt] for prompt in shared], dtype=torch.float64)
    for rewards in (first, second)
)
difference = after - before
low, high = bootstrap_interval(difference)
# If the two were equally good, each difference could as well have had the other sign.
generator = torch.Generator().manual_seed(0)
signs = torch.randint(2, (NUM_DRAWS, len(shared)), generator=generator) * 2.0 - 1
as_large = (signs.double() @ difference).abs() >= difference.sum().abs() - 1e-9
p_value = (1 + int(as_large.sum())) / (1 + NUM_DRAWS)

left_out = len(first) + len(second) - 2 * len(shared)
print(f"{len(shared)} prompts in both, {left_out} in one alone")
print(f"first       {before.mean():.3f}  {sys.argv[1]}")
print(f"second      {after.mean():.3f}  {sys.argv[2]}")
print(f"difference  {difference.mean():+.3f}  (95 % interval {low:+.3f} to {high:+.3f})")
better, worse = int((difference > 0).sum()), int((difference < 0).sum())
print(f"better on {better} prompts, worse on {worse}; sign-flip test p = {p_value:.4f}")
