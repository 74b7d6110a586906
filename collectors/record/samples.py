"""Samples, groups and steps as plain values.

Nothing here needs torch, so that a viewer starts at once.

Shape legend: T tokens of a sample.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple, Self

FORMAT: Final = 1
"""Of the files; one with a higher number is refused."""
WRITERS: Final = ("template", "model", "tool", "user", "context")
"""Who may have written a token: the chat template; the policy; a tool; anybody else who gave a
message (its role says who); and ``context`` where the message can't be told."""


class TokenSpan(NamedTuple):
    """Neighbouring tokens of one writer."""

    writer: str
    """One of ``template``, ``model``, ``tool``, ``user`` and ``context``."""
    role: str
    """Of the message that the tokens spell; empty where there is none."""
    message: int | None
    """Its number in the conversation."""
    length: int
    """Tokens."""


class RecordedToolCall(NamedTuple):
    """A call of a tool by the policy."""

    tool: str
    """Its name, as the policy called it; empty for a call that could not be read."""
    turn: int
    """Of the policy, from 1."""
    seconds: float | None
    """``None`` where nothing was run."""
    is_error: bool


class _Recorded:
    """A record that is written as its fields, and read back."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Make a sample from its fields as JSON, ``vars`` of it; unknown fields are left out."""
        names = [each.name for each in fields(cls)]  # type: ignore[arg-type]
        known = {name: values[name] for name in names if name in values}
        for name, read in _NESTED.items():
            if name in known:
                known[name] = read(known[name])
        return cls(**known)


@dataclass(kw_only=True)
class SampleTokens(_Recorded):
    """The tokens of a sample; columns are of the length T, ``None`` where there is no value."""

    ids: list[int]
    texts: list[str]
    """What each spells, with invisible characters spelled out; tokens that only together make a
    character have it at the first of them."""
    spans: list[TokenSpan]
    """Who wrote them; the lengths add up to T."""
    log_probs: list[float | None]
    """Of the engine that sampled, in nats."""
    versions: list[int | None]
    """The policy version that sampled each."""
    trainer_log_probs: list[float | None] | None = None
    """Of the trained model as it was before the step's first update, in nats; ``None`` where the
    sample was not trained, or the loss was not watched."""
    entropy: list[float | None] | None = None
    """In nats; of the engine if it wrote it, else of the trainer if it was asked for it."""
    kept_counts: list[int | None] | None = None
    """How many tokens top-k, top-p and min-p left, of which each was drawn; ``None`` where the
    engine did not write it."""
    sampling_masks: dict[str, Any] | None = None
    """The set that each token was drawn from: ``lengths``, T numbers of bytes, 0 where there is no
    set, and ``bytes``, the sets of all tokens in base64, each as
    :class:`~torchrl_data.SamplingMasks` has it. ``None`` where they are not recorded."""
    routed_experts: dict[str, Any] | None = None
    """The experts of a mixture that each token went to: ``shape`` T, layers and experts of a token,
    ``dtype`` uint8 or int16, and ``bytes`` in base64, little endian; 255 in uint8, and negative
    numbers in int16, where it is not known. ``None`` where they are not recorded."""
    advantages: list[float | None] | None = None
    """Where they differ from token to token."""
    gaps: list[float | None] | None = None
    """How far each log-prob is above the one that was computed again, in nats; ``None`` where
    nobody has verified the sample. Not part of a record as it is written."""
    causes: list[str | None] | None = None
    """Of each gap, where it has one."""


