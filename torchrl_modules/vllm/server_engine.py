"""Engine of vLLM in a process of its own, reached by URL: `VLLMServerEngine`."""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from torchrl_data.checks import one_of
from torchrl_data.templates.image_processor import ImageProcessor
from torchrl_modules.engines.checked_generation import check_prompt
from torchrl_modules.engines.engine import EngineDied, Generation, VersionSpan
from torchrl_modules.engines.json_client import AnswerTimeout, without_token
from torchrl_modules.engines.process_state import is_near, is_stopped
from torchrl_modules.engines.rows_of_server import RowsOfServer
from torchrl_modules.engines.version_labels import StaleWeights, check_labels, version_number
from torchrl_modules.engines.whole_batch_engine import KeptAdapters, Row
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.weight_transfer.file import weights_file
from torchrl_modules.weights.adapter_weights import AdapterWeights
from torchrl_modules.weights.expected_weights import UpdateRefused, next_version

from .access_control import TOKEN_VARIABLE
from .image_prompts import (
    as_image_processor,
    check_expanded,
    name_images,
    probe_prompts,
    request_fields,
)
from .requests import (
    check_reported,
    read_answer,
    sampling_fields,
)
from .server_adapters import Served, ServerAdapters
from .server_routes import ServerRoutes, Turnstile
from .settings import check_no_adapters

_log = logging.getLogger(__name__)

_DRAWN = "vllm:generation_tokens_total"
_READ = "vllm:prompt_tokens_total"


