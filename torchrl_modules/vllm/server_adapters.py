"""Low-rank adapters that go to a vLLM server alone, each set under a name of its own."""

import base64
import tempfile
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch import Tensor

from torchrl_modules.engines.whole_batch_engine import KeptAdapters
from torchrl_modules.weights.adapter_weights import AdapterWeights
from torchrl_modules.weights.expected_weights import ExpectedWeights, UpdateRefused, refuse

_WHO: Final = "VLLMServerEngine.update_weights"
_PIECE_BYTES: Final = 16 << 20
"""Of a file, in one request."""


class Served(NamedTuple):
    """Adapters that a request is drawn with."""

    label: str
    """The version, as a label; that of the server's own weights without adapters."""
    name: str | None
    """What the server calls them; ``None``: the model as it is."""


class ServerAdapters:
    """The adapters at a server that was started with ``--enable-lora``.

    A request keeps the adapters that it began with to its end, and nothing waits for an update;
    sets that no request uses are let go when the next one has come.

    Args:
        call: a method of the workers, with its arguments; gives the answer of one of them.
        post: asks a route of the server.
        limits: what the workers say of themselves.
        label: of the weights that serve.
    """

    def __init__(
        self,
        call: Callable[..., dict[str, Any]],
        post: Callable[..., Any],
        limits: Mapping[str, Any],
        label: str,
    ) -> None:
        self._call = call
        self._post = post
        self._max_rank: int = limits["max_lora_rank"]
        self.base_label = label
        """The label of the weights under all adapters."""
        self.current = Served(label, None)
        self._lock = threading.Lock()
        self._in_use: Counter[str] = Counter()
        self._names: list[str] = []
        self.bytes_sent = 0
        """Of adapters, since this was made."""

    @contextmanager
    def used(self) -> Iterator[Served]:
        """Within, the adapters that serve now are kept for a request."""
        with self._lock:
            served = self.current
            self._in_use[served.name or ""] += 1
        try:
            yield served
        finally:
            with self._lock:
                self._in_use[served.name or ""] -= 1

    @cached_property
    def _own(self) -> Mapping[str, Tensor]:
        message = self._call("torchrl_expected_weights")
        return ExpectedWeights.from_message(message, None).named

    def load(self, weights: Mapping[str, Tensor], label: str) -> None:
        """Serve other adapters to requests that come from now on.

        Args:
            weights: the adapters.
            label: their version.

        Raises:
            UpdateRefused: these are whole weights, or the server can't apply them; those before
                keep serving.
        """
        if not isinstance(weights, AdapterWeights):
            raise UpdateRefused(
                f"{_WHO}: a server that was started with --enable-lora is pushed models with LoRA "
                "adapters, which go alone. Start it without for whole weights."
            )
        name = self._add(weights, label, _WHO)
        with self._lock:
            self.current = Served(label, name)
            unused = [one for one in self._names if not self._in_use[one]]
            self._names = [one for one in self._names if one not in unused] + [name]
        for one in unused:
            self._drop(one)
            del self._in_use[one]

    def keep(self, weights: AdapterWeights) -> KeptAdapters:
        """Take adapters for requests that name them.

        Raises:
            UpdateRefused: the server can't apply them.
        """
        return KeptAdapters(self._add(weights, "kept", "VLLMServerEngine.keep_adapters"))

    def drop(self, kept: KeptAdapters) -> None:
        """Let kept adapters go, which no request uses."""
        self._drop(kept.name)

    def _add(self, weights: AdapterWeights, label: str, who: str) -> str:
        """Send adapters and load them; gives the name that they have there."""
        limit = "the server was started with --max-lora-rank "
        weights.check(self._own, self._max_rank, limit=limit, who=who)
        name = f"version-{label}-{uuid.uuid4().hex[:12]}"
        path = self._send(weights, name)
        try:
            self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        except RuntimeError as error:
            self._call("torchrl_drop_adapters", name)
            refuse([f"vLLM can't apply these adapters: {error}"], who=who)
        return name

    def _drop(self, name: str) -> None:
        self._post("/v1/unload_lora_adapter", {"lora_name": name})
        self._call("torchrl_drop_adapters", name)

    def _send(self, weights: AdapterWeights, name: str) -> str:
        """Write the files of adapters where the server runs; gives their folder there."""
        path = ""
        with tempfile.TemporaryDirectory(prefix="adapters-") as folder:
            weights.save(Path(folder))
            for file in sorted(Path(folder).iterdir()):
                content = file.read_bytes()
                self.bytes_sent += len(content)
                for start in range(0, len(content), _PIECE_BYTES):
                    piece = base64.b64encode(content[start : start + _PIECE_BYTES]).decode()
                    kept = self._call("torchrl_keep_adapters", name, file.name, start, piece)
                    path = kept["path"]
        return path
