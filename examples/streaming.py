# /// script
# requires-python = ">=3.11"
# dependencies = ["torchrl-agents"]
# ///
"""Collection beside training: episodes go on while the model is trained, at a bounded age.

python examples/streaming.py [MODEL] [STEPS]
"""

import sys
import time

import torch
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from torchrl_agents import (
    ChatEnv,
    DataLoadingPrimer,
    FunctionTools,
    GRPOLoss,
    MCAdvantage,
    RewardFunctions,
    StepCounter,
    StreamingCollector,
    TransformersWrapper,
    Wait,
)

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 10
ROLLOUTS, GROUP = 16, 4


def slow_clock() -> str:
    """Tell the time, slowly."""
    time.sleep(0.5)
    return time.strftime("%H:%M")


def short(completions, **columns):
    return [1 / (1 + len(chat[-1].get("content") or "")) for chat in completions]


torch.manual_seed(0)
policy = TransformersWrapper(MODEL, generate_kwargs={"max_new_tokens": 16}, max_model_len=1024)
rows = [{"prompt": f"{n}. What time is it?"} for n in range(64)]
env = ChatEnv(batch_size=(ROLLOUTS,)).append_transform(
    Compose(
        DataLoadingPrimer(rows, group_size=GROUP, shuffle=True),
        FunctionTools([slow_clock]),
        RewardFunctions([short], completion_format="messages"),
        StepCounter(max_steps=2),
    )
)
buffer = ReplayBuffer(
    storage=LazyStackStorage(ROLLOUTS), transform=MCAdvantage(GROUP), batch_size=ROLLOUTS
)
loss = GRPOLoss(policy)
optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-5, weight_decay=0.0)
with StreamingCollector(
    env, policy, replay_buffer=buffer, groups_per_step=ROLLOUTS // GROUP, staleness=Wait(2)
) as collector:
    for step, batch in enumerate(collector, start=1):
        oldest = step - 1 - int(min(row["policy_version"].min() for row in batch.unbind(0)))
        if len(buffer):
            loss(buffer[:]).total().backward()
            optimizer.step()
            optimizer.zero_grad()
            buffer.empty()
        collector.update_policy_weights_(policy.model)
        print(f"step {step}: reward {batch['reward'].nanmean():.3f}, oldest token {oldest} steps")
        if step == STEPS:
            break
    print(collector.ledger)
