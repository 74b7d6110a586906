"""The critic of a run: its values give advantages, and it learns beside the policy.

Every rank has one. Rank 0 has the rows; the others compute a share of the values with it when rank
0 says so, and train on the share of the rows that the policy is trained on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from collectors import ShardedModel, ShardedOptimizer
from collectors.resume.sharded import Sharded
from objectives import GAE, CriticLoss, CriticLossOutput, NonFiniteGate, Ranks, StepOutcome
from objectives.batching.loss_keys import TokenKeys
from objectives.batching.packed_batch import Entries, PackedBatch, pack_batch
from torchrl_data import keys
from torchrl_data.pretrained import load_pretrained
from torchrl_data.ragged.packed import set_rows
from torchrl_modules import (
    TransformersCritic,
    TransformersWrapper,
    load_value_model,
    local_model,
    value_model_of,
)
from torchrl_modules.critics.value_model import check_value_config
from torchrl_modules.engines.transformers import TransformersEngine

from .device_defaults import DEFAULT_TOKENS
from .models.loading import recompute_activations
from .models.outline import check_weight_files
from .optimizers import build_optimizer, set_learning_rate
from .rank_jobs import RankJob, tell
from .rank_scores import spread_to_rows, target_scores
from .rank_share import RankShare
from .settings.errors import SettingsError, refusing
from .settings.schema import TrainingConfig, critic_settings

_TIMES_FASTER: Final = 10
"""The learning rate of a critic over that of the policy, where none is given: that of OpenRLHF and
verl is 5 to 20 times as large."""


def first_critic(cfg: TrainingConfig, actor: TransformersWrapper) -> PreTrainedModel | None:
    """The critic's model as it begins, whole; ``None`` where the run has no critic.

    Args:
        cfg: the settings.
        actor: of which it is a copy unless another model is given.

    Raises:
        SettingsError: there is no such model, or it can't be a critic.
    """
    settings = critic_settings(cfg)
    if settings is None:
        return None
    engine = cast("TransformersEngine", actor.engine)
    check_critic(cfg, engine.inside.config, reads_images=engine.images is not None)
    if settings.model is None:
        with refusing("loss.advantage=gae"):
            return _for_training(cfg, value_model_of(actor.model))
    with refusing(f"critic.model={settings.model!r}", foreign=True):
        loaded: Any = load_value_model(local_model(settings.model), dtype=engine.inside.dtype)
    return _for_training(cfg, loaded.to(engine.inside.device))


def check_critic(cfg: TrainingConfig, config: Any, *, reads_images: bool) -> None:
    """Check the critic of a run, if it has one, by what is known without weights.

    Args:
        cfg: the settings.
        config: of the policy's model.
        reads_images: whether the policy does.

    Raises:
        SettingsError: it can't be one.
    """
    settings = critic_settings(cfg)
    if settings is None:
        return
    if reads_images:
        raise SettingsError(
            f"loss.advantage=gae: policy.model={cfg.policy.model} reads images, and a critic reads "
            "none. Take another loss.advantage."
        )
    if settings.model is None:
        with refusing("loss.advantage=gae"):
            check_value_config(config, who=f"policy.model={cfg.policy.model}")
        return
    who = f"critic.model={settings.model!r}"
    with refusing(who, foreign=True):
        source = local_model(settings.model)
        own = load_pretrained(AutoConfig, source)
        check_value_config(own, who="it")
        check_weight_files(source)
    size, due = (each.get_text_config().vocab_size for each in (own, config))
    if size < due:
        raise SettingsError(
            f"{who} has a vocabulary of {size} tokens, and the policy's has {due}. A critic reads "
            "the policy's tokens: take one of its family."
        )


def critic_of_config(cfg: TrainingConfig, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """A model of the critic's shape without weights, for a rank that gets them from rank 0.

    Args:
        cfg: the settings.
        config: of the model of rank 0.
        dtype: of its parameters.
    """
    with torch.device("meta"):
        model: Any = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
    return _for_training(cfg, model.eval())


def _for_training(cfg: TrainingConfig, model: Any) -> Any:
    if cfg.policy.gradient_checkpointing:
        recompute_activations(model)
    return model


class Critic:
    """The critic of a run on one rank, with its loss, optimizer and gate.

    Args:
        cfg: the settings.
        ranks: of the run.
        network: over this rank's part of the model.
        folder: gets the batches of steps that are not finite.
    """

    def __init__(
        self, cfg: TrainingConfig, ranks: Ranks, network: TransformersCritic, folder: Path
    ) -> None:
        settings = critic_settings(cfg)
        assert settings is not None
        self._cfg, self._ranks, self.network = cfg, ranks, network
        self.loss = CriticLoss(
            network, loss_critic_type=settings.loss_critic_type, clip_value=settings.clip_value
        )
        self._advantages = GAE(
            gamma=settings.gamma,
            lmbda=settings.lmbda,
            value_lmbda=settings.value_lmbda,
            average_gae=settings.average_gae,
        )
        self.num_warmup_steps = settings.num_warmup_steps
        """Steps in which the critic alone learns."""
        rate = settings.learning_rate or _TIMES_FASTER * (cfg.optim.learning_rate or 0.0)
        self._optim = replace(cfg.optim, learning_rate=rate)
        trained = [p for p in network.parameters() if p.requires_grad]
        self.gate = NonFiniteGate(
            build_optimizer(self._optim, trained, network.scorer.model),
            max_grad_norm=cfg.optim.max_grad_norm,
            dump_dir=folder / "not_finite_critic",
            ranks=ranks,
        )

    @torch.no_grad()
    def judge(self, rows: TensorDictBase) -> None:
        """Write values, advantages and targets into the rows of a step; rank 0 calls it.

        Args:
            rows: ``[B]``, with tokens, assistant mask and reward.
        """
        tell(self._ranks, RankJob.JUDGE_ROWS)
        packed = pack_batch(rows, TokenKeys(), "assistant", Entries({}, {}), who="Critic")
        values = self.judge_share(packed)
        assert values is not None
        own = [row.unsqueeze(-1) for row in spread_to_rows(packed, values)]
        set_rows(rows, keys.STATE_VALUE, own)
        self._advantages(rows)

    def judge_share(self, batch: PackedBatch | None = None) -> Tensor | None:
        """Compute the values of this rank's share of the rows; all ranks do.

        Args:
            batch: all rows, which rank 0 has.

        Returns:
            On rank 0 those of all trained tokens.
        """
        network = self.network
        return target_scores(
            self._ranks,
            batch,
            lambda part: network.value_packed(part.ids, part.lengths, part.target_mask),
            max_tokens=self._cfg.train.micro_batch_tokens or DEFAULT_TOKENS,
        )

    def update(self, share: RankShare, number: int) -> dict[str, float]:
        """Make an optimizer step of the critic; all ranks do.

        Args:
            share: this rank's part of the rows.
            number: of the step, from 1.

        Returns:
            Metrics of it.
        """
        rate = set_learning_rate(
            self._optim, self.gate.optimizer, number, self._cfg.train.num_steps
        )
        window = self.loss.measure_window(share.parts, ranks=self._ranks)
        own = replace(share, window=window, model=self.network.model)
        outputs = []
        for part in own.micro_batches():
            outputs.append(self.loss(part, window=window))
            self.gate.backward(outputs[-1], part)
        outcome = self.gate.step()
        output = CriticLossOutput.combine(outputs, ranks=self._ranks)
        return critic_metrics(output, outcome) | {"critic/learning_rate": rate}

    def parts(self) -> dict[str, Sharded]:
        """What of it is saved of which each rank has a share."""
        model = self.network.model
        return {
            "critic": ShardedModel(model),
            "critic_optimizer": ShardedOptimizer(model, self.gate.optimizer),
        }

    def save(self, folder: Path, weights: Mapping[str, Tensor] | None) -> None:
        """Leave the model as Transformers' class for sequence classification loads it.

        Args:
            folder: is made.
            weights: of a sharded model, whole.
        """
        state = None if weights is None else dict(weights)
        self.network.scorer.model.save_pretrained(folder, state_dict=state)


def critic_metrics(output: CriticLossOutput, outcome: StepOutcome) -> dict[str, float]:
    """The numbers of an optimizer step of a critic, by name.

    Args:
        output: of the whole step.
        outcome: of the optimizer.
    """
    return {
        "critic/loss": float(output.loss_critic),
        "critic/explained_variance": float(output.explained_variance),
        "critic/value": float(output.value),
        "critic/value_target": float(output.value_target),
        "critic/grad_norm": outcome.grad_norm,
    }


def mean_metrics(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number over the optimizer steps in one step of the run.

    Args:
        updates: the numbers of each optimizer step, by the same names; empty where there was none.
    """
    names = dict.fromkeys(name for update in updates for name in update)
    return {n: sum(update[n] for update in updates) / len(updates) for n in names}
