"""IFEval: instructions that a program can verify.

Zhou et al., 2023, arXiv:2311.07911. A row has ``prompt``, ``instruction_id_list`` and ``kwargs``,
the arguments of each instruction.

Shape legend: B rows, I instructions of the row that has most.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from tensordict import TensorClass, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Composite, Unbounded

from torchrl_data.keys import REWARD
from torchrl_envs.concurrency.calls import accepted_arguments
from torchrl_envs.episode.episode import Episode
from torchrl_envs.graders.answers import read_tags
from torchrl_envs.rewards.answer import AnswerReward
from torchrl_envs.tasks.task import Task, TaskEnv, load_task_rows

from .instructions import INSTRUCTIONS, follows, loose_variants

HUB_ID: Final = "google/IFEval"
SYSTEM_PROMPT: Final = (
    "You follow instructions exactly. First reason inside <think> and </think>, then give your "
    "answer inside <answer> and </answer>. The instructions are about what is inside <answer>."
)
SCORE: Final = "ifeval_score"
FORMAT_WEIGHTS: Final = (0.4, 0.3, 0.2, 0.1)
ANSWER_BONUS: Final = 0.1
THINK_BONUS: Final = 0.05


class IFEvalScoreData(TensorClass["nocast"]):
    """The instructions that were followed, bool.

    Strict takes the answer as it is; loose also without its first or last line, or asterisks.
    """

    prompt_level_strict_acc: Tensor
    """All of them; ``[B, 1]``."""
    inst_level_strict_acc: Tensor
    """Each; ``[B, I]``, False beyond the row's own."""
    prompt_level_loose_acc: Tensor
    """All of them; ``[B, 1]``."""
    inst_level_loose_acc: Tensor
    """Each; ``[B, I]``."""
    num_instructions: Tensor
    """int64 ``[B, 1]``; 0 where nothing was scored."""

    @classmethod
    def of(cls, rows: Sequence[tuple[Sequence[bool], Sequence[bool]]]) -> "IFEvalScoreData":
        """Scores of rows.

        Args:
            rows: strict and loose result of each instruction.
        """
        size, most = len(rows), max((len(strict) for strict, _ in rows), default=0)
        each = torch.zeros(2, size, most, dtype=torch.bool)
        counts = torch.tensor([[len(strict)] for strict, _ in rows])
        for i, both in enumerate(rows):
            for kind, results in enumerate(both):
                each[kind, i, : len(results)] = torch.tensor(list(results), dtype=torch.bool)
        every = (each.sum(-1, keepdim=True) == counts) & (counts > 0)
        return cls(
            prompt_level_strict_acc=every[0],
            inst_level_strict_acc=each[0],
            prompt_level_loose_acc=every[1],
            inst_level_loose_acc=each[1],
            num_instructions=counts,
            batch_size=[size],
        )


def score_instructions(
    text: str, instruction_ids: Sequence[str], arguments: Sequence[Mapping[str, Any] | None]
) -> tuple[list[bool], list[bool]]:
    """Return which instructions a text follows, strictly and loosely."""
    if len(instruction_ids) != len(arguments):
        raise ValueError(f"{len(instruction_ids)} instructions but {len(arguments)} arguments.")
    pairs = [(name, own or {}) for name, own in zip(instruction_ids, arguments, strict=True)]
    variants = loose_variants(text)
    strict = [follows(text, name, settings) for name, settings in pairs]
    loose = [any(follows(v, name, settings) for v in variants) for name, settings in pairs]
    return strict, loose


