"""Tools of tau2-bench for the policy and for the simulated user, and the reward of an episode."""

import functools
import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final

from torchrl_data.message_edits import split_reasoning
from torchrl_data.messages import Message
from torchrl_data.tool_calls.records import ToolCall
from torchrl_envs.concurrency.outcome import Outcome
from torchrl_envs.entries.rewards import RewardSource
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeStartError, OpenedTurns
from torchrl_envs.episode.tool_source import Answer, Job, ToolSource, tool_message
from torchrl_envs.graders.answers import as_opened, text_of_message
from torchrl_envs.tool_results import result_text, value_text
from torchrl_envs.tool_schemas import Tool

from .domain import Domain, hashes_of

_LOG = logging.getLogger(__name__)
REWARD: Final = "tau2"
"""The name of the reward."""
TASK_COLUMN: Final = "task"
"""The column with the id of a task."""


class Tau2Environments(OpenedTurns, ToolSource, RewardSource):
    """Gives every rollout an environment of a domain of tau2's, and scores it as tau2 does.

    The reward is 1 where all holds that the task asks for, and 0 elsewhere: the databases are as
    the reference actions leave them, assertions about them hold, the reference actions were called,
    and the user was told what it has to be told. An episode that was cut gets 0.

    Args:
        domain: whose tasks the rows of the data name.
        timeout_s: deadline of one call, in seconds; also of the reward.
        start_timeout_s: deadline of making an environment.
        show_schemas: whether the chat template shows the tools to the model.
    """

    keeps_prompt = True
    required_columns = (TASK_COLUMN,)

    def __init__(
        self,
        domain: Domain,
        *,
        timeout_s: float = 30.0,
        start_timeout_s: float = 120.0,
        show_schemas: bool = True,
    ) -> None:
        super().__init__(timeout_s=timeout_s, show_schemas=show_schemas)
        self.domain = domain
        self.start_timeout_s = start_timeout_s
        self._offered = domain.tools

    @property
    def reward_names(self) -> list[str]:
        """The one of tau2's evaluation."""
        return [REWARD]

    def check(self, env: Any) -> None:
        """Note what the prompts open of a turn."""
        self.note_environment(env)

    def check_policy(self, policy: Any) -> None:
        """Note what the policy's prompts open of its turns."""
        self.note_encoder(getattr(policy, "encoder", None))

    async def begin(self, episode: Episode) -> None:
        """Make the environment of an episode's task.

        Raises:
            EpisodeStartError: there is no such task, or its state can't be made.
        """
        number = str((episode.example or {}).get(TASK_COLUMN))
        make = functools.partial(_Running, self.domain, number)
        (outcome,) = await self.call(make, timeout_s=self.start_timeout_s)
        if outcome.error is not None:
            raise EpisodeStartError(f"tau2 {self.domain.name} {number}") from outcome.error
        episode.resources.add(self, outcome.value, name="tau2")

    # Tools --------------------------------------------------------------------------------------

    def user_tool_names(self) -> dict[str, str]:
        """The tools of a domain's user."""
        return dict.fromkeys(self.domain.user_tools, type(self).__name__)

    def user_tools_of(self, episode: Episode) -> Mapping[str, Tool]:
        """The same in every episode."""
        del episode
        return self.domain.user_tools

    def bind(self, episode: Episode, call: ToolCall) -> Job:
        """A call of the policy's."""
        return self._job(episode, call, "assistant")

    def bind_user(self, episode: Episode, call: ToolCall) -> Job:
        """A call of the user's."""
        return self._job(episode, call, "user")

    def _job(self, episode: Episode, call: ToolCall, requestor: str) -> Job:
        running: _Running = episode.resources.get(self)

        def phrase(outcome: Outcome) -> Answer:
            if outcome.error is not None:
                return Answer(tool_message(call, result_text(outcome)), is_error=True)
            content, is_error = outcome.value
            text = value_text(content, max_bytes=self.max_result_bytes)
            return Answer(tool_message(call, text), is_error=is_error)

        answer = functools.partial(running.answer, call, requestor)
        return Job(answer, phrase, self.timeout_s, lane=episode.id)

    # Reward -------------------------------------------------------------------------------------

    async def finish(self, episode: Episode) -> None:
        """Score an episode as tau2 does."""
        running: _Running | None = episode.resources.get(self)
        if running is None:
            return
        said = [] if episode.is_truncated else self._heard(episode.completion_messages)
        score = functools.partial(running.reward, said, is_cut=episode.is_truncated)
        (outcome,) = await self.call(score, timeout_s=self.timeout_s)
        episode.score.add_outcome(REWARD, outcome, who="tau2's evaluation")

    def _heard(self, messages: Sequence[Message]) -> list[str]:
        """Texts that the policy said to the user: those of turns that call nothing."""
        after = [*(message["role"] for message in messages[1:]), ""]
        turns = [m for m, role in zip(messages, after, strict=True) if role != "tool"]
        turns = [m for m in turns if m["role"] == "assistant"]
        return [text_of_message(split_reasoning(m)) for m in as_opened(turns, self.opened_text)]


class _Running:
    """The environment of an episode, and what was called in it."""

    def __init__(self, domain: Domain, number: str) -> None:
        if number not in domain.tasks:
            raise ValueError(f"the domain {domain.name} has no task {number!r}")
        self.domain, self.task = domain, domain.tasks[number]
        self.environment = domain.begin(self.task)
        self.calls: list[Any] = []
        """All of them, in tau2's form."""

    def answer(self, call: ToolCall, requestor: str) -> tuple[str, bool]:
        """Run a call: its result, and whether that is an error."""
        made = import_module("tau2.data_model.message").ToolCall(
            id=call.id or "", name=call.name, arguments=call.arguments, requestor=requestor
        )
        self.calls.append(made)
        response = self.environment.get_response(made)
        return response.content, bool(response.error)

    def reward(self, said: Sequence[str], *, is_cut: bool) -> float:
        """Score as tau2's ``evaluate_simulation`` does, without playing the episode again."""
        criteria = self.task.evaluation_criteria
        if is_cut or criteria is None:
            return float(not is_cut)
        basis = {each.value for each in criteria.reward_basis}
        holds = True
        if "DB" in basis and criteria.actions is not None:
            holds &= hashes_of(self.environment) == self.domain.solved_hashes(self.task)
        if "ENV_ASSERTION" in basis:
            holds &= all(map(self._is_met, criteria.env_assertions or ()))
        if not holds:
            return 0.0
        return self._of_words("ACTION" in basis, "COMMUNICATE" in basis, said)

    def _is_met(self, assertion: Any) -> bool:
        """Return whether an assertion holds; one about something that is not there does not."""
        try:
            return self.environment.run_env_assertion(assertion, raise_assertion_error=False)
        except Exception as error:  # of a task that was not made, say; tau2's evaluation ends there
            _LOG.debug("%s: %s can't be asked: %s", self.task.id, assertion.func_name, error)
            return False

    def _of_words(self, actions: bool, words: bool, said: Sequence[str]) -> float:
        """Rewards of tau2 for the calls that were made, and for what the user was told."""
        form = import_module("tau2.data_model.message").AssistantMessage
        turns = [form(role="assistant", content=text) for text in said if text.strip()]
        if self.calls:
            turns.append(form(role="assistant", tool_calls=self.calls))
        reward = 1.0
        for is_asked, name in ((actions, "Action"), (words, "Communicate")):
            if is_asked:
                module = import_module(f"tau2.evaluator.evaluator_{name.lower()}")
                evaluator = getattr(module, f"{name}Evaluator")
                reward *= evaluator.calculate_reward(self.task, turns).reward
        return reward
