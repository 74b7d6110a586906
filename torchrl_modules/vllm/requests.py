"""Requests to vLLM and what comes back, whole or as a stream, whichever engine asks."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple, Self

from torchrl_modules.engines.engine import (
    ClosedOnLeaving,
    EngineDied,
    EngineOver,
    Generation,
    VersionSpan,
    log_prob_fault,
)
from torchrl_modules.sampling import SamplingParameters, StopStrings

# One request to vLLM, here or by HTTP: checked token ids in, tokens and log-probs out.


class StaleWeights(RuntimeError):
    """Tokens were drawn by other weights than the engine was given."""


def sampling_fields(params: SamplingParameters, budget: int, seed: int | None) -> dict[str, Any]:
    """The fields of vLLM's ``SamplingParams``; `ValueError` if the budget is below 1."""
    if budget < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {budget}.")
    return {
        "max_tokens": budget,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": dict(params.logit_bias) or None,
        # A smaller budget ends the turn before a stop token is allowed, as it should.
        "min_tokens": min(params.min_tokens, budget),
        "stop_token_ids": list(params.stop_token_ids or ()),
        "ignore_eos": params.stop_token_ids is not None,
        "seed": seed,
        "logprobs": 0,
        "detokenize": False,
    }


def own_ends(model_config: Any) -> list[int]:
    """End tokens by a model's generation config, which vLLM reads whatever it is told."""
    ends = model_config.try_get_generation_config().get("eos_token_id")
    return [ends] if isinstance(ends, int) else list(ends or ())


def check_reported(params: SamplingParameters) -> None:
    """Check that vLLM can report what is asked for."""
    # It gives one log-prob a token: that of the distribution that it drew from.
    missing = ["entropy"] if params.entropy else []
    if params.untempered_log_probs and not params.is_own_softmax:
        missing.append("untempered_log_probs")
    if missing:
        raise ValueError(
            f"vLLM can't report {missing} with {params}: it gives one log-prob a token, of the "
            "distribution that was drawn from. Score the rows with TransformersWrapper(model, "
            "generate=False, ...) and the same option instead."
        )


def finished(generation: Generation, params: SamplingParameters) -> Generation:
    """A response as it is handed on: cut at a stop string, refused with a log-prob that is none."""
    ids, log_probs = generation.ids, generation.log_probs
    if generation.error is None and (fault := log_prob_fault(generation)):
        return Generation([], [], "error", f"the response {fault}")
    matcher = params.stop_matcher
    kept = matcher and matcher.num_kept(ids)
    if kept:
        spans = [s._replace(end=min(s.end, kept)) for s in generation.versions if s.start < kept]
        generation = generation._replace(
            ids=ids[:kept], log_probs=log_probs[:kept], finish_reason="stop", versions=spans
        )
    if params.untempered_log_probs:  # the same, `check_reported` says
        generation = generation._replace(untempered_log_probs=generation.log_probs)
    return generation


def read_output(output: Any) -> Generation:
    """What is new in a vLLM ``RequestOutput``; without a reason until the request is finished."""
    completion = output.outputs[0]
    ids = list(completion.token_ids)
    log_probs = list(completion.logprobs.logprobs) if ids else []
    reason = completion.finish_reason or ""
    error = None
    if reason not in ("", "stop", "length", "abort"):
        error = f"vLLM ended the request: {reason} {completion.stop_reason}."
        reason = "error"
    return Generation(ids, log_probs, reason, error)


def version_number(label: str) -> int:
    """The version that a server's label means; one that was given none has the first weights."""
    return int(label) if label.isdecimal() else 0


def check_labels(drawn_by: Collection[str], labels: Collection[str]) -> None:
    """Check that nothing was drawn by weights that the client does not know.

    Raises:
        StaleWeights: something was.
    """
    if other := sorted(set(drawn_by) - set(labels)):
        raise StaleWeights(
            f"VLLMServerEngine: tokens were drawn by the weights {other}, not by "
            f"{sorted(labels)}. The server was restarted, or another client updates it. Send "
            "the weights again."
        )


def read_answer(answer: Any, labels: Sequence[str]) -> Generation:
    """The answer of ``/inference/v1/generate``, by weights of one of the labels.

    A server that does not tell its versions draws a row by one, which is the first of the labels.
    """
    try:
        choice = answer["choices"][0]
        ids = [int(token) for token in choice["token_ids"]]
        log_probs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
        told = choice.get("weight_versions") or ()
        spans = [(s["version"], s["start"], s["end"]) for s in told]
        reason = choice["finish_reason"]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        message = f"the server's answer is no generation ({error!r}): {str(answer)[:200]}"
        return Generation([], [], "error", message)
    check_labels({version for version, _, _ in spans}, labels)
    if not spans and ids:
        spans = [(labels[0], 0, len(ids))]
    versions = [VersionSpan(version_number(label), start, end) for label, start, end in spans]
    return Generation(ids, log_probs, reason, versions=versions)


