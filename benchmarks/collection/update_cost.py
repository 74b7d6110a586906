"""What a push of weights at every step costs a streaming collection over vLLM, in this process.

    OMP_NUM_THREADS=1 PYTHONPATH=. python benchmarks/collection/update_cost.py [--steps 20]

A model of 9.7 million parameters answers until its budget of 64 tokens ends, a step is 4 prompts x
8 answers, and the trainer sleeps for ``--train-s`` a step, as if it trained on another device. Runs
with a push after every step and with none take turns, and each ratio is of neighbours in time.
After a push what is in flight is read again by the new weights, or (``kept``) goes on with what the
old ones have read. Of a push: what the trainer waits in ``update_policy_weights_`` (for its copy,
and for the push before), beside what the push takes from when it is sent until the engine has it.
"""

import argparse
import statistics
import tempfile
import time
from typing import Final, NamedTuple

import torch
from torchrl.envs.transforms import Compose
from transformers import Qwen3ForCausalLM

from collectors import StreamingCollector, Wait
from torchrl_envs import ChatEnv, DataLoadingPrimer
from torchrl_modules import AsyncVLLMEngine, VLLMEngine, vLLMWrapper
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

GROUPS, N, TOKENS = 4, 8, 64
KINDS: Final = ("none", "kept", "read again")


class Run(NamedTuple):
    """Of one run, after its first step."""

    tokens_per_s: float
    tokens_per_cpu_s: float
    waits_s: list[float]
    """Of the trainer, for each push."""
    push_s: float
    """A push, on the average."""


def build(vocab_size: int) -> Qwen3ForCausalLM:
    """9.7 million parameters."""
    torch.manual_seed(0)
    return tiny_qwen3(
        vocab_size, hidden_size=384, num_layers=6, num_heads=6, num_key_value_heads=2, head_dim=64,
        intermediate_size=1024, initializer_range=0.05,
    )  # fmt: skip


def collect(
    policy: vLLMWrapper,
    inside: VLLMEngine,
    model: Qwen3ForCausalLM,
    num_steps: int,
    train_s: float,
    kind: str,
) -> Run:
    """Collect, and push or do not."""
    rows = [{"prompt": f"question <{i}>"} for i in range(GROUPS * (num_steps + 1))]
    env = ChatEnv(batch_size=GROUPS * N).append_transform(
        Compose(DataLoadingPrimer(rows, group_size=N, num_epochs=1))
    )
    waits: list[float] = []
    tokens, begin, cpu = 0, 0.0, 0.0
    engine, staleness = AsyncVLLMEngine(inside), Wait(2, recompute=kind != "kept")
    with StreamingCollector(env, policy, engine=engine, staleness=staleness) as collector:
        for step, batch in enumerate(collector):
            if step == 0:
                collector.timeline.take_totals()
                begin, cpu = time.perf_counter(), time.process_time()
            else:
                tokens += sum(int(row["masks", "all_assistant_mask"].sum()) for row in batch)
            if step == num_steps:
                break
            time.sleep(train_s)
            if kind != "none":
                before = time.perf_counter()
                collector.update_policy_weights_(model)
                waits.append(time.perf_counter() - before)
        taken, cpu_taken = time.perf_counter() - begin, time.process_time() - cpu
        push_s = collector.timeline.take_totals().get("push weights", 0.0) / max(1, len(waits))
    return Run(tokens / taken, tokens / cpu_taken, waits, push_s)


def main() -> None:
    """Run it, and print what came of it."""
    parser = argparse.ArgumentParser(description="What a push of weights costs.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--train-s", type=float, default=0.2)
    args = parser.parse_args()
    tokenizer = train_tokenizer([f"question <{i}> user assistant" for i in range(99)])
    model = build(len(tokenizer))
    num_bytes = sum(value.numel() * value.element_size() for value in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = VLLMEngine(folder, max_model_len=256, kv_cache_memory_bytes=256 << 20)
    policy = vLLMWrapper(
        engine,
        tokenizer=tokenizer,
        generate_kwargs={"max_new_tokens": TOKENS, "stop_token_ids": ()},
        write_tokens=False,
    )
    found: dict[str, list[Run]] = {kind: [] for kind in KINDS}
    with engine:
        collect(policy, engine, model, 2, 0.0, "read again")
        for number in range(args.runs):
            for kind in KINDS[:: -1 if number % 2 else 1]:
                found[kind].append(collect(policy, engine, model, args.steps, args.train_s, kind))
    print(
        f"{num_bytes / 1e6:.0f} MB, {GROUPS * N * TOKENS} tokens a step, {args.steps} steps a run"
    )
    speed = statistics.median(run.tokens_per_s for run in found["none"])
    print(f"without a push {speed:.0f} tokens/s")
    for kind in KINDS[1:]:
        pairs = list(zip(found[kind], found["none"], strict=True))
        wall = statistics.median(run.tokens_per_s / none.tokens_per_s for run, none in pairs)
        cpu = statistics.median(run.tokens_per_cpu_s / none.tokens_per_cpu_s for run, none in pairs)
        waits = [wait for run in found[kind] for wait in run.waits_s]
        push_ms = 1e3 * statistics.median(run.push_s for run in found[kind])
        print(
            f"a push a step, {kind}: {wall:.3f}x tokens/s, {cpu:.3f}x tokens/CPU s; a push takes "
            f"{push_ms:.0f} ms, of which the trainer waits {1e3 * statistics.median(waits):.1f} "
            f"(at most {1e3 * max(waits):.0f})"
        )


if __name__ == "__main__":
    main()
