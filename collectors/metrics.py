"""Metrics of a training step: one reducer from rollouts, updates and clocks to numbers.

It lies here because a collector is where rollouts and losses meet: it reads both, and neither
package knows the other.

Shape legend: B trajectories, T tokens of one (ragged).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import torch
from tensordict import TensorDictBase, lazy_stack

from objectives import GRPOLossOutput, SFTLossOutput
from objectives.batching.non_finite_gate import StepOutcome
from torchrl_data.batched_object import read_objects
from torchrl_data.keys import (
    ASSISTANT_MASK,
    BRANCHED_FROM,
    BRANCHED_TOKENS,
    GROUP_ID,
    LOG_PROBS_FULL,
    NUM_TOOL_CALLS,
    NUM_TOOL_ERRORS,
    POLICY_VERSION,
    REWARD,
    REWARDS,
    ROUTED_EXPERTS,
    ROW,
    ROW_KIND,
    SAMPLING_MASK,
    SEGMENT,
    STOP_REASON,
    TRUNCATED,
)
from torchrl_data.ragged.packed import read_experts, read_sampling_masks
from torchrl_data.routed_experts import unknown_expert
from torchrl_data.stop_reason import kind_of
from torchrl_envs.entries.rewards import solving_rewards
from torchrl_envs.entries.whole_episodes import rows_by_episode, whole_episode
from torchrl_envs.episode.row_origin import ROW_KINDS
from torchrl_envs.rewards.metrics import reward_metrics
from torchrl_envs.rewards.scoring_call import LOGGED_METRICS

from .phase_timer import PhaseTimer

_RENAMED: Final = {
    "reward/mean": "reward",
    "reward/zero_std_fraction": "groups/without_signal_fraction",
    "loss_objective": "loss",
    "loss_sft": "loss",
    "loss_dpo": "loss",
    "loss_reward": "loss",
    "loss_kto": "loss",
    "clip_fraction_low": "clip_fraction/negative_advantage",
    "clip_fraction_high": "clip_fraction/positive_advantage",
    "num_active_tokens": "trained_tokens",
    "num_sequences": "trained_rows",
}
_BY_TASK: Final = (
    *("reward", "reward/std", "groups/without_signal_fraction", "groups/solve_all_fraction"),
    *("groups/solve_none_fraction", "turns", "sampled_tokens", "truncated_fraction"),
)
"""What is told of each task by itself, where there are several."""


def rollout_metrics(
    trajectories: TensorDictBase,
    *,
    solved_at: float = 1.0,
    solved_by: str | Sequence[str] | None = None,
) -> dict[str, float]:
    """Return what a batch of trajectories was like.

    Args:
        trajectories: rows ``[B]``, as a collector gives them.
        solved_at: the reward from which on a rollout counts as solved.
        solved_by: the reward that is asked, see :func:`~collectors.evaluation_estimates`.

    Returns:
        All of :func:`~torchrl_envs.reward_metrics`, with ``reward`` for its ``reward/mean`` and
        ``groups/without_signal_fraction`` for its ``reward/zero_std_fraction``; of the groups
        ``groups/solve_none_fraction`` and ``groups/solve_all_fraction`` (of the scored rows), NaN
        where rollouts have several rewards, and ``solved_by`` names none of them;
        ``rows_per_episode``, and of the rows the fractions that are branches of their episode,
        ``rows/parallel_fraction``, ``rows/sub_agent_fraction`` and ``rows/compaction_fraction``;
        where rollouts branch, ``branches/fraction`` of those that left another one, and
        ``branches/tokens``, how many tokens a rollout has of another one, prompt included (the mean
        over all);
        ``turns``, ``sampled_tokens`` and ``sampled_tokens/max`` of a rollout, ``tool_calls`` and
        ``tool_errors`` where there are tools; ``truncated_fraction`` and ``stop/<reason>``, the
        fraction of the rollouts that ended so; ``entropy``, the mean of minus the log-prob of the
        sampled tokens, in nats: an unbiased estimate of the entropy that they were drawn with;
        ``logged/<name>``, the mean over the rollouts of what reward functions logged;
        ``policy_version``, the mean of those that the rollouts began with; with sampling masks
        ``sampling_mask/missing_fraction`` of the sampled tokens that have none, and of the others
        the mean ``kept_tokens`` and ``bytes_per_token``; with routed experts
        ``routed_experts/missing_fraction`` of the tokens that were read to draw others, and
        ``bytes_per_token``. Where the rows of the
        data name a task in the column ``environment``, of each also ``<task>/reward`` and other
        metrics of the groups and episodes, and ``<task>/share``, its fraction of the rollouts.
    """
    rows = list(trajectories.reshape(-1).unbind(0))
    asked = [solved_by] if isinstance(solved_by, str) else solved_by
    groups = [group for row in rows if (group := row.get(REWARDS, None)) is not None]
    names = {str(name) for group in groups for name in group.keys()}  # noqa: SIM118
    if asked and not {*asked} & {*names, REWARD}:
        asked = None  # something else scored these
    metrics = _metrics_of(trajectories, rows, solved_at, asked)
    tasks: dict[str, list[TensorDictBase]] = defaultdict(list)
    for row in rows:
        name = (read_objects(row, ROW)[0] or {}).get("environment")
        if isinstance(name, str):
            tasks[name].append(row)
    num_episodes = len(rows_by_episode(rows))
    for name, own in tasks.items():
        of_task = _metrics_of(lazy_stack(own), own, solved_at, asked)
        metrics |= {f"{name}/{key}": of_task[key] for key in _BY_TASK}
        metrics[f"{name}/share"] = len(rows_by_episode(own)) / num_episodes
    return metrics


def _mask_metrics(rows: Sequence[TensorDictBase]) -> dict[str, float]:
    """Metrics of the sampling masks of rows: how many tokens lack one, their sizes and bytes."""
    if all(row.get(SAMPLING_MASK, None) is None for row in rows):
        return {}
    lengths = [len(row.get(ASSISTANT_MASK)) for row in rows]
    masks = read_sampling_masks(lazy_stack(list(rows)), lengths, who="rollout_metrics")
    sampled = torch.cat([row.get(ASSISTANT_MASK) for row in rows])
    assert masks is not None
    own = masks.take(sampled)
    recorded = own.take(own.recorded)
    return {
        "sampling_mask/missing_fraction": 1 - recorded.num_tokens / max(1, own.num_tokens),
        "sampling_mask/kept_tokens": _mean(recorded.counts().tolist()),
        "sampling_mask/bytes_per_token": _mean(recorded.lengths.tolist()),
    }


def _expert_metrics(rows: Sequence[TensorDictBase]) -> dict[str, float]:
    """Metrics of the experts of rows: how many tokens that were read lack them, and their bytes."""
    if all(row.get(ROUTED_EXPERTS, None) is None for row in rows):
        return {}
    lengths = [len(row.get(ASSISTANT_MASK)) for row in rows]
    experts = read_experts(lazy_stack(list(rows)), lengths, who="rollout_metrics")
    assert experts is not None
    unknown = unknown_expert(experts[0].dtype)
    missing, read = 0, 0
    for row, own in zip(rows, experts, strict=True):
        at = row.get(ASSISTANT_MASK).nonzero()
        end = int(at[-1]) if len(at) else 0  # what comes after it was read for nothing
        missing += int((own[:end].flatten(1) == unknown).any(1).sum())
        read += end
    return {
        "routed_experts/missing_fraction": missing / max(1, read),
        "routed_experts/bytes_per_token": float(experts[0][0].nbytes),
    }


def _tree_metrics(rows: Sequence[TensorDictBase]) -> dict[str, float]:
    """Metrics of the trees of rows; none of rows of no collector's."""
    if rows[0].get(ROW_KIND, None) is None:
        return {}
    kinds = Counter(read_objects(row, ROW_KIND)[0] for row in rows)
    num_episodes = len(rows_by_episode(rows))
    shares = {f"rows/{kind}_fraction": kinds[kind] / len(rows) for kind in ROW_KINDS[1:]}
    found = {"rows_per_episode": len(rows) / num_episodes, **shares}
    if rows[0].get(BRANCHED_FROM, None) is not None:
        opening = [row for row in rows if not int(row.get(SEGMENT, 0))]
        found["branches/fraction"] = _mean([int(row[BRANCHED_FROM]) >= 0 for row in opening])
        found["branches/tokens"] = _mean([int(row[BRANCHED_TOKENS]) for row in opening])
    return found


