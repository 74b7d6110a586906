"""Engine for whole batches: budgets and seeds of rows, what is refused, what comes back."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any, ClassVar, NamedTuple

from torchrl_data.templates.image_processor import ImageProcessor
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.weights.adapter_weights import AdapterWeights

from .checked_generation import log_prob_fault
from .engine import ClosedOnLeaving, EngineDied, Generation


class KeptAdapters(NamedTuple):
    """Adapters that an engine keeps beside those that it serves, for rows that name them."""

    name: str
    """What the engine calls them; no others have it."""
    request: Any = None
    """By what the engine's library knows them, of an engine of this process."""


class Row(NamedTuple):
    """A response that is asked for."""

    prompt: Sequence[int]
    budget: int
    seed: int | None
    images: Sequence[str] = ()
    """Of the prompt in order, in base 64."""
    adapters: KeptAdapters | None = None
    """Which draw it; ``None`` for what serves."""


class WholeBatchEngine(ClosedOnLeaving, ABC):
    """An :class:`~torchrl_modules.engines.engine.Engine`: whole batches in, whole batches out."""

    mixed = False
    """An update failed in the middle, or it sleeps, and no later one has succeeded."""
    has_masks = False
    """Whether it tells the tokens that a truncation left."""
    images: ImageProcessor | None = None
    """What images become; ``None`` where rows with images are refused."""
    _check_reported: ClassVar[Callable[..., None]]
    """Checks that what is asked for of each token can be reported; takes ``has_masks=``."""
    _own_ends: frozenset[int] = frozenset()
    """Tokens that end a response by the model's own generation config."""

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response by the model's own generation config."""
        return tuple(sorted(self._own_ends))

    def _reader_of(self, ids: Sequence[int], images: Sequence[str]) -> ImageProcessor | None:
        """Return what reads the images of a prompt; ``None`` where it has none.

        Raises:
            ValueError: nothing reads them, or the prompt has placeholders and no images.
        """
        if images and self.images is None:
            raise ValueError(
                "The prompt holds images, and the engine has no processor for them: "
                f"{type(self).__name__}(..., processor=...)."
            )
        if not images and self.images is not None and (fault := self.images.fault(ids, images)):
            raise ValueError(fault)
        return self.images if images else None

    def check_sampling(self, params: SamplingParameters) -> None:
        """Check that the log-probs will be those of the distribution sampled from.

        Args:
            params: the distribution, and what to report of each token.

        Raises:
            ValueError: this engine can't draw from it, or can't report of it what is asked for.
        """
        params.check_stops_are_found()
        self._check_reported(params, has_masks=self.has_masks)
        ends = self._own_ends - set(params.stop_token_ids or self._own_ends)
        if params.min_tokens and ends:
            raise ValueError(
                f"{type(self).__name__}: min_tokens leaves out the model's own end tokens, "
                f"{sorted(ends)} too. They are none of stop_token_ids, so the log-probs "
                "would not be those that are scored. Add them to stop_token_ids."
            )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        *,
        max_new_tokens: Sequence[int] | None = None,
        seeds: Sequence[int | None] | None = None,
        images: Sequence[Sequence[str]] | None = None,
        adapters: KeptAdapters | Sequence[KeptAdapters | None] | None = None,
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
            images: of each prompt in order, in base 64; none of any row when not given. Each is
                one image's tokens in the prompt.
            adapters: which draw them, as ``keep_adapters`` gave them, or those of each row;
                ``None`` for what serves.

        Returns:
            One generation per prompt, in order.

        Raises:
            EngineDied: the engine is gone, stuck, closed or broken; ``results`` holds the rows that
                were finished.
            RuntimeError: it lost its weights, or serves other ones than it was given.
            ValueError: ``max_new_tokens``, ``seeds``, ``images`` or ``adapters`` has not one value
                per prompt.
        """
        self.check_sampling(params)
        if (budgets := max_new_tokens) is None:
            budgets = [params.max_new_tokens] * len(prompts)
        seeds = params.row_seeds(len(prompts)) if seeds is None else seeds
        media = [()] * len(prompts) if images is None else images
        is_one = adapters is None or isinstance(adapters, KeptAdapters)
        kept: Sequence[Any] = [adapters] * len(prompts) if is_one else list(adapters or ())
        if not len(budgets) == len(seeds) == len(media) == len(kept) == len(prompts):
            raise ValueError(
                f"{type(self).__name__}.generate: {len(prompts)} prompts, but {len(budgets)} "
                f"max_new_tokens, {len(seeds)} seeds, the images of {len(media)} and the adapters "
                f"of {len(kept)}."
            )
        rows = list(starmap(Row, zip(prompts, budgets, seeds, media, kept, strict=True)))
        try:
            return [finished(result, params) for result in self._draw(rows, params)]
        except EngineDied as error:
            error.results = [r and finished(r, params) for r in error.results or [None] * len(rows)]
            raise

    @abstractmethod
    def _draw(self, rows: list[Row], params: SamplingParameters) -> list[Generation]:
        """A generation per row, in order."""

    @abstractmethod
    def keep_adapters(self, weights: AdapterWeights) -> KeptAdapters:
        """Keep adapters beside those that serve, for rows that name them.

        More may be kept than ``max_adapters``; so many are drawn with in one step.

        Args:
            weights: of any version.

        Returns:
            What ``generate(adapters=...)`` and `drop_adapters` take.

        Raises:
            UpdateRefused: the engine can't apply them, or takes whole weights.
            RuntimeError: it is closed, gone or in use elsewhere.
        """

    @abstractmethod
    def drop_adapters(self, kept: KeptAdapters) -> None:
        """Let kept adapters go; no row is being drawn with them.

        Raises:
            RuntimeError: the engine is closed, gone or in use elsewhere.
        """

    def _check_not_mixed(self) -> None:
        if self.mixed:
            raise RuntimeError(
                f"{type(self).__name__} cannot serve: it sleeps, or an update failed in the "
                "middle, and its weights are a mixture. Update them."
            )

    @abstractmethod
    def close(self) -> None:
        """Let go of what it holds. May be called twice."""


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
            ids=ids[:kept],
            log_probs=log_probs[:kept],
            sampling_masks=generation.sampling_masks[:kept],
            finish_reason="stop",
            versions=spans,
        )
    if params.untempered_log_probs:  # the same, the engine's check says
        generation = generation._replace(untempered_log_probs=generation.log_probs)
    return generation
