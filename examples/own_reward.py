# /// script
# requires-python = ">=3.11"
# dependencies = ["torchrl-agents"]
# ///
"""A reward of one's own: a function of the completions and of the columns of the data.

    python examples/own_reward.py [MODEL] [STEPS]

One that is near the mark gives a signal long before one that is right or wrong.
"""

import sys

import torch
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from torchrl_agents import (
    ChatEnv,
    DataLoadingPrimer,
    GRPOLoss,
    LLMCollector,
    MCAdvantage,
    RewardFunctions,
    StepCounter,
    TransformersWrapper,
)

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 10
ROLLOUTS, GROUP = 32, 8


def exact(completions, length, **columns):
    return [float(len(t) == wanted) for t, wanted in zip(completions, length, strict=True)]


def close(completions, length, **columns):
    pairs = zip(completions, length, strict=True)
    return [0.5 ** (abs(len(text) - wanted) / 10) for text, wanted in pairs]


torch.manual_seed(0)
policy = TransformersWrapper(MODEL, generate_kwargs={"max_new_tokens": 24}, max_model_len=512)
rows = [{"prompt": f"Write {n} letters.", "length": n} for n in range(5, 60)]
env = ChatEnv(batch_size=(ROLLOUTS,)).append_transform(
    Compose(
        DataLoadingPrimer(rows, group_size=GROUP, shuffle=True),
        RewardFunctions([exact, close], weights=[1.0, 0.5]),
        StepCounter(max_steps=1),
    )
)

buffer = ReplayBuffer(
    storage=LazyStackStorage(ROLLOUTS), transform=MCAdvantage(GROUP), batch_size=ROLLOUTS
)
collector = LLMCollector(env, policy, replay_buffer=buffer)
loss = GRPOLoss(policy)
optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-5, weight_decay=0.0)
for step in range(STEPS):
    reward = collector.collect()["reward"].nanmean()
    if len(buffer):
        loss(buffer[:]).total().backward()
        optimizer.step()
        optimizer.zero_grad()
        buffer.empty()
    print(f"step {step}: reward {reward:.3f}")
collector.shutdown()
