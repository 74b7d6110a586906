"""A real pretrained model: CPU time and memory to the same reward, beside TRL's trainer.

    PYTHONPATH=. python benchmarks/real_model.py [--task sums|tools] [--steps 12] [--only ours trl]
        [--prompts 8] [--rollouts 8] [--held-out 96]

SmolLM2-135M-Instruct in float32, after a warm start that is made once and not counted. Everybody
gets the same weights, template, prompts in the same order, rewards, sampling (temperature 1), 8
prompts x 8 rollouts a step, Dr. GRPO's loss, AdamW and learning rate, and is tested on the same
96 held-out prompts. ``sums`` asks for two-digit sums in at most 8 tokens; ``tools`` has the five
tools of the calculator, whose schemas stand in the prompt, as TRL wants them. Each contender has a
process of its own. ``ours without ...`` leaves one of our means out at a time. ``by hand`` is a
loop for ``sums`` alone, with no library but Transformers and no more multiplications than a step
needs: a prompt is read once for its rollouts, in sampling and in training, those that have ended
are read no more, and groups without a signal and the head on other tokens are left out.

TRL runs with all rows of a step in one batch, without gradient checkpointing, without a reference
model (``beta=0``) and in float32, as the others; Liger's kernels ask for Triton, and so for a GPU.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

PROMPTS, N, HELD_OUT = 8, 8, 96  # or what the command line says
LR: Final = 2e-5
WITHOUT: Final = {
    "ours": {},
    "ours without shared prompts": {"share": False},
    "ours without leaving groups out": {"drop": False},
    "ours without kept caches": {"keep": False},
    "ours with a copy of the prompt for each row drawn": {"once": False},
    "ours without the head on trained tokens alone": {"head": False},
}


def task_of(name: str) -> Any:
    from torchrl_envs.tasks.by_name import make_task

    if name == "tools":
        return make_task("calculator", num_held_out=HELD_OUT, num_demonstrations=512)
    config = {"max_terms": 2, "max_digits": 2}
    return make_task("chain_sum", num_held_out=HELD_OUT, num_demonstrations=512, config=config)


class Clock:
    """CPU seconds since the start, what tests took left out."""

    def __init__(self) -> None:
        self.away = 0.0
        self.sampling = 0.0
        self.start = time.process_time()
        self.lines: list[dict[str, Any]] = []

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Around the part of a step that samples."""
        begin = time.process_time()
        yield
        self.sampling += time.process_time() - begin

    def tell(self, step: int, test: Callable[[], float] | None = None) -> None:
        cpu_s = time.process_time() - self.start - self.away
        line: dict[str, Any] = {"step": step, "cpu_s": round(cpu_s, 1)}
        line["sampling_s"] = round(self.sampling, 1)
        if test is not None:
            begin = time.process_time()
            line["held_out"] = round(test(), 3)
            self.away += time.process_time() - begin
        line["peak_gb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2)
        self.lines.append(line)
        print(json.dumps(line), file=sys.stderr, flush=True)


# Ours ---------------------------------------------------------------------------------------------


def wrapper(model: Any, tokens: int, **options: Any) -> Any:
    from torchrl_modules import TransformersWrapper

    sampling = {"max_new_tokens": tokens, "temperature": 1.0}
    return TransformersWrapper(
        model, chat_template_name="qwen", generate_kwargs=sampling, write_tokens=False, **options
    )


def warm_model(name: str, folder: str) -> None:
    """Weights after a few demonstrations, from which all begin."""
    import torch

    from torchrl_agents.models.warm_start import warm_start
    from torchrl_envs.tasks.task import TaskEnv

    torch.manual_seed(0)
    policy = wrapper("smollm2", 8)
    steps, rate = (12, 5e-5) if name == "tools" else (15, 3e-5)
    demonstrations = TaskEnv(task_of(name)).encode_demonstrations(policy.encoder)
    warm_start(
        policy, demonstrations, num_steps=steps, batch_size=16, learning_rate=rate,
        micro_batch_tokens=1024,
        on_step=lambda step, loss: print(f"warm start {step}: {loss:.3f}", file=sys.stderr),
    )  # fmt: skip
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def held_out(task: Any, policy: Any, *, show: bool) -> float:
    import torch

    from collectors import LLMCollector
    from torchrl_envs.tasks.task import TaskEnv

    state = torch.random.get_rng_state()
    torch.manual_seed(1)
    env = TaskEnv(task, held_out=True, num_envs=HELD_OUT, shuffle=False, show_schemas=show)
    reward = LLMCollector(env, policy).collect()["reward"].nanmean().item()
    env.close()
    torch.random.set_rng_state(state)
    return reward


def ours(
    name: str, folder: str, steps: int, every: int, *,
    share: bool = True, drop: bool = True, keep: bool = True, head: bool = True, once: bool = True,
) -> list[dict[str, Any]]:  # fmt: skip
    import torch
    from torchrl.data import LazyStackStorage, ReplayBuffer

    from collectors import LLMCollector
    from objectives import DrGRPO, MCAdvantage, NonFiniteGate
    from torchrl_envs.tasks.task import TaskEnv

    torch.manual_seed(0)
    task, tokens = task_of(name), tokens_of(name)
    env = TaskEnv(task, num_envs=PROMPTS * N, repeats=N, shuffle=False)
    policy = wrapper(folder, tokens)
    leave_out(policy, share=share, keep=keep, head=head, once=once)
    advantage = MCAdvantage(N, scale="none", zero_variance="drop" if drop else "keep")
    buffer = ReplayBuffer(
        storage=LazyStackStorage(PROMPTS * N), transform=advantage, batch_size=PROMPTS * N
    )
    collector = LLMCollector(env, policy, replay_buffer=buffer)
    loss = DrGRPO(policy, max_tokens=tokens * task.max_turns)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, weight_decay=0.0)
    gate = NonFiniteGate(optimizer, max_grad_norm=1.0)
    clock, test = Clock(), partial(held_out, task, policy, show=True)
    clock.tell(0, test)
    for step in range(1, steps + 1):
        with clock.drawing():
            collector.collect()
        if len(buffer):
            batch = loss.pack(buffer[:])
            window = loss.measure_window(batch)
            for part in batch.micro_batches(max_tokens=1024):
                gate.backward(loss(part, window=window), part)
            gate.step()
            buffer.empty()
        clock.tell(step, test if step % every == 0 else None)
    return clock.lines


