"""A request to vLLM, here or by HTTP: checked token ids in, tokens and log-probs out."""

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

from torchrl_data.sampling_masks import sets_of_ids
from torchrl_modules.engines.engine import Generation, VersionSpan
from torchrl_modules.engines.version_labels import check_labels, version_number
from torchrl_modules.sampling.parameters import SamplingParameters


class MaskSource(NamedTuple):
    """The form in which an engine tells the tokens that a truncation left."""

    vocab_size: int
    """Token ids are below it."""
    are_returned: bool = False
    """As sampling masks; otherwise they are read off the log-probs, minus infinity where a token
    was left out."""

    def num_log_probs(self, params: SamplingParameters) -> int:
        """Log-probs that have to be asked for beside that of each token; all are -1."""
        if self.are_returned or not params.sampling_mask:
            return 0
        # One more than can be left: were it left as well, the set would not be known.
        return params.top_k + 1 if 0 < params.top_k < self.vocab_size - 1 else -1

    def read(self, completion: Any) -> list[bytes]:
        """Read the set of each token of a completion.

        Raises:
            ValueError: tokens beyond ``top_k`` are as likely as the last of them, so that which
                were left is not known.
        """
        if self.are_returned:
            return sets_of_ids(completion.sampling_mask.token_ids, self.vocab_size)
        flat, rows = completion.logprobs, []
        for position, (start, end) in enumerate(
            zip(flat.start_indices, flat.end_indices, strict=True)
        ):
            pairs = zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True)
            kept = {token for token, value in pairs if value > -inf}
            # The token itself comes first, and once more where it is among the most likely.
            if end - start - 1 < self.vocab_size and len(kept) >= end - start - 1:
                raise ValueError(
                    f"the tokens that were left for token {position} are not known: more than "
                    "top_k are equally likely"
                )
            rows.append(sorted(kept))
        return sets_of_ids(rows, self.vocab_size)


def sampling_fields(
    params: SamplingParameters, budget: int, seed: int | None, num_log_probs: int = 0
) -> dict[str, Any]:
    """The fields of vLLM's ``SamplingParams``; `ValueError` if the budget is below 1."""
    if budget < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {budget}.")
    return {
        "max_tokens": budget,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": dict(params.logit_bias) or None,
        # A smaller budget ends the turn before a stop token is allowed, as it should.
        "min_tokens": min(params.min_tokens, budget),
        "stop_token_ids": list(params.stop_token_ids or ()),
        "ignore_eos": params.stop_token_ids is not None,
        "seed": seed,
        "logprobs": num_log_probs,
        "detokenize": False,
    }


def own_ends(model_config: Any) -> list[int]:
    """End tokens by a model's generation config, which vLLM reads whatever it is told."""
    ends = model_config.try_get_generation_config().get("eos_token_id")
    return [ends] if isinstance(ends, int) else list(ends or ())


def check_reported(params: SamplingParameters, *, has_masks: bool = False) -> None:
    """Check that vLLM can report what is asked for.

    Args:
        params: the distribution, and what to report of each token.
        has_masks: whether the engine reads the tokens that a truncation left.

    Raises:
        ValueError: it can't.
    """
    if params.sampling_mask and not has_masks:
        raise ValueError(
            "sampling_mask is read from an engine of this process: VLLMEngine, vLLMWrapper(model), "
            "engine=vllm without servers. A server of vLLM is not asked for it. Leave "
            "sampling_mask out, or take an engine of this process."
        )
    if params.routed_experts:
        raise ValueError(
            "routed_experts are written down by TransformersEngine (engine=transformers) alone: "
            "vLLM returns them with its Model Runner V2, which there is not on a CPU, and they are "
            "not read here. Leave routed_experts out."
        )
    # It gives one log-prob a token: that of the distribution that it drew from.
    missing = [name for name in ("entropy", "kept_counts") if getattr(params, name)]
    if params.untempered_log_probs and not params.is_own_softmax:
        missing.append("untempered_log_probs")
    if missing:
        raise ValueError(
            f"vLLM can't report {missing} with {params}: it gives one log-prob a token, of the "
            "distribution that was drawn from. Score the rows with TransformersWrapper(model, "
            "generate=False, ...) and the same option instead."
        )


def read_output(output: Any, masks: MaskSource | None = None) -> Generation:
    """Read the news of a vLLM ``RequestOutput``; no reason until the request is finished.

    Args:
        output: of an engine in this process.
        masks: how the sampling masks are read, where they were asked for.
    """
    completion = output.outputs[0]
    ids = list(completion.token_ids)
    flat, sets = completion.logprobs, []
    # The log-prob of a token comes before those of others that were asked for.
    log_probs = [flat.logprobs[start] for start in flat.start_indices] if ids else []
    if masks is not None and ids:
        try:
            sets = masks.read(completion)
        except ValueError as fault:
            return Generation([], [], "error", f"vLLM: {fault}.")
    reason = completion.finish_reason or ""
    error = None
    if reason not in ("", "stop", "length", "abort"):
        error = f"vLLM ended the request: {reason} {completion.stop_reason}."
        reason = "error"
    return Generation(ids, log_probs, reason, error, sampling_masks=sets)


def read_answer(answer: Any, labels: Sequence[str]) -> Generation:
    """The answer of ``/inference/v1/generate``, by weights of one of the labels.

    A server that does not tell its versions draws a row by one, which is the first of the labels.
    """
    try:
        choice = answer["choices"][0]
        ids = [int(token) for token in choice["token_ids"]]
        log_probs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
        told = choice.get("weight_versions") or ()
        spans = [(s["version"], s["start"], s["end"]) for s in told]
        reason = choice["finish_reason"]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        message = f"the server's answer is no generation ({error!r}): {str(answer)[:200]}"
        return Generation([], [], "error", message)
    check_labels({version for version, _, _ in spans}, labels, who="VLLMServerEngine")
    if not spans and ids:
        spans = [(labels[0], 0, len(ids))]
    versions = [VersionSpan(version_number(label), start, end) for label, start, end in spans]
    return Generation(ids, log_probs, reason, versions=versions)
