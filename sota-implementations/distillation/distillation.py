r"""On-policy distillation: a teacher judges each token that the student samples.

torchrl-agents distillation teacher.model=outputs/sft/gcd/seed0        # the embedded model
torchrl-agents distillation task=gsm8k task.dataset=rows.jsonl \
        policy.model=Qwen/Qwen3-0.6B teacher.model=Qwen/Qwen3-8B teacher.url=http://host:8000/v1
torchrl-agents distillation 'teachers={a: {model: A}, b: {model: B}}' teacher_column=topic
torchrl-agents distillation policy=smollm2 teacher.model=outputs/sft/gcd/seed0 \
        teacher.tokenizer=own                                          # another tokenizer
torchrl-agents distillation policy=smollm2 task=gsm8k task.dataset=rows.jsonl \
        teacher.model=self teacher.prompt=demonstration                # self-distillation
torchrl-agents distillation experiment=control teacher.model=...       # a control
"""

from dataclasses import replace

from config import DistillationConfig

from torchrl_agents.settings.command_line import read_command_line
from torchrl_agents.settings.recipe import Recipe

RECIPE = Recipe(
    name="distillation",
    summary="On-policy distillation: a teacher judges each token that the student samples.",
    example="teacher.model=outputs/sft/gcd/seed0",
    config=DistillationConfig,
    needs_groups=False,
    # L = - sum over sampled tokens of min(r A, clip(r, 1 - e, 1 + e) A) / number of tokens, with
    # r = p_now(token) / p_sampled(token): what is older than this step is corrected for.
    loss=lambda cfg, actor: GRPOLoss(
        actor,
        clip_epsilon=(cfg.train.clip_epsilon, cfg.train.clip_epsilon),
        temperature=cfg.policy.temperature,
    ),
    parts=lambda cfg: {"teacher": lambda: build_panel(cfg).check(cfg.policy, cfg.collector)},
    rehearse=lambda cfg, _, policy: build_panel(cfg).each(
        policy, replace(cfg.policy, device="meta"), outline
    ),
)

if __name__ == "__main__":
    read_command_line(RECIPE)  # what is wrong is said before torch is imported

import torch
from panel import SPANS, TEACHER, Panel, gaps_of
from self_teacher import SelfTeacher
from tensordict import TensorDictBase, lazy_stack

from objectives import GRPOLoss
from torchrl_agents.collection import build_collector
from torchrl_agents.models.outline import outline
from torchrl_agents.parallel import share_model
from torchrl_agents.run import Run
from torchrl_agents.setup import Setup, build_task, load_models, warm_up
from torchrl_agents.start import run_recipe
from torchrl_agents.training import Rollouts, Training, TrainingStep, learn
from torchrl_data.keys import ADVANTAGE, ASSISTANT_MASK, LOG_PROBS_FULL


def build_panel(cfg: DistillationConfig) -> Panel:
    """Return who teaches."""
    return Panel(cfg.teacher, cfg.teachers, cfg.teacher_column)


def build(recipe: Recipe, cfg: DistillationConfig, settings: dict) -> Setup:
    """The task and its environments; each row has a teacher."""
    setup = build_task(recipe, cfg, settings)
    build_panel(cfg).check_rows(setup.env)
    return setup


def main(cfg: DistillationConfig, setup: Setup, run: Run) -> dict:
    """Train as the settings say; gives the result."""
    actor, policy = load_models(cfg, setup, run)
    panel = build_panel(cfg)
    with run.log.phase("loading the teacher"):  # what it can't teach shows before the warm start
        others = None if panel.is_self else panel.load(policy, cfg.policy)
    actor, policy = warm_up(cfg, setup, run, actor, policy)
    actor, policy = share_model(cfg, run, actor, policy)  # with the ranks of torchrun
    teachers = SelfTeacher(cfg, actor) if others is None else others

    def judge(trajectories: TensorDictBase) -> TensorDictBase:
        """Give each sampled token its advantage."""
        rows = teachers.judge(trajectories)
        masks = [row[ASSISTANT_MASK] for row in rows]
        # A = log q(token) - log p(token), q the teacher and p the student that sampled it.
        # Its mean over what p samples is -KL(p || q): REINFORCE with A descends on it. A teacher
        # with another tokenizer judges spans of text, and each token has the A of its span.
        gaps = [row["next", *TEACHER] - row[LOG_PROBS_FULL] for row in rows]
        verdicts = torch.cat([gap[mask] for gap, mask in zip(gaps, masks, strict=True)])
        if cfg.train.shuffle_verdicts:  # over all rows: a row's sum would say how good it is
            verdicts = verdicts[torch.randperm(len(verdicts))]
        parts = verdicts.split([int(mask.sum()) for mask in masks])
        for row, mask, part in zip(rows, masks, parts, strict=True):
            row[ADVANTAGE] = torch.zeros(len(mask), 1).masked_scatter(mask[:, None], part)
        return lazy_stack(rows)

    collector = build_collector(cfg, setup.env, policy, postproc=judge)

    def kl_to_teacher(step: TrainingStep) -> dict[str, float]:
        assert step.trained is not None
        rows = step.trained.unbind(0)
        of_rows = [gaps_of(row) for row in rows]
        told = {"kl_to_teacher": float(torch.cat(of_rows).mean())}
        spans = [row[SPANS][row[ASSISTANT_MASK]] > 0 for row in rows if SPANS in row.keys(True)]
        if spans:
            told["taught_fraction"] = float(torch.cat(spans).float().mean())
        by_name: dict[str, list] = {}
        for row, values in zip(rows, of_rows, strict=True):
            by_name.setdefault(teachers.name_of(row), []).append(values)
        for name, values in by_name.items():
            if name:
                told[f"kl_to_teacher/{name}"] = float(torch.cat(values).mean())
        return told

    training = Training(
        *(cfg, run, setup, actor, policy, Rollouts(collector)),
        measure=kl_to_teacher,
        parts={"teacher": teachers} if isinstance(teachers, SelfTeacher) else {},
        curves={"kl_to_teacher": "KL to the teacher, nats per token", "entropy": "entropy"},
    )
    return learn(training)


if __name__ == "__main__":
    run_recipe(RECIPE, main, build)
