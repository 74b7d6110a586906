"""A whole step of GRPO, single turn: collection, rewards, advantages, loss and optimizer.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/collection/end_to_end.py [--rounds 3]

One model of 9.6 million parameters, in float32 on a CPU; a step draws 2 prompts x 8 completions
x 64 tokens (none ends before), rewards them and takes one step of AdamW on all. In turns, in one
process: a loop written by hand around Transformers' ``generate`` (one forward pass of the 16 rows
for the loss), `LLMCollector` with `GRPOLoss`, and TRL's ``GRPOTrainer``. Seconds of CPU and of wall
time of a step, medians, the first step of each round left out. What does not run is named with its
error: TRL's asynchronous trainer asks for a GPU.
"""

import argparse
import contextlib
import copy
import io
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import LLMCollector
from objectives import GRPOLoss, MCAdvantage
from torchrl_envs import ChatEnv, DataLoadingPrimer, RewardFunctions
from torchrl_modules import TransformersWrapper
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

PROMPTS, N, TOKENS = 2, 8, 64
ROWS = PROMPTS * N
LR = 1e-5
TOKENIZER = train_tokenizer([f"question {i} user assistant answer" for i in range(64)] * 2)
WITH_TEMPLATE = copy.deepcopy(TOKENIZER)
"""For those who take the tokenizer's own."""
WITH_TEMPLATE.chat_template = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTIONS = [f"question {i % 10}" for i in range(64)]


class Cost(NamedTuple):
    """Of a step, in seconds."""

    cpu_s: float
    wall_s: float


class Clock:
    """Notes what each step takes."""

    def __init__(self) -> None:
        self.costs: list[Cost] = []
        self.start()

    def start(self) -> None:
        """A step begins."""
        self._last = Cost(time.process_time(), time.perf_counter())

    def lap(self) -> None:
        """A step is over, and the next one begins."""
        now = Cost(time.process_time(), time.perf_counter())
        self.costs.append(Cost(now.cpu_s - self._last.cpu_s, now.wall_s - self._last.wall_s))
        self._last = now


def make_model() -> Any:
    """9.6 million parameters."""
    torch.manual_seed(0)
    model: Any = tiny_qwen3(
        len(TOKENIZER), hidden_size=384, num_layers=6, num_heads=6, num_key_value_heads=2,
        head_dim=64, intermediate_size=1024,
    )  # fmt: skip
    return model


def reward_of(text: str) -> float:
    """Some number that differs between completions."""
    return (len(text) % 7) / 7


