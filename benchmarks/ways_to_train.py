"""Every engine and every way to train, on one real model: reward, time and memory of each.

    PYTHONPATH=. python benchmarks/ways_to_train.py [--only "vLLM server" DDP] [--seed 0]

All begin with the weights of one short fine-tuning on demonstrations that call a random tool. Each
way is then the command ``torchrl-agents grpo experiment=smollm2`` with at most two turns and the
settings that the table shows, and ends at a held-out reward of 0.9 (of 48 prompts, tested every 4
steps) or after 20 steps.
The worst deviation of the mean ratio from 1 and the smallest effective sample size say how far what
was trained is from what was drawn: engines differ in their arithmetic, asynchronous ways in the age
of their weights. CPU is that of all processes, engines included; memory the peak of the sum of
theirs (proportional set sizes, so that what they share counts once). Tokens a second are those
of the time in which they are drawn, which is all of it where that goes on beside the training.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import psutil

RECIPES = Path(__file__).parents[1] / "sota-implementations"
WARM = (
    "policy=smollm2",
    "task=calculator",
    "policy.show_tool_schemas=false",
    "train.num_steps=8",
    "train.batch_size=16",
    "train.autocast=true",
    "optim.learning_rate=5e-5",
    "evaluate.num_prompts=8",
    "name=warm",
)
COMMON = (
    "experiment=smollm2",
    "warm_start.num_steps=0",
    "collector.max_turns=2",
    "train.stop_at=0.9",
    "evaluate.num_prompts=48",
    "evaluate.every=4",
    "train.num_steps=20",
)
_VLLM = ("engine=vllm", "+engine.engine_kwargs.dtype=float32")
_RANKS = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--master-port=29555")
# Settings of each way, and what Python runs the script with.
WAYS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "Transformers, bfloat16 products": ((), ()),
    "Transformers, float32": (("train.autocast=false",), ()),
    "gradient checkpointing": (("policy.gradient_checkpointing=true",), ()),
    "LoRA": (("policy.lora_rank=32", "optim.learning_rate=4e-4"), ()),
    "streaming": (("collector=streaming", "collector.max_staleness=1"), ()),
    "vLLM in this process": (_VLLM, ()),
    "two vLLM servers": ((*_VLLM, "engine.num_engines=2"), ()),
    "streaming over two vLLM servers": (
        (*_VLLM, "engine.num_engines=2", "collector=streaming", "collector.max_staleness=1"),
        (),
    ),
    "Ray": (("collector=ray", "collector.max_staleness=1"), ()),
    "DDP, 2 ranks": (("train.parallel=ddp",), _RANKS),
    "FSDP2, 2 ranks": (("train.parallel=fsdp2",), _RANKS),
}


class Usage:
    """CPU time and memory of a process and all that it started."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._cpu_s: dict[tuple[int, float], float] = {}
        self.peak_gb = 0.0

    def look(self) -> None:
        memory = 0
        for process in [self._root, *self._root.children(recursive=True)]:
            try:
                times = process.cpu_times()
                self._cpu_s[process.pid, process.create_time()] = times.user + times.system
                memory += process.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue
        self.peak_gb = max(self.peak_gb, memory / 1e9)

    @property
    def cpu_s(self) -> float:
        return sum(self._cpu_s.values())


def train(recipe: str, settings: tuple[str, ...], runner: tuple[str, ...], folder: Path) -> Any:
    """One run; its result, its metrics of each step, and what it took."""
    script = RECIPES / recipe / f"{recipe}.py"
    command = [sys.executable, *runner, str(script), *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=sys.stderr, env=environment
        )
        usage = Usage(process.pid)
        while process.poll() is None:
            try:
                usage.look()
            except psutil.NoSuchProcess:
                break
            time.sleep(1)
        if process.wait():
            return None
        output.seek(0)
        result = json.loads(output.read().splitlines()[-1])
    lines = (Path(result["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    return result, list(map(json.loads, lines)), usage


def row(name: str, settings: tuple[str, ...], found: Any) -> str:
    """Of the table."""
    told = " ".join(f"`{setting}`" for setting in settings) or "none"
    if found is None:
        return f"| {name} | {told} | failed | | | | | | |"
    result, steps, usage = found
    ratios = [abs(x - 1) for step in steps for x in [step.get("ratio_mean/max")] if x is not None]
    sizes = [x for step in steps for x in [step.get("ESS/min")] if x is not None]
    speeds = sorted(step["throughput/sampled_tokens_per_s"] for step in steps)
    cells = [
        name,
        told,
        f"{result['held_out_before']:.2f} to {result['held_out_after']:.2f}",
        str(result["steps"]),
        f"{max(ratios, default=float('nan')):.4f}",
        f"{min(sizes, default=float('nan')):.3f}",
        f"{usage.cpu_s:.0f} s",
        f"{usage.peak_gb:.1f} GB",
        f"{speeds[len(speeds) // 2]:.0f}" if speeds else "",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print("| way | settings | held-out reward | steps | ratio | ESS | CPU | memory | tokens/s |")
    print("|---|---|---|---|---|---|---|---|---|")
    seed = f"seed={given.seed}"
    with tempfile.TemporaryDirectory() as first:
        warm = train("sft", (*WARM, seed), (), Path(first))
        if warm is None:
            sys.exit("ways_to_train.py: the fine-tuning that all begin with failed; see above.")
        weights = f"policy.model={warm[0]['output_dir']}"
        for name in given.only:
            settings, runner = WAYS[name]
            with tempfile.TemporaryDirectory() as folder:
                found = train("grpo", (*COMMON, weights, *settings, seed), runner, Path(folder))
                print(row(name, settings, found), flush=True)


if __name__ == "__main__":
    main()
