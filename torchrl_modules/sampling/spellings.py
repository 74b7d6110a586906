"""Sampling parameters as users of vLLM, TRL and Transformers write them."""

from collections.abc import Collection, Mapping
from typing import Any, Final

_ALIASES: Final = {
    "max_tokens": "max_new_tokens",
    "max_completion_length": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
_SEVERAL: Final = "Use num_samples of the wrapper: several responses per prompt, each a row."
_BEAMS: Final = (
    "Beam search draws from no distribution whose log-probs could be trained on. "
    "Use num_samples of the wrapper, and choose with objectives.TopKRewardSelector."
)
_TOKENS: Final = (
    "Policies write the ids that were drawn, with their log-probs; score other tokens with "
    "TransformersWrapper(model, generate=False)."
)
# What is done in another way here: the value that changes nothing, and what to write instead.
_INSTEAD: Final[dict[str, tuple[Any, str]]] = {
    "n": (1, _SEVERAL),
    "num_return_sequences": (1, _SEVERAL),
    "best_of": (1, f"{_SEVERAL} Choose with objectives.TopKRewardSelector."),
    "use_beam_search": (False, _BEAMS),
    "num_beams": (1, _BEAMS),
    "do_sample": (True, "Use temperature=0 for the most likely token."),
    "logprobs": (0, _TOKENS),
    "prompt_logprobs": (None, _TOKENS),
    "detokenize": (False, _TOKENS),
    "include_stop_str_in_output": (True, "The token that completes a stop text is always kept."),
    "bad_words": (None, "Use logit_bias={token: -100}."),
}


def read_kwargs(kwargs: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The same under the names in ``known``; ``None`` is left out, except where it has a meaning.

    Raises:
        TypeError: a name is not known, or what it asks for is written in another way here.
        ValueError: a name is given twice under two spellings.
    """
    settings: dict[str, Any] = {}
    for name, value in kwargs.items():
        target = _ALIASES.get(name, name)
        if name in _INSTEAD:
            nothing, advice = _INSTEAD[name]
            if value is None or value == nothing:
                continue
            raise TypeError(f"SamplingParameters does not take {name}={value!r}. {advice}")
        if target not in known:
            raise TypeError(
                f"SamplingParameters has no parameter {name!r}; it has {sorted(known)}."
            )
        if target in settings:
            raise ValueError(f"SamplingParameters: {target} is given twice, once as {name!r}.")
        if value is not None:
            settings[target] = _plain(target, value)
    return settings


def _plain(name: str, value: Any) -> Any:
    if name == "stop":
        return (value,) if isinstance(value, str) else tuple(value)
    if name == "stop_token_ids":
        return tuple(value)
    if name == "logit_bias":  # JSON has texts for keys
        return {int(token): bias for token, bias in value.items()}
    return value
