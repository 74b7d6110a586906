"""One request to vLLM: checked token ids in, tokens and log-probs out."""

from array import array
from collections.abc import Sequence
from typing import Any

from torchrl_modules.engines.protocol import Generation
from torchrl_modules.sampling.params import SamplingParameters

from .runtime import VLLMNames


def check_prompt(prompt: Sequence[int], *, vocab_size: int, max_model_len: int) -> list[int]:
    """Check the token ids of one row.

    Args:
        prompt: token ids.
        vocab_size: ids are below it.
        max_model_len: most tokens of a prompt and its response together.

    Returns:
        The ids as a list of ``int``.

    Raises:
        ValueError: there are none, too many, or one is no token of the model.
    """
    try:
        ids = array("q", prompt).tolist()
    except (TypeError, OverflowError) as error:
        raise ValueError(f"The prompt is not a sequence of token ids: {error}.") from error
    if not ids:
        raise ValueError("The prompt is empty.")
    if len(ids) >= max_model_len:
        raise ValueError(
            f"The prompt has {len(ids)} tokens, which leaves no room for a response: "
            f"max_model_len is {max_model_len}."
        )
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"The prompt holds the token id {token}; the vocabulary has {vocab_size}."
            )
    return ids


def sampling_params(
    names: VLLMNames, params: SamplingParameters, max_new_tokens: int, *, stream: bool
) -> Any:
    """Translate sampling parameters for vLLM.

    Args:
        names: of vLLM.
        params: the distribution.
        max_new_tokens: the budget of the response.
        stream: report new tokens at every step, not all of them at the end.

    Returns:
        vLLM's ``SamplingParams``.

    Raises:
        ValueError: the budget is below 1, or something is to be reported that vLLM can't.
    """
    check_reported(params)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}.")
    kinds = names.RequestOutputKind
    return names.SamplingParams(
        max_tokens=max_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        stop_token_ids=list(params.stop_token_ids or ()),
        ignore_eos=params.stop_token_ids is not None,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=kinds.DELTA if stream else kinds.FINAL_ONLY,
    )


def check_reported(params: SamplingParameters) -> None:
    """Check that vLLM can report what is asked for.

    It gives one log-prob a token: that of the distribution that it drew from.

    Args:
        params: the distribution, and what to report of each token.

    Raises:
        ValueError: the entropy is asked for, or the untempered log-probs of a distribution that is
            tempered or truncated.
    """
    missing = ["entropy"] if params.entropy else []
    if params.untempered_log_probs and not params.is_own_softmax:
        missing.append("untempered_log_probs")
    if missing:
        raise ValueError(
            f"vLLM can't report {missing} with {params}: it gives one log-prob a token, of the "
            "distribution that was drawn from. Score the rows with TransformersWrapper(model, "
            "generate=False, ...) and the same option instead."
        )


def read_output(output: Any) -> Generation:
    """Read a request's output, or what is new in it.

    Args:
        output: vLLM's ``RequestOutput``.

    Returns:
        Tokens, log-probs and, once it is finished, why; the reason is empty before.
    """
    completion = output.outputs[0]
    ids = list(completion.token_ids)
    log_probs = list(completion.logprobs.logprobs) if ids else []
    reason = completion.finish_reason or ""
    error = None
    if reason not in ("", "stop", "length", "abort"):
        error = f"vLLM ended the request: {reason} {completion.stop_reason}."
        reason = "error"
    return Generation(ids, log_probs, reason, error)