# What the vLLM engines do alike: budgets and seeds of rows, what is refused, what comes back.


class Row(NamedTuple):
    """One response that is asked for."""

    prompt: Sequence[int]
    budget: int
    seed: int | None


class WholeBatchEngine(ClosedOnLeaving, ABC):
    """An :class:`~torchrl_modules.engines.engine.Engine`: whole batches in, whole batches out."""

    mixed = False
    """An update failed in the middle, or it sleeps, and no later one has succeeded."""
    _own_ends: frozenset[int] = frozenset()
    """Tokens that end a response by the model's own generation config."""

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response by the model's own generation config."""
        return tuple(sorted(self._own_ends))

    def check_sampling(self, params: SamplingParameters) -> None:
        """Check that the log-probs will be those of the distribution sampled from.

        Args:
            params: the distribution, and what to report of each token.

        Raises:
            ValueError: this engine can't draw from it, or can't report of it what is asked for.
        """
        params.check_stops_are_found()
        check_reported(params)
        ends = self._own_ends - set(params.stop_token_ids or self._own_ends)
        if params.min_tokens and ends:
            raise ValueError(
                f"{type(self).__name__}: min_tokens leaves out the model's own end tokens, "
                f"{sorted(ends)} too, in vLLM. They are none of stop_token_ids, so the log-probs "
                "would not be those that are scored. Add them to stop_token_ids."
            )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        *,
        max_new_tokens: Sequence[int] | None = None,
        seeds: Sequence[int | None] | None = None,
    ) -> list[Generation]:
        """Draw one response per prompt.

        Args:
            prompts: token ids of each row. A row that is empty, too long or holds an id outside
                the vocabulary comes back with ``finish_reason="error"``.
            params: the distribution. With ``stop_token_ids=None`` the model's own end token
                stops a response, else these alone do. At temperature 0 the log-probs are those
                at temperature 1.
            max_new_tokens: a budget per row that overrides the one in ``params``. A response that
                reaches ``max_model_len`` ends there, with ``"length"``.
            seeds: one per prompt, in place of the one in ``params``; the same seed, prompt and
                weights give the same response.

        Returns:
            One generation per prompt, in order.

        Raises:
            EngineDied: the engine is gone, stuck, closed or broken; ``results`` holds the rows that
                were finished.
            RuntimeError: it lost its weights, or serves other ones than it was given.
            ValueError: ``max_new_tokens`` or ``seeds`` has not one value per prompt.
        """
        self.check_sampling(params)
        if (budgets := max_new_tokens) is None:
            budgets = [params.max_new_tokens] * len(prompts)
        seeds = params.row_seeds(len(prompts)) if seeds is None else seeds
        if not len(budgets) == len(seeds) == len(prompts):
            raise ValueError(
                f"{type(self).__name__}.generate: {len(prompts)} prompts, but {len(budgets)} "
                f"max_new_tokens and {len(seeds)} seeds."
            )
        rows = [Row(*row) for row in zip(prompts, budgets, seeds, strict=True)]
        try:
            return [finished(result, params) for result in self._draw(rows, params)]
        except EngineDied as error:
            error.results = [r and finished(r, params) for r in error.results or [None] * len(rows)]
            raise

    @abstractmethod
    def _draw(self, rows: list[Row], params: SamplingParameters) -> list[Generation]:
        """One generation per row, in order."""

    def _check_not_mixed(self) -> None:
        if self.mixed:
            raise RuntimeError(
                f"{type(self).__name__} cannot serve: it sleeps, or an update failed in the "
                "middle, and its weights are a mixture. Update them."
            )

    @abstractmethod
    def close(self) -> None:
        """Let go of what it holds. May be called twice."""


# One response while it is drawn: tokens as they come, and the version that drew each.


class Delta(NamedTuple):
    """New tokens of a response."""

    ids: list[int]
    """One or more sampled tokens."""
    log_probs: list[float]
    """One per token, in nats, of the distribution that it was drawn from."""
    version: int
    """Of the weights that drew them."""


