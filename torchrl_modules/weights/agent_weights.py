"""Weights of several agents on their way to the engines that draw for them."""

from collections.abc import Mapping

from torch import Tensor


class AgentWeights(dict[str, Mapping[str, Tensor]]):
    """New weights by the name of the agent; agents that are not in it keep theirs."""