class VLLMServerEngine(ServerRoutes, RowsOfServer):
    """Draws tokens with a vLLM server, on this machine or another one.

    Weights are updated where ``torchrl_modules.vllm.server`` started it; a ``vllm serve
    --enable-scale-out`` can be drawn from. Any number of threads may call it. The server may be
    shared for generation; only one client may update its weights. Of a server that was started
    with ``--enable-lora`` each client has its own adapters, over weights that nobody updates.

    Args:
        url: ``unix:///path/of/the/socket``, ``http://host:port`` or ``http://:token@host:port``.
        token: what the server asks for on a TCP port; the URL's, or the environment's
            ``TORCHRL_VLLM_TOKEN``, when not given.
        wait_s: how long to wait for a server that is starting.
        timeout_s: a single request without an answer for so long means that the server is stuck.
        stall_timeout_s: a server that has requests and draws no token for so long is stuck, be its
            connections open or not; and so is one that takes weights, if it is stopped. Before its
            very first token it warms up, and ``timeout_s`` counts.
        num_connections: most rows that are drawn at a time.
        weight_transfer: how new weights go there: in a ``"file"`` in memory, broadcast (``"c10d"``,
            see :meth:`join`), or ``"auto"``: in a file to a server on this machine.
        weights_directory: where such a file takes room; memory when not given.
        processor: of a vision-language model, for prompts with images. The server loads its own
            from its model, which has to give the same tokens: that is tried with images of noise,
            and compared for each prompt.

    Raises:
        ConnectionError: nobody answers at the URL.
        PermissionError: the server asks for another token.
        RuntimeError: it is no vLLM server, or one that takes no token ids.
        ValueError: ``processor`` is given, and the server takes no images, or makes other tokens of
            them, or takes adapters.
        TypeError: ``processor`` processes no images.

    Example:
        >>> engine = VLLMServerEngine("http://127.0.0.1:8000", wait_s=300)  # doctest: +SKIP
        >>> policy = vLLMWrapper(engine, tokenizer=tokenizer)  # doctest: +SKIP
    """

    reads_in_order = True
    """An update reads each weight once, in this thread: they may be lazy."""
    _check_reported = staticmethod(check_reported)

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        wait_s: float = 0.0,
        timeout_s: float = 600.0,
        stall_timeout_s: float = 30.0,
        num_connections: int = 128,
        weight_transfer: Literal["auto", "file", "c10d"] = "auto",
        weights_directory: str | None = None,
        processor: Any = None,
    ) -> None:
        images = None if processor is None else as_image_processor(processor)
        one_of("weight_transfer", weight_transfer, ("auto", "file", "c10d"), who="VLLMServerEngine")
        url, said = without_token(url)
        super().__init__(
            url,
            token=token or said or os.environ.get(TOKEN_VARIABLE),
            timeout_s=timeout_s,
            stall_timeout_s=stall_timeout_s,
            num_connections=num_connections,
        )
        self._turnstile = Turnstile()
        self._weights_directory = weights_directory
        self._lock = threading.Lock()
        self._updating = self._paused = False
        self._num_probes = 0
        self._workers: list[Any] = []
        self._labels = ["default"]
        self._is_processed = self._tells_versions = True
        try:
            self._prober.await_answer("/health", wait_s, goes_on=lambda: not self._failure)
            status, answer = self._client.request(
                "POST", "/collective_rpc", {"method": "torchrl_limits", "args": []}
            )
            self._check_let_in(status, answer)
            if status != 200:
                limits = self._read_plain(status)
            else:
                limits = answer["results"][0]
                body = {"method": "torchrl_process", "args": []}
                self._workers = self._post("/collective_rpc", body)["results"]
                self._tells_versions = limits.get("tells_versions", True)
                if self._tells_versions:
                    self._labels = [self._post("/weight_info", method="GET")["weight_version"]]
                else:
                    self._labels = [limits["label"]]
                    _log.warning(
                        "The vLLM behind %s does not say which weights drew a token (0.32 does): "
                        "rows that are being drawn end before it takes new weights.",
                        self._client.url,
                    )
        except BaseException:
            self.close()
            raise
        self._own_ends = frozenset(limits.get("own_ends", ()))
        self.max_adapters: int = limits.get("max_adapters", 0)
        """Versions of adapters (LoRA) that can be drawn from at once; 0: it takes whole weights."""
        self._adapters: ServerAdapters | None = None
        if self.max_adapters:
            self._adapters = ServerAdapters(self._rpc, self._post, limits, self._labels[-1])
        self._is_near = all(map(is_near, self._workers))
        self._broadcasts = {"file": False, "c10d": True}.get(weight_transfer, not self._is_near)
        self.vocab_size: int | None = limits["vocab_size"]
        """Token ids are below it; ``None`` where a plain server does not say."""
        self.update_dtype: torch.dtype | None = getattr(torch, limits.get("dtype", ""), None)
        """In which it takes weights that are sent; ``None`` where it does not say."""
        self.quantization: str | None = limits.get("quantization")
        """How its weights are quantised, by vLLM's name; ``None`` where it does not say."""
        self.max_model_len: int = limits["max_model_len"]
        """Most tokens of a prompt and its response together."""
        if images is not None:
            self._take_images(images, takes_images=limits.get("takes_images", True))

    def _take_images(self, images: ImageProcessor, *, takes_images: bool) -> None:
        """Read images from now on; `ValueError`: the server does not, and this is closed."""
        try:
            check_no_adapters(self.max_adapters, who="VLLMServerEngine")
            why: str | None = "it reads none with its model and its options"
            if takes_images:
                self.images = images
                rows = [Row(ids, 1, None, each) for ids, each in probe_prompts(images)]
                drawn = self._draw(rows, SamplingParameters(temperature=0.0))
                why = next((each.error for each in drawn if each.error), None)
            if why:
                raise ValueError(
                    f"VLLMServerEngine: processor= is given, and the server at {self._client.url} "
                    f"takes no images: {why}. Start it with a vision-language model, without "
                    "--language-model-only or --scheduler-cls, by `python -m "
                    "torchrl_modules.vllm.server`, or a `vllm serve` of 0.32 with "
                    "--enable-scale-out."
                )
        except BaseException:
            self.close()
            raise

    def _check_let_in(self, status: int, answer: Any) -> None:
        if status in (401, 403):
            raise PermissionError(
                f"VLLMServerEngine: the server at {self._client.url} answers {status} ({answer}): "
                f"it asks for another token. Give it as {TOKEN_VARIABLE} of the environment, or as "
                "token=: the one that it was started with, or the --api-key of a `vllm serve`."
            )

    def _read_plain(self, status: int) -> dict[str, Any]:
        """The limits of a ``vllm serve``, and what it lacks to be updated."""
        status_of_models, answer = self._client.request("GET", "/v1/models")
        self._check_let_in(status_of_models, answer)
        if status_of_models != 200:
            raise RuntimeError(
                f"VLLMServerEngine: {self._client.url}/v1/models answers {status_of_models} "
                f"({answer}): it is no vLLM server."
            )
        worker = "torchrl_modules.vllm.worker.vLLMWorker"
        self._missing = f"the worker extension (--worker-extension-cls {worker})"
        if status == 404:
            self._missing += " and the routes that update (VLLM_SERVER_DEV_MODE=1)"
        # With one token left its log-prob is 0, unless it is the one of the model's own softmax.
        fields = sampling_fields(SamplingParameters(top_k=1), budget=1, seed=None)
        status, drawn = self._client.request(
            "POST", "/inference/v1/generate", {"token_ids": [0], "sampling_params": fields}
        )
        if status != 200:
            raise RuntimeError(
                f"VLLMServerEngine: the server at {self._client.url} takes no token ids ({drawn}). "
                "Start `vllm serve` with --enable-scale-out, or with the same options `python -m "
                "torchrl_modules.vllm.server`, whose weights can be updated too."
            )
        self._is_processed = read_answer(drawn, self._labels).log_probs == [0.0]
        return {"vocab_size": None, "max_model_len": answer["data"][0]["max_model_len"]}

    def check_sampling(self, params: SamplingParameters) -> None:
        """See `WholeBatchEngine.check_sampling`."""
        super().check_sampling(params)
        if self._missing and params.min_tokens:
            raise ValueError(
                f"VLLMServerEngine: the server at {self._client.url} does not say which tokens "
                "min_tokens leaves out. Start it by `python -m torchrl_modules.vllm.server`."
            )
        if not (self._is_processed or params.is_own_softmax):
            raise ValueError(
                f"VLLMServerEngine: the server at {self._client.url} reports raw log-probs, which "
                f"are not those of the distribution that is sampled from with {params}. Start it "
                "with --logprobs-mode processed_logprobs, or by `python -m "
                "torchrl_modules.vllm.server`."
            )

    @asynccontextmanager
    async def _by_known_weights(self) -> AsyncIterator[None]:
        """While no update is made, where the server does not say which weights drew a token."""
        if self._tells_versions or self._adapters is not None:
            yield
            return
        async with self._turnstile:
            self._check_not_mixed()
            yield
            body = {"method": "torchrl_label_weights", "args": []}
            status, answer = await self._rows.ask("POST", "/collective_rpc", body)
            if status == 200:  # or it is broken, which the row says
                label = answer["results"][0]["label"]
                check_labels([label], self._labels[-1:], who="VLLMServerEngine")

    async def _ask_for(self, row: Row, params: SamplingParameters) -> Generation:
        if self._failure:
            raise ConnectionError(self._failure)
        try:
            ids = check_prompt(
                row.prompt, vocab_size=self.vocab_size, max_model_len=self.max_model_len
            )
            body: dict[str, Any] = {
                "sampling_params": sampling_fields(params, row.budget, row.seed),
                **await self._prompt_fields(ids, row.images),
            }
        except ValueError as error:
            return Generation([], [], "error", str(error))
        if self._adapters is not None:
            if row.adapters is not None:
                kept = Served(self._labels[-1], row.adapters.name)
                return await self._ask_adapted(body, kept, self._adapters.base_label)
            with self._adapters.used() as served:
                return await self._ask_adapted(body, served, self._adapters.base_label)
        first = self._labels[-1]
        body["cache_salt"] = first  # Cached prefixes of other weights are never met.
        if row.images:  # Nor what these made of an image.
            name_images(body, row.images, first)
        status, answer = await self._rows.ask("POST", "/inference/v1/generate", body)
        if status == 200:
            if row.images:
                try:
                    check_expanded(ids, answer.get("prompt_token_ids"))
                except ValueError as error:
                    return Generation([], [], "error", str(error))
            return read_answer(answer, self._labels_since(first))
        return await self._refused(status, answer)

    async def _prompt_fields(self, ids: list[int], images: Sequence[str]) -> dict[str, Any]:
        """What a request says of its prompt; `ValueError`: the row is refused."""
        processor = self._reader_of(ids, images)
        if processor is None:
            return {"token_ids": ids}
        return await asyncio.to_thread(request_fields, processor, ids, images)

    async def _ask_adapted(
        self, body: dict[str, Any], served: Served, base_label: str
    ) -> Generation:
        """Ask for a row by adapters, which draw it to its end."""
        body["cache_salt"] = served.label
        if served.name is not None:
            body["model"] = body["cache_salt"] = served.name
        status, answer = await self._rows.ask("POST", "/inference/v1/generate", body)
        if status == 404 and served.name is not None:
            raise StaleWeights(
                f"VLLMServerEngine: the server at {self._client.url} has no adapters "
                f"{served.name}: it was restarted, or another client removed them. Send the "
                "weights again."
            )
        if status != 200:
            return await self._refused(status, answer)
        drawn = read_answer(answer, [base_label])
        spans = [VersionSpan(version_number(served.label), 0, len(drawn.ids))]
        return drawn._replace(versions=spans if drawn.ids else [])

    async def _refused(self, status: int, answer: Any) -> Generation:
        """The row of a request that the server did not take."""
        if status >= 500:
            await asyncio.to_thread(self._check_health)
        message = f"the server answers {status}: {answer}"
        if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
            message = str(answer["error"].get("message", message))
        return Generation([], [], "error", message)

    def _probe(self) -> object:
        try:
            self._check_health()
            text = "" if self._updating or self._paused else self._read_metrics()
        except AnswerTimeout:
            return None
        counts = tuple(line for line in text.splitlines() if line.startswith((_DRAWN, _READ)))
        if any(float(line.rpartition(" ")[2]) for line in counts if line.startswith(_DRAWN)):
            return counts
        # It takes weights, or warms up: it draws no token meanwhile, but its processes do run.
        if any(is_stopped(worker) for worker in self._workers):
            return None
        self._num_probes += 1
        return self._num_probes

    def _fail(self, reason: str) -> None:
        self._failure = reason  # before those go on who wait for weights
        with suppress(RuntimeError):  # it was closed meanwhile
            self._release()
        super()._fail(reason)

    def update_weights(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        version: int | None = None,
        recompute: bool = True,
    ) -> None:
        """Replace the weights, all or none.

        The server checks them as a whole before it changes anything; requests in flight wait.

        Args:
            state_dict: as for `VLLMEngine.update_weights`.
            version: as for `VLLMEngine.update_weights`.
            recompute: as for `AsyncVLLMEngine.update_weights`. Adapters are served to requests that
                come from now on, and nothing waits for them.

        Raises:
            EngineDied: the server is gone, stopped for ``stall_timeout_s``, or stuck for
                ``timeout_s``.
            UpdateRefused: a name, type, shape or value is wrong; the old weights keep serving.
            RuntimeError: the server is a plain ``vllm serve``; or vLLM failed in the middle of
                loading: the server stays paused and this refuses to generate until an update
                succeeds.
        """
        self._check_updatable()
        with self._lock:
            version = next_version(version, self.version, who="VLLMServerEngine.update_weights")
            if self._failure:
                raise EngineDied(f"VLLMServerEngine.update_weights: {self._failure}")
            self._updating = True
            try:
                with self._watch.waiting():
                    self._load(state_dict, str(version), recompute)
            except ConnectionError as error:
                reason = self._failure or error
                raise EngineDied(f"VLLMServerEngine.update_weights: {reason}") from error
            except RuntimeError as error:
                try:
                    self._check_health()
                except ConnectionError as dead:
                    text = f"VLLMServerEngine.update_weights: {dead} ({error})"
                    raise EngineDied(text) from dead
                raise
            finally:
                self._updating = False

    def keep_adapters(self, weights: AdapterWeights) -> KeptAdapters:
        """See `WholeBatchEngine.keep_adapters`.

        Raises:
            UpdateRefused: it can't apply them.
            ConnectionError: it is gone or stuck.
        """
        return self._taking_adapters("keep_adapters").keep(weights)

    def drop_adapters(self, kept: KeptAdapters) -> None:
        """See `WholeBatchEngine.drop_adapters`.

        Raises:
            RuntimeError: the server has none of this name.
            ConnectionError: it is gone or stuck.
        """
        self._taking_adapters("drop_adapters").drop(kept)

    def _taking_adapters(self, user: str) -> ServerAdapters:
        if self._adapters is None:
            needed = "a server that was started with --enable-lora"
            raise UpdateRefused(f"VLLMServerEngine.{user}: adapters alone go to {needed}.")
        return self._adapters

    def pause(self, *, paused: bool = True) -> None:
        """Draw no more tokens, or go on; requests wait meanwhile.

        Raises:
            RuntimeError: the server is a plain ``vllm serve``.
        """
        self._check_updatable()
        with self._lock:
            self._paused = paused
            if paused:
                self._hold()
                self._post("/pause", mode="keep", clear_cache="false")
            elif not self.mixed:
                self._post("/resume")
                self._release()

    def _hold(self) -> None:
        """Rows that are being drawn end, where the server would not say by which weights."""
        if not self._tells_versions:
            self._rows.loop.run(self._turnstile.hold())

    def _release(self) -> None:
        if not self._tells_versions:
            self._rows.loop.run(self._turnstile.release())

    def _load(self, state_dict: Mapping[str, Tensor], label: str, recompute: bool) -> None:
        if self._adapters is None:
            self._load_whole(state_dict, label, recompute)
            return
        if self._sleeps:
            self._post("/wake_up")
            self._sleeps = False
        self._adapters.load(state_dict, label)
        self._add_label(label)
        self.mixed = False

    def _load_whole(self, state_dict: Mapping[str, Tensor], label: str, recompute: bool) -> None:
        if isinstance(state_dict, AdapterWeights):
            self._taking_adapters("update_weights")
        with ExitStack() as stack:
            if self._broadcasts:
                if self._transfer is None or self._transfer.is_closed:  # an update broke off
                    self.join(**self._meeting)
                assert self._transfer is not None
                checked = self._transfer.expected.check(
                    state_dict, who="VLLMServerEngine.update_weights"
                )
                load = partial(self._transfer.send, checked)
            else:
                path = weights_file(
                    state_dict,
                    dtype=self.update_dtype,
                    directory=self._weights_directory,
                    is_near=self._is_near,
                    who="VLLMServerEngine.update_weights",
                )
                load = partial(self._rpc, "torchrl_load_weights", stack.enter_context(path))
            stack.enter_context(self._stopped(recompute=recompute))
            if self._sleeps:
                self._post("/wake_up", tags="weights")
            outcome = load()
            if "failed" in outcome:
                self.mixed = True
                raise RuntimeError(f"VLLMServerEngine.update_weights: {outcome['failed']}")
            if "refused" in outcome:
                raise UpdateRefused(f"VLLMServerEngine.update_weights: {outcome['refused']}")
            if self._sleeps:
                self._post("/wake_up")
                self._sleeps = False
            if recompute:
                self._post("/reset_prefix_cache", reset_running_requests="true")
            if self._tells_versions:
                self._post("/update_weight_version", {"new_version": label})
            else:
                self._rpc("torchrl_label_weights", label)
            self._add_label(label)
            self.mixed = False

    @contextmanager
    def _stopped(self, *, recompute: bool) -> Iterator[None]:
        """Nothing is drawn; it goes on after that, unless the weights are a mixture."""
        self._hold()
        try:
            self._post("/pause", mode="keep", clear_cache=str(recompute).lower())
            try:
                yield
            finally:
                if not (self.mixed or self._paused):
                    self._post("/resume")
        finally:
            if not self._paused:
                self._release()

    def close(self) -> None:
        """End the connections; the server goes on."""
        self.leave()
        for client in (self._rows, self._client, self._prober):
            client.close()
