"""Whole steps of GRPO: collection, tools, rewards, advantages, loss, optimizer and weights.

    PYTHONPATH=. python benchmarks/collection/end_to_end.py [--turns 8 --tool-s 0.3] [--rounds 3]

One model of 9.7 million parameters, in float32 on a CPU; a step draws 2 prompts x 8 completions and
takes one step of AdamW on all. With one turn, 64 tokens each, none of which ends before. With more,
each turn but the last calls a tool (45 tokens), whose latency is log-normal (sigma 0.8, the median
is ``--tool-s``). In turns, in one process: a loop written by hand around Transformers'
``generate`` and one padded forward pass (tools at the same time), `LLMCollector` and
`StreamingCollector` with `GRPOLoss`, and the trainers of peers. Seconds of CPU and of wall time of
1,000 trained tokens, the first ``--skip`` steps of each round left out (and ``--staleness`` more of
who draws meanwhile). There are ``--cores`` threads to compute with: who draws and trains at the
same time has half of them for each.
"""

import argparse
import asyncio
import contextlib
import io
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from end_to_end_task import (
    LR,
    PROMPTS,
    QUESTIONS,
    ROWS,
    Clock,
    Cost,
    N,
    Work,
    answer_log_probs,
    calls_in,
    completion_rewards,
    make_model,
    make_tool,
    model_folder,
    reward_of,
    tokenizer_of,
    tool_schema,
)
from end_to_end_torchrl import torchrl
from end_to_end_trl import trl, trl_async
from torch.nn.utils.rnn import pad_sequence
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import LLMCollector, StreamingCollector, Wait
from objectives import GRPOLoss, MCAdvantage
from torchrl_envs import ChatEnv, DataLoadingPrimer, FunctionTools, RewardFunctions, StepCounter
from torchrl_modules import TransformersWrapper

# By hand ------------------------------------------------------------------------------------------


class Rollout:
    """Tokens so far, and which of them were drawn."""

    def __init__(self, prompt: list[int]) -> None:
        self.ids, self.drawn, self.first = list(prompt), [False] * len(prompt), len(prompt)
        self.text = ""

    def add(self, ids: list[int], *, drawn: bool) -> None:
        """Go on with these."""
        self.ids += ids
        self.drawn += [drawn] * len(ids)


def draw_turn(model: Any, tokenizer: Any, rollouts: list[Rollout], work: Work) -> None:
    """One more turn of all, in one batch."""
    prompts = pad_sequence(
        [torch.tensor(r.ids) for r in rollouts], batch_first=True, padding_side="left",
        padding_value=tokenizer.pad_token_id,
    )  # fmt: skip
    lengths = torch.tensor([len(r.ids) for r in rollouts])
    mask = torch.arange(prompts.shape[1]) >= prompts.shape[1] - lengths[:, None]
    options = {"min_new_tokens": work.max_new_tokens} if work.turns == 1 else {}
    drawn = model.generate(
        prompts, attention_mask=mask.long(), do_sample=True, temperature=work.temperature,
        max_new_tokens=work.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id, **options,
    )  # fmt: skip
    for rollout, ids in zip(rollouts, drawn[:, prompts.shape[1] :].tolist(), strict=True):
        if tokenizer.eos_token_id in ids:
            ids = ids[: ids.index(tokenizer.eos_token_id) + 1]
        rollout.text = tokenizer.decode(ids)
        rollout.add(ids, drawn=True)


async def answer_calls(rollouts: list[Rollout], tokenizer: Any, tool: Any) -> None:
    """All tools at the same time."""

    async def answer(rollout: Rollout) -> None:
        results = [await tool(**call["arguments"]) for call in calls_in(rollout.text)]
        texts = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in results)
        text = f"\n<|im_start|>user{texts}<|im_end|>\n<|im_start|>assistant\n"
        rollout.add(tokenizer.encode(text, add_special_tokens=False), drawn=False)

    await asyncio.gather(*map(answer, rollouts))


