"""Log-probabilities under a model that sees another prompt than the policy: self-distillation.

Shape legend: B rows, T tokens of a row (ragged).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_data.checks import POSITIVE, check_counts, check_numbers
from torchrl_data.conversation import Conversations
from torchrl_data.conversation_io import read_conversations
from torchrl_data.keys import FULL, GROUP_ID, LOG_PROBS_FULL, ROW
from torchrl_data.messages import Message
from torchrl_data.missing_entry import MissingEntryError
from torchrl_data.ragged.packed import pack
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_data.token_scorer import TokenScorer, check_scorer
from torchrl_envs.entries.rewards import REWARD_ERRORS, reward_of_row
from torchrl_envs.entries.trajectories import copied_rows, joined_rows

from .recorded_log_probs import check_recorded
from .span_log_probs import SPAN_LENGTHS, TEACHER_LOG_PROBS

_WITHOUT: Final = ("tool", "user")
"""Roles that tell a policy what came of its turn."""


class FinishedRollout(NamedTuple):
    """A rollout that is over, as a privileged prompt may tell of it."""

    prompt: list[Message]
    """What the policy was asked."""
    completion: list[Message]
    """What it said, and what tools and users answered."""
    row: Mapping[str, Any]
    """The row of the data; empty where there is none."""
    reward: float
    """NaN where it could not be scored."""
    reward_error: str
    """Why it could not be scored; empty otherwise."""
    group_id: int
    """Equal for the rollouts of one prompt."""

    @property
    def text(self) -> str:
        """The policy's turns, one after the other."""
        said = (m for m in self.completion if m["role"] == "assistant")
        return "\n".join(_text_of(message) for message in said)


PrivilegedPrompt = Callable[[Sequence[FinishedRollout]], Sequence[Sequence[Message] | None]]
"""From all rollouts of a batch to the prompt of each that the teacher sees; ``None`` for a rollout
of which nothing is taught."""


class DemonstrationPrompt:
    """Shows the teacher a demonstration: self-distillation fine-tuning (SDFT).

    Args:
        column: of the data, which holds an answer to the prompt, a string.
        template: is added to the last message of the prompt; ``{demonstration}`` is the answer.

    Raises:
        ValueError: the template does not show the demonstration.

    See Also:
        Shenfeld et al., 2026, "Self-Distillation Enables Continual Learning", arXiv:2601.19897.

    Example:
        >>> asked = [{"role": "user", "content": "2 + 2?"}]
        >>> rollout = FinishedRollout(asked, [], {"answer": "4"}, 0.0, "", 0)
        >>> DemonstrationPrompt("answer", template=" Say {demonstration}.")([rollout])
        [[{'role': 'user', 'content': '2 + 2? Say 4.'}]]
    """

    def __init__(
        self,
        column: str,
        *,
        template: str = (
            "\n\nThis is an example of a good answer:\n{demonstration}\n\nNow give your own answer."
        ),
    ) -> None:
        if "{demonstration}" not in template:
            raise ValueError(
                f"DemonstrationPrompt: the template {template!r} has no {{demonstration}}, so the "
                "teacher would see what the student sees."
            )
        self.column = column
        self._template = template

    def __call__(self, rollouts: Sequence[FinishedRollout]) -> list[list[Message] | None]:
        """See :data:`PrivilegedPrompt`."""
        prompts: list[list[Message] | None] = []
        for rollout in rollouts:
            shown = rollout.row.get(self.column)
            if not isinstance(shown, str):
                raise ValueError(
                    f"DemonstrationPrompt: the column {self.column!r} of a row must hold a string, "
                    f"got {shown!r:.80}; its columns are {sorted(rollout.row)}."
                )
            told = self._template.replace("{demonstration}", shown)
            prompts.append(_with_more(rollout.prompt, told))
        return prompts


