"""A long history is folded into a summary, and the episode goes on from there."""

import functools
from collections.abc import Callable
from typing import Any

from torchrl_data.checks import POSITIVE, check_counts, check_numbers
from torchrl_data.messages import Message
from torchrl_envs.entries.observations import with_observation
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeTransform
from torchrl_envs.tool_results import environment_error


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

    Example:
        >>> data = DataLoadingPrimer([{"prompt": "Count."}])
        >>> again = AddThinkingPrompt(lambda row: True, "Go on.")
        >>> fold = FoldContext(lambda messages: "You said one.", max_turns=1, keep_last=1)
        >>> env = ChatEnv(batch_size=(1,)).append_transform(data).append_transform(again)
        >>> env = env.append_transform(fold)
        >>> out = env.step(env.reset().set("text_response", ["One."]))["next"]
        >>> [message["content"].split() for message in out["history"].prompt.to_chats()[0]]
        [['Count.', 'You', 'said', 'one.'], ['Go', 'on.']]
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
        if max_turns is None and max_tokens is None:
            raise ValueError("FoldContext needs max_turns or max_tokens, got neither.")
        check_counts("FoldContext", max_turns=max_turns, max_tokens=max_tokens)
        check_counts("FoldContext", 0, keep_last=keep_last)
        check_numbers("FoldContext", POSITIVE, timeout_s=timeout_s)
        self.summarize = summarize
        self.max_turns = max_turns
        self.max_tokens = max_tokens
        self.keep_last = keep_last
        self.timeout_s = timeout_s

    async def before_turn(self, episode: Episode) -> None:
        """Fold the history of an episode if it is long enough."""
        messages, held = episode.messages, episode.memory.get(self.key)
        if held is None:
            prompt, later = messages[: episode.first_response], messages[episode.first_response :]
        else:  # the prompt as it was at first, and what was said since: an earlier summary first
            prompt, earlier = held
            after = messages[len(with_observation(prompt, earlier)) :]
            later = [{"role": "user", "content": earlier}, *after]
        folded = later[: len(later) - self.keep_last]
        num_turns = sum(message["role"] == "assistant" for message in later)
        by_turns = self.max_turns is not None and num_turns >= self.max_turns
        num_tokens = episode.conversation.num_tokens(0)
        by_tokens = self.max_tokens is not None and num_tokens >= self.max_tokens
        if not folded or not (by_turns or by_tokens):
            return
        call = functools.partial(self.summarize, folded)
        (outcome,) = await self.call(call, timeout_s=self.timeout_s)
        error, summary = outcome.error, outcome.value
        if error is None and not (isinstance(summary, str) and summary):
            error = TypeError(f"it returned {summary!r:.80}, and not a text")
        if error is not None:
            episode.stop_reason = environment_error(error, "FoldContext")
            return
        episode.memory = {**episode.memory, self.key: (prompt, summary)}
        episode.rewrite([*with_observation(prompt, summary), *later[len(folded) :]])
