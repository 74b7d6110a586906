"""Conditions under which a row is computed."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchrl_modules import SamplingParameters


class Numbers(NamedTuple):
    """The precision that a model computes in."""

    weights: torch.dtype
    autocast: torch.dtype | None = None
    """Of ``torch.autocast``, over these weights; ``None`` without it."""

    def __str__(self) -> str:
        weights = str(self.weights).removeprefix("torch.")
        if self.autocast is None:
            return weights
        return f"{str(self.autocast).removeprefix('torch.')} by autocast over {weights}"


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The way in which a row is computed."""

    sampling: SamplingParameters
    """The distribution: temperature, truncation and penalties."""
    numbers: Numbers
    kept: bool = False
    """Whether the distribution of each token has as many tokens as were recorded, whatever the
    truncation of the settings."""
    sets: bool = True
    """Whether the distribution of a token is over the set that was recorded with it, where one was,
    whatever the truncation of the settings."""
    version: int | None = None
    """Of the weights, for all tokens; ``None``: those of each token's own version."""
    adapter: bool = True
    """Whether the adapters act, of a model that has them."""
    padding: int = 0
    """Tokens of padding before the row, which are read like others."""
    keeps_cache: bool = False
    """Whether keys and values are those of the weights that first read a token; otherwise, and in
    an engine that reads a row again after an update, they are those of the newest weights."""
    cached_tokens: int = 0
    """So many tokens at the start of the row were read by the weights of ``cache_version``, and
    what they read was kept."""
    cache_version: int | None = None
    experts: bool = True
    """Whether each token goes to the experts that were recorded with it, where they were, whatever
    the routers of the weights would choose."""
