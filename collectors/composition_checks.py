"""Checks that an environment, a policy and a buffer fit together, before anything is generated."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any, Final

from torchrl.data import ReplayBuffer, TensorStorage
from torchrl.envs.transforms import Compose

from objectives import DecoupledSources
from objectives.advantages.estimators import (
    GroupMean,
    LeaveOneOut,
    MaxRL,
    PassAtK,
    TurnCredit,
)
from objectives.advantages.group_selector import GroupSelector
from objectives.advantages.length_penalty import LengthPenalty
from objectives.advantages.mc_advantage import OF_EPISODES, MCAdvantage
from objectives.advantages.rollout_tree import RolloutTreeCredit
from objectives.advantages.tree_credit import AgentCredit, BranchCredit, FunctionCredit
from torchrl_data import page
from torchrl_data.keys import REWARD
from torchrl_data.templates.rendering_identity import check_same_rendering
from torchrl_envs.agents.agent_program import AgentProgram
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.entries.rewards import RewardSource
from torchrl_envs.episode.episode_env import EpisodeEnv
from torchrl_envs.episode.episode_step import flat_transforms
from torchrl_envs.episode.episode_transform import EpisodeTransform, overrides
from torchrl_envs.rewards.metrics import names_that_solve
from torchrl_envs.transforms.branch_rollouts import BranchRollouts
from torchrl_modules.policies.agent_policies import AgentPolicies
from torchrl_modules.policies.base import LLMWrapperBase

_COMPARE: Final = (
    *(GroupMean, LeaveOneOut, MaxRL, DecoupledSources, PassAtK),
    *(AgentCredit, BranchCredit, TurnCredit, RolloutTreeCredit),
)
"""Estimators that give a rollout an advantage over others of its group."""


def check_collected_env(env: Any, *, who: str) -> None:
    """Check that it is an environment of episodes.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(env, EpisodeEnv):
        raise TypeError(
            f"{who} takes a ChatEnv with transforms, got {type(env).__name__}. Append a "
            "DataLoadingPrimer at least: ChatEnv(...).append_transform(...). See "
            f"{page('docs/environments.md')}."
        )


def check_composition(
    env: EpisodeEnv, policy: Any, buffer: ReplayBuffer | None, *, postproc: Any, who: str
) -> list[DataLoadingPrimer]:
    """Check that an environment, a policy and a buffer fit together; gives the sources of data.

    GDPO gets the weights of the rewards, see :func:`weigh_sources`.
    With ``postproc`` groups and rewards may be made on the way into the buffer.

    Raises:
        TypeError: the policy is a bare model.
        ValueError: they don't fit; the message says what does not.
    """
    check_fit(env, policy, who=who)
    after = postproc.transforms if isinstance(postproc, Compose) else [postproc]
    for part in (*_transforms(buffer), *after):
        if isinstance(part, EpisodeTransform):
            part.check_policy(policy)
    check_branching(env, (*_transforms(buffer), *after), who=who)
    weigh_sources(buffer, reward_weights(env.episode_transforms()))
    loaders = list(env.transforms_of(DataLoadingPrimer))
    if postproc is None:
        check_groups([loader.group_size for loader in loaders], buffer, who=who)
        check_storage(buffer, env.batch_size.numel(), who=who)
        check_rewards(env, buffer, who=who)
        check_credit(env, buffer, who=who)
    return loaders


def reward_weights(parts: Iterable[Any]) -> dict[str, float]:
    """With what each source of rewards counts in their sum, by its name."""
    own = [part for part in parts if isinstance(part, RewardSource)]
    return dict(chain(*(zip(s.reward_names, s.weights or repeat(1.0), strict=False) for s in own)))


def weigh_sources(buffer: ReplayBuffer | None, weights: Mapping[str, float]) -> None:
    """Let GDPO weigh rewards as their sum does, where it was not given weights of its own.

    Args:
        buffer: with the advantages, and with rewards of its own perhaps.
        weights: of the environment's rewards, by their names.
    """
    weights = {**weights, **reward_weights(_transforms(buffer))}
    for part in advantages_of(buffer):
        if weights and isinstance(part.estimator, DecoupledSources) and not part.estimator.weights:
            part.estimator = replace(part.estimator, weights=weights)


def check_fit(env: EpisodeEnv, policy: Any, *, who: str) -> None:
    """Check that a policy writes one turn for each row of an environment, and all parts take it.

    Args:
        env: what it acts in.
        policy: an `LLMWrapperBase`, or any callable from TensorDict to TensorDict.
        who: the component, named in errors.

    Raises:
        TypeError: it is a bare model.
        ValueError: nothing draws data, or the policy scores, samples several responses per row,
            reads another input mode, or spells conversations out otherwise; or difficulty pools
            can't tell which reward says that a rollout is solved.
    """
    _check_policy(env, policy, who=who)
    check_data(env, who=who)
    env.check()
    for loader in env.transforms_of(DataLoadingPrimer):
        if loader.pools is not None:
            asked, setting = loader.pools.solved_by, "DifficultyPools: solved_by"
            loader.pools.solved_by = names_that_solve(env, asked, setting=setting) or None
    for transform in env.episode_transforms():
        transform.check_policy(policy)


