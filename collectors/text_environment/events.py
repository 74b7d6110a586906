"""What happens in an episode in plain text: tools are called, room runs out, it is scored."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torchrl_envs.concurrency.calls import ConcurrentCalls, Outcome
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeTransform
from torchrl_envs.episode.tool_source import Answer, Job, ToolSource
from torchrl_envs.tool_calls.results import result_text

from .parts import Tool, scores_one_text
from .requests import RequestSyntax

MAX_LENGTH: Final = "max_length"
"""No token is left of an episode's room."""
_CUT: Final = "..."
_REWARD: Final = "reward_fn"


class RequestTools(ToolSource):
    """Answers a turn's request with ``result<response>``, or with what is wrong with it.

    Args:
        tools: functions of a string, by name.
        syntax: of requests.
        max_result_chars: most characters of a result, without the mark that ends it.
        timeout_s: deadline of one call.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        syntax: RequestSyntax,
        *,
        max_result_chars: int,
        timeout_s: float,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        self.tools = tools
        self.syntax = syntax
        self.max_result_chars = max_result_chars

    def read_turn(self, episode: Episode, text: str) -> Sequence[Job | Answer]:
        """The request of a turn that did not end its episode."""
        del episode
        request = self.syntax.parse(text)
        if request is None:
            return [self._answer(f"Unknown tool call: {text}", is_error=True)]
        name, query = request
        if name not in self.tools:
            return [self._answer(f"Unknown tool {name}.", is_error=True)]
        return [Job(functools.partial(self.tools[name], query), self._phrase, self.timeout_s)]

    def _phrase(self, outcome: Outcome) -> Answer:
        if outcome.error is not None:
            return self._answer(f"Tool error: {outcome.error}", is_error=True)
        return self._answer(result_text(outcome))

    def _answer(self, result: str, *, is_error: bool = False) -> Answer:
        if len(result) > self.max_result_chars:
            kept = max(self.max_result_chars - len(_CUT), 0)
            result = f"{result[:kept]}{_CUT}"[: self.max_result_chars]
        content = f"{result}{self.syntax.response}"
        return Answer({"role": "tool", "content": content}, is_error=is_error)


class Room(EpisodeTransform):
    """Bounds the next turn by the tokens that are left; without any the episode is truncated.

    Args:
        max_tokens: most tokens of an episode, query included.
    """

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self.max_tokens = max_tokens

    def left(self, episode: Episode) -> int:
        """Tokens that are left."""
        return self.max_tokens - episode.conversation.num_tokens(0)

    def before_turn(self, episode: Episode) -> None:
        """Bound the next turn."""
        left = self.left(episode)
        if left < 1:
            episode.truncate(MAX_LENGTH)
        else:
            episode.limit_turn(left)


class TextReward(EpisodeTransform):
    """Scores episodes by their last segments and the arguments of ``run``, their ``example``.

    Args:
        function: of all texts, or of one, see :func:`~.parts.scores_one_text`.
        calls: runs it.
    """

    def __init__(self, function: Callable[..., Any], calls: ConcurrentCalls) -> None:
        super().__init__()
        self.function = function
        self._of_one = scores_one_text(function)
        self._calls = calls

    def finish_batch(self, episodes: Sequence[Episode]) -> None:
        """Score episodes."""
        outcomes = self._one_by_one(episodes) if self._of_one else self._at_once(episodes)
        for episode, outcome in zip(episodes, outcomes, strict=True):
            episode.score.add_outcome(_REWARD, outcome, who=_REWARD)

    def _one_by_one(self, episodes: Sequence[Episode]) -> list[Outcome]:
        chains = [
            [functools.partial(self.function, e.last_message["content"], **(e.example or {}))]
            for e in episodes
        ]
        return [chain[0] for chain in self._calls.run(chains)]

    def _at_once(self, episodes: Sequence[Episode]) -> list[Outcome]:
        texts = [episode.last_message["content"] for episode in episodes]
        arguments = [episode.example or {} for episode in episodes]
        lists = {name: [own[name] for own in arguments] for name in arguments[0]}
        ((outcome,),) = self._calls.run([[functools.partial(self.function, texts, **lists)]])
        if outcome.error is not None:
            raise RuntimeError(
                f"TextEnvironment: reward_fn failed when it got the texts of {len(texts)} "
                "episodes as a list. If it scores one text, mark it with @row_reward, or annotate "
                "its first parameter with str."
            ) from outcome.error
        values = outcome.value
        if not hasattr(values, "__len__") or isinstance(values, str) or len(values) != len(texts):
            raise ValueError(
                f"TextEnvironment: reward_fn must return a list of {len(texts)} rewards, one per "
                f"text, got {values!r:.80}. If it scores one text, mark it with @row_reward, or "
                "annotate its first parameter with str."
            )
        return [Outcome(value) for value in values]
