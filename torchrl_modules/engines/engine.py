"""Engine: token ids in, token ids out, weights replaced; for batches or for each caller."""

import asyncio
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

from torch import Tensor

from torchrl_data.keys import ENTROPY, KEPT_COUNTS, UNTEMPERED_LOG_PROBS
from torchrl_modules.sampling.parameters import SamplingParameters


class EngineDied(RuntimeError):
    """An engine is gone, or makes no progress; what it had in flight has to be asked for again.

    Args:
        message: which engine, and what was seen.
        results: one per prompt of the call that failed: the generation, where it was finished
            before, ``None`` where it was in flight.
    """

    def __init__(
        self, message: str, *, results: "Sequence[Generation | None] | None" = None
    ) -> None:
        super().__init__(message)
        self.results = results


class VersionSpan(NamedTuple):
    """Tokens of a response, from ``start`` to before ``end``, drawn by one version."""

    version: int
    start: int
    end: int


class Generation(NamedTuple):
    """A sampled response."""

    ids: list[int]
    """The sampled tokens, stop token included; empty when the row could not be generated."""
    log_probs: list[float]
    """One per token, in nats, of the distribution that it was drawn from."""
    finish_reason: str
    """``"stop"``: a stop token was drawn; ``"length"``: the budget ran out; ``"error"``."""
    error: str | None = None
    """What went wrong with this row, when ``finish_reason`` is ``"error"``."""
    untempered_log_probs: Sequence[float] = ()
    """One per token, of the model's own softmax; only when asked for."""
    entropies: Sequence[float] = ()
    """One per token, in nats, of the distribution that it was drawn from; only when asked for."""
    kept_counts: Sequence[float] = ()
    """One per token: how many tokens top-k, top-p and min-p left; only when asked for."""
    sampling_masks: Sequence[bytes] = ()
    """One per token: the tokens that top-k, top-p and min-p left, see
    :class:`~torchrl_data.SamplingMasks`; only when asked for."""
    routed_experts: Tensor | None = None
    """The experts of the tokens that were read, those of the prompt first, uint8 or int16
    ``[R, L, S]``; only when asked for."""
    versions: Sequence[VersionSpan] = ()
    """Which weights drew which tokens, in order and without gaps, when the engine knows."""

    def joined(self, more: "Generation") -> "Generation":
        """This beginning of a response and what came next, with its end."""
        return more._replace(
            ids=self.ids + more.ids,
            log_probs=self.log_probs + more.log_probs,
            sampling_masks=[*self.sampling_masks, *more.sampling_masks],
        )

    def drawn_by(self, version: int) -> "Generation":
        """The same, all of it drawn by one version where the engine did not say."""
        if self.versions or not self.ids:
            return self
        return self._replace(versions=[VersionSpan(version, 0, len(self.ids))])

    def token_versions(self, otherwise: int) -> list[int]:
        """The version that drew each token.

        Args:
            otherwise: the version of all of them, when the engine did not say.
        """
        spans = self.drawn_by(otherwise).versions
        return [version for version, start, end in spans for _ in range(start, end)]

    def reported(self, params: SamplingParameters) -> dict[str, Sequence[float]]:
        """Return what was asked for of each token beside its log-prob, by the name of its entry."""
        columns: dict[str, Sequence[float]] = {}
        if params.untempered_log_probs:
            own = params.is_own_softmax
            columns[UNTEMPERED_LOG_PROBS] = self.log_probs if own else self.untempered_log_probs
        if params.entropy:
            columns[ENTROPY] = self.entropies
        if params.kept_counts:
            columns[KEPT_COUNTS] = self.kept_counts
        return columns


@runtime_checkable
class Engine(Protocol):
    """Draws tokens. One implementation per inference library.

    It may have ``vocab_size`` (token ids are below it), ``max_model_len`` (most tokens of a
    prompt and its response) and ``end_token_ids`` (by the model's own settings they end a
    response); without them the tokenizer's length counts, no limit, and its end of sequence. One
    that reads images has ``images``, which is not ``None``, and ``generate`` takes ``images=``:
    those of each prompt in order, in base 64. It is given only where a row has any. One whose
    ``generate`` takes ``seeds=``, one per prompt, is given them where ``params`` has a seed: each
    row then depends on its own alone. Another one is given ``params`` with a seed that is another
    one for each call.
    """

    @property
    def version(self) -> int:
        """Version of the weights that serve: 0 at first, and higher after each update."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        *,
        max_new_tokens: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Draw one response per prompt.

        Args:
            prompts: token ids of each row. A row that cannot be served (empty, too long, an id
                outside the vocabulary) comes back with ``finish_reason="error"``; the others are
                generated.
            params: the distribution; ``stop_token_ids`` is set.
            max_new_tokens: a budget per row that overrides the one in ``params``.

        Returns:
            One generation per prompt, in order.

        Raises:
            EngineDied: the engine is gone or stuck.
        """
        ...

    def update_weights(
        self, state_dict: Mapping[str, Tensor], *, version: int | None = None
    ) -> None:
        """Replace the weights, all or none.

        Args:
            state_dict: parameter name (Transformers' names) to value.
            version: the number of these weights, above the present one; ``None`` counts on.

        Raises:
            ValueError: a name, shape or value is wrong, or the version does not go up; the old
                weights keep serving.
        """
        ...


