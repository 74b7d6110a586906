"""The distribution of one token, slowly: plain Python over a float64 row of logits."""

import math

import torch


def log_probs(logits, params, prompt, output):
    """Log-probs ``[V]`` that the next token of a turn is drawn with.

    ``prompt`` is all that came before the turn, ``output`` what the turn has drawn so far. The
    order is vLLM's: bias, stop tokens too early, penalties, temperature, min-p, top-k, top-p.
    """
    row = logits.double().tolist()
    for token, bias in params.logit_bias.items():
        row[token] += bias
    if len(output) < params.min_tokens:
        for token in params.stop_token_ids or ():
            row[token] = -math.inf
    for token in {*prompt, *output}:
        penalty = params.repetition_penalty
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token in output:
        row[token] -= params.frequency_penalty
    for token in set(output):
        row[token] -= params.presence_penalty
    row = [x / (params.temperature or 1.0) for x in row]
    row = _keep(row, lambda p, most: p >= params.min_p * most)
    if params.top_k:
        least = sorted(row)[-params.top_k]
        row = [x if x >= least else -math.inf for x in row]
    return torch.tensor(_top_p(row, params.top_p)).log_softmax(-1)


def _softmax(row):
    return torch.tensor(row, dtype=torch.float64).softmax(-1).tolist()


def _keep(row, is_kept):
    p = _softmax(row)
    return [x if is_kept(q, max(p)) else -math.inf for x, q in zip(row, p, strict=True)]


def _top_p(row, top_p):
    p, total = _softmax(row), 0.0
    kept = [-math.inf] * len(row)
    for token in sorted(range(len(row)), key=lambda token: -p[token]):
        kept[token] = row[token]
        total += p[token]
        if total >= top_p:
            return kept
    return kept


@torch.no_grad()
def turn_log_probs(model, params, prompt, output):
    """The log-prob that each token of a turn was drawn with, ``[T]``."""
    logits = model(input_ids=torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    return torch.stack(
        [log_probs(row, params, prompt, output[:i])[output[i]] for i, row in enumerate(logits)]
    )


STOPS = (2, 3, 7)
OPTIONS = {
    "repetition penalty": {"repetition_penalty": 1.7},
    "a repetition penalty below 1": {"repetition_penalty": 0.6},
    "presence penalty": {"presence_penalty": 1.5},
    "frequency penalty": {"frequency_penalty": -1.2},
    "logit bias": {"logit_bias": {5: 4.0, 9: -100.0, 2: 3.0}},
    "min tokens": {"min_tokens": 4, "logit_bias": {2: 6.0, 7: 6.0}},
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "logit_bias": {5: 2.0, 7: 4.0},
        "min_tokens": 3,
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
    },
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.5},
}
"""Sampling parameters by what they try, for tests of both engines."""
