"""Protocols of an engine, blocking or asynchronous, and its load."""

import asyncio
import inspect
import math
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol, Self, runtime_checkable

from torch import Tensor

from torchrl_data.conversation import stream_number
from torchrl_data.keys import ENTROPY, KEPT_COUNTS, SAMPLING_MASK, UNTEMPERED_LOG_PROBS
from torchrl_modules.sampling.parameters import SamplingParameters

# What an inference engine does for a policy: token ids in, token ids out, weights replaced.


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


# What an engine does for a collector without barriers: one response for each of many callers.


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
    def max_adapters(self) -> int:
        """See `VLLMEngine.max_adapters`; 0 over an engine that takes none."""
        return getattr(self._inside, "max_adapters", 0)

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


# What an engine gave, where a policy or a collector reads it: an engine may be anybody's.

_ROUNDING: Final = 1e-3
"""A log-prob above 0 by less is one of 0, in the precision of the engine."""


def checked(
    engine: Engine | AsyncEngine, given: Any, params: SamplingParameters, num_prompts: int
) -> list[Generation]:
    """Return what an engine gave, if it is what an engine promises.

    Args:
        engine: whose; no token is of a later version than its own.
        given: by ``generate``, or in a list by ``respond``.
        params: what it was asked for.
        num_prompts: as many responses are due.

    Raises:
        ValueError: it is something else; the message says what, and what is due.
    """
    found = len(given) if isinstance(given, list | tuple) else type(given).__name__
    faults: Iterable[str] = [f"it gave {found}"]
    if found == num_prompts:
        faults = (_fault_of(row, each, params, engine) for row, each in enumerate(given))
    if fault := next(filter(None, faults), ""):
        raise ValueError(
            f"{type(engine).__name__} does not do what an engine promises, for {num_prompts} "
            f"prompts: {fault}. Give one Generation per prompt, in order, of plain lists: see "
            "torchrl_modules.Engine and AsyncEngine."
        )
    return list(given)


def _fault_of(row: int, given: Any, params: SamplingParameters, engine: Any) -> str:
    """Return what is wrong with a response, or nothing."""
    if not isinstance(given, Generation):
        return f"response {row} is a {type(given).__name__}, not a Generation"
    columns: dict[str, Any] = {"ids": given.ids, "log_probs": given.log_probs}
    columns |= given.reported(params)
    if params.sampling_mask:
        columns[SAMPLING_MASK] = given.sampling_masks
    sizes = [len(each) if isinstance(each, Sequence) else -1 for each in columns.values()]
    if given.finish_reason not in (("error",) if given.error else ("stop", "length", "abort")):
        return f"response {row} has finish_reason {given.finish_reason!r}, error={given.error!r}"
    if set(sizes) != {max(sizes[0], 0)}:
        return f"response {row} has no lists of one length, {columns!r:.200}"
    if not {int}.issuperset(map(type, given.ids)) or min(given.ids, default=0) < 0:
        return f"response {row} has ids that are none of tokens, {given.ids!r:.80}"
    spans = given.versions or ()  # an engine need not know
    known = all(isinstance(s, VersionSpan) and 0 <= s[0] <= engine.version for s in spans)
    if not known or len(given.token_versions(0)) != len(given.ids):
        return f"response {row} has {spans!r:.200}, and the engine has version {engine.version}"
    fault = log_prob_fault(given) if given.error is None else ""
    return fault and f"response {row} {fault}"


def check_prompt(prompt: Sequence[int], *, vocab_size: int | None, max_model_len: int) -> list[int]:
    """Give the token ids of a row that an engine can serve.

    Args:
        prompt: the ids.
        vocab_size: ids are below it; ``None`` for any.
        max_model_len: most tokens of a prompt and its response.

    Raises:
        ValueError: there are none, too many, or one is no token.
    """
    try:
        ids = array("q", prompt).tolist()
    except (TypeError, OverflowError) as error:
        raise ValueError(f"The prompt is not a sequence of token ids: {error}.") from error
    if not ids:
        raise ValueError("The prompt is empty.")
    if len(ids) >= max_model_len:
        raise ValueError(
            f"The prompt has {len(ids)} tokens, which leaves no room for a response: "
            f"max_model_len is {max_model_len}."
        )
    for token in (min(ids), max(ids)):
        if not 0 <= token < (vocab_size or math.inf):
            raise ValueError(
                f"The prompt holds the token id {token}; the vocabulary has {vocab_size}."
            )
    return ids


def log_prob_fault(given: Generation) -> str:
    """Return what is wrong with the log-probs of a response, or nothing."""
    if len(given.log_probs) != len(given.ids):
        return f"has {len(given.log_probs)} log-probs for {len(given.ids)} tokens"
    wrong = [x for x in given.log_probs if not -math.inf < x < _ROUNDING]
    return f"has a log-prob that is no finite number of at most 0: {wrong[0]}" if wrong else ""


def seeded(
    engine: Engine, params: SamplingParameters, seeds: Sequence[int] | None
) -> tuple[SamplingParameters, dict[str, Any]]:
    """With what an engine draws each row by a seed of its own.

    Args:
        engine: whose ``generate`` takes ``seeds=``, or not.
        params: the distribution.
        seeds: one per prompt; ``None`` without.

    Returns:
        Its parameters and further arguments. An engine that takes no seeds gets one that follows
        from all of them.
    """
    if not seeds:
        return params, {}
    if "seeds" in inspect.signature(engine.generate).parameters:
        return params, {"seeds": list(seeds)}
    return replace(params, seed=stream_number(*seeds)), {}


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


# How full an engine is, for who decides how much is asked of it.

_CACHE_USE: Final = "vllm:kv_cache_usage_perc"
_PREEMPTIONS: Final = "vllm:num_preemptions_total"


class EngineLoad(NamedTuple):
    """The load of an engine, as its ``measure_load()`` gives it where ``tells_load`` is true.

    That raises :class:`EngineDied` if the engine is gone or stuck, ``ConnectionError`` if it did
    not answer, and ``RuntimeError`` if it is closed.
    """

    cache_use: float
    """Fraction of its cache of keys and values that requests in flight hold, from 0 to 1."""
    num_preemptions: int
    """How often, ever, a request was put off because the cache was full, to be read again."""


def tells_load(engine: Any) -> bool:
    """Return whether an engine can tell how full it is; of a server, it is asked."""
    return bool(getattr(engine, "tells_load", False))


def read_load(text: str) -> EngineLoad | None:
    r"""Return what the metrics of a vLLM server tell of its load, of all its engines; or ``None``.

    Example:
        >>> read_load("vllm:kv_cache_usage_perc{a=1} 0.5\nvllm:num_preemptions_total 3.0")
        EngineLoad(cache_use=0.5, num_preemptions=3)
    """
    uses, preemptions = (
        [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)]
        for name in (_CACHE_USE, _PREEMPTIONS)
    )
    if not (uses and preemptions):
        return None
    return EngineLoad(max(uses), int(sum(preemptions)))
