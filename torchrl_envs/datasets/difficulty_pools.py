"""Difficulty pools: rows are drawn, or not, by how often they were solved.

Shape legend: B rows.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
from tensordict import TensorDictBase

from torchrl_data.checks import check_numbers
from torchrl_data.keys import GROUP_ID, REWARD
from torchrl_envs.entries.rewards import several_rewards, solving_rewards
from torchrl_envs.entries.whole_episodes import rows_by_episode, whole_episode

Pool = Literal["new", "easy", "normal", "hard"]
POOLS: Final[tuple[Pool, ...]] = ("new", "easy", "normal", "hard")
IDS_PER_EPOCH: Final = 1 << 40
"""``group_id`` is ``epoch * IDS_PER_EPOCH + row id``."""
_SALT: Final = 0x5EED


class DifficultyPools:
    """Pools of rows that a :class:`~torchrl_envs.DataLoadingPrimer` draws, by their solve rate.

    The last group of a row says in which pool it is: ``easy``, ``hard``, or ``normal``; a row that
    was never drawn is ``new``. New and normal rows are drawn each epoch, others with a chance.
    Which ones follows from the primer's seed, the epoch and the row, and from nothing else.

    :class:`~collectors.StreamingCollector` and :class:`~collectors.RayLLMCollector` tell it of each
    finished group; :class:`~collectors.LLMCollector` calls it on its trajectories::

        pools = DifficultyPools(easy_at=0.9, admit_easy=0.0)  # no-positive-resampling
        primer.admit_by(pools)
        collector = LLMCollector(env, policy, postproc=pools, replay_buffer=buffer)

    The solve rates are part of the primer's ``state_dict``, of plain values.

    Args:
        easy_at: a row of which at least this share of the rollouts was solved is easy.
        hard_at: a row of which at most this share was solved is hard.
        admit_easy: chance of an easy row to be drawn in an epoch; 0 leaves it out for good.
        admit_hard: the same of a hard one.
        solved_at: a rollout with at least this reward is solved.
        solved_by: the reward that is asked, by its name, or several, which all have to be so high;
            ``"reward"`` is the weighted sum. ``None``: the one reward that there is.

    Raises:
        ValueError: a share or a chance lies outside [0, 1], the pools overlap, or every row would
            be drawn anyway.

    See Also:
        Khatri et al., 2025 (ScaleRL), arXiv:2510.13786, section 3.2, for no-positive-resampling.
    """

    def __init__(
        self,
        *,
        easy_at: float = 1.0,
        hard_at: float = 0.0,
        admit_easy: float = 1.0,
        admit_hard: float = 1.0,
        solved_at: float = 1.0,
        solved_by: str | Sequence[str] | None = None,
    ) -> None:
        shares = {"easy_at": easy_at, "hard_at": hard_at}
        chances = {"admit_easy": admit_easy, "admit_hard": admit_hard}
        check_numbers("DifficultyPools", "[0, 1]", **shares, **chances)
        check_numbers("DifficultyPools", solved_at=solved_at)
        if not hard_at < easy_at:
            raise ValueError(
                f"DifficultyPools: hard_at must be below easy_at, got {hard_at} and {easy_at}."
            )
        if admit_easy == admit_hard == 1:
            raise ValueError(
                "DifficultyPools: with admit_easy=1 and admit_hard=1 every row is drawn anyway: "
                "lower one, such as admit_easy=0.0."
            )
        self.settings: dict[str, float] = {**shares, **chances, "solved_at": solved_at}
        self.solved_by = [solved_by] if isinstance(solved_by, str) else solved_by
        """The rewards that are asked."""
        self.counts: Counter[str] = Counter(dict.fromkeys(POOLS, 0))
        """Rows that were drawn, by pool, and ``left_out``."""
        self._solved: dict[int, tuple[int, int, int]] = {}
        # Of each row: the epoch of its last group, and how many of its rollouts were solved.
        self._only: frozenset[int] | None = None

    def solve_rate(self, row_id: int) -> float | None:
        """The share of the rollouts of a row's last group that was solved.

        Args:
            row_id: its number in the data set.

        Returns:
            In [0, 1]; ``None`` for a row of which none was scored.
        """
        found = self._solved.get(row_id)  # another thread may be taking a group in
        return None if found is None else found[1] / found[2]

    def pool(self, row_id: int) -> Pool:
        """The pool of a row.

        Args:
            row_id: its number in the data set.
        """
        rate = self.solve_rate(row_id)
        if rate is None:
            return "new"
        if rate >= self.settings["easy_at"]:
            return "easy"
        return "hard" if rate <= self.settings["hard_at"] else "normal"

    def admits(self, row_id: int, *, epoch: int, seed: int) -> bool:
        """Return whether a row is drawn in an epoch; counted.

        Args:
            row_id: its number in the data set.
            epoch: which pass over the data.
            seed: of the primer.
        """
        if self._only is not None:
            return epoch * IDS_PER_EPOCH + row_id in self._only
        pool = self.pool(row_id)
        chance = self.settings.get(f"admit_{pool}", 1.0)
        lot = np.random.default_rng([_SALT, seed, epoch, row_id]).random()
        admitted = bool(lot < chance)
        self.counts[pool if admitted else "left_out"] += 1
        return admitted

    def admit_only(self, group_ids: Collection[int] | None) -> None:
        """Admit these groups and no others: those that a run had drawn before it was stopped.

        Args:
            group_ids: of the groups; nothing is counted. ``None``: as their pools say, from now on.
        """
        self._only = None if group_ids is None else frozenset(group_ids)

    def observe_group(self, group_id: int, rewards: Sequence[float]) -> None:
        """Take in a whole group, in the place of what was known of it.

        Args:
            group_id: of the group, which says row and epoch.
            rewards: of its rollouts; NaN where one could not be scored, which says nothing.
        """
        epoch, row_id = divmod(group_id, IDS_PER_EPOCH)
        known = [reward for reward in rewards if not np.isnan(reward)]
        if group_id < 0 or not known or epoch < self._solved.get(row_id, (-1,))[0]:
            return
        solved = sum(reward >= self.settings["solved_at"] for reward in known)
        self._solved[row_id] = (epoch, solved, len(known))

    def observe(self, group_id: int, reward: float) -> None:
        """Take in a rollout.

        Args:
            group_id: of its group, which says row and epoch.
            reward: what it got; NaN where it could not be scored, which says nothing.
        """
        if group_id < 0 or np.isnan(reward):
            return
        epoch, row_id = divmod(group_id, IDS_PER_EPOCH)
        last, solved, total = self._solved.get(row_id, (-1, 0, 0))
        if epoch < last:
            return  # a straggler of an earlier pass
        if epoch > last:
            solved = total = 0
        solved += bool(reward >= self.settings["solved_at"])
        self._solved[row_id] = (epoch, solved, total + 1)

    def __call__(self, trajectories: TensorDictBase) -> TensorDictBase:
        """Take in finished trajectories, and give them back.

        Args:
            trajectories: ``[B]``, what a collector gives, whole groups: ``group_id``, ``reward``,
                ``scorable`` and ``segment`` where they are.

        Raises:
            KeyError: they have no reward.
        """
        groups: dict[int, list[TensorDictBase]] = {}
        for row in trajectories.unbind(0):
            row[REWARD]  # without one it would never learn what is solved
            groups.setdefault(int(row[GROUP_ID]), []).append(row)
        for group_id, rows in groups.items():
            self.observe_group(group_id, self.rewards_of(rows))
        return trajectories

    def rewards_of(self, rows: Sequence[TensorDictBase]) -> list[float]:
        """Return what :meth:`observe_group` takes, of the rows of a group.

        Args:
            rows: of the rollouts; one of several rows counts once.

        Returns:
            Of each rollout the reward that is asked, the least of several; NaN where it was not
            scored.

        Raises:
            ValueError: several rewards are added, and ``solved_by`` names none.
        """
        found = []
        for own in rows_by_episode(rows):
            rewards = solving_rewards(whole_episode(own), self.solved_by)
            if self.solved_by is None and len(rewards) > 1:
                raise ValueError(f"DifficultyPools: {several_rewards(rewards, 'solved_by')}")
            found.append(min(rewards.values(), default=math.nan))
        return found

    def state_dict(self) -> dict[str, Any]:
        """The solve rates and counts, as JSON can hold them."""
        rates = [[row_id, *found] for row_id, found in sorted(self._solved.items())]
        return {"solved": rates, "counts": dict(self.counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a state.

        Args:
            state: what :meth:`state_dict` gave.
        """
        self._solved = {
            int(row_id): (int(epoch), int(solved), int(total))
            for row_id, epoch, solved, total in state["solved"]
        }
        self.counts = Counter(state["counts"])
