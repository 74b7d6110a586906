"""vLLM in a process of its own on this machine, reached by URL: `VLLMServerEngine`."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from torchrl_modules.engines.process_state import is_near, is_stopped
from torchrl_modules.engines.protocol import EngineDied, Generation
from torchrl_modules.engines.watchdog import ProgressWatch
from torchrl_modules.sampling.params import SamplingParameters
from torchrl_modules.weights.shared_file import weights_file
from torchrl_modules.weights.state import UpdateRefused, next_version
from torchrl_modules.weights.transfer import C10dWeightTransfer, TransferControl

from .base import Row, WholeBatchEngine
from .http import AnswerTimeout, Interrupt, JSONClient, ServerRoutes
from .requests import check_prompt, read_answer, sampling_fields, version_number

_DRAWN = "vllm:generation_tokens_total"
_READ = "vllm:prompt_tokens_total"


class VLLMServerEngine(ServerRoutes, WholeBatchEngine):
    """Draws tokens with a vLLM server on this machine.

    Weights are updated where ``torchrl_modules.vllm.launch`` started it; a ``vllm serve
    --enable-scale-out`` can be drawn from. Any number of threads may call it. The server may be
    shared for generation; only one client may update its weights.

    Args:
        url: ``unix:///path/of/the/socket`` or ``http://host:port``.
        token: what the server asks for on a TCP port; the environment's ``TORCHRL_VLLM_TOKEN`` when
            not given.
        wait_s: how long to wait for a server that is starting.
        timeout_s: a single request without an answer for so long means that the server is stuck.
        stall_timeout_s: a server that has requests and draws no token for so long is stuck, be its
            connections open or not; and so is one that takes weights, if it is stopped. Before its
            very first token it warms up, and ``timeout_s`` counts.
        num_connections: most rows that are drawn at a time.
        weights_directory: where weights that are handed over take room; memory when not given.

    Raises:
        ConnectionError: nobody answers at the URL.
        PermissionError: the server asks for another token.
        RuntimeError: it is no vLLM server, or one that takes no token ids.
    """

    reads_in_order = True
    """An update reads each weight once, in this thread: they may be lazy."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        wait_s: float = 0.0,
        timeout_s: float = 600.0,
        stall_timeout_s: float = 30.0,
        num_connections: int = 128,
        weights_directory: str | None = None,
    ) -> None:
        self._rows = JSONClient(url, timeout_s, token=token, num_connections=num_connections)
        # Rows that wait while weights are replaced hold their connections, all that there are.
        self._client = JSONClient(url, timeout_s, token=token)
        self._prober = JSONClient(url, min(5.0, stall_timeout_s / 2), token=token)
        self._pool = ThreadPoolExecutor(num_connections, thread_name_prefix="vllm-client")
        self._watch = ProgressWatch(self._probe, self._fail, stall_timeout_s=stall_timeout_s)
        self._weights_directory = weights_directory
        self._lock = threading.Lock()
        self._updating = self._paused = False
        self._num_probes = 0
        self._failure = ""
        self._workers: list[Any] = []
        self._labels: list[str] = ["default"]
        self._missing = ""
        self._is_processed = True
        try:
            self._prober.await_answer("/health", wait_s, goes_on=lambda: not self._failure)
            limits = self._read_limits()
        except BaseException:
            self.close()
            raise
        self._own_ends = frozenset(limits.get("own_ends", ()))
        self.vocab_size: int | None = limits["vocab_size"]
        """Token ids are below it; ``None`` where a plain server does not say."""
        self.max_model_len: int = limits["max_model_len"]
        """Most tokens of a prompt and its response together."""

    def _read_limits(self) -> dict[str, Any]:
        status, answer = self._try_rpc("torchrl_limits")
        if status != 200:
            return self._read_plain(status)
        self._workers = self._rpc_all("torchrl_process")
        self._labels = [self._post("/weight_info", method="GET")["weight_version"]]
        return answer["results"][0]

    def _read_plain(self, status: int) -> dict[str, Any]:
        """The limits of a ``vllm serve``, and what it lacks to be updated."""
        answer = self._post("/v1/models", method="GET")
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
                "torchrl_modules.vllm.launch`, whose weights can be updated too."
            )
        self._is_processed = read_answer(drawn, self._labels).log_probs == [0.0]
        return {"vocab_size": None, "max_model_len": answer["data"][0]["max_model_len"]}

    @property
    def version(self) -> int:
        """Of the weights that serve; 0 before the first update."""
        return version_number(self._labels[-1])

    def check_sampling(self, params: SamplingParameters) -> None:
        """See :meth:`~torchrl_modules.vllm.base.WholeBatchEngine.check_sampling`."""
        super().check_sampling(params)
        if self._missing and params.min_tokens:
            raise ValueError(
                f"VLLMServerEngine: the server at {self._client.url} does not say which tokens "
                "min_tokens leaves out. Start it by `python -m torchrl_modules.vllm.launch`."
            )
        if not (self._is_processed or params.is_own_softmax):
            raise ValueError(
                f"VLLMServerEngine: the server at {self._client.url} reports raw log-probs, which "
                f"are not those of the distribution that is sampled from with {params}. Start it "
                "with --logprobs-mode processed_logprobs, or by `python -m "
                "torchrl_modules.vllm.launch`."
            )

    def _draw(self, rows: list[Row], params: SamplingParameters) -> list[Generation]:
        self._check_not_mixed()
        with self._watch.waiting():
            calls = [self._pool.submit(self._draw_row, row, params) for row in rows]
            wait(calls)  # each has a deadline: `timeout_s`, and the watch
        return self._collected(calls)

    def draw_one(self, row: Row, params: SamplingParameters, interrupt: Interrupt) -> Generation:
        """Draw one row, for a caller that may let it go.

        Args:
            row: what is asked for.
            params: the distribution.
            interrupt: when it is called, the server stops drawing, and this raises.

        Raises:
            EngineDied: the server is gone or stuck, or it was interrupted.
        """
        self._check_not_mixed()
        call: Future[Generation] = Future()
        with self._watch.waiting():
            try:
                call.set_result(self._draw_row(row, params, interrupt))
            except Exception as error:
                call.set_exception(error)
        return self._collected([call])[0]

    def _collected(self, calls: "list[Future[Generation]]") -> list[Generation]:
        lost = [error for call in calls if (error := call.exception()) is not None]
        for error in lost:
            if not isinstance(error, ConnectionError):
                raise error
        if lost:
            raise EngineDied(
                f"VLLMServerEngine: {len(lost)} of {len(calls)} rows were lost: "
                f"{self._failure or lost[0]}",
                results=[None if call.exception() else call.result() for call in calls],
            )
        return [call.result() for call in calls]

    def _draw_row(
        self, row: Row, params: SamplingParameters, interrupt: Interrupt | None = None
    ) -> Generation:
        if self._failure:
            raise ConnectionError(self._failure)
        try:
            body: dict[str, Any] = {
                "token_ids": check_prompt(
                    row.prompt, vocab_size=self.vocab_size, max_model_len=self.max_model_len
                ),
                "sampling_params": sampling_fields(params, row.budget, row.seed),
            }
        except ValueError as error:
            return Generation([], [], "error", str(error))
        first = len(self._labels) - 1
        body["cache_salt"] = self._labels[first]  # Cached prefixes of other weights are never met.
        path = "/inference/v1/generate"
        status, answer = self._rows.request("POST", path, body, interrupt=interrupt)
        if status == 200:
            return read_answer(answer, self._labels[first:])
        if status >= 500:
            self._check_health()
        message = f"the server answers {status}: {answer}"
        if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
            message = str(answer["error"].get("message", message))
        return Generation([], [], "error", message)

    def _probe(self) -> object:
        try:
            self._check_health()
            is_idle = self._updating or self._paused
            text = "" if is_idle else str(self._prober.request("GET", "/metrics")[1])
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
        self._failure = reason
        self._rows.interrupt()
        self._client.interrupt()

    def update_weights(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        version: int | None = None,
        recompute: bool = True,
        via: C10dWeightTransfer | None = None,
    ) -> None:
        """Replace the weights, all or none.

        The server checks them as a whole before it changes anything; requests in flight wait.

        Args:
            state_dict: as for `VLLMEngine.update_weights`.
            version: as for `VLLMEngine.update_weights`.
            recompute: as for `AsyncVLLMEngine.update_weights`.
            via: by which way they go, made with `transfer_control`; in memory when not given.

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
                    self._load(state_dict, str(version), recompute, via)
            except ConnectionError as error:
                reason = self._failure or error
                raise EngineDied(f"VLLMServerEngine.update_weights: {reason}") from error
            except RuntimeError as error:
                self._raise_if_dead(error)
                raise
            finally:
                self._updating = False

    def pause(self, *, paused: bool = True) -> None:
        """Draw no more tokens, or go on; requests wait meanwhile.

        Raises:
            RuntimeError: the server is a plain ``vllm serve``.
        """
        self._check_updatable()
        with self._lock:
            self._paused = paused
            if paused:
                self._post("/pause", mode="keep", clear_cache="false")
            elif not self._mixed:
                self._post("/resume")

    def _check_updatable(self) -> None:
        if self._missing:
            raise RuntimeError(
                f"VLLMServerEngine: the server at {self._client.url} can be drawn from, but its "
                f"weights can't be updated: it lacks {self._missing}. Start it with the same "
                "options by `python -m torchrl_modules.vllm.launch`, which adds both."
            )

    def _load(
        self,
        state_dict: Mapping[str, Tensor],
        label: str,
        recompute: bool,
        via: C10dWeightTransfer | None,
    ) -> None:
        with self._sending(state_dict, via) as load:
            self._post("/pause", mode="keep", clear_cache=str(recompute).lower())
            try:
                outcome = load()
                if "failed" in outcome:
                    self._mixed = True
                    raise RuntimeError(f"VLLMServerEngine.update_weights: {outcome['failed']}")
                if "refused" in outcome:
                    raise UpdateRefused(f"VLLMServerEngine.update_weights: {outcome['refused']}")
                if recompute:
                    self._post("/reset_prefix_cache", reset_running_requests="true")
                self._post("/update_weight_version", {"new_version": label})
                self._labels.append(label)
                self._mixed = False
            finally:
                if not (self._mixed or self._paused):
                    self._post("/resume")

    @contextmanager
    def _sending(
        self, state_dict: Mapping[str, Tensor], via: C10dWeightTransfer | None
    ) -> Iterator[Callable[[], dict[str, str]]]:
        """Gives what is done while the server is paused."""
        if via is not None:
            yield lambda: via.send(state_dict)
            return
        with weights_file(
            state_dict,
            directory=self._weights_directory,
            is_near=all(map(is_near, self._workers)),
            who="VLLMServerEngine.update_weights",
        ) as path:
            yield lambda: self._rpc("torchrl_load_weights", path)

    def transfer_control(self) -> TransferControl:
        """VLLM's control of a weight transfer, for a `C10dWeightTransfer`."""
        self._check_updatable()
        return TransferControl(
            call=lambda step, **body: self._post(f"/{step}", body or None), rpc=self._rpc
        )

    def close(self) -> None:
        """End the connections; the server goes on."""
        self._pool.shutdown()
        for client in (self._rows, self._client, self._prober):
            client.close()
