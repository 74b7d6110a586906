"""What an inference engine does for a policy: token ids in, token ids out, weights replaced."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from .sampling import SamplingParameters


class Generation(NamedTuple):
    """One sampled response."""

    ids: list[int]
    """The sampled tokens, stop token included; empty when the row could not be generated."""
    log_probs: list[float]
    """One per token, in nats, of the distribution that it was drawn from."""
    finish_reason: str
    """``"stop"``: a stop token was drawn; ``"length"``: the budget ran out; ``"error"``."""
    error: str | None = None
    """What went wrong with this row, when ``finish_reason`` is ``"error"``."""
    untempered_log_probs: Sequence[float] = ()
    """One per token, of the model's own softmax; only when asked for."""
    entropies: Sequence[float] = ()
    """One per token, in nats, of the distribution that it was drawn from; only when asked for."""


class Engine(Protocol):
    """Draws tokens. One implementation per inference library."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        *,
        max_new_tokens: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Draw one response per prompt.

        Args:
            prompts: token ids of each row. A row that cannot be served (empty, too long, an id
                outside the vocabulary) comes back with ``finish_reason="error"``; the others are
                generated.
            params: the distribution; ``stop_token_ids`` is set.
            max_new_tokens: a budget per row that overrides the one in ``params``.

        Returns:
            One generation per prompt, in order.
        """
        ...

    def update_weights(self, state_dict: Mapping[str, Tensor]) -> None:
        """Replace the weights, all or none.

        Args:
            state_dict: parameter name (Transformers' names) to value.

        Raises:
            ValueError: a name, shape or value is wrong; the old weights keep serving.
        """
        ...
