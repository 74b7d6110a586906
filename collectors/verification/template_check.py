"""What the messages of a row say of its tokens: which the template writes, and which the policy.

Shape legend: T tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torchrl_data.conversation import Conversations, Source, Turn
from torchrl_data.templates.encoder import ConversationEncoder

from .sampled_row import SampledRow


@dataclass(frozen=True, kw_only=True)
class TemplateCheck:
    """A row beside what its messages are as tokens."""

    not_sampled: frozenset[int]
    """Places that count as sampled, and that the template says somebody else wrote."""
    not_trained: frozenset[int]
    """Places that the loss scored, and that the policy did not sample."""
    rendered: SampledRow | None
    """The row with its sampled turns as they are and everything else as the template writes it;
    ``None`` where the messages have other turns than the row, or can't be rendered."""
    differs: bool
    """Whether that has other tokens than the row."""
    why_not: str = ""
    """Why it could not be rendered."""


def check_template(row: SampledRow, encoder: ConversationEncoder) -> TemplateCheck:
    """Compare a row with its messages.

    Args:
        row: which; without messages only what it says of itself is compared.
        encoder: of the model that sampled.
    """
    trained = row.trained or [False] * len(row.ids)
    not_trained = {t for t, here in enumerate(trained) if here and not row.sampled[t]}
    # What has nothing before it can't have been sampled.
    not_sampled = {0} if row.sampled[0] else set()
    rendered, why_not = None, "the row has no messages"
    if row.messages:
        try:
            not_sampled |= _written_by_others(row, encoder)
            own = [here and t not in not_sampled for t, here in enumerate(row.sampled)]
            rendered, why_not = _rendered(replace(row, sampled=own), encoder)
        except (ValueError, TypeError, LookupError) as error:
            why_not = f"the messages can't be rendered: {error}"
    return TemplateCheck(
        not_sampled=frozenset(not_sampled),
        not_trained=frozenset(not_trained - not_sampled),
        rendered=rendered,
        differs=rendered is not None and list(rendered.ids) != list(row.ids),
        why_not=why_not,
    )


def _written_by_others(row: SampledRow, encoder: ConversationEncoder) -> set[int]:
    """Places that count as sampled, and hold a run of tokens that the template writes.

    A run counts where it stands in the row as often as in the messages: a policy may write what
    looks like one.
    """
    tools: Any = row.tools
    messages: Any = list(row.messages)
    [whole] = encoder.encode_each([messages], [tools])
    pairs = zip(whole.sources, whole.ids, strict=True)
    runs = [
        tuple(i for _, i in run)
        for is_sampled, run in groupby(pairs, lambda pair: pair[0] == Source.MODEL)
        if not is_sampled
    ]
    found: set[int] = set()
    at, ids = 0, list(row.ids)
    for run in runs:
        places = _places_of(run, ids) if len(run) > 1 else []
        begin = next((place for place in places if place >= at), None)
        if begin is not None and len(places) == len(_places_of(run, whole.ids)):
            at = begin + len(run)
            found |= set(range(begin, at))
    return {t for t in found if row.sampled[t]}


def _places_of(run: tuple[int, ...], ids: Sequence[int]) -> list[int]:
    """The places where a run of tokens begins."""
    size = len(run)
    starts = range(len(ids) - size + 1)
    return [t for t in starts if ids[t] == run[0] and tuple(ids[t : t + size]) == run]


def _rendered(row: SampledRow, encoder: ConversationEncoder) -> tuple[SampledRow | None, str]:
    """The row as the encoder makes it of its messages, with the turns as they were sampled."""
    messages: Sequence[Any] = list(row.messages)
    roles = [message.get("role") for message in messages]
    answers = [i for i, role in enumerate(roles) if role == "assistant"][-len(row.turns) :]
    if len(answers) < len(row.turns):
        return None, f"it has {len(row.turns)} sampled turns, and its messages {len(answers)}"
    tools: Any = row.tools
    whole, at = Conversations.from_messages([messages[: answers[0]]], [tools]), answers[0]
    places: list[int] = []
    for turn, answer in zip(row.turns, answers, strict=True):
        if at < answer:
            whole = whole.append_messages([messages[at:answer]])
        whole = encoder.encode_waiting(whole)
        start = whole.num_tokens(0)
        ids = [row.ids[t] for t in turn]
        whole = whole.append_turns([Turn(ids, [0.0] * len(ids), messages[answer])])
        places += range(start, start + len(ids))
        at = answer + 1
    given = [t for turn in row.turns for t in turn]
    ids, count = whole.token_ids(0).tolist(), whole.num_tokens(0)
    end = max(given) + 1
    ids += row.ids[end:]  # what comes after the last turn
    count = len(ids)
    columns: dict[str, list[Any]] = {"sampled": [False] * count}
    columns |= {"log_probs": [float("nan")] * count, "versions": [None] * count}
    if row.kept_counts is not None:
        columns["kept_counts"] = [None] * count
    if row.sampling_masks:
        columns["sampling_masks"] = [b""] * count
    for place, t in zip(places, given, strict=True):
        for name, column in columns.items():
            column[place] = getattr(row, name)[t]
    # Experts are those of the tokens that were read, and these are others.
    return replace(row, ids=ids, trained=None, experts=None, **columns), ""
