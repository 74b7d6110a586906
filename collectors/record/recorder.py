"""Recorder of a run: a file for each step, with its rollouts, groups and metrics."""

import json
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from tensordict import TensorDictBase
from torch import Tensor

from collectors.ledger import GroupEvent, GroupLedger
from collectors.ledger.ledger_view import OF_TICKET
from objectives import MixedLoss
from objectives.batching.packed_batch import PackedBatch
from objectives.losses.token_loss import TokenLoss
from torchrl_data.batched_object import read_objects
from torchrl_data.checks import check_counts
from torchrl_data.conversation import Conversations
from torchrl_data.conversation_io import read_conversations
from torchrl_data.display.text import token_texts
from torchrl_data.images import described
from torchrl_data.keys import (
    ADVANTAGE,
    AGENT,
    BRANCHED_FROM,
    BRANCHED_TOKENS,
    ENTROPY,
    EPISODE_ID,
    FINISH_REASON,
    FULL,
    KEPT_COUNTS,
    NUM_SEGMENTS,
    NUM_TOOL_ERRORS,
    PARENT_SEGMENT,
    PARENT_TOKENS,
    POLICY_VERSION,
    REWARDS,
    ROW,
    ROW_KIND,
    SEGMENT,
    STOP_LIMIT,
    STOP_REASON,
    TOOL_CALLS,
    TRUNCATED,
)
from torchrl_data.token_scorer import TokenScores
from torchrl_envs.entries.rewards import REWARD_ERRORS
from torchrl_envs.entries.whole_episodes import rows_by_episode, whole_episode
from torchrl_envs.episode.episode import LOGGED_EXTRA
from torchrl_envs.rewards.scoring_call import LOGGED_METRICS

