"""What an inference engine does for a policy: token ids in, token ids out, weights replaced."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from torchrl_modules.sampling.params import SamplingParameters


class EngineDied(RuntimeError):
    """An engine is gone, or makes no progress; what it had in flight has to be asked for again.

    Args:
        message: which engine, and what was seen.
        results: one per prompt of the call that failed: the generation, where it was finished
            before, ``None`` where it was in flight.
    """

    def __init__(
        self, message: str, *, results: "Sequence[Generation | None] | None" = None
    ) -> None:
        super().__init__(message)
        self.results = results


class VersionSpan(NamedTuple):
    """Tokens of a response, from ``start`` to before ``end``, drawn by one version."""

    version: int
    start: int
    end: int


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
    versions: Sequence[VersionSpan] = ()
    """Which weights drew which tokens, in order and without gaps, when the engine knows."""

    def joined(self, more: "Generation") -> "Generation":
        """This beginning of a response and what came next, with its end."""
        return more._replace(ids=self.ids + more.ids, log_probs=self.log_probs + more.log_probs)

    def token_versions(self, otherwise: int) -> list[int]:
        """The version that drew each token.

        Args:
            otherwise: the version of all of them, when the engine did not say.
        """
        if not self.versions:
            return [otherwise] * len(self.ids)
        return [span.version for span in self.versions for _ in range(span.start, span.end)]


class Engine(Protocol):
    """Draws tokens. One implementation per inference library.

    It may have ``vocab_size`` (token ids are below it) and ``max_model_len`` (most tokens of a
    prompt and its response); without them the tokenizer's length counts, and no limit. One that
    reads images has ``images``, which is not ``None``, and ``generate`` takes ``images=``: those of
    each prompt in order, in base 64. It is given only where a row has any.
    """

    @property
    def version(self) -> int:
        """Of the weights that serve: 0 at first, and higher after each update."""
        ...

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

        Raises:
            EngineDied: the engine is gone or stuck.
        """
        ...

    def update_weights(
        self, state_dict: Mapping[str, Tensor], *, version: int | None = None
    ) -> None:
        """Replace the weights, all or none.

        Args:
            state_dict: parameter name (Transformers' names) to value.
            version: the number of these weights, above the present one; ``None`` counts on.

        Raises:
            ValueError: a name, shape or value is wrong, or the version does not go up; the old
                weights keep serving.
        """
        ...
