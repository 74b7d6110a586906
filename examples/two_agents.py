# /// script
# requires-python = ">=3.11"
# dependencies = ["torchrl-agents", "openai", "peft"]
# ///
"""Two agents with weights of their own: adapters over one model, trained for opposite rewards.

    python examples/two_agents.py [MODEL] [STEPS]

Both are asked the same question. One is paid for a large number, the other for a small one: a
policy that they share could please one of them at most.
"""

import re
import sys

import openai
import torch
from peft import LoraConfig
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from torchrl_agents import (
    AgentPolicies,
    AgentProgram,
    ChatEnv,
    DataLoadingPrimer,
    GRPOLoss,
    LLMCollector,
    MCAdvantage,
    TransformersWrapper,
    models_over_one_base,
)

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 8
ROLLOUTS, GROUP = 16, 8
AGENTS = ("high", "low")


async def game(endpoint, *, prompt):
    """Ask each agent for a number, and pay it."""
    numbers = {}
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        for name in AGENTS:
            reply = await client.chat.completions.create(
                model=endpoint.model,
                messages=[{"role": "user", "content": prompt}],
                extra_headers={"x-agent-name": name},
            )
            found = re.findall(r"\d+", reply.choices[0].message.content or "")
            numbers[name] = int(found[0]) if found and len(found[0]) < 3 else None
    high, low = (numbers[name] for name in AGENTS)
    rewards = {"high": -1.0 if high is None else min(high, 20) / 20}
    return rewards | {"low": -1.0 if low is None else 1 - min(low, 20) / 20}


rows = [{"prompt": f"Say a number from {n} to {n + 10}."} for n in range(1, 7)]
program = AgentProgram(game, agents=AGENTS)
env = ChatEnv(batch_size=(ROLLOUTS,)).append_transform(
    Compose(DataLoadingPrimer(rows, group_size=GROUP, shuffle=True), program)
)
torch.manual_seed(0)
base = TransformersWrapper(MODEL)
adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
sampling = {"max_new_tokens": 8, "min_p": 0.1}
policies = AgentPolicies(
    {
        name: TransformersWrapper(model, tokenizer=base.tokenizer, generate_kwargs=sampling)
        for name, model in models_over_one_base(base.model, dict.fromkeys(AGENTS, adapters)).items()
    }
)
advantage = MCAdvantage(GROUP, credit="agent")  # each agent compared with itself
buffer = ReplayBuffer(storage=LazyStackStorage(2 * ROLLOUTS), transform=advantage)
collector = LLMCollector(env, policies, replay_buffer=buffer)
loss = GRPOLoss(policies, clip_epsilon=(0.2, 0.28))
optimizer = torch.optim.AdamW((p for p in policies.parameters() if p.requires_grad), lr=5e-4)

for step in range(1, STEPS + 1):
    rows = policies.rows_by_agent(collector.collect())
    loss(buffer[:]).total().backward()
    optimizer.step()
    optimizer.zero_grad()
    buffer.empty()
    means = {name: own["agent_reward"].mean().item() for name, own in rows.items()}
    told = ", ".join(f"{name} {reward:.2f}" for name, reward in means.items())
    print(f"step {step}: reward {sum(means.values()) / len(means):.2f} ({told})")
for name, policy in policies.by_agent.items():
    policy.model.save_pretrained(f"two_agents/{name}")
