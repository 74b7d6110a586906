"""Audited tasks of any kind, each episode in the environment that a training run has."""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final, NamedTuple

import torch

from torchrl_data.batched_object import read_objects
from torchrl_data.conversation_io import read_conversations
from torchrl_data.keys import DONE, REWARD, SCORABLE, STEP_MASK, STOP_REASON
from torchrl_data.messages import Message
from torchrl_envs.entries.rewards import REWARD_ERRORS
from torchrl_envs.tasks.task import Task, TaskEnv

from .audited_task import AgentView, Played, Say
from .rows import AuditedRow, distinct_rows, solutions_of_rows
from .scripted_agents import tool_call_text

Solution = Callable[[AgentView], str | None]
_NOT_FINITE: Final = re.compile(r"gave (nan|-?inf)\b")
_LIMITS: Final = ("max_steps",)


class TaskInBatch:
    """A :class:`~torchrl_envs.tasks.task.Task`, played in :class:`TaskEnv`, a row at a time.

    Args:
        task: with rows.
        name: as it was given.
        kind: in words.
        is_own: whether whoever audits it can mend it.
        solution: answers that are right, where they are known.
        not_asked: further checks that it can't be asked, and why.
        is_forkable: whether a fork of this process has a copy of all that its code keeps.
        faults: defects that were seen as it was opened, and what was seen.
    """

    is_in_process = False
    reward_range: tuple[float, float] | None = None

    def __init__(
        self,
        task: Task,
        *,
        name: str,
        kind: str,
        is_own: bool = True,
        solution: Solution | None = None,
        not_asked: Mapping[str, str] | None = None,
        is_forkable: bool = True,
        faults: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.is_forkable, self.faults = is_forkable, faults
        self.task, self.name, self.kind, self.is_own = task, name, kind, is_own
        self.max_turns, self._solution = task.max_turns, solution
        self.not_asked: Mapping[str, str] = {
            "tampering": "there is no machine of the agent's",
            "clock": "there are no files that have dates",
            "endless": f"an answer without a call, or {task.max_turns} turns, end an episode",
            "after the end": "no step reaches an episode that is over",
            **(not_asked or {}),
        }
        self.rows = distinct_rows(task)
        self._demonstrated = {_opening(chat): chat for chat in task.demonstrations}
        if shown := [row for row in self.rows if self._demonstration_of(row.mapped)]:
            self.rows = shown
        self.num_rows = len(self.rows) if len(self.rows) > 1 else 0

    def start(self, seed: int) -> "BatchedEpisode":
        """Start the episode of a row in an environment of its own."""
        row = self.rows[seed % len(self.rows)]
        return BatchedEpisode(self.task, row, seed)

    def play_many(self, say: Say, seeds: Sequence[int], draw: int) -> list[Played]:
        """Play an episode of each seed, all in one environment; draws are counted from one on."""
        rows = [self.rows[seed % len(self.rows)] for seed in seeds]
        began = time.perf_counter()
        batch = EpisodeBatch(self.task, rows, seeds[0])
        played = [Played(seed, o) for seed, o in zip(seeds, batch.openings, strict=True)]
        played[0].times_s["reset"] = [(time.perf_counter() - began) / len(rows)]
        rngs, seen = [Random(draw + place) for place in range(len(rows))], list(batch.openings)
        is_silent, took = [False] * len(rows), list[float]()
        try:
            while None in batch.ends:
                texts = [""] * len(rows)
                for place in (k for k, end in enumerate(batch.ends) if end is None):
                    turn = len(played[place].answers)
                    read = (batch.openings[place], seen[place], turn, (), batch.tools)
                    text = None
                    if not is_silent[place]:
                        text = say(AgentView(*read, rows[place].mapped), rngs[place])
                    is_silent[place] = text is None
                    texts[place] = text or ""
                    played[place].answers.append(texts[place])
                began, going = time.perf_counter(), [end is None for end in batch.ends]
                seen = batch.answer(texts)
                took.append((time.perf_counter() - began) / sum(going))
                for place in (k for k, goes in enumerate(going) if goes):
                    played[place].observations.append(seen[place])
        finally:
            batch.close()
        played[0].times_s["step"] = took
        for each, end in zip(played, batch.ends, strict=True):
            assert end is not None
            each.reward, each.has_ended, each.error = end.reward, end.has_ended, end.error
            each.rewards = list(end.not_finite)
        return played

    def solutions(self) -> Mapping[str, Solution]:
        """The given one, demonstrations, and what the data says."""
        found = dict(solutions_of_rows(self.rows))
        if self._demonstrated:
            found["demonstration"] = self._demonstrated_answer
        return found if self._solution is None else {"solution": self._solution, **found}

    def _demonstration_of(self, row: Mapping[str, Any]) -> Sequence[Message]:
        prompt = row.get(self.task.prompt_column or "prompt")
        if not isinstance(prompt, str):
            return ()
        for opening, chat in self._demonstrated.items():
            if opening.startswith(prompt):
                return chat
        return ()

    def _demonstrated_answer(self, view: AgentView) -> str | None:
        chat = self._demonstrated.get(view.opening, ())
        turns = [message for message in chat if message["role"] == "assistant"]
        if view.turn >= len(turns):
            return None
        message = turns[view.turn]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        texts = [tool_call_text(call["name"], call["arguments"]) for call in calls]
        return "".join([str(message["content"] or ""), *texts])


class BatchedEpisode:
    """An episode in an environment of one row."""

    choices: Sequence[str] = ()

    def __init__(self, task: Task, row: AuditedRow, seed: int) -> None:
        self._batch = EpisodeBatch(task, [row], seed)
        self.row, self.opening, self.tools = row.mapped, self._batch.openings[0], self._batch.tools

    @property
    def is_over(self) -> bool:
        """Return whether it has ended."""
        return self._batch.ends[0] is not None

    @property
    def has_ended(self) -> bool:
        """Return whether it ended by itself, and not at a limit of turns."""
        end = self._batch.ends[0]
        return end is not None and end.has_ended

    @property
    def error(self) -> str:
        """The error that broke it off."""
        end = self._batch.ends[0]
        return "" if end is None else end.error

    @property
    def rewards(self) -> Sequence[float]:
        """Rewards that are no finite numbers."""
        end = self._batch.ends[0]
        return () if end is None else end.not_finite

    def answer(self, text: str) -> str:
        """Give a turn to the environment."""
        return self._batch.answer([text])[0]

    def reward(self) -> float | None:
        """Reward of the episode; where its agent has no more to say, it says nothing to end it."""
        while (end := self._batch.ends[0]) is None:
            self.answer("")
        return end.reward

    def after_end(self, text: str) -> tuple[float, bool] | None:
        """Refuse: no step reaches an episode that is over."""
        del text
        return None

    def close(self) -> None:
        """Close the environment."""
        self._batch.close()


class _End(NamedTuple):
    """The end of an episode."""

    reward: float | None
    has_ended: bool
    error: str
    not_finite: Sequence[float]


class EpisodeBatch:
    """Episodes of several rows, in one environment.

    Args:
        task: of all of them.
        rows: one for each.
        seed: of the environment, from which it draws the seeds of the episodes.
    """

    def __init__(self, task: Task, rows: Sequence[AuditedRow], seed: int) -> None:
        only = replace(task, train_rows=[row.raw for row in rows])
        self._env = TaskEnv(only, num_envs=len(rows), seed=seed, shuffle=False)
        self._env.error_limit.max_error_fraction = 1.0  # hostile agents lose whole batches
        self.ends: list[_End | None] = [None] * len(rows)
        try:
            self._batch = self._env.reset()
            shown = read_conversations(self._batch, "prompt", who="the audit")
            chats = [shown.messages(place) for place in range(len(rows))]
        except BaseException:
            self.close()
            raise
        self.openings = [_shown(chat) for chat in chats]
        self._lengths = [len(chat) for chat in chats]
        self.tools: Sequence[Mapping[str, Any]] = list(shown.tools(0) or ())

    def answer(self, texts: Sequence[str]) -> list[str]:
        """Give a turn to each episode that is not over, and return what is said to each."""
        going = torch.tensor([end is None for end in self.ends])
        self._batch.set(STEP_MASK, going)
        self._batch = self._env.step(self._batch.set("text_response", list(texts))).get("next")
        shown = read_conversations(self._batch, "prompt", who="the audit")
        said = []
        for place in range(len(texts)):
            messages = shown.messages(place)
            said.append(_shown(messages[self._lengths[place] + 1 :]))
            self._lengths[place] = len(messages)
            if self.ends[place] is None and bool(self._batch.get(DONE)[place].all()):
                self.ends[place] = self._end_of(place)
        return said

    def _end_of(self, place: int) -> _End:
        reason = str(self._batch.get(STOP_REASON)[place])
        errors = str(read_objects(self._batch, REWARD_ERRORS, "")[place])
        scorable = self._batch.get(SCORABLE, None)
        not_finite = [float(value) for value in _NOT_FINITE.findall(errors)]
        if scorable is not None and not bool(scorable[place].all()):
            why = (errors or reason).strip().splitlines()[-1]  # of a traceback the error
            return _End(None, reason not in _LIMITS, why, not_finite)
        reward = float(self._batch.get(REWARD)[place].sum())
        return _End(reward, reason not in _LIMITS, "", not_finite)

    def close(self) -> None:
        """Close the environment."""
        self._env.close(raise_if_closed=False)


def _opening(chat: Sequence[Message]) -> str:
    """Messages of a conversation before its first answer."""
    first = [message["role"] for message in chat].index("assistant")
    return _shown(chat[:first])


def _shown(messages: Sequence[Message]) -> str:
    """Messages as a scripted agent reads them; the system prompt is left out."""
    said = (message["content"] for message in messages if message["role"] != "system")
    return "\n".join(each if isinstance(each, str) else json.dumps(each) for each in said)
