"""Answers that a program can verify: exact, short, mathematical, not repetitive."""

import functools
import logging
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Literal, NamedTuple, TypeVar, get_args

from torchrl_data.checks import POSITIVE, check_counts, check_numbers, one_of
from torchrl_data.messages import Message
from torchrl_envs.concurrency import CallTimeoutError
from torchrl_envs.processes import ToolProcesses

# Answers in texts: found, normalised, compared; and whether a text has the format asked for.
#
# The reward functions here have TRL's signature: see ``RewardFunctions``.

F = TypeVar("F", bound=Callable[..., Any])
_THINK: Final = re.compile(r"<think>(.*?)</think>", re.DOTALL)
_ANSWER: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOTH: Final = re.compile(
    r"\s*<think>((?:(?!</?think>|</?answer>).)*)</think>\s*"
    r"<answer>((?:(?!</?think>|</?answer>).)*)</answer>\s*",
    re.DOTALL,
)


class Tagged(NamedTuple):
    """What stands in the ``<think>`` and ``<answer>`` blocks of a text."""

    think: str
    """In the first block, stripped; empty where there is none."""
    answer: str
    """In the last block, stripped; empty where there is none."""
    thinks: list[str]
    """In all blocks, as it is."""
    answers: list[str]


def message_text(message: Mapping[str, Any] | None) -> str:
    """The text of a message; of content parts, that of the text parts."""
    content = None if message is None else message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def final_text(completion: Sequence[Message]) -> str:
    """What the policy said last: the text of the last message if it is the assistant's."""
    last = completion[-1] if completion else None
    return message_text(last) if last is not None and last["role"] == "assistant" else ""


def as_opened(messages: Sequence[Mapping[str, Any]], opened: str) -> list[Message]:
    """Messages in which the assistant's texts begin with what the prompt opened of them.

    Args:
        messages: what the policy said, and what it was answered.
        opened: such as ``<think>``; see ``ConversationEncoder.opened_text``. What begins with it
            already stays.
    """
    shown: list[Message] = []
    for message in messages:
        content = message.get("content")
        is_own = message["role"] == "assistant" and isinstance(content, str)
        if is_own and not str(content).lstrip().startswith(opened.strip()):
            message = {**message, "content": f"{opened}{content}"}
        shown.append(dict(message))
    return shown


def read_tags(text: str) -> Tagged:
    """The reasoning and the answer of a text."""
    thinks, answers = _THINK.findall(text), _ANSWER.findall(text)
    return Tagged(
        think=thinks[0].strip() if thinks else "",
        answer=answers[-1].strip() if answers else "",
        thinks=thinks,
        answers=answers,
    )


def hash_answer(text: str) -> str | None:
    """What follows the last ``####`` of a text, up to the end of its line; GSM8K's format."""
    if "####" not in text:
        return None
    return text.rsplit("####", 1)[1].strip().split("\n")[0].strip()


def normalize_number(text: str) -> str:
    """A number as it is compared: ``"$1,200.50 "`` is ``"1200.5"``, ``"+07"`` is ``"7"``."""
    # Anything that is no decimal number comes back stripped and otherwise as it is.
    plain = text.strip()
    for sign in ",$%":
        plain = plain.replace(sign, "")
    match = re.fullmatch(r"([+-]?)([0-9]*)\.?([0-9]*)\.?", plain.strip())
    if match is None or not (match[2] or match[3]):
        return text.strip()
    whole, fraction = match[2].lstrip("0") or "0", match[3].rstrip("0")
    minus = "-" if match[1] == "-" and (whole != "0" or fraction) else ""
    return f"{minus}{whole}.{fraction}" if fraction else f"{minus}{whole}"


def reads_messages(function: F) -> F:
    """Mark a reward function that gets messages where the data's prompts are strings, too."""
    function.needs_messages = True  # type: ignore[attr-defined]
    return function


@reads_messages
def exact_match(
    completions: Sequence[Sequence[Message]], answer: Sequence[Any], **_: Any
) -> list[float]:
    """1 where the last message is the answer, but for white space around it."""
    return [
        float(final_text(completion).strip() == str(right).strip())
        for completion, right in zip(completions, answer, strict=True)
    ]


