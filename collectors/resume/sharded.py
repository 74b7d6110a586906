"""A model and its optimizer as parts of a run of which every rank saves what it holds."""

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from collectors.checkpoint.errors import CheckpointError

_KERNELS: Final = ("foreach", "fused")
"""Settings of an optimizer that say by what kernels it makes a step."""
Load = Callable[..., list[str]]
"""Fills a state dict in place, with what the ranks of a checkpoint saved: ``load_sharded`` of a
:class:`~collectors.Checkpoint`, whose name is given."""


@runtime_checkable
class Sharded(Protocol):
    """A part of a run of which every rank may hold another share; all ranks call it together."""

    def sharded_state_dict(self) -> Mapping[str, Any] | None:
        """State for ``sharded`` of a :class:`~collectors.CheckpointStore`; ``None``: nothing."""
        ...

    def load_sharded(self, load: Load) -> None:
        """Go on from there, sharded in whatever way: ``load`` fills a state dict of this layout."""
        ...


class ShardedModel:
    """A model of which every rank saves and loads its share; a part of :class:`RunState`.

    Each parameter is written by a rank that holds it, under the name that it has in one process,
    tied ones once. So what FSDP2 shards, DDP copies or one process holds loads into each other.

    Args:
        model: as it is trained: whole, in :class:`~torch.nn.parallel.DistributedDataParallel`, or
            sharded with ``fully_shard``.
        trained_only: leave out what is frozen, which the run can load again: of adapters, say, all
            but these. Give what the rest has to be to the identity of the :class:`RunState`.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Linear(2, 1)
        >>> run = RunState(model=ShardedModel(model))
        >>> with tempfile.TemporaryDirectory() as folder, CheckpointStore(folder) as store:
        ...     _ = run.save(store, 1)
        ...     _ = torch.nn.init.zeros_(model.weight)
        ...     print(run.restore(store), bool(model.weight.any()))
        1 True
    """

    def __init__(self, model: nn.Module, *, trained_only: bool = False) -> None:
        self._model = model
        self._options = StateDictOptions(ignore_frozen_params=trained_only)
        inside = model.module if isinstance(model, DistributedDataParallel) else model
        first = {name for name, _ in inside.named_parameters()}
        every = {name for name, _ in inside.named_parameters(remove_duplicate=False)}
        self._tied = every - first

    def sharded_state_dict(self) -> dict[str, Any]:
        """Weights by name: the model's own memory, tied weights once.

        Returns:
            Tensors, or DTensors of a sharded model.
        """
        weights = get_model_state_dict(self._model, options=self._options)
        return {name: value for name, value in weights.items() if name not in self._tied}

    def load_sharded(self, load: Load) -> None:
        """Take other weights.

        Args:
            load: fills this rank's share of them in place.

        Raises:
            CheckpointError: they are of another model.
        """
        load(self.sharded_state_dict())


class ShardedOptimizer:
    """An optimizer of which every rank saves and loads its share; a part of :class:`RunState`.

    Args:
        model: as it is trained, see :class:`ShardedModel`.
        optimizer: of its parameters.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    def sharded_state_dict(self) -> dict[str, Any] | None:
        """Return what it remembers, by the names of the parameters.

        Returns:
            Tensors, or DTensors of a sharded model, and the settings of its groups; ``None`` before
            its first step.
        """
        if not self._optimizer.state:  # asked for now, it would make a step of zeros
            return None
        return dict(get_optimizer_state_dict(self._model, self._optimizer))

    def load_sharded(self, load: Load) -> None:
        """Take what another one remembered.

        Args:
            load: fills this rank's share of it in place.

        Raises:
            CheckpointError: it is of other parameters, or remembered something else of them.
        """
        state: Any = get_optimizer_state_dict(self._model, self._optimizer)
        groups = self._optimizer.param_groups
        # How a step is computed depends on the shards of this run, not on those of the other one.
        kernels = [{n: x for n, x in group.items() if n in _KERNELS} for group in groups]
        names = [name for group in state["param_groups"] for name in group["params"]]
        owners = dict(zip(names, (p for group in groups for p in group["params"]), strict=True))
        kept: dict[str, dict[str, Any]] = state["state"]
        whole = {name: {f"state.{name}.{key}" for key in own} for name, own in kept.items()}
        lacking = {*load(state, may_lack="state.")}
        # What had no gradient before the save, such as of an agent without turns, has no state.
        without = [name for name, places in whole.items() if places and places <= lacking]
        if odd := sorted(lacking.difference(*(whole[name] for name in without))):
            raise CheckpointError(f"the optimizer's {odd[0]!r} is not in the checkpoint.")
        set_optimizer_state_dict(self._model, self._optimizer, state)
        for name in without:
            del self._optimizer.state[owners[name]]
        for group, own in zip(self._optimizer.param_groups, kernels, strict=True):
            group.update(own)
