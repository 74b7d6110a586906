"""Weight updates of a policy over vLLM, wherever it runs."""

from typing import Any, Literal

import torch

from torchrl_modules.engines.transformers import TransformersEngine

from .weight_updater import UpdatablePolicy, WeightUpdater


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
