# /// script
# requires-python = ">=3.11"
# dependencies = ["torchrl-agents", "openai"]
# ///
"""An agent that owns its loop is trained as it is: it talks to an endpoint of OpenAI's protocol.

    python examples/agent.py [MODEL] [STEPS]

The program below knows nothing of this toolkit. The endpoint is the policy's; every request of an
episode is one of its turns, and what the program returns is the reward.
"""

import sys

import openai
import torch
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from torchrl_agents import (
    AgentProgram,
    ChatEnv,
    DataLoadingPrimer,
    GRPOLoss,
    LLMCollector,
    MCAdvantage,
    StepCounter,
    TransformersWrapper,
)

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 10
ROLLOUTS, GROUP = 16, 8


async def brainstorm(endpoint, *, prompt):
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        chat, said = [{"role": "user", "content": prompt}], set()
        for _ in range(2):
            reply = await client.chat.completions.create(model=endpoint.model, messages=chat)
            text = reply.choices[0].message.content or ""
            said.update(text.lower().split())
            chat += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": "What else?"},
            ]
    return len(said) / 20  # different words


torch.manual_seed(0)
policy = TransformersWrapper(MODEL, generate_kwargs={"max_new_tokens": 16}, max_model_len=512)
rows = [{"prompt": f"Name things that are {kind}."} for kind in ("red", "cold", "fast", "round")]
env = ChatEnv(batch_size=(ROLLOUTS,)).append_transform(
    Compose(
        DataLoadingPrimer(rows, group_size=GROUP, shuffle=True),
        AgentProgram(brainstorm),
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
