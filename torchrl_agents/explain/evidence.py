"""The traces of a run, as far as they say why it does not learn: settings, metrics, rollouts."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import yaml

from collectors import Estimate
from collectors.record import RolloutSample, RunRecord
from torchrl_agents.settings.recipe import BASELINES

from .rollout_texts import RolloutTexts, texts_of
from .run_finding import RolloutId

WITHOUT_GROUPS: Final = ("distillation", "dpo", "kto", "reward", "self_play", "sft")
"""Recipes that do not compare the rollouts of a prompt with each other."""
_TOOL_ROLES: Final = ("tool", "function", "ipython")
_NUM_STEPS_READ: Final = 8
"""Of so many steps at the end, and of as many at the beginning, the rollouts are read."""


@dataclass(frozen=True, kw_only=True)
class RolloutFacts:
    """What is asked of a recorded rollout; its tokens are not kept."""

    id: RolloutId
    sample: RolloutSample
    """Without its tokens and messages."""
    sampled_ids: int
    """A hash of the tokens that the policy sampled."""
    said: str
    """What the policy wrote, all turns."""
    texts: RolloutTexts
    """Its prompt and turns, as the checks of what is rewarded compare them."""
    is_answered: bool
    """Whether a tool answered it."""
    sampler_gap: float
    """Mean absolute difference of the log-probs of trainer and sampler, in nats per token; NaN
    where the trainer's are not recorded."""
    age: float
    """Mean age of its tokens in updates; NaN where versions are no numbers."""


