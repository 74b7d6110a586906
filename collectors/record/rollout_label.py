"""Single rollouts with a label, for learning from answers that are desirable or not."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchrl_data.checks import check_numbers
from torchrl_data.messages import Message

from .rollout_pair import LeftOut, groups_of, is_at_least, is_cut, usable_rollouts
from .sampled_messages import sampled_messages
from .samples import RolloutSample


@dataclass(frozen=True, kw_only=True)
class LabelledRollout:
    """A rollout, as TRL's unpaired preference data have it.

    ``completion`` begins with the first turn of the policy, and ends with its last one.
    """

    prompt: list[Message]
    completion: list[Message]
    label: bool
    tools: list[dict[str, Any]] | None
    """Schemas that the prompt shows; ``None`` where it shows none."""
    reward: float
    step: int
    group_id: str
    sample: int
    """Number of the row among those of its group, from 0, as the viewer counts."""
    stop_reason: str

    def to_json(self) -> dict[str, Any]:
        """Fields of the rollout; ``tools`` only where there are some."""
        return {name: value for name, value in vars(self).items() if value is not None}


class LabelsFound(NamedTuple):
    """Labelled rollouts, and what gave none."""

    rollouts: list[LabelledRollout]
    left_out: Counter[LeftOut]
    """How many rollouts, by the reason."""


def labelled_rollouts(
    samples: Iterable[RolloutSample], *, threshold: float, drop_truncated: bool = False
) -> LabelsFound:
    """Rollouts with a label: desirable are those whose reward is a threshold, or more.

    A rollout whose last turn was cut by a limit of tokens is never desirable: where its reward
    would make it so, it is left out.

    Args:
        samples: of a :class:`~collectors.record.RunRecord`.
        threshold: the least reward of a desirable rollout.
        drop_truncated: leave out all that were cut.

    Raises:
        ValueError: the threshold is not finite.

    Example:
        >>> from collectors.record import RunRecord, labelled_rollouts
        >>> record = RunRecord("outputs/grpo/calculator/seed0")  # doctest: +SKIP
        >>> found = labelled_rollouts(record.samples(1), threshold=0.5)  # doctest: +SKIP
    """
    check_numbers("labelled_rollouts", "(-inf, inf)", threshold=threshold)
    found, left_out = list[LabelledRollout](), Counter[LeftOut]()
    for group in groups_of(samples):
        for rollout in usable_rollouts(group, drop_truncated, left_out):
            sample, label = rollout.sample, is_at_least(rollout.reward, threshold)
            first = min(sampled_messages(sample))
            if first == 0:
                left_out[LeftOut.NO_PROMPT] += 1
            elif label and is_cut(sample):
                left_out[LeftOut.TRUNCATED] += 1
            else:
                own = LabelledRollout(
                    prompt=rollout.messages[:first],
                    completion=rollout.messages[first:],
                    label=label,
                    tools=sample.tools or None,
                    reward=rollout.reward,
                    step=sample.step,
                    group_id=sample.group_id,
                    sample=rollout.number,
                    stop_reason=sample.stop_reason,
                )
                found.append(own)
    return LabelsFound(found, +left_out)
