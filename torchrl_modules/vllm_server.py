"""vLLM in a process of its own on this machine, reached by URL: `VLLMServerEngine`."""

import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from torch import Tensor

from .engine import Generation
from .sampling import SamplingParameters
from .vllm_http import JSONClient
from .vllm_requests import check_prompt
from .weights import next_version


class VLLMServerEngine:
    """Draws tokens with a vLLM server that ``torchrl_modules.vllm_serve`` started on this machine.

    The server may be shared for generation; only one client may update its weights.

    Args:
        url: ``unix:///path/of/the/socket`` or ``http://host:port``.
        timeout_s: a request without an answer for so long means that the server is stuck.
        num_connections: most requests at a time.
        weights_directory: where weights are handed over; memory, where there is ``/dev/shm``.

    Raises:
        ConnectionError: nobody answers at the URL.
        RuntimeError: the server was not started by ``torchrl_modules.vllm_serve``.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 600.0,
        num_connections: int = 128,
        weights_directory: str | None = None,
    ) -> None:
        self._client = JSONClient(url, timeout_s)
        self._pool = ThreadPoolExecutor(num_connections, thread_name_prefix="vllm-client")
        if weights_directory is None and Path("/dev/shm").is_dir():
            weights_directory = "/dev/shm"
        self._weights_directory = weights_directory
        self._lock = threading.Lock()
        self._mixed = False
        limits = self._rpc("torchrl_limits")
        self.vocab_size: int = limits["vocab_size"]
        """Token ids are below it."""
        self.max_model_len: int = limits["max_model_len"]
        """Most tokens of a prompt and its response together."""
        self._label: str = self._post("/weight_info", method="GET")["weight_version"]

    @property
    def version(self) -> int:
        """Of the weights that serve; 0 before the first update."""
        return int(self._label) if self._label.isdecimal() else 0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        *,
        max_new_tokens: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Draw one response per prompt.

        Args:
            prompts: as for `VLLMEngine.generate`.
            params: as for `VLLMEngine.generate`.
            max_new_tokens: as for `VLLMEngine.generate`.

        Returns:
            One generation per prompt, in order.

        Raises:
            ConnectionError: the server is gone, or stuck for ``timeout_s``.
            RuntimeError: it failed, or serves other weights than it was given (a restarted one
                has those of its directory).
            ValueError: ``max_new_tokens`` has not one value per prompt.
        """
        budgets = max_new_tokens
        if budgets is None:
            budgets = [params.max_new_tokens] * len(prompts)
        if len(budgets) != len(prompts):
            raise ValueError(
                f"VLLMServerEngine: {len(prompts)} prompts, but {len(budgets)} max_new_tokens."
            )
        with self._lock:
            if self._mixed:
                raise RuntimeError(
                    "VLLMServerEngine: an update failed in the middle, and the server's weights "
                    "are a mixture. Update them again."
                )
            rows = [
                (prompt, params, budget) for prompt, budget in zip(prompts, budgets, strict=True)
            ]
            return list(self._pool.map(lambda row: self._generate_row(*row), rows))

    def _generate_row(
        self, prompt: Sequence[int], params: SamplingParameters, budget: int
    ) -> Generation:
        try:
            ids = check_prompt(prompt, vocab_size=self.vocab_size, max_model_len=self.max_model_len)
        except ValueError as error:
            return Generation([], [], "error", str(error))
        body = {
            "token_ids": ids,
            "cache_salt": self._label,
            "sampling_params": {
                "max_tokens": budget,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "min_p": params.min_p,
                "stop_token_ids": list(params.stop_token_ids or ()),
                "ignore_eos": params.stop_token_ids is not None,
                "logprobs": 0,
                "detokenize": False,
            },
        }
        status, answer = self._client.request("POST", "/inference/v1/generate", body)
        if status == 400:
            return Generation([], [], "error", answer["error"]["message"])
        if status != 200:
            raise RuntimeError(f"VLLMServerEngine: {self._client.url} answers {status}: {answer}")
        return self._read(answer["choices"][0])

    def _read(self, choice: dict[str, Any]) -> Generation:
        drawn_by = {span["version"] for span in choice["weight_versions"] or ()}
        if drawn_by - {self._label}:
            raise RuntimeError(
                f"VLLMServerEngine: tokens were drawn by the weights {sorted(drawn_by)}, not by "
                f"{self._label!r}. The server was restarted, or another client updates it. Send "
                "the weights again."
            )
        log_probs = [token["logprob"] for token in choice["logprobs"]["content"]]
        return Generation(choice["token_ids"], log_probs, choice["finish_reason"])

    def update_weights(
        self, state_dict: Mapping[str, Tensor], *, version: int | None = None
    ) -> None:
        """Replace the weights, all or none.

        They are handed over in a file. The server checks it as a whole before it changes anything;
        requests of other clients wait meanwhile and are then recomputed.

        Args:
            state_dict: as for `VLLMEngine.update_weights`.
            version: as for `VLLMEngine.update_weights`.

        Raises:
            ConnectionError: the server is gone, or stuck for ``timeout_s``.
            ValueError: a name, type, shape or value is wrong; the old weights keep serving.
            RuntimeError: vLLM failed in the middle of loading; the server stays paused and this
                refuses to generate until an update succeeds.
        """
        version = next_version(version, self.version, who="VLLMServerEngine.update_weights")
        with (
            self._lock,
            tempfile.TemporaryDirectory(prefix="weights-", dir=self._weights_directory) as folder,
        ):
            path = Path(folder, "weights.safetensors")
            _save(state_dict, path)
            self._post("/pause", mode="keep")
            result = self._rpc("torchrl_load_weights", str(path))
            if "failed" in result:
                self._mixed = True
                raise RuntimeError(f"VLLMServerEngine.update_weights: {result['failed']}")
            if "refused" not in result:
                self._post("/reset_prefix_cache", reset_running_requests="true")
                self._post("/update_weight_version", {"new_version": str(version)})
                self._label, self._mixed = str(version), False
            if not self._mixed:
                self._post("/resume")
            if "refused" in result:
                raise ValueError(f"VLLMServerEngine.update_weights: {result['refused']}")

    def close(self) -> None:
        """End the connections; the server goes on."""
        self._pool.shutdown()
        self._client.close()

    def _rpc(self, method: str, *args: str) -> dict[str, Any]:
        answer = self._post("/collective_rpc", {"method": method, "args": list(args)})
        results = answer["results"]
        # Of several workers, one that had trouble speaks for all.
        return next((result for result in results if "failed" in result), results[0])

    def _post(self, path: str, body: object = None, *, method: str = "POST", **query: str) -> Any:
        if query:
            path = f"{path}?{urlencode(query)}"
        status, answer = self._client.request(method, path, body)
        if status != 200:
            raise RuntimeError(
                f"VLLMServerEngine: {path} at {self._client.url} answers {status}: {answer}. Was "
                "the server started by `python -m torchrl_modules.vllm_serve`?"
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
