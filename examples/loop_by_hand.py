# /// script
# requires-python = ">=3.11"
# dependencies = ["torchrl-agents"]
# ///
"""The loop by hand: collect, advantage, loss, step, all in view.

    python examples/loop_by_hand.py [MODEL] [STEPS]

The policy is paid for the letter e. Advantages are computed here from the rewards, log-probs by a
plain forward pass of one row after the other, and the loss is a function of tensors.
"""

import sys

import torch
from torchrl.envs.transforms import Compose

from objectives.functional import clipped_surrogate, group_advantage, log_ratio, token_log_probs
from torchrl_agents import (
    ChatEnv,
    DataLoadingPrimer,
    LLMCollector,
    RewardFunctions,
    StepCounter,
    TransformersWrapper,
)

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 10
PROMPTS, GROUP = 4, 8


def letters_e(completions, **columns):
    return [text.count("e") / max(len(text), 1) for text in completions]


torch.manual_seed(0)
policy = TransformersWrapper(MODEL, generate_kwargs={"max_new_tokens": 16}, max_model_len=512)
rows = [{"prompt": f"Say something about the number {n}."} for n in range(64)]
env = ChatEnv(batch_size=(PROMPTS * GROUP,)).append_transform(
    Compose(
        DataLoadingPrimer(rows, group_size=GROUP, shuffle=True),
        RewardFunctions([letters_e]),
        StepCounter(max_steps=1),
    )
)
collector = LLMCollector(env, policy)
optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-5, weight_decay=0.0)
for step in range(STEPS):
    # Collect: a row for each rollout, with its ids, masks, sampled log-probs and reward.
    rollouts = collector.collect()
    reward = rollouts["reward"].flatten()
    # Advantage: how much better than its group, in standard deviations.
    advantage = group_advantage(reward, rollouts["group_id"].flatten())
    # Loss: PPO's clipped objective of the tokens that were sampled, a mean over all of them.
    each = rollouts.unbind(0)
    num_tokens = sum(int(row["masks", "all_assistant_mask"].sum()) for row in each)
    for row, value in zip(each, advantage, strict=True):
        ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        logits = policy.model(ids[None]).logits[0, :-1]
        new = token_log_probs(logits, ids[1:]).log_prob[mask[1:]]
        ratio = log_ratio(new, row["log_probs", "full"][mask])
        loss = clipped_surrogate(ratio, value.expand_as(ratio), clip_high=0.28).loss
        (loss.sum() / num_tokens).backward()
    # Step.
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: reward {reward.mean():.3f}")
collector.shutdown()