class FeedbackPrompt:
    """Tells the teacher what came of a rollout: self-distillation policy optimization (SDPO).

    It sees a rollout of the same group that was solved, if another one was; and of a rollout that
    was not solved, what the environment answered (a tool's error, say), or what ``feedback`` says
    of it. A rollout of which there is neither is not taught.

    Args:
        solved_at: the reward from which on a rollout is solved.
        feedback: gives a text about a rollout that was not solved, ``""`` for none; ``None``: what
            tools and users said to the policy, and why its reward could not be computed.

    Raises:
        ValueError: ``solved_at`` is not finite.

    See Also:
        Hübotter et al., 2026, "Reinforcement Learning via Self-Distillation", arXiv:2601.20802.

    Example:
        >>> asked = [{"role": "user", "content": "2 + 2?"}]
        >>> said = [[{"role": "assistant", "content": text}] for text in ("5", "4")]
        >>> wrong = FinishedRollout(asked, said[0], {}, 0.0, "", 0)
        >>> right = FinishedRollout(asked, said[1], {}, 1.0, "", 0)
        >>> told, nothing = FeedbackPrompt()([wrong, right])
        >>> print(told[-1]["content"])
        2 + 2?
        <BLANKLINE>
        This is a correct answer:
        4
        <BLANKLINE>
        Now give your own answer.
        >>> nothing is None  # no other one is right
        True
    """

    def __init__(
        self, *, solved_at: float = 1.0, feedback: Callable[[FinishedRollout], str] | None = None
    ) -> None:
        check_numbers("FeedbackPrompt", solved_at=solved_at)
        self.solved_at = solved_at
        self._feedback = environment_feedback if feedback is None else feedback

    def __call__(self, rollouts: Sequence[FinishedRollout]) -> list[list[Message] | None]:
        """See :data:`PrivilegedPrompt`."""
        solved: dict[int, list[int]] = {}
        for number, rollout in enumerate(rollouts):
            if rollout.reward >= self.solved_at:
                solved.setdefault(rollout.group_id, []).append(number)
        prompts: list[list[Message] | None] = []
        for number, rollout in enumerate(rollouts):
            others = (each for each in solved.get(rollout.group_id, ()) if each != number)
            right = next(others, None)
            is_solved = rollout.reward >= self.solved_at
            feedback = "" if is_solved else self._feedback(rollout).strip()
            told = ""
            if right is not None:
                told += f"\n\nThis is a correct answer:\n{rollouts[right].text}"
            if feedback:
                told += f"\n\nAn earlier answer of yours was wrong. Of it was said:\n{feedback}"
            more = f"{told}\n\nNow give your own answer."
            prompts.append(_with_more(rollout.prompt, more) if told else None)
        return prompts


def environment_feedback(rollout: FinishedRollout) -> str:
    """Text that tools and users said to the policy, and why its reward could not be computed.

    Args:
        rollout: over.
    """
    said = [_text_of(m) for m in rollout.completion if m["role"] in _WITHOUT]
    return "\n".join([*said, rollout.reward_error]).strip()


