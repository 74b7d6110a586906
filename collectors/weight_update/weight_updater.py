"""Weight updates of a policy: the face that all of them share."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchrl_modules.weights.agent_weights import AgentWeights
from torchrl_modules.weights.expected_weights import UpdateRefused
from torchrl_modules.weights.lazy_weights import facts_of

from .adapters_alone import adapter_weights
from .beside_shared import weights_beside_shared
from .plain_weights import gathered_state_dict
from .sharded_weights import is_spread, pushed_weights

ModelMetadata = Mapping[str, tuple[torch.dtype, torch.Size]]
"""Parameter name to precision and shape."""


class UpdatablePolicy(Protocol):
    """A policy whose weights can be replaced; ``LLMWrapperBase`` is one."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that serve."""
        ...

    def update_weights(
        self, state_dict: Mapping[str, Tensor], *, version: int | None = None
    ) -> int:
        """Replace the weights, all or none, and give the new version."""
        ...


class WeightUpdater:
    """Pushes weights to a policy: all of an update is applied, or none of it.

    After a :meth:`push` the policy draws from the new weights, or the push has raised. Subclasses
    say by which way the weights go.

    Args:
        policy: what is updated; a collector sets its own.
    """

    def __init__(self, policy: UpdatablePolicy | None = None) -> None:
        self._policy = policy
        self._metadata: dict[str, torch.Size] | None = None

    @property
    def policy(self) -> UpdatablePolicy:
        """The policy that is updated.

        Raises:
            RuntimeError: there is none yet.
        """
        if self._policy is None:
            raise RuntimeError(
                f"{type(self).__name__} has no policy yet. Give it to a collector, or call "
                "init(policy=...)."
            )
        return self._policy

    def attach(self, policy: UpdatablePolicy) -> None:
        """Called by a collector with its policy; one given before stays.

        Args:
            policy: what is updated.
        """
        if self._policy is None:
            self._policy = policy

    def init(
        self, model_metadata: ModelMetadata | None = None, *, policy: UpdatablePolicy | None = None
    ) -> None:
        """Set up what the pushes need.

        Args:
            model_metadata: what every push will hold, by parameter name; a push of other names or
                shapes is refused before anything is sent. The policy checks against its own model
                in any case.
            policy: what is updated, unless a collector or the constructor said so.

        Raises:
            RuntimeError: there is no policy.
        """
        if policy is not None:
            self._policy = policy
        if model_metadata is not None:
            self._metadata = {name: shape for name, (_, shape) in model_metadata.items()}
        self._connect(self.policy)

    @property
    def version(self) -> int:
        """The version that the policy has acknowledged."""
        return self.policy.policy_version

    def push(self, source: nn.Module | Mapping[str, Tensor], *, version: int | None = None) -> int:
        """Replace the policy's weights.

        Shards (``DTensor``) are made whole a bucket at a time while the policy reads them; the
        other ranks of the trainer call :func:`~collectors.contribute_weights` meanwhile. A model
        with adapters (PEFT) is pushed merged, and is left as it was; to an engine that applies
        adapters itself (vLLM with ``enable_lora``) they go alone.

        Args:
            source: the trained model, or its state dict.
            version: the number of these weights, above the present one; ``None`` counts on.

        Returns:
            The new version, acknowledged by the policy.

        Raises:
            ValueError: the policy refuses the update and goes on with its old weights; or the
                state dict is one of adapters alone, which can't be applied.
        """
        dtype = getattr(getattr(self.policy, "engine", None), "update_dtype", None)
        with self._checked(source, dtype) as weights:
            return self.policy.update_weights(weights, version=version)

    @contextmanager
    def _checked(
        self, source: nn.Module | Mapping[str, Tensor], dtype: torch.dtype | None
    ) -> Iterator[Mapping[str, Tensor]]:
        """The weights as the policy takes them, and as :meth:`init` said that they would be."""
        with ExitStack() as stack:
            if is_spread(source):
                pushed = pushed_weights(source, dtype)
                weights: Mapping[str, Tensor] = stack.enter_context(pushed)
            else:
                weights = self._gathered(source, self._taker())
            known = self._metadata
            if known is not None and (shapes := _shapes_of(weights)) != known:
                names = sorted(shapes.keys() | known.keys())
                wrong = [name for name in names if shapes.get(name) != known.get(name)]
                raise UpdateRefused(
                    f"{type(self).__name__}.push: {len(wrong)} weights are not as "
                    f"init(model_metadata) said, such as {wrong[:4]}. Nothing was sent."
                )
            yield weights

    def _taker(self) -> Any:
        """The engine that takes the weights, or what has its facts."""
        return getattr(self._policy, "engine", None)

    def _gathered(self, source: Any, engine: Any) -> Mapping[str, Any]:
        """The weights as an engine takes them; of the models of agents, those of each."""
        engines = getattr(engine, "by_agent", None)
        if engines is not None:
            if not isinstance(source, Mapping | nn.ModuleDict):
                raise UpdateRefused(
                    f"{type(self).__name__}.push: each agent has weights of its own. Push models "
                    f"by the names of agents, {{{next(iter(engines))!r}: model, ...}}; got "
                    f"{type(source).__name__}."
                )
            if spread := [name for name, own in source.items() if is_spread(own)]:
                raise UpdateRefused(
                    f"{type(self).__name__}.push: the models of {spread} are in shards, which are "
                    "pushed for one policy alone. Train agents' models on one rank, or in copies."
                )
            return AgentWeights(
                {name: self._gathered(own, engines.get(name)) for name, own in source.items()}
            )
        if isinstance(source, nn.Module) and getattr(engine, "shared_names", None):
            return weights_beside_shared(source, engine)
        if isinstance(source, nn.Module) and getattr(engine, "max_adapters", 0):
            return adapter_weights(source)
        return gathered_state_dict(source)

    def _connect(self, policy: UpdatablePolicy) -> None:
        """Set up the way to a policy, if it needs any."""


def _shapes_of(weights: Mapping[str, Any]) -> dict[str, torch.Size]:
    """The shape of each weight; of agents' weights by ``agent.name``."""
    if isinstance(weights, AgentWeights):
        return {
            f"{agent}.{name}": shape
            for agent, own in weights.items()
            for name, shape in _shapes_of(own).items()
        }
    return {name: value.shape for name, value in facts_of(weights).items()}
