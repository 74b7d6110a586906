"""Weight updates of a policy over vLLM, wherever it runs."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from torchrl_modules.engines.transformers_engine import TransformersEngine
from torchrl_modules.weights.transfer import C10dWeightTransfer

from .interface import UpdatablePolicy, WeightUpdater


class vLLMUpdater(WeightUpdater):
    """Pushes weights into a running vLLM, which forgets what it cached under the old ones.

    Args:
        policy: a :class:`~torchrl_modules.vLLMWrapper`; a collector sets its own.
        transfer: ``"direct"``: an engine of this process is handed the tensors, a server of this
            machine gets them in a file in memory. ``"c10d"``: they are broadcast to the engine's
            workers through vLLM's weight transfer, by gloo between CPUs and by NCCL between GPUs of
            one or several machines; :meth:`init` joins the workers.
        master_address: for ``"c10d"``: of this process, as the workers reach it.
        master_port: for ``"c10d"``: where they meet; a free one when not given.
        device: for ``"c10d"``: what the workers compute on.

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
        master_address: str = "127.0.0.1",
        master_port: int | None = None,
        device: torch.device | str = "cpu",
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
        self._transfer: C10dWeightTransfer | None = None
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
        if self._by_broadcast and not hasattr(engine, "transfer_control"):
            raise TypeError(
                f"vLLMUpdater can't broadcast to {type(engine).__name__}: an asynchronous or a "
                "supervised engine is updated with transfer='direct'."
            )
        if isinstance(engine, TransformersEngine):
            raise TypeError(
                "vLLMUpdater updates a policy over vLLM, not one over TransformersEngine. "
                "Use InProcessUpdater()."
            )
        super().attach(policy)

    def _connect(self, policy: UpdatablePolicy) -> None:
        self.close()
        if self._by_broadcast:
            engine: Any = getattr(policy, "engine", policy)
            self._transfer = C10dWeightTransfer(engine.transfer_control(), **self._meeting)

    def _send(self, weights: Mapping[str, Tensor], version: int | None) -> int:
        if not self._by_broadcast:
            return super()._send(weights, version)
        if self._transfer is None:
            raise RuntimeError("vLLMUpdater: call init() first, which joins the engine's workers.")
        engine: Any = getattr(self.policy, "engine", self.policy)
        engine.update_weights(weights, version=version, via=self._transfer)
        return engine.version

    def close(self) -> None:
        """Leave the workers' group. May be called twice."""
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None
