"""Sampling parameters that the log-probs of a sampler give away: its temperature and truncation.

Shape legend: K tokens, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from torchrl_modules import SamplingParameters

MOST_TEMPERATURE: Final = 20.0
"""A temperature is looked for between its inverse and this."""
_GRID: Final = 81
_STEPS: Final = 40


def fitted_temperature(logits: Tensor, targets: Tensor, log_probs: Tensor) -> float:
    """The temperature at which a softmax gives the log-probs that were recorded.

    Args:
        logits: of the model, ``[K, V]``.
        targets: the tokens, int64 ``[K]``.
        log_probs: as recorded, ``[K]``, finite.

    Returns:
        That of the least mean absolute difference.
    """
    logits, log_probs = logits.double(), log_probs.double()

    def difference(log_temperature: float) -> float:
        scaled = logits / math.exp(log_temperature)
        own = scaled.gather(1, targets[:, None]).squeeze(1) - scaled.logsumexp(1)
        return float((own - log_probs).abs().mean())

    # It need not have one minimum alone: a grid finds the valley, golden sections its ground.
    end = math.log(MOST_TEMPERATURE)
    grid = [2 * end * i / (_GRID - 1) - end for i in range(_GRID)]
    best = min(grid, key=difference)
    low, high = best - 2 * end / (_GRID - 1), best + 2 * end / (_GRID - 1)
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(_STEPS):
        one, two = high - ratio * (high - low), low + ratio * (high - low)
        if difference(one) < difference(two):
            high = two
        else:
            low = one
    return math.exp((low + high) / 2)


def fitted_truncations(
    logits: Tensor,
    targets: Tensor,
    log_probs: Tensor,
    sampling: SamplingParameters,
    tolerance: float,
) -> list[SamplingParameters]:
    """Truncations that leave each token the log-prob that was recorded.

    A sampler that keeps the j most likely tokens reports ``log p - log P_j`` with their probability
    ``P_j``, so each token tells its j, and all of them one top-k, top-p or min-p.

    Args:
        logits: of the model, ``[K, V]``.
        targets: the tokens, int64 ``[K]``.
        log_probs: as recorded, ``[K]``, finite.
        sampling: has the temperature.
        tolerance: of a log-prob, in nats.

    Returns:
        Parameters with one truncation each, at most one of each kind; none where no cut explains
        every token, or where nothing was cut.
    """
    log_p = torch.log_softmax(logits.double() / sampling.temperature, -1)
    ordered = log_p.sort(-1, descending=True).values
    mass = ordered.exp().cumsum(-1)
    told = log_p.gather(1, targets[:, None]).squeeze(1) - log_probs.double()  # log P_j
    fits = (mass.log() - told[:, None]).abs() <= tolerance
    if not bool(fits.any(1).all()) or bool((told >= -tolerance).all()):
        return []
    size = mass.shape[1]
    places = torch.arange(size)
    first = torch.where(fits, places, size).amin(1)
    last = torch.where(fits, places, -1).amax(1)
    rows = torch.arange(len(mass))
    found = []
    least, most = int(first.max()) + 1, int(last.min()) + 1
    plain = replace(sampling, top_k=0, top_p=1.0, min_p=0.0)
    if least <= most:
        found.append(replace(plain, top_k=least))
    # Top-p keeps j tokens where the mass of j - 1 is below it and that of j is not.
    below = torch.where(first > 0, mass[rows, (first - 1).clamp(min=0)], 0.0)
    top_p = _between(float(below.max()), float(mass[rows, last].min()))
    if top_p is not None and top_p < 1:
        found.append(replace(plain, top_p=top_p))
    # Min-p keeps j tokens where the j-th has at least its share of the first, and the next has not.
    ratio = (ordered - ordered[:, :1]).exp()
    after = torch.where(last + 1 < size, ratio[rows, (last + 1).clamp(max=size - 1)], 0.0)
    min_p = _between(float(after.max()), float(ratio[rows, first].min()))
    if min_p is not None and min_p > 0:
        found.append(replace(plain, min_p=min_p))
    return found


def _between(low: float, high: float) -> float | None:
    """A number above the one and up to the other, of few digits; ``None`` where there is none."""
    if low >= high:
        return None
    for digits in range(1, 9):
        step = 10.0**-digits
        number = round(math.floor(high / step) * step, digits)
        if low < number <= high:
            return number
    return (low + high) / 2


def truncation_words(sampling: SamplingParameters) -> str:
    """Name the tokens that are left out, in words."""
    named: Sequence[str] = [
        *([f"top_k={sampling.top_k}"] if sampling.top_k else []),
        *([f"top_p={sampling.top_p:g}"] if sampling.top_p < 1 else []),
        *([f"min_p={sampling.min_p:g}"] if sampling.min_p else []),
    ]
    return ", ".join(named) or "no truncation"