from .files import write_lines
from .provenance import token_spans
from .replay_columns import experts_to_json, masks_to_json
from .row_values import (
    column_values,
    group_name,
    group_of,
    number,
    opens_episode,
    recorded_prompt,
    reward_of,
    rounded,
    row_key,
)
from .run_record import END, FOLDER, step_file, steps_in
from .samples import (
    FORMAT,
    GroupSummary,
    RecordedToolCall,
    RolloutSample,
    SampleTokens,
    StepSummary,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_WHO: Final = "RolloutRecorder"


class RolloutRecorder(AbstractContextManager["RolloutRecorder", None]):
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
        exact: log-probs of the sampler are recorded to the bit of float32, and not to five digits.
        replay: also record the sampling masks and the routed experts of rows that have them, from
            which each token can be computed again.
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
        replay: bool = True,
        exact: bool = False,
        after: int | None = None,
    ) -> None:
        check_counts(_WHO, every=every)
        check_counts(_WHO, 0, max_groups_per_step=max_groups_per_step, after=after)
        self.folder = Path(folder) / FOLDER
        self.every = every
        self.max_groups_per_step = max_groups_per_step
        self.replay = replay
        self.exact = exact
        self._tokenizer = tokenizer
        self._known_texts: dict[int, str] = {}
        # What the loss scored of each row: which tokens, log-probs and entropies of these.
        self._scores: dict[bytes, tuple[Tensor, Tensor, Tensor | None]] = {}
        self._events: deque[dict[str, Any]] = deque()
        self._ordinals: dict[str, tuple[int, int]] = {}
        self._watched: list[TokenLoss | MixedLoss] = []
        self._followed: list[GroupLedger] = []
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
        (self.folder / END).unlink(missing_ok=True)

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
        loss.on_scores = self._add_scores
        self._watched.append(loss)

    def _add_scores(self, batch: PackedBatch, scores: TokenScores) -> None:
        """Keep what the loss scored of a part of a batch: nothing is computed twice.

        Rows are told apart by their tokens: those of equal tokens have equal scores. What a row
        was given first, before any update, stays.
        """
        lengths, counts = batch.lengths.tolist(), batch.target_lengths.tolist()
        ids, masks = batch.ids.cpu().split(lengths), batch.target_mask.cpu().split(lengths)
        log_probs = scores.log_prob.float().cpu().split(counts)
        entropies: Sequence[Tensor | None] = [None] * len(counts)
        if scores.entropy is not None:
            entropies = scores.entropy.float().cpu().split(counts)
        rows = zip(masks, log_probs, entropies, strict=True)
        for own_ids, row in zip(ids, rows, strict=True):
            self._scores.setdefault(_key(own_ids), row)

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
        ticket = {name: getattr(event.ticket, name) for name in OF_TICKET}
        rest = {"step": event.step, "reason": event.reason, "time": round(time.time(), 3)}
        self._events.append({"name": event.name, **ticket, **rest})

    def _take_events(self) -> list[dict[str, Any]]:
        """Return what the ledger told since the last time, with names of groups as in samples."""
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
            trained: those of them that were trained, in any order, with their advantages if they
                have some.
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
        advantages: dict[tuple[int, int, int], Tensor | None] = {}
        for row in () if trained is None else trained.unbind(0):
            advantages[row_key(row)] = row.get(ADVANTAGE, None)
        events = self._take_events()
        by_group: dict[str, list[TensorDictBase]] = defaultdict(list)
        for row in rows:
            by_group[group_of(row)].append(row)
        groups = [self._group(name, own, advantages) for name, own in by_group.items()]
        chosen = sorted(groups, key=lambda g: blake2b(g.prompt_id.encode()).digest())
        for group in chosen[: self.max_groups_per_step] if (step - 1) % self.every == 0 else ():
            group.is_recorded = True
        samples = []
        for group in groups:
            numbers: dict[int, int] = {}  # of the episodes in the group
            for row in by_group[group.group_id] if group.is_recorded else ():
                index = numbers.setdefault(int(row.get(EPISODE_ID)), len(numbers))
                sample = self._sample(row, step, index, advantages.get(row_key(row)))
                sample.is_trained = row_key(row) in advantages
                sample.branched_from = numbers.get(int(row.get(BRANCHED_FROM, -1)), -1)
                samples.append(sample)
        summary = StepSummary(
            step=step,
            time=round(time.time(), 3),
            metrics=dict(metrics or {}),
            groups=groups,
            events=events,
            num_samples=len(samples),
        )
        lines = [{"format": FORMAT, **vars(summary)}, *map(vars, samples)]
        write_lines(step_file(self.folder, step), lines, _as_json)
        self._scores.clear()

    def _group(
        self,
        name: str,
        rows: Sequence[TensorDictBase],
        advantages: Mapping[tuple[int, int, int], Tensor | None],
    ) -> GroupSummary:
        opening = next((row for row in rows if opens_episode(row)), rows[0])
        prompt_id, prompt = recorded_prompt(opening)
        ordinal, attempt = self._ordinals.pop(name, (None, 0))
        return GroupSummary(
            group_id=name,
            prompt_id=prompt_id,
            prompt=prompt,
            rewards=[reward_of(whole_episode(own)) for own in rows_by_episode(rows)],
            num_trained=sum(row_key(row) in advantages for row in rows),
            is_recorded=False,
            ordinal=ordinal,
            attempt=attempt,
        )

    def _sample(
        self, row: TensorDictBase, step: int, index: int, advantage: Tensor | None
    ) -> RolloutSample:
        """A row, that of an episode of that number in its group, as it is recorded."""
        conversation = read_conversations(row, FULL, who=_WHO)
        mask = conversation.assistant_mask(0)
        values = torch.empty(0) if advantage is None else advantage.reshape(-1)
        of_sampled = values[mask] if len(values) > 1 else values
        calls = (read_objects(row, TOOL_CALLS)[0] or {"calls": []})["calls"]
        errors = row.get(NUM_TOOL_ERRORS, None)
        failed, version = read_objects(row, REWARD_ERRORS, "")[0], row.get(POLICY_VERSION)
        return RolloutSample(
            step=step,
            group_id=group_of(row),
            index=index,
            segment=int(row.get(SEGMENT, 0)),
            num_segments=int(row.get(NUM_SEGMENTS, 1)),
            parent_segment=int(row.get(PARENT_SEGMENT, -1)),
            parent_tokens=int(row.get(PARENT_TOKENS, 0)),
            row_kind=str(read_objects(row, ROW_KIND, "main")[0]),
            branched_tokens=int(row.get(BRANCHED_TOKENS, 0)),
            agent=str(read_objects(row, AGENT, "")[0]),
            reward=reward_of(row),
            rewards={str(name): number(value) for name, value in row.get(REWARDS, {}).items()},
            reward_errors=failed if isinstance(failed, str) else json.dumps(failed, default=str),
            advantage=rounded(float(of_sampled.mean())) if len(of_sampled) else None,
            stop_reason=str(read_objects(row, STOP_REASON, "")[0]),
            stop_limit=int(row.get(STOP_LIMIT, -1)),
            finish_reason=str(read_objects(row, FINISH_REASON, "")[0]),
            is_truncated=bool(row.get(TRUNCATED).any()),
            num_turns=int(row.get("num_turns")),
            policy_version=int(version) if isinstance(version, Tensor) else str(version),
            prompt_tokens=conversation.num_tokens_before_policy(0),
            sampled_tokens=int(mask.sum()),
            total_tokens=len(mask),
            tool_calls=[RecordedToolCall(**call) for call in calls],
            num_tool_errors=0 if errors is None else int(errors),
            messages=described(conversation.messages(0)),
            tools=None if conversation.tools(0) is None else list(conversation.tools(0) or ()),
            row=described(read_objects(row, ROW)[0]),
            logged={
                str(name): value
                for key in (LOGGED_METRICS, LOGGED_EXTRA)
                for name, value in (read_objects(row, key)[0] or {}).items()
            },
            tokens=self._tokens(conversation, mask, values),
        )

    def _tokens(
        self, conversation: Conversations, mask: Tensor, advantages: Tensor
    ) -> SampleTokens:
        ids = conversation.token_ids(0)
        texts = token_texts(ids.tolist(), self._tokenizer, self._known_texts)
        trained, *scored = self._scores.get(_key(ids), (mask, None, None))
        columns = [
            None
            if one is None
            else column_values(torch.zeros(len(ids)).masked_scatter(trained, one), trained)
            for one in scored
        ]
        entropy, kept = (conversation.extra(0).get(name) for name in (ENTROPY, KEPT_COUNTS))
        return SampleTokens(
            ids=ids.tolist(),
            texts=texts,
            spans=token_spans(conversation.sources(0).tolist(), texts, conversation.messages(0)),
            log_probs=column_values(conversation.log_probs(0), mask, exact=self.exact),
            versions=column_values(conversation.policy_versions(0), mask),
            trainer_log_probs=columns[0],
            entropy=columns[1] if entropy is None else column_values(entropy, mask),
            kept_counts=None if kept is None else column_values(kept.long(), mask),
            sampling_masks=masks_to_json(conversation.sampling_masks(0)) if self.replay else None,
            routed_experts=experts_to_json(conversation.routed_experts(0)) if self.replay else None,
            advantages=column_values(advantages, mask) if len(advantages) > 1 else None,
        )

    def close(self) -> None:
        """Record what the ledger told since the last step, and listen no more."""
        for ledger in self._followed:
            ledger.on_event = ledger.unwritten = None
        for loss in self._watched:
            loss.on_scores = None
        self._followed, self._watched = [], []
        if self._events:
            line = {"format": FORMAT, "events": self._take_events()}
            write_lines(self.folder / END, [line], _as_json)

    def __exit__(self, *_: object) -> None:
        self.close()


def _key(ids: Tensor) -> bytes:
    return ids.to(torch.int64).contiguous().numpy().tobytes()


def _as_json(value: Any) -> Any:
    return vars(value) if hasattr(value, "__dataclass_fields__") else str(value)
