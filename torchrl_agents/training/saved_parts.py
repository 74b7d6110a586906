"""Model and optimizer as a checkpoint has them: whole, by the names of the parameters.

So a run goes on with another number of ranks. Rank 0 saves and loads; the others take part.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from .crew import Crew


class ModelPart:
    """A model that ranks may have in shards.

    Args:
        model: as it is trained.
        crew: the ranks that train it.
        trained_only: leave out what is frozen of it.
    """

    def __init__(self, model: nn.Module, crew: Crew, *, trained_only: bool = False) -> None:
        self._model = model
        self._crew = crew
        self._trained_only = trained_only
        crew.learn_job("save model", self._get)
        crew.learn_job("load model", self._set)

    def state_dict(self) -> dict[str, Any]:
        """The whole weights, by name; those of one process as they are, no copies."""
        return self._crew.do("save model")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give all ranks these weights."""
        self._crew.tell("load model")
        self._set(state_dict)

    def _get(self) -> dict[str, Any]:
        if self._crew.ranks.size == 1:
            return self._own()
        return get_model_state_dict(self._model, options=_gathered(trained_only=self._trained_only))

    def _set(self, state: Mapping[str, Any] | None = None) -> None:
        if self._crew.ranks.size == 1:
            assert state is not None
            self._model.load_state_dict(state, strict=not self._trained_only)
            return
        options = _dealt_out(trained_only=self._trained_only)
        set_model_state_dict(self._model, dict(state or {}), options=options)

    def _own(self) -> dict[str, Any]:
        """Of one process, no copies."""
        if not self._trained_only:
            return self._model.state_dict()
        named = self._model.named_parameters()
        return {name: value.detach() for name, value in named if value.requires_grad}


class OptimizerPart:
    """An optimizer over a model that ranks may have in shards.

    Args:
        model: as it is trained.
        optimizer: of its parameters.
        crew: the ranks that train it.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, crew: Crew) -> None:
        self._model = model
        self._optimizer = optimizer
        self._crew = crew
        crew.learn_job("save optimizer", self._get)
        crew.learn_job("load optimizer", self._set)

    def state_dict(self) -> dict[str, Any]:
        """What it remembers, by the names of the parameters; nothing before its first step."""
        if not self._optimizer.state:  # asked for now, it would make a step of zeros
            return {}
        return self._crew.do("save optimizer")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give all ranks what it remembered."""
        if state_dict:
            self._crew.tell("load optimizer")
            self._set(state_dict)

    def _get(self) -> dict[str, Any]:
        options = None if self._crew.ranks.size == 1 else _gathered()
        return get_optimizer_state_dict(self._model, self._optimizer, options=options)

    def _set(self, state: Mapping[str, Any] | None = None) -> None:
        options = None if self._crew.ranks.size == 1 else _dealt_out()
        whole = cast("Any", dict(state or {}))
        set_optimizer_state_dict(self._model, self._optimizer, whole, options=options)


def _gathered(*, trained_only: bool = False) -> StateDictOptions:
    """Whole on rank 0, on the CPU; nothing on the others."""
    return StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=trained_only
    )


def _dealt_out(*, trained_only: bool = False) -> StateDictOptions:
    """Whole on rank 0, from where every rank gets its share."""
    return StateDictOptions(
        full_state_dict=True,
        broadcast_from_rank0=True,
        ignore_frozen_params=trained_only,
        strict=not trained_only,
    )
