"""Weights of a model beside those that the models of several agents share."""

from typing import Any

from torch import Tensor, nn

from torchrl_modules.scoring.wrapped_models import adapter_settings
from torchrl_modules.weights.expected_weights import UpdateRefused

from .plain_weights import unwrapped_module


def weights_beside_shared(source: nn.Module, engine: Any) -> dict[str, Tensor]:
    """The weights that an agent has for itself, by the names of its own model: adapters, as a rule.

    Args:
        source: the trained model.
        engine: which has ``shared_names``, and draws with a model like this one.

    Raises:
        UpdateRefused: the model is another one, trains what is shared, or has nothing of its own.
    """
    model = unwrapped_module(source)
    state = model.state_dict(keep_vars=True)
    shared = engine.shared_names
    kind = type(model).__name__
    if missing := sorted(shared - state.keys()):
        raise UpdateRefused(
            f"{kind} has no {missing[0]}, which the engines of several agents share. Push the "
            "model that was given to AgentPolicies, or one that is made alike."
        )
    if trained := [name for name in shared if getattr(state[name], "requires_grad", False)]:
        raise UpdateRefused(
            f"{kind} trains {min(trained)}, which the engines of several agents share: a push for "
            "one would change the others. Freeze it, or give each agent a model of its own."
        )
    if adapter_settings(model) != engine.adapter_settings:
        raise UpdateRefused(
            f"the adapters of {kind} act otherwise than those that the engine has: others are "
            "active, merged or switched off, or their scale is another one. Push it as it was "
            "given to AgentPolicies."
        )
    own = {name: value.detach() for name, value in state.items() if name not in shared}
    if not own:
        raise UpdateRefused(
            f"every weight of {kind} is frozen and shared with other agents: there is nothing to "
            "push. Leave this agent out."
        )
    return own
