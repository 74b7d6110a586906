"""Self-distillation: the student is its own teacher, which sees another prompt."""

import copy
from collections.abc import Iterator
from typing import Any, Final

import torch
from config import DistillationConfig, TeacherConfig
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_agents.settings.errors import refusing
from torchrl_agents.settings.started_ranks import num_ranks
from torchrl_data.import_path import import_callable
from torchrl_envs import (
    DataLoadingPrimer,
    DemonstrationPrompt,
    FeedbackPrompt,
    RetrievePrivilegedLogProb,
)
from torchrl_envs.tasks.task import TaskEnv
from torchrl_modules import TransformersWrapper

SELF: Final = "self"
"""``teacher.model`` of a student that teaches itself."""
OF_SELF: Final = ("prompt", "demonstration_column", "ema_decay")
"""Settings of a teacher that are for it alone."""


def check_self(cfg: TeacherConfig) -> None:
    """Check the settings of a student that teaches itself, and that nobody else has them.

    Raises:
        ValueError: a setting is missing, or can't take effect.
    """
    if cfg.model != SELF:
        usual = TeacherConfig()
        changed = [name for name in OF_SELF if getattr(cfg, name) != getattr(usual, name)]
        if given := [f"teacher.{name}" for name in changed]:
            raise ValueError(f"{', '.join(given)}: of teacher.model=self alone.")
        return
    if cfg.prompt is None:
        raise ValueError(
            "teacher.model=self needs teacher.prompt=demonstration, feedback or mine:f: with the "
            "prompt of the student it would teach nothing."
        )
    if cfg.url is not None or cfg.tokenizer is not None:
        raise ValueError("teacher.model=self is in this process, with the student's tokenizer.")
    if num_ranks() > 1:
        raise ValueError(
            f"teacher.model=self asks the student with another prompt, which one process alone can "
            f"do, and there are {num_ranks()} ranks. Start it without torchrun, or take a "
            "teacher.model of its own."
        )
    if cfg.prompt != "demonstration" and cfg.demonstration_column != "answer":
        raise ValueError("teacher.demonstration_column is of teacher.prompt=demonstration.")
    privileged_prompt(cfg, solved_at=1.0)


def check_demonstrations(cfg: TeacherConfig, env: TaskEnv) -> None:
    """Each row of the data has a demonstration, where the teacher is to see one.

    Raises:
        SettingsError: the data lack the column.
    """
    if cfg.prompt != "demonstration":
        return
    column = cfg.demonstration_column
    with refusing(f"teacher.demonstration_column={column}"):
        for primer in env.transforms_of(DataLoadingPrimer):
            primer.require_columns("teacher.prompt=demonstration", [column])


def privileged_prompt(cfg: TeacherConfig, *, solved_at: float) -> Any:
    """The function that gives the teacher's prompts.

    Raises:
        ValueError: there is no such function.
    """
    assert cfg.prompt is not None
    if cfg.prompt == "demonstration":
        return DemonstrationPrompt(cfg.demonstration_column)
    if cfg.prompt == "feedback":
        return FeedbackPrompt(solved_at=solved_at)
    return import_callable("teacher.prompt (demonstration, feedback or mine:f)", cfg.prompt)


class SelfTeacher:
    """Give each sampled token the log-probability that the student gives it with another prompt.

    Args:
        cfg: the settings.
        actor: the student, of one process.
    """

    def __init__(self, cfg: DistillationConfig, actor: TransformersWrapper) -> None:
        self._decay = cfg.teacher.ema_decay
        self._actor = actor
        self._own = actor
        if self._decay is not None:
            self._own = TransformersWrapper(
                copy.deepcopy(actor.model).eval().requires_grad_(False),
                tokenizer=actor.tokenizer,
                chat_template_name=cfg.policy.chat_template_name,
                generate_kwargs=actor.sampling,
                max_model_len=cfg.policy.max_model_len,
                generate=False,
            )
        engine: Any = actor.engine
        self._score = RetrievePrivilegedLogProb(
            self._own,
            encoder=actor.encoder,
            prompt=privileged_prompt(cfg.teacher, solved_at=cfg.evaluate.solved_at),
            temperature=cfg.policy.temperature,
            max_model_len=engine.max_model_len,
        )

    def name_of(self, row: TensorDictBase) -> str:
        """Nothing: there is no choice."""
        del row
        return ""

    def judge(self, trajectories: TensorDictBase) -> list[TensorDictBase]:
        """The rows, in order, with the log-probs of their teacher, at the beginning of a step."""
        self._follow()
        return list(self._score(trajectories).unbind(0))

    @torch.no_grad()
    def _follow(self) -> None:
        if self._decay is None or self._decay == 1.0:
            return
        for _, own, new in self._pairs():
            if new.requires_grad:  # what is frozen, in 4 bits perhaps, is the same in both
                own.lerp_(new.to(own.dtype), 1.0 - self._decay)

    def _pairs(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The parameters by their names: the teacher's and the student's."""
        pairs = zip(self._own.model.named_parameters(), self._actor.model.parameters(), strict=True)
        return ((name, own, new) for (name, own), new in pairs)

    def state_dict(self) -> dict[str, Any]:
        """The weights of a teacher that are not the student's."""
        if self._decay is None:
            return {}
        return {name: own.detach() for name, own, new in self._pairs() if new.requires_grad}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Any) -> None:
        """Go on from there, after the student."""
        for name, own, new in () if self._decay is None else self._pairs():
            if new.requires_grad:
                own.copy_(state_dict[name])
            elif new.is_floating_point():  # a warm start may have changed it; 4 bits it can't
                own.copy_(new)
