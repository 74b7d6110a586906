"""Log-probabilities under a model that sees another prompt than the policy: self-distillation.

Shape legend: B rows, T tokens of a row (ragged).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

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

from .privileged_prompts import FinishedRollout, PrivilegedPrompt
from .recorded_log_probs import check_recorded
from .span_log_probs import SPAN_LENGTHS, TEACHER_LOG_PROBS


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
