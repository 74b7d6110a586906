"""One teacher or several: as a mixture, or each for the rows of its name.

Shape legend: N packed tokens, B sequences, K target tokens, M teachers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

import torch
from teachers import TeacherConfig, build_teacher, check_teacher, rehearse_teacher
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor

from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.schema import PolicyConfig
from torchrl_data.keys import ROW
from torchrl_data.protocols import TokenScorer, TokenScores
from torchrl_envs import DataLoadingPrimer
from torchrl_envs.rewards.kl import RetrieveLogProb
from torchrl_envs.tasks.task import TaskEnv
from torchrl_modules import LLMWrapperBase, TransformersWrapper

TEACHER: Final = ("teacher_log_probs", "full")
"""The teacher's log-probs of a row, under ``next``, float32 ``[T]``."""
_ONE: Final = ""


class Panel:
    """Who teaches: teachers by name, and their weights or the column that names one.

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
            self.configs, self.weights = {_ONE: teacher}, {_ONE: 1.0}
            return
        if not isinstance(teachers, Mapping):
            raise ValueError(f"teachers must be {{name: {{model: ...}}}}, got {teachers!r}.")
        if teacher != TeacherConfig():
            raise ValueError("teacher.* is for one teacher: leave it out, or teachers={...}.")
        given = {name: _settings(name, own) for name, own in teachers.items()}
        if column is not None and any("weight" in own for own in given.values()):
            raise ValueError(f"a weight has no effect where {column=} names each row's teacher.")
        weights = {name: own.pop("weight", 1.0) for name, own in given.items()}
        for name, weight in weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
                raise ValueError(f"teachers.{name}.weight must be positive, got {weight!r}.")
        self.configs = {name: TeacherConfig(**own) for name, own in given.items()}
        self.weights = {name: weight / sum(weights.values()) for name, weight in weights.items()}

    def check(self, policy: PolicyConfig) -> None:
        """What can be told before anything is loaded.

        Raises:
            ValueError: a server can't score what is sampled so.
        """
        for cfg in self.configs.values():
            check_teacher(cfg, policy)

    def rehearse(self, student: LLMWrapperBase, policy: PolicyConfig) -> None:
        """Raise what :meth:`load` would, without loading weights.

        Args:
            student: its model may have no weights.
            policy: device, dtype and attention, as the student's.
        """
        longest = student.engine.max_model_len  # type: ignore[attr-defined]
        for cfg in self.configs.values():
            rehearse_teacher(cfg, student, policy, max_model_len=longest)

    def check_rows(self, env: TaskEnv) -> None:
        """Each row names a teacher that there is, where a column does.

        Raises:
            SettingsError: a row names none.
        """
        column, known = self.column, sorted(self.configs)
        if column is None:
            return

        def check(row: Mapping[str, Any]) -> str:
            name = row.get(column)
            return "" if name in known else f"its {column} is {name!r}; there are teachers {known}"

        for primer in env.transforms_of(DataLoadingPrimer):
            try:
                primer.require("teachers", check)
            except ValueError as error:
                raise SettingsError(f"teacher_column={column}: {error}") from error

    def load(
        self, student: TransformersWrapper, policy: PolicyConfig, *, max_model_len: int
    ) -> "Teachers":
        """Load or reach all of them; see :func:`build_teacher`."""
        scorers: dict[str, TokenScorer] = {
            name: build_teacher(cfg, student, policy, max_model_len=max_model_len)
            for name, cfg in self.configs.items()
        }
        if self.column is None and len(scorers) > 1:
            scorers = {_ONE: Mixture(list(scorers.values()), list(self.weights.values()))}
        return Teachers(scorers, self.column, temperature=policy.temperature)


def _settings(name: str, given: Any) -> dict[str, Any]:
    known = [*(each.name for each in fields(TeacherConfig)), "weight"]
    unknown = sorted(set(given) - set(known)) if isinstance(given, Mapping) else [repr(given)]
    if unknown or "model" not in given:
        raise ValueError(
            f"teachers.{name} must have model= and may have {', '.join(known[1:])}; got {given!r}."
        )
    return dict(given)


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
        self,
        ids: Tensor,
        lengths: Tensor,
        target_mask: Tensor,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> TokenScores:
        """Score the masked tokens of packed sequences, each given the tokens before it.

        Args:
            ids: int64 ``[N]``.
            lengths: int64 ``[B]``.
            target_mask: bool ``[N]``.
            temperature: of each teacher.
            entropy: only False.

        Returns:
            Log-probs ``[K]`` in nats, float32.

        Raises:
            ValueError: the entropy is asked for.
        """
        if entropy:
            raise ValueError("A mixture of teachers gives no entropy, got entropy=True.")
        scores = [
            scorer.score_packed(ids, lengths, target_mask, temperature=temperature).log_prob
            for scorer in self._scorers
        ]
        each = torch.stack([log_prob.float().to(ids.device) for log_prob in scores])
        return TokenScores(torch.logsumexp(each + self._log_weights.to(ids.device)[:, None], 0))


class Teachers:
    """Give each sampled token of trajectories a log-probability.

    Args:
        scorers: by name.
        column: of the data, which names each row's; where there is none, one scores all.
        temperature: at which the student samples.
    """

    def __init__(
        self, scorers: Mapping[str, TokenScorer], column: str | None, *, temperature: float
    ) -> None:
        self._column = column
        self._scores: dict[str, Callable[[TensorDictBase], TensorDictBase]] = {
            name: RetrieveLogProb(scorer, log_probs_full_key=TEACHER, temperature=temperature)
            for name, scorer in scorers.items()
        }

    def name_of(self, row: TensorDictBase) -> str:
        """Who teaches a row; nothing where there is no choice."""
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
