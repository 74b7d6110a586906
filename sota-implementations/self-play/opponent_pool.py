"""Past versions of the policy, against which it also plays."""

from collections import deque
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from config import OpponentsConfig
from torch import Tensor

from torchrl_agents.models.policies import transformers_policy
from torchrl_agents.settings.schema import RecipeConfig
from torchrl_agents.settings.started_ranks import num_ranks
from torchrl_agents.training import TrainingStep
from torchrl_modules import TransformersWrapper


def check_opponents(cfg: OpponentsConfig, *, engine: str) -> None:
    """Check what can be known before anything is loaded.

    Raises:
        ValueError: a setting can't take effect.
    """
    default = OpponentsConfig()
    if cfg.every is None:
        if cfg != default:
            raise ValueError("max_size and share are for past versions: set opponents.every.")
        return
    if engine != "transformers":
        raise ValueError(
            f"past versions are drawn from in this process: take engine=transformers, not {engine}."
        )
    if num_ranks() > 1:
        raise ValueError("past versions are kept by one process, and torchrun started several.")


class OpponentPool:
    """Versions of a policy, and who of them plays which games.

    What it draws follows from the seed and the number of the step alone, so a run that goes on
    meets the same opponents.

    Args:
        cfg: how often a version is taken, how many are kept, their share of the games.
        run: the settings of the run; its seed counts.
        actor: is trained; versions of it are kept on the CPU, of adapters these alone.
    """

    def __init__(self, cfg: OpponentsConfig, run: RecipeConfig, actor: TransformersWrapper) -> None:
        assert cfg.every is not None
        self._cfg = cfg
        self._every = cfg.every
        self._seed = run.seed
        self._actor = actor
        model = deepcopy(actor.model).eval().requires_grad_(False)
        self.policy = transformers_policy(run, model, actor.tokenizer)
        """Plays with the weights of the version that was drawn last."""
        self.versions: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=cfg.max_size)
        """After which step each was taken, and its weights, the oldest first."""
        self._num_steps = 0
        self._take()

    def _take(self) -> None:
        weights = {
            name: parameter.detach().cpu().clone()
            for name, parameter in self._actor.model.named_parameters()
            if parameter.requires_grad
        }
        self.versions.append((self._num_steps, weights))

    def draw(self, num_games: int) -> dict[int, int]:
        """Let one version play in the next step.

        Args:
            num_games: of that step.

        Returns:
            The seat of the version by the number of the game, for its share of the games; the seats
            in turn.
        """
        rng = np.random.default_rng([self._seed, self._num_steps])
        _, weights = self.versions[int(rng.integers(len(self.versions)))]
        with torch.no_grad():
            for name, parameter in self.policy.model.named_parameters():
                if name in weights:
                    parameter.copy_(weights[name])
        count = max(1, round(self._cfg.share * num_games))
        first = int(rng.integers(2))
        return {game: (first + game) % 2 for game in range(count)}

    def after(self, step: TrainingStep) -> Mapping[str, float]:
        """A step is over: take a version if it is time, and tell how many there are."""
        self._num_steps = step.number
        if step.number % self._every == 0:
            self._take()
        return {"opponents": float(len(self.versions))}

    def state_dict(self) -> dict[str, Any]:
        """The versions, and how many steps were made; tensors are its own, no copies."""
        versions = [{"step": step, "weights": weights} for step, weights in self.versions]
        return {"num_steps": self._num_steps, "versions": versions}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with the versions of a state."""
        self._num_steps = state_dict["num_steps"]
        self.versions.clear()
        for version in state_dict["versions"]:
            self.versions.append((version["step"], dict(version["weights"])))
