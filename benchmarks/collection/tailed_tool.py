"""Training with a tool that is ten times slower for one call in fourteen: streaming beside batches.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/collection/tailed_tool.py [--steps 140]

A small model has three turns, and a tool answers after each: after 0.1 s, and for 7 % of the calls
after 1 s, decided by the call alone. It is trained with GRPO to answer with digits; a step is 4
prompts of 4 rollouts. Printed are, for `LLMCollector` and for `StreamingCollector` with two bounds
of staleness, in turns, the seconds to the last of ``--steps`` steps of training, and to the step
at which the mean reward of three steps was first above ``--goal``.
"""

import argparse
import random
import statistics
import time
from typing import Any, Final, NamedTuple

import torch
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import LLMCollector, StreamingCollector, Wait
from objectives import GRPOLoss, MCAdvantage
from torchrl_envs import ChatEnv, DataLoadingPrimer, EpisodeTransform, RewardFunctions, StepCounter
from torchrl_modules import TransformersWrapper
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

GROUPS, N, TURNS = 4, 4, 3
STALENESS: Final = {"Wait(1)": Wait(1), "Wait(4)": Wait(4)}
TOOL_S: Final = 0.1
TAIL: Final = 0.07
TOKENIZER = train_tokenizer(["question 0 1 2 3 4 5 6 7 8 9 user assistant answer go on"] * 9)


class SlowTool(EpisodeTransform):
    """Answers each turn but the last, after a while."""

    async def after_turn(self, episode: Any) -> None:
        """Wait as long as this call takes."""
        if episode.num_turns == TURNS:
            return
        call = f"{episode.group_id} {episode.row % N} {episode.num_turns}"
        seconds = TOOL_S * (10 if random.Random(call).random() < TAIL else 1)
        await self.call(lambda: time.sleep(seconds), timeout_s=60.0)
        episode.say({"role": "user", "content": "go on"})


def digits(completions: list) -> list[float]:
    """The fraction of what was said that is digits."""
    texts = ["".join(m["content"] for m in c if m["role"] == "assistant") for c in completions]
    return [sum(char in "0123456789" for char in text) / max(1, len(text)) for text in texts]


class Run(NamedTuple):
    """Of one run."""

    seconds: float
    cpu_s: float
    rewards: list[float]
    """Of each step."""
    ends_s: list[float]
    """Of each step, since the beginning."""

    def seconds_to(self, goal: float) -> float:
        """Until three steps in a row have this mean reward; infinite where none had."""
        means = [statistics.mean(self.rewards[i : i + 3]) for i in range(len(self.rewards) - 2)]
        reached = (self.ends_s[i + 2] for i, mean in enumerate(means) if mean >= goal)
        return next(reached, float("inf"))


def make_collector(kind: str, actor: TransformersWrapper, buffer: ReplayBuffer) -> Any:
    """The collector of a way to collect."""
    rows = [{"prompt": f"question {i}"} for i in range(64)]
    transforms: list[Any] = [
        DataLoadingPrimer(rows, group_size=N, shuffle=True, seed=0),
        SlowTool(),
        RewardFunctions([digits], completion_format="messages"),
        StepCounter(max_steps=TURNS),
    ]
    env = ChatEnv(batch_size=GROUPS * N).append_transform(Compose(*transforms))
    if kind == "LLMCollector":
        return LLMCollector(env, actor, replay_buffer=buffer)
    return StreamingCollector(env, actor, replay_buffer=buffer, staleness=STALENESS[kind])


def train(kind: str, num_steps: int, seed: int, lr: float) -> Run:
    """Train, and time it from the first batch that is asked for to the last step."""
    torch.manual_seed(seed)
    model: Any = tiny_qwen3(len(TOKENIZER), stop_token_ids=[TOKENIZER.eos_token_id])
    actor = TransformersWrapper(
        model, tokenizer=TOKENIZER, generate_kwargs={"max_new_tokens": 12}, write_tokens=False
    )
    size = GROUPS * N
    buffer = ReplayBuffer(storage=LazyStackStorage(size), transform=MCAdvantage(N), batch_size=size)
    loss = GRPOLoss(actor)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=lr)
    rewards: list[float] = []
    ends: list[float] = []
    with make_collector(kind, actor, buffer) as collector:
        begin, cpu = time.perf_counter(), time.process_time()
        for batch in collector:
            loss(buffer[:]).total().backward()
            optimizer.step()
            optimizer.zero_grad()
            buffer.empty()
            collector.update_policy_weights_(actor.model)
            rewards.append(statistics.mean(float(row["reward"]) for row in batch.unbind(0)))
            ends.append(time.perf_counter() - begin)
            if len(rewards) == num_steps:
                break
        cpu_taken = time.process_time() - cpu
    return Run(ends[-1], cpu_taken, rewards, ends)


def main() -> None:
    """Run it, and print what came of it."""
    parser = argparse.ArgumentParser(description="Training with a tool whose latency has a tail.")
    parser.add_argument("--steps", type=int, default=140)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--goal", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=3e-4)
    args = parser.parse_args()
    kinds = ("LLMCollector", *STALENESS)
    for kind in kinds:
        train(kind, 1, 0, args.lr)
    found: dict[str, list[Run]] = {kind: [] for kind in kinds}
    for seed in range(args.runs):
        for kind in kinds[:: -1 if seed % 2 else 1]:
            found[kind].append(train(kind, args.steps, seed, args.lr))
    print(f"{args.steps} steps of {GROUPS * N} rollouts of {TURNS} turns, {args.runs} seeds")
    base = [run.seconds for run in found["LLMCollector"]]
    for kind, runs in found.items():
        ratio = statistics.median(r.seconds / b for r, b in zip(runs, base, strict=True))
        ends = [run.seconds_to(args.goal) for run in runs]
        print(
            f"  {kind:13s} {statistics.median(run.seconds for run in runs):6.1f} s "
            f"({ratio:.2f}x), CPU {statistics.median(run.cpu_s for run in runs):5.1f} s; "
            f"reward {args.goal} after " + ", ".join(f"{end:.1f} s" for end in ends)
        )


if __name__ == "__main__":
    main()
