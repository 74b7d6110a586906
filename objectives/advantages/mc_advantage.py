"""Advantages relative to the group, computed as rows go into a replay buffer.

Shape legend: T tokens of a row.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import compress
from typing import Any, Final, Literal

import torch
from tensordict import NestedKey, TensorDictBase, lazy_stack
from torchrl.envs.transforms import Transform

from objectives import functional as F
from torchrl_data import keys
from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import check_counts, one_of, pair

from .baselines import BatchMean, SourceMean
from .estimators import (
    TRAJECTORY_RETURNS,
    AdvantageEstimator,
    DecoupledSources,
    GroupMean,
    LeaveOneOut,
    MaxRL,
    PassAtK,
    RewardedGroup,
    TrajectoryReturn,
    TurnCredit,
    read_entry,
    trajectory_return,
)
from .group_queue import (
    GroupQueue,
    GroupStats,
    Waiting,
    member_of,
    num_rows,
    row_place,
    rows_of_member,
)
from .group_refill import MAX_DRAWS, GroupRefill
from .rollout_tree import RolloutTreeCredit
from .tree_credit import (
    TREE_CREDITS,
    AgentCredit,
    BranchCredit,
    CreditFunction,
    FunctionCredit,
)

Estimator = Literal["group", "rloo", "gdpo", "maxrl", "batch_mean", "running_mean"]
Credit = Literal["episode", "branch", "turn", "agent", "tree"]
NoSignal = Literal["keep", "drop", "refill"]
OnExpiry = Literal["drop", "release"]
ESTIMATORS: Final[tuple[Estimator, ...]] = (
    *("group", "rloo", "gdpo", "maxrl"),
    *("batch_mean", "running_mean"),
)
CREDITS: Final[tuple[Credit, ...]] = ("episode", "branch", "turn", "agent", "tree")
OF_EPISODES: Final = ("episode", "branch", "turn", "tree")
"""Those that know one reward of an episode, and none of its agents'."""
NO_SIGNAL: Final[tuple[NoSignal, ...]] = ("keep", "drop", "refill")
ON_EXPIRY: Final[tuple[OnExpiry, ...]] = ("drop", "release")


class ByGroups(ChecksAttributes, Transform):
    """Protocol of a part that takes rows in, and gives complete groups out.

    Args:
        group_key: int64, the group's id.
        reward_key: ``[1, 1]``, or dense ``[T, 1]``.
        scorable_key: bool; False where no reward could be given. Optional in the rows.
        trajectory_return: how a dense reward becomes one number.
        max_pending_groups: more incomplete groups than this, and the oldest expires.
        expire_after_rows: a group expires once so many rows have come in since its first one.
        **sizes: rows of a complete group, under one of two names.
    """

    def __init__(
        self,
        *,
        group_key: NestedKey,
        reward_key: NestedKey,
        scorable_key: NestedKey,
        trajectory_return: str,
        max_pending_groups: int,
        expire_after_rows: int | None,
        **sizes: int | None,
    ) -> None:
        super().__init__()
        first, second = sizes
        given = [size for size in sizes.values() if size is not None]
        if len(given) != 1:
            raise ValueError(f"{self._get_name()} needs {first} (or {second}, the same): give one.")
        check_counts(**sizes)
        self.group_size = given[0]
        self.queue = GroupQueue(
            self.group_size,
            max_pending_groups=max_pending_groups,
            expire_after_rows=expire_after_rows,
        )
        self.group_key = group_key
        self.reward_key = reward_key
        self.scorable_key = scorable_key
        self.trajectory_return: TrajectoryReturn = one_of(
            "trajectory_return", trajectory_return, TRAJECTORY_RETURNS
        )
        self._lock = threading.RLock()

    @property
    def asks_for_groups(self) -> bool:
        """Whether :meth:`asks_again` may ever be true."""
        return False

    @property
    def max_draws(self) -> int:
        """See :class:`GroupRefill`."""
        return MAX_DRAWS

    def asks_again(self, rows: Sequence[TensorDictBase]) -> bool:
        """Whether a complete group would be refused, in whole or in part, and asked for again.

        For who can have another one sampled at once; nothing is taken in or counted.

        Args:
            rows: of one whole group.
        """
        del rows
        return False

    def _members(self, rows: Sequence[TensorDictBase]) -> list[TensorDictBase]:
        """The episodes of a whole group."""
        waiting: Waiting = {}
        members = [member_of(None, row, waiting) for row in rows]
        return [member for member in members if member is not None]

    @property
    def stats(self) -> GroupStats:
        """Counts of what came in and what became of it."""
        return self.queue.stats

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Take rows in, give complete groups out; None while there are none."""
        if tensordict is None:
            return None
        rows = tensordict.reshape(-1).unbind(0) if tensordict.ndim != 1 else tensordict.unbind(0)
        with self._lock, self.queue.unchanged_on_error():
            released = self._take(rows)
            self.stats.rows_released += len(released)
        return lazy_stack(released) if released else None

    def _take(self, rows: Sequence[TensorDictBase]) -> list[TensorDictBase]:
        """Queue rows; the rows that are given out."""
        raise NotImplementedError

    def get_extra_state(self) -> dict[str, Any]:
        """Incomplete groups and episodes, and counts, for ``state_dict``.

        Returns:
            Dictionaries and lists of what JSON can hold, and of tensors: no pickle is needed.

        Raises:
            TypeError: a row that waits holds something without a plain form.
        """
        with self._lock:
            return {"queue": self.queue.state()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go back to a state.

        Args:
            state: what :meth:`get_extra_state` gave.

        Raises:
            ValueError: it belongs to groups of another size.
        """
        with self._lock:
            # Incomplete episodes were beside the queue once, and are in runs that were saved then.
            self.queue.load_state({"segments": state.get("segments", []), **state["queue"]})

    def _return(self, member: TensorDictBase) -> float:
        """The return of an episode; of dense rewards each row has those of its own tokens."""
        rewards = [
            read_entry(row, self.reward_key, self._get_name()) for row in rows_of_member(member)
        ]
        is_dense = any(reward.numel() > 1 for reward in rewards)
        reward = torch.cat([each.reshape(-1) for each in rewards]) if is_dense else rewards[-1]
        scorable = member.get(self.scorable_key, None)
        return trajectory_return(reward, scorable, self.trajectory_return)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock = threading.RLock()


