"""How tokens are drawn: one set of parameters for every engine, checked when it is made."""

from dataclasses import dataclass
from typing import Any

# Spellings of other libraries that users bring along.
_ALIASES = {"max_tokens": "max_new_tokens", "n": None, "num_return_sequences": None}


@dataclass(frozen=True, kw_only=True)
class SamplingParameters:
    """The distribution that tokens are drawn from, and when to stop.

    Args:
        max_new_tokens: most tokens drawn in one turn, the stop token included.
        temperature: logits are divided by it; 0 takes the most likely token.
        top_p: keep the smallest set of tokens with at least this probability, in (0, 1].
        top_k: keep this many most likely tokens; 0 keeps all.
        min_p: keep tokens with at least this fraction of the most likely one's probability.
        stop_token_ids: tokens that end a turn; the one drawn is part of the response. ``None``
            leaves the choice to the chat template.

    Raises:
        ValueError: a value is outside its range; the message names it.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        ranges = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (0.0 <= self.temperature < float("inf"), "finite and at least 0"),
            "top_p": (0.0 < self.top_p <= 1.0, "in (0, 1]"),
            "top_k": (self.top_k >= 0, "at least 0 (0 keeps every token)"),
            "min_p": (0.0 <= self.min_p <= 1.0, "in [0, 1]"),
        }
        for name, (valid, rule) in ranges.items():
            if not valid:
                raise ValueError(
                    f"SamplingParameters: {name} must be {rule}, got {getattr(self, name)!r}."
                )

    @classmethod
    def from_kwargs(cls, kwargs: dict[str, Any]) -> "SamplingParameters":
        """Read a ``generate_kwargs`` dictionary, vLLM's ``max_tokens`` included.

        Args:
            kwargs: names and values of this class, or ``max_tokens``.

        Raises:
            TypeError: a name is not known; the message lists those that are.
            ValueError: a name is given twice under two spellings, or a value is out of range.
        """
        known = set(cls.__dataclass_fields__)
        given: dict[str, Any] = {}
        for name, value in kwargs.items():
            target = _ALIASES.get(name, name)
            if target not in known:
                raise TypeError(
                    f"SamplingParameters has no parameter {name!r}; it has {sorted(known)}."
                    + (" Use num_samples of the wrapper." if name in _ALIASES else "")
                )
            if target in given:
                raise ValueError(f"SamplingParameters: {target} is given twice, once as {name!r}.")
            given[target] = tuple(value) if target == "stop_token_ids" and value else value
        return cls(**given)
