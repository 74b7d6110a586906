"""An engine of one's own: SGLang behind its HTTP interface, for every collector.

    python -m sglang.launch_server --model-path MODEL --skip-tokenizer-init --port 30000

A policy asks ``version``, ``generate`` and ``update_weights`` of an engine, and nothing else. Token
ids go there and come back, so nothing is tokenised twice.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from torchrl_modules import Generation, JSONClient, SamplingParameters, check_prompt


class SGLangEngine:
    """Draws tokens with a server of SGLang, on this machine.

    Args:
        url: of the server, ``http://127.0.0.1:30000``.
        model: the folder of the model that it was started with; new weights are laid beside a copy
            of its config, and read from there.
        max_model_len: most tokens of a prompt and its response.
        timeout_s: without an answer for so long the server is taken to be stuck.
    """

    def __init__(
        self, url: str, model: str, *, max_model_len: int, timeout_s: float = 600.0
    ) -> None:
        self.version = 0
        self.max_model_len = max_model_len
        self.vocab_size = json.loads(Path(model, "config.json").read_text())["vocab_size"]
        self._client = JSONClient(url, timeout_s, token=os.environ.get("SGLANG_API_KEY"))
        self._folder = tempfile.TemporaryDirectory(prefix="weights-")
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            if (file := Path(model, name)).is_file():
                Path(self._folder.name, name).write_bytes(file.read_bytes())

    def check_sampling(self, params: SamplingParameters) -> None:
        """Refuse what the server would report other log-probabilities for; asked beforehand."""
        if not params.is_own_softmax:
            raise ValueError(f"SGLangEngine: its log-probs are the model's own, got {params}.")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        *,
        max_new_tokens: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Draw one response per prompt; what can't be served is a row of its own error."""
        results: dict[int, Generation] = {}
        asked: dict[int, dict[str, Any]] = {}
        for row, prompt in enumerate(prompts):
            try:
                ids = check_prompt(
                    prompt, vocab_size=self.vocab_size, max_model_len=self.max_model_len
                )
            except ValueError as error:
                results[row] = Generation([], [], "error", str(error))
                continue
            budget = params.max_new_tokens if max_new_tokens is None else max_new_tokens[row]
            asked[row] = {
                "input_ids": ids,
                "sampling_params": {
                    "temperature": params.temperature,
                    "max_new_tokens": min(budget, self.max_model_len - len(ids)),
                    "stop_token_ids": list(params.stop_token_ids or ()),
                },
            }
        if asked:
            columns = ("input_ids", "sampling_params")
            body = {name: [request[name] for request in asked.values()] for name in columns}
            answers = self._ask("/generate", {**body, "return_logprob": True})
            results |= dict(zip(asked, map(self._read, answers), strict=True))
        return [results[row] for row in range(len(prompts))]

    def update_weights(
        self, state_dict: Mapping[str, Tensor], *, version: int | None = None
    ) -> None:
        """Replace the weights, which the server reads from a file."""
        # Copies: a head that is tied to the embedding is written for itself.
        weights = {name: value.detach().cpu().clone() for name, value in state_dict.items()}
        save_file(weights, Path(self._folder.name, "model.safetensors"), metadata={"format": "pt"})
        answer = self._ask("/update_weights_from_disk", {"model_path": self._folder.name})
        if not answer["success"]:
            raise ValueError(f"SGLangEngine.update_weights: {answer['message']}")
        self.version = self.version + 1 if version is None else version

    def close(self) -> None:
        """End the connections; the server goes on."""
        self._client.close()
        self._folder.cleanup()

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        status, answer = self._client.request("POST", path, body)
        if status != 200:
            raise RuntimeError(f"SGLangEngine: {path} at {self._client.url} says {answer}")
        return answer

    @staticmethod
    def _read(answer: dict[str, Any]) -> Generation:
        drawn = answer["meta_info"]["output_token_logprobs"]
        reason = answer["meta_info"]["finish_reason"]
        if reason["type"] == "abort":
            return Generation([], [], "error", reason.get("message", "aborted"))
        return Generation([t[1] for t in drawn], [t[0] for t in drawn], reason["type"])
