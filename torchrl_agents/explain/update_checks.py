"""Checks of the metrics of updates: learning rate, clips, filters, KL, length of the run."""

import math
from itertools import pairwise
from statistics import fmean, median
from typing import Final

from .evidence import RunEvidence
from .run_finding import RunFinding

_TYPICAL_WEIGHT: Final = 0.02
"""The magnitude of most weights of a language model, with which the others are compared."""
_SPACING: Final = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Relative distance of a number of each dtype to the next one."""
_RATE: Final = "learning_rate"
_CONTROLS: Final = {
    "train.shuffle_rewards": "rewards are dealt out",
    "train.shuffle_verdicts": "verdicts of the teacher are dealt out",
    "data.shuffle_answers": "questions get answers of others",
    "data.shuffle_labels": "labels are drawn",
    "data.shuffle_preferences": "better one of two answers is drawn",
}
"""Settings that make a control of a run, and what each does."""


def _updates(run: RunEvidence) -> float:
    return sum(run.values("optimizer_steps"))


def shuffled_rewards(run: RunEvidence) -> RunFinding | None:
    """A control run, in which nothing can be learnt."""
    name = next((name for name in _CONTROLS if run.setting(name, False)), None)
    if name is None:
        return None
    return RunFinding(
        code="shuffled_rewards",
        explains=1.0,
        what=f"The {_CONTROLS[name]} at random ({name}=true): this is a control, in which nothing "
        "can be learnt.",
        change=f"Leave {name} out.",
    )


def not_finite(run: RunEvidence) -> RunFinding | None:
    """Updates that were left out because their gradients were not finite."""
    # Updates without any gradient are skipped, too, and leave no file.
    skipped = len([*(run.folder / "not_finite").glob("step_*")])
    share = skipped / (skipped + _updates(run)) if skipped else 0.0
    if share < 0.1:
        return None
    return RunFinding(
        code="not_finite",
        explains=share,
        what=f"{share:.0%} of the updates ({skipped}) were left out, for their loss or "
        "gradient was not finite.",
        change="Lower optim.learning_rate; look into not_finite/ in the run's folder, which has "
        "the batches; compute in float32 (policy.dtype=float32, train.autocast=false).",
        numbers={"skipped_fraction": share, "skipped": skipped},
    )


def learning_rate_too_large(run: RunEvidence) -> RunFinding | None:
    """Updates that move the policy so far that it is lost."""
    if run.has_improved or not _updates(run):
        return None
    moved = {
        "kl_approx": max(map(abs, run.values("kl_approx")), default=0.0),
        "ESS/min": min(run.values("ESS/min"), default=1.0),
    }
    entropies = run.values("entropy")
    jumps = [
        abs(after - before)
        for before, after in pairwise(entropies)
        if abs(after - before) > 1 and max(before, after) > 2 * min(before, after)
    ]
    if moved["kl_approx"] < 1 and moved["ESS/min"] > 0.02 and not jumps:
        return None
    rate = max(run.values(_RATE), default=math.nan)
    before, after = run.mean("reward", run.steps[:1]), run.mean("reward", run.last)
    shown = (
        f"in one step the entropy changed by {max(jumps):.1f} nats per token"
        if jumps
        else f"within a step tokens moved by up to {moved['kl_approx']:.2g} nats in the mean, and "
        f"{moved['ESS/min']:.1%} of the tokens carry the update"
    )
    of_reward = (
        f" The reward went from {before:.3g} to {after:.3g}." if math.isfinite(before) else ""
    )
    return RunFinding(
        code="learning_rate_too_large",
        explains=1.0,
        what=f"The updates are too large: {shown}, at a learning rate of {rate:.2g}.{of_reward}",
        change=f"Lower optim.learning_rate to a tenth ({rate / 10:.1g}), from the weights of "
        "before; fewer passes (train.num_epochs) help, too.",
        numbers={**moved, "learning_rate": rate, "entropy_jump": max(jumps, default=0.0)},
    )


def learning_rate_too_small(run: RunEvidence) -> RunFinding | None:
    """Updates that change nothing, by their size or in their effect."""
    rates = run.values(_RATE)
    if run.has_improved or not rates or not _updates(run):
        return None
    rate = max(rates)
    numbers = {"learning_rate": rate}
    is_adam = run.setting("optim.name", "adamw") != "sgd"
    dtype = run.setting("policy.dtype", "float32")
    smallest = _SPACING.get(dtype, _SPACING["float32"]) / 2 * _TYPICAL_WEIGHT
    per_step = [
        lr * steps
        for lr, steps in zip(rates, run.values("optimizer_steps"), strict=False)
        if math.isfinite(lr)
    ]
    kl = [abs(value) for value in run.values("kl_approx")]
    passes = run.mean("optimizer_steps")
    if is_adam and rate < smallest:
        why = (
            f"a weight of {_TYPICAL_WEIGHT} in {dtype} can't change by less than {smallest:.1g}, "
            "so the updates are lost in rounding"
        )
    elif (
        passes > 1.5 and kl and max(kl) < 1e-5 and max(run.values("clip_fraction"), default=0) == 0
    ):
        why = (
            f"{passes:.0f} passes over the same rollouts moved no token by more than "
            f"{max(kl):.1g} nats in the mean"
        )
    elif is_adam and sum(per_step) < 1e-6:
        why = (
            f"all updates together move a weight by at most {sum(per_step):.1g}, and most weights "
            f"are about {_TYPICAL_WEIGHT}"
        )
    else:
        return None
    return RunFinding(
        code="learning_rate_too_small",
        explains=1.0,
        what=f"The learning rate is {rate:.2g} at most, which changes nothing: {why}.",
        change="Raise optim.learning_rate by factors of 10 until kl_approx or clip_fraction move "
        "(1e-6 is usual for whole models, 1e-5 and more for adapters and small ones)"
        + ("." if dtype == "float32" else ", and train weights of policy.dtype=float32."),
        numbers=numbers | ({"kl_approx": max(kl)} if kl else {}),
    )


def clipped_gradients(run: RunEvidence) -> RunFinding | None:
    """Gradients that are always scaled down, by much."""
    limit, norms = run.setting("optim.max_grad_norm"), run.values("grad_norm")
    if run.has_improved or not limit or not norms:
        return None
    share = sum(norm > limit for norm in norms) / len(norms)
    ratio = median(norms) / limit
    if share < 0.95 or ratio < 100:
        return None
    return RunFinding(
        code="clipped_gradients",
        explains=share,
        what=f"The gradient is clipped in {share:.0%} of the steps, to 1/{ratio:.0f} of its norm "
        f"(median {median(norms):.2g}, limit {limit:g}).",
        change=f"Raise optim.max_grad_norm to about {median(norms):.1g}; with adamw, gradients "
        "that come near optim.eps move nothing.",
        numbers={"clipped_fraction": share, "grad_norm": median(norms), "max_grad_norm": limit},
    )


def clipped_tokens(run: RunEvidence) -> RunFinding | None:
    """Tokens that the clip leaves without gradient."""
    share = run.mean("clip_fraction", run.last)
    if run.has_improved or not share >= 0.3:
        return None
    bounds = run.setting("loss.clip_epsilon")
    return RunFinding(
        code="clipped_tokens",
        explains=share,
        what=f"The clip leaves {share:.0%} of the tokens without a gradient (clip_fraction)"
        + (f", with loss.clip_epsilon={bounds}." if bounds is not None else "."),
        change=f"Make fewer passes over a step's rollouts (train.num_epochs, which is "
        f"{run.setting('train.num_epochs', run.mean('optimizer_steps'))}), lower "
        "optim.learning_rate, or widen loss.clip_epsilon.",
        numbers={"clip_fraction": share},
    )


def nothing_trained(run: RunEvidence) -> RunFinding | None:
    """Tokens that filters and masks keep out of the loss."""
    if run.values("pair_fraction"):  # pairs of whole rollouts have no filters, see no_pairs
        return None
    kept = run.mean("kept_fraction", run.last)
    with_signal = [s for s in run.last if s.get("groups/without_signal_fraction", 0.0) < 1]
    trained = [s.get("optimizer_steps", 0.0) for s in with_signal]
    if with_signal and not any(trained) and not kept > 0:
        kept = 0.0
    # Expert iteration keeps the best alone: there, a part is what is meant.
    if not kept <= 0.5 or (run.recipe == "expert_iteration" and kept > 0):
        return None
    correction = "loss.sampler_correction.max_k3"
    settings = {**run.settings_of("loss.filters"), correction: run.setting(correction)}
    filters = {name: x for name, x in settings.items() if x is not None and x is not False}
    given = ", ".join(f"{name}={value}" for name, value in filters.items())
    cut = run.mean("truncated_fraction", run.last)
    if kept == 0:
        what = "No token is trained: masks and filters of the loss leave nothing"
    else:
        what = f"Filters of the loss leave {1 - kept:.0%} of the tokens out"
    drops_cut = "loss.filters.drop_truncated" in filters
    of_cut = f"; {cut:.0%} of the rollouts were cut" if drops_cut else ""
    return RunFinding(
        code="nothing_trained",
        explains=1 - kept,
        what=f"{what} (kept_fraction {kept:.2g}{of_cut}).",
        change=f"Leave out {given}, or change what it filters."
        if given
        else "Look at the masks of the rows: ('masks', 'all_assistant_mask') says which tokens the "
        "policy sampled, and a filter of the loss takes out the others.",
        numbers={"kept_fraction": kept},
    )


def no_pairs(run: RunEvidence) -> RunFinding | None:
    """Groups whose rewards differ, and of which no pair is trained."""
    paired = run.mean("pair_fraction", run.last)
    told_apart = 1 - run.mean("groups/without_signal_fraction", run.last)
    if not (told_apart > 0 and paired <= 0.5 * told_apart):
        return None
    lost, rows = 1 - paired / told_apart, run.mean("rows_per_episode", run.last)
    least = run.setting("train.min_difference", 0.0)
    several = f"; a rollout has {rows:.2g} rows in the mean" if rows > 1 else ""
    causes = [f"Lower train.min_difference, which is {least:g}"] if least else []
    if rows > 1:
        causes.append(
            "Leave out what rewrites the past of a rollout: one of several rows is in no pair"
        )
    return RunFinding(
        code="no_pairs",
        explains=lost,
        what=f"Of {lost:.0%} of the groups whose rewards differ no pair is trained{several}.",
        change=f"{'. '.join(causes)}."
        if causes
        else "Look at the rollouts: each has to have a reward and a sampled token.",
        numbers={"pair_fraction": paired, "min_difference": least, "rows_per_episode": rows},
    )


def kl_runaway(run: RunEvidence) -> RunFinding | None:
    """A policy that leaves the reference behind."""
    kl = run.values("kl_to_ref")
    last, first = run.mean("kl_to_ref", run.last), fmean(kl[:1]) if kl else math.nan
    if not last >= max(1.0, 0.5 * max(kl, default=0.0)):
        return None
    weight = run.setting("loss.kl_to_ref_coeff", math.nan)
    return RunFinding(
        code="kl_runaway",
        explains=1.0,
        what=f"The KL to the reference ran away: from {first:.2g} to {last:.2g} nats per token; "
        f"its weight is {weight:g}.",
        change="Raise loss.kl_to_ref_coeff (0.01 is usual), or lower optim.learning_rate; see "
        "whether the rollouts still make sense.",
        numbers={"kl_to_ref": last, "first": first, "kl_to_ref_coeff": weight},
    )


def lost_critic(run: RunEvidence) -> RunFinding | None:
    """A critic whose values are further from the returns than one number would be."""
    name = "critic/explained_variance"
    explained = [step[name] for step in run.last if math.isfinite(step.get(name, math.nan))]
    if run.has_improved or not explained or median(explained) >= -0.1:
        return None
    found, rate = median(explained), run.mean("critic/learning_rate", run.last)
    return RunFinding(
        code="lost_critic",
        explains=1.0,
        what="The critic's values are further from the returns than their mean is "
        f"(critic/explained_variance {found:.2g}), so the advantages are mostly its errors.",
        change=f"Lower critic.learning_rate, which is {rate:.2g}, or let the critic learn alone "
        "first, critic.num_warmup_steps.",
        numbers={"explained_variance": found, "learning_rate": rate},
    )


def stale_sampler(run: RunEvidence) -> RunFinding | None:
    """A loop of the user's own that hands no weights to the policy; recipes always do."""
    versions, made = run.values("policy_version"), _updates(run)
    if run.recipe or len(versions) < 3 or not made or max(versions) > min(versions):
        return None
    return RunFinding(
        code="stale_sampler",
        explains=1.0,
        what=f"After {made:.0f} updates the sampler still has the weights of version "
        f"{versions[-1]:g}: what is trained is not what samples.",
        change="Hand the weights over after each step: collector.update_policy_weights_(model).",
        numbers={"updates": made, "policy_version": versions[-1]},
    )


def too_short(run: RunEvidence) -> RunFinding | None:
    """A run that ends while the learning rate still rises."""
    made, warm_up = len(run.steps), run.setting("optim.num_warmup_steps", 0)
    planned = run.setting("train.num_steps", made)
    if run.has_improved or not made or made > max(2 * warm_up, 2):
        return None
    rate, peak = max(run.values(_RATE), default=math.nan), run.setting("optim.learning_rate")
    reached = f"; the learning rate reached {rate:.2g} of {peak:.2g}" if peak else ""
    return RunFinding(
        code="too_short",
        explains=min(warm_up, made) / made if warm_up else 1.0,
        what=f"The run is too short to tell: {made} steps, of which {min(warm_up, made)} are "
        f"warm-up (optim.num_warmup_steps){reached}.",
        change=f"Raise train.num_steps, which is {planned}: tens to hundreds of steps are usual.",
        numbers={"steps": made, "warmup_steps": warm_up},
    )