def by_hand(clock: Clock, num_steps: int, work: Work) -> None:
    """The shortest loop that does the work."""
    model, tokenizer, tool = make_model(work), tokenizer_of(work), make_tool(work)
    tools = [tool_schema()] if work.turns > 1 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(num_steps):
        questions = [QUESTIONS[(PROMPTS * step + i) % len(QUESTIONS)] for i in range(PROMPTS)]
        chats = [[{"role": "user", "content": q}] for q in questions for _ in range(N)]
        prompts = tokenizer.apply_chat_template(chats, tools=tools, add_generation_prompt=True)
        rollouts = [Rollout(ids) for ids in prompts["input_ids"]]
        running = rollouts
        for turn in range(work.turns):
            draw_turn(model, tokenizer, running, work)
            running = [r for r in running if calls_in(r.text)]
            if turn == work.turns - 1 or not running:
                break
            asyncio.run(answer_calls(running, tokenizer, tool))
        rewards = torch.tensor([reward_of(r.text) for r in rollouts]).view(PROMPTS, N)
        advantage = (rewards - rewards.mean(1, keepdim=True)) / (
            rewards.std(1, keepdim=True) + 1e-4
        )
        first = min(r.first for r in rollouts)
        ids = pad_sequence([torch.tensor(r.ids) for r in rollouts], batch_first=True)
        mask = pad_sequence([torch.tensor(r.drawn) for r in rollouts], batch_first=True)[:, first:]
        log_probs = answer_log_probs(model, ids, first, work.temperature)
        ratio = (log_probs - log_probs.detach()).exp()
        gain = torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * advantage.view(-1, 1)
        (-(gain * mask).sum() / mask.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.lap(int(mask.sum()))


# Ours ---------------------------------------------------------------------------------------------


def ours(clock: Clock, num_steps: int, work: Work, *, is_streaming: bool) -> None:
    """A collector, a buffer with `MCAdvantage`, `GRPOLoss`."""
    rows = [{"prompt": question} for question in QUESTIONS]
    transforms: list[Any] = [
        DataLoadingPrimer(rows, group_size=N),
        RewardFunctions([completion_rewards], completion_format="messages"),
    ]
    if work.turns > 1:
        transforms.insert(1, FunctionTools([make_tool(work)], timeout_s=60.0))
        transforms.append(StepCounter(max_steps=work.turns))
    env = ChatEnv(batch_size=ROWS).append_transform(Compose(*transforms))
    limits: dict[str, Any] = {
        "max_new_tokens": work.max_new_tokens,
        "temperature": work.temperature,
    }
    if work.turns == 1:
        limits["min_new_tokens"] = work.max_new_tokens
    actor = TransformersWrapper(
        make_model(work), tokenizer=tokenizer_of(work), generate_kwargs=limits, write_tokens=False
    )
    buffer = ReplayBuffer(storage=LazyStackStorage(ROWS), transform=MCAdvantage(N), batch_size=ROWS)
    loss = GRPOLoss(actor)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=LR)
    options: dict[str, Any] = {"replay_buffer": buffer}
    if is_streaming:
        options |= {"groups_per_step": PROMPTS, "staleness": Wait(work.staleness)}
    make: Any = StreamingCollector if is_streaming else LLMCollector
    with make(env, actor, **options) as collector:
        for batch in itertools.islice(collector, num_steps):
            drawn = sum(int(row["masks", "all_assistant_mask"].sum()) for row in batch.unbind(0))
            loss(buffer[:]).total().backward()
            optimizer.step()
            optimizer.zero_grad()
            buffer.empty()
            collector.update_policy_weights_(actor.model)
            clock.lap(drawn)


def in_batches(clock: Clock, num_steps: int, work: Work) -> None:
    """`LLMCollector`."""
    ours(clock, num_steps, work, is_streaming=False)


def streaming(clock: Clock, num_steps: int, work: Work) -> None:
    """`StreamingCollector`."""
    ours(clock, num_steps, work, is_streaming=True)


WAYS: dict[str, Callable[[Clock, int, Work], None]] = {
    "by hand": by_hand,
    "LLMCollector, GRPOLoss": in_batches,
    "StreamingCollector, GRPOLoss": streaming,
    "TRL, GRPOTrainer": trl,
    "TRL, AsyncGRPOTrainer": trl_async,
    "TorchRL, its recipe": torchrl,
}
BESIDE = (streaming, trl_async)
"""Draw while they train."""


def main() -> None:
    """Run all ways in turns, and print what a step costs."""
    parser = argparse.ArgumentParser(description="A whole step of GRPO beside those of peers.")
    parser.add_argument("--steps", type=int, default=4, help="of a round, after the first")
    parser.add_argument("--skip", type=int, default=1, help="steps that begin a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--tool-s", type=float, default=0.3)
    parser.add_argument("--staleness", type=int, default=1, help="of those that draw meanwhile")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--only", default="", help="ways whose names contain it, and by hand")
    parser.add_argument("--model", default="", help="folder in which the model is kept")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    work = Work(args.turns, 64, args.tool_s, args.staleness, folder=args.model)
    ways = {n: run for n, run in WAYS.items() if args.only in n or run is by_hand}
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    tokens: dict[str, list[int]] = {name: [] for name in ways}
    failed: dict[str, str] = {}
    torch.set_num_threads(args.cores)
    model_folder(work)
    for _ in range(args.rounds):
        for name, run in ways.items():
            if name in failed:
                continue
            torch.set_num_threads(max(1, args.cores // 2) if run in BESIDE else args.cores)
            skip = args.skip + (work.staleness if run in BESIDE else 0)
            clock = Clock()
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    run(clock, args.steps + skip, work)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            costs[name] += clock.costs[skip:]
            tokens[name] += clock.tokens[skip:]
            print(".", end="", file=sys.stderr, flush=True)
    report(args, costs, tokens, failed)


def report(
    args: argparse.Namespace,
    costs: dict[str, list[Cost]],
    tokens: dict[str, list[int]],
    failed: dict[str, str],
) -> None:
    """Seconds of a thousand trained tokens, beside those of the loop by hand."""
    print(
        f"{args.turns} turns, tools of {args.tool_s} s; {args.rounds} rounds of {args.steps} steps"
    )
    base = Cost(1.0, 1.0)
    for name, each in costs.items():
        if name in failed:
            print(f"{name:28s} does not run: {failed[name]}")
            continue
        count = sum(tokens[name])
        cost = Cost(*(1000 * sum(values) / count for values in zip(*each, strict=True)))
        base = cost if name == "by hand" else base
        print(
            f"{name:28s} CPU {cost.cpu_s:6.2f} s ({cost.cpu_s / base.cpu_s:.2f}x)   "
            f"wall {cost.wall_s:6.2f} s ({cost.wall_s / base.wall_s:.2f}x)   "
            f"{count / len(each):.0f} tokens a step"
        )


if __name__ == "__main__":
    main()
