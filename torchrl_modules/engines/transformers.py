"""The engine over a Transformers model in this process."""

import ctypes
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cached_property, partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import check_counts
from torchrl_data.positions import num_positions
from torchrl_data.templates.image_processor import ImageProcessor
from torchrl_modules.batch_invariance import (
    BatchInvariance,
    check_batch_invariance,
    refuse_beside_invariance,
)
from torchrl_modules.compiled_layers import settle_compilation
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.scoring.expert_routes import expert_counts
from torchrl_modules.scoring.image_reading import alike, own_positions
from torchrl_modules.scoring.rope_factors import settle_rope_factors
from torchrl_modules.scoring.wrapped_models import (
    acting_adapters,
    adapter_settings,
    evaluation_mode,
    has_hooks,
    is_sharded,
    precision,
    unwrapped,
    without_ddp,
)
from torchrl_modules.weights.expected_weights import (
    ExpectedWeights,
    next_version,
    weights_fingerprint,
)
from torchrl_modules.weights.lazy_weights import LazyWeights
from torchrl_modules.weights.quantized_weights import settle_quantized_layers

from .cast_weights import CastModel, is_cast_for_each_token
from .decoding import PromptReader, decode
from .drawn_tokens import tokens_per_look as default_tokens_per_look
from .engine import Generation
from .image_readers import find_image_reader
from .kept_caches import KeptCaches
from .readers import find_prompt_reader, group_rows
from .routed_reader import RoutedReader
from .slot_reader import SlotReader

_TRIMMED_PARAMETERS: Final = 10_000_000
"""A model on the CPU with as many gives freed memory back to the system around a drawing."""
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_malloc_trim: Any = getattr(_libc, "malloc_trim", None)  # glibc has it


_KEPT_BESIDE_TRAINING: Final = 4 << 30
"""Bytes of buffers that stay while a gradient is computed."""


class _KeptSteps:
    """The parts of steps that the next call needs again, while weights are where they are.

    They are a model whose matrices are cast, where there is one, and a reader whose steps are
    captured: its buffers and its graphs.
    """

    def __init__(self) -> None:
        self._reader: SlotReader | None = None
        self._cast: CastModel | None = None
        self._state: Hashable = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has nothing: graphs are of one model and one process."""
        return type(self), ()

    def renew(self, state: Hashable, model: PreTrainedModel, dtype: torch.dtype | None) -> Any:
        """Forget what is of another state; the model that draws, with its weights of now.

        Args:
            state: where weights are, and what acts of them.
            model: the engine's.
            dtype: of autocast.
        """
        if state != self._state:
            self.clear()
            self._state = state
        if dtype is None or not is_cast_for_each_token(model, dtype):
            self._cast = None
        elif self._cast is None:
            self._cast = CastModel(model, dtype)
        else:
            self._cast.refresh()
        drawing = model if self._cast is None else self._cast.model
        if self._reader is not None and (self._reader.model is not drawing or has_hooks(drawing)):
            self._reader = None
        return drawing

    def take(self, kept: KeptCaches | None) -> SlotReader | None:
        """Take the reader, without rows; ``None`` where there is none."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.restart(kept)
        return reader

    def put(self, reader: PromptReader) -> None:
        """Keep the reader, if a step is captured."""
        if isinstance(reader, SlotReader) and reader.has_graphs:
            self._reader = reader

    def clear(self, most_bytes: int = 0) -> None:
        """Let go of all, if it takes more."""
        if sum(each.nbytes for each in (self._reader, self._cast) if each is not None) > most_bytes:
            self._reader = self._cast = self._state = None


