# /// script
# requires-python = ">=3.11"
# dependencies = ["torchrl-agents"]
# ///
"""An environment of one's own: a class with a state, tools and a reward, one for each rollout.

python examples/own_environment.py [MODEL] [STEPS]
"""

import sys

import torch
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from torchrl_agents import (
    ChatEnv,
    DataLoadingPrimer,
    EnvironmentTools,
    GRPOLoss,
    LLMCollector,
    MCAdvantage,
    StepCounter,
    TransformersWrapper,
)

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 10
ROLLOUTS, GROUP = 32, 8


class Vault:
    def reset(self, *, code: int, **row) -> str:  # columns of the data; gives a part of the prompt
        self.code, self.distance = code, 100
        return "The vault is locked."

    def enter(self, code: int) -> str:  # a public method is a tool
        """Enter a code.

        Args:
            code: A number from 0 to 99.
        """
        self.distance = min(self.distance, abs(code - self.code))
        return "open" if code == self.code else "too low" if code < self.code else "too high"

    def get_reward(self) -> float:
        return 1 - self.distance / 100


torch.manual_seed(0)
policy = TransformersWrapper(MODEL, generate_kwargs={"max_new_tokens": 32}, max_model_len=1024)
rows = [{"prompt": "Open the vault with the tool enter.", "code": n} for n in range(100)]
env = ChatEnv(batch_size=(ROLLOUTS,)).append_transform(
    Compose(
        DataLoadingPrimer(rows, group_size=GROUP, shuffle=True),
        EnvironmentTools(Vault),
        StepCounter(max_steps=4),
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
