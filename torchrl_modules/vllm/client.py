"""vLLM in a process of its own on this machine, reached by URL: `VLLMServerEngine`."""

import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from torch import Tensor

from torchrl_modules.engines.process_state import is_stopped
from torchrl_modules.engines.protocol import EngineDied, Generation
from torchrl_modules.engines.watchdog import ProgressWatch
from torchrl_modules.sampling.params import SamplingParameters
from torchrl_modules.weights.clients import HTTPTransferClient
from torchrl_modules.weights.state import next_version
from torchrl_modules.weights.transfer import C10dWeightTransfer, TransferClient

from .http_client import AnswerTimeout, JSONClient
from .http_codec import read_answer, request_body, version_number
from .requests import check_prompt, check_reported


class VLLMServerEngine:
    """Draws tokens with a vLLM server that ``torchrl_modules.vllm.launch`` started on this machine.

    Any number of threads may call it. The server may be shared for generation; only one client may
    update its weights.

    Args:
        url: ``unix:///path/of/the/socket`` or ``http://host:port``.
        timeout_s: a single request without an answer for so long means that the server is stuck.
        stall_timeout_s: a server that has requests and draws no token for so long is stuck, be its
            connections open or not; and so is one that takes weights, if it is stopped.
        num_connections: most requests at a time.
        weights_directory: where weights are handed over; memory, where there is ``/dev/shm``.

    Raises:
        ConnectionError: nobody answers at the URL.
        RuntimeError: the server was not started by ``torchrl_modules.vllm.launch``.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 600.0,
        stall_timeout_s: float = 30.0,
        num_connections: int = 128,
        weights_directory: str | None = None,
    ) -> None:
        self._client = JSONClient(url, timeout_s)
        self._prober = JSONClient(url, min(5.0, stall_timeout_s / 2))
        self._pool = ThreadPoolExecutor(num_connections, thread_name_prefix="vllm-client")
        self._watch = ProgressWatch(self._probe, self._fail, stall_timeout_s=stall_timeout_s)
        if weights_directory is None and Path("/dev/shm").is_dir():
            weights_directory = "/dev/shm"
        self._weights_directory = weights_directory
        self._lock = threading.Lock()
        self._updating = self._mixed = False
        self._num_probes = 0
        self._failure = ""
        limits = self._rpc("torchrl_limits")
        self.vocab_size: int = limits["vocab_size"]
        """Token ids are below it."""
        self.max_model_len: int = limits["max_model_len"]
        """Most tokens of a prompt and its response together."""
        self._workers: list[Any] = self._rpc_all("torchrl_process")
        self._labels: list[str] = [self._post("/weight_info", method="GET")["weight_version"]]

    @property
    def mixed(self) -> bool:
        """An update failed in the middle, and no later one has succeeded."""
        return self._mixed

    @property
    def version(self) -> int:
        """Of the weights that serve; 0 before the first update."""
        return version_number(self._labels[-1])

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        *,
        max_new_tokens: Sequence[int] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Draw one response per prompt.

        Args:
            prompts: as for `VLLMEngine.generate`.
            params: as for `VLLMEngine.generate`.
            max_new_tokens: as for `VLLMEngine.generate`.
            seeds: one per prompt; the same seed, prompt and weights give the same response.

        Returns:
            One generation per prompt, in order. Weights may be updated meanwhile: a response says
            which version drew which token.

        Raises:
            EngineDied: the server is gone or stuck; ``results`` holds the rows that were finished.
            StaleWeights: it serves other weights than it was given (a restarted one has those of
                its directory).
            RuntimeError: an update failed in the middle.
            ValueError: ``max_new_tokens`` or ``seeds`` has not one value per prompt.
        """
        check_reported(params)
        budgets = (
            [params.max_new_tokens] * len(prompts) if max_new_tokens is None else max_new_tokens
        )
        row_seeds = [None] * len(prompts) if seeds is None else seeds
        if not len(budgets) == len(row_seeds) == len(prompts):
            raise ValueError(
                f"VLLMServerEngine: {len(prompts)} prompts, but {len(budgets)} max_new_tokens and "
                f"{len(row_seeds)} seeds."
            )
        if self._mixed:
            raise RuntimeError(
                "VLLMServerEngine: an update failed in the middle, and the server's weights "
                "are a mixture. Update them again."
            )
        with self._watch.waiting():
            calls = [
                self._pool.submit(self._generate_row, prompt, params, budget, seed)
                for prompt, budget, seed in zip(prompts, budgets, row_seeds, strict=True)
            ]
            wait(calls)  # each has a deadline: `timeout_s`, and the watch
        return self._collected(calls)

    def _collected(self, calls: "list[Future[Generation]]") -> list[Generation]:
        errors = [call.exception() for call in calls]
        others = [e for e in errors if e is not None and not isinstance(e, ConnectionError)]
        if others:
            raise others[0]
        lost = [error for error in errors if error is not None]
        if lost:
            raise EngineDied(
                f"VLLMServerEngine: {len(lost)} of {len(calls)} rows were lost: "
                f"{self._failure or lost[0]}",
                results=[
                    None if error else call.result()
                    for call, error in zip(calls, errors, strict=True)
                ],
            )
        return [call.result() for call in calls]

    def _generate_row(
        self, prompt: Sequence[int], params: SamplingParameters, budget: int, seed: int | None
    ) -> Generation:
        if self._failure:
            raise ConnectionError(self._failure)
        try:
            ids = check_prompt(prompt, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        except ValueError as error:
            return Generation([], [], "error", str(error))
        first = len(self._labels) - 1
        body = request_body(ids, params, budget=budget, label=self._labels[first], seed=seed)
        status, answer = self._client.request("POST", "/inference/v1/generate", body)
        if status == 200:
            generation = read_answer(answer, self._labels[first:])
            if params.untempered_log_probs:  # the same, `check_reported` says
                generation = generation._replace(untempered_log_probs=generation.log_probs)
            return generation
        if status >= 500:
            self._check_health()
        message = f"the server answers {status}: {answer}"
        if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
            message = str(answer["error"].get("message", message))
        return Generation([], [], "error", message)

    # Is it there, and does it draw tokens?

    def _raise_if_dead(self, error: Exception) -> None:
        try:
            self._check_health()
        except ConnectionError as dead:
            raise EngineDied(f"VLLMServerEngine.update_weights: {dead} ({error})") from dead

    def _check_health(self) -> None:
        status, _ = self._prober.request("GET", "/health")
        if status != 200:
            raise ConnectionError(f"The engine behind {self._prober.url} has died ({status}).")

    def _probe(self) -> object:
        try:
            self._check_health()
            if self._updating:  # It draws no token meanwhile.
                if any(is_stopped(worker) for worker in self._workers):
                    return None
                self._num_probes += 1
                return self._num_probes
            _, text = self._prober.request("GET", "/metrics")
        except AnswerTimeout:
            return None
        counted = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
        return tuple(line for line in str(text).splitlines() if line.startswith(counted))

    def _fail(self, reason: str) -> None:
        self._failure = reason
        self._client.interrupt()

    def update_weights(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        version: int | None = None,
        via: C10dWeightTransfer | None = None,
    ) -> None:
        """Replace the weights, all or none.

        The server checks them as a whole before it changes anything; requests in flight wait
        meanwhile and are then recomputed.

        Args:
            state_dict: as for `VLLMEngine.update_weights`.
            version: as for `VLLMEngine.update_weights`.
            via: by which way they go, made with `transfer_client`; in a file when not given.

        Raises:
            EngineDied: the server is gone, stopped for ``stall_timeout_s``, or stuck for
                ``timeout_s``.
            ValueError: a name, type, shape or value is wrong; the old weights keep serving.
            RuntimeError: vLLM failed in the middle of loading; the server stays paused and this
                refuses to generate until an update succeeds.
        """
        with self._lock:
            version = next_version(version, self.version, who="VLLMServerEngine.update_weights")
            if self._failure:
                raise EngineDied(f"VLLMServerEngine.update_weights: {self._failure}")
            self._updating = True
            try:
                with self._watch.waiting():
                    self._load(state_dict, str(version), via)
            except ConnectionError as error:
                reason = self._failure or error
                raise EngineDied(f"VLLMServerEngine.update_weights: {reason}") from error
            except RuntimeError as error:
                self._raise_if_dead(error)
                raise
            finally:
                self._updating = False

    def _load(
        self, state_dict: Mapping[str, Tensor], label: str, via: C10dWeightTransfer | None
    ) -> None:
        with self._handing_over(state_dict, via) as load:
            self._post("/pause", mode="keep")
            try:
                outcome = load()
                if "failed" in outcome:
                    self._mixed = True
                    raise RuntimeError(f"VLLMServerEngine.update_weights: {outcome['failed']}")
                if "refused" in outcome:
                    raise ValueError(f"VLLMServerEngine.update_weights: {outcome['refused']}")
                self._post("/reset_prefix_cache", reset_running_requests="true")
                self._post("/update_weight_version", {"new_version": label})
                self._labels.append(label)
                self._mixed = False
            finally:
                if not self._mixed:
                    self._post("/resume")

    @contextmanager
    def _handing_over(
        self, state_dict: Mapping[str, Tensor], via: C10dWeightTransfer | None
    ) -> Iterator[Callable[[], dict[str, str]]]:
        """Gives what is done while the server is paused."""
        if via is not None:
            yield lambda: via.send(state_dict)
            return
        with tempfile.TemporaryDirectory(prefix="weights-", dir=self._weights_directory) as folder:
            path = Path(folder, "weights.safetensors")
            _save(state_dict, path)
            yield lambda: self._rpc("torchrl_load_weights", str(path))

    def transfer_client(self) -> TransferClient:
        """VLLM's control of a weight transfer, for a `C10dWeightTransfer`."""
        return HTTPTransferClient(self._post, self._rpc)

    def close(self) -> None:
        """End the connections; the server goes on."""
        self._pool.shutdown()
        self._client.close()
        self._prober.close()

    def _rpc(self, method: str, *args: str) -> dict[str, Any]:
        results = self._rpc_all(method, *args)
        kinds = {str(result if result is None else list(result)) for result in results}
        if len(kinds) > 1:
            return {"failed": f"the workers' answers to {method} differ: {results}"}
        return results[0]

    def _rpc_all(self, method: str, *args: str) -> list[Any]:
        return self._post("/collective_rpc", {"method": method, "args": list(args)})["results"]

    def _post(self, path: str, body: object = None, *, method: str = "POST", **query: str) -> Any:
        if query:
            path = f"{path}?{urlencode(query)}"
        status, answer = self._client.request(method, path, body)
        if status != 200:
            raise RuntimeError(
                f"VLLMServerEngine: {path} at {self._client.url} answers {status}: {answer}. Was "
                "the server started by `python -m torchrl_modules.vllm.launch`?"
            )
        return answer


def _save(state_dict: Mapping[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    seen: set[int] = set()
    weights: dict[str, Tensor] = {}
    for name, value in state_dict.items():
        if not isinstance(value, Tensor) or value.is_meta or hasattr(value, "full_tensor"):
            raise ValueError(
                f"VLLMServerEngine.update_weights: {name} is no whole torch.Tensor with data, but "
                f"a {type(value).__name__}."
            )
        value = value.detach().cpu().contiguous()
        # A file holds no tied tensors; the server checks that both values are equal.
        weights[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    save_file(weights, path)