class VersionedGeneration(NamedTuple):
    """A response, and the versions of the weights that drew it."""

    generation: Generation
    """The whole response; ``finish_reason`` may also be ``"abort"``, with the tokens so far."""
    versions: list[VersionSpan]
    """In order, without gaps, from 0 to the number of tokens."""


class RespondingEngine(EngineOver, ABC):
    """Gives whole responses, by whatever draws one."""

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        *,
        max_new_tokens: int | None = None,
    ) -> VersionedGeneration:
        """Draw one response. Cancelling the caller aborts the request.

        It takes and raises what `submit` does; also `EngineDied` if there is no progress.

        Returns:
            The response, with the versions that drew it.
        """
        drawn = await self.respond(prompt, params, max_new_tokens=max_new_tokens)
        return VersionedGeneration(drawn._replace(versions=()), list(drawn.versions))

    async def respond(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        *,
        max_new_tokens: int | None = None,
        session: Hashable = None,
    ) -> Generation:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.respond`.

        vLLM finds what it has read by the tokens alone, so ``session`` changes nothing.
        """
        del session
        drawn = await self.draw(self._row(prompt, params, max_new_tokens), params)
        return finished(drawn, params)

    def end_session(self, session: Hashable) -> None:
        """Nothing: vLLM forgets what was not used for the longest time."""

    @abstractmethod
    async def draw(self, row: Row, params: SamplingParameters) -> Generation:
        """Draw one response and say which versions drew it; with a seed of its own."""

    def _row(
        self, prompt: Sequence[int], params: SamplingParameters, max_new_tokens: int | None
    ) -> Row:
        self.check_sampling(params)
        budget = params.max_new_tokens if max_new_tokens is None else max_new_tokens
        return Row(prompt, budget, params.row_seeds(1)[0])


class GenerationStream:
    """A request to an `AsyncVLLMEngine`: iterate for the tokens, or await `result`."""

    # As a context manager it aborts the request on leaving, unless it is finished. Made by
    # `AsyncVLLMEngine.submit`; for one consumer.

    def __init__(
        self,
        abort: Callable[["GenerationStream"], None],
        check: Callable[[], None],
        stall_timeout_s: float,
        stops: StopStrings | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.request_id: str | None = None
        self.version: int | None = None  # of all its tokens, where that does not change
        self._abort = abort
        self._check = check
        self._stall_timeout_s = stall_timeout_s
        self._queue: asyncio.Queue[Delta | Generation | BaseException] = asyncio.Queue()
        self.deliver = self._queue.put_nowait
        """Takes tokens, why it ended, or what broke the engine; in the stream's event loop."""
        self._stops = stops
        self._drawn: list[int] = []  # the engine's side: what `stops` has been shown
        self._deltas: list[Delta] = []
        self._end: Generation | BaseException | None = None

    def completes_stop_string(self, ids: list[int]) -> bool:
        """Whether these next tokens end the response; called by the engine, in its thread."""
        if self._stops is None:
            return False
        self._drawn += ids
        return self._stops.just_ended(self._drawn)

    def abort(self) -> None:
        """Stop drawing. The result is then what there is, with ``finish_reason="abort"``."""
        self._abort(self)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while self._end is None:
            try:
                async with asyncio.timeout(self._stall_timeout_s):
                    item = await self._queue.get()
            except TimeoutError:
                self._check()
                continue
            if isinstance(item, Delta):
                self._deltas.append(item)
                return item
            self._end = item
        if isinstance(self._end, BaseException):
            raise self._end
        raise StopAsyncIteration

    async def result(self) -> VersionedGeneration:
        """Wait for the end."""
        async for _ in self:
            pass
        assert isinstance(self._end, Generation)
        ids = [token for delta in self._deltas for token in delta.ids]
        log_probs = [value for delta in self._deltas for value in delta.log_probs]
        generation = self._end._replace(ids=ids, log_probs=log_probs)
        return VersionedGeneration(generation, version_spans(self._deltas))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._end is None:
            self.abort()


def version_spans(deltas: list[Delta]) -> list[VersionSpan]:
    """Spans over the tokens of a response, given its parts in order; neighbours are joined.

    Example:
        >>> version_spans([Delta([5, 6], [0.0, 0.0], 0), Delta([7], [0.0], 1)])
        [VersionSpan(version=0, start=0, end=2), VersionSpan(version=1, start=2, end=3)]
    """
    spans: list[VersionSpan] = []
    end = 0
    for delta in deltas:
        start, end = end, end + len(delta.ids)
        if spans and spans[-1].version == delta.version:
            start = spans.pop().start
        spans.append(VersionSpan(delta.version, start, end))
    return spans