def by_hand(clock: Clock, num_steps: int) -> None:
    """The shortest loop that does the work."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    for step in range(num_steps):
        questions = [QUESTIONS[(PROMPTS * step + i) % len(QUESTIONS)] for i in range(PROMPTS)]
        chats = [[{"role": "user", "content": question}] for question in questions]
        prompts = WITH_TEMPLATE.apply_chat_template(
            chats, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"].repeat_interleave(N, 0)
        drawn = model.generate(
            prompts, do_sample=True, min_new_tokens=TOKENS, max_new_tokens=TOKENS,
            pad_token_id=TOKENIZER.pad_token_id,
        )  # fmt: skip
        texts = TOKENIZER.batch_decode(drawn[:, prompts.shape[1] :])
        rewards = torch.tensor([reward_of(text) for text in texts]).view(PROMPTS, N)
        advantage = (rewards - rewards.mean(1, keepdim=True)) / (
            rewards.std(1, keepdim=True) + 1e-4
        )
        log_probs = answer_log_probs(model, drawn, prompts.shape[1])
        ratio = (log_probs - log_probs.detach()).exp()
        loss = -(torch.minimum(ratio, ratio.clamp(0.8, 1.2)) * advantage.view(-1, 1)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.lap()


def answer_log_probs(model: Any, ids: Tensor, num_prompt: int) -> Tensor:
    """Of the answers ``[B, T]``; the head reads these positions alone."""
    hidden = model.model(ids[:, :-1]).last_hidden_state[:, num_prompt - 1 :]
    return -torch.nn.functional.cross_entropy(
        model.lm_head(hidden).transpose(1, 2), ids[:, num_prompt:], reduction="none"
    )


def completion_rewards(completions: list) -> list[float]:
    """Of completions, as strings or messages."""
    return [reward_of(c if isinstance(c, str) else c[-1]["content"]) for c in completions]


def ours(clock: Clock, num_steps: int) -> None:
    """`LLMCollector`, a buffer with `MCAdvantage`, `GRPOLoss`."""
    model = make_model()
    rows = [{"prompt": question} for question in QUESTIONS]
    env = ChatEnv(batch_size=ROWS).append_transform(
        Compose(DataLoadingPrimer(rows, group_size=N), RewardFunctions([completion_rewards]))
    )
    actor = TransformersWrapper(
        model,
        tokenizer=TOKENIZER,
        generate_kwargs={"max_new_tokens": TOKENS, "min_new_tokens": TOKENS},
        write_tokens=False,
    )
    buffer = ReplayBuffer(storage=LazyStackStorage(ROWS), transform=MCAdvantage(N), batch_size=ROWS)
    loss = GRPOLoss(actor)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=LR)
    with LLMCollector(env, actor, replay_buffer=buffer) as collector:
        for batch in itertools.islice(collector, num_steps):
            drawn = sum(int(row["masks", "all_assistant_mask"].sum()) for row in batch.unbind(0))
            assert drawn == ROWS * TOKENS
            loss(buffer[:]).total().backward()
            optimizer.step()
            optimizer.zero_grad()
            buffer.empty()
            clock.lap()


def trl(clock: Clock, num_steps: int) -> None:
    """``GRPOTrainer``."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Laps(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.lap()

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=ROWS,
            num_generations=N,
            max_completion_length=TOKENS,
            generation_kwargs={"min_new_tokens": TOKENS},
            max_steps=num_steps,
            learning_rate=LR,
            beta=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        rows = [{"prompt": [{"role": "user", "content": question}]} for question in QUESTIONS]
        trainer = GRPOTrainer(
            model=make_model(),
            args=config,
            reward_funcs=lambda completions, **_: completion_rewards(completions),
            train_dataset=Dataset.from_list(rows),
            processing_class=WITH_TEMPLATE,
            callbacks=[Laps()],
        )
        trainer.train()


def trl_async(clock: Clock, num_steps: int) -> None:
    """TRL's asynchronous trainer, which is built, and asks for its server."""
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    del clock
    with tempfile.TemporaryDirectory() as folder:
        make_model().save_pretrained(folder)
        WITH_TEMPLATE.save_pretrained(folder)
        rows = [{"prompt": [{"role": "user", "content": question}]} for question in QUESTIONS]
        trainer = AsyncGRPOTrainer(
            model=folder,
            args=AsyncGRPOConfig(
                output_dir=folder, max_steps=num_steps, report_to=[], use_cpu=True, bf16=False
            ),
            reward_funcs=lambda completions, **_: completion_rewards(completions),
            train_dataset=Dataset.from_list(rows),
            processing_class=WITH_TEMPLATE,
        )
        trainer.train()


WAYS: dict[str, Callable[[Clock, int], None]] = {
    "by hand": by_hand,
    "LLMCollector, GRPOLoss": ours,
    "TRL, GRPOTrainer": trl,
    "TRL, AsyncGRPOTrainer": trl_async,
}


def main() -> None:
    """Run all ways in turns, and print what a step costs."""
    parser = argparse.ArgumentParser(description="A whole step of GRPO beside those of peers.")
    parser.add_argument("--steps", type=int, default=4, help="of a round, after the first")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    costs: dict[str, list[Cost]] = {name: [] for name in WAYS}
    failed: dict[str, str] = {}
    for _ in range(args.rounds):
        for name, run in WAYS.items():
            if name in failed:
                continue
            clock = Clock()
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    run(clock, args.steps + 1)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            costs[name] += clock.costs[1:]
    base = Cost(*(statistics.median(values) for values in zip(*costs["by hand"], strict=True)))
    for name, each in costs.items():
        if name in failed:
            print(f"{name:24s} does not run: {failed[name]}")
            continue
        cpu, wall = (statistics.median(values) for values in zip(*each, strict=True))
        print(
            f"{name:24s} CPU {cpu:5.2f} s ({cpu / base.cpu_s:.2f}x)   "
            f"wall {wall:5.2f} s ({wall / base.wall_s:.2f}x)"
        )


if __name__ == "__main__":
    main()
