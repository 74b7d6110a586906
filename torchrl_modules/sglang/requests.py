"""A request to a server of SGLang: checked token ids in, tokens and log-probs out."""

from collections.abc import Sequence
from typing import Any

from torchrl_data.sampling_masks import sets_of_ids
from torchrl_modules.engines.engine import Generation, VersionSpan
from torchrl_modules.engines.version_labels import check_labels, version_number
from torchrl_modules.sampling.parameters import SamplingParameters


def asks_for_masks(params: SamplingParameters) -> bool:
    """Return whether the tokens that a truncation leaves are asked for.

    They always are where there is a truncation: SGLang tells the log-prob among these tokens beside
    them alone.
    """
    return params.truncates


def sampling_settings(
    params: SamplingParameters, budget: int, seed: int | None, most_kept: int
) -> dict[str, Any]:
    """The fields of SGLang's ``SamplingParams``; `ValueError` if the budget is below 1.

    Args:
        params: the distribution.
        budget: most tokens.
        seed: of the row.
        most_kept: so many tokens that a truncation left can be told.
    """
    if budget < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {budget}.")
    ends = params.stop_token_ids
    fields: dict[str, Any] = {
        "max_new_tokens": budget,
        "temperature": params.temperature,
        "top_p": params.top_p,
        # Masks are given with a top_k alone. Where it is ours, `read_drawn` sees to it that it
        # has left out no token.
        "top_k": params.top_k or (most_kept if asks_for_masks(params) else -1),
        "min_p": params.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop_token_ids": list(ends or ()),
        # It would leave out `stop_token_ids` as well.
        "ignore_eos": ends == (),
        "no_stop_trim": True,
    }
    if params.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    if seed is not None:
        fields["sampling_seed"] = seed
    return fields


def check_told(params: SamplingParameters, *, has_masks: bool = True) -> None:
    """Check that SGLang can report what is asked for.

    Args:
        params: the distribution, and what to report of each token.
        has_masks: it always tells the tokens that a truncation left.

    Raises:
        ValueError: it can't.
    """
    del has_masks
    missing = [name for name in ("entropy", "routed_experts") if getattr(params, name)]
    if params.untempered_log_probs and not params.is_own_softmax:
        missing.append("untempered_log_probs")
    if missing:
        raise ValueError(
            f"SGLang is not asked for {missing} with {params}: it gives one log-prob a token, of "
            "the distribution that was drawn from. Score the rows with TransformersWrapper(model, "
            "generate=False, ...) and the same option instead."
        )


def check_drawn(params: SamplingParameters, most_kept: int, *, who: str) -> None:
    """Check that SGLang draws from a distribution as it is meant here.

    Args:
        params: the distribution.
        most_kept: so many tokens that a truncation left can be told.
        who: takes it; named in the error.

    Raises:
        ValueError: it does not.
    """
    if params.repetition_penalty != 1.0:
        raise ValueError(
            f"{who}: SGLang's repetition_penalty leaves the prompt's tokens out, so what is scored "
            "would not be what is drawn. Use presence_penalty or frequency_penalty."
        )
    if params.min_tokens:
        raise ValueError(
            f"{who}: a server of SGLang that is given token ids has no tokenizer, without which "
            "it takes no min_tokens. Leave min_tokens out."
        )
    if params.truncates and params.temperature == 0:
        raise ValueError(
            f"{who}: at temperature 0 SGLang reports the log-prob of the whole softmax, and not of "
            "what top_k, top_p and min_p leave. Leave them out: they change no token."
        )
    if params.top_k > most_kept:
        raise ValueError(
            f"{who}: the server tells at most {most_kept} tokens that were left, and top_k is "
            f"{params.top_k}. Start it with --sampling-mask-max-tokens {params.top_k}."
        )
    if params.top_k and params.top_p < 1.0 and not params.sampling_mask:
        raise ValueError(
            f"{who}: SGLang takes the probability of top_p before top_k leaves tokens out, and "
            "here it is taken after, so that the two may leave different tokens. Use one of them, "
            "or sampling_mask=True, with which the tokens that were left go with the row."
        )


def read_drawn(
    answer: Any,
    labels: Sequence[str],
    params: SamplingParameters,
    vocab_size: int,
    most_kept: int,
) -> Generation:
    """Read the answer of ``/generate``.

    Args:
        answer: as JSON.
        labels: the weights that the client knows.
        params: what was asked for.
        vocab_size: token ids are below it.
        most_kept: so many tokens that a truncation left can be told.

    Raises:
        StaleWeights: other weights drew it.
    """
    try:
        about = answer["meta_info"]
        end = about["finish_reason"]
        if end["type"] == "abort":
            return Generation([], [], "error", f"SGLang ended the request: {end.get('message')}")
        log_probs = [float(each[0]) for each in about["output_token_logprobs"]]
        ids = [int(each[1]) for each in about["output_token_logprobs"]]
        told = about["weight_versions"]
        spans = [(str(span["version"]), int(span["start"]), int(span["end"])) for span in told]
        masks: list[list[int]] = []
        if asks_for_masks(params):
            masks = [list(map(int, kept)) for kept in about["output_token_sampling_mask"]]
            log_probs = [float(value) for value in about["output_token_sampling_logprobs"]]
        if not len(ids) == len(log_probs) or (masks and len(masks) != len(ids)):
            raise ValueError(f"{len(ids)} tokens, {len(log_probs)} log-probs, {len(masks)} masks")
        every = masks or [range(vocab_size)] * len(ids)
        sets = sets_of_ids(every, vocab_size) if params.sampling_mask else []
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        message = f"the server's answer is no generation ({error!r}): {str(answer)[:200]}"
        return Generation([], [], "error", message)
    check_labels({version for version, _, _ in spans}, labels, who="SGLangServerEngine")
    is_cut = not params.top_k and most_kept < vocab_size
    if is_cut and any(len(kept) >= most_kept for kept in masks):
        message = (
            f"top_p and min_p leave {most_kept} tokens or more, and the server tells no more. "
            f"Start it with --sampling-mask-max-tokens {vocab_size}, or narrow them."
        )
        return Generation([], [], "error", message)
    versions = [VersionSpan(version_number(label), start, end) for label, start, end in spans]
    drawn = Generation(ids, log_probs, str(end["type"]), versions=versions if ids else ())
    if params.sampling_mask:
        drawn = drawn._replace(sampling_masks=sets)
    if params.kept_counts:
        counts = [float(len(kept)) for kept in masks] or [float(vocab_size)] * len(ids)
        drawn = drawn._replace(kept_counts=counts)
    return drawn
