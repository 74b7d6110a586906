# /// script
# requires-python = ">=3.11"
# dependencies = ["torchrl-agents"]
# ///
"""TorchRL's recipe, ported: the same names, and the loss may stay TorchRL's own.

python examples/from_torchrl.py [MODEL] [STEPS] [--their-loss]
"""

import sys

import torch
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs.transforms import Compose
from torchrl.objectives.llm import GRPOLoss as TheirGRPOLoss

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


def digits(completions, **columns):
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in completions]


torch.manual_seed(0)
policy = TransformersWrapper(MODEL, generate_kwargs={"max_new_tokens": 16}, max_model_len=512)
rows = [{"prompt": f"Tell me about {n}."} for n in range(64)]
env = ChatEnv(batch_size=(ROLLOUTS,)).append_transform(
    Compose(
        DataLoadingPrimer(rows, group_size=GROUP, shuffle=True),
        RewardFunctions([digits]),
        StepCounter(max_steps=1),
    )
)
replay_buffer = ReplayBuffer(
    storage=LazyStackStorage(ROLLOUTS),
    sampler=SamplerWithoutReplacement(),
    transform=MCAdvantage(grpo_size=GROUP),
    batch_size=ROLLOUTS // 2,
)
collector = LLMCollector(env, policy, replay_buffer=replay_buffer)
if "--their-loss" in sys.argv:
    loss_fn = TheirGRPOLoss(policy, masking_strategy="rlhf", entropy_bonus=False)
else:
    loss_fn = GRPOLoss(policy)
optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-5)
for step in range(STEPS):
    reward = collector.collect()["reward"].nanmean()
    for batch in replay_buffer if len(replay_buffer) else ():
        loss_fn(batch).loss_objective.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    replay_buffer.empty()
    print(f"step {step}: reward {reward:.3f}")
collector.shutdown()