class RetrievePrivilegedLogProb:
    r"""Scores what a policy sampled with a model that sees another prompt: its own teacher.

    The tokens that the policy sampled, and all that follows its first one, stand after the
    privileged prompt :math:`c'` instead of the prompt :math:`c`. Of each sampled token it writes
    :math:`\log q(y_t \mid c', y_{<t})`. With the advantage
    :math:`\log q(y_t \mid c', y_{<t}) - \log p(y_t \mid c, y_{<t})`, which
    :class:`~objectives.PolicyDistillation` takes, the policy gradient is that of the KL of the
    policy to its teacher, token by token, estimated on the tokens that were sampled.

    It is a ``postproc`` of a collector, whose batches hold whole groups, or is called by hand.
    Under ``"next"`` it writes ``("teacher_log_probs", "full")``, float32 ``[T]``: 0 where nothing
    was sampled, and the policy's own where nothing is taught; and ``("span_lengths", "full")``,
    float32 ``[T]``: 1 where a token is taught, else 0.

    Args:
        model: the teacher: the policy itself, or a copy of it as it was.
        encoder: of the policy (``policy.encoder``), which encodes the prompts.
        prompt: gives the privileged prompts: :class:`DemonstrationPrompt`,
            :class:`FeedbackPrompt`, or a function of your own.
        temperature: the logits are divided by it; the policy's.
        max_model_len: most tokens of a row that the model takes; longer ones are not taught.

    Raises:
        TypeError: the model gives no log-probs, or the encoder is none.
        ValueError: the temperature or the length is not positive.
    """

    def __init__(
        self,
        model: TokenScorer,
        *,
        encoder: ConversationEncoder,
        prompt: PrivilegedPrompt,
        temperature: float = 1.0,
        max_model_len: int | None = None,
    ) -> None:
        who = type(self).__name__
        check_scorer(who, model)
        check_numbers(who, POSITIVE, temperature=temperature)
        check_counts(who, max_model_len=max_model_len)
        if not isinstance(encoder, ConversationEncoder):
            raise TypeError(f"{who}: encoder must be that of the policy, got {type(encoder)}.")
        self.model = model
        self._encoder = encoder
        self._prompt = prompt
        self._temperature = temperature
        self._max_model_len = max_model_len

    def check_policy(self, policy: Any) -> None:
        """Recorded log-probs are of the distribution that the teacher's will be of.

        Raises:
            ValueError: they are not.
        """
        check_recorded(type(self).__name__, self.model, self._temperature, policy)

    def __call__(self, trajectories: TensorDictBase) -> TensorDictBase:
        """Score a batch.

        Args:
            trajectories: rows ``[B]`` of a collector; whole groups, where the prompt tells of
                other rollouts.

        Returns:
            The rows with the results; the input is not changed.

        Raises:
            ValueError: the prompt function does not give a prompt for each rollout, one can't be
                encoded, or a row has images or a turn that goes on in a message of its prompt.
        """
        rows = copied_rows(trajectories)
        read = read_conversations(trajectories, FULL, who=type(self).__name__)
        rollouts = [_finished(row, read, i) for i, row in enumerate(rows)]
        prompts = list(self._prompt(rollouts))
        if len(prompts) != len(rows):
            raise ValueError(
                f"{type(self).__name__}: the prompt function gave {len(prompts)} prompts for "
                f"{len(rows)} rollouts. Give one per rollout, or None."
            )
        ids, masks, chosen = self._shown(read, prompts)
        scores = iter(self._scores(ids, masks))
        for number, row in enumerate(rows):
            mask = read.assistant_mask(number)
            log_prob = row[LOG_PROBS_FULL].float().masked_fill(~mask, 0.0)
            taught = torch.zeros_like(log_prob)
            if number in chosen:
                log_prob, taught = log_prob.masked_scatter(mask, next(scores)), mask.float()
            row.set(("next", *TEACHER_LOG_PROBS), log_prob)  # type: ignore[misc]
            row.set(("next", *SPAN_LENGTHS), taught)  # type: ignore[misc]
        return joined_rows(rows, trajectories.batch_size)

    def _shown(
        self, read: Conversations, prompts: Sequence[Sequence[Message] | None]
    ) -> tuple[list[Tensor], list[Tensor], set[int]]:
        """Ids and masks of the taught rows, as the teacher sees them, and their numbers."""
        numbers = [i for i, p in enumerate(prompts) if p is not None and read.was_sampled(i)]
        opened = self._encoder.encode_waiting(
            Conversations.from_messages(
                [list(prompts[i] or ()) for i in numbers], [read.tools(i) for i in numbers]
            )
        )
        ids: list[Tensor] = []
        masks: list[Tensor] = []
        chosen: set[int] = set()
        for at, number in enumerate(numbers):
            start = read.num_tokens_before_policy(number)
            shown = torch.cat([opened.token_ids(at), read.token_ids(number)[start:]])
            if self._max_model_len is not None and len(shown) > self._max_model_len:
                continue
            before = torch.zeros(opened.num_tokens(at), dtype=torch.bool)
            ids.append(shown)
            masks.append(torch.cat([before, read.assistant_mask(number)[start:]]))
            chosen.add(number)
        return ids, masks, chosen

    @torch.no_grad()
    def _scores(self, ids: Sequence[Tensor], masks: Sequence[Tensor]) -> list[Tensor]:
        if not ids:
            return []
        packed, lengths = pack(list(ids))
        mask, _ = pack(list(masks))
        scores = self.model.score_packed(packed, lengths, mask, temperature=self._temperature)
        counts = [int(each.sum()) for each in masks]
        return list(scores.log_prob.to(packed.device).float().split(counts))


def _finished(row: TensorDictBase, read: Conversations, number: int) -> FinishedRollout:
    messages, first = read.messages(number), read.first_response(number)
    if read.images(number) or read.goes_on_in_prompt(number):
        raise ValueError(
            f"RetrievePrivilegedLogProb: row {number} has images, or a turn that goes on in a "
            "message of its prompt; such a prompt can't be exchanged for another one."
        )
    if row.get(LOG_PROBS_FULL, None) is None:
        raise MissingEntryError(
            f"RetrievePrivilegedLogProb reads {LOG_PROBS_FULL}, which the batch lacks: the policy "
            "writes it."
        )
    known = row.keys()
    example, group, error = (
        row[key] if key in known else None for key in (ROW, GROUP_ID, REWARD_ERRORS)
    )
    return FinishedRollout(
        messages[:first],
        messages[first:],
        example if isinstance(example, Mapping) else {},
        reward_of_row(row) if row.get("reward", None) is not None else math.nan,
        str(error or ""),
        number if group is None else int(group),
    )


def _text_of(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _with_more(prompt: Sequence[Message], text: str) -> list[Message]:
    """A prompt with a text added to its last message."""
    *before, last = prompt
    return [*before, {**last, "content": f"{_text_of(last)}{text}"}]
