"""Pairs of a better and a worse rollout of one prompt, for preference learning."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from math import isclose, isfinite
from typing import Any, NamedTuple

from torchrl_data.checks import check_numbers
from torchrl_data.images import is_described_image
from torchrl_data.messages import Message
from torchrl_data.stop_reason import FinishReason, StopReason, kind_of

from .sampled_messages import messages_to_train, sampled_messages
from .samples import RolloutSample


class LeftOut(StrEnum):
    """The reason that a rollout, or a group, gives no pair, or a rollout no label."""

    SEVERAL_ROWS = "rollouts of several rows, which are no single conversation"
    NO_REWARD = "rollouts without a reward"
    SILENT = "rollouts in which the policy says nothing"
    IMAGE = "rollouts with images, which a record only describes"
    TRUNCATED = "rollouts that a limit of tokens cut"
    NO_PROMPT = "rollouts that begin with the policy"
    TOO_FEW = "groups with fewer than two rollouts to compare"
    EQUAL_REWARDS = "groups of equal rewards"
    TOO_CLOSE = "groups whose rewards differ by too little"
    BEST_TRUNCATED = "groups whose better rollouts were all cut by a limit of tokens"
    EQUAL_TEXTS = "groups whose rollouts of different rewards say the same"
    PARTED = "groups whose rollouts part where the policy does not speak"


@dataclass(frozen=True, kw_only=True)
class RolloutPair:
    """Two rollouts of a group, as TRL's preference data have them.

    ``prompt`` is what both conversations begin with; ``chosen`` and ``rejected`` begin with the
    turn of the policy in which they part, and end with a turn of it.
    """

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[dict[str, Any]] | None
    """Schemas that the prompt shows; ``None`` where it shows none."""
    chosen_reward: float
    rejected_reward: float
    step: int
    group_id: str
    chosen_sample: int
    """Number of the row among those of its group, from 0, as the viewer counts."""
    rejected_sample: int
    chosen_stop_reason: str
    rejected_stop_reason: str

    def to_json(self) -> dict[str, Any]:
        """Fields of the pair; ``tools`` only where there are some."""
        return {name: value for name, value in vars(self).items() if value is not None}


class PairsFound(NamedTuple):
    """Pairs of rollouts, and what gave none."""

    pairs: list[RolloutPair]
    num_groups: int
    left_out: Counter[LeftOut]
    """How many rollouts, or groups, by the reason."""


class Rollout(NamedTuple):
    """A rollout of one conversation, with a reward."""

    number: int
    """Among those of its group, from 0, as the viewer counts."""
    sample: RolloutSample
    reward: float
    messages: list[Message]
    """Up to the last turn of the policy."""
    said: list[Message]
    """The same without the names of calls, which say nothing."""


def preference_pairs(
    samples: Iterable[RolloutSample],
    *,
    all_pairs: bool = False,
    min_difference: float = 0.0,
    drop_truncated: bool = False,
) -> PairsFound:
    """Pairs of rollouts of one group, the chosen one with the higher reward.

    Of two that differ equally much, those that come first in the group are taken. A rollout whose
    last turn was cut by a limit of tokens may be rejected and is never chosen.

    Args:
        samples: of a :class:`~collectors.record.RunRecord`; those of a group are told by their step
            and ``group_id``.
        all_pairs: give each pair of rollouts whose rewards differ, and those that say the same
            once; otherwise the pair of each group whose rewards differ most.
        min_difference: of the rewards of a pair, at least, in [0, inf).
        drop_truncated: let those that were cut be in no pair.

    Raises:
        ValueError: the difference is out of range.

    Example:
        >>> from collectors.record import RunRecord, preference_pairs
        >>> record = RunRecord("outputs/grpo/calculator/seed0")  # doctest: +SKIP
        >>> found = preference_pairs(record.samples(1), min_difference=0.5)  # doctest: +SKIP
    """
    check_numbers("preference_pairs", "[0, inf)", min_difference=min_difference)
    pairs, left_out, groups = list[RolloutPair](), Counter[LeftOut](), groups_of(samples)
    for group in groups:
        rollouts = usable_rollouts(group, drop_truncated, left_out)
        found = _ordered(rollouts, min_difference)
        if isinstance(found, LeftOut):
            left_out[found] += 1
            continue
        own, reason = _different(found, all_pairs)
        pairs += own
        if not own:
            left_out[reason] += 1
    return PairsFound(pairs, len(groups), +left_out)


def groups_of(samples: Iterable[RolloutSample]) -> list[list[RolloutSample]]:
    """The samples of each group, told by their step and ``group_id``.

    Args:
        samples: of a :class:`~collectors.record.RunRecord`.
    """
    groups: dict[tuple[int, str], list[RolloutSample]] = {}
    for sample in samples:
        groups.setdefault((sample.step, sample.group_id), []).append(sample)
    return list(groups.values())


def usable_rollouts(
    group: Sequence[RolloutSample], drop_truncated: bool, left_out: Counter[LeftOut]
) -> list[Rollout]:
    """Rollouts that are one conversation and have a reward; the others are counted.

    Args:
        group: rollouts of one prompt.
        drop_truncated: leave out those that a limit of tokens cut.
        left_out: counts the others, by the reason.
    """
    several = {sample.index for sample in group if sample.num_segments > 1}
    left_out[LeftOut.SEVERAL_ROWS] += len(several)
    rollouts = []
    for number, sample in enumerate(group):
        if sample.index in several:
            continue
        if sample.reward is None or not isfinite(sample.reward):
            left_out[LeftOut.NO_REWARD] += 1
        elif not sampled_messages(sample):
            left_out[LeftOut.SILENT] += 1
        elif any(_shows_image(message) for message in sample.messages):
            left_out[LeftOut.IMAGE] += 1
        elif drop_truncated and is_cut(sample):
            left_out[LeftOut.TRUNCATED] += 1
        else:
            messages = messages_to_train(sample)
            said = [_without_ids(message) for message in messages]
            rollouts.append(Rollout(number, sample, sample.reward, messages, said))
    return rollouts


def _ordered(
    rollouts: Sequence[Rollout], min_difference: float
) -> list[tuple[Rollout, Rollout]] | LeftOut:
    """Pairs of which the first is better, those that differ most before others."""
    if len(rollouts) < 2:
        return LeftOut.TOO_FEW
    pairs = [(c, r) for c in rollouts for r in rollouts if c.reward > r.reward]
    if not pairs:
        return LeftOut.EQUAL_REWARDS
    pairs = [(c, r) for c, r in pairs if is_at_least(c.reward - r.reward, min_difference)]
    if not pairs:
        return LeftOut.TOO_CLOSE
    pairs = [(c, r) for c, r in pairs if not is_cut(c.sample)]
    return sorted(pairs, key=lambda p: p[1].reward - p[0].reward) or LeftOut.BEST_TRUNCATED


def is_at_least(difference: float, least: float) -> bool:
    """Return whether rewards, which are float32, are or differ by so much as was typed."""
    return difference >= least or isclose(difference, least, rel_tol=1e-5)


def _different(
    ordered: Sequence[tuple[Rollout, Rollout]], all_pairs: bool
) -> tuple[list[RolloutPair], LeftOut]:
    """Pairs that say different things after a common prompt, and why there is none."""
    pairs, known, reason = list[RolloutPair](), set[str](), LeftOut.EQUAL_TEXTS
    for chosen, rejected in ordered:
        key = json.dumps([chosen.said, rejected.said], default=str)
        if chosen.said == rejected.said or key in known:
            continue
        pair = _pair(chosen, rejected)
        if pair is None:
            reason = LeftOut.PARTED
            continue
        pairs.append(pair)
        known.add(key)
        if not all_pairs:
            break
    return pairs, reason


def _pair(chosen: Rollout, rejected: Rollout) -> RolloutPair | None:
    """Two conversations from where they part; none where that is no turn of both after a prompt."""
    both = zip(chosen.said, rejected.said, strict=False)
    at = sum(1 for _ in takewhile(lambda two: two[0] == two[1], both))
    first, second = chosen.sample, rejected.sample
    turns = set(sampled_messages(first)) & set(sampled_messages(second))
    if at == 0 or at not in turns or first.tools != second.tools:
        return None
    return RolloutPair(
        prompt=chosen.messages[:at],
        chosen=chosen.messages[at:],
        rejected=rejected.messages[at:],
        tools=first.tools or None,
        chosen_reward=chosen.reward,
        rejected_reward=rejected.reward,
        step=first.step,
        group_id=first.group_id,
        chosen_sample=chosen.number,
        rejected_sample=rejected.number,
        chosen_stop_reason=first.stop_reason,
        rejected_stop_reason=second.stop_reason,
    )


def is_cut(sample: RolloutSample) -> bool:
    """Return whether a limit of tokens ended the last turn in the middle."""
    ends = (FinishReason.LENGTH, FinishReason.CONTEXT_LENGTH)
    return sample.finish_reason in ends or kind_of(sample.stop_reason) == StopReason.RESPONSE_LENGTH


def _shows_image(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(map(is_described_image, content))


def _without_ids(message: Message) -> Message:
    kept = {name: value for name, value in message.items() if name != "tool_call_id"}
    calls = kept.get("tool_calls")
    if isinstance(calls, list):
        kept["tool_calls"] = [
            {k: v for k, v in call.items() if k != "id"} if isinstance(call, Mapping) else call
            for call in calls
        ]
    return kept
