"""Rows that are learnt against the reference, the model as it is before training."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from objectives import SFTLoss
from objectives.losses.token_loss import TokenLoss
from torchrl_data import keys
from torchrl_modules import TransformersWrapper

from .device_defaults import DEFAULT_TOKENS
from .given_units import GivenUnits, Unit, stacked
from .parallel import score_share
from .rank_jobs import RankJob, tell
from .rank_scores import spread_to_rows
from .run import Run
from .settings.schema import TrainingConfig
from .training import TrainingStep

_UNITS_AT_ONCE = 1024
"""Of which the reference's log-probs are computed before the log says how far that is."""
_SAME_MODEL = 1e-2
"""In nats: what a model says of a token on other machines differs by less."""


class ReferencedRows(GivenUnits):
    """Rows of a step, which have log-probs of the reference; the reference reads no others.

    See :class:`.GivenUnits`.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch is, and what the reference says of the first step's rows."""
        return super().state_dict() | {"reference": self._mean_of_reference()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on in the middle of an epoch.

        Raises:
            ValueError: there are other rows, or the reference is another model.
        """
        super().load_state_dict(state_dict)
        was, now = state_dict["reference"], self._mean_of_reference()
        if (was is None) != (now is None) or abs((was or 0.0) - (now or 0.0)) > _SAME_MODEL:
            raise ValueError(
                f"the reference gave tokens of the first step's answers {was} nats, and gives "
                f"{now}: policy.model is not what it was. Put the model back, or begin a new run"
            )

    def _mean_of_reference(self) -> float | None:
        rows = [row for unit in self.first_units(1) for row in unit]
        if keys.REF_LOG_PROBS_FULL not in rows[0].keys(include_nested=True):
            return None
        num_tokens = sum(int(row[keys.ASSISTANT_MASK].sum()) for row in rows)
        return sum(float(row[keys.REF_LOG_PROBS_FULL].sum()) for row in rows) / num_tokens


def write_reference(
    cfg: TrainingConfig, run: Run, actor: TransformersWrapper, units: Sequence[Unit], what: str
) -> None:
    """Write log-probs of the answers by the model as it is before training, which is the reference.

    Each rank computes a share of them, and no second model is kept.

    Args:
        cfg: the settings.
        run: has the ranks.
        actor: with the model.
        units: whose rows get them.
        what: units are called so in the log.
    """
    pack = SFTLoss(actor).pack
    for at in range(0, len(units), _UNITS_AT_ONCE):
        some = units[at : at + _UNITS_AT_ONCE]
        with run.log.phase(f"log-probs of the reference, {at + len(some)} of {len(units)} {what}"):
            packed = pack(stacked(some))
            tell(run.ranks, RankJob.SCORE_ROWS)
            log_probs = score_share(cfg, run.ranks, actor, packed)
        assert log_probs is not None
        rows = [row for unit in some for row in unit]
        for row, own in zip(rows, spread_to_rows(packed, log_probs), strict=True):
            row[keys.REF_LOG_PROBS_FULL] = own


class HeldOutUnits:
    """What the loss and the accuracy are on rows that are not trained on.

    Args:
        cfg: the settings.
        loss: of the policy that is tested.
        units: that are held out.
    """

    def __init__(
        self, cfg: TrainingConfig, loss: TokenLoss[Any, Any], units: Sequence[Unit]
    ) -> None:
        self._cfg, self._loss, self._rows = cfg, loss, loss.pack(stacked(units))

    @torch.no_grad()
    def scores(self) -> dict[str, float]:
        """Return ``held_out_loss`` and ``held_out_accuracy`` of the policy as it is."""
        most = self._cfg.train.micro_batch_tokens or DEFAULT_TOKENS
        parts = [*self._rows.micro_batches(max_tokens=most)]
        window = self._loss.measure_window(parts)
        outputs = [self._loss(part, window=window) for part in parts]
        output: Any = type(outputs[0]).combine(outputs)
        return {
            "held_out_loss": float(output.total()),
            "held_out_accuracy": float(output.accuracy),
        }

    def measure(self, step: TrainingStep) -> dict[str, float]:
        """Return the same about twenty times in a run, and nothing after its other steps."""
        is_time = step.number % max(1, self._cfg.train.num_steps // 20) == 0
        return self.scores() if is_time else {}
