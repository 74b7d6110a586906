"""Spellings of sampling parameters by users of vLLM, TRL and Transformers."""

from collections.abc import Callable
from typing import Any, Final

ALIASES: Final = {
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
INSTEAD: Final[dict[str, tuple[Any, str]]] = {
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


# Settings as they are kept: JSON has lists, and texts for keys.
PLAIN: Final[dict[str, Callable[[Any], Any]]] = {
    "stop": lambda value: (value,) if isinstance(value, str) else tuple(value),
    "stop_token_ids": tuple,
    "logit_bias": lambda value: {int(token): bias for token, bias in value.items()},
}
