"""Rows of tokens that trajectories of others become."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class TrajectoryError(ValueError):
    """A file that can't be read as a trajectory; the message says where."""


@dataclass(kw_only=True)
class TokenRow:
    """A conversation as one row, to train on or to replay."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    """Schemas, as OpenAI's chat completions have them."""
    token_ids: list[int] | None = None
    """T of them; ``None`` where the trajectory has none."""
    sampled: list[bool] | None = None
    """Which of them a policy sampled and may be trained on, T."""
    log_probs: list[float | None] | None = None
    """Of the policy that sampled, in nats, T; ``None`` where there is none."""
    reward: float | None = None
    agent: str = ""
    source: str = ""
    """Which trajectory of which file it was."""

    def to_json(self) -> dict[str, Any]:
        """Fields of the record, without those that hold nothing."""
        return {name: value for name, value in vars(self).items() if value not in (None, "")}


@dataclass(kw_only=True)
class SampledTurn:
    """An answer of a model, with the tokens that it read."""

    prompt: list[int] | None
    ids: list[int]
    log_probs: Sequence[float | None]
    sampled: list[bool]
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The conversation up to the answer."""


def rows_of_turns(turns: Sequence[SampledTurn], shared: Mapping[str, Any]) -> list[TokenRow]:
    """Turns as rows: one that reads all of a row goes on with it.

    Args:
        turns: in their order, each with its prompt.
        shared: fields of all rows.
    """
    rows: list[TokenRow] = []
    for turn in turns:
        prompt = list(turn.prompt or ())
        begun = [
            r for r in rows if r.token_ids is not None and prompt[: len(r.token_ids)] == r.token_ids
        ]
        row = max(begun, key=lambda r: len(r.token_ids or ()), default=None)
        if row is None:
            row = TokenRow(messages=[], token_ids=[], sampled=[], log_probs=[], **shared)
            rows.append(row)
        assert row.token_ids is not None
        assert row.sampled is not None
        assert row.log_probs is not None
        new = prompt[len(row.token_ids) :]
        row.token_ids += [*new, *turn.ids]
        row.sampled += [*[False] * len(new), *turn.sampled]
        row.log_probs += [*[None] * len(new), *turn.log_probs]
        row.messages = turn.messages or row.messages
    return rows