class RunEvidence:
    """The traces that a run left in its folder.

    The *last* steps are the last quarter of those that were made, at least three; most findings
    are about them, so that what training has mended by itself is none.

    Args:
        path: the folder of a run, or one with a record of rollouts.

    Raises:
        FileNotFoundError: it holds neither metrics nor a record.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        metrics = path / "metrics.jsonl"
        self.record: RunRecord | None = None
        """Of its rollouts, where they were recorded."""
        try:
            self.record = RunRecord(path)
        except FileNotFoundError:
            if not metrics.is_file():
                raise
        self.folder = path if self.record is None else self.record.run_folder
        self.steps: list[dict[str, float]] = []
        """The metrics of each step, in order; NaN for what was not finite."""
        if (self.folder / "metrics.jsonl").is_file():
            lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            told = [json.loads(line) for line in lines if line.endswith("}")]
        else:
            assert self.record is not None
            told = [{"step": each.step, **each.metrics} for each in self.record.steps]
        for line in told:
            self.steps.append({k: math.nan if v is None else v for k, v in line.items()})
        config = self.folder / "config.yaml"
        whole = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else {}
        self._settings = dict(_leaves(whole or {}))

    def setting(self, name: str, default: Any = None) -> Any:
        """The value that a setting had, by its path; the default where it is not known."""
        value = self._settings.get(name)
        return default if value is None else value

    def settings_of(self, group: str) -> dict[str, Any]:
        """The settings of a group that had a value, by their paths.

        Args:
            group: its path.
        """
        of_group = ((name, self.setting(name)) for name in self._settings)
        return {n: x for n, x in of_group if n.startswith(f"{group}.") and x is not None}

    @cached_property
    def recipe(self) -> str:
        """The name of the recipe; empty for a loop of the user's own."""
        path = self.folder / "run.json"
        if not path.is_file():
            return ""
        command = json.loads(path.read_text(encoding="utf-8")).get("command") or [""]
        return Path(command[0]).stem.replace("-", "_")

    @property
    def compares_groups(self) -> bool:
        """Whether it learns from the differences of rewards within a group."""
        has_groups = any("groups/without_signal_fraction" in step for step in self.steps)
        has_baseline = self.setting("loss.advantage") in BASELINES
        return has_groups and not has_baseline and self.recipe not in WITHOUT_GROUPS

    # Steps --------------------------------------------------------------------------------------

    @property
    def _num_last(self) -> int:
        return min(len(self.steps), max(3, len(self.steps) // 4))

    @property
    def last(self) -> Sequence[Mapping[str, float]]:
        """The metrics of the last steps."""
        return self.steps[-self._num_last :] if self.steps else []

    @property
    def first(self) -> Sequence[Mapping[str, float]]:
        """The metrics of as many steps at the beginning."""
        return self.steps[: self._num_last]

    def values(self, name: str, steps: Sequence[Mapping[str, float]] | None = None) -> list[float]:
        """The finite values of a metric, in the order of the steps.

        Args:
            name: of the metric.
            steps: all when not given.
        """
        found = (step.get(name, math.nan) for step in (self.steps if steps is None else steps))
        return [value for value in found if math.isfinite(value)]

    def mean(self, name: str, steps: Sequence[Mapping[str, float]] | None = None) -> float:
        """The mean of a metric's finite values; NaN where there are none."""
        values = self.values(name, steps)
        return fmean(values) if values else math.nan

    @cached_property
    def has_improved(self) -> bool:
        """Whether the reward is higher at the end by a quarter of a rollout's standard deviation.

        Of supervised training: whether the loss is lower by a tenth.
        """
        if not self.values("reward"):
            return self.mean("loss", self.last) < 0.9 * self.mean("loss", self.first)
        gain = self.mean("reward", self.last) - self.mean("reward", self.first)
        spread = self.values("reward/std")
        return gain > 0 and gain > 0.25 * (median(spread) if spread else 0.0)

    @property
    def score_name(self) -> str:
        """The score of the tests of what is held out."""
        return "accuracy" if self.recipe == "reward" else "reward"

    @property
    def tested(self) -> str:
        """Things of which the score is the mean."""
        return "pairs" if self.recipe == "reward" else "prompts"

    @cached_property
    def held_out(self) -> list[tuple[int, Estimate]]:
        """The mean score of what is held out, with the step after which it was measured."""
        name = self.score_name
        tested = [test for test in self._tests if test.get(name) is not None]
        return [(test["step"], Estimate(**test["estimates"][name])) for test in tested]

    @cached_property
    def held_out_losses(self) -> tuple[str, list[tuple[int, float]]]:
        """The name of the loss on held-out rows, and its values with their steps; empty if none."""
        for name in ("held_out_nll", "held_out_loss"):
            told = [(int(step["step"]), step[name]) for step in self.steps if name in step]
            if told:
                return name, [(step, value) for step, value in told if math.isfinite(value)]
        told = [
            (test["step"], test["loss"]) for test in self._tests if test.get("loss") is not None
        ]
        return "loss of evaluations.jsonl", told

    @cached_property
    def _tests(self) -> list[dict[str, Any]]:
        """The tests of what is held out, in the order of their steps."""
        path = self.folder / "evaluations.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        told = [json.loads(line) for line in lines if line.endswith("}")]
        return sorted(told, key=lambda test: test["step"])

    # Rollouts -----------------------------------------------------------------------------------

    @cached_property
    def last_rollouts(self) -> list[RolloutFacts]:
        """Those recorded of the last steps."""
        begin = self.last[0].get("step", 0) if self.last else 0
        return [row for step in self._recorded_steps(begin)[-_NUM_STEPS_READ:] for row in step]

    @cached_property
    def first_rollouts(self) -> list[RolloutFacts]:
        """Those recorded of the first steps."""
        record = self.record
        numbers = [each.step for each in record.steps if each.num_samples] if record else []
        return [row for step in numbers[: _NUM_STEPS_READ // 2] for row in self._rollouts(step)]

    @cached_property
    def early_groups(self) -> list[list[RolloutFacts]]:
        """The groups of the first rollouts, as far as they come before the last steps."""
        begin = self.last[0].get("step", 0) if self.last else 0
        return self.groups([row for row in self.first_rollouts if row.id.step < begin])

    @cached_property
    def late_groups(self) -> list[list[RolloutFacts]]:
        """The groups of the last rollouts."""
        return self.groups(self.last_rollouts)

    def _recorded_steps(self, begin: float) -> list[list[RolloutFacts]]:
        record = self.record
        numbers = [each.step for each in record.steps if each.num_samples] if record else []
        late = [number for number in numbers if number >= begin] or numbers[-1:]
        return [self._rollouts(step) for step in late[-_NUM_STEPS_READ:]]

    def _rollouts(self, step: int) -> list[RolloutFacts]:
        assert self.record is not None
        summary = next(each for each in self.record.steps if each.step == step)
        numbers = {group.group_id: number for number, group in enumerate(summary.groups)}
        counts: dict[str, int] = defaultdict(int)
        found = []
        for sample in self.record.samples(step):
            place = RolloutId(step, numbers[sample.group_id], counts[sample.group_id])
            counts[sample.group_id] += 1
            found.append(_facts(place, sample))
        return found

    def groups(self, rollouts: Sequence[RolloutFacts]) -> list[list[RolloutFacts]]:
        """The rollouts of each prompt, those alone that were scored, as far as there are two."""
        by_group: dict[tuple[int, int], list[RolloutFacts]] = defaultdict(list)
        for each in rollouts:
            if each.sample.reward is not None and each.sample.segment == 0:
                by_group[each.id.step, each.id.group].append(each)
        return [group for group in by_group.values() if len(group) > 1]

    @cached_property
    def reward_range(self) -> tuple[float, float]:
        """The lowest and the highest reward of a rollout of the run; NaN where none was scored."""
        steps = [] if self.record is None else self.record.steps
        rewards = [r for step in steps for g in step.groups for r in g.rewards if r is not None]
        return min(rewards, default=math.nan), max(rewards, default=math.nan)

    def is_solved(self, group: Sequence[RolloutFacts]) -> bool:
        """Whether all rollouts of a group are right, in a run in which others are not.

        Right is what has the reward ``evaluate.solved_at``, or the best one of the run.
        """
        low, high = self.reward_range
        enough = min(high, self.setting("evaluate.solved_at", high))
        return low < high and all((row.sample.reward or 0.0) >= enough for row in group)


def _facts(place: RolloutId, sample: RolloutSample) -> RolloutFacts:
    tokens = sample.tokens
    gaps = [
        abs(trained - sampled)
        for trained, sampled in zip(
            tokens.trainer_log_probs or [None] * len(tokens.ids), tokens.log_probs, strict=True
        )
        if trained is not None and sampled is not None
    ]
    sampled = [at for at, value in enumerate(tokens.log_probs) if value is not None]
    versions = [version for version in tokens.versions if version is not None]
    said = [str(m.get("content") or "") for m in sample.messages if m.get("role") == "assistant"]
    facts = RolloutFacts(
        id=place,
        sample=sample,
        sampled_ids=hash(tuple(tokens.ids[at] for at in sampled)),
        said="\n".join(said),
        texts=texts_of(sample),
        is_answered=any(m.get("role") in _TOOL_ROLES for m in sample.messages),
        sampler_gap=fmean(gaps) if gaps else math.nan,
        age=place.step - fmean(versions) if versions else math.nan,
    )
    sample.messages, sample.row = [], None
    tokens.ids, tokens.texts, tokens.spans = [], [], []
    tokens.log_probs, tokens.versions, tokens.trainer_log_probs = [], [], None
    tokens.entropy = tokens.advantages = tokens.sampling_masks = tokens.routed_experts = None
    return facts


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
