"""A budget of tokens for a whole episode, known before each turn.

Shape legend: B rows.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from torchrl_data.conversation import Conversations
from torchrl_data.messages import Message
from torchrl_data.stop_reason import StopReason
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeTransform

if TYPE_CHECKING:
    from torchrl_envs.episode.episode_transform import EpisodeEnvironment


CUT_MARK = "\n[... cut: out of tokens]"
"""Ends an observation that was cut."""
_MAX_CUTS = 8


class TokenBudget(EpisodeTransform):
    """Bounds an episode's tokens: the policy's turns and everything between them.

    What counts is all that comes after the prompt: turns, tool results, other messages and what the
    chat template writes around them. Before each turn the policy is told how many tokens are left
    (``max_new_tokens``). Observations that would leave too little for a turn are cut, the longest
    first, with a mark, before they enter the conversation; the environment has answered in full, so
    its state is what the model is told about. When not even that leaves enough, the row ends,
    truncated: ``stop_reason`` is ``"token_budget"``, or ``"context_length"`` where the model's
    length was the bound. Rows of the data whose prompt leaves no turn within ``max_model_len`` are
    left out by a :class:`~torchrl_envs.DataLoadingPrimer`, once a collector has named the policy.
    Where nothing leaves it out, such a prompt ends its row before any turn, and the row has no
    reward.

    Args:
        max_tokens: of a row of an episode (usually its only one), without the prompt; ``None`` for
            no bound but the model's.
        max_model_len: most tokens of a row, prompt included: what the policy's engine takes.
        min_turn_tokens: no turn begins with fewer tokens left.
        encoder: spells conversations out as the policy does (``policy.encoder``); that of the
            ``ChatEnv``, which then needs a tokenizer, when not given.

    Raises:
        ValueError: nothing is bounded, or a number is too small.

    Example:
        >>> data = DataLoadingPrimer([{"prompt": "2 + 2?"}])
        >>> env = ChatEnv(batch_size=(2,), tokenizer=tokenizer).append_transform(data)
        >>> env = env.append_transform(TokenBudget(max_tokens=32))
        >>> env.reset()["max_new_tokens"]  # int64 [B]: what the next turn may have
        tensor([32, 32])
    """

    keeps_prompt = True

    def __init__(
        self,
        max_tokens: int | None = None,
        *,
        max_model_len: int | None = None,
        min_turn_tokens: int = 16,
        encoder: ConversationEncoder | None = None,
    ) -> None:
        super().__init__()
        bounds = [bound for bound in (max_tokens, max_model_len) if bound is not None]
        if not bounds or not 1 <= min_turn_tokens <= min(bounds):
            raise ValueError(
                "TokenBudget needs max_tokens or max_model_len, each at least min_turn_tokens, "
                f"which is at least 1; got {max_tokens}, {max_model_len} and {min_turn_tokens}."
            )
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len
        self.min_turn_tokens = min_turn_tokens
        if max_model_len is not None:
            self.longest_prompt = max_model_len - min_turn_tokens
        self.encoder: ConversationEncoder | None = encoder

    changeable = frozenset({"encoder"})

    def extra_repr(self) -> str:
        """Bounds of the budget, in tokens."""
        return f"max_tokens={self.max_tokens}, max_model_len={self.max_model_len}"

    def check(self, env: "EpisodeEnvironment") -> None:
        """There must be something that counts tokens.

        Raises:
            ValueError: neither the transform has an encoder nor the environment a tokenizer.
        """
        if self.encoder is None:
            if getattr(env.base_env, "tokenizer", None) is None:
                raise ValueError(
                    "TokenBudget counts tokens: give it encoder=policy.encoder, or tokenizer= to "
                    "the ChatEnv."
                )
            self.encoder = cast("ConversationEncoder", env.base_env.encoder)

    def before_turn(self, episode: Episode) -> None:
        """Say how many tokens are left; cut what does not fit, and end what has none left."""
        assert self.encoder is not None
        waiting = episode.conversation
        fitted = self.encoder.encode_rows(waiting).conversations
        excess = self.min_turn_tokens - self._left(fitted).num_tokens
        # What waited is cut so that a turn fits. An opening is the prompt's business, not an
        # observation's.
        if excess > 0 and waiting.position(0).num_encoded:
            messages = waiting.waiting_messages(0)
            contents = [m["content"] if isinstance(m["content"], str) else "" for m in messages]
            ids = self.encoder.guard.encode_texts(contents)
            for _ in range(_MAX_CUTS):
                cap = _cap([len(row) for row in ids], excess)
                shorter: list[Message] = []
                for message, row in zip(messages, ids, strict=True):
                    if len(row) > cap:
                        # Half a character at the cut is dropped.
                        kept = self.encoder.decode([list(row[:cap])])[0].rstrip("\ufffd")
                        message = {**message, "content": kept + CUT_MARK}
                    shorter.append(message)
                fitted = self.encoder.encode_waiting(waiting.replace_waiting([shorter]))
                missing = self.min_turn_tokens - self._left(fitted).num_tokens
                if missing <= 0 or cap == 0:
                    break
                excess += missing
        left = self._left(fitted)
        if left.num_tokens < self.min_turn_tokens:
            episode.truncate(left.reason)
            episode.stop_limit = left.limit
        else:
            episode.conversation = fitted
            episode.limit_turn(*left)

    def _left(self, conversation: Conversations) -> "_Left":
        """Return what the tighter of the two bounds leaves."""
        total = conversation.num_tokens(0)
        bounds = []
        if self.max_tokens is not None:
            spent = total - conversation.num_tokens_before_policy(0)
            left = self.max_tokens - spent
            bounds.append(_Left(left, StopReason.TOKEN_BUDGET.value, self.max_tokens))
        if self.max_model_len is not None:
            left = self.max_model_len - total
            bounds.append(_Left(left, StopReason.CONTEXT_LENGTH.value, self.max_model_len))
        return min(bounds)


class _Left(NamedTuple):
    num_tokens: int
    reason: str
    """Why the episode is over when there are none."""
    limit: int


def _cap(lengths: Sequence[int], excess: int) -> int:
    """The longest that a text may be, so that all of them lose so many tokens in total."""
    wanted = max(0, sum(lengths) - excess)
    caps = range(1, max(lengths, default=0) + 1)
    return bisect_right(caps, wanted, key=lambda cap: sum(min(own, cap) for own in lengths))
