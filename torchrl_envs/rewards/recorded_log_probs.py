"""Check that log-probs which a policy recorded compare with those that a model scores."""

from typing import Any, Final

_UNTRUNCATED: Final = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
_PENALISES: Final = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens"),
)


def check_recorded(who: str, model: Any, temperature: float, policy: Any) -> None:
    """Check that scores are of the distribution that a policy samples from, and records.

    Args:
        who: scores; named in errors.
        model: it scores with.
        temperature: it scores at.
        policy: samples.

    Raises:
        ValueError: the temperatures differ, or what else changes the distribution.
    """
    # One that takes the most likely token (temperature 0) records the log-probs of the softmax.
    at = float(getattr(policy, "temperature", temperature)) or 1.0
    if at != temperature:
        raise ValueError(
            f"{who} scores at temperature {temperature:g}, but the policy samples at {at:g}: "
            f"log-probs at two temperatures do not compare. Give temperature={at:g}."
        )
    sampled, scored = (getattr(each, "sampling", None) for each in (policy, model))
    if sampled is None or scored is None:
        return
    whole = {} if getattr(model, "score_truncated", True) else _UNTRUNCATED
    others = [
        f"{name}={getattr(sampled, name)}"
        for name in (*_UNTRUNCATED, *_PENALISES)
        if getattr(sampled, name) != whole.get(name, getattr(scored, name))
    ]
    if others:
        raise ValueError(
            f"{who}: the policy samples with {', '.join(others)}, and records the log-probs of "
            "that; the reference scores otherwise, so that equal weights would have a KL. Build "
            "the reference with the policy's generate_kwargs."
        )
