"""Events of an episode in plain text: tools are called, room runs out, it is scored."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torchrl_envs.concurrency.calls import ConcurrentCalls
from torchrl_envs.concurrency.outcome import Outcome
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeTransform
from torchrl_envs.episode.tool_source import Answer, Job, ToolSource
from torchrl_envs.tool_results import result_text

from .parts import Tool, scores_one_text
from .requests import RequestSyntax

_log = logging.getLogger(__name__)

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
        max_result_chars: int,
        timeout_s: float,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        self.tools, self.syntax, self.max_result_chars = tools, syntax, max_result_chars

    def read_turn(self, episode: Episode, text: str) -> Sequence[Job | Answer]:
        """The request of a turn that did not end its episode."""
        del episode
        name, query = self.syntax.parse(text) or ("", "")
        if name in self.tools:
            return [Job(functools.partial(self.tools[name], query), self._phrase, self.timeout_s)]
        wrong = f"Unknown tool {name}." if name else f"Unknown tool call: {text}"
        return [self._answer(wrong, is_error=True)]

    def _phrase(self, outcome: Outcome) -> Answer:
        failed = outcome.error is not None
        result = f"Tool error: {outcome.error}" if failed else result_text(outcome)
        return self._answer(result, is_error=failed)

    def _answer(self, result: str, *, is_error: bool) -> Answer:
        if len(result) > self.max_result_chars:
            kept = max(self.max_result_chars - len(_CUT), 0)
            result = f"{result[:kept]}{_CUT}"[: self.max_result_chars]
        content = f"{result}{self.syntax.response}"
        return Answer({"role": "tool", "content": content}, is_error=is_error)


class TextReward(EpisodeTransform):
    """Scores episodes by their last segments and the arguments of ``run``, their ``example``.

    Args:
        function: of all texts, or of one, see :func:`scores_one_text`; or it shows when asked.
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
        values = outcome.value
        if _is_list(values) and len(values) == len(texts):
            return [Outcome(value) for value in values]
        each = self._one_by_one(episodes)
        scalars = [one for one in each if not (one.error or _is_list(one.value))]
        if (scalars and not _is_list(values)) or "'list'" in str(outcome.error):
            told = "reward_fn gave no list of %d rewards: it gets one text at a time."
            _log.warning(told, len(texts), exc_info=outcome.error)
            self._of_one = True
            return each
        found = "failed" if outcome.error is not None else f"returned {values!r:.80}"
        raise ValueError(
            f"TextEnvironment: reward_fn {found} when it got the texts of {len(texts)} episodes as "
            "a list. It must return a list of as many rewards; one that scores one text returns a "
            "number, and can be marked with @row_reward."
        ) from outcome.error


def _is_list(value: Any) -> bool:
    return isinstance(value, str) or (hasattr(value, "__len__") and getattr(value, "ndim", 1) > 0)
