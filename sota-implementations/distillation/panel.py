"""Panel of teachers: one, several as a mixture, or each for the rows of its name.

Shape legend: N packed tokens, B sequences, K target tokens, M teachers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

import torch
from config import TeacherConfig
from self_teacher import OF_SELF, SELF, check_demonstrations, check_self
from teachers import SpanTeacher, build_teacher
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_agents.settings.errors import refusing
from torchrl_agents.settings.field_rules import broken_rules
from torchrl_agents.settings.schema import CollectorConfig, PolicyConfig
from torchrl_data.checks import POSITIVE, check_numbers
from torchrl_data.keys import ASSISTANT_MASK, LOG_PROBS_FULL, ROW
from torchrl_data.token_scorer import TokenScorer, TokenScores
from torchrl_envs import DataLoadingPrimer, RetrieveSpanLogProb
from torchrl_envs.episode.trajectory_transform import TrajectoryTransform
from torchrl_envs.rewards.kl import RetrieveLogProb
from torchrl_envs.tasks.task import TaskEnv
from torchrl_modules import LLMWrapperBase
from torchrl_modules.engines.json_client import JSONClient
from torchrl_modules.policies.loading import load_causal_lm

TEACHER: Final = ("teacher_log_probs", "full")
"""The teacher's log-probs of a row, under ``next``, float32 ``[T]``."""
SPANS: Final = ("next", "span_lengths", "full")
"""How many tokens the span of each has, float32 ``[T]``; of teachers with another tokenizer."""
WHOLE: Final = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""How a student samples from the whole of its model's distribution."""
_ONE: Final = ""