@runtime_checkable
class AsyncEngine(Protocol):
    """Draws one response at a time for each caller, for many at once; weights change in flight.

    It may have ``vocab_size``, ``max_model_len`` and ``end_token_ids``, as an
    :class:`Engine`. One that reads images has ``images``, which is not ``None``, and ``respond``
    takes ``images=``: those of the prompt in order, in base 64. It is given only where there are
    any. One whose ``can_keep_caches`` is true has
    ``update_weights(..., recompute=True)``: with ``False`` responses in flight go on with what the
    old weights have read.
    """

    @property
    def version(self) -> int:
        """Version of the weights that serve: 0 at first, and higher after each update."""
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
        """Drop what is kept for a conversation, if anything is. May be called from any thread.

        Args:
            session: as for `respond`.
        """
        ...

    def close(self) -> None:
        """Abort what is in flight and let go of what it holds. May be called twice."""
        ...


class EngineOver:
    """Has the version and the limits of the engine inside; one that this lacks it lacks as well."""

    _inside: Any

    @property
    def version(self) -> int:
        """Version of the weights that serve; 0 before the first update."""
        return self._inside.version

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._inside.vocab_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its response together."""
        return self._inside.max_model_len

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response by the model's own settings; none where it does not say."""
        return tuple(getattr(self._inside, "end_token_ids", ()))

    @property
    def update_dtype(self) -> Any:
        """In which type it takes weights that are sent; ``None`` where it does not say."""
        return getattr(self._inside, "update_dtype", None)

    @property
    def quantization(self) -> Any:
        """See `VLLMEngine.quantization`; ``None`` where it does not say."""
        return getattr(self._inside, "quantization", None)

    @property
    def max_adapters(self) -> int:
        """See `VLLMEngine.max_adapters`; 0 over an engine that takes none."""
        return getattr(self._inside, "max_adapters", 0)

    @property
    def shared_names(self) -> frozenset[str]:
        """See `TransformersEngine.shared_names`; none over another engine."""
        return getattr(self._inside, "shared_names", frozenset())

    @property
    def adapter_settings(self) -> tuple[Any, ...]:
        """See `TransformersEngine.adapter_settings`; none over another engine."""
        return getattr(self._inside, "adapter_settings", ())

    @property
    def takes_seeds(self) -> bool:
        """True where a seed makes a row repeat."""
        return getattr(self._inside, "takes_seeds", True)

    def check_sampling(self, params: SamplingParameters) -> None:
        """Check that the engine can draw from a distribution.

        Raises:
            ValueError: it can't.
        """
        if (check := getattr(self._inside, "check_sampling", None)) is not None:
            check(params)

    def sleep(self) -> None:
        """Lend the memory of a vLLM engine to training, until the next update wakes it.

        Raises:
            TypeError: the engine is another one.
        """
        sleep = getattr(self._inside, "sleep", None)
        if sleep is None:
            raise TypeError(f"{type(self._inside).__name__} has no memory that it could lend.")
        sleep()


class ClosedOnLeaving:
    """``with`` closes it in the end, and ``async with`` does in a thread."""

    def close(self) -> None:
        """Let go of what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.to_thread(self.close)


def common_of(engines: Iterable[Any], name: str) -> Any:
    """Return what an attribute is of all engines; ``None`` where they differ or do not say."""
    found = {getattr(engine, name, None) for engine in engines}
    return found.pop() if len(found) == 1 else None


def least_of(engines: Iterable[Any], name: str) -> int | None:
    """Return the least of what engines say that a number is; ``None`` where none says so."""
    known = [getattr(engine, name, None) for engine in engines]
    return min((value for value in known if value is not None), default=None)


def can_keep_caches(engine: Any) -> bool:
    """Return whether responses in flight can go on with what the old weights have read."""
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


class EngineLoad(NamedTuple):
    """The load of an engine, as its ``measure_load()`` gives it where ``tells_load`` is true.

    That raises :class:`EngineDied` if the engine is gone or stuck, ``ConnectionError`` if it did
    not answer, and ``RuntimeError`` if it is closed.
    """

    cache_use: float
    """Fraction of its cache of keys and values that requests in flight hold, from 0 to 1."""
    num_preemptions: int
    """How often, ever, a request was put off because the cache was full, to be read again."""