@reads_messages
def hash_answer_match(
    completions: Sequence[Sequence[Message]], answer: Sequence[str], **_: Any
) -> list[float]:
    """1 where the number after the last ``####`` is that of the answer."""
    rewards = []
    for completion, right in zip(completions, answer, strict=True):
        found, expected = hash_answer(final_text(completion)), hash_answer(right)
        wanted = normalize_number(right if expected is None else expected)
        rewards.append(float(found is not None and normalize_number(found) == wanted))
    return rewards


@reads_messages
def think_answer_format(completions: Sequence[Sequence[Message]], **_: Any) -> list[float]:
    """1 where the last message is one ``<think>`` block and one ``<answer>`` block."""
    return [float(_BOTH.fullmatch(final_text(chat)) is not None) for chat in completions]


# A penalty for saying the same again: the share of n-grams that are repeated.

Unit = Literal["words", "characters"]


class RepetitionPenalty:
    """A reward from 0 (every n-gram is new) down to ``max_penalty`` (they are all the same).

    It is ``max_penalty * (1 - different n-grams / n-grams)`` of all that the policy said, its
    thoughts too; of tools and users nothing counts. A text of fewer than ``ngram_size`` words gets
    0. Use it as a reward function: ``RewardFunctions([right, RepetitionPenalty()])``.

    Args:
        ngram_size: words (or characters) of an n-gram.
        max_penalty: below 0.
        unit: ``"words"``, which white space separates, in lower case; or ``"characters"`` for
            scripts without spaces (with n-grams of 10 and more, say). An n-gram lies within a text.

    Raises:
        ValueError: the size is not positive, the penalty not below 0, or there is no such unit.

    See Also:
        Yeo et al., 2025, arXiv:2502.03373, appendix C.2.

    Examples:
        >>> penalty = RepetitionPenalty(ngram_size=2, max_penalty=-1.0)
        >>> penalty([[{"role": "assistant", "content": "so it is so it is so"}]])
        [-0.5]
    """

    needs_messages = True

    def __init__(
        self, ngram_size: int = 3, max_penalty: float = -1.0, *, unit: Unit | str = "words"
    ) -> None:
        check_counts(ngram_size=ngram_size)
        check_numbers("RepetitionPenalty", "(-inf, 0)", max_penalty=max_penalty)
        self.ngram_size = ngram_size
        self.max_penalty = max_penalty
        self.unit: Unit = one_of("unit", unit, get_args(Unit))

    def __call__(self, completions: Sequence[Sequence[Message]], **_: Any) -> list[float]:
        """Score rollouts.

        Args:
            completions: messages, per rollout.
        """
        penalties, size = [], self.ngram_size
        for messages in completions:
            own = [message for message in messages if message["role"] == "assistant"]
            said = [str(message.get("reasoning_content") or "") for message in own]
            said += map(message_text, own)
            grams: list[tuple[str, ...]] = []
            for text in said:
                parts = text.lower().split() if self.unit == "words" else list(text)
                grams += [tuple(parts[i : i + size]) for i in range(len(parts) - size + 1)]
            fraction = 1 - len(set(grams)) / len(grams) if grams else 0.0
            penalties.append(self.max_penalty * fraction)
        return penalties


# Short answers compared as in SQuAD: exact match and F1 of words.
#
# Rajpurkar et al., 2016, arXiv:1606.05250, section 6.1.

_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)


