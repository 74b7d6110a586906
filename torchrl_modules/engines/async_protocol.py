"""What an engine does for a collector without barriers: one response for each of many callers."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from torchrl_modules.sampling.params import SamplingParameters

from .protocol import Generation


@runtime_checkable
class AsyncEngine(Protocol):
    """Draws one response at a time for each caller, for many at once; weights change in flight.

    It may have ``vocab_size`` and ``max_model_len``, as an
    :class:`~torchrl_modules.engines.protocol.Engine`. One whose ``can_keep_caches`` is true has
    ``update_weights(..., recompute=True)``: with ``False`` responses in flight go on with what the
    old weights have read.
    """

    @property
    def version(self) -> int:
        """Of the weights that serve: 0 at first, and higher after each update."""
        ...

    async def respond(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        *,
        max_new_tokens: int | None = None,
        session: Hashable = None,
    ) -> Generation:
        """Draw one response; to be awaited in an event loop. Cancelling it aborts the request.

        Args:
            prompt: token ids. One that can't be served (empty, too long, an id outside the
                vocabulary) comes back with ``finish_reason="error"``.
            params: the distribution; ``stop_token_ids`` is set.
            max_new_tokens: overrides the budget in ``params``.
            session: the same for all calls of one conversation: what was read for one is kept for
                the next, and a fleet sends them to one engine. The tokens decide what is used, so
                a wrong key costs time alone.

        Returns:
            The response; ``versions`` says of each token which weights drew it.

        Raises:
            EngineDied: the engine is gone or stuck.
            RuntimeError: it is closed.
            ValueError: it can't draw from this distribution.
        """
        ...

    async def update_weights(
        self, state_dict: Mapping[str, Tensor], *, version: int | None = None
    ) -> None:
        """Replace the weights, all or none, between two tokens of the responses in flight.

        Args:
            state_dict: parameter name (Transformers' names) to value.
            version: the number of these weights, above the present one; ``None`` counts on.

        Raises:
            EngineDied: the engine is gone or stuck.
            UpdateRefused: a name, type, shape or value is wrong, or the version does not go up;
                the old weights keep serving.
        """
        ...

    async def pause(self) -> None:
        """Draw no more tokens; requests wait, and new ones are taken on."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`."""
        ...

    def end_session(self, session: Hashable) -> None:
        """What is kept for a conversation may go; one that is not known is none. From any thread.

        Args:
            session: as for `respond`.
        """
        ...

    def close(self) -> None:
        """Abort what is in flight and let go of what it holds. May be called twice."""
        ...


def can_keep_caches(engine: Any) -> bool:
    """Whether responses in flight can go on with what the old weights have read."""
    return bool(getattr(engine, "can_keep_caches", False))


async def push_weights(
    engine: AsyncEngine, state_dict: Mapping[str, Tensor], *, version: int, recompute: bool
) -> None:
    """Replace the weights; raises as `AsyncEngine.update_weights`.

    Args:
        engine: whose; ``recompute=False`` takes one that ``can_keep_caches``.
        state_dict: parameter name to value.
        version: of these weights.
        recompute: what responses in flight have so far is read again.
    """
    # Engines that always recompute need not have the argument.
    options: dict[str, Any] = {} if recompute else {"recompute": False}
    await engine.update_weights(state_dict, version=version, **options)
