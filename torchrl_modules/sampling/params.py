"""How tokens are drawn: one set of parameters for every engine, checked when it is made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from numbers import Integral, Real
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
        untempered_log_probs: report also the log-prob of each token under the model's own softmax,
            at temperature 1 and untruncated.
        entropy: report also the entropy of the distribution that each token is drawn from.

    Raises:
        ValueError: a value is of another kind or outside its range; the message names it.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] | None = None
    untempered_log_probs: bool = False
    entropy: bool = False

    def __post_init__(self) -> None:
        rules: dict[str, tuple[type, Callable[[Any], bool], str]] = {
            "max_new_tokens": (Integral, lambda x: x >= 1, "at least 1 and whole"),
            "temperature": (Real, lambda x: 0.0 <= x < inf, "finite and at least 0"),
            "top_p": (Real, lambda x: 0.0 < x <= 1.0, "in (0, 1]"),
            "top_k": (Integral, lambda x: x >= 0, "at least 0 and whole (0 keeps every token)"),
            "min_p": (Real, lambda x: 0.0 <= x <= 1.0, "in [0, 1]"),
        }
        for name, (kind, holds, rule) in rules.items():
            self._check(name, getattr(self, name), kind, holds, rule)
        for token in self.stop_token_ids or ():
            self._check("stop_token_ids", token, Integral, lambda x: x >= 0, "ids of tokens")

    @staticmethod
    def _check(name: str, value: Any, kind: type, holds: Callable[[Any], bool], rule: str) -> None:
        if isinstance(value, bool) or not isinstance(value, kind) or not holds(value):
            raise ValueError(f"SamplingParameters: {name} must be {rule}, got {value!r}.")

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p leave tokens out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def is_own_softmax(self) -> bool:
        """Whether the log-probs that are reported are those of the model's own softmax."""
        return self.temperature in (0.0, 1.0) and not self.truncates

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


def untruncated(params: SamplingParameters) -> SamplingParameters:
    """The same without top-k, top-p and min-p.

    Args:
        params: are not changed.
    """
    return replace(params, top_k=0, top_p=1.0, min_p=0.0)


def requested_sampling(
    who: str,
    generate_kwargs: Mapping[str, Any] | None,
    sampling: SamplingParameters | None,
    *,
    untempered_log_probs: bool,
    entropy: bool,
) -> SamplingParameters:
    """The sampling parameters that a policy was given, in either form.

    Args:
        who: the policy, named in the error.
        generate_kwargs: parameters by name, or
        sampling: the same as an object.
        untempered_log_probs: report them, whatever the parameters say.
        entropy: report it, whatever the parameters say.

    Raises:
        TypeError: a name is not known.
        ValueError: both forms are given, or a value is out of range.
    """
    if generate_kwargs is not None and sampling is not None:
        raise ValueError(f"{who}: give generate_kwargs or sampling, not both.")
    sampling = sampling or SamplingParameters.from_kwargs(dict(generate_kwargs or {}))
    return replace(
        sampling,
        untempered_log_probs=untempered_log_probs or sampling.untempered_log_probs,
        entropy=entropy or sampling.entropy,
    )
