"""Loss, advantages, and what happens to rollouts before them, from the settings of GRPO."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from config import PRESETS, GRPOConfig, LossConfig

import objectives
import torchrl_envs
from torchrl_agents.settings.option_settings import given_options
from torchrl_agents.settings.recipe import BASELINES
from torchrl_data.import_path import import_callable

if TYPE_CHECKING:
    from tensordict import TensorDictBase

    from collectors.collector import PostProcessing
    from torchrl_data.token_scorer import TokenScorer


def build_loss(
    cfg: LossConfig, actor: Any, *, temperature: float, max_tokens: int
) -> objectives.GRPOLoss | objectives.MixedLoss:
    """The loss; with what the environment answers as a stream of its own where that is trained.

    Args:
        cfg: its settings.
        actor: scores tokens.
        temperature: of the sampling.
        max_tokens: most tokens of an episode; what ``fixed_length`` divides by unless it is given.

    Raises:
        ValueError: an option is unknown, out of range, or cannot take effect with the others.
    """
    kind = getattr(objectives, PRESETS[cfg.name])
    options = given_options(cfg, objectives.GRPOOptions)
    options |= _surrogate(cfg, kind.preset)
    if options.get("aggregation") == "none":
        raise ValueError("aggregation=none gives a value for each token, and no number to train.")
    if {**kind.preset, **options}.get("aggregation") == "fixed_length":
        options.setdefault("max_tokens", max_tokens)
    if "sampler_correction" in options:
        options.setdefault("old_policy", "current")
    loss = kind(actor, temperature=temperature, **options)
    if not cfg.observation_coeff:
        return loss
    return objectives.MixedLoss(
        {"rl": loss, "ce": objectives.SFTLoss(actor, temperature=temperature)}
    )


def check_old_policy(cfg: GRPOConfig) -> None:
    """Check what the ratio is taken to.

    Raises:
        ValueError: it is taken to this very pass, and there are several on the same rollouts; or to
            what no part of the recipe computes.
    """
    loss = cfg.loss
    if loss.old_policy == "recomputed":
        raise ValueError(
            "old_policy=recomputed needs the trainer's log-probs from before the update, which "
            "this recipe does not compute: take sampler or current."
        )
    corrects = "sampler_correction" in given_options(loss, objectives.GRPOOptions)
    if (corrects or loss.old_policy == "current") and cfg.train.num_epochs != 1:
        who = "sampler_correction" if corrects else "old_policy=current"
        raise ValueError(f"{who} goes with train.num_epochs=1, got {cfg.train.num_epochs}.")


def _surrogate(cfg: LossConfig, preset: Any) -> dict[str, Any]:
    """The surrogate with its settings, as an option; none for the preset's as it is."""
    from objectives.losses.surrogates import SURROGATES, SurrogateSettings

    settings = cfg.surrogate_settings
    if cfg.surrogate is None and not settings:
        return {}
    chosen = cfg.surrogate or preset.get("surrogate", "clipped")
    if ":" in str(chosen):
        chosen = import_callable("surrogate", chosen)
    elif isinstance(chosen, str):
        if chosen not in SURROGATES:
            raise ValueError(
                f"surrogate must be one of {', '.join(SURROGATES)}, or mine:f, a function of "
                f"yours, got {chosen!r}."
            )
        chosen = SURROGATES[chosen]
    kind = chosen if isinstance(chosen, type) else type(chosen)
    try:
        if isinstance(chosen, SurrogateSettings):  # a preset's
            return {"surrogate": replace(chosen, **settings)}
        if isinstance(chosen, type):
            return {"surrogate": chosen(**settings)}
        inspect.signature(chosen).bind_partial(**settings)
    except TypeError as error:
        raise ValueError(
            f"surrogate_settings of {cfg.surrogate or kind.__name__}: {error}"
        ) from None
    return {"surrogate": partial(chosen, **settings) if settings else chosen}


