"""Weights on their way from the trainer to an engine that goes on drawing."""

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager, suppress

from torch import Tensor, nn

from collectors.ledger import GroupLedger, Ticket
from torchrl_modules.engines.async_protocol import push_weights
from torchrl_modules.policies.async_policy import AsyncPolicy

from .checks import recomputes
from .producer import Producer
from .trace import Timeline
from .updater import SnapshotUpdater


@contextmanager
def paused(producer: Producer, policy: AsyncPolicy) -> Iterator[None]:
    """No token is drawn in here, and no group begins.

    Args:
        producer: begins them.
        policy: whose engine draws.
    """
    producer.hold()
    try:
        producer.submit(policy.engine.pause()).result()
        try:
            yield
        finally:
            producer.submit(policy.engine.resume()).result()
    finally:
        producer.release()


class WeightPushes:
    """Pushes copies of the trainer's weights, one at a time, and tells the ledger.

    Args:
        producer: in whose event loop the engine is updated.
        policy: whose engine.
        ledger: counts steps of training; its slots are free once their weights are pulled.
        updater: makes the copies.
        timeline: notes how long it takes.
    """

    def __init__(
        self,
        producer: Producer,
        policy: AsyncPolicy,
        ledger: GroupLedger,
        updater: SnapshotUpdater,
        timeline: Timeline,
    ) -> None:
        self._producer = producer
        self._policy = policy
        self._ledger = ledger
        self._updater = updater
        self._timeline = timeline
        self._recompute = recomputes(policy.engine, ledger.policy)
        self._push: Future[None] | None = None
        self.version = policy.version
        """Of the weights that were pushed last."""

    def push(
        self,
        source: nn.Module | Mapping[str, Tensor],
        used: Callable[[], Collection[Ticket]],
        version: int | None,
    ) -> int:
        """Wait for the last push, copy the weights and send them off.

        Args:
            source: the trained model, or its state dict.
            used: gives what the steps since the last push have used; asked once nothing can fail.
            version: what the weights are called; one more than the present when not given.

        Returns:
            That version.
        """
        self.wait()
        with self._timeline.span("copy weights", "trainer", 0):
            weights = self._updater.snapshot(source)
        number = self._policy.version + 1 if version is None else version
        with self._producer.changed:
            self._producer.check_alive()
            if trained := used():
                self._ledger.trained(trained, self._ledger.version)
            step = self._ledger.version
            self._producer.steps[number] = step
        self._push = self._producer.submit(self._send(weights, number, step))
        self.version = number
        return number

    async def _send(self, weights: Mapping[str, Tensor], version: int, step: int) -> None:
        with self._timeline.span("push weights", "trainer", 1):
            async with self._producer.weights:
                engine = self._policy.engine
                await push_weights(engine, weights, version=version, recompute=self._recompute)
        with self._producer.changed:
            self._ledger.weights_pulled(step)
            self._producer.changed.notify_all()
        self._producer.drop_stale()
        self._producer.wake()

    def unchanged(self, used: Callable[[], Collection[Ticket]]) -> None:
        """Steps were made without a push.

        Args:
            used: gives what they have used; asked once nothing can fail.
        """
        if self._ledger.weight_sync_steps == 1:
            self.wait()  # what is on its way is older than what the generators will count as
        with self._producer.changed:
            self._producer.check_alive()
            self._ledger.trained(used(), self._ledger.version)
            if self._ledger.weight_sync_steps == 1:
                # Who pushes after every step, and has not, has not changed the weights.
                self._producer.steps[self._policy.version] = self._ledger.version
                self._ledger.weights_pulled(self._ledger.version)
        self._producer.wake()

    def close(self) -> None:
        """Raise what became of the last push, if it has failed; one that was cut short has not.

        Raises:
            UpdateRefused: the engine refused it.
        """
        push, self._push = self._push, None
        if push is not None:
            with suppress(CancelledError):
                push.result()

    def wait(self) -> None:
        """Wait until the engine has the weights that were pushed last.

        Raises:
            UpdateRefused: it refused them.
        """
        push = self._push
        if push is None:
            return
        with self._timeline.span("wait for push", "trainer", 0):
            wait([push])  # Interrupted, it is waited for the next time.
        self._push = None
        try:
            push.result()
        except CancelledError:
            self._producer.check_alive()
            raise