class EveryPosition:
    """A scorer whose head reads all tokens, of which those that are trained are then taken."""

    def __init__(self, scorer: Any) -> None:
        self.inner = scorer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def score_packed(self, ids: Any, lengths: Any, target_mask: Any, **options: Any) -> Any:
        every = target_mask.new_ones(target_mask.shape)
        every[lengths.cumsum(0) - lengths] = False
        scores = self.inner.score_packed(ids, lengths, every, **options)
        chosen = target_mask[every]
        return type(scores)(*(x if x is None else x[chosen] for x in scores))


def leave_out(policy: Any, *, share: bool, keep: bool, head: bool, once: bool) -> None:
    """Take some of what makes it fast away."""
    from torchrl_modules.engines.slot_reader import SlotReader
    from torchrl_modules.scoring.scorer import PackedScorer

    if not share:
        policy.scorer = PackedScorer(policy.model, share_prefixes=False)
    if not keep:
        policy.engine._kept = None
    if not once:
        policy.engine.reader = SlotReader
    if not head:
        policy.scorer = EveryPosition(policy.scorer)


def tokens_of(name: str) -> int:
    return 48 if name == "tools" else 8


# TRL ----------------------------------------------------------------------------------------------


def trl(name: str, folder: str, steps: int, every: int) -> list[dict[str, Any]]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import add_response_schema, qwen2_5_chat_template

    from torchrl_envs.tasks.calculator import TOOLS
    from torchrl_envs.tasks.reasoning_gym import score_answer

    task, tokens = task_of(name), tokens_of(name)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = qwen2_5_chat_template
    rows = [
        {"prompt": [{"role": "user", "content": row["prompt"]}], "row": json.dumps(row)}
        for row in task.train_rows[: steps * PROMPTS]
    ]

    class Environment:  # the tools alone: TRL offers every public method to the model
        def reset(self, **_: Any) -> None:
            return None

    for tool, function in TOOLS.items():
        setattr(Environment, tool, function)

    def reward(completions: Any, row: list[str], **_: Any) -> list[float]:
        last = [messages[-1] for messages in completions]
        said = [m["content"] or "" if m["role"] == "assistant" else "" for m in last]
        pairs = zip(said, map(json.loads, row), strict=True)
        return [float(score_answer(text, row) >= 1.0) for text, row in pairs]

    is_tools = name == "tools"
    if is_tools:
        add_response_schema(tokenizer)
    clock = Clock()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    policy = wrapper(model, tokens, tokenizer=tokenizer)
    test = partial(held_out, task, policy, show=True)

    class Laps(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.start, clock.away = time.process_time(), 0.0
            clock.tell(0, test)

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            clock.tell(state.global_step, test if state.global_step % every == 0 else None)

    turns = task.max_turns
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), beta=0.0, loss_type="dr_grpo", scale_rewards=False,
        per_device_train_batch_size=PROMPTS * N, num_generations=N, max_steps=steps,
        max_completion_length=tokens * (2 * turns if is_tools else 1), learning_rate=LR,
        lr_scheduler_type="constant", max_grad_norm=1.0, temperature=1.0, shuffle_dataset=False,
        weight_decay=0.0, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, seed=0,
        **({"max_tool_calling_iterations": turns - 1} if is_tools else {}),
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, args=config, reward_funcs=reward, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer, callbacks=[Laps()],
        environment_factory=Environment if is_tools else None,
    )  # fmt: skip
    trainer.train()
    return clock.lines