def _metrics_of(
    trajectories: TensorDictBase,
    rows: Sequence[TensorDictBase],
    solved_at: float,
    solved_by: Sequence[str] | None,
) -> dict[str, float]:
    metrics = {_RENAMED.get(k, k): v for k, v in reward_metrics(trajectories).items()}
    groups: dict[int, list[bool]] = defaultdict(list)
    logged: dict[str, list[float]] = defaultdict(list)
    parts = rows_by_episode(rows)
    episodes = [whole_episode(own) for own in parts]
    for row in episodes:
        group_id, rewards = row.get(GROUP_ID, None), solving_rewards(row, solved_by)
        if group_id is not None and (len(rewards) == 1 or (rewards and solved_by is not None)):
            groups[int(group_id)].append(min(rewards.values()) >= solved_at)
        for name, value in (read_objects(row, LOGGED_METRICS)[0] or {}).items():
            logged[f"logged/{name}"].append(value)
    solved = list(groups.values())
    metrics["groups/solve_none_fraction"] = _mean([float(not any(g)) for g in solved])
    metrics["groups/solve_all_fraction"] = _mean([float(all(g)) for g in solved])
    counts = [sum(int(row.get(ASSISTANT_MASK).sum()) for row in own) for own in parts]
    metrics |= _tree_metrics(rows)
    metrics["turns"] = _mean([float(row.get("num_turns")) for row in episodes])
    metrics["sampled_tokens"] = _mean(counts)
    metrics["sampled_tokens/max"] = float(max(counts))
    for key, name in ((NUM_TOOL_CALLS, "tool_calls"), (NUM_TOOL_ERRORS, "tool_errors")):
        if rows[0].get(key, None) is not None:
            metrics[name] = _mean([float(row.get(key)) for row in episodes])
    metrics["truncated_fraction"] = _mean([float(row.get(TRUNCATED)) for row in episodes])
    reasons = Counter(kind_of(read_objects(row, STOP_REASON, "")[0]) for row in episodes)
    shares = {f"stop/{kind}": count / len(episodes) for kind, count in sorted(reasons.items())}
    metrics |= shares
    log_probs = [row.get(LOG_PROBS_FULL)[row.get(ASSISTANT_MASK)] for row in rows]
    metrics["entropy"] = (
        -sum(float(x.sum()) for x in log_probs) / sum(counts) if sum(counts) else math.nan
    )
    metrics |= _mask_metrics(rows) | _expert_metrics(rows)
    metrics |= {name: _mean(values) for name, values in logged.items()}
    versions = [row.get(POLICY_VERSION) for row in episodes]
    if not isinstance(versions[0], str):  # a tracker may name them
        metrics["policy_version"] = _mean([float(version) for version in versions])
    return metrics


