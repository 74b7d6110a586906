"""Loss, advantages, and what happens to rollouts before them, from the settings of GRPO."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from config import PRESETS, GRPOConfig, LossConfig

import objectives
import torchrl_envs
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
    surrogate = _surrogate(cfg, kind.preset)
    options = {
        "surrogate": surrogate,
        "ratio_level": cfg.ratio_level,
        "aggregation": cfg.aggregation,
        "max_tokens": cfg.max_tokens,
        "kl_estimator": cfg.kl_estimator,
        "kl_mask_threshold": cfg.kl_mask_threshold,
        "kl_to_ref_coeff": cfg.kl_to_ref_coeff or None,
        "kl_to_inference_coeff": cfg.kl_to_inference_coeff or None,
        "clip_epsilon": _clip_epsilon(cfg, kind.preset, surrogate),
    }
    options = {name: value for name, value in options.items() if value is not None}
    merged = {**kind.preset, **options}
    if merged.get("aggregation") == "fixed_length":
        options.setdefault("max_tokens", max_tokens)
    if cfg.entropy_coeff:
        options |= {"entropy_bonus": True, "entropy_coeff": cfg.entropy_coeff}
    if cfg.sampler_correction is not None:
        correction = objectives.SamplerCorrection(
            level=cfg.sampler_correction,  # type: ignore[arg-type]
            max_k3=cfg.max_k3,
            normalize=cfg.normalize_correction,
        )
        options |= {"old_policy": "current", "sampler_correction": correction}
    elif cfg.max_k3 is not None or cfg.normalize_correction:
        raise ValueError("max_k3 and normalize_correction go with sampler_correction.")
    loss = kind(
        actor,
        temperature=temperature,
        kl_bias_correction=cfg.kl_bias_correction,
        filters=objectives.TokenFilters(drop_truncated=cfg.drop_truncated),
        **options,
    )
    if not cfg.observation_coeff:
        return loss
    return objectives.MixedLoss(
        {"rl": loss, "ce": objectives.SFTLoss(actor, temperature=temperature)}
    )


def check_correction(cfg: GRPOConfig) -> None:
    """The correction takes this very pass's scores as those from before the update.

    Raises:
        ValueError: there are several updates on the same rollouts.
    """
    if cfg.loss.sampler_correction is not None and cfg.train.num_epochs != 1:
        raise ValueError(
            f"sampler_correction goes with train.num_epochs=1, got {cfg.train.num_epochs}."
        )


def _surrogate(cfg: LossConfig, preset: Any) -> Any:
    """The surrogate with its settings; None for the preset's as it is."""
    from objectives.losses.surrogates import SURROGATES, SurrogateSettings
    from torchrl_data.checks import one_of

    own = {"divergence": cfg.divergence, "threshold": cfg.divergence_threshold}
    own = {name: value for name, value in own.items() if value is not None}
    chosen = cfg.surrogate or preset.get("surrogate", "clipped")
    if ":" in str(cfg.surrogate):
        chosen = import_callable("surrogate", cfg.surrogate or "")
    elif isinstance(chosen, str):
        chosen = SURROGATES[one_of("surrogate", chosen, tuple(SURROGATES))]
    kind = chosen if isinstance(chosen, type) else type(chosen)
    if own and kind is not objectives.DivergenceSurrogate:
        raise ValueError(
            f"{', '.join(own)}: for dppo, ipo, kpop and surrogate=divergence, not {cfg.name}."
        )
    settings = {**own, **cfg.surrogate_settings}
    if cfg.surrogate is None and not settings:
        return None
    try:
        if isinstance(chosen, SurrogateSettings):  # a preset's
            return replace(chosen, **settings)
        if isinstance(chosen, type):
            return chosen(**settings)
        inspect.signature(chosen).bind_partial(**settings)
    except TypeError as error:
        raise ValueError(
            f"surrogate_settings of {cfg.surrogate or kind.__name__}: {error}"
        ) from None
    return partial(chosen, **settings) if settings else chosen


def _clip_epsilon(cfg: LossConfig, preset: Any, surrogate: Any) -> tuple[float, float] | None:
    """Both bounds, where one is given: the other is the preset's, or the surrogate's own."""
    if cfg.clip_low is None and cfg.clip_high is None:
        return None
    from objectives.losses.surrogates import SURROGATES, takes_clip

    own = preset.get("surrogate", "clipped")
    own = SURROGATES[own] if isinstance(own, str) else own
    chosen = own if surrogate is None else surrogate
    if not takes_clip(chosen):
        bounded = [name for name, kind in SURROGATES.items() if takes_clip(kind)]
        kinds = {name: getattr(objectives, kind).preset for name, kind in PRESETS.items()}
        able = [n for n, its in kinds.items() if its.get("surrogate", "clipped") in bounded]
        raise ValueError(
            f"clip_low and clip_high are for {', '.join(able)}, and surrogate="
            f"{' or '.join(bounded)}, not for {cfg.name} with the surrogate "
            f"{cfg.surrogate or type(chosen).__name__}. Leave them out."
        )
    function = getattr(chosen, "function", chosen)
    bounds = [inspect.signature(function).parameters[n].default for n in ("clip_low", "clip_high")]
    if function is getattr(own, "function", own):
        bounds = preset.get("clip_epsilon", bounds)
    given = [cfg.clip_low, cfg.clip_high]
    low, high = (x if y is None else y for x, y in zip(bounds, given, strict=True))
    if inspect.Parameter.empty in (low, high):
        raise ValueError(
            f"surrogate={cfg.surrogate} has no bounds of its own: give clip_low and clip_high."
        )
    return low, high


def build_advantage(
    cfg: LossConfig, group_size: int, refill: objectives.GroupRefill | None = None
) -> objectives.MCAdvantage:
    """Advantages within groups; groups without a signal are dropped, or replaced by others.

    Raises:
        ValueError: an option is unknown, or a group is too small to have a signal.
    """
    flat = refill or ("keep" if group_size == 1 else "drop")
    if cfg.length_penalty and cfg.advantage in BASELINES:
        raise ValueError(
            f"length_penalty compares the outputs of a group, which {cfg.advantage} does not look "
            "at. Leave it out."
        )
    credit: Any = import_callable("credit", cfg.credit) if ":" in cfg.credit else cfg.credit
    if group_size == 1 and credit in ("agent", "branch", "turn"):
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
