# /// script
# requires-python = ">=3.11"
# dependencies = ["torchrl-agents"]
# ///
"""Tools of one's own: plain functions, whose schemas come from their docstrings.

    python examples/own_tools.py [MODEL] [STEPS]

The rewards see the whole conversation: who called the tool is paid, and who then says its answer.
"""

import sys

import torch
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from torchrl_agents import (
    ChatEnv,
    DataLoadingPrimer,
    FunctionTools,
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
PRICES = {"apple": 3, "pear": 5, "plum": 7, "fig": 9}


def look_up(item: str) -> str:
    """Look up the price of a fruit.

    Args:
        item: Its name.
    """
    return str(PRICES[item])


def called(completions, **columns):
    return [float(any(m["role"] == "tool" for m in chat)) for chat in completions]


def right(completions, price, **columns):
    pairs = zip(completions, price, strict=True)
    return [float(str(wanted) in (chat[-1].get("content") or "")) for chat, wanted in pairs]


torch.manual_seed(0)
policy = TransformersWrapper(MODEL, generate_kwargs={"max_new_tokens": 32}, max_model_len=1024)
rows = [{"prompt": f"What does a {item} cost?", "price": price} for item, price in PRICES.items()]
env = ChatEnv(batch_size=(ROLLOUTS,)).append_transform(
    Compose(
        DataLoadingPrimer(rows, group_size=GROUP, shuffle=True),
        FunctionTools([look_up], timeout_s=5.0),
        RewardFunctions([called, right], weights=[0.5, 1.0], completion_format="messages"),
        StepCounter(max_steps=2),
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
