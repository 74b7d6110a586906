"""Base of collectors that collect while training goes on."""

from abc import abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn

from collectors.collector import Collector

from .loop_thread import CollectionThread


class BackgroundCollector(Collector):
    """Collects beside training: what is pushed to the policy is on its way for a while."""

    _source: Any
    """Gives batches. It has ``taken``, the tickets of the last one, ``is_with_caller``, whether its
    rows are with who asked for them, and ``put_back()``, after which they may be taken again; and
    ``state()`` and ``load(state)``: of the ledger, the place in the data, and the rows of the
    groups that wait."""

    _loop: CollectionThread
    """In which it collects, and weights are pushed."""

    _is_lockstep: bool
    """Generation and training take turns."""

    _push_under_way: "Future[None] | None" = None
    _pushed_version = 0
    """Of the weights that were pushed last."""

    @property
    def is_running(self) -> bool:
        """Whether it collects in the background."""
        return self._loop.is_alive

    @property
    def _served_version(self) -> int:
        """The version that the policy has acknowledged."""
        return self.policy_version

    def _wait_for_push(self) -> None:
        """Wait until the policy has the weights that were pushed last; interrupted, the next time.

        Raises:
            UpdateRefused: it refused them, and goes on with those before.
        """
        if (push := self._push_under_way) is None:
            return
        try:
            self._loop.result_of(push)
        except Exception:
            if push.done():
                self._push_under_way = None
                self._loop.check_open()
                self._pushed_version = self._served_version
            raise
        self._push_under_way = None

    def collect(self) -> TensorDictBase:
        """The next batch: complete groups, as soon as there are enough.

        After an error, such as one of ``postproc``, the next call gives the same groups.

        Returns:
            Rows ``[B]`` as :meth:`LLMCollector.collect` gives them, the groups in the order in
            which they are trained. The same rows are in the replay buffer.

        Raises:
            DataExhaustedError: there are no more data, and nothing is under way.
            CollectorDied: on a cluster the ledger, or a place of collectors, is gone.
            RuntimeError: the collection has failed; the cause is attached.
        """
        try:
            batch = super().collect()
        except BaseException:  # of ``postproc`` or the buffer, or a Ctrl-C on the way
            if self._source.taken and not self._source.is_with_caller:
                self._source.put_back()
            raise
        self._source.is_with_caller = True
        return batch

    def give_up_batch(self) -> None:
        """The batch that came last will not be trained: a resumed run collects its prompts again.

        For who is cut short between :meth:`collect` and the training.
        """
        self._source.is_with_caller = False

    def update_policy_weights_(
        self,
        source: nn.Module | Mapping[str, Tensor] | None = None,
        *,
        state_dict: Mapping[str, Tensor] | None = None,
        version: int | None = None,
        wait: bool = False,
    ) -> int:
        """Push the trainer's weights, while generation and training go on.

        A copy is made at once; who draws takes it up between two tokens, and the next push (or
        ``wait``) waits until that has happened. What is refused is raised there, and by
        :meth:`shutdown`.

        Args:
            source: the trained model, or its state dict.
            state_dict: the same under TorchRL's name; give one of the two.
            version: the number of these weights, above the present one; ``None`` counts on.
            wait: until they are acknowledged.

        Returns:
            The version that these weights will have.

        Raises:
            TypeError: neither or both of ``source`` and ``state_dict`` are given.
            ValueError: the weights can't be taken, or the version does not go up; or the policy
                draws from the very tensors that are trained, though training goes on meanwhile.
            UpdateRefused: the last push was refused; all is drawn with the weights before.
        """
        number = super().update_policy_weights_(source, state_dict=state_dict, version=version)
        if wait or self._is_lockstep:
            self._wait_for_push()
        return number

    def state_dict(self) -> dict[str, Any]:
        """State: the ledger, the place in the data, and the rows of the groups that wait.

        May be asked while it collects, and while a push is under way. Unfinished groups are not in
        here: a resumed run begins them again, with the same seeds.

        Returns:
            See :meth:`Collector.state_dict`; the rows as the batches have them.
        """
        return {
            **super().state_dict(),
            **self._source.state(),
            "policy_version": self._pushed_version,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See :meth:`Collector.load_state_dict`; no prompt is skipped, and none trained twice.

        Args:
            state_dict: what :meth:`state_dict` gave.

        Raises:
            ValueError: data, environment or settings of the ledger are others.
            LedgerError: it has collected already.
        """
        super().load_state_dict(state_dict)
        self._source.load(state_dict)

    @abstractmethod
    def async_shutdown(self, timeout: float | None = None) -> None:
        """Cancel what runs, and give back everything.

        Args:
            timeout: seconds until it has to be over.
        """

    def shutdown(self) -> None:
        """See :meth:`async_shutdown`."""
        self.async_shutdown()


def verdict(metrics: Mapping[str, float]) -> str:
    """Return what the speed of a run depends on.

    Args:
        metrics: what :meth:`StreamingCollector.metrics` gave.

    Returns:
        ``"generation-bound"``: the trainer waits for rollouts; ``"trainer-bound"``: finished groups
        wait for the trainer; ``"balanced"``: neither.
    """
    if metrics["collect/trainer_wait_fraction"] > 0.1:
        return "generation-bound"
    return "trainer-bound" if metrics["collect/queued_groups"] > 0 else "balanced"
