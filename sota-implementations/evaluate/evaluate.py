r"""Evaluation: a model, a run's folder or a server on any task; pass@k, pass^k, mean@n, maj@n.

    python sota-implementations/evaluate/evaluate.py policy.model=outputs/grpo/calculator/seed0
    python sota-implementations/evaluate/evaluate.py task=gsm8k task.dataset=test.jsonl \
        policy.model=Qwen/Qwen3-0.6B evaluate.num_samples=16
    python sota-implementations/evaluate/evaluate.py task=countdown engine=chat \
        engine.url=http://localhost:8000/v1 policy.model=Qwen/Qwen3-0.6B

A table in the terminal; ``evaluation.json`` and ``rollouts/``, which ``torchrl-agents view`` shows,
a batch as a step, in the run's folder.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from torchrl_agents.settings.command_line import read_command_line
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.recipe import Recipe
from torchrl_agents.settings.schema import (
    CheckpointConfig,
    EngineConfig,
    EpisodeConfig,
    RecipeConfig,
    SamplesConfig,
)

ENGINES: Final = ("transformers", "vllm", "sglang", "chat")


@dataclass
class EvaluationConfig(RecipeConfig):
    """Settings of ``evaluate.py``."""

    episodes: EpisodeConfig = field(default_factory=EpisodeConfig)
    evaluate: SamplesConfig = field(default_factory=lambda: SamplesConfig(num_samples=8))


RECIPE: Final = Recipe(
    name="evaluate",
    summary="Evaluation: a model, a run's folder or a server on any task.",
    example="task=gsm8k task.dataset=test.jsonl policy.model=outputs/grpo/gsm8k/seed0",
    config=EvaluationConfig,
    groups={"engine": {name: EngineConfig(name=name) for name in ENGINES}},
    pretrained={"policy.gradient_checkpointing": False},
)

if __name__ == "__main__":
    read_command_line(RECIPE)  # what is wrong is said before torch is imported

import json
import logging
import time
from collections import Counter
from contextlib import closing

import torch
from rich.console import Console
from rich.table import Table
from tensordict import TensorDictBase, lazy_stack

from collectors import Estimate, LLMCollector, RunState, rollout_metrics
from collectors.record import RolloutRecorder
from collectors.record.files import finite
from torchrl_agents.checkpoints import Checkpoints
from torchrl_agents.recorder import scores_of, show_rollouts, tell_unscored
from torchrl_agents.run import Run
from torchrl_agents.setup import Setup, load_models
from torchrl_agents.start import run_recipe
from torchrl_envs import DataLoadingPrimer

_LOG = logging.getLogger("torchrl_agents")


def evaluate(cfg: EvaluationConfig, test: Setup, run: Run) -> dict[str, Any]:
    """Answer every prompt ``num_samples`` times; gives the result."""
    task, env, _ = test
    start = time.monotonic()
    _, policy = load_models(cfg, test, run)
    torch.manual_seed(cfg.seed)
    num_rollouts = len(task.held_out_rows) * cfg.evaluate.num_samples
    num_batches = -(-num_rollouts // env.batch_size.numel())

    # Every held-out prompt num_samples times, in batches of whole prompts. What is done is saved
    # with the place in the data, twenty times at most: each save holds all of it.
    solved: Any = {"solved_at": cfg.evaluate.solved_at, "solved_by": cfg.evaluate.solved_by}
    collector, data = LLMCollector(env, policy), [*env.transforms_of(DataLoadingPrimer)]
    kept = CheckpointConfig(every=-(-num_batches // 20))
    with closing(Checkpoints(kept, run.ranks, RunState()).open(run.folder)) as keep:
        done, saved = keep.restore()
        batches: list[TensorDictBase] = [*saved.get("batches", [])]
        for loader, place in zip(data, saved.get("data", ()), strict=False):
            loader.set_extra_state(place)
        tell = run.log.steps("evaluation", num_batches)
        recorder = RolloutRecorder(run.folder, policy.encoder.tokenizer, after=done)
        # A signal in here ends the evaluation after the batch.
        with recorder, run.stop.held():
            for batch in collector:
                batches.append(batch)
                metrics = rollout_metrics(batch, **solved)
                recorder.write(len(batches), batch, metrics=metrics)
                tell(len(batches), metrics)
                further = {"batches": batches, "data": [each.get_extra_state() for each in data]}
                if run.stop.received:
                    keep.save(len(batches), {}, further)
                    _LOG.info("stopped after batch %d; resume=%s goes on", len(batches), run.folder)
                    break
                keep.after(len(batches), {}, further)
    trajectories = lazy_stack([row for batch in batches for row in batch.unbind(0)])

    # A prompt's n samples, of which c are correct: pass@k = 1 - C(n - c, k) / C(n, k).
    _, estimates = scores_of(trajectories, cfg.evaluate, task.final_answer)
    show_rollouts({"held-out prompts": trajectories}, cfg.evaluate.num_shown)
    show_table(estimates, cfg)
    tell_unscored(trajectories)
    result = {
        "task": cfg.task.id,
        "model": cfg.policy.model,
        "seed": cfg.seed,
        "num_prompts": len(task.held_out_rows),
        "num_samples": cfg.evaluate.num_samples,
        "estimates": {name: finite(each._asdict(), str) for name, each in estimates.items()},
        "rollouts": finite(rollout_metrics(trajectories, **solved), str),
        "seconds": round(time.monotonic() - start, 1),
        "output_dir": str(run.folder),
    }
    (run.folder / "evaluation.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
    if not estimates["reward"].num_prompts:
        reasons = Counter(str(row["stop_reason"]) for row in trajectories.unbind(0))
        ends = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(3))
        ends += ". (A reward of None says that it does not apply.)"
        raise SettingsError(f"no rollout could be scored: {ends} All are in {run.folder}.")
    return result


def show_table(estimates: dict[str, Estimate], cfg: EvaluationConfig) -> None:
    """Print the estimates with their intervals."""
    table = Table(title=f"{cfg.policy.model or 'embedded model'} on {cfg.task.id}")
    for title in ("", "mean", f"{100 * cfg.evaluate.level:g} % interval", "prompts"):
        table.add_column(title, justify="right" if title else "left")
    for name, (value, low, high, count) in estimates.items():
        shown = (f"{value:.3f}", f"{low:.3f} to {high:.3f}") if count else ("-", "-")
        table.add_row(name, *shown, str(count))
    Console(stderr=True).print(table)


if __name__ == "__main__":
    run_recipe(RECIPE, evaluate)