class Panel:
    """Teachers by name, and their weights or the column that names one.

    Args:
        teacher: the only one, where there are no others.
        teachers: of each name the settings of a teacher, and its weight in the mixture; or none.
        column: of the data, which names each row's teacher; there is no mixture then.

    Raises:
        ValueError: there is none, a setting is unknown or out of range, or they do not go together.
    """

    def __init__(self, teacher: TeacherConfig, teachers: Any, column: str | None) -> None:
        self.column = column
        if not teachers:
            if column is not None:
                raise ValueError("teacher_column is for several teachers={name: {model: ...}}.")
            if teacher.model is None:
                raise ValueError("distillation needs teacher.model=... or several teachers={...}.")
            if teacher.chat_template_name is not None and teacher.tokenizer is None:
                raise ValueError("teacher.chat_template_name needs teacher.tokenizer=own, too.")
            check_self(teacher)
            _check_settings("teacher", teacher)
            self.configs, self.weights = {_ONE: teacher}, {_ONE: 1.0}
            return
        if not isinstance(teachers, Mapping):
            raise ValueError(f"teachers must be {{name: {{model: ...}}}}, got {teachers!r}.")
        if teacher != TeacherConfig():
            raise ValueError("teacher.* is for one teacher: leave it out, or teachers={...}.")
        for name, own in teachers.items():
            _check_one(name, own, column, is_alone=len(teachers) == 1)
        given = {name: dict(own) for name, own in teachers.items()}
        weights = {name: own.pop("weight", 1.0) for name, own in given.items()}
        self.configs = {name: TeacherConfig(**own) for name, own in given.items()}
        for name, own in self.configs.items():
            _check_settings(f"teachers.{name}", own)
        self.weights = {name: weight / sum(weights.values()) for name, weight in weights.items()}

    @property
    def is_self(self) -> bool:
        """Whether the student itself teaches, with another prompt."""
        return self.configs.get(_ONE, TeacherConfig()).model == SELF

    def check(self, policy: PolicyConfig, collector: CollectorConfig) -> None:
        """Check what can be known before anything is loaded.

        Raises:
            ValueError: a server can't score what is sampled so, spans of text do not compare, or
                the student can't teach itself beside training.
        """
        if self.is_self and collector.mode != "sync":
            raise ValueError(
                f"teacher.model=self scores with the weights of a step, and collector.mode="
                f"{collector.mode} collects while they change. Set collector.mode=sync."
            )
        others = [
            f"policy.{x}={getattr(policy, x)}" for x in WHOLE if getattr(policy, x) != WHOLE[x]
        ]
        if others and any(each.tokenizer for each in self.configs.values()):
            raise ValueError(
                f"teacher.tokenizer: spans of text compare under whole distributions only, and the "
                f"student samples with {', '.join(others)}. Leave that out."
            )
        for cfg in (each for each in self.configs.values() if each.url is not None):
            if others:
                whole = " ".join(f"policy.{name}={value:g}" for name, value in WHOLE.items())
                raise ValueError(
                    "a server scores at temperature 1 and over all tokens, and its log-probs "
                    f"compare with the student's only there, who samples with {', '.join(others)}. "
                    f"Set {whole}, or leave teacher.url out: a teacher in this process scores as "
                    "the student samples."
                )
            JSONClient(str(cfg.url), cfg.timeout_s).close()

    def each(
        self,
        student: LLMWrapperBase,
        policy: PolicyConfig,
        load: Callable[..., PreTrainedModel] = load_causal_lm,
    ) -> dict[str, Any]:
        """All of them, by name; see :func:`build_teacher`."""
        longest = student.engine.max_model_len  # type: ignore[attr-defined]
        if self.is_self:
            return {}
        return {
            name: build_teacher(cfg, student, policy, max_model_len=longest, load=load)
            for name, cfg in self.configs.items()
        }

    def check_rows(self, env: TaskEnv) -> None:
        """Each row names a teacher that there is, where a column does.

        Raises:
            SettingsError: a row names none.
        """
        column, known = self.column, sorted(self.configs)
        if self.is_self:
            check_demonstrations(self.configs[_ONE], env)
        if column is None:
            return

        def check(row: Mapping[str, Any]) -> str:
            name = row.get(column)
            return "" if name in known else f"its {column} is {name!r}; there are teachers {known}"

        with refusing(f"teacher_column={column}"):
            for primer in env.transforms_of(DataLoadingPrimer):
                primer.require("teachers", check)

    def load(self, student: LLMWrapperBase, policy: PolicyConfig) -> "Teachers":
        """Load or reach all of them."""
        scorers: dict[str, TokenScorer | SpanTeacher] = self.each(student, policy)
        if self.column is None and len(scorers) > 1:
            several: Any = list(scorers.values())
            scorers = {_ONE: Mixture(several, list(self.weights.values()))}
        scoring: dict[str, TrajectoryTransform] = {}
        for name, scorer in scorers.items():
            if isinstance(scorer, SpanTeacher):
                scoring[name] = RetrieveSpanLogProb(
                    scorer.scorer,
                    student=student.encoder,
                    teacher=scorer.encoder,
                    log_probs_full_key=TEACHER,
                    max_model_len=scorer.max_model_len,
                )
                scoring[name].check_policy(student)
            else:
                scoring[name] = RetrieveLogProb(
                    scorer, log_probs_full_key=TEACHER, temperature=policy.temperature
                )
        return Teachers(scoring, self.column)


def _check_settings(path: str, settings: TeacherConfig) -> None:
    """Check each setting of a teacher by its rule, and that it can take effect.

    Raises:
        ValueError: one is out of range, or has no effect.
    """
    for fault in broken_rules(settings, f"{path}."):
        raise ValueError(fault)
    if settings.url is None and settings.timeout_s != TeacherConfig().timeout_s:
        raise ValueError(
            f"{path}.timeout_s={settings.timeout_s} is the deadline of a server, and this teacher "
            f"is in this process: give {path}.url, too, or leave it out."
        )


