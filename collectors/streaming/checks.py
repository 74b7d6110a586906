"""Checks that the parts of a streaming collector fit together, before anything is drawn."""

from typing import Any, Final

from torchrl.data import ReplayBuffer

from collectors.collector import PostProcessing
from collectors.composition_checks import check_collected_env, check_composition
from collectors.ledger import GroupLedger, StalenessPolicy
from torchrl_data.checks import check_counts, check_type
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_envs.transforms.branch_rollouts import BranchRollouts
from torchrl_modules import AgentPolicies, LLMWrapperBase
from torchrl_modules.engines.engine import can_keep_caches

from .load_cap import LoadCap

WHO: Final = "StreamingCollector"
_REQUEST_TIMEOUT_S: Final = 600.0
_QUEUE_MAXSIZE: Final = 1024


def check_streaming(
    env: Any, policy: Any, buffer: ReplayBuffer | None, postproc: PostProcessing | None
) -> list[DataLoadingPrimer]:
    """Check that environment, policy and buffer fit together; gives the sources of data.

    Raises:
        ValueError: they do not.
        TypeError: one of them is none.
    """
    check_collected_env(env, who=WHO)
    if not isinstance(policy, LLMWrapperBase):
        raise TypeError(
            f"{WHO}: the policy takes one turn at a time, so it has to be an LLMWrapperBase of "
            f"torchrl_modules (TransformersWrapper, vLLMWrapper), got {type(policy)}."
        )
    return check_composition(env, policy, buffer, postproc=postproc, who=WHO)


def most_waiting(
    policy: StalenessPolicy,
    queue_maxsize: int | None,
    groups_per_step: int,
    group_size: int,
    weight_sync_steps: int,
) -> int:
    """Return how many finished groups may wait for the trainer.

    Args:
        policy: needs room for some.
        queue_maxsize: in episodes; ``None``: TRL's default, or what the policy needs.
        groups_per_step: of a batch.
        group_size: episodes of a group.
        weight_sync_steps: batches that are trained for each push of weights.

    Raises:
        ValueError: they are fewer than the policy needs, so that nothing would move any more.
        TypeError: the policy is none.
    """
    check_counts(WHO, queue_maxsize=queue_maxsize, weight_sync_steps=weight_sync_steps)
    check_type("staleness", policy, StalenessPolicy, who=WHO)
    needed = policy.required_capacity(groups_per_step, weight_sync_steps)
    if queue_maxsize is None:
        return max(needed, _QUEUE_MAXSIZE // group_size)
    if queue_maxsize < needed * group_size:
        raise ValueError(
            f"{WHO}: with {policy!r} and {groups_per_step} groups a step, {needed * group_size} "
            f"finished episodes may wait for an older one, so queue_maxsize={queue_maxsize} "
            "would stop everything. Raise it, or lower pipeline_depth or groups_per_step."
        )
    return queue_maxsize // group_size


def most_episodes(ledger: GroupLedger, max_inflight_tasks: int | LoadCap) -> int:
    """Return how many episodes may run at once.

    Args:
        ledger: admits groups.
        max_inflight_tasks: -1: all that it admits; of a ``LoadCap``, its own.

    Raises:
        ValueError: there would be none; or fewer than a batch that is drawn at once.
    """
    most = ledger.num_slots * ledger.group_size
    is_cap = isinstance(max_inflight_tasks, LoadCap)
    number = max_inflight_tasks.max_inflight_tasks if is_cap else max_inflight_tasks
    if number != -1:
        check_counts(WHO, max_inflight_tasks=number)
    if ledger.is_on_policy and (is_cap or -1 < number < most):
        raise ValueError(
            f"{WHO}: on policy all {most} episodes of a step are drawn in one batch, so "
            f"max_inflight_tasks={max_inflight_tasks} can't be kept. Leave it out, or allow some "
            "staleness."
        )
    return most if number == -1 else min(number, most)


def turn_timeout_s(ledger: GroupLedger, request_timeout: float | None) -> float | None:
    """Return how long one turn's generation may take, in seconds; ``None``: any time.

    Raises:
        ValueError: it is not positive; or it is given on policy, where nothing can keep it.
    """
    if ledger.is_on_policy:
        if request_timeout is not None:
            raise ValueError(
                f"{WHO}: on policy a step is one batch, of which no row can end by itself, so "
                f"request_timeout={request_timeout:g} can't be kept. Leave it out, or allow some "
                "staleness."
            )
        return None
    if request_timeout is not None and not request_timeout > 0:
        raise ValueError(f"{WHO}: request_timeout must be positive, got {request_timeout}.")
    return _REQUEST_TIMEOUT_S if request_timeout is None else request_timeout


def check_barriers(env: EpisodeEnv, ledger: GroupLedger) -> None:
    """Check that no rollout waits for others of its group where all turns are drawn in step.

    Raises:
        ValueError: one does: the batch that the others would be drawn in waits for it.
    """
    if ledger.is_on_policy and next(env.transforms_of(BranchRollouts), None) is not None:
        raise ValueError(
            f"{WHO}: on policy all rollouts of a step are drawn in one batch, and with "
            "BranchRollouts some begin when others are over. Collect with LLMCollector (of a "
            "recipe collector.mode=sync), or allow some staleness."
        )


def check_agents_apart(policy: Any, engine: Any) -> None:
    """Check that an engine which serves the policies of agents tells them apart.

    Args:
        policy: whose turns are taken.
        engine: serves it.

    Raises:
        ValueError: one engine would draw for all of them.
    """
    if isinstance(policy, AgentPolicies) and not getattr(engine, "by_agent", None):
        raise ValueError(
            f"{WHO}: {type(engine).__name__} draws for one policy, and AgentPolicies has one for "
            "each agent. Leave engine= out."
        )


def check_adapters(engine: Any, policy: StalenessPolicy, *, whose: str = "") -> None:
    """Check that responses of all versions that may be in flight are drawn beside each other.

    Args:
        engine: draws.
        policy: says how old they may be.
        whose: the adapters are, for the message.

    Raises:
        ValueError: some would wait until others have ended.
    """
    for own in (getattr(engine, "by_agent", None) or {}).values():
        check_adapters(own, policy, whose=" for each agent that is trained")
    most, needed = getattr(engine, "max_adapters", 0), policy.max_staleness + 2
    if most and policy.max_staleness and most < needed:
        raise ValueError(
            f"{WHO}: with max_staleness={policy.max_staleness} responses of {needed} versions may "
            f"be in flight, but the engine draws from {most} sets of adapters at once, so that new "
            f"ones would wait for old ones. Build it with max_loras={needed}{whose}."
        )


def recomputes(engine: Any, policy: StalenessPolicy, *, who: str) -> bool:
    """Return whether new weights read again what is in flight, as a policy asks.

    Args:
        engine: draws.
        policy: says so with ``recompute``, if it has that.
        who: asks.

    Raises:
        ValueError: the engine can't go on with what the old ones have read.
    """
    recompute = bool(getattr(policy, "recompute", True))
    if not (recompute or can_keep_caches(engine)):
        raise ValueError(
            f"{who}: {policy} asks that responses in flight go on with what old weights have read, "
            f"which {type(engine).__name__} can't do (AsyncTransformersEngine, AsyncVLLMEngine and "
            "servers of vLLM can). Leave recompute=False out."
        )
    return recompute
