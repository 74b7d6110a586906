"""A long history is folded into a summary, and the episode goes on from there."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torchrl_data.conversation.record import Message
from torchrl_data.stop_reasons import ENVIRONMENT_ERROR
from torchrl_envs.entries.observations import with_observation
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeTransform
from torchrl_envs.tool_calls.results import error_line


class FoldContext(EpisodeTransform):
    """Replaces what was said since the prompt by a summary, before a turn, when it gets long.

    The prompt (everything before the policy's first turn) stays, the summary is added to its last
    user message, and the newest messages stay as they are. What the policy has sampled so far is a
    row of its own, see :meth:`Episode.rewrite`: each sampled token is trained once, and all rows of
    an episode share its reward, group and advantage.

    Append it before a :class:`~torchrl_envs.TokenBudget`, which counts what is left after folding.

    Args:
        summarize: a function, sync or ``async``, of the messages that are folded (the first is an
            earlier summary, if there is one); returns a text. One that raises, misses its deadline
            or returns something else ends its episode alone, truncated, with the reason.
        max_turns: fold once the policy has taken so many turns since the prompt, or the last time.
        max_tokens: fold once the conversation has so many tokens, the prompt's included; those of
            messages that nobody has encoded yet are not counted.
        keep_last: newest messages that stay as they are, 0 or more.
        timeout_s: deadline of the function, in seconds.

    Raises:
        TypeError: ``summarize`` can't be called.
        ValueError: neither bound is given, or a number is out of range.
    """

    def __init__(
        self,
        summarize: Callable[[list[Message]], Any],
        *,
        max_turns: int | None = None,
        max_tokens: int | None = None,
        keep_last: int = 1,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__()
        if not callable(summarize):
            raise TypeError(f"FoldContext: summarize must be a function, got {summarize!r:.80}.")
        bounds = [bound for bound in (max_turns, max_tokens) if bound is not None]
        if not bounds or min(bounds) < 1 or keep_last < 0 or not timeout_s > 0:
            raise ValueError(
                "FoldContext needs max_turns or max_tokens, each at least 1, keep_last of 0 or "
                f"more and a positive timeout_s; got {max_turns}, {max_tokens}, {keep_last} and "
                f"{timeout_s!r}."
            )
        self.summarize = summarize
        self.max_turns = max_turns
        self.max_tokens = max_tokens
        self.keep_last = keep_last
        self.timeout_s = timeout_s

    async def before_turn(self, episode: Episode) -> None:
        """Fold the history of an episode if it is long enough."""
        prompt, later = self._split(episode)
        folded = later[: len(later) - self.keep_last]
        if not folded or not self._is_long(episode, later):
            return
        call = functools.partial(self.summarize, folded)
        (outcome,) = await self.call(call, timeout_s=self.timeout_s)
        error, summary = outcome.error, outcome.value
        if error is None and not (isinstance(summary, str) and summary):
            error = TypeError(f"it returned {summary!r:.80}, and not a text")
        if error is not None:
            episode.stop_reason = f"{ENVIRONMENT_ERROR}: FoldContext: {error_line(error)}"
            return
        episode.memory = {**episode.memory, self.key: (prompt, summary)}
        episode.rewrite([*with_observation(prompt, summary), *later[len(folded) :]])

    def _split(self, episode: Episode) -> tuple[list[Message], list[Message]]:
        """The prompt as it was at first, and what was said since: an earlier summary first."""
        messages, folded = episode.messages, episode.memory.get(self.key)
        if folded is None:
            first = episode.first_response
            return messages[:first], messages[first:]
        prompt, summary = folded
        after = messages[len(with_observation(prompt, summary)) :]
        return prompt, [{"role": "user", "content": summary}, *after]

    def _is_long(self, episode: Episode, later: Sequence[Message]) -> bool:
        num_turns = sum(message["role"] == "assistant" for message in later)
        by_turns = self.max_turns is not None and num_turns >= self.max_turns
        num_tokens = episode.conversation.num_tokens(0)
        return by_turns or (self.max_tokens is not None and num_tokens >= self.max_tokens)
