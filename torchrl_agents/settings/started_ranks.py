"""Ranks that torchrun has started, and the settings that are for several of them."""

import os
from typing import Final


def num_ranks() -> int:
    """Return how many ranks torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


OF_RANKS: Final = (
    *("parallel", "reduce", "num_replicas", "cpu_offload"),
    *("tensor_parallel_size", "expert_parallel_size", "context_parallel_size"),
)
"""Settings of training that are of several ranks alone."""
