"""Writes the record of a run, a file for each step."""

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from tensordict import TensorDictBase
from torch import Tensor

from collectors.ledger import GroupEvent, GroupLedger
from objectives import MixedLoss
from objectives.losses.base import TokenLoss
from torchrl_data.keys import ADVANTAGE, EPISODE_ID
from torchrl_data.validation import check_counts

from .files import write_lines
from .reader import FOLDER, end_file, step_file, steps_in
from .rows import RowReader, group_name, group_of, prompt_of, reward_of, row_key
from .samples import FORMAT, GroupSummary, StepSummary, to_json
from .scores import TrainerScores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WHO: Final = "RolloutRecorder"


class RolloutRecorder:
    """Records what each step of training saw: its groups, metrics, and samples by token.

    A step is one file of compressed JSON lines in ``<folder>/rollouts``, which is there whole or
    not at all, so the record can be read and shown while the run goes on (:class:`RunRecord`)::

        with RolloutRecorder(folder, tokenizer) as recorder:
            recorder.watch(loss)
            recorder.follow(collector.ledger)  # of a StreamingCollector
            for step, batch in enumerate(collector, 1):
                trained = buffer[:]
                ...
                recorder.write(step, batch, trained=trained, metrics=metrics)

    Args:
        folder: of the run.
        tokenizer: spells the tokens.
        every: samples are recorded in every so many steps, the first among them. Metrics, groups
            and what the ledger tells are recorded in each.
        max_groups_per_step: record the samples of so many groups; ``None``: of all. Which ones
            follows from their prompts, so those that come again are recorded again.
        after: the run goes on behind this step: what was recorded of later ones is removed.

    Raises:
        FileExistsError: there is a record of later steps, and ``after`` was not given.
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        folder: str | Path,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        every: int = 1,
        max_groups_per_step: int | None = None,
        after: int | None = None,
    ) -> None:
        check_counts(_WHO, every=every)
        check_counts(_WHO, 0, max_groups_per_step=max_groups_per_step, after=after)
        self.folder = Path(folder) / FOLDER
        self.every = every
        self.max_groups_per_step = max_groups_per_step
        self._scores = TrainerScores()
        self._reader = RowReader(tokenizer, self._scores)
        self._events: deque[dict[str, Any]] = deque()
        self._ordinals: dict[str, tuple[int, int]] = {}
        self._watched: list[TokenLoss | MixedLoss] = []
        self._followed: list[GroupLedger] = []
        self._make_room(after)

    def _make_room(self, after: int | None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        steps = steps_in(self.folder)
        if after is None and steps:
            raise FileExistsError(
                f"{_WHO}: {self.folder} holds steps up to {max(steps)} of a run. Give it a folder "
                "of its own, or say after= which step this run goes on."
            )
        for step in steps:
            if after is not None and step > after:
                step_file(self.folder, step).unlink()
        end_file(self.folder).unlink(missing_ok=True)

    # What it hears of ---------------------------------------------------------------------------

    def watch(self, loss: TokenLoss | MixedLoss) -> None:
        """Record the log-probs of the trainer too, as a loss computes them anyway.

        Args:
            loss: that trains; the first scores of a step count, which come before its updates.

        Raises:
            ValueError: somebody else hears of its scores.
        """
        if loss.on_scores is not None:
            raise ValueError(f"{_WHO}: {type(loss).__name__}.on_scores is taken already.")
        loss.on_scores = self._scores.add
        self._watched.append(loss)

    def follow(self, ledger: GroupLedger) -> None:
        """Record what becomes of each group, those that are never trained too.

        Args:
            ledger: of a :class:`~collectors.StreamingCollector`, say.

        Raises:
            ValueError: somebody else follows it.
        """
        if ledger.on_event is not None:
            raise ValueError(f"{_WHO}: the ledger's on_event is taken already.")
        ledger.on_event = self._note
        ledger.unwritten = lambda: list(self._events)
        self._events.extend(ledger.unwritten_before)
        self._followed.append(ledger)

    def _note(self, event: GroupEvent) -> None:
        ticket = event.ticket
        self._events.append(
            {
                "name": event.name,
                "ordinal": ticket.ordinal,
                "group_id": ticket.group_id,
                "attempt": ticket.attempt,
                "dispatch": ticket.dispatch,
                "version": ticket.version,
                "step": event.step,
                "reason": event.reason,
                "time": round(time.time(), 3),
            }
        )

    def _take_events(self) -> list[dict[str, Any]]:
        """What the ledger told since the last time, with names of groups as in samples."""
        events = []
        while self._events:  # others may append meanwhile
            event = self._events.popleft()
            if isinstance(event["group_id"], int):
                event["group_id"] = group_name(event["group_id"])
            if event["name"] == "taken":
                self._ordinals[event["group_id"]] = (event["ordinal"], event["attempt"])
            events.append(event)
        return events

    # What it writes -----------------------------------------------------------------------------

    def write(
        self,
        step: int,
        trajectories: TensorDictBase,
        *,
        trained: TensorDictBase | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Record a step.

        Args:
            step: its number, from 1.
            trajectories: rows ``[B]`` as a collector gave them.
            trained: those of them that were trained, with their advantages, in any order.
            metrics: of the step.

        Raises:
            ValueError: the number is out of range, or rows are no collector's.
        """
        check_counts(f"{_WHO}.write", step=step)
        rows = list(trajectories.reshape(-1).unbind(0))
        if rows and rows[0].get(EPISODE_ID, None) is None:
            raise ValueError(
                f"{_WHO}.write takes rows of a collector, which have {EPISODE_ID!r}; these have "
                f"{sorted(map(str, rows[0].keys()))}."
            )
        advantages: dict[tuple[int, int], Tensor] = {}
        for row in () if trained is None else trained.unbind(0):
            advantages[row_key(row)] = row.get(ADVANTAGE)
        events = self._take_events()
        by_group: dict[str, list[TensorDictBase]] = defaultdict(list)
        for row in rows:
            by_group[group_of(row)].append(row)
        groups = [self._group(name, own, advantages) for name, own in by_group.items()]
        self._choose(step, groups)
        samples = [
            self._reader.sample(row, step, index, advantages.get(row_key(row)))
            for group in groups
            if group.is_recorded
            for index, row in _numbered(by_group[group.group_id])
        ]
        summary = StepSummary(
            step=step,
            time=round(time.time(), 3),
            metrics=dict(metrics or {}),
            groups=groups,
            events=events,
            num_samples=len(samples),
        )
        lines = [{"format": FORMAT, **to_json(summary)}, *map(to_json, samples)]
        write_lines(step_file(self.folder, step), lines, _as_json)
        self._scores.clear()

    def _group(
        self,
        name: str,
        rows: Sequence[TensorDictBase],
        advantages: Mapping[tuple[int, int], Tensor],
    ) -> GroupSummary:
        prompt_id, prompt = prompt_of(rows[0])
        episodes = {row_key(row)[0]: row for row in rows}
        ordinal, attempt = self._ordinals.pop(name, (None, 0))
        return GroupSummary(
            group_id=name,
            prompt_id=prompt_id,
            prompt=prompt,
            rewards=[reward_of(row) for row in episodes.values()],
            num_trained=sum(row_key(row) in advantages for row in rows),
            is_recorded=False,
            ordinal=ordinal,
            attempt=attempt,
        )

    def _choose(self, step: int, groups: Sequence[GroupSummary]) -> None:
        """Say whose samples are recorded."""
        if (step - 1) % self.every:
            return
        chosen = sorted(groups, key=lambda g: blake2b(g.prompt_id.encode()).digest())
        for group in chosen[: self.max_groups_per_step]:
            group.is_recorded = True

    def close(self) -> None:
        """Record what the ledger told since the last step, and listen no more."""
        for ledger in self._followed:
            ledger.on_event = ledger.unwritten = None
        for loss in self._watched:
            loss.on_scores = None
        self._followed, self._watched = [], []
        if self._events:
            line = {"format": FORMAT, "events": self._take_events()}
            write_lines(end_file(self.folder), [line], _as_json)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _numbered(rows: Sequence[TensorDictBase]) -> list[tuple[int, TensorDictBase]]:
    """Rows with the number of their episode in the group."""
    numbers: dict[int, int] = {}
    return [(numbers.setdefault(row_key(row)[0], len(numbers)), row) for row in rows]


def _as_json(value: Any) -> Any:
    return to_json(value) if hasattr(value, "__dataclass_fields__") else str(value)
