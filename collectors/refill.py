"""The groups that are drawn again: the rule that all collectors share."""

from collections.abc import Sequence

from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer

from objectives.advantages.group_refill import MAX_DRAWS
from objectives.advantages.mc_advantage import ByGroups
from torchrl_data.keys import REWARD
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_envs.episode.episode_step import flat_transforms


def refusing_parts(buffer: ReplayBuffer | None) -> list[ByGroups]:
    """The transforms of a buffer that refuse groups, and ask for others."""
    transform = getattr(buffer, "_transform", None)
    parts = [] if transform is None else flat_transforms(transform)
    return [part for part in parts if isinstance(part, ByGroups) and part.asks_for_groups]


def is_wanted(rows: Sequence[TensorDictBase], parts: Sequence[ByGroups]) -> bool:
    """Whether a group is trained; else another one is drawn in its place.

    Args:
        rows: of the whole group, scored.
        parts: see :func:`refusing_parts`.
    """
    return not any(part.asks_again(rows) for part in parts)


def max_draws_of(parts: Sequence[ByGroups]) -> int:
    """The smallest of their bounds, see :class:`~objectives.GroupRefill`."""
    return min((part.max_draws for part in parts), default=MAX_DRAWS)


def check_refill(env: EpisodeEnv, parts: Sequence[ByGroups], *, who: str) -> None:
    """Check that rollouts are scored by the environment, so that groups can be refused at once.

    Raises:
        ValueError: rewards come later.
    """
    if parts and REWARD not in set(env.full_reward_spec.keys()):
        raise ValueError(
            f"{who}: {type(parts[0]).__name__} asks for other groups where rewards are equal, but "
            "the environment gives no reward: postproc or the buffer does, after groups were "
            "chosen. Append RewardFunctions([...]) to the environment, or take "
            "zero_variance='drop'."
        )