def update_metrics(
    outputs: Sequence[GRPOLossOutput | SFTLossOutput | Mapping[str, float]],
    outcomes: Sequence[StepOutcome],
) -> dict[str, float]:
    """Return what the updates of a step were like.

    Args:
        outputs: of the loss, one for each optimizer step
            (:meth:`~objectives.GRPOLossOutput.combine` makes one of the micro-batches').
        outcomes: what became of each optimizer step.

    Returns:
        The mean over the optimizer steps of every entry of the outputs, with ``loss`` for
        ``loss_objective``, ``loss_sft``, ``loss_dpo``, ``loss_kto`` or ``loss_reward``, the clip
        fraction by the sign of the advantage, ``trained_tokens`` and ``trained_rows``; ``ESS/min``
        and ``ratio_mean/max``, the worst of them; ``grad_norm`` (before clipping) and
        ``grad_norm/max`` of the finite ones; ``optimizer_steps`` made and
        ``optimizer_steps/skipped``.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for output in outputs:
        for name, value in output.items():
            if value is not None:
                values[str(name)].append(float(value))
    metrics = {_RENAMED.get(name, name): _mean(each) for name, each in values.items()}
    if "ESS" in values:
        metrics["ESS/min"] = min(values["ESS"])
        metrics["ratio_mean/max"] = max(values["ratio_mean"])
    norms = [o.grad_norm for o in outcomes if math.isfinite(o.grad_norm) and not o.skipped]
    if norms:
        metrics["grad_norm"], metrics["grad_norm/max"] = _mean(norms), max(norms)
    metrics["optimizer_steps"] = float(sum(not o.skipped for o in outcomes))
    metrics["optimizer_steps/skipped"] = float(sum(bool(o.skipped) for o in outcomes))
    return metrics


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


class StepMetrics:
    """Reduces one step of training to numbers for any logger.

    It is used like this::

        metrics = StepMetrics(timer)
        with timer("environment"):
            metrics.add_rollouts(collector.collect())
        with timer("train"):
            metrics.add_update(loss_output, gate.step())  # of each optimizer step
        logger.log_metrics(metrics.reduce(learning_rate=1e-6), step)

    Args:
        timer: is read by :meth:`reduce`, and begins anew; the policy's calls are best watched as
            ``"generate"`` and updates timed as ``"train"``.
        solved_at: see :func:`rollout_metrics`.
        solved_by: see :func:`rollout_metrics`.
    """

    def __init__(
        self,
        timer: PhaseTimer | None = None,
        *,
        solved_at: float = 1.0,
        solved_by: str | Sequence[str] | None = None,
    ) -> None:
        self.timer = timer
        self.solved_at = solved_at
        self.solved_by = solved_by
        self._rollouts: dict[str, float] = {}
        self._num_sampled = 0.0
        self._outputs: list[GRPOLossOutput | SFTLossOutput | Mapping[str, float]] = []
        self._outcomes: list[StepOutcome] = []

    def add_rollouts(self, trajectories: TensorDictBase) -> TensorDictBase:
        """Take in the step's trajectories, and give them back."""
        self._rollouts = rollout_metrics(
            trajectories, solved_at=self.solved_at, solved_by=self.solved_by
        )
        self._num_sampled = float(
            sum(int(row.get(ASSISTANT_MASK).sum()) for row in trajectories.reshape(-1).unbind(0))
        )
        return trajectories

    def add_update(self, output: GRPOLossOutput | SFTLossOutput, outcome: StepOutcome) -> None:
        """Take in one optimizer step."""
        self._outputs.append(output)
        self._outcomes.append(outcome)

    def state_dict(self) -> dict[str, Any]:
        """Return what was taken in so far, as plain values; times are not in here."""
        outputs = [
            {str(name): float(value) for name, value in output.items() if value is not None}
            for output in self._outputs
        ]
        outcomes = [[o.grad_norm, o.skipped, o.dump and str(o.dump)] for o in self._outcomes]
        return {
            "rollouts": dict(self._rollouts),
            "num_sampled": self._num_sampled,
            "outputs": outputs,
            "outcomes": outcomes,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on in the middle of a step.

        Args:
            state_dict: what :meth:`state_dict` gave.
        """
        self._rollouts = dict(state_dict["rollouts"])
        self._num_sampled = state_dict["num_sampled"]
        self._outputs = list(state_dict["outputs"])
        self._outcomes = [
            StepOutcome(norm, skipped, dump and Path(dump))
            for norm, skipped, dump in state_dict["outcomes"]
        ]

    def reduce(self, **more: float) -> dict[str, float]:
        """All numbers of the step.

        Args:
            **more: are added as they are, such as the learning rate.

        Returns:
            Those of :func:`rollout_metrics` and :func:`update_metrics`; where there is a timer,
            ``time/<phase>_s`` and ``time/step_s``, and tokens per second of the phases
            ``"generate"`` and ``"train"``: ``throughput/sampled_tokens_per_s``,
            ``throughput/trained_tokens_per_s`` (a token counts in each epoch). Where there is no
            phase ``"generate"``, because tokens are drawn beside the training, the whole step is
            the time in which they were sampled.
        """
        updates = update_metrics(self._outputs, self._outcomes)
        metrics = self._rollouts | updates | more
        if self.timer is not None:
            seconds = dict(self.timer.seconds)
            self.timer.reset()
            metrics |= {f"time/{phase}_s": value for phase, value in seconds.items()}
            metrics["time/step_s"] = whole = sum(seconds.values())
            trained = updates.get("trained_tokens", 0.0) * len(self._outputs)
            for name, tokens, took in (
                ("sampled", self._num_sampled, seconds.get("generate") or whole),
                ("trained", trained, seconds.get("train")),
            ):
                if took and tokens:
                    metrics[f"throughput/{name}_tokens_per_s"] = tokens / took
        return metrics