def check_entries(cfg: GRPOConfig, env: torchrl_envs.EpisodeEnv) -> None:
    """Check that rollouts will hold the entries that a surrogate of the user's own reads.

    Of what a policy records on request, and of what a transform of the user's own adds to an
    episode, the first step tells.

    Args:
        cfg: the settings.
        env: of the rollouts.

    Raises:
        MissingEntryError: nobody writes one; in the words of the first step.
    """
    import torch
    from tensordict import lazy_stack

    from collectors.trajectory_rows import row_outline
    from objectives.losses.surrogates import batch_entries
    from torchrl_data import keys
    from torchrl_data.missing_entry import require_entries

    kind = getattr(objectives, PRESETS[cfg.loss.name])
    options = _surrogate(cfg.loss, kind.preset)
    on_request = (keys.ENTROPY, keys.UNTEMPERED_LOG_PROBS, keys.KEPT_COUNTS)
    on_request += (keys.ROUTED_EXPERTS, keys.SAMPLING_MASK)
    read = batch_entries(options["surrogate"]).values() if options else ()
    known = [key for key in read if isinstance(key, str) or key[0] not in on_request]
    packages = {type(part).__module__.partition(".")[0] for part in env.episode_transforms()}
    if not known or packages - {"torchrl_envs", "torchrl_tasks"}:
        return
    rows = lazy_stack([row_outline(env)])
    if (postproc := build_postproc(cfg, None)) is not None:
        rows = postproc(rows)
    later = [keys.ADVANTAGE, *([keys.REF_LOG_PROBS_FULL] if cfg.loss.kl_to_ref_coeff else [])]
    for key in later:
        rows.set(key, torch.zeros(1, 1))
    require_entries(rows[0], known, kind.__name__)


def build_advantage(
    cfg: LossConfig, group_size: int, refill: objectives.GroupRefill | None = None
) -> objectives.MCAdvantage | None:
    """Advantages within groups; groups without a signal are dropped, or replaced by others.

    Returns:
        ``None`` where a critic gives them.

    Raises:
        ValueError: an option is unknown, or a group is too small to have a signal.
    """
    if cfg.advantage == "gae":
        return None
    flat = refill or ("keep" if group_size == 1 else "drop")
    if cfg.length_penalty and cfg.advantage in BASELINES:
        raise ValueError(
            f"length_penalty compares the outputs of a group, which {cfg.advantage} does not look "
            "at. Leave it out."
        )
    credit: Any = import_callable("credit", cfg.credit) if ":" in cfg.credit else cfg.credit
    if group_size == 1 and credit in ("agent", "branch", "turn", "tree"):
        raise ValueError(
            f"credit={credit} compares the rollouts of a group, which has one: "
            "collector.group_size=1. Raise it, or take credit=episode."
        )
    scale = cfg.advantage_scale or "group"
    options: dict[str, Any] = {"estimator": cfg.advantage, "scale": scale}
    if cfg.length_penalty:
        plain = objectives.MCAdvantage(group_size, **options).estimator
        priced = objectives.LengthPenalty(coeff=cfg.length_penalty, estimator=plain)
        options = {"estimator": priced}
    return objectives.MCAdvantage(group_size, **options, credit=credit, zero_variance=flat)


def build_pools(
    cfg: GRPOConfig, env: torchrl_envs.EpisodeEnv | None = None
) -> torchrl_envs.DifficultyPools | None:
    """Return what decides which prompts are drawn again, if anything does.

    Args:
        cfg: the settings.
        env: the environment that draws; ``None`` to try the settings.

    Raises:
        ValueError: a share lies outside [0, 1].
        TypeError: `pools` has an argument that is not known, or that `drop_solved_at` has set.
    """
    share = cfg.train.drop_solved_at
    dropped = {} if share is None else {"easy_at": share, "admit_easy": 0.0}
    if not (dropped or cfg.train.pools):
        return None
    test = cfg.evaluate
    solved = {"solved_at": test.solved_at, "solved_by": test.solved_by}
    own = {name: value for name, value in solved.items() if name not in cfg.train.pools}
    pools = torchrl_envs.DifficultyPools(**own, **dropped, **cfg.train.pools)
    for primer in () if env is None else env.transforms_of(torchrl_envs.DataLoadingPrimer):
        primer.admit_by(pools)
    return pools


def build_postproc(
    cfg: GRPOConfig,
    reference: TokenScorer | None,
    pools: torchrl_envs.DifficultyPools | None = None,
) -> PostProcessing | None:
    """Return what happens to collected rollouts before they go into the buffer, if anything does.

    Args:
        cfg: the settings.
        reference: the model that a KL term compares with, if there is one.
        pools: are told of the rollouts; by the collector itself, where it collects beside training.
    """
    from torchrl_agents.collection import before_buffer

    first: list[PostProcessing] = []
    if pools is not None and cfg.collector.mode == "sync":
        first.append(pools)
    if cfg.loss.observation_coeff:
        first.append(partial(_write_observations, coeff=cfg.loss.observation_coeff))
    return before_buffer(cfg, reference, *first)


def _write_observations(trajectories: TensorDictBase, coeff: float) -> TensorDictBase:
    """Say which tokens the policy term trains, and which the cross-entropy."""
    objectives.write_streams(trajectories, rl="assistant", ce=("observation", coeff))
    return trajectories