def _check_policy(env: EpisodeEnv, policy: Any, *, who: str) -> None:
    """Check that a policy writes one turn for each row, and let the environment read its calls."""
    if isinstance(policy, LLMWrapperBase):
        base: Any = env.base_env
        if not getattr(policy, "generate", True):
            raise ValueError(f"{who}: the policy scores (generate=False), and has to sample here.")
        if policy.num_samples is not None:
            raise ValueError(
                f"{who}: the policy draws num_samples={policy.num_samples} responses per row, but "
                "an environment goes on with one. Use DataLoadingPrimer(group_size=...) for groups."
            )
        if getattr(base, "template_kwargs", None) is not None:
            check_same_rendering(base.encoder, policy.encoder)
        if policy.input_mode != base.input_mode:
            raise ValueError(
                f"{who}: the policy reads input_mode={policy.input_mode!r}, and the environment "
                f"writes {base.input_mode!r}. Give both the same."
            )
        env.read_calls_as(policy.encoder)
        if isinstance(policy, AgentPolicies):
            check_authors(env, [*policy.by_agent], policy.otherwise, who=who)
    elif not callable(policy) or {"base_model_prefix", "history_key"} & set(dir(policy)):
        # A bare model, or a wrapper of TorchRL's.
        raise TypeError(
            f"{who}: a policy maps a TensorDict to one, got {type(policy)}. Wrap a model: "
            "torchrl_modules.TransformersWrapper(model, tokenizer=...)."
        )


def check_data(env: EpisodeEnv, *, who: str) -> None:
    """Check that something draws the data of an episode.

    Raises:
        ValueError: nothing does.
    """
    if not any(overrides(part, "draw") for part in env.episode_transforms()):
        raise ValueError(
            f"{who}: no transform of the environment draws data. Append a DataLoadingPrimer(rows). "
            f"See {page('docs/data.md')}."
        )


def check_groups(sizes: Sequence[int], buffer: ReplayBuffer | None, *, who: str) -> None:
    """Check that the groups that come in are those that the parts of a buffer wait for.

    Raises:
        ValueError: the sizes differ, so no group would ever be complete; or each group is one
            rollout, which is compared with nothing.
    """
    parts = [p for p in _transforms(buffer) if isinstance(p, MCAdvantage | GroupSelector)]
    for size in sizes:
        coming = size
        for part in reversed(parts):  # what comes in passes the last one first
            if part.group_size != coming:
                raise ValueError(
                    f"{who}: {type(part).__name__} waits for groups of {part.group_size} rows, and "
                    f"gets groups of {coming}. Give it and DataLoadingPrimer the same; of several "
                    "parts in a Compose the last one gets the rows first."
                )
            coming = part.num_released if isinstance(part, GroupSelector) else coming
            estimator = getattr(part, "estimator", None)
            if isinstance(estimator, FunctionCredit):
                estimator = estimator.estimator
            if coming == 1 and isinstance(estimator, _COMPARE):
                raise ValueError(
                    f"{who}: MCAdvantage compares the rollouts of a group with each other, and "
                    "each group has one, whose advantage is always 0: nothing would be learnt. "
                    "Give it and DataLoadingPrimer a larger group_size."
                )


def check_storage(
    buffer: ReplayBuffer | None, num_rows: int, postproc: object = None, *, who: str
) -> None:
    """Check that the storage of a buffer takes a batch of so many rows.

    With ``postproc`` rows may be made of one shape.

    Raises:
        ValueError: it can't hold rows of different lengths, or the later rows would take the place
            of the first.
    """
    storage = getattr(buffer, "storage", None)
    if isinstance(storage, TensorStorage) and postproc is None:
        raise ValueError(
            f"{who}: rows have different lengths, which {type(storage).__name__} can't hold. Give "
            "the buffer a LazyStackStorage or a ListStorage."
        )
    room = getattr(storage, "max_size", None)
    if advantages_of(buffer) and room is not None and room < num_rows:
        raise ValueError(
            f"{who}: a batch has {num_rows} rows, and the storage of the buffer holds {room}: the "
            f"later ones would take the place of the first. Give the storage at least {num_rows}."
        )


def check_rewards(env: EpisodeEnv, buffer: ReplayBuffer | None, *, who: str) -> None:
    """Check that something scores what advantages are of.

    Raises:
        ValueError: nothing does (in time).
    """
    if not advantages_of(buffer) or REWARD in set(env.full_reward_spec.keys()):
        return
    parts = _transforms(buffer)
    sources = [i for i, part in enumerate(parts) if isinstance(part, RewardSource)]
    if not sources:
        raise ValueError(
            f"{who}: MCAdvantage needs rewards, and no part of the environment gives any. Append "
            "RewardFunctions([...]), give the environment of EnvironmentTools a get_reward(), or "
            "write `reward` in postproc=."
        )
    advantage = next(i for i, part in enumerate(parts) if isinstance(part, MCAdvantage))
    if sources[0] < advantage:
        raise ValueError(
            f"{who}: in the buffer {type(parts[sources[0]]).__name__} stands before MCAdvantage, "
            "which would get rows without a reward: what comes in passes the last transform first. "
            "Put MCAdvantage first in the Compose."
        )