def _check_one(name: str, own: Any, column: str | None, *, is_alone: bool) -> None:
    """Check the settings of one of several teachers.

    Raises:
        ValueError: a setting is unknown, the weight is out of range, or one can't take effect.
    """
    names = (each.name for each in fields(TeacherConfig))
    known = [*(name for name in names if name not in OF_SELF), "weight"]
    if not isinstance(own, Mapping) or "model" not in own or set(own) - set(known):
        must = f"must have model= and may have {', '.join(known[1:])}"
        raise ValueError(f"teachers.{name} {must}; got {own!r}.")
    if own["model"] == SELF:
        raise ValueError(f"teachers.{name}: the student itself teaches alone: teacher.model=self.")
    if column is not None and "weight" in own:
        raise ValueError(f"a weight has no effect where {column=} names each row's teacher.")
    if own.get("chat_template_name") and not own.get("tokenizer"):
        raise ValueError(f"teachers.{name}: chat_template_name needs tokenizer=own, too.")
    if own.get("tokenizer") and column is None and not is_alone:
        raise ValueError(
            f"teachers.{name} has a tokenizer: a mixture is one of distributions over the same "
            "tokens. Let teacher_column= name each row's teacher, or leave it out."
        )
    check_numbers(f"teachers.{name}", POSITIVE, weight=own.get("weight", 1.0))


class Mixture(TokenScorer):
    """Scores by a mixture of distributions: ``q(token) = sum over m of w_m q_m(token)``.

    Args:
        scorers: M teachers.
        weights: of each, positive, with the sum 1.
    """

    def __init__(self, scorers: Sequence[TokenScorer], weights: Sequence[float]) -> None:
        self._scorers = scorers
        self._log_weights = torch.tensor(weights, dtype=torch.float64).log().float()

    def score_packed(
        self, ids: Tensor, lengths: Tensor, target_mask: Tensor, **options: Any
    ) -> TokenScores:
        """Score the masked tokens of packed sequences, see :class:`TokenScorer`.

        Raises:
            ValueError: the entropy is asked for.
        """
        if options.get("entropy"):
            raise ValueError("A mixture of teachers gives no entropy, got entropy=True.")
        packed = (ids, lengths, target_mask)
        scores = [scorer.score_packed(*packed, **options).log_prob for scorer in self._scorers]
        each = torch.stack([log_prob.float().to(ids.device) for log_prob in scores])
        return TokenScores(torch.logsumexp(each + self._log_weights.to(ids.device)[:, None], 0))


class Teachers:
    """Give each sampled token of trajectories a log-probability.

    Args:
        scoring: a transform that writes :data:`TEACHER`, by name of the teacher.
        column: of the data, which names each row's; where there is none, one scores all.
    """

    def __init__(self, scoring: Mapping[str, TrajectoryTransform], column: str | None) -> None:
        self._column = column
        self._scores = scoring

    def name_of(self, row: TensorDictBase) -> str:
        """Return who teaches a row; nothing where there is no choice."""
        if self._column is None:
            return _ONE
        example: Any = row[ROW]
        return str(example[self._column])

    def judge(self, trajectories: TensorDictBase) -> list[TensorDictBase]:
        """The rows, in order, with the log-probs of their teacher (:data:`TEACHER`)."""
        rows: list[Any] = list(trajectories.unbind(0))
        names = [self.name_of(row) for row in rows]
        for name, score in self._scores.items():
            own = [number for number, each in enumerate(names) if each == name]
            scored = score(lazy_stack([rows[number] for number in own])).unbind(0) if own else ()
            for number, row in zip(own, scored, strict=True):
                rows[number] = row
        return rows


def gaps_of(row: TensorDictBase) -> Tensor:
    """``log p - log q`` of each sampled token of a row, float32 ``[K]``.

    Args:
        row: as :meth:`Teachers.judge` gives it; the gap of a span is divided among its tokens.
    """
    mask, gaps = row[ASSISTANT_MASK], row[LOG_PROBS_FULL] - row["next", *TEACHER]
    lengths = row.get(SPANS, None)
    return (gaps if lengths is None else gaps / lengths.clamp(min=1.0))[mask]
