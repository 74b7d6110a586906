"""Rollouts that leave another one of their group at one of its turns.

The loop::

    the first rollouts of each group run to their ends -> a turn of one of them for each other one
    the other one takes over what was said before that turn, takes it anew, and runs to its end
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from torchrl_data.checks import check_counts
from torchrl_data.conversation import stream_number
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.episode.episode import BranchOrigin, Episode
from torchrl_envs.episode.episode_transform import EpisodeTransform, parts_before, takes_one_turn
from torchrl_envs.episode.turn_point import TurnPoint

if TYPE_CHECKING:
    from torchrl_envs.episode.episode_transform import EpisodeEnvironment

TurnWeights = Callable[[Sequence[TurnPoint]], Sequence[float]]
"""From the turns of a rollout to a weight for each, which is not negative."""


def uniform(turns: Sequence[TurnPoint]) -> Sequence[float]:
    """Every turn is as likely as any other.

    Args:
        turns: of a rollout.
    """
    return [1.0] * len(turns)


def surprise(turns: Sequence[TurnPoint]) -> Sequence[float]:
    """A turn is the likelier, the less likely its tokens were: mean of minus their log-probs.

    In expectation that is the entropy of the policy's choices in the turn.

    Args:
        turns: of a rollout.
    """
    return [max(0.0, -float(turn.log_probs.double().mean())) for turn in turns]


WEIGHTS: Final[Mapping[str, TurnWeights]] = {"uniform": uniform, "surprise": surprise}


class BranchRollouts(EpisodeTransform):
    """Lets some rollouts of each group begin in the middle of others: a tree of rollouts.

    The first ``num_roots`` rollouts of a group begin with its prompt, as all do without this. When
    they are over, each other rollout takes over what one of them had said and heard before one of
    its turns, takes that turn anew, and goes on by itself. It is an episode like any other, with a
    reward of its own for all that it says, that it took over included. What it took over was
    sampled once, has no price, and is trained once: in its row it is context, which the model reads
    once for all (``branched_from`` and ``branched_tokens`` of the rows say what comes from where).

    A rollout in which tools or environments hold something (a game, a session, a process) begins
    anew with the seed of its group, and is played the turns that come before its own again. It ends
    as failed if they are answered in another way than they were.

    ``LLMCollector``, ``StreamingCollector`` and ``RayLLMCollector`` run such groups.
    ``MCAdvantage(credit="tree")`` pays every token by the rewards of all rollouts that come after
    it.

    Args:
        num_roots: rollouts of each group that begin with the prompt, at least 1 and fewer than the
            group has.
        at: what draws the turn that is taken anew: ``"uniform"``, any but the first one;
            ``"surprise"``, a turn is the likelier, the less likely its tokens were; or a function
            from the turns of a rollout (:class:`TurnPoint`, the first one left out) to a weight
            for each. Roots are left one after the other; one with a single turn is not, and where
            no root has two, the others begin with the prompt.

    Raises:
        ValueError: ``num_roots`` is no count, or ``at`` is unknown.

    See Also:
        Ji et al., 2025 (Tree-GRPO), arXiv:2509.21240; Hou et al., 2025 (TreeRL), arXiv:2506.11902;
        Dong et al., 2025 (ARPO), arXiv:2507.19849.

    Example:
        >>> from torchrl_envs import ChatEnv, DataLoadingPrimer
        >>> data = DataLoadingPrimer([{"prompt": "Guess."}], group_size=8)
        >>> env = ChatEnv(batch_size=(8,)).append_transform(data)
        >>> env = env.append_transform(BranchRollouts(num_roots=4))  # and four that leave them
    """

    def __init__(self, num_roots: int, *, at: str | TurnWeights = "uniform") -> None:
        super().__init__()
        check_counts("BranchRollouts", num_roots=num_roots)
        if not callable(at) and at not in WEIGHTS:
            raise ValueError(
                f"BranchRollouts: at must be one of {sorted(WEIGHTS)}, or a function from the "
                f"turns of a rollout to weights, got {at!r}."
            )
        self.num_roots = num_roots
        self.at = at
        self._weigh: TurnWeights = at if callable(at) else WEIGHTS[at]
        self._is_run = False

    def extra_repr(self) -> str:
        """How many roots, and where the others leave them."""
        name = getattr(self.at, "__name__", self.at)
        return f"num_roots={self.num_roots}, at={name}"

    def check(self, env: "EpisodeEnvironment") -> None:
        """Groups are large enough, episodes have several turns, and all parts can be branched.

        Raises:
            ValueError: something of that is not so.
        """
        before = parts_before(env, self)
        loaders = [part for part in before if isinstance(part, DataLoadingPrimer)]
        if not loaders:
            raise ValueError("BranchRollouts: append it after what draws the data.")
        for loader in loaders:
            if loader.group_size <= self.num_roots:
                raise ValueError(
                    f"BranchRollouts: num_roots={self.num_roots} of a group of "
                    f"{loader.group_size} rollouts leaves none that branches. Raise "
                    "DataLoadingPrimer(group_size=...), or lower num_roots."
                )
        if takes_one_turn(env):
            raise ValueError(
                "BranchRollouts: the environment ends every episode after one turn, so that there "
                "is no later one to leave it at. Allow more: StepCounter(max_steps=8), say (of a "
                "recipe task.max_turns=8)."
            )
        fixed = [p for p in env.transforms_of(EpisodeTransform) if not p.can_branch]
        if fixed:
            raise ValueError(
                f"BranchRollouts: {type(fixed[0]).__name__} owns the loop of its episodes, which "
                "can't begin in the middle. Leave BranchRollouts out."
            )

    def run_by_collector(self) -> None:
        """Say that a collector asks :func:`waiting_rollouts` which rollouts wait for others."""
        self._is_run = True

    def drawn(self, episodes: Sequence[Episode]) -> None:
        """Say of each rollout that it begins with its prompt, as long as nothing else is known.

        Raises:
            RuntimeError: no collector runs the environment, so that no rollout would branch.
        """
        if not self._is_run:
            raise RuntimeError(
                "BranchRollouts: rollouts branch in LLMCollector, StreamingCollector and "
                "RayLLMCollector only. Collect with one of them, or leave it out."
            )
        for episode in episodes:
            episode.branch = BranchOrigin()

    def choose(
        self, trails: Sequence[Sequence[TurnPoint]], rollouts: Sequence[Episode]
    ) -> list[Sequence[TurnPoint]]:
        """Choose the turns that rollouts take anew.

        Args:
            trails: the turns of each root of a group.
            rollouts: the others of the group; their streams say what is drawn.

        Returns:
            For each of them the turns of its root up to the one that it takes anew, which comes
            last; nothing where it begins with the prompt.

        Raises:
            ValueError: the function of ``at`` does not give a weight for each turn.
        """
        # The first turn would be a root; in a rewritten past the turns before are other rows.
        known = [[turn for turn in trail[1:] if not turn.before.segments] for trail in trails]
        roots = [
            (trail, self._shares(turns))
            for trail, turns in zip(trails, known, strict=True)
            if turns
        ]
        if not roots:
            return [()] * len(rollouts)
        chosen: list[Sequence[TurnPoint]] = []
        for rollout, (trail, shares) in zip(rollouts, cycle(roots), strict=False):
            numbers = np.random.default_rng(stream_number(rollout.stream or 0, "branch"))
            place = int(numbers.choice(len(shares), p=shares))
            chosen.append(trail[: place + 2])
        return chosen

    def _shares(self, turns: Sequence[TurnPoint]) -> np.ndarray:
        """The share of each turn."""
        given: Any = self._weigh(turns)
        try:
            weights = np.asarray([float(weight) for weight in given])
        except (TypeError, ValueError):  # no list, or not of numbers
            weights = np.empty(0)
        if len(weights) != len(turns) or not all(math.isfinite(w) and w >= 0 for w in weights):
            raise ValueError(
                f"BranchRollouts: at must give a weight of at least 0 for each of {len(turns)} "
                f"turns, got {given!r:.80}."
            )
        total = weights.sum()
        return weights / total if total else np.full(len(turns), 1 / len(turns))


def branching_of(env: "EpisodeEnvironment") -> list[BranchRollouts]:
    """Return the parts of an environment that let rollouts branch, to the collector that runs it.

    Args:
        env: whose episodes are about to be run.
    """
    parts = list(env.transforms_of(BranchRollouts))
    for part in parts:
        part.run_by_collector()
    return parts


def waiting_rollouts(
    parts: Sequence[BranchRollouts], group: Sequence[Episode]
) -> tuple[BranchRollouts | None, int]:
    """Return which part lets rollouts of a group branch, if one does, and how many are roots.

    Args:
        parts: of the environment.
        group: its episodes, which were drawn.
    """
    part = next((part for part in parts if part.concerned(group[:1])), None)
    return part, len(group) if part is None else part.num_roots
