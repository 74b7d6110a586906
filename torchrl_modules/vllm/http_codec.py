"""One row of a batch as vLLM's server takes it, and what it answers."""

import math
from collections.abc import Collection, Sequence
from typing import Any

from torchrl_modules.engines.protocol import Generation, VersionSpan
from torchrl_modules.sampling.params import SamplingParameters


class StaleWeights(RuntimeError):
    """Tokens were drawn by other weights than the engine was given."""


def version_number(label: str) -> int:
    """The version that a server's label means; one that was given none has the first weights.

    Args:
        label: of the server's weights.
    """
    return int(label) if label.isdecimal() else 0


def request_body(
    ids: Sequence[int], params: SamplingParameters, *, budget: int, label: str, seed: int | None
) -> dict[str, Any]:
    """What is sent to ``/inference/v1/generate``.

    Args:
        ids: token ids of the prompt.
        params: the distribution.
        budget: most tokens of the response.
        label: of the weights; cached prefixes of others are never met.
        seed: makes the draw repeat, for the same weights.
    """
    sampling = {
        "max_tokens": budget,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "stop_token_ids": list(params.stop_token_ids or ()),
        "ignore_eos": params.stop_token_ids is not None,
        "logprobs": 0,
        "detokenize": False,
    }
    if seed is not None:
        sampling["seed"] = seed
    return {"token_ids": list(ids), "cache_salt": label, "sampling_params": sampling}


def read_answer(answer: Any, labels: Collection[str]) -> Generation:
    """Read a response.

    Args:
        answer: the server's, parsed.
        labels: of the weights that may have drawn it.

    Returns:
        The generation; ``finish_reason="error"`` if the answer is none, or holds a log-prob that is
        no finite number.

    Raises:
        StaleWeights: other weights drew it.
    """
    try:
        choice = answer["choices"][0]
        ids = [int(token) for token in choice["token_ids"]]
        log_probs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
        spans = [(s["version"], s["start"], s["end"]) for s in choice["weight_versions"] or ()]
        reason = choice["finish_reason"]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        return _refused(f"the server's answer is no generation ({error!r}): {str(answer)[:200]}")
    other = sorted({version for version, _, _ in spans} - set(labels))
    if other:
        raise StaleWeights(
            f"VLLMServerEngine: tokens were drawn by the weights {other}, not by "
            f"{sorted(labels)}. The server was restarted, or another client updates it. Send "
            "the weights again."
        )
    if len(ids) != len(log_probs) or not all(map(math.isfinite, log_probs)):
        return _refused(
            f"the server gave {len(log_probs)} log-probs for {len(ids)} tokens, or one that is no "
            "finite number"
        )
    versions = [VersionSpan(version_number(label), start, end) for label, start, end in spans]
    return Generation(ids, log_probs, reason, versions=versions)


def _refused(message: str) -> Generation:
    return Generation([], [], "error", message)
