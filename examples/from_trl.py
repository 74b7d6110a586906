# /// script
# requires-python = ">=3.11"
# dependencies = ["torchrl-agents"]
# ///
"""A script of TRL, ported: the dataset, the environment and the reward function stay as they are.

    python examples/from_trl.py [MODEL] [STEPS]

In TRL the last lines are::

    config = GRPOConfig(num_generations=8, per_device_train_batch_size=32, max_completion_length=96)
    trainer = GRPOTrainer(model, reward_funcs=efficient, args=config, train_dataset=dataset,
                          environment_factory=Counter)
    trainer.train()
"""

import sys

import torch
from datasets import Dataset
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from torchrl_agents import (
    BNPO,
    ChatEnv,
    DataLoadingPrimer,
    EnvironmentTools,
    LLMCollector,
    MCAdvantage,
    RewardFunctions,
    StepCounter,
    TransformersWrapper,
)

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 10
ROLLOUTS, GROUP = 32, 8


class Counter:
    def reset(self, **kwargs) -> str | None:
        self.count = 0
        return "The counter is at 0."

    def add(self, amount: int) -> str:
        """
        Add to the counter.

        Args:
            amount: How much

        Returns:
            The counter.
        """
        self.count += amount
        return str(self.count)


def efficient(environments, completions, **kwargs) -> list[float]:
    pairs = zip(environments, completions, strict=True)
    return [float(env.count == 5) - 0.01 * len(chat) for env, chat in pairs]


torch.manual_seed(0)
dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": "Count to 5."}]] * 64})
policy = TransformersWrapper(MODEL, generate_kwargs={"max_new_tokens": 32}, max_model_len=1024)
env = ChatEnv(batch_size=(ROLLOUTS,)).append_transform(
    Compose(
        DataLoadingPrimer(dataset, group_size=GROUP, shuffle=True),
        EnvironmentTools(Counter),
        RewardFunctions([efficient]),
        StepCounter(max_steps=3),
    )
)

buffer = ReplayBuffer(
    storage=LazyStackStorage(ROLLOUTS), transform=MCAdvantage(GROUP), batch_size=ROLLOUTS
)
collector = LLMCollector(env, policy, replay_buffer=buffer)
loss = BNPO(policy)
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
