"""The task, its environments and the model, before a recipe's own part begins."""

import logging
from collections.abc import Collection, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from hydra.core.hydra_config import HydraConfig

from collectors.checkpoint.format import Encoder, known_tensorclasses
from collectors.composition_checks import check_agents, check_authors
from torchrl_data.import_path import import_callable
from torchrl_envs import BranchRollouts, DataLoadingPrimer, RewardErrorLimit, TokenBudget
from torchrl_envs.rewards.metrics import names_that_solve
from torchrl_envs.tasks.by_name import make_task
from torchrl_envs.tasks.task import Task, TaskEnv
from torchrl_modules import LLMWrapperBase, TransformersWrapper
from torchrl_modules.weights.quantized_weights import quantization_of

from .device_defaults import default_autocast, describe, settle_micro_batches
from .models.adapters import add_adapters
from .models.agents import add_agents
from .models.policies import build_policies
from .models.saved_agents import saved_agents
from .models.task_reward_models import load_reward_models, task_reward_models
from .models.user_model import user_models, with_user_models
from .models.warm_start import drawn_demonstrations, warm_start
from .origin import Origin, origin_of
from .run import Run
from .settings.arguments import name_of
from .settings.defaults import defaults_of, fill_in
from .settings.errors import refusing
from .settings.recipe import Recipe
from .settings.rules import reset_unused
from .settings.schema import (
    CollectorConfig,
    EpisodeConfig,
    RecipeConfig,
    RolloutsConfig,
    TrainingConfig,
    agents_settings,
)

_LOG = logging.getLogger("torchrl_agents")


class Setup(NamedTuple):
    """The task and the environments of a run."""

    task: Task
    env: TaskEnv
    """Of the rollouts; that of the held-out rows, where a recipe samples nothing else."""
    held_out_env: TaskEnv

    @property
    def envs(self) -> list[TaskEnv]:
        """Those that there are: one may stand for both."""
        return [*dict.fromkeys((self.env, self.held_out_env))]


