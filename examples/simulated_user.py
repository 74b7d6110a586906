# /// script
# requires-python = ">=3.11"
# dependencies = ["torchrl-agents"]
# ///
"""A simulated user: the model learns to ask for what it does not know, and then to confirm it.

    python examples/simulated_user.py [MODEL] [STEPS]

The user is a function here; ChatCompletions(...) or PolicyAnswers(...) in its place is a model.
"""

import re
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
    SimulatedUser,
    StepCounter,
    TransformersWrapper,
)

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 6
ROLLOUTS, GROUP = 32, 8
SHOWN = [  # an order that was taken before: a model as small as this one asks nothing otherwise
    {"role": "user", "content": "I would like some lemons, please."},
    {"role": "assistant", "content": "How many lemons would you like?"},
    {"role": "user", "content": "2, please."},
    {"role": "assistant", "content": "Your order is 2 lemons."},
]


def customer(questions):
    """Say how many when asked for it the first time, and be done with anything else."""
    answers = []
    for instructions, *said in questions:
        number = re.search(r"\d+", instructions["content"])[0]  # of the scenario
        was_told = any(f"{number}, please." == message["content"] for message in said)
        asks = "how many" in said[-1]["content"].lower()
        answers.append(f"{number}, please." if asks and not was_told else "###STOP###")
    return answers


def confirmed(completions, fruit, number, **columns):
    """1 where the last message has the number and the fruit, and asks nothing."""
    last = [messages[-1]["content"].lower() for messages in completions]
    found = zip(last, fruit, number, strict=True)
    return [float(str(n) in said and what in said and "?" not in said) for said, what, n in found]


rows = [
    {
        "prompt": [*SHOWN, {"role": "user", "content": f"I would like some {what}, please."}],
        "scenario": f"You want {n} {what}.",
        **{"fruit": what, "number": n},
    }
    for n in range(3, 9)
    for what in ("apples", "pears", "plums", "figs")
]
env = ChatEnv(batch_size=(ROLLOUTS,), system_prompt="Take orders.").append_transform(
    Compose(
        DataLoadingPrimer(rows, group_size=GROUP, shuffle=True),
        SimulatedUser(customer),
        RewardFunctions([confirmed]),
        StepCounter(max_steps=3),
    )
)
torch.manual_seed(0)
policy = TransformersWrapper(MODEL, generate_kwargs={"max_new_tokens": 24, "min_p": 0.1})
buffer = ReplayBuffer(
    storage=LazyStackStorage(ROLLOUTS), transform=MCAdvantage(GROUP), batch_size=ROLLOUTS
)
collector = LLMCollector(env, policy, replay_buffer=buffer)
loss = GRPOLoss(policy)
optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-5, weight_decay=0.0)
for step in range(STEPS):
    reward = collector.collect()["reward"].nanmean()
    if len(buffer):
        loss(buffer[:]).total().backward()
        optimizer.step()
        optimizer.zero_grad()
        buffer.empty()
    print(f"step {step}: reward {reward:.3f}")
collector.shutdown()
