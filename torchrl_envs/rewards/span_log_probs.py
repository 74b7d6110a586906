"""Log-probabilities under a teacher with another tokenizer, of the spans of text that both cut.

Shape legend: B rows, T tokens of a row (ragged).
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_data.checks import check_counts
from torchrl_data.conversation import Conversations
from torchrl_data.keys import FULL, LOG_PROBS_FULL
from torchrl_data.missing_entry import MissingEntryError
from torchrl_data.ragged.packed import pack
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_data.text_spans.span_aligner import AlignedRow, SpanAligner
from torchrl_data.text_spans.spans import TextSpan
from torchrl_data.token_scorer import TokenScorer, check_scorer
from torchrl_envs.episode.trajectory_transform import ScoredRow, TrajectoryTransform

TEACHER_LOG_PROBS: Final[NestedKey] = ("teacher_log_probs", FULL)
SPAN_LENGTHS: Final[NestedKey] = ("span_lengths", FULL)
_WHOLE: Final = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


class RetrieveSpanLogProb(TrajectoryTransform):
    r"""Scores trajectories with a teacher that has another tokenizer, by spans of text.

    The conversation is rendered by the teacher's chat template and tokenizer, with the text that
    the student sampled in it (:class:`~torchrl_data.SpanAligner`). The tokens of both are grouped
    into the smallest spans that cover the same bytes. Of a span :math:`s`, :math:`\log p(s)` is the
    sum of the student's recorded log-probs and :math:`\log q(s)` that of the teacher's. Of each of
    its tokens :math:`t` it writes

    .. math:: \log p(t) + \log q(s) - \log p(s),

    so that a loss which takes the student's log-prob off (:class:`~objectives.PolicyDistillation`)
    gets the gap of the whole span for each of its tokens. With it as the advantage, the policy
    gradient is that of the KL of the student to the teacher over spans, as the score of a span is
    the sum of the scores of its tokens. Where a span is one token it is the teacher's own log-prob.
    Tokens in no span get the student's own: no gap. ``DistillationLoss`` (k3) is for teachers with
    the student's tokenizer.

    Under ``"next"`` it writes the log-probs, float32 ``[T]``, 0 where nothing was sampled, and
    ``("span_lengths", "full")``, float32 ``[T]``: how many tokens the span of each has, 0 where
    there is none. The sum of ``gap / span_lengths`` is the sum of the gaps of spans.

    Args:
        model: the teacher, scores its own tokens at temperature 1 (``TransformersWrapper`` does).
            It is not part of ``state_dict``; place it yourself.
        student: the encoder of the policy that sampled (``policy.encoder``).
        teacher: the encoder of the teacher; its own ``encoder`` where it has one.
        log_probs_full_key: what is written under ``"next"``.
        max_model_len: most tokens of a row that the teacher takes; of longer rows nothing is
            taught. ``None`` for any number.

    Raises:
        TypeError: the model gives no log-probs, or there is no encoder of the teacher.
        ValueError: student and teacher have one tokenizer; or they can't be compared, see
            :class:`~torchrl_data.SpanAligner`.

    Example:
        >>> from torchrl_data import encode_demonstrations, ConversationEncoder
        >>> from torchrl_data.conversation_io import row_tensordicts
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer
        >>> other = train_tokenizer(["2 + 2? It is four."] * 8, vocab_size=300)
        >>> teacher = TransformersWrapper(tiny_qwen3(len(other)), tokenizer=other, generate=False)
        >>> transform = RetrieveSpanLogProb(teacher, student=ConversationEncoder(tokenizer))
        >>> transform.results
        (('teacher_log_probs', 'full'), ('span_lengths', 'full'))
    """

    def __init__(
        self,
        model: TokenScorer,
        *,
        student: ConversationEncoder,
        teacher: ConversationEncoder | None = None,
        log_probs_full_key: NestedKey | None = None,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__()
        who = self._get_name()
        check_scorer(who, model)
        check_counts(who, max_model_len=max_model_len)
        teacher = getattr(model, "encoder", None) if teacher is None else teacher
        if not isinstance(teacher, ConversationEncoder):
            raise TypeError(
                f"{who}: {type(model).__name__} has no encoder, so its chat template and tokenizer "
                "are not known. Give teacher=ConversationEncoder(tokenizer)."
            )
        if teacher.tokenizer.get_vocab() == student.tokenizer.get_vocab():
            raise ValueError(
                f"{who}: student and teacher have the same vocabulary, whose tokens can be "
                "compared one by one. Use RetrieveLogProb(teacher, "
                "log_probs_full_key=('teacher_log_probs', 'full'))."
            )
        self.aligner = SpanAligner(student, teacher)
        self.entry: NestedKey = (
            TEACHER_LOG_PROBS if log_probs_full_key is None else log_probs_full_key
        )
        self.results = (self.entry, SPAN_LENGTHS)
        self.max_model_len = max_model_len
        self._model = (model,)  # In a tuple, so that a module is no part of this one.

    def check_policy(self, policy: Any) -> None:
        """The policy samples from its model's own distribution, with the tokenizer that is known.

        Raises:
            ValueError: it samples at another temperature than 1, or truncated; or it has another
                tokenizer than ``student``.
        """
        sampling = getattr(policy, "sampling", None)
        others = [
            f"{name}={getattr(sampling, name)}"
            for name, value in _WHOLE.items()
            if sampling is not None and getattr(sampling, name) != value
        ]
        if others:
            raise ValueError(
                f"{self._get_name()}: the policy samples with {', '.join(others)}. A span has a "
                "probability of its own under each model's whole distribution only: sample at "
                "temperature 1, without top-p, top-k and min-p."
            )
        tokenizer = getattr(policy, "tokenizer", None)
        known = self.aligner.student.tokenizer.get_vocab()
        if tokenizer is not None and tokenizer.get_vocab() != known:
            raise ValueError(
                f"{self._get_name()}: the policy has another tokenizer than student=. Give "
                "student=policy.encoder."
            )

    @torch.no_grad()
    def score(self, rows: Sequence[ScoredRow]) -> None:
        """Add the log-probs and the lengths of spans of each row."""
        aligned = self.aligner.align(Conversations.cat([self._conversation(row) for row in rows]))
        most = self.max_model_len
        aligned = [
            row if most is None or len(row.ids) <= most else AlignedRow([], []) for row in aligned
        ]
        scored = self._scores([row for row in aligned if row.spans])
        parts = iter(scored)
        for row, its in zip(rows, aligned, strict=True):
            own = row.read(LOG_PROBS_FULL).float().masked_fill(~row.assistant_mask, 0.0)
            log_prob, lengths = own, torch.zeros_like(own)
            if its.spans:
                log_prob, lengths = spread_gaps(own, next(parts), its.spans)
            row.results[self.entry] = log_prob
            row.results[SPAN_LENGTHS] = lengths

    def _conversation(self, row: ScoredRow) -> Conversations:
        if row.conversation is None:
            raise MissingEntryError(f"{row.who} reads the messages of rows, which are not there.")
        conversation = row.conversation()
        if not torch.equal(conversation.token_ids(0), row.ids):
            raise ValueError(
                f"{row.who}: the tokens of a row are not those of its conversation: the row was "
                "changed after it was sampled. Run this transform before what changes it."
            )
        return conversation

    def _scores(self, rows: Sequence[AlignedRow]) -> list[Tensor]:
        """Log-probs of the teacher's tokens of each row, 0 outside of spans."""
        if not rows:
            return []
        masks = []
        for row in rows:
            mask = torch.zeros(len(row.ids), dtype=torch.bool)
            for span in row.spans:
                mask[span.teacher] = True
            masks.append(mask)
        ids, lengths = pack([torch.tensor(row.ids) for row in rows])
        mask, _ = pack(masks)
        scores = self._model[0].score_packed(ids, lengths, mask, temperature=1.0)
        log_prob = scores.log_prob.to(ids.device).float()
        whole = torch.zeros(len(mask)).masked_scatter(mask, log_prob)
        return list(whole.split(lengths.tolist()))


def spread_gaps(
    student: Tensor, teacher: Tensor, spans: Sequence[TextSpan]
) -> tuple[Tensor, Tensor]:
    """Spread the gaps of spans over the student's tokens.

    Args:
        student: log-probs of its tokens, in nats, float32 ``[T]``.
        teacher: log-probs of its own tokens, in nats.
        spans: which tokens of both are compared.

    Returns:
        The student's log-probs plus the gap of the span of each token, and how many tokens that
        span has, float32 ``[T]`` each; without a span the student's own, and 0.

    Example:
        >>> spans = [TextSpan(slice(0, 2), slice(0, 1)), TextSpan(slice(2, 3), slice(1, 3))]
        >>> spread_gaps(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-2.0, -0.5, -0.5]), spans)
        (tensor([ 0., -1., -1.]), tensor([2., 2., 1.]))
    """
    log_prob, lengths = student.clone(), torch.zeros_like(student)
    for span in spans:
        gap = teacher[span.teacher].sum() - student[span.student].sum()
        log_prob[span.student] += gap
        lengths[span.student] = span.student.stop - span.student.start
    return log_prob, lengths
