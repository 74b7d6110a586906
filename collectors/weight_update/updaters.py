"""Ways in which a trainer's weights reach a policy."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from torchrl_modules.engines.transformers import TransformersEngine
from torchrl_modules.weights import UpdateRefused, facts_of

from .weights import adapter_weights, gathered_state_dict, is_spread, pushed_weights, unwrapped

# How a trainer's weights reach a policy.

ModelMetadata = Mapping[str, tuple[torch.dtype, torch.Size]]
"""Parameter name to precision and shape."""


class UpdatablePolicy(Protocol):
    """A policy whose weights can be replaced; ``LLMWrapperBase`` is one."""

    @property
    def policy_version(self) -> int:
        """Of the weights that serve."""
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
        """What is updated.

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
                weights = self._gathered(source)
            known = self._metadata
            shapes = {name: value.shape for name, value in facts_of(weights).items()}
            if known is not None and shapes != known:
                names = sorted(shapes.keys() | known.keys())
                wrong = [name for name in names if shapes.get(name) != known.get(name)]
                raise UpdateRefused(
                    f"{type(self).__name__}.push: {len(wrong)} weights are not as "
                    f"init(model_metadata) said, such as {wrong[:4]}. Nothing was sent."
                )
            yield weights

    def _gathered(self, source: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The weights as the policy takes them."""
        if isinstance(source, nn.Module) and getattr(
            getattr(self.policy, "engine", None), "max_adapters", 0
        ):
            return adapter_weights(source)
        return gathered_state_dict(source)

    def _connect(self, policy: UpdatablePolicy) -> None:
        """Set up the way to a policy, if it needs any."""


# Weight updates of a policy that lives in the trainer's process.


class InProcessUpdater(WeightUpdater):
    """Hands weights to the policy's engine, whatever it is, by reference.

    An engine of this process copies them; a vLLM server of this machine gets them in a file. Of a
    model that the policy itself samples from, the weights are there: a push checks that they are
    finite and counts the version, and adapters (PEFT) stay as they are.

    Example:
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> policy = TransformersWrapper(tiny_qwen3(len(tokenizer)), tokenizer=tokenizer)
        >>> updater = InProcessUpdater(policy)  # what LLMCollector(env, policy) makes
        >>> updater.push(policy.model), policy.policy_version
        (1, 1)
    """

    def _gathered(self, source: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        model = getattr(getattr(self.policy, "engine", None), "model", None)
        if isinstance(source, nn.Module) and isinstance(model, nn.Module):
            inside = unwrapped(source)
            if inside is unwrapped(model):
                return inside.state_dict()
        return super()._gathered(source)


# Weight updates of a policy over vLLM, wherever it runs.


class vLLMUpdater(WeightUpdater):
    """Pushes weights into a running vLLM, which forgets what it cached under the old ones.

    Args:
        policy: a :class:`~torchrl_modules.vLLMWrapper`; a collector sets its own.
        transfer: ``"direct"``: an engine of this process is handed the tensors, a server gets them
            as its ``weight_transfer`` says. ``"c10d"``: they are broadcast to the server's workers,
            which :meth:`init` joins; see :meth:`~torchrl_modules.VLLMServerEngine.join`.
        master_address: for ``"c10d"``: of this process, as the workers reach it.
        master_port: for ``"c10d"``: where they meet; a free one when not given.
        device: for ``"c10d"``: what sends.

    Raises:
        ValueError: ``transfer`` is another one.

    Example:
        >>> collector = LLMCollector(  # doctest: +SKIP
        ...     env, policy=policy, weight_updater=vLLMUpdater(), track_policy_version=True
        ... )
        >>> collector.weight_updater.init()  # doctest: +SKIP
        >>> collector.update_policy_weights_(state_dict=model.state_dict())  # doctest: +SKIP
        1
    """

    def __init__(
        self,
        policy: UpdatablePolicy | None = None,
        *,
        transfer: Literal["direct", "c10d"] = "direct",
        master_address: str | None = None,
        master_port: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if transfer not in ("direct", "c10d"):
            raise ValueError(f"vLLMUpdater: transfer must be 'direct' or 'c10d', got {transfer!r}.")
        super().__init__()
        self._by_broadcast = transfer == "c10d"
        self._meeting = {
            "master_address": master_address,
            "master_port": master_port,
            "device": device,
        }
        if policy is not None:
            self.attach(policy)

    def attach(self, policy: UpdatablePolicy) -> None:
        """See :meth:`WeightUpdater.attach`.

        Args:
            policy: what is updated.

        Raises:
            TypeError: its engine is not vLLM, or can't be reached by this transfer.
        """
        engine: Any = getattr(policy, "engine", policy)
        if self._by_broadcast and not hasattr(engine, "join"):
            raise TypeError(
                f"vLLMUpdater can't broadcast to {type(engine).__name__}: an engine of this "
                "process is updated with transfer='direct', and so are several servers, and one "
                "that is supervised or asynchronous: build these with weight_transfer='c10d'."
            )
        if isinstance(engine, TransformersEngine):
            raise TypeError(
                "vLLMUpdater updates a policy over vLLM, not one over TransformersEngine. "
                "Use InProcessUpdater()."
            )
        super().attach(policy)

    def _connect(self, policy: UpdatablePolicy) -> None:
        if self._by_broadcast:
            engine: Any = getattr(policy, "engine", policy)
            engine.join(**self._meeting)

    def close(self) -> None:
        """Leave the workers' group. May be called twice."""
        if self._by_broadcast and self._policy is not None:
            engine: Any = getattr(self._policy, "engine", self._policy)
            engine.leave()