@dataclass(kw_only=True)
class RolloutSample(_Recorded):
    """A row of a step: an episode, or a segment of one."""

    step: int
    group_id: str
    """``epoch/row`` of the data, or the number of the group."""
    index: int
    """In its group, from 0."""
    segment: int = 0
    num_segments: int = 1
    parent_segment: int = -1
    """Which row of the episode it left; -1 for the one that opens it."""
    parent_tokens: int = 0
    """How many tokens of that row come before it."""
    row_kind: str = "main"
    """How it began: main, parallel, sub_agent or compaction."""
    branched_from: int = -1
    """The ``index`` of the rollout of its group that its episode left; -1 for one that began with
    the prompt."""
    branched_tokens: int = 0
    """How many tokens of that rollout come before its own, the prompt included."""
    agent: str = ""
    """Its author; empty where the policy has no program."""
    reward: float | None
    """Of the episode; ``None`` where it could not be scored."""
    rewards: dict[str, float | None]
    """By source; ``None`` where one does not apply."""
    reward_errors: str = ""
    is_trained: bool | None = None
    """Whether it was trained on; ``None`` in records that do not tell it."""
    advantage: float | None = None
    """The mean of the sampled tokens' where they differ; ``None`` where it was not trained, or the
    loss compares pairs or labels instead."""
    stop_reason: str
    """See :class:`~torchrl_data.StopReason`."""
    stop_limit: int = -1
    """The limit that cut it, in tokens or turns; -1 where none did."""
    finish_reason: str = ""
    """Of its last turn, see :class:`~torchrl_data.FinishReason`."""
    is_truncated: bool
    num_turns: int
    policy_version: int | str
    """That the episode began with."""
    prompt_tokens: int
    """Before the first that was sampled."""
    sampled_tokens: int
    total_tokens: int
    tool_calls: list[RecordedToolCall] = field(default_factory=list)
    num_tool_errors: int = 0
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    """Schemas that the prompt shows; ``None`` where it shows none."""
    row: dict[str, Any] | None
    """Of the data set."""
    logged: dict[str, Any] = field(default_factory=dict)
    """What reward functions logged of it."""
    tokens: SampleTokens

    @property
    def was_trained(self) -> bool:
        """Whether it was trained; where a record does not tell, whether it has an advantage."""
        return self.advantage is not None if self.is_trained is None else self.is_trained

    @property
    def place(self) -> str:
        """The place of the row in the tree of its episode, or of its group; empty without one."""
        left = ""
        if self.branched_from >= 0:
            left = f"branch of rollout {self.branched_from} at token {self.branched_tokens}"
        if self.num_segments == 1:
            return left
        text = f"row {self.segment}: {self.row_kind.replace('_', '-')}"
        if self.parent_segment >= 0:
            text += f" of row {self.parent_segment} at token {self.parent_tokens}"
        text = f"{text} by {self.agent}" if self.agent else text
        return f"{left}, {text}" if left else text


@dataclass(kw_only=True)
class GroupSummary(_Recorded):
    """A group of a step, whether its samples are recorded or not."""

    group_id: str
    prompt_id: str
    """A digest of the prompt's tokens and images: equal wherever the prompt is the same."""
    prompt: str
    """The beginning of its last message."""
    rewards: list[float | None]
    """Of its episodes, in order."""
    num_trained: int
    """Rows that were trained on."""
    is_recorded: bool
    ordinal: int | None = None
    """Number of the prompt in the order of the data, where there is a ledger."""
    attempt: int = 0


@dataclass(kw_only=True)
class StepSummary(_Recorded):
    """A step without its samples: the first line of its file."""

    step: int
    time: float
    """When it was recorded, in seconds since 1970."""
    metrics: dict[str, float | None]
    groups: list[GroupSummary]
    events: list[dict[str, Any]]
    """Of the ledger since the step before: ``name``, ``ordinal``, ``group_id``, ``attempt``,
    ``dispatch``, ``version``, ``step``, ``reason``, ``time``."""
    num_samples: int


_NESTED: Final[dict[str, Callable[[Any], Any]]] = {
    "spans": lambda spans: [TokenSpan(*span) for span in spans],
    "tokens": SampleTokens.from_json,
    "tool_calls": lambda calls: [RecordedToolCall(*call) for call in calls],
    "groups": lambda groups: [GroupSummary.from_json(group) for group in groups],
}
"""How those fields are read that are no plain values."""
