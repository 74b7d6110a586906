# /// script
# requires-python = ">=3.11"
# dependencies = ["torchrl-agents"]
# ///
"""One loss in a loop that knows nothing of this toolkit: torch in, torch out.

    python examples/loss_in_a_foreign_loop.py [STEPS]

A softmax over twelve arms stands for the policy, and a draw for a response of one token.
``objectives.functional`` imports torch and jaxtyping alone; the folder can be copied.
"""

import sys

import torch

from objectives.functional import clipped_surrogate, group_advantage, log_ratio, token_mean

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60
ARMS, GROUPS, GROUP = 12, 4, 16

torch.manual_seed(0)
pay = torch.rand(ARMS)
logits = torch.zeros(ARMS, requires_grad=True)
optimizer = torch.optim.Adam([logits], lr=0.1)
group = torch.arange(GROUPS).repeat_interleave(GROUP)
for step in range(STEPS):
    with torch.no_grad():
        sampler = logits.log_softmax(-1)
        arm = torch.multinomial(sampler.exp(), GROUPS * GROUP, replacement=True)
        reward = pay[arm] + 0.1 * torch.randn(GROUPS * GROUP)
    advantage = group_advantage(reward, group)
    for _ in range(2):  # two epochs: the second one is off policy, and is clipped
        ratio = log_ratio(logits.log_softmax(-1)[arm], sampler[arm])
        surrogate = clipped_surrogate(ratio, advantage, clip_low=0.2, clip_high=0.28)
        token_mean(surrogate.loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    if step % 10 == 9:
        clipped = (surrogate.clipped_low | surrogate.clipped_high).float().mean()
        print(f"step {step + 1}: reward {reward.mean():.3f}, clipped {clipped:.2f}")
best, found = pay.argmax(), logits.argmax()
print(f"the best arm pays {pay[best]:.3f}, the one that was found {pay[found]:.3f}")
