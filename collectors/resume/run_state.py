"""Everything that a run needs to go on as if it had not stopped."""

import logging
from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

from collectors.checkpoint.store import CheckpointStore

from .identity import check_identity, installed_versions
from .random_state import random_state, set_random_state

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

    Args:
        identity: what a checkpoint has to have in common with this run, by field: see
            :func:`~collectors.identity_of`.
        **parts: what has ``state_dict()`` and ``load_state_dict()``, by name. They are restored in
            this order, the random numbers last.

    Raises:
        TypeError: a part lacks one of the two.
    """

    def __init__(self, *, identity: Mapping[str, Any] | None = None, **parts: Stateful) -> None:
        for name, part in parts.items():
            if not isinstance(part, Stateful):
                raise TypeError(
                    f"RunState: {name} is of type {type(part).__name__}, which has no state_dict() "
                    "and load_state_dict()."
                )
        self.identity = dict(identity or {})
        self.parts = parts
        self.further: dict[str, Any] = {}
        """What :meth:`restore` found beside the parts."""

    def state_dict(self, *, without: Collection[str] = ()) -> dict[str, Any]:
        """The state of everything; tensors are those of the parts, no copies.

        Args:
            without: parts that are left out.
        """
        return {
            "identity": self.identity,
            "versions": installed_versions(),
            "random": random_state(),
            "parts": {
                name: dict(part.state_dict())
                for name, part in self.parts.items()
                if name not in without
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Go on from a state; nothing is changed if it belongs to another run.

        Args:
            state: what :meth:`state_dict` gave.
            allow: fields of the identity that may differ.

        Raises:
            CheckpointMismatch: it belongs to another model, tokenizer, template or version, or has
                other parts; the message names the field.
        """
        parts = {f"part {name}": "there" for name in state["parts"]}
        here = {f"part {name}": "there" for name in self.parts}
        check_identity(state["identity"] | parts, self.identity | here, allow=allow)
        others = {
            name: (found, state["versions"].get(name))
            for name, found in installed_versions().items()
            if found != state["versions"].get(name)
        }
        if others:
            _log.warning(
                "The checkpoint was made with other versions, so numbers may differ: %s",
                ", ".join(f"{name} {was} (now {now})" for name, (now, was) in others.items()),
            )
        for name, part in self.parts.items():
            part.load_state_dict(state["parts"][name])
        set_random_state(state["random"])

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
        """Save everything.

        Args:
            store: where.
            step: steps that were made.
            metric: see :meth:`CheckpointStore.save`.
            wait: whether to wait until it is on the disk, or only until it is copied.
            further: what else to keep, by name.
            since: what :meth:`state_dict` gave earlier, of some parts: they and the random numbers
                are saved as they were then.
        """
        state = self.state_dict(without=() if since is None else since["parts"])
        if since is not None:
            state["random"] = since["random"]
            state["parts"] = {**state["parts"], **since["parts"]}
        state["further"] = dict(further or {})
        store.save(step, state, metric=metric, wait=wait)

    def restore(self, store: CheckpointStore, *, allow: Collection[str] = ()) -> int:
        """Go on from the newest checkpoint that verifies.

        Args:
            store: where it was saved.
            allow: see :meth:`load_state_dict`.

        Returns:
            The steps that were made; 0 where nothing was saved.

        Raises:
            CheckpointMismatch: it belongs to another run.
            CheckpointError: there are checkpoints, and none verifies.
        """
        if not store.steps():
            return 0
        checkpoint = store.load()
        self.load_state_dict(checkpoint.state, allow=allow)
        self.further = dict(checkpoint.state["further"])
        return checkpoint.step
