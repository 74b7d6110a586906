r"""Evaluation: a model, a run's folder or a server on any task; pass@k, pass^k, mean@n, maj@n.

    python sota-implementations/evaluate/evaluate.py policy.model=outputs/grpo/calculator/seed0
    python sota-implementations/evaluate/evaluate.py task=gsm8k task.dataset=test.jsonl \
        policy.model=Qwen/Qwen3-0.6B evaluate.num_samples=16
    python sota-implementations/evaluate/evaluate.py task=countdown engine=chat \
        engine.url=http://localhost:8000/v1 policy.model=Qwen/Qwen3-0.6B

A table in the terminal; ``evaluation.json`` and ``rollouts/``, which ``torchrl-agents view`` shows,
a batch as a step, in the run's folder.
"""

from config import SETTINGS, EvaluationConfig

from torchrl_agents.settings.command_line import read_command_line

if __name__ == "__main__":
    read_command_line(SETTINGS)  # what is wrong is said before torch is imported

import json
import time
from collections import Counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tensordict import TensorDictBase, lazy_stack

from collectors import Estimate, LLMCollector, evaluation_estimates, rollout_metrics
from collectors.record import RolloutRecorder
from torchrl_agents.models import build_sampler
from torchrl_agents.results import finite, show_rollouts
from torchrl_agents.run import Run
from torchrl_agents.settings.schema import Recipe, SettingsError
from torchrl_agents.start import run_recipe
from torchrl_agents.tasks import Test, build_test, set_token_budget
from torchrl_data import read_conversations
from torchrl_data.keys import FULL
from torchrl_envs.graders.answers import final_text

RECIPE = SETTINGS


def build(recipe: Recipe, cfg: EvaluationConfig, settings: dict[str, Any]) -> Test:
    """The task and the environment of its held-out rows, with ``num_samples`` rollouts of each."""
    test = cfg.evaluate
    if test.ks is None:
        test.ks = [1 << i for i in range(test.num_samples.bit_length())]
    wrong = [k for k in test.ks if not 1 <= k <= test.num_samples]
    if wrong or not test.ks:
        raise SettingsError(
            f"evaluate.ks must be from 1 to evaluate.num_samples={test.num_samples}, got {test.ks}."
        )
    at_once = max(1, test.max_rollouts // test.num_samples) * test.num_samples
    return build_test(
        recipe,
        cfg,
        settings,
        limits=cfg.episodes,
        num_prompts=test.num_prompts,
        num_samples=test.num_samples,
        num_envs=min(at_once, test.num_prompts * test.num_samples),
    )


def evaluate(cfg: EvaluationConfig, test: Test, run: Run) -> dict[str, Any]:
    """Answer every prompt ``num_samples`` times; gives the result."""
    task, env = test
    start = time.monotonic()
    with run.log.phase("loading the model"):
        policy = build_sampler(cfg, task)
        set_token_budget(env, cfg.episodes, policy)
    torch.manual_seed(cfg.seed)

    # Every held-out prompt num_samples times, in batches of whole prompts.
    collector = LLMCollector(env, policy)
    num_rollouts = len(task.held_out_rows) * cfg.evaluate.num_samples
    batches, num_done = list[TensorDictBase](), 0
    tell = run.log.steps("evaluation", -(-num_rollouts // env.batch_size.numel()))
    with RolloutRecorder(run.folder, policy.encoder.tokenizer) as recorder:
        while num_done < num_rollouts and not run.stop.received:
            with run.stop.held():  # a signal in here ends the evaluation after the batch
                batches.append(collector.collect())
                metrics = rollout_metrics(batches[-1])
                recorder.write(len(batches), batches[-1], metrics=metrics)
                num_done += sum(int(row["segment"]) == 0 for row in batches[-1].unbind(0))
                tell(len(batches), metrics)
    trajectories = lazy_stack([row for batch in batches for row in batch.unbind(0)])

    # A prompt's n samples, of which c are correct: pass@k = 1 - C(n - c, k) / C(n, k).
    answer = task.final_answer

    def answer_of(row: TensorDictBase) -> Any:
        assert answer is not None
        return answer(final_text(read_conversations(row, FULL, who="evaluate").messages(0)))

    estimates = evaluation_estimates(
        trajectories,
        ks=cfg.evaluate.ks or [1],
        solved_at=cfg.evaluate.solved_at,
        answer_of=None if answer is None else answer_of,
        level=cfg.evaluate.level,
        seed=cfg.seed,
    )
    show_rollouts({"held-out prompts": trajectories}, cfg.evaluate.num_shown)
    show_table(estimates, cfg)
    result = {
        "task": cfg.task.id,
        "model": cfg.policy.model,
        "seed": cfg.seed,
        "num_prompts": len(task.held_out_rows),
        "num_samples": cfg.evaluate.num_samples,
        "estimates": {name: finite(each._asdict()) for name, each in estimates.items()},
        "rollouts": finite(rollout_metrics(trajectories, solved_at=cfg.evaluate.solved_at)),
        "seconds": round(time.monotonic() - start, 1),
        "output_dir": str(run.folder),
    }
    (run.folder / "evaluation.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
    if not estimates["reward"].num_prompts:
        reasons = Counter(str(row["stop_reason"]) for row in trajectories.unbind(0))
        ends = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common(3))
        raise SettingsError(f"no rollout could be scored: {ends}. All are in {run.folder}.")
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
    run_recipe(RECIPE, evaluate, build)
