# /// script
# requires-python = ">=3.11"
# dependencies = ["torchrl-agents"]
# ///
"""A reward model: of two answers to a prompt the better one gets the larger reward.

    python examples/reward_model.py [MODEL] [STEPS] [PAIRS]

PAIRS is a file or a hub id of preferences in any form that TRL reads; without one short answers are
the better ones. The folder reward_model is what RewardModel, critic.model= and Transformers load.
"""

import random
import sys

import torch
from tensordict import lazy_stack

from torchrl_agents import (
    NonFiniteGate,
    RewardModelLoss,
    RewardModelLossOutput,
    TransformersCritic,
    TransformersWrapper,
    load_rows,
    preference_rows,
)

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 20
PAIRS = sys.argv[3] if len(sys.argv) > 3 else None
NUM_HELD_OUT, BATCH, LEARNING_RATE = 32, 8, 1e-5


def made_pairs():
    said = "Well, there is a great deal that one could say of it, and I will begin with this: "
    for n in range(256):
        short = f"{n} comes after {n - 1}."
        prompt = f"Say something about the number {n}."
        yield {"prompt": prompt, "chosen": short, "rejected": said + short}


def window_of(pairs):
    batch = loss.pack(lazy_stack([row for pair in pairs for row in pair]))
    return loss.measure_window(batch), batch.micro_batches(max_tokens=4096)


torch.manual_seed(0)
policy = TransformersWrapper(MODEL, generate=False, max_model_len=1024)
# One that was trained before goes on as TransformersCritic("its folder").
model = TransformersCritic.of_policy(policy, random_head=True)
loss = RewardModelLoss(model, center_coeff=0.01)
gate = NonFiniteGate(torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), max_grad_norm=1.0)

rows = preference_rows(policy.encoder, load_rows(PAIRS) if PAIRS else list(made_pairs()))
pairs = list(zip(rows[::2], rows[1::2], strict=True))
draw = random.Random(0)
draw.shuffle(pairs)
held_out, trained = pairs[:NUM_HELD_OUT], pairs[NUM_HELD_OUT:]
for step in range(STEPS):
    window, parts = window_of(draw.sample(trained, min(BATCH, len(trained))))
    outputs = []
    for part in parts:
        outputs.append(loss(part, window=window))
        gate.backward(outputs[-1], part)
    gate.step()
    told = RewardModelLossOutput.combine(outputs)
    print(f"step {step}: loss {told.total():.3f}, {told.accuracy:.2f} of the pairs in order")

with torch.no_grad():
    window, parts = window_of(held_out)
    told = RewardModelLossOutput.combine([loss(part, window=window) for part in parts])
print(f"held out: loss {told.total():.3f}, {told.accuracy:.2f} of the pairs in order")
model.save_pretrained("reward_model")
policy.encoder.save_pretrained("reward_model")
