"""Verification beside training: some rows of a step are computed again before it trains on them."""

import logging
import random
import time
from typing import Any, Final, cast

import torch
from tensordict import TensorDictBase

from collectors.verification.conditions import Numbers
from collectors.verification.explain import verify_rows
from collectors.verification.recomputation import Recomputation
from collectors.verification.sampled_row import SampledRow
from torchrl_data.batched_object import read_objects
from torchrl_data.keys import AGENT
from torchrl_modules import AgentPolicies, TransformersWrapper
from torchrl_modules.engines.transformers import TransformersEngine

from .models.agents import policies_of
from .settings.schema import RolloutsConfig, TrainingConfig

_LOG = logging.getLogger("torchrl_agents")
_SHARE: Final = 0.03
"""Of the time of the steps between two checks, what one is meant to take: rows differ in length."""
_MOST_ROWS: Final = 64


def live_verification(cfg: TrainingConfig, actor: Any) -> "LiveVerification | None":
    """Verification as the settings of a run have it; ``None`` where they ask for none.

    Args:
        cfg: the settings.
        actor: has the weights that sample.
    """
    every = cfg.collector.verify_every if isinstance(cfg, RolloutsConfig) else None
    if every is None:
        return None
    # A reward model samples nothing to verify.
    assert isinstance(actor, TransformersWrapper | AgentPolicies)
    engine = cast("TransformersEngine", next(iter(policies_of(actor).values())).engine)
    numbers = Numbers(engine.inside.dtype, torch.bfloat16 if cfg.train.autocast else None)
    return LiveVerification(actor, every=every, numbers=numbers)


class LiveVerification:
    """Verifies rows that were sampled by the weights that are about to be trained.

    It takes so many rows that a check stays within 5 % of the time of the steps between two of
    them, as far as the checks before tell, and at least one. What does not agree is warned of, with
    its cause.

    Args:
        actor: has the weights that sampled; they are not changed. Of agents with weights of their
            own each row is computed with those of its agent.
        every: steps.
        numbers: what the settings say that it computes in.
    """

    def __init__(
        self, actor: TransformersWrapper | AgentPolicies, *, every: int, numbers: Numbers
    ) -> None:
        self._every = every
        self._agents = actor if isinstance(actor, AgentPolicies) else None
        policies = policies_of(actor).items()
        self._recomputations = {name: Recomputation(own, numbers=numbers) for name, own in policies}
        self._seconds_a_row = 0.0
        self._since = time.perf_counter()

    def __call__(self, step: int, rows: TensorDictBase, version: int) -> dict[str, float]:
        """Check a step, if it is its turn.

        Args:
            step: its number, from 1.
            rows: as collected, ``[B]``.
            version: of the actor's weights. Rows that others sampled, too, are left out.

        Returns:
            Its metrics; none where it is not its turn.
        """
        if (step - 1) % self._every:
            return {}
        began = time.perf_counter()
        chosen = self._chosen(step, rows, version, began - self._since)
        if not chosen:
            return {"verify/tokens": 0.0}
        certificates = []
        for agent, own in chosen.items():
            found = verify_rows(own, self._recomputations[agent], most_searched=1)
            if not found.is_clean:
                whose = f", {agent}" if agent else ""
                _LOG.warning("step %d%s: %s", step, whose, "\n".join(found.lines()))
            certificates.append(found)
        seconds, num_rows = time.perf_counter() - began, sum(map(len, chosen.values()))
        self._seconds_a_row, self._since = seconds / num_rows, time.perf_counter()
        gaps = (gap for found in certificates for row in found.checked for gap in row.gaps)
        return {
            "verify/tokens": float(sum(found.num_tokens for found in certificates)),
            "verify/at_fault": float(sum(sum(found.counts.values()) for found in certificates)),
            "verify/largest_gap": max(map(abs, gaps), default=0.0),
            "verify/s": seconds,
        }

    def _chosen(
        self, step: int, rows: TensorDictBase, version: int, seconds: float
    ) -> dict[str, list[SampledRow]]:
        """Rows at random, as many as there is time for, that these weights alone have sampled.

        They are told apart by the agents whose weights these are.
        """
        most = 1
        if self._seconds_a_row:
            most = max(1, min(_MOST_ROWS, int(_SHARE * seconds / self._seconds_a_row)))
        collected = list(rows.reshape(-1).unbind(0))
        owners = self._owners(rows.reshape(-1))
        chosen: dict[str, list[SampledRow]] = {}
        for place in random.Random(step).sample(range(len(collected)), len(collected)):
            if sum(map(len, chosen.values())) == most:
                break
            try:
                row = SampledRow.of_collected(collected[place], name=f"row {place} of step {step}")
            except ValueError:  # nothing of it was sampled
                continue
            if {row.versions[t] for t in row.targets} == {version}:
                chosen.setdefault(owners[place], []).append(row)
        return chosen

    def _owners(self, rows: TensorDictBase) -> list[str]:
        """The agent whose weights sampled each row; of one policy nobody's name."""
        owners = [""] * len(rows)
        by_agent = {} if self._agents is None else self._agents.rows_of(read_objects(rows, AGENT))
        for name, places in by_agent.items():
            for place in places:
                owners[place] = name
        return owners