class IfEvalScorer(AnswerReward):
    """Scores the answer by the instructions of its row, and writes ``ifeval_score``.

    The reward is the weighted sum of the four accuracies of :class:`IFEvalScoreData` (those of
    single instructions as their mean), 0.1 more for exactly one ``<answer>`` block and 0.05 for
    exactly one ``<think>`` block.

    Args:
        instruction_ids_key: column with the names of the instructions.
        keyword_args_key: column with their arguments.
        aggregate_reward: ``True`` for the reward above, ``False`` for none, or a function of the
            score (an :class:`IFEvalScoreData` of one row), and of ``think_blocks`` and
            ``answer_blocks`` if it names them.
        format_weights: of the strict prompt, strict instruction, loose prompt and loose instruction
            accuracy.
        require_answer: judge what is in the first ``<answer>`` block; otherwise the whole message.
        **kwargs: see :class:`~torchrl_envs.rewards.answer.AnswerReward`.

    Raises:
        ValueError: there are not four finite weights.
    """

    component_keys = (SCORE,)

    def __init__(
        self,
        *,
        instruction_ids_key: str = "instruction_id_list",
        keyword_args_key: str = "kwargs",
        aggregate_reward: bool | Callable[..., Any] = True,
        format_weights: Sequence[float] = FORMAT_WEIGHTS,
        require_answer: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if len(format_weights) != 4 or not all(map(math.isfinite, format_weights)):
            raise ValueError(
                f"IfEvalScorer: format_weights are four finite numbers, got {format_weights!r}."
            )
        self.instruction_ids_key = instruction_ids_key
        self.keyword_args_key = keyword_args_key
        self.required_columns = (instruction_ids_key, keyword_args_key)  # type: ignore[misc]
        self.aggregate_reward = aggregate_reward
        self.format_weights = tuple(format_weights)
        self.require_answer = require_answer

    @property
    def reward_names(self) -> list[str]:
        """The class's name, if it gives a reward."""
        return super().reward_names if self.aggregate_reward else []

    def components(self, text: str, row: Mapping[str, Any], query: str) -> dict[str, Any]:
        """See :class:`AnswerReward`."""
        del query
        _, _, thinks, answers = read_tags(text)
        judged = (answers[0] if answers else "") if self.require_answer else text
        results = score_instructions(
            judged, row[self.instruction_ids_key], row[self.keyword_args_key]
        )
        reward = None
        if callable(self.aggregate_reward):
            blocks = {"think_blocks": thinks, "answer_blocks": answers}
            extra = accepted_arguments(self.aggregate_reward, blocks)
            reward = self.aggregate_reward(IFEvalScoreData.of([results])[0], **extra)
        elif self.aggregate_reward:
            accuracies = [a for k in results for a in (float(all(k)), sum(k) / max(len(k), 1))]
            reward = sum(w * a for w, a in zip(self.format_weights, accuracies, strict=True))
            reward += ANSWER_BONUS * (len(answers) == 1)
            reward += THINK_BONUS * (len(thinks) == 1)
        return {REWARD: reward, SCORE: results}

    def export(self, batch: TensorDictBase, episodes: Sequence[Episode]) -> None:
        """Write the scores."""
        scores: list[tuple[Sequence[bool], Sequence[bool]]] = [([], [])] * batch.batch_size[0]
        for episode in episodes:
            if self.key in episode.metrics:
                scores[episode.row] = episode.metrics[self.key][SCORE]
        batch.set(SCORE, IFEvalScoreData.of(scores))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:  # type: ignore[override]
        """Declares the scores; as many as the row with the most instructions has."""
        shape = reward_spec.shape
        one = Binary(n=1, shape=torch.Size((*shape, 1)), dtype=torch.bool)
        many = Binary(n=-1, shape=torch.Size((*shape, -1)), dtype=torch.bool)
        reward_spec[SCORE] = Composite(
            prompt_level_strict_acc=one,
            inst_level_strict_acc=many,
            prompt_level_loose_acc=one.clone(),
            inst_level_loose_acc=many.clone(),
            num_instructions=Unbounded(shape=one.shape, dtype=torch.int64),
            shape=shape,
            data_cls=IFEvalScoreData,
        )
        return reward_spec

    def row_entry(self, key: str, value: Any) -> Any:
        """The score of one row."""
        del key
        return IFEvalScoreData.of([value])[0]


def ifeval_task(
    *,
    dataset: Any = HUB_ID,
    name: str | None = None,
    split: str | None = None,
    held_out_split: str | None = None,
    skip_bad_rows: bool = False,
    system_prompt: str | None = SYSTEM_PROMPT,
    num_held_out: int = 128,
) -> Task:
    """Prompts of IFEval, or of data like it; there are no demonstrations.

    Args:
        dataset: a hub id, a local path, or the rows themselves.
        name: of the configuration, for a hub id.
        split: which to train on; the only one, or ``"train"``, when not given.
        held_out_split: which to test on; when not given, rows of ``split`` are held out.
        skip_bad_rows: leave out rows that can't be used, and log how many; else they are refused.
        system_prompt: says which format the answer has.
        num_held_out: rows held out.

    Raises:
        ValueError: there are too few rows, or no such split.
    """
    splits: Any = {"name": name, "split": split, "held_out_split": held_out_split}
    splits |= {"num_held_out": num_held_out, "skip_bad_rows": skip_bad_rows}
    train, held_out = load_task_rows(dataset, **splits)
    return Task(
        name="ifeval",
        train_rows=train,
        held_out_rows=held_out,
        rewards=lambda: [IfEvalScorer()],
        columns=("prompt", "instruction_id_list", "kwargs"),
        prompt_column="prompt",
        map_row=_checked,
        skip_bad_rows=skip_bad_rows,
        system_prompt=system_prompt,
        max_new_tokens=512,
    )


class IFEvalEnv(TaskEnv):
    """Prompts of IFEval.

    Args:
        dataset: a hub id, a local path, or the rows themselves.
        compute_reward: whether to score with :class:`IfEvalScorer`.
        system_prompt: says which format the answer has.
        name: of the configuration, for a hub id.
        split: which; the only one, or ``"train"``, when not given.
        **kwargs: see :class:`~torchrl_envs.tasks.task.TaskEnv`.

    Raises:
        ValueError: the data lack a column, or a row names an instruction that is unknown.
    """

    def __init__(
        self,
        *,
        dataset: Any = HUB_ID,
        compute_reward: bool = True,
        system_prompt: str | None = SYSTEM_PROMPT,
        name: str | None = None,
        split: str | None = None,
        **kwargs: Any,
    ) -> None:
        task = ifeval_task(
            dataset=dataset, name=name, split=split, system_prompt=system_prompt, num_held_out=0
        )
        super().__init__(task, compute_reward=compute_reward, **kwargs)


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    unknown = [name for name in row.get("instruction_id_list", ()) if name not in INSTRUCTIONS]
    if unknown:
        raise ValueError(f"the instructions are unknown: {unknown}")
    return row