class MCAdvantage(ByGroups):
    """Monte-Carlo advantages: holds rows until their group is complete, then releases it.

    Append it to a replay buffer of rows, one row per trajectory::

        rb = ReplayBuffer(storage=LazyStackStorage(1024), transform=MCAdvantage(8))
        rb.extend(rows)  # a lazy stack [n]: any number, groups interleaved, in any order

    ``extend`` writes the complete groups, each row with an ``advantage``, and keeps the rest.
    (Not ``add``: TorchRL's would store a whole group as one item.)
    Incomplete groups and counts are part of ``state_dict``. Rows that come in are not written to.
    An ``extend`` that raises takes none of its rows in, and what waited before it still waits.

    Put it first in a ``Compose``: inverse transforms run last to first, and those that follow
    would get nothing while no group is complete.

    Args:
        group_size: rows of a complete group. A group of one has advantage 0.
        grpo_size: TorchRL's name for it.
        group_key: int64, the group's id; never text, of which two groups may have the same.
        reward_key: ``[1, 1]``, or dense ``[T, 1]``.
        advantage_key: what is written: ``[1, 1]``, or ``[T, 1]`` for credit by turn.
        scorable_key: bool; False where no reward could be given. Optional in the rows.
        assistant_mask_key: bool ``[T]``; read for credit by turn.
        estimator: ``"group"``: ``(R - mean) / (std + 1e-4)``; ``"rloo"``: leave one out;
            ``"gdpo"``: every source of reward normalised by itself; ``"maxrl"``:
            ``(R - mean) / mean``; of one rollout a prompt, ``"batch_mean"`` and
            ``"running_mean"``, see :class:`BatchMean` and :class:`SourceMean`; or settings, such
            as ``PassAtK(k=4)``, ``RoleBaseline()`` or ``LengthPenalty(coeff=0.1)``, see
            :class:`~objectives.LengthPenalty`.
        scale: the standard deviation of ``"group"``: that of the ``"group"``; of the ``"batch"``,
            all rows released at once; or ``"none"`` (Dr. GRPO). Of ``"batch_mean"``, the same, and
            what is not given is the batch's.
        credit: what is paid for a reward, over the tree of an episode's rows. ``"episode"``: all
            rows have the advantage of the episode. ``"agent"``: each agent of a program is compared
            with itself, see :class:`AgentCredit`. From dense rewards, ``"branch"``: each row by
            what was rewarded in it and in the rows that come from it, see :class:`BranchCredit`;
            and ``"turn"``: one advantage per turn (process supervision), see :class:`TurnCredit`.
            Where rollouts branch, ``"tree"``: each token by all rollouts that come after it, see
            :class:`RolloutTreeCredit`.
            Or a function of the tree and the episode's advantage, see :class:`FunctionCredit`.
        trajectory_return: how a dense reward becomes one number: ``"sum"``, ``"mean"``,
            ``"max"``.
        zero_variance: what becomes of a group without a signal (all rewards equal, or fewer than
            two valid ones): ``"keep"``, with advantage 0; ``"drop"``; ``"refill"`` or
            ``GroupRefill(max_draws=4)``: drop, and ask for another (DAPO's dynamic sampling),
            which all collectors answer; for a loop without one, see :meth:`take_refills`.
        unscorable: what becomes of a row without a finite reward: ``"keep"``, with advantage 0;
            ``"drop"``; both count as members; ``"refill"``: drop, and ask for another row. It is
            never part of the statistics.
        keep_return_bounds: groups whose mean return does not lie strictly between are dropped.
        on_expiry: what becomes of the rows of an expired group: ``"drop"``, or ``"release"``, as
            a smaller group.
        max_pending_groups: more incomplete groups than this, and the oldest expires.
        expire_after_rows: a group expires once so many rows have come in since its first one.

    Raises:
        ValueError: an option is unknown, out of range, or cannot take effect with the others.

    See Also:
        Shao et al., 2024, arXiv:2402.03300; Yu et al., 2025 (DAPO), arXiv:2503.14476, section 3.2.

    Example:
        >>> from tensordict import lazy_stack
        >>> from torchrl.data import LazyStackStorage, ReplayBuffer
        >>> advantage = MCAdvantage(4, scale="none")
        >>> buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=advantage)
        >>> rewards = [torch.tensor([[value]]) for value in (1.0, 0.0, 0.0, 1.0)]
        >>> rows = [TensorDict({"reward": each, "group_id": torch.tensor(7)}) for each in rewards]
        >>> _ = buffer.extend(lazy_stack(rows[:3]))
        >>> len(buffer)  # the group waits for its fourth row
        0
        >>> _ = buffer.extend(lazy_stack(rows[3:]))
        >>> buffer[:]["advantage"].shape, buffer[:]["advantage"].flatten()
        (torch.Size([4, 1, 1]), tensor([ 0.5000, -0.5000, -0.5000,  0.5000]))
    """

    def __init__(
        self,
        group_size: int | None = None,
        *,
        grpo_size: int | None = None,
        group_key: NestedKey = keys.GROUP_ID,
        reward_key: NestedKey = keys.REWARD,
        advantage_key: NestedKey = keys.ADVANTAGE,
        scorable_key: NestedKey = keys.SCORABLE,
        assistant_mask_key: NestedKey = keys.ASSISTANT_MASK,
        estimator: Estimator | str | AdvantageEstimator = "group",
        scale: F.Scale | str = "group",
        credit: Credit | str | CreditFunction = "episode",
        trajectory_return: TrajectoryReturn | str = "sum",
        zero_variance: NoSignal | GroupRefill | str = "keep",
        unscorable: NoSignal | str = "keep",
        keep_return_bounds: tuple[float, float] | None = None,
        on_expiry: OnExpiry | str = "drop",
        max_pending_groups: int = 1024,
        expire_after_rows: int | None = None,
    ) -> None:
        super().__init__(
            group_key=group_key,
            reward_key=reward_key,
            scorable_key=scorable_key,
            trajectory_return=trajectory_return,
            max_pending_groups=max_pending_groups,
            expire_after_rows=expire_after_rows,
            group_size=group_size,
            grpo_size=grpo_size,
        )
        self.advantage_key = advantage_key
        self.assistant_mask_key = assistant_mask_key
        self.credit = credit if callable(credit) else one_of("credit", credit, CREDITS)
        self._refills: Counter[Hashable] = Counter()
        self.estimator: AdvantageEstimator = self._build_estimator(estimator, scale)
        self.zero_variance: NoSignal | GroupRefill = self._checked_change(
            "zero_variance", zero_variance
        )
        self.unscorable: NoSignal = self._checked_change("unscorable", unscorable)
        bounds = self._checked_change("keep_return_bounds", keep_return_bounds)
        self.keep_return_bounds: tuple[float, float] | None = bounds
        self.on_expiry: OnExpiry = self._checked_change("on_expiry", on_expiry)

    changeable = frozenset(
        {"estimator", "zero_variance", "unscorable", "keep_return_bounds", "on_expiry"}
    )

    def _checked_change(self, name: str, value: Any) -> Any:
        if name == "estimator":
            return self._build_estimator(value, "group")
        if name == "on_expiry":
            return one_of(name, value, ON_EXPIRY)
        if name == "keep_return_bounds":
            bounds = None if value is None else pair(name, value)
            if bounds is not None and not bounds[0] < bounds[1]:
                raise ValueError(f"keep_return_bounds must be an increasing pair, got {bounds}.")
            return bounds
        if name == "zero_variance" and self.group_size == 1 and value != "keep":
            raise ValueError(
                f"A group of one never has a signal: zero_variance={value!r} would drop every "
                "row. Use 'keep'."
            )
        if name == "zero_variance" and isinstance(value, GroupRefill):
            return value
        return one_of(name, value, NO_SIGNAL)

    def _build_estimator(
        self, estimator: str | AdvantageEstimator, scale: str
    ) -> AdvantageEstimator:
        """The estimator that is meant, checked beside what the groups are."""
        built = self._estimator_of(estimator, scale)
        if isinstance(built, PassAtK) and built.k > self.group_size:
            raise ValueError(
                f"PassAtK: k is {built.k}, but a group has {self.group_size} rows. Every "
                "advantage would be 0."
            )
        return built

    def _estimator_of(self, estimator: str | AdvantageEstimator, scale: str) -> AdvantageEstimator:
        if self.credit == "turn":
            if (estimator, scale) != ("group", "group"):
                raise ValueError("credit 'turn' goes with estimator 'group' and scale 'group'.")
            return TurnCredit(**self._read)
        if self.credit != "episode":
            return self._tree_credit(estimator, scale)
        return self._of_episodes(estimator, scale)

    @property
    def _read(self) -> dict[str, Any]:
        return {"reward_key": self.reward_key, "assistant_mask_key": self.assistant_mask_key}

    def _tree_credit(self, estimator: str | AdvantageEstimator, scale: str) -> AdvantageEstimator:
        """Credit over the tree of rows, by what makes advantages of returns."""
        if isinstance(estimator, TREE_CREDITS):
            raise ValueError(f"credit={self.credit!s:.60} is given twice: {estimator!s:.80}.")
        inner = self._of_episodes(estimator, scale)
        if callable(self.credit):
            return FunctionCredit(function=self.credit, estimator=inner)
        if self.credit == "tree":
            return RolloutTreeCredit(estimator=inner)
        kind = {"agent": AgentCredit, "branch": BranchCredit}[self.credit]
        return kind(estimator=inner, **self._read)

    def _of_episodes(self, estimator: str | AdvantageEstimator, scale: str) -> AdvantageEstimator:
        if estimator == "batch_mean":
            return BatchMean(scale="batch" if scale == "group" else scale)
        if scale != "group" and estimator != "group":
            raise ValueError(f"scale has no effect on estimator {estimator!r}: leave it out.")
        if isinstance(estimator, AdvantageEstimator):
            return estimator
        name = one_of("estimator", estimator, ESTIMATORS)
        if name == "group":
            return GroupMean(scale=scale)
        named = {"rloo": LeaveOneOut, "gdpo": DecoupledSources, "maxrl": MaxRL}
        return {**named, "running_mean": SourceMean}[name]()

    def take_refills(self) -> dict[Hashable, int]:
        """Return how many new rows each group asks for; asked once, then forgotten.

        To be called after each ``extend`` by whoever fills the buffer, who then samples so many
        rows for the prompt of each group and gives them its id (``docs/losses.md`` has an
        example). Collectors need none of it: they ask :meth:`asks_again` of each group before it
        goes into the buffer, and what they refuse never comes here.

        Returns:
            Group id to number of rows.
        """
        with self._lock:
            refills, self._refills = dict(self._refills), Counter()
            return refills

    @property
    def asks_for_groups(self) -> bool:
        """See the base class: of groups without a signal, or with rows that have no reward."""
        return self._refills_flat or self.unscorable == "refill"

    @property
    def _refills_flat(self) -> bool:
        return isinstance(self.zero_variance, GroupRefill) or self.zero_variance == "refill"

    @property
    def max_draws(self) -> int:
        """See :class:`GroupRefill`."""
        return (
            self.zero_variance.max_draws
            if isinstance(self.zero_variance, GroupRefill)
            else MAX_DRAWS
        )

    def asks_again(self, rows: Sequence[TensorDictBase]) -> bool:
        """See the base class."""
        if not self.asks_for_groups:
            return False
        group = self._group(None, self._members(rows))
        lacks = self.unscorable == "refill" and any(map(math.isnan, group.returns))
        return lacks or (self._refills_flat and self.estimator.is_flat(group))

    def get_extra_state(self) -> dict[str, Any]:
        """Incomplete groups, counts, pending refills and baselines, for ``state_dict``.

        Returns:
            Dictionaries and lists of what JSON can hold, and of tensors: no pickle is needed.

        Raises:
            TypeError: a row that waits holds something without a plain form.
        """
        with self._lock:
            refills = [list(item) for item in self._refills.items()]
            more = {"refills": refills, "estimator": self.estimator.state_dict()}
            return super().get_extra_state() | more

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go back to a state.

        Args:
            state: what :meth:`get_extra_state` gave.

        Raises:
            ValueError: it belongs to groups of another size, or to another estimator.
        """
        with self._lock:
            self.estimator.load_state_dict(state["estimator"])
            super().set_extra_state(state)
            self._refills = Counter(dict(map(tuple, state["refills"])))

    def _collect(self, rows: Sequence[TensorDictBase]) -> list[RewardedGroup]:
        """Queue rows; the groups that became complete, or expired and are still wanted."""
        complete: list[RewardedGroup] = []
        for row in rows:
            if self.credit in OF_EPISODES and row.get(keys.AGENT_REWARD, None) is not None:
                raise ValueError(
                    "MCAdvantage: the agents of these episodes have rewards of their own "
                    f"({keys.AGENT_REWARD!r}), and credit={self.credit!r} pays all of them alike: "
                    "take credit='agent' (of a recipe loss.credit=agent)."
                )
            group_id = int(read_entry(row, self.group_key, "MCAdvantage"))
            if self.unscorable == "refill" and math.isnan(self._return(row)):
                self.stats.rows_in += 1
                self.stats.rows_dropped_unscorable += 1
                # An episode is asked for once, however many rows it has.
                self._refills[group_id] += row_place(row)[0] == 0
                continue
            if (members := self.queue.add(group_id, row)) is not None:
                complete.append(self._group(group_id, members))
        for group_id, late in self.queue.expire():
            if self.on_expiry == "release":
                complete.append(self._group(group_id, late))
            else:
                self.stats.rows_expired += sum(map(num_rows, late))
        return complete

    def _group(self, group_id: Hashable, rows: list[TensorDictBase]) -> RewardedGroup:
        return RewardedGroup(group_id, rows, [self._return(row) for row in rows])

    def _take(self, rows: Sequence[TensorDictBase]) -> list[TensorDictBase]:
        """Give the rows of complete groups their advantages; leave out what is to be dropped."""
        refills, estimator = self._refills.copy(), self.estimator.state_dict()
        try:
            groups = self._collect(rows)
            if not groups:
                return []
            complete = [row for group in groups for row in group.rows]
            advantages = self.estimator.by_row(groups)
            keep = [kept for group in groups for kept in self._kept(group)]
            released = []
            for row, own, kept in zip(complete, advantages, keep, strict=True):
                for part, advantage in zip(rows_of_member(row), own, strict=True) if kept else ():
                    part.set(self.advantage_key, advantage)
                    released.append(part)
            return released
        except BaseException:
            self._refills = refills
            self.estimator.load_state_dict(estimator)
            raise

    def _kept(self, group: RewardedGroup) -> list[bool]:
        """Return which rows of a complete group go on; counts those that do not."""
        valid = [value for value in group.returns if not math.isnan(value)]
        size, sizes = len(group.rows), list(map(num_rows, group.rows))
        if self.estimator.is_flat(group):
            self.stats.groups_zero_variance += 1
            if self.zero_variance != "keep":
                self.stats.rows_dropped_zero_variance += sum(sizes)
                if self._refills_flat:
                    self._refills[group.group_id] += self.group_size
                return [False] * size
        bounds = self.keep_return_bounds
        if bounds is not None and not (valid and bounds[0] < sum(valid) / len(valid) < bounds[1]):
            self.stats.rows_dropped_bounds += sum(sizes)
            return [False] * size
        if self.unscorable == "keep":
            return [True] * size
        keep = [not math.isnan(value) for value in group.returns]
        self.stats.rows_dropped_unscorable += sum(sizes) - sum(compress(sizes, keep))
        return keep