def build_task(recipe: Recipe, cfg: Any, settings: dict[str, Any]) -> Setup:
    """The task and its environments; whatever is wrong with them shows before a model is loaded.

    Args:
        recipe: whose defaults are filled in.
        cfg: the settings; a recipe without ``collector`` samples in tests alone.
        settings: those of the task.

    Raises:
        SettingsError: the task's settings or data can't be used.
    """
    test, count, limits = cfg.evaluate, cfg.evaluate.num_samples, cfg.limits
    with refusing(f"task={cfg.task.id}"):
        task = _make_task(recipe, cfg, settings, num_held_out=test.num_prompts)
        other = getattr(cfg, "data", None)
        for rows in (task.train_rows, task.held_out_rows):
            note = getattr(rows, "note", "")
            if note and isinstance(cfg, TrainingConfig) and not getattr(other, "dataset", None):
                _LOG.warning("%s", note)  # where the task's rows are trained on
        if isinstance(cfg, TrainingConfig):
            for row in islice(task.held_out_rows, 1):
                encoder = Encoder(known_tensorclasses())
                encoder.root = "checkpoints hold rows of the data; leave the column out of row"
                encoder.encode(dict(row))
        limits.max_turns = limits.max_turns or task.max_turns
        common = {
            "shuffle": False,
            "seed": cfg.seed,
            "max_steps": limits.max_turns,
            "show_schemas": cfg.policy.show_tool_schemas,
            "tool_call_format": cfg.policy.tool_call_format,
        }
        if test.ks is None:
            test.ks = [1 << i for i in range(count.bit_length())] if count > 1 else []
        # All held-out rows once, in batches of whole prompts.
        num_prompts = min(len(task.held_out_rows), max(1, test.max_rollouts // count))
        sizes = {"num_envs": num_prompts * count, "repeats": count, "num_epochs": 1}
        held_out_env = TaskEnv(task, held_out=True, **sizes, **common)
        test.solved_by = _solved_by(held_out_env, test.solved_by)
        if not isinstance(cfg, RolloutsConfig):
            reset_unused(recipe, cfg)
            return Setup(task, held_out_env, held_out_env)
        _settle_warm_start(cfg, task)
        size = cfg.collector.group_size
        env = TaskEnv(task, num_envs=cfg.collector.num_prompts * size, repeats=size, **common)
        _let_branch(env, cfg.collector)
        loss = getattr(cfg, "loss", None)
        if getattr(loss, "advantage", "gae") != "gae":  # a critic pays by token
            check_agents(env, getattr(loss, "credit", None), who="loss.credit")
        if (agents := agents_settings(cfg)) is not None:
            check_authors(env, agents.names, agents.otherwise, who="agents.trained")
        return Setup(task, env, held_out_env)


def _let_branch(env: TaskEnv, cfg: CollectorConfig) -> None:
    """Let some rollouts of each group begin in the middle of others, as the settings say."""
    if cfg.num_roots is None:
        return
    at: Any = cfg.branch_at
    if ":" in at:
        at = import_callable("collector.branch_at", at)
    part = BranchRollouts(cfg.num_roots, at=at)
    env.append_transform(part)
    part.check(env)


def tell_left_out(envs: Sequence[TaskEnv], *, told: Collection[int] = ()) -> None:
    """Say on the console which rows of the data are left out, if any are.

    Args:
        envs: draw the rows.
        told: the numbers of those of which it was said before.
    """
    bad = {number: why for number, why in left_out(envs).items() if number not in told}
    if bad:
        first = "; ".join(f"row {number}: {bad[number]}" for number in sorted(bad)[:5])
        _LOG.warning("%d row(s) are left out (the first row is row 0): %s", len(bad), first)


def left_out(envs: Sequence[TaskEnv]) -> dict[int, str]:
    """Return why rows of the data are left out, by their number.

    Args:
        envs: draw the rows.
    """
    loaders = [loader for env in envs for loader in env.transforms_of(DataLoadingPrimer)]
    return {number: why for loader in loaders for number, why in loader.left_out.items()}


def _solved_by(env: TaskEnv, asked: Any) -> list[str] | None:
    """The rewards that say whether a rollout is solved; ``None`` where they have no names."""
    if not (asked is None or isinstance(asked, str)):
        asked = [str(name) for name in asked]
    usual = env.task.solved_by
    return names_that_solve(env, asked, usual=usual, setting="evaluate.solved_by") or None


def _settle_warm_start(cfg: RolloutsConfig, task: Task) -> None:
    """Leave the warm start out where the task has no demonstrations."""
    typed = str(HydraConfig.instance().cfg)
    if cfg.warm_start.num_steps and not task.demonstrations:
        if "warm_start.num_steps" in typed:
            raise ValueError("it has no demonstrations: set warm_start.num_steps=0")
        cfg.warm_start.num_steps = 0  # an experiment's number, which is for any task
    for name in ("warm_start.learning_rate", "warm_start.batch_size"):
        if not cfg.warm_start.num_steps and name in typed:
            raise ValueError(f"{name} is of no use without warm_start.num_steps")


def _make_task(
    recipe: Recipe, cfg: RecipeConfig, settings: dict[str, Any], *, num_held_out: int
) -> Task:
    origin = origin_of(cfg.policy.model)
    _compare_with_origin(cfg, origin)
    is_embedded = origin.model is None
    if is_embedded and settings.get("level", "") is None:
        cfg.task.level = settings["level"] = "easy"
        _LOG.info("what the embedded model is asked is easy: task.level=easy")
    given = with_user_models(settings, cfg.policy, seed=cfg.seed)
    task = make_task(cfg.task.id, seed=cfg.seed, num_held_out=num_held_out, **given)
    defaults = defaults_of(cfg, recipe.embedded, recipe.pretrained, origin=origin.model)
    if is_embedded:
        defaults["policy.max_new_tokens"] = task.max_new_tokens
        if task.entropy_coeff is not None and "loss.entropy_coeff" in defaults:
            defaults["loss.entropy_coeff"] = task.entropy_coeff
        if "warm_start.num_steps" in defaults:
            own = task.num_warm_steps or defaults["warm_start.num_steps"]
            is_new = cfg.policy.model is None
            defaults["warm_start.num_steps"] = own if is_new and task.demonstrations else 0
    if isinstance(cfg, TrainingConfig):
        autocast = default_autocast(describe(cfg.policy.device), cfg.policy.dtype)
        defaults["train.autocast"] = autocast
        if autocast and cfg.train.autocast is None:
            _LOG.info("train.autocast=true: this GPU computes in bfloat16")
    inherited = {name: x for name, x in origin.settings.items() if attrgetter(name)(cfg) is None}
    if origin.task != cfg.task.id:
        inherited.pop("policy.max_new_tokens", None)  # its turns were as long as its task's are
    fill_in(cfg, defaults | inherited)
    if inherited:
        _LOG.info("as in the run that left %s: %s", cfg.policy.model, inherited)
    return task


def _compare_with_origin(cfg: RecipeConfig, origin: Origin) -> None:
    """Warn of a model that is asked otherwise than in the run that left it, unless it is meant.

    Raises:
        ValueError: the task is another one, and nobody chose it.
    """
    if not HydraConfig.initialized():  # in a program, where all settings are given
        return
    typed = {*map(name_of, HydraConfig.get().overrides.task)}
    if origin.task not in (None, cfg.task.id) and not {"task", "experiment"} & typed:
        raise ValueError(
            f"policy.model={cfg.policy.model} is of a run of task={origin.task}, and no task is "
            f"given, for which {cfg.task.id} stands. Give task={origin.task} with its settings, or "
            f"task={cfg.task.id} if it is meant."
        )
    differs = {
        name: (here, there)
        for name, there in origin.sampling.items()
        if name not in typed and (here := attrgetter(name)(cfg)) != there
    }
    if differs:
        told = ", ".join(f"{name}={here}" for name, (here, _) in differs.items())
        same = " ".join(f"{name}={there}" for name, (_, there) in differs.items())
        _LOG.warning(
            "Tokens are drawn otherwise than in the run that left %s, and so its rewards are not "
            "these: here %s. For the same give %s.",
            *(cfg.policy.model, told, same),
        )


def load_models(cfg: RecipeConfig, setup: Setup, run: Run) -> tuple[Any, Any]:
    """Load the actor, which is trained, and the policy, which samples.

    The environments get a budget of tokens, which depends on the model's length.
    """
    with run.log.phase("loading the model"):
        actor, policy = build_policies(cfg, setup.task)
        if cfg.engine.starts_servers and hasattr(policy.engine, "close"):
            run.ends.callback(policy.engine.close)
        with refusing(f"task={cfg.task.id}"):
            set_limits(setup, cfg.limits, policy)
        if isinstance(cfg, TrainingConfig):
            settle_micro_batches(cfg, actor)
    for user, has_tools in user_models(setup.envs).items():
        with run.log.phase("loading the simulated user's model"):
            user.load(has_tools=has_tools)
    if task_reward_models(setup.envs):
        with run.log.phase("loading the reward model"):
            load_reward_models(setup.envs, cfg.policy.device)
    if not isinstance(cfg, TrainingConfig) and saved_agents(cfg.policy.model) is not None:
        return _with_agents(cfg, run, actor, policy)
    return actor, policy


def _with_agents(
    cfg: RecipeConfig, run: Run, actor: Any, policy: LLMWrapperBase
) -> tuple[Any, Any]:
    """Give each agent weights of its own; servers that are started for them end with the run."""
    actors, policies = add_agents(cfg, actor, policy)
    if cfg.engine.starts_servers:
        run.ends.callback(policies.engine.close)  # type: ignore[attr-defined]
    return actors, policies


def warm_up(
    cfg: RolloutsConfig,
    setup: Setup,
    run: Run,
    actor: TransformersWrapper,
    policy: LLMWrapperBase,
) -> tuple[Any, LLMWrapperBase]:
    """Demonstrations teach the format; then the model gets adapters, or each agent its weights.

    Args:
        cfg: the settings.
        setup: the task and its environments.
        run: is told of the phases; if it goes on, a checkpoint has the weights.
        actor: what is trained.
        policy: samples with its weights.

    Returns:
        Both; of agents with weights of their own :class:`~torchrl_modules.AgentPolicies`.
    """
    torch.manual_seed(cfg.seed)
    num_steps = cfg.warm_start.num_steps
    is_quantized = quantization_of(actor.model) is not None
    if is_quantized:  # nothing of the model itself can be trained
        actor, policy = add_adapters(cfg, actor, policy)
    if num_steps and not run.goes_on:
        with run.log.phase("warm start"):
            tell = run.log.steps("warm start", num_steps)
            warm_start(
                actor,
                drawn_demonstrations(cfg, setup.env, actor.encoder),
                num_steps=num_steps,
                batch_size=cfg.warm_start.batch_size,
                learning_rate=cast("float", cfg.warm_start.learning_rate),  # filled in
                micro_batch_tokens=cast("int", cfg.train.micro_batch_tokens),  # settled
                on_step=lambda step, loss: tell(step, {"loss": loss}, quiet=step % 100 > 0),
            )
    if agents_settings(cfg) is not None:
        return _with_agents(cfg, run, actor, policy)
    return (actor, policy) if is_quantized else add_adapters(cfg, actor, policy)


def set_limits(setup: Setup, cfg: EpisodeConfig, policy: Any) -> None:
    """Bound failed rewards, and the tokens of an episode by the model's length at least.

    Rows whose prompt is too long for the model are said.
    """
    max_model_len = getattr(policy.engine, "max_model_len", None)  # an engine may have none
    told = left_out(setup.envs)
    for env in setup.envs:
        env.append_transform(RewardErrorLimit(cfg.max_error_fraction))
        if (cfg.max_episode_tokens, max_model_len) != (None, None):
            budget = TokenBudget(
                cfg.max_episode_tokens,
                max_model_len=max_model_len,
                min_turn_tokens=cfg.min_turn_tokens,
                encoder=policy.encoder,
            )
            env.append_transform(budget)
        for loader in env.transforms_of(DataLoadingPrimer):
            loader.check(env)
            loader.check_policy(policy)
    tell_left_out(setup.envs, told=told)
