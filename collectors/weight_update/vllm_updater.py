"""Weight updates of a policy over vLLM, wherever it runs."""

from .interface import UpdatablePolicy, WeightUpdater


class vLLMUpdater(WeightUpdater):
    """Pushes weights into a running vLLM, which forgets what it cached under the old ones.

    An engine of this process is handed the tensors; a server of this machine gets them in a file in
    memory.

    Args:
        policy: a :class:`~torchrl_modules.vLLMWrapper`; a collector sets its own.

    Example:
        >>> collector = LLMCollector(  # doctest: +SKIP
        ...     env, policy=policy, weight_updater=vLLMUpdater(), track_policy_version=True
        ... )
        >>> collector.weight_updater.init()  # doctest: +SKIP
        >>> collector.update_policy_weights_(state_dict=model.state_dict())  # doctest: +SKIP
        1
    """

    def attach(self, policy: UpdatablePolicy) -> None:
        """See :meth:`WeightUpdater.attach`.

        Args:
            policy: what is updated.

        Raises:
            TypeError: its engine is not vLLM.
        """
        engine = type(getattr(policy, "engine", policy)).__name__
        if "VLLM" not in engine:
            raise TypeError(
                f"vLLMUpdater updates a policy over vLLM, not one over {engine}. "
                "Use InProcessUpdater()."
            )
        super().attach(policy)