# By hand ------------------------------------------------------------------------------------------


def by_hand(name: str, folder: str, steps: int, every: int) -> list[dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.chat_template_utils import qwen2_5_chat_template

    from torchrl_envs.tasks.reasoning_gym import score_answer

    if name == "tools":
        sys.exit("real_model.py: 'by hand' has one turn, and so no tools; give --task sums.")
    torch.manual_seed(0)
    task, tokens = task_of(name), tokens_of(name)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.chat_template = qwen2_5_chat_template
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    test = partial(held_out, task, wrapper(model, tokens, tokenizer=tokenizer), show=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    clock = Clock()
    clock.tell(0, test)
    for step in range(1, steps + 1):
        rows = task.train_rows[(step - 1) * PROMPTS : step * PROMPTS]
        with clock.drawing():
            prompts = tokenizer.apply_chat_template(
                [[{"role": "user", "content": row["prompt"]}] for row in rows],
                add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True,
            )  # fmt: skip
            said = sample_by_hand(model, prompts, tokens, tokenizer.eos_token_id)
            texts = tokenizer.batch_decode(said, skip_special_tokens=True)
            scores = [score_answer(text, rows[n // N]) >= 1.0 for n, text in enumerate(texts)]
            rewards = torch.tensor(scores).float().view(PROMPTS, N)
        advantage = rewards - rewards.mean(1, keepdim=True)
        groups = [g for g in range(PROMPTS) if advantage[g].any()]
        if groups:
            read = [
                x[prompts["attention_mask"][g].bool()].tolist()
                for g in groups
                for x in [prompts["input_ids"][g]]
            ]
            answers = [said[g * N : (g + 1) * N] for g in groups]
            log_probs = score_by_hand(model, read, answers)
            weights = torch.cat([
                a.expand(len(answer))
                for g, group in zip(groups, answers, strict=True)
                for a, answer in zip(advantage[g], group, strict=True)
            ])  # fmt: skip
            (-(weights * log_probs).sum() / (PROMPTS * N * tokens)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        clock.tell(step, test if step % every == 0 else None)
    return clock.lines


def sample_by_hand(model: Any, prompts: Any, tokens: int, end: int) -> list[list[int]]:
    """``N`` answers to each prompt: a cache for all, from which those that have ended are taken."""
    import torch

    with torch.no_grad():
        mask = prompts["attention_mask"]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = model(**prompts, position_ids=positions, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        cache.batch_repeat_interleave(N)
        mask, logits = (x.repeat_interleave(N, 0) for x in (mask, out.logits[:, -1]))
        live, said = list(range(len(mask))), [[] for _ in mask]
        for n in range(tokens):
            drawn = torch.multinomial(logits.softmax(-1), 1)
            for row, token in zip(live, drawn.flatten().tolist(), strict=True):
                said[row].append(token)
            going = (drawn[:, 0] != end).nonzero()[:, 0]
            if n == tokens - 1 or not len(going):
                break
            if len(going) < len(live):
                cache.batch_select_indices(going)
                drawn, mask, live = drawn[going], mask[going], [live[i] for i in going.tolist()]
            mask = torch.cat([mask, torch.ones_like(drawn)], 1)
            where = mask.sum(1, keepdim=True) - 1
            out = model(drawn, attention_mask=mask, position_ids=where, past_key_values=cache)
            logits = out.logits[:, -1]
    return said


def score_by_hand(model: Any, prompts: list[list[int]], answers: list[list[list[int]]]) -> Any:
    """Log-probs of all answers: a group is a row, in which each sees the prompt and itself."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids, places, parts, sources, targets = [], [], [], [], []
    for row, (prompt, group) in enumerate(zip(prompts, answers, strict=True)):
        line, place, part = list(prompt), list(range(len(prompt))), [0] * len(prompt)
        for number, answer in enumerate(group, 1):
            sources += [(row, len(prompt) - 1)]
            sources += [(row, len(line) + n) for n in range(len(answer) - 1)]
            targets += answer
            line += answer[:-1]
            place += range(len(prompt), len(prompt) + len(answer) - 1)
            part += [number] * (len(answer) - 1)
        ids.append(torch.tensor(line))
        places.append(torch.tensor(place))
        parts.append(torch.tensor(part))
    part = pad_sequence(parts, batch_first=True, padding_value=-1)
    seen = (part[:, None, :] == 0) | (part[:, None, :] == part[:, :, None])
    hidden = model.model(
        pad_sequence(ids, batch_first=True),
        attention_mask=seen.tril()[:, None],
        position_ids=pad_sequence(places, batch_first=True),
        use_cache=False,
    ).last_hidden_state
    rows, columns = torch.tensor(sources).T
    logits = model.lm_head(hidden[rows, columns])
    return -torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="none")


# All of them --------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=("sums", "tools"), default="sums")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=4, help="steps between two tests")
    parser.add_argument("--only", nargs="*", default=["trl", *WITHOUT])
    parser.add_argument("--folder", help="of the warm model, kept for the next call")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of a step")
    parser.add_argument("--rollouts", type=int, default=N, help="of a prompt")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="prompts of a test")
    given = parser.parse_args()
    sizes = given.prompts, given.rollouts, given.held_out
    globals().update(zip(("PROMPTS", "N", "HELD_OUT"), sizes, strict=True))
    if given.run == "warm":
        warm_model(given.task, given.folder)
    elif given.run:
        others = {"trl": trl, "by hand": by_hand}
        run = others.get(given.run) or partial(ours, **WITHOUT[given.run])
        print(json.dumps(run(given.task, given.folder, given.steps, given.every)))
    else:
        with tempfile.TemporaryDirectory() as work:
            folder = given.folder or f"{work}/warm"
            if not Path(folder, "config.json").exists():
                call(given, "warm", folder)
            found = {who: json.loads(call(given, who, folder)) for who in given.only}
        print(table(found))


def call(given: argparse.Namespace, who: str, folder: str) -> str:
    """One contender in a process of its own; the last line that it prints."""
    command = [sys.executable, __file__, "--run", who, "--folder", folder, "--task", given.task]
    for name in ("steps", "every", "prompts", "rollouts", "held_out"):
        command += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
    print(f"{who} ...", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ)
    return (done.stdout.splitlines() or [""])[-1]


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Held-out reward and CPU seconds at each test, CPU of a step, and peak memory."""
    base = next(iter(found.values())) if "ours" not in found else found["ours"]
    each = {who: lines[-1]["cpu_s"] / lines[-1]["step"] for who, lines in found.items()}
    own = base[-1]["cpu_s"] / base[-1]["step"]
    rows = [
        "| | held-out reward (CPU seconds) | CPU of a step | of it sampling | peak memory |",
        "|---|---|---|---|---|",
    ]
    for who, lines in found.items():
        curve = ", ".join(
            f"{x['held_out']:.2f} ({x['cpu_s']:.0f})" for x in lines if "held_out" in x
        )
        sampling = lines[-1]["sampling_s"] / lines[-1]["step"]
        drawn = f"{sampling:.1f} s" if sampling else ""
        memory, own_memory = lines[-1]["peak_gb"], base[-1]["peak_gb"]
        rows.append(
            f"| {who} | {curve} | {each[who]:.1f} s, {each[who] / own:.2f}x | {drawn} | "
            f"{memory:.1f} GB, {memory / own_memory:.2f}x |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
