"""GSM8K: word problems of primary school, answered with a number.

Cobbe et al., 2021, arXiv:2110.14168. A row has ``question`` and ``answer``; the answer ends with
``#### `` and the number.
"""

from collections.abc import Mapping
from typing import Any, Final

from torchrl_data.keys import REWARD
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeTransform
from torchrl_envs.graders.answers import hash_answer, normalize_number, read_tags
from torchrl_envs.rewards.answer import AnswerReward

from .task import Task, TaskEnv, demonstrate, load_task_rows

HUB_ID: Final = "openai/gsm8k"
SYSTEM_PROMPT: Final = (
    "You solve word problems. First reason inside <think> and </think>, then give the number, and "
    "nothing else, inside <answer> and </answer>."
)


class GSM8KRewardParser(AnswerReward):
    """1 for the right number in ``<answer>``, 0.1 for another one there, 0 without an answer.

    It writes ``reward_answer`` and ``reward_think`` (whether the blocks are there),
    ``reward_right`` and ``success``, ``[B, 1, 1]`` each.

    Args:
        format_reward: for an answer that is wrong.
        correct_reward: for one that is right.
        answer_column: of the data; what follows its last ``####``, or all of it.
        **kwargs: see :class:`~torchrl_envs.rewards.answer.AnswerReward`.
    """

    component_keys = ("reward_answer", "reward_think", "reward_right", "success")

    def __init__(
        self,
        *,
        format_reward: float = 0.1,
        correct_reward: float = 1.0,
        answer_column: str = "answer",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.format_reward = format_reward
        self.correct_reward = correct_reward
        self.answer_column = answer_column
        self.required_columns = (answer_column,)  # type: ignore[misc]

    def components(self, text: str, row: Mapping[str, Any], query: str) -> dict[str, Any]:
        """See :class:`AnswerReward`."""
        del query
        tags = read_tags(text)
        gold = str(row[self.answer_column])
        marked = hash_answer(gold)
        right = normalize_number(gold if marked is None else marked)
        success = bool(tags.answer) and normalize_number(tags.answer) == right
        reward = self.format_reward if tags.answer else 0.0
        if success:
            reward = self.correct_reward
        return {
            REWARD: reward,
            "reward_answer": float(bool(tags.answer)),
            "reward_think": float(bool(tags.think)),
            "reward_right": reward,
            "success": success,
        }


class GSM8KPrepareQuestion(EpisodeTransform):
    """Puts a question into a prompt.

    Args:
        template: text with ``{question}`` in it.

    Raises:
        ValueError: the template lacks it.
    """

    def __init__(
        self, template: str = "{question}\nThink step by step, then give the number."
    ) -> None:
        super().__init__()
        if "{question}" not in template:
            raise ValueError(
                f"GSM8KPrepareQuestion: the template has no {{question}}: {template!r:.80}."
            )
        self.template = template

    def begin(self, episode: Episode) -> None:
        """Change the query of an episode that begins.

        Raises:
            TypeError: it is no string.
        """
        if not isinstance(episode.query, str):
            raise TypeError(
                "GSM8KPrepareQuestion takes questions that are strings, got "
                f"{type(episode.query).__name__}."
            )
        episode.query = self.template.replace("{question}", episode.query)


def gsm8k_task(
    *,
    dataset: Any = HUB_ID,
    name: str | None = None,
    split: str | None = None,
    held_out_split: str | None = None,
    system_prompt: str | None = SYSTEM_PROMPT,
    format_reward: float = 0.1,
    num_held_out: int = 256,
    num_demonstrations: int = 1024,
) -> Task:
    """Questions of GSM8K, or of data like it.

    Args:
        dataset: a hub id, a local path, or the rows themselves.
        name: of the configuration, for a hub id.
        split: which to train on; the only one, or ``"train"``, when not given.
        held_out_split: which to test on; when not given, ``"test"`` of the hub's GSM8K, and rows
            of ``split`` of other data.
        system_prompt: says which format the answer has.
        format_reward: for an answer that is wrong.
        num_held_out: rows held out.
        num_demonstrations: conversations for a warm start, with the data's own solutions.

    Raises:
        ValueError: there are too few rows, or no such split.
    """
    is_hub = isinstance(dataset, str) and dataset == HUB_ID
    train, held_out = load_task_rows(
        dataset,
        name="main" if name is None and is_hub else name,
        split=split,
        held_out_split="test" if held_out_split is None and is_hub else held_out_split,
        num_held_out=num_held_out,
        prompt_column="question",
    )
    return Task(
        name="gsm8k",
        train_rows=train,
        held_out_rows=held_out,
        rewards=lambda: [GSM8KRewardParser(format_reward=format_reward)],
        columns=("question", "answer"),
        prompt_column="question",
        final_answer=_answer,
        system_prompt=system_prompt,
        demonstrations=demonstrate(
            train,
            num_demonstrations,
            prompt_column="question",
            system_prompt=system_prompt,
            answer=_solution,
        ),
    )


def _answer(text: str) -> str | None:
    """The number in ``<answer>``, as it is compared."""
    answer = read_tags(text).answer
    return normalize_number(answer) if answer else None


def _solution(row: Mapping[str, Any]) -> str | None:
    """A row's own solution, in the format that is asked for."""
    reasoning, mark, answer = str(row.get("answer")).rpartition("####")
    if not mark:
        return None
    return f"<think>{reasoning.strip()}</think><answer>{answer.strip()}</answer>"


class GSM8KEnv(TaskEnv):
    """Questions of GSM8K.

    Args:
        dataset: a hub id, a local path, or the rows themselves.
        compute_reward: whether to score with :class:`GSM8KRewardParser`.
        system_prompt: says which format the answer has.
        name: of the configuration, for a hub id.
        split: which; the only one, or ``"train"``, when not given.
        **kwargs: see :class:`~torchrl_envs.tasks.task.TaskEnv`.

    Raises:
        ValueError: the data lack ``question`` or ``answer``, or a setting is out of range.
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
        task = gsm8k_task(
            dataset=dataset,
            name=name,
            split=split,
            system_prompt=system_prompt,
            num_held_out=0,
            num_demonstrations=0,
        )
        super().__init__(task, compute_reward=compute_reward, **kwargs)


def make_gsm8k_env(
    dataset: Any = HUB_ID, num_envs: int = 1, repeats: int | None = None, **kwargs: Any
) -> GSM8KEnv:
    """Make a :class:`GSM8KEnv`.

    Args:
        dataset: a hub id, a local path, or the rows themselves.
        num_envs: rows of the environment.
        repeats: rollouts of one question.
        **kwargs: see :class:`GSM8KEnv`.
    """
    return GSM8KEnv(dataset=dataset, num_envs=num_envs, repeats=repeats, **kwargs)
