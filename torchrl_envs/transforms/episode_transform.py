"""What a transform can do in the course of an episode, beside transforming entries.

Shape legend: B rows.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from tensordict import TensorDictBase
from torchrl.envs import Transform

from torchrl_envs.concurrent_calls import ConcurrentCalls

T = TypeVar("T", bound=Transform)

if TYPE_CHECKING:
    from torchrl_envs.episode_env import EpisodeEnv


class EpisodeTransform(Transform):
    """A transform that an :class:`~torchrl_envs.episode_env.EpisodeEnv` tells about its episodes.

    The order of events is fixed, whatever the order in which transforms were appended:

    1. ``draw_rows``: data is drawn for the rows that are reset;
    2. ``begin_episodes``: their environments start and may add to the query;
    3. the base environment resets, and the transforms' ``_reset`` runs;
    4. each step, the base environment steps, the jobs of all :class:`ToolSource` run, and the
       transforms' ``_step`` runs;
    5. ``finish_episodes``: rows that are done are scored;
    6. ``release_episodes``: what a finished row held is given back.
    """

    @property
    def calls(self) -> ConcurrentCalls:
        """Runs calls, sync and async, on the threads and the one loop of the environment."""
        container = self.container
        if container is None or not hasattr(container, "calls"):
            raise self._misplaced()
        return container.calls  # type: ignore[union-attr]

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

    def draw_rows(self, batch: TensorDictBase, rows: Sequence[int]) -> None:
        """Write data for some rows into the batch that the reset starts from."""

    def begin_episodes(self, batch: TensorDictBase, rows: Sequence[int]) -> None:
        """Start the episodes of some rows; may change ``query`` and ``tools``."""

    def finish_episodes(
        self, batch: TensorDictBase, next_batch: TensorDictBase, rows: Sequence[int]
    ) -> None:
        """Score some rows that are done; may write to ``next_batch``."""

    def release_episodes(self, rows: Sequence[int]) -> None:
        """Give back what some rows held."""
