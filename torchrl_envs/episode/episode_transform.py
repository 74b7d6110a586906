"""What a transform can do in the course of an episode, beside transforming entries.

Shape legend: B rows.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tensordict import TensorDictBase
from torchrl.envs import Transform

from torchrl_data.conversation.object_entries import read_objects, write_objects
from torchrl_data.keys import STOP_REASON
from torchrl_data.stop_reasons import ENVIRONMENT_ERROR
from torchrl_envs.concurrency.calls import ConcurrentCalls
from torchrl_envs.tool_calls.results import error_line

T = TypeVar("T", bound=Transform)
_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from .episode_env import EpisodeEnv


class EpisodeTransform(Transform):
    """A transform that an :class:`~torchrl_envs.EpisodeEnv` tells about its episodes.

    The order of events is fixed, whatever the order in which transforms were appended:

    1. ``draw_rows``: data is drawn for the rows that are reset;
    2. ``begin_episodes``: their environments start and may add to the query; a row that can't
       begin (:meth:`refuse_rows`) takes part in nothing more, and its first step ends it;
    3. the base environment resets, and the transforms' ``_reset`` runs;
    4. each step, the base environment steps, the jobs of all :class:`ToolSource` run, and the
       transforms' ``_step`` runs;
    5. ``limit_turns``, also after a reset: the next turn is bounded, or is not to be;
    6. ``finish_episodes``: rows that are done are scored;
    7. ``record_ends``: they are over, scored or not;
    8. ``release_episodes``: what a row held is given back.
    """

    @property
    def by_token(self) -> bool:
        """Whether it can make ``reward`` dense, ``[B, T, 1]``, at the end of an episode."""
        return False

    @property
    def calls(self) -> ConcurrentCalls:
        """Runs calls, sync and async, on the threads and the one loop of the environment."""
        container = self.container
        if container is None or not hasattr(container, "calls"):
            raise self._misplaced()
        return container.calls  # type: ignore[union-attr]

    @property
    def in_environment(self) -> bool:
        """Whether it belongs to an environment, and not to a replay buffer or nothing."""
        try:
            return self.container is not None
        except ValueError:  # TorchRL's, for a Compose that belongs to no environment.
            return False

    def env_transforms(self, kind: type[T]) -> list[T]:
        """The transforms of a class in the environment that this one belongs to."""
        container = self.container
        if container is None or not hasattr(container, "transforms_of"):
            raise self._misplaced()
        return list(container.transforms_of(kind))  # type: ignore[union-attr]

    def _reset_env_preprocess(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Called by a plain ``TransformedEnv`` only, which would leave the episodes out.

        Raises:
            RuntimeError: always.
        """
        del tensordict
        raise self._misplaced()

    def _misplaced(self) -> RuntimeError:
        return RuntimeError(
            f"{type(self).__name__} works inside an EpisodeEnv only: use "
            "ChatEnv(...).append_transform(...) instead of TransformedEnv(...)."
        )

    def check(self, env: "EpisodeEnv") -> None:
        """Raise if the composition can't work; called before the first reset."""

    def check_policy(self, policy: Any) -> None:
        """Raise if what the policy says would be misread; called by a collector at construction."""

    def draw_rows(self, batch: TensorDictBase, rows: Sequence[int]) -> None:
        """Write data for some rows into the batch that the reset starts from."""

    def begin_episodes(self, batch: TensorDictBase, rows: Sequence[int]) -> None:
        """Start the episodes of some rows; may change ``query`` and ``tools``."""

    def refuse_rows(
        self, batch: TensorDictBase, failures: Mapping[int, tuple[str, BaseException]]
    ) -> None:
        """Say in ``begin_episodes`` that some rows can't begin; it is logged, and ends them alone.

        Args:
            batch: gets ``stop_reason``: ``"environment_error: <where>: <type>: <message>"``.
            failures: where it failed and the error, by row.
        """
        if not failures:
            return
        reasons = read_objects(batch, STOP_REASON, "")
        for row, (where, error) in failures.items():
            _log.warning("Row %d does not begin: %s failed", row, where, exc_info=error)
            reasons[row] = f"{ENVIRONMENT_ERROR}: {where}: {error_line(error)}"
        write_objects(batch, STOP_REASON, reasons)

    def limit_turns(
        self, batch: TensorDictBase, next_batch: TensorDictBase, rows: Sequence[int]
    ) -> None:
        """Bound the next turn of some rows, or end them.

        Args:
            batch: what a step or a reset started from.
            next_batch: what came out. ``max_new_tokens`` bounds a turn; a ``stop_reason`` ends a
                row, truncated (after a reset: at its first step, in which the policy says nothing).
            rows: those that took part, whether done or not.
        """

    def finish_episodes(
        self, batch: TensorDictBase, next_batch: TensorDictBase, rows: Sequence[int]
    ) -> None:
        """Score some rows that are done; may write to ``next_batch``."""

    def record_ends(self, rows: Sequence[int]) -> None:
        """Note that the episodes of some rows have ended, rather than been given up."""

    def release_episodes(self, rows: Sequence[int]) -> None:
        """Give back what some rows held."""
