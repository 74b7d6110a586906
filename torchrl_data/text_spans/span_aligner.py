"""Rows of a student in the tokens of a teacher that has another tokenizer and chat template."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from torchrl_data.conversation import Conversations, Turn
from torchrl_data.images import images_of
from torchrl_data.messages import Message
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_data.templates.registry import family_of
from torchrl_data.tool_calls.parser import format_of_template

from .spans import TextSpan, align_spans
from .token_bytes import SpelledText, TokenBytes, spelled_text


class AlignedRow(NamedTuple):
    """A conversation in the teacher's tokens, and its spans."""

    ids: list[int]
    """The teacher's tokens of all of it."""
    spans: list[TextSpan]
    """Of what the student sampled: which of its tokens, and which of the teacher's."""


class SpanAligner:
    """Renders what a student sampled for a teacher, and aligns the tokens of both.

    The prompt, and what tools and users said later, are rendered by the teacher's own chat template
    and tokenizer. A turn of the student is the text that its tokens spell, in the teacher's tokens;
    the token at which the student stopped is the teacher's end of turn. A control token of the
    student is the teacher's of the same text where there is one, and otherwise that text. Nothing
    is taught where bytes are no Unicode, or where the teacher's tokenizer changes the text.

    Args:
        student: has the tokenizer that sampled, and its template.
        teacher: has the teacher's.

    Raises:
        ValueError: the bytes of a vocabulary are not known; or only one of the templates begins a
            thought in the prompt.

    Example:
        >>> from torchrl_data import ConversationEncoder, encode_demonstrations
        >>> encoder = ConversationEncoder(tokenizer)
        >>> chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
        >>> aligner = SpanAligner(encoder, encoder)  # one tokenizer: each token is a span
        >>> [row] = aligner.align(encode_demonstrations(encoder, [chat]))
        >>> [tokenizer.decode(row.ids[span.teacher]) for span in row.spans]
        ['4', '<|im_end|>']
    """

    def __init__(self, student: ConversationEncoder, teacher: ConversationEncoder) -> None:
        opened = [encoder.opened_text.strip() for encoder in (student, teacher)]
        if opened[0] != opened[1]:
            raise ValueError(
                f"The prompt of the student's chat template ends with {opened[0] or 'no tag'!r}, "
                f"and that of the teacher's with {opened[1] or 'no tag'!r}: a turn would begin "
                "within a thought for one of them. Give both templates that think or none "
                "(chat_template_kwargs={'enable_thinking': False}, chat_template_name=)."
            )
        self.student = student
        self.teacher = teacher
        self._student_bytes = TokenBytes(student.tokenizer)
        self._teacher_bytes = TokenBytes(teacher.tokenizer)
        self._formats = [
            format_of_template(each.template, family=family_of(each.tokenizer) or "")
            for each in (student, teacher)
        ]
        of_student = student.guard.control_ids.items()
        shared = teacher.guard.control_ids
        self._shared = {index: shared[text] for text, index in of_student if text in shared}

    def align(self, conversations: Conversations) -> list[AlignedRow]:
        """Render rows for the teacher.

        Args:
            conversations: B rows that the student has sampled turns of.

        Returns:
            B rows.

        Raises:
            ValueError: the teacher's template can't render a row, or leaves something of it out;
                a row has images, tools whose calls the teacher's template writes in another format,
                or a turn that goes on in a message of its prompt.
            ToolsNotShownError: the teacher's template does not show the tools of a row.
        """
        turns = [self._turns(conversations, row) for row in range(len(conversations))]
        rendered = Conversations.from_messages(
            [its[0].before if its else [] for its in turns],
            [conversations.tools(row) for row in range(len(conversations))],
        )
        spans: list[list[TextSpan]] = [[] for _ in turns]
        for number in range(max(map(len, turns), default=0)):
            rows = [row for row, its in enumerate(turns) if number < len(its)]
            if number:
                parts = [its[number].before if number < len(its) else [] for its in turns]
                rendered = rendered.append_messages(parts)
            encoded = self.teacher.encode_waiting(rendered[rows])
            said: list[Turn | None] = []
            for at, row in enumerate(rows):
                turn = turns[row][number]
                ids, found = self._turn(turn.ids)
                spans[row] += [_moved(span, turn.start, encoded.num_tokens(at)) for span in found]
                said.append(Turn(ids, None, turn.message))
            encoded = encoded.append_turns(said)
            every = rendered.split()
            for at, row in enumerate(rows):
                every[row] = encoded.row(at)
            rendered = Conversations.cat(every)
        return [AlignedRow(rendered.ids(row), its) for row, its in enumerate(spans)]

    def _turns(self, conversations: Conversations, row: int) -> list["_SampledTurn"]:
        """Turns of a row that the student sampled, and the messages before each."""
        messages, first = conversations.messages(row), conversations.first_response(row)
        if images_of(messages):
            raise ValueError(
                f"Row {row} has images, which can't be rendered for a teacher with another "
                "tokenizer. Take a teacher with the student's tokenizer."
            )
        if conversations.tools(row) and self._formats[0] != self._formats[1]:
            raise ValueError(
                f"Row {row} has tools, which the student calls in the format {self._formats[0]!r}; "
                f"the teacher's chat template teaches {self._formats[1]!r}, so that it would judge "
                "the format and not the call. Give the teacher a template of that format."
            )
        ids, mask = conversations.ids(row), conversations.assistant_mask(row).tolist()
        runs = [list(run) for sampled, run in groupby(range(len(ids)), mask.__getitem__) if sampled]
        ends = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
        goes_on = conversations.goes_on_in_prompt(row)
        if goes_on or len(runs) != len(ends):
            raise ValueError(
                f"Row {row} has {len(runs)} runs of sampled tokens and {len(ends)} messages of the "
                f"assistant from message {first} on: a turn goes on in a message of the prompt, or "
                "was written by someone else. It can't be told which text the student sampled."
            )
        starts = [0, *(end + 1 for end in ends)]
        return [
            _SampledTurn(messages[start:end], messages[end], ids[run[0] : run[-1] + 1], run[0])
            for start, end, run in zip(starts, ends, runs, strict=False)
        ]

    def _turn(self, ids: Sequence[int]) -> tuple[list[int], list[TextSpan]]:
        """A turn of the student in the teacher's tokens, and spans from its beginning."""
        ended = ids[-1] in self.student.stop_token_ids
        told: list[int] = []
        spans: list[TextSpan] = []
        at = 0
        for shared, run in groupby(ids[: len(ids) - ended], self._shared.__contains__):
            part = list(run)
            if shared:
                new = [self._shared[index] for index in part]
                found = [TextSpan(slice(i, i + 1), slice(i, i + 1)) for i in range(len(part))]
            else:
                new, found = self._text(spelled_text(self._student_bytes.of(part, begins=at == 0)))
            spans += [_moved(span, at, len(told)) for span in found]
            told += new
            at += len(part)
        if ended:
            spans.append(TextSpan(slice(at, at + 1), slice(len(told), len(told) + 1)))
            told.append(self.teacher.end_of_turn_id)
        return told, spans

    def _text(self, said: SpelledText) -> tuple[list[int], list[TextSpan]]:
        if not said.text:
            return [], []
        [ids] = self.teacher.guard.encode_texts([said.text])
        ends: list[int | None] = []
        text, at = said.text.encode(), 0
        is_same = True
        for part in self._teacher_bytes.of(ids, text=said.text):
            is_same = is_same and text.startswith(part, at)
            at += len(part)
            ends.append(at if is_same else None)
        return ids, align_spans(said.ends, ends, without=said.broken)


class _SampledTurn(NamedTuple):
    before: list[Message]
    """What was said since the turn before it."""
    message: Message
    ids: list[int]
    start: int
    """Of its tokens in the row."""


def _moved(span: TextSpan, student: int, teacher: int) -> TextSpan:
    """A span of tokens that stand further on."""
    places = zip(span, (student, teacher), strict=True)
    return TextSpan(*(slice(part.start + by, part.stop + by) for part, by in places))
