# /// script
# requires-python = ">=3.11"
# dependencies = ["torchrl-agents"]
# ///
"""Evaluation: several samples of each prompt, pass@k and pass^k with confidence intervals.

python examples/evaluation.py [MODEL] [SAMPLES]
"""

import sys

import torch
from torchrl.envs.transforms import Compose

from collectors.evaluation import evaluation_estimates
from torchrl_agents import (
    ChatEnv,
    DataLoadingPrimer,
    LLMCollector,
    RewardFunctions,
    StepCounter,
    TransformersWrapper,
)

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
SAMPLES = int(sys.argv[2]) if len(sys.argv) > 2 else 8


def right(completions, answer, **columns):
    return [float(wanted in text) for text, wanted in zip(completions, answer, strict=True)]


torch.manual_seed(0)
policy = TransformersWrapper(MODEL, generate_kwargs={"max_new_tokens": 24}, max_model_len=512)
rows = [
    {"prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a in (2, 3) for b in range(1, 5)
]
env = ChatEnv(batch_size=(len(rows) * SAMPLES,)).append_transform(
    Compose(
        DataLoadingPrimer(rows, group_size=SAMPLES),
        RewardFunctions([right]),
        StepCounter(max_steps=1),
    )
)
rollouts = LLMCollector(env, policy).collect()
ks = sorted({1, 2, SAMPLES})
for name, estimate in evaluation_estimates(rollouts, ks=ks).items():
    print(f"{name:<10} {estimate.value:.3f}  ({estimate.low:.3f} to {estimate.high:.3f})")
print(rollouts["history", "full"][0].to_chats())
env.close()
