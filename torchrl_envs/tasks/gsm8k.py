"""GSM8K: word problems of primary school, answered with a number.

Cobbe et al., 2021, arXiv:2110.14168. A row has ``question`` and ``answer``; the answer ends with
``#### `` and the number.
"""

from collections.abc import Mapping
from typing import Any, Final

from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeTransform
from torchrl_envs.graders.answers import hash_answer, normalize_number, read_tags

from .tagged_reward import NONE_BESIDE, TaggedReward
from .task import Row, Task, TaskEnv, load_task_rows, with_solutions

GSM8K_HUB_ID: Final = "openai/gsm8k"
GSM8K_PROMPT: Final = (
    "You solve word problems. First reason inside <think> and </think>, then give the number, and "
    "nothing else, inside <answer> and </answer>."
)


class GSM8KRewardParser(TaggedReward):
    """1 for the right number in ``<answer>``, 0.1 for another one there, 0 without an answer.

    It writes ``reward_answer`` and ``reward_think`` (whether the blocks are there),
    ``reward_right`` and ``success``, ``[B, 1, 1]`` each.

    Args:
        format_reward: for an answer that is wrong.
        correct_reward: for one that is right.
        answer_column: of the data; what follows its last ``####``, or all of it.
        **kwargs: see :class:`~torchrl_envs.rewards.answer.AnswerReward`.
    """

    def __init__(
        self,
        *,
        format_reward: float = 0.1,
        correct_reward: float = 1.0,
        answer_column: str = "answer",
        **kwargs: Any,
    ) -> None:
        super().__init__(format_reward=format_reward, correct_reward=correct_reward, **kwargs)
        self.answer_column = answer_column
        self.required_columns = (answer_column,)  # type: ignore[misc]

    def _is_right(self, answer: str, row: Mapping[str, Any]) -> bool:
        """Return whether it is the number after the last ``####``."""
        gold = str(row[self.answer_column])
        marked = hash_answer(gold)
        return normalize_number(answer) == normalize_number(gold if marked is None else marked)


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
                f"{self._get_name()}: no {{question}} in the template {template!r:.80}."
            )
        self.template = template

    def begin(self, episode: Episode) -> None:
        """Change the query of an episode that begins.

        Raises:
            TypeError: it is no string.
        """
        if not isinstance(episode.query, str):
            raise TypeError(
                f"{self._get_name()} takes strings, got {type(episode.query).__name__}."
            )
        episode.query = self.template.replace("{question}", episode.query)


def gsm8k_task(
    *,
    dataset: Any = GSM8K_HUB_ID,
    name: str | None = None,
    split: str | None = None,
    held_out_split: str | None = None,
    skip_bad_rows: bool = False,
    system_prompt: str | None = GSM8K_PROMPT,
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
        skip_bad_rows: leave out rows that can't be used, and log how many; else they are refused.
        system_prompt: says which format the answer has.
        format_reward: for an answer that is wrong.
        num_held_out: rows held out.
        num_demonstrations: conversations for a warm start, with the data's own solutions.

    Raises:
        ValueError: there are too few rows, or no such split.
    """
    if isinstance(dataset, str) and dataset == GSM8K_HUB_ID:
        name, held_out_split = name or "main", held_out_split or "test"
    splits: Any = {"name": name, "split": split, "held_out_split": held_out_split}
    splits |= {"num_held_out": num_held_out, "prompt_column": "question"}
    train, held_out = load_task_rows(dataset, skip_bad_rows=skip_bad_rows, **splits)

    def final_answer(text: str) -> str | None:
        answer = read_tags(text).answer
        return normalize_number(answer) if answer else None

    def solution(row: Row) -> str | None:
        reasoning, mark, answer = str(row.get("answer")).rpartition("####")
        tagged = f"<think>{reasoning.strip()}</think><answer>{answer.strip()}</answer>"
        return tagged if mark else None

    task = Task(
        name="gsm8k",
        train_rows=train,
        held_out_rows=held_out,
        rewards=lambda: [GSM8KRewardParser(format_reward=format_reward)],
        columns=("question", "answer"),
        prompt_column="question",
        skip_bad_rows=skip_bad_rows,
        final_answer=final_answer,
        system_prompt=system_prompt,
    )
    return with_solutions(task, num_demonstrations, solution)


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

    Example:
        >>> rows = [{"question": "What is 2 + 2?", "answer": "2 and 2 are 4. #### 4"}]
        >>> env = GSM8KEnv(dataset=rows, num_envs=2, repeats=2)  # or dataset="openai/gsm8k"
        >>> batch = env.reset()
        >>> [messages[-1]["role"] for messages in batch["history"].prompt.to_chats()]
        ['user', 'user']
        >>> batch["group_id"].shape, batch["row"][0]["question"]
        (torch.Size([2]), 'What is 2 + 2?')
    """

    def __init__(
        self,
        *,
        dataset: Any = GSM8K_HUB_ID,
        compute_reward: bool = True,
        system_prompt: str | None = GSM8K_PROMPT,
        name: str | None = None,
        split: str | None = None,
        **kwargs: Any,
    ) -> None:
        task = gsm8k_task(
            dataset=dataset, name=name, split=split, system_prompt=system_prompt, **NONE_BESIDE
        )
        super().__init__(task, compute_reward=compute_reward, **kwargs)


def make_gsm8k_env(
    dataset: Any = GSM8K_HUB_ID, num_envs: int = 1, repeats: int | None = None, **kwargs: Any
) -> GSM8KEnv:
    """Make a :class:`GSM8KEnv`.

    Args:
        dataset: a hub id, a local path, or the rows themselves.
        num_envs: rows of the environment.
        repeats: rollouts of one question.
        **kwargs: see :class:`GSM8KEnv`.

    Example:
        >>> rows = [{"question": "What is 2 + 2?", "answer": "2 and 2 are 4. #### 4"}]
        >>> env = make_gsm8k_env(rows, num_envs=2)
        >>> turns = ["<think>2 and 2</think><answer>4</answer>", "4"]
        >>> out = env.step(env.reset().set("text_response", turns))["next"]
        >>> out["reward"].shape, out["reward"].flatten()
        (torch.Size([2, 1, 1]), tensor([1., 0.]))
    """
    return GSM8KEnv(dataset=dataset, num_envs=num_envs, repeats=repeats, **kwargs)