def normalized_answer(text: str) -> str:
    """A text as it is compared: lower case, without punctuation, articles and further spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match_of(said: str, answers: str | Sequence[str]) -> float:
    """1 if a text is one of the right answers, else 0.

    Args:
        said: the text.
        answers: one, or all that are right.
    """
    own = normalized_answer(said)
    listed = [answers] if isinstance(answers, str) else answers
    return float(any(own == normalized_answer(each) for each in listed))


def f1_of(said: str, answers: str | Sequence[str]) -> float:
    """The harmonic mean of precision and recall of the words, for the best of the right answers.

    Args:
        said: the text.
        answers: one, or all that are right.
    """
    own, best = normalized_answer(said).split(), 0.0
    for answer in [answers] if isinstance(answers, str) else answers:
        right = normalized_answer(answer).split()
        if own and right:
            common = (Counter(own) & Counter(right)).total()
            best = max(best, 2 * common / (len(own) + len(right)))
        elif own == right:
            best = 1.0
    return best


# Mathematical answers, compared by the package math-verify in killable processes.
#
# Needs ``pip install torchrl-agents[graders]``.

_MAX_MEMORY_MB: Final = 2048
_MAX_RESULT_BYTES: Final = 64


class MathVerifyReward:
    r"""1 where the last message's mathematical answer equals the right one, else 0.

    The answer is read from the last ``<answer>`` block if there is one, else from the whole
    message: a ``\boxed{}`` or other LaTeX, or the last number. An expression that takes too long
    to parse or to compare costs its own process only, which is killed; its rollout can't be scored,
    unless ``timeout_reward`` says what it gets.

    Use it as a reward function: ``RewardFunctions([MathVerifyReward()])``, which also closes it.

    Args:
        answer_column: of the data; LaTeX or plain.
        num_workers: processes.
        timeout_s: deadline for one rollout, from when a process takes it up; that of
            ``RewardFunctions`` counts the wait for a process too.
        timeout_reward: for a rollout that takes longer; ``None`` makes it unscorable.

    Raises:
        ValueError: a setting is not positive.
        ImportError: math-verify is not installed.
    """

    scores_one_rollout = True
    needs_messages = True

    def __init__(
        self,
        *,
        answer_column: str = "answer",
        num_workers: int = 2,
        timeout_s: float = 5.0,
        timeout_reward: float | None = None,
    ) -> None:
        if find_spec("math_verify") is None:
            raise ImportError(
                "MathVerifyReward needs the package math-verify, which is not installed: pip "
                "install torchrl-agents[graders]."
            )
        check_numbers("MathVerifyReward", POSITIVE, timeout_s=timeout_s)
        self.answer_column = answer_column
        self.timeout_reward = timeout_reward
        self.required_columns = (answer_column,)
        self.num_timeouts = 0
        self._processes = ToolProcesses(
            {"grade": grade_math},
            num_processes=num_workers,
            timeout_s=timeout_s,
            max_result_bytes=_MAX_RESULT_BYTES,
            max_memory_mb=_MAX_MEMORY_MB,
            preload=["math_verify"],
            start=False,
        )

    def __call__(self, completion: Sequence[Message], **columns: Any) -> float:
        """Score one rollout.

        Args:
            completion: its messages.
            **columns: of the data.

        Raises:
            TimeoutError: time was up, and ``timeout_reward`` is ``None``.
            RuntimeError: the right answer can't be read, or the process died.
        """
        arguments = {"response": final_text(completion), "right": str(columns[self.answer_column])}
        try:
            return float(self._processes.call("grade", arguments))
        except CallTimeoutError:
            self.num_timeouts += 1
            if self.timeout_reward is not None:
                return self.timeout_reward
            raise TimeoutError(
                f"the answer was not graded within {self._processes.timeout_s:g} s"
            ) from None

    def close(self) -> None:
        """Kill the processes."""
        self._processes.close()


def grade_math(response: str, right: str) -> float:
    """Compare two answers; without a time limit, so run it in a killable process."""
    # It warns that its own time limits are off; here processes are killed instead.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    math_verify = import_module("math_verify")
    parse = functools.partial(math_verify.parse, parsing_timeout=None)
    expected = parse(right) or parse(f"${right}$")
    if not expected:
        raise ValueError(f"math-verify can't read the right answer {right!r:.200}")
    answer = read_tags(response).answer
    parsed = parse(answer) or parse(f"${answer}$") if answer else []
    return float(math_verify.verify(expected, parsed or parse(response), timeout_seconds=None))