def check_credit(env: EpisodeEnv, buffer: ReplayBuffer | None, *, who: str) -> None:
    """Check that there is what advantages are told apart by within an episode.

    Raises:
        ValueError: no source gives rewards by turn or token, or no program has agents.
    """
    for part in advantages_of(buffer):
        credit = getattr(part, "credit", None)
        given = [*env.episode_transforms(), *_transforms(buffer)]
        if credit in ("branch", "turn") and not any(getattr(p, "by_token", False) for p in given):
            raise ValueError(
                f"{who}: credit={credit!r} needs rewards by turn or token, and each source gives "
                "one for the whole episode. Give RewardFunctions([...], level='turn'), or take "
                "credit='episode'."
            )
        check_agents(env, credit, who=who)


def check_authors(env: EpisodeEnv, have: Sequence[str], otherwise: str | None, *, who: str) -> None:
    """Check that the policies of agents are those of agents who will ask for turns.

    Args:
        env: of the rollouts.
        have: agents with a policy.
        otherwise: the one whose policy also takes the turns of others.
        who: the component, named in errors.

    Raises:
        ValueError: no program names its agents, or it has others.
    """
    programs = [part for part in env.episode_transforms() if part.names_agents]
    if otherwise is None and not programs:
        raise ValueError(
            f"{who}: AgentPolicies takes the turns of agents, of which an AgentProgram says who "
            "asks, and there is none. Append one, or say with otherwise= whose turns they are."
        )
    named = {name for part in programs for name in getattr(part, "agents", ())}
    lacking = [] if otherwise else sorted(named - {*have})
    unknown = sorted({*have} - named) if named else []
    if lacking or unknown:
        raise ValueError(
            f"{who}: AgentProgram(agents={sorted(named)}) and AgentPolicies of {[*have]} don't "
            f"fit: {f'{lacking} have no policy' if lacking else f'{unknown} never ask'}."
        )


def check_agents(env: EpisodeEnv, credit: Any, *, who: str) -> None:
    """Check that agents with rewards of their own are paid by themselves, and no others are.

    Args:
        env: of the rollouts.
        credit: who is paid, see :class:`~objectives.MCAdvantage`.
        who: the component, named in errors.

    Raises:
        ValueError: they are not, or there is no program.
    """
    programs = list(env.transforms_of(AgentProgram))
    named = [program.agents for program in programs if program.agents]
    if credit in OF_EPISODES and named:
        raise ValueError(
            f"{who}: the agents {list(named[0])} have rewards of their own, and "
            f"credit={credit!r} pays all of them alike. Take credit='agent' (of a recipe "
            "loss.credit=agent)."
        )
    if credit == "agent" and not programs:
        raise ValueError(
            f"{who}: credit='agent' compares each agent of a program with itself, and the "
            "environment has no AgentProgram. Take credit='episode'."
        )


def check_branching(env: EpisodeEnv, parts: Sequence[Any], *, who: str) -> None:
    """Check that what works on rows takes those of rollouts that branch for what they are.

    Args:
        env: of the rollouts.
        parts: what the rows pass on their way into the buffer.
        who: the component, named in errors.

    Raises:
        ValueError: a part works on whole rollouts; or credit goes by a tree, and there is none.
    """
    if next(env.transforms_of(BranchRollouts), None) is None:
        for part in parts:
            if isinstance(getattr(part, "estimator", None), RolloutTreeCredit):
                raise ValueError(
                    f"{who}: credit='tree' pays a token by all rollouts that come after it, and no "
                    "rollout leaves another one. Append BranchRollouts(num_roots=...) to the "
                    "environment (of a recipe collector.num_roots=4), or take credit='episode'."
                )
        return
    for part in parts:
        is_priced = isinstance(getattr(part, "estimator", None), LengthPenalty)
        if is_priced or isinstance(part, GroupSelector | RewardSource):
            name = "LengthPenalty" if is_priced else type(part).__name__
            raise ValueError(
                f"{who}: {name} works on whole rollouts, and the row of a rollout that branches "
                "has what it said itself; the rest is in another row. Leave BranchRollouts out, "
                "or this one (rewards can be given in the environment)."
            )


def advantages_of(buffer: ReplayBuffer | None) -> list[MCAdvantage]:
    """The transforms of a buffer that compute advantages.

    Args:
        buffer: or none.
    """
    return [part for part in _transforms(buffer) if isinstance(part, MCAdvantage)]


def _transforms(buffer: ReplayBuffer | None) -> list[Any]:
    transform = getattr(buffer, "_transform", None)
    return [] if transform is None else flat_transforms(transform)
