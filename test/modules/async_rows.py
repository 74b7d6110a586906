"""Rows of asynchronous engines, and the model's own forward that they are compared with."""

import asyncio
from dataclasses import replace

import torch

from torchrl_modules import SamplingParameters

ENDLESS = SamplingParameters(max_new_tokens=30, stop_token_ids=())
LONG = replace(ENDLESS, max_new_tokens=400)
PROMPTS = [[5, 6, 7, 8] * 10, [9, 10], [11] * 40, [12, 13, 14]]
EXACT = 1e-5


@torch.no_grad()
def row_log_probs(model, prompt, ids):
    """Of sampled tokens ``[T]``: the model's own forward of the whole row, alone."""
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1)[torch.arange(len(ids)), torch.tensor(ids)]


def assert_exact(model, prompt, drawn, start=0, end=None):
    expected = row_log_probs(model, prompt, drawn.ids)[start:end]
    assert torch.allclose(expected, torch.tensor(drawn.log_probs)[start:end], atol=EXACT, rtol=0)


async def drawn_so_far(engine, num_tokens):
    """Until every running row has drawn so many tokens."""
    running = engine._decoding._running
    while not running or min(row.num_drawn for row in list(running.values())) < num_tokens:
        await asyncio.sleep(0.001)
