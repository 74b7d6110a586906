"""Everything that a run needs to go on as if it had not stopped."""

import logging
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torchrl.data import ReplayBuffer

from collectors.checkpoint.errors import NoCheckpoint
from collectors.checkpoint.store import CheckpointStore
from torchrl_data import page

from .buffer_part import BufferPart
from .identity import CheckpointMismatch, installed_versions, shown_field
from .random_numbers import random_state, set_random_state
from .sharded import Sharded

_log = logging.getLogger(__name__)


@runtime_checkable
class Stateful(Protocol):
    """Protocol of a part that is saved: a model, an optimizer, a collector, a buffer."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what it needs to go on, of what a :class:`~collectors.CheckpointStore` takes."""
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
            pairs = [
                f"{n} was {shown_field(saved, n)} and is {shown_field(here, n)}" for n in differ[:5]
            ]
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
    """Return which parts there are, as fields that are compared."""
    names = {f"part {name}": "there" for name in parts}
    return names | {f"part {name}": "sharded" for name in sharded}