class TransformersEngine(ChecksAttributes):
    """An :class:`~torchrl_modules.engines.engine.Engine` over a Transformers model.

    Args:
        model: a causal language model, with or without adapters of PEFT. It continues rows with a
            cache of keys and values where that gives its own log-probs, which is tried on a few
            short rows; otherwise with whatever it keeps itself, rows of one length together;
            otherwise it reads whole rows again for every token, with a warning.
        max_model_len: most tokens of a row, prompt and response; the model's own limit when not
            given.
        autocast_dtype: compute in this type, with the parameters as they are.
        max_cached_tokens: most tokens of earlier rows of which the keys and values are kept: a row
            that begins with such tokens, as the next turn of a conversation does, reads only what
            is new. They are forgotten when any weight changes, whoever changes it. What is kept
            takes memory between two calls, and while a model is trained in place. ``None``: as many
            as take 1 GiB on a CPU, and none on an accelerator. For models whose cache is plain keys
            and values; others read whole prompts.
        images: what the images of a vision-language model's prompts become; without it a row with
            images is refused.
        tokens_per_look: so many tokens of each row are drawn before the host looks at them; what
            was drawn behind the end of a row is dropped, so that rows with seeds are the same
            whatever the number. A look waits for the device. ``None``: 1 on a CPU, where it costs
            nothing, and 8 on an accelerator.
        compile_layers: see :func:`~torchrl_modules.compiled_layers.compile_layers`.
        batch_invariant: a row has the same log-probs to the bit whatever is drawn beside it, see
            :class:`~torchrl_modules.batch_invariance.BatchInvariance`; in float32 on a CPU.
        check: try the model now; ``False`` tries it before the first token is drawn, for an engine
            that may draw none.

    Raises:
        TypeError: the model has adapters that are not layers of it, such as prompts.
        ValueError: ``max_model_len`` or ``tokens_per_look`` is not positive, or ``max_model_len``
            above the positions that the model has; ``max_cached_tokens`` is negative; bitsandbytes
            has packed weights of 4 bits for this CPU; the model can't be sampled from, or not
            ``batch_invariant``, or autocast is asked for beside that.

    Example:
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> engine = TransformersEngine(tiny_qwen3(len(tokenizer)))
        >>> prompts = [tokenizer.encode(text) for text in ("hello", "What is 2 + 2?")]
        >>> generations = engine.generate(prompts, SamplingParameters(max_new_tokens=4))
        >>> [len(each.ids) == len(each.log_probs) <= 4 for each in generations]
        [True, True]
    """

    reads_in_order = True
    """An update reads each weight once, in this thread: they may be lazy."""

    def __init__(
        self,
        model: nn.Module,
        *,
        max_model_len: int | None = None,
        autocast_dtype: torch.dtype | None = None,
        max_cached_tokens: int | None = None,
        images: ImageProcessor | None = None,
        tokens_per_look: int | None = None,
        compile_layers: bool | None = None,
        batch_invariant: bool = False,
        check: bool = True,
    ) -> None:
        who = "TransformersEngine"
        self.inside = inside = unwrapped(model, who=who)
        """The model itself, without wrappers."""
        settle_quantized_layers(inside)
        own = num_positions(inside)
        check_counts(who, max_model_len=max_model_len, tokens_per_look=tokens_per_look)
        check_counts(who, 0, max_cached_tokens=max_cached_tokens)
        if max_model_len is not None and own is not None and max_model_len > own:
            raise ValueError(
                f"{who}: max_model_len={max_model_len}, but {type(inside).__name__} has "
                f"positions for {own} tokens."
            )
        settle_rope_factors(inside, max_model_len, who=who)
        self.model = model
        self.images = images
        """What images become; ``None`` where rows with images are refused."""
        self.max_model_len = max_model_len or own or 1 << 62
        """Most tokens of a prompt and its response together."""
        self._autocast_dtype = autocast_dtype
        self.batch_invariant = batch_invariant
        """Whether a row has the same log-probs to the bit whatever is drawn beside it."""
        if batch_invariant:
            refuse_beside_invariance(autocast_dtype=autocast_dtype, compile_layers=compile_layers)
        self.tokens_per_look = tokens_per_look or default_tokens_per_look(inside.device)
        """So many tokens of each row are drawn before the host looks at them."""
        self.max_cached_tokens = max_cached_tokens
        """Most tokens of earlier rows that are kept, as it was given."""
        is_on_cpu = inside.device.type == "cpu"
        self._kept: KeptCaches | None = None
        if max_cached_tokens or (max_cached_tokens is None and is_on_cpu):
            self._kept = KeptCaches(max_cached_tokens)
        self._is_trimmed = (
            is_on_cpu
            and _malloc_trim is not None
            and inside.num_parameters() >= _TRIMMED_PARAMETERS
        )
        self._kept_for: Hashable = None
        self._steps = _KeptSteps()
        self.version = 0
        """How many updates the weights have seen, or the number that the last one was given."""
        self._is_mixed = False
        self._shared_names: frozenset[str] = frozenset()
        if check and not is_sharded(model):
            self.reader  # noqa: B018
            if batch_invariant:
                check_batch_invariance(inside)
            if images is not None:
                find_image_reader(inside, images)
        self._compile_layers = compile_layers
        settle_compilation(model, inside, compile_layers)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of the activations."""
        return self._autocast_dtype or self.inside.dtype

    @cached_property
    def reader(self) -> type[PromptReader]:
        """The reader, by which the model continues rows."""
        if is_sharded(self.model):
            raise ValueError(
                f"TransformersEngine: {type(self.inside).__name__} is sharded by fully_shard, and "
                "drawing tokens would gather every layer for every token, on all ranks in step. "
                "Sample with vLLM or from a copy that is whole, and push the weights to it."
            )
        return find_prompt_reader(self.inside, share_prefixes=not self.batch_invariant)

    @property
    def shared_names(self) -> frozenset[str]:
        """Entries of the model that other engines draw with, too: an update has the others alone.

        They are frozen, and the same in every model.
        """
        return self._shared_names

    @shared_names.setter
    def shared_names(self, names: frozenset[str]) -> None:
        self._shared_names = names

    @property
    def adapter_settings(self) -> tuple[Any, ...]:
        """See :func:`~torchrl_modules.scoring.wrapped_models.adapter_settings`."""
        return adapter_settings(self.inside)

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.inside.config.get_text_config().vocab_size

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response by the model's own settings, as for its ``generate()``."""
        settings = getattr(self.inside, "generation_config", None)
        ends = getattr(settings, "eos_token_id", None)
        return (ends,) if isinstance(ends, int) else tuple(ends or ())

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        *,
        max_new_tokens: Sequence[int] | None = None,
        seeds: Sequence[int | None] | None = None,
        images: Sequence[Sequence[str]] | None = None,
    ) -> list[Generation]:
        """See :meth:`torchrl_modules.Engine.generate`.

        At temperature 0 the log-probs are those at temperature 1.

        Args:
            prompts: as there.
            params: as there.
            max_new_tokens: as there.
            seeds: one per prompt, in place of the one in ``params``; a row's tokens depend on its
                own seed alone. ``None`` for all or none of the rows.
            images: of each prompt in order, in base 64; none of any row when not given.

        Raises:
            ValueError: ``max_new_tokens`` or ``seeds`` has not one value per prompt, or some rows
                have a seed and others have none.
            RuntimeError: an update broke off in the middle, because a rank that had a part of the
                weights ended, say.
        """
        return self._generate(
            prompts, params, max_new_tokens=max_new_tokens, seeds=seeds, images=images
        )

    @torch.no_grad()
    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        *,
        max_new_tokens: Sequence[int] | None,
        seeds: Sequence[int | None] | None,
        images: Sequence[Sequence[str]] | None = None,
        marks: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Draw rows, of which each may be read with a mark: see :class:`JoinedEngine`."""
        params.check_stops_are_found()
        self.check_sampling(params)
        self.check_whole()
        budgets = list(max_new_tokens or [params.max_new_tokens] * len(prompts))
        rows_seeds = list(seeds or params.row_seeds(len(prompts)))
        num_seeds = sum(seed is not None for seed in rows_seeds)
        if len(rows_seeds) != len(prompts) or num_seeds not in (0, len(prompts)):
            raise ValueError(
                f"TransformersEngine.generate: {len(prompts)} prompts, but {len(rows_seeds)} seeds,"
                f" {num_seeds} of them not None. Give each prompt one, or none."
            )
        media = [list(its) for its in images or [[]] * len(prompts)]
        results = []
        for prompt, budget, its in zip(prompts, budgets, media, strict=True):
            error = self.refusal(prompt, budget)
            if error is None and self.images is not None:
                error = self.images.fault(prompt, its)
            elif error is None and its:
                error = "the engine has no processor for its images"
            results.append(Generation([], [], "error", error))
        good = [i for i, result in enumerate(results) if result.error is None]
        if not good:
            return results
        self._give_back_memory()
        with evaluation_mode(self.inside), self.precision():
            read: Sequence[Sequence[int]] = prompts
            if marks is not None:
                read = [
                    [token + mark for token in p] for p, mark in zip(prompts, marks, strict=True)
                ]
            for group, reader in self._batches(read, good, media, params):
                own_seeds: Any = [rows_seeds[i] for i in group] if num_seeds else None
                generations = decode(
                    reader,
                    [prompts[i] for i in group],
                    params,
                    [budgets[i] for i in group],
                    own_seeds,
                    per_look=self.tokens_per_look,
                    marks=marks and [marks[i] for i in group],
                )
                for k, (i, generation) in enumerate(zip(group, generations, strict=True)):
                    results[i] = generation
                    if isinstance(reader, RoutedReader):
                        results[i] = generation._replace(routed_experts=reader.found[k])
        self._give_back_memory()
        return results

    def _give_back_memory(self) -> None:
        """Return freed memory to the system.

        Activations of a training step and caches of a drawing never live at the same time, but
        their blocks have other sizes, and the C library would keep both.
        """
        if self._is_trimmed:
            _malloc_trim(0)

    def check_whole(self) -> None:
        """Check that its weights are of one update.

        Raises:
            RuntimeError: they are not.
        """
        if self._is_mixed:
            raise RuntimeError(
                "TransformersEngine cannot serve: an update broke off in the middle, and its "
                "weights are a mixture. Update them again."
            )

    def check_sampling(self, params: SamplingParameters) -> None:
        """Check that the engine can report what is asked for.

        Args:
            params: the distribution, and what to report of each token.

        Raises:
            ValueError: experts are asked for, and the model has none, or reads images.
        """
        if params.routed_experts and expert_counts(self.inside) is None:
            raise ValueError(
                f"TransformersEngine: routed_experts are those of a mixture of experts, and "
                f"{type(self.inside).__name__} is none. Leave routed_experts out."
            )
        if params.routed_experts and self.images is not None:
            raise ValueError(
                "TransformersEngine: the experts of rows with images are not written down. Leave "
                "routed_experts out."
            )

    def _batches(
        self,
        prompts: Sequence[Sequence[int]],
        good: list[int],
        images: list[list[str]],
        params: SamplingParameters,
    ) -> Iterator[tuple[list[int], PromptReader]]:
        """Rows that are drawn together, and what reads them."""
        text = [i for i in good if not images[i]]
        if text and params.routed_experts:  # all of them are read, and nothing goes on from before
            for group in group_rows(prompts, text, by_length=self.reader.needs_one_length):
                yield group, RoutedReader(self.reader(self.inside), self.inside)
            return
        if text:
            new_reader: Callable[[PreTrainedModel], PromptReader] = self.reader
            if self._kept is not None and issubclass(self.reader, SlotReader):
                now = self.weights_state()
                if now != self._kept_for:  # What other weights have read is not what these would.
                    self._kept.clear()
                    self._kept_for = now
                new_reader = partial(self.reader, kept=self._kept)
            model = self.drawing_model()
            for group in group_rows(prompts, text, by_length=self.reader.needs_one_length):
                reader = self._steps.take(self._kept) or new_reader(model)
                yield group, reader
                self._steps.put(reader)  # not after an error
        rows = [i for i in good if images[i]]
        if not rows or self.images is None:
            return
        cls = find_image_reader(self.inside, self.images)
        lengths, media = [len(prompts[i]) for i in rows], [images[i] for i in rows]
        for places in alike(self.images, lengths, media):
            with own_positions(self.inside):
                reader = cls(self.inside, self.images, [media[k] for k in places])
                yield [rows[k] for k in places], reader

    def drawing_model(self) -> PreTrainedModel:
        """The model that draws tokens, with its weights of now.

        Under autocast on a GPU it is one whose matrices are cast once, otherwise the engine's own.
        """
        state = self._state_of_steps()
        return self._steps.renew(state, self.inside, self._autocast_dtype)

    def weights_state(self) -> Hashable:
        """Another one, in all likelihood, once what is drawn with is another."""
        return weights_fingerprint(self.inside), acting_adapters(self.inside)

    def drawn_with(self) -> list[Tensor]:
        """The weights that it draws with."""
        return list(self.inside.parameters())

    def version_of(self, mark: int) -> int:  # noqa: ARG002
        """Version of the weights that read a row.

        Args:
            mark: of the row; one of several models has its own.
        """
        return self.version

    def make_room(self) -> None:
        """A gradient is to be computed: let go of what drawing keeps, if it takes over 4 GiB."""
        self._steps.clear(_KEPT_BESIDE_TRAINING)

    def _state_of_steps(self) -> Hashable:
        """A captured step is another one when this is: where weights are, and what acts of them."""
        places = tuple(x.data_ptr() for x in (*self.inside.parameters(), *self.inside.buffers()))
        acting = acting_adapters(self.inside)
        return self.reader, places, acting, self.inside.config._attn_implementation

    def forget(self) -> None:
        """Let go of what is kept of earlier rows, buffers included: no row goes on from it."""
        if self._kept is not None:
            self._kept.clear()
        self._steps.clear()

    def settings(self) -> dict[str, Any]:
        """The arguments that it was made with, but for the model."""
        return {
            "max_model_len": None if self.max_model_len == 1 << 62 else self.max_model_len,
            "autocast_dtype": self._autocast_dtype,
            "max_cached_tokens": self.max_cached_tokens,
            "images": self.images,
            "tokens_per_look": self.tokens_per_look,
            "compile_layers": self._compile_layers,
            "batch_invariant": self.batch_invariant,
        }

    def share_steps(self, other: "TransformersEngine") -> None:
        """Keep for steps what another engine keeps, one of the two at a time.

        Args:
            other: which draws in the place of this one.
        """
        self._steps = other._steps

    def copied(self, shared: Mapping[int, Tensor] | None = None) -> "TransformersEngine":
        """The same over a copy of the model, with the same version.

        Args:
            shared: what takes the place of tensors in the copy, by the ``id`` of each: what copies
                of several models have in common.
        """
        memo: dict[int, Any] = {**(shared or {})}
        model = deepcopy(without_ddp(self.model), memo).requires_grad_(False)
        engine = TransformersEngine(model, **self.settings())
        engine.version, engine.shared_names = self.version, self.shared_names
        return engine

    def precision(self) -> Any:
        """Return what the model computes in, and how, as a context manager."""
        if self.batch_invariant:
            return BatchInvariance()
        return precision(self.inside, self._autocast_dtype)

    def refusal(self, prompt: Sequence[int], budget: int) -> str | None:
        """Return why a row can't be served, or ``None``.

        Args:
            prompt: token ids.
            budget: most new tokens.
        """
        if not len(prompt):
            return "the prompt is empty"
        if budget < 1:
            return f"no token may be generated (the budget is {budget})"
        if len(prompt) + budget > self.max_model_len:
            return (
                f"the prompt has {len(prompt)} tokens and may grow by {budget}, but the model "
                f"takes {self.max_model_len}"
            )
        if not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            return f"the prompt holds a token outside the vocabulary of {self.vocab_size}"
        return None

    def update_weights(
        self, state_dict: Mapping[str, Tensor], *, version: int | None = None
    ) -> None:
        """See :meth:`torchrl_modules.engines.engine.Engine.update_weights`."""
        version = next_version(version, self.version, who=f"{type(self).__name__}.update_weights")
        state = without_ddp(self.model).state_dict()
        own = {name: value for name, value in state.items() if name not in self.shared_names}
        expected = ExpectedWeights.of(own)
        weights = expected.check(state_dict, who=type(self).__name__)
        names = list(weights)
        if not isinstance(weights, LazyWeights):
            names.reverse()  # What was checked last may be in the cache.
        self._is_mixed = True
        with torch.no_grad():
            for name in names:
                expected.own[name].copy_(weights[name])
        self._is_mixed = False
        self.version = version
        if self._kept is not None:
            self._kept.clear()
