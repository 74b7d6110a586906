"""Engines over a Transformers model: what is read again, who waits for whom, what updates cost.

    python benchmarks/async_engine.py [--repeats 5] [--hidden 64]

CPU seconds of the whole process, interleaved, medians, after a check that log-probs are the model's
own (to 1e-4).

- ``conversation``: 64 conversations of 8 turns, 24 new tokens and 16 drawn ones each. ``read
  again`` is a cache of keys and values that each turn fills anew, as before; ``slots`` is the cache
  of slots, without what was kept; ``kept`` goes on from the turn before.
- ``lengths``: 768 responses of lognormal lengths (median 32, sigma 1, at most 256), 64 at a time.
  ``batches`` draws 64 and waits for the longest; ``continuous`` lets the next one in. ``bound`` is
  batches of 64 that draw as many tokens, all rows of one length.
- ``updates``: ``continuous`` with an update of the weights every so many tokens.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import Qwen3ForCausalLM

from torchrl_modules.engines.async_transformers import AsyncTransformersEngine
from torchrl_modules.engines.engine import Generation
from torchrl_modules.engines.readers import PaddedReader
from torchrl_modules.engines.transformers import TransformersEngine
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.tiny_model import tiny_qwen3

ROWS, TURNS, NEW, DRAWN = 64, 8, 24, 16
RESPONSES, LONGEST = 768, 256
VOCABULARY = 512
UPDATE_EVERY = (1_024, 4_096)


def build(hidden: int, seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return tiny_qwen3(
        VOCABULARY, hidden_size=hidden, intermediate_size=2 * hidden, max_position_embeddings=1_024
    ).eval()


def interleaved(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    for way in ways.values():
        way()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            begin = time.process_time()
            way()
            seconds[name].append(time.process_time() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


@torch.no_grad()
def check(
    model: Qwen3ForCausalLM, prompts: Sequence[list[int]], drawn: Sequence[Generation]
) -> None:
    for prompt, row in zip(prompts, drawn, strict=True):
        logits = model(torch.tensor([prompt + row.ids])).logits[0, len(prompt) - 1 : -1]
        own = logits.log_softmax(-1).gather(1, torch.tensor(row.ids)[:, None]).squeeze(1)
        torch.testing.assert_close(own, torch.tensor(row.log_probs), atol=1e-4, rtol=0)


def conversations(model: Qwen3ForCausalLM, repeats: int) -> dict[str, float]:
    params = SamplingParameters(max_new_tokens=DRAWN, stop_token_ids=())
    again = TransformersEngine(model, max_cached_tokens=0)
    again.__dict__["reader"] = PaddedReader
    slots = TransformersEngine(model, max_cached_tokens=0)
    kept = TransformersEngine(model)

    def converse(engine: TransformersEngine) -> None:
        draw = random.Random(0)
        rows: list[list[int]] = [[] for _ in range(ROWS)]
        for turn in range(TURNS):
            for row in rows:
                row += [draw.randrange(VOCABULARY) for _ in range(NEW)]
            drawn = engine.generate(rows, params)
            if turn == TURNS - 1 and not checked.get(id(engine)):
                check(model, rows, drawn)
                checked[id(engine)] = True
            for row, one in zip(rows, drawn, strict=True):
                row += one.ids

    checked: dict[int, bool] = {}
    engines = {"read again": again, "slots": slots, "kept": kept}
    ways = {name: (lambda engine=engine: converse(engine)) for name, engine in engines.items()}
    return interleaved(ways, repeats)


class Lengths:
    """Responses of very different lengths."""

    def __init__(self, model: Qwen3ForCausalLM) -> None:
        draw = random.Random(1)
        self.budgets = [
            min(LONGEST, max(1, int(32 * draw.lognormvariate(0, 1)))) for _ in range(RESPONSES)
        ]
        self.prompts = [[draw.randrange(VOCABULARY) for _ in range(32)] for _ in self.budgets]
        self.params = SamplingParameters(max_new_tokens=LONGEST, stop_token_ids=())
        self.model = model
        self.engine = TransformersEngine(model, max_cached_tokens=0)
        hidden = model.config.hidden_size
        self.weights = [build(hidden, seed).state_dict() for seed in (1, 2)]

    def batches(self) -> None:
        for at in range(0, RESPONSES, ROWS):
            part = slice(at, at + ROWS)
            budgets = self.budgets[part]
            self.engine.generate(self.prompts[part], self.params, max_new_tokens=budgets)

    def bound(self) -> None:
        budgets = [sum(self.budgets) // RESPONSES] * ROWS
        for _ in range(RESPONSES // ROWS):
            self.engine.generate(self.prompts[:ROWS], self.params, max_new_tokens=budgets)

    def continuous(self, every: int = 0, *, recompute: bool = True, checks: bool = False) -> None:
        async def main() -> list[Generation]:
            async with AsyncTransformersEngine(self.engine, max_running=ROWS) as served:
                calls = [
                    asyncio.create_task(served.respond(prompt, self.params, max_new_tokens=budget))
                    for prompt, budget in zip(self.prompts, self.budgets, strict=True)
                ]
                updates = asyncio.create_task(self.update(served, every, recompute))
                drawn = await asyncio.gather(*calls)
                updates.cancel()
                return drawn

        drawn = asyncio.run(main())
        if checks:
            check(self.model, self.prompts, drawn)

    async def update(self, served: AsyncTransformersEngine, every: int, recompute: bool) -> None:
        target = every
        while every:
            await asyncio.sleep(0.02)
            if served.num_tokens_drawn >= target:
                weights = self.weights[served.version % 2]
                await served.update_weights(weights, recompute=recompute)
                target += every

    def ways(self) -> dict[str, Callable[[], object]]:
        ways: dict[str, Callable[[], object]] = {
            "batches": self.batches,
            "continuous": self.continuous,
            "bound": self.bound,
        }
        for every in UPDATE_EVERY:
            name = f"an update every {every} tokens"
            ways[name] = partial(self.continuous, every)
            ways[f"{name}, old caches"] = partial(self.continuous, every, recompute=False)
        return ways


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build(options.hidden)
    for name, seconds in conversations(model, options.repeats).items():
        print(f"conversation  {name:32} {seconds:7.3f} s")
    lengths = Lengths(model)
    lengths.continuous(checks=True)
    found = interleaved(lengths.ways(), options.repeats)
    for name, seconds in found.items():
        ratio, rate = seconds / found["continuous"], sum(lengths.budgets) / seconds
        print(f"lengths       {name:40} {seconds:7.3f} s {ratio:6.2f}x {rate:8.0f} tok/s")


if __name__ == "__main__":
    main()
