"""vLLM beside a model that is trained: it draws with adapters, which go to it alone."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Final

from torchrl_modules import SamplingParameters
from torchrl_modules.engines.engine import Generation
from torchrl_modules.engines.loop_thread import LoopThread
from torchrl_modules.engines.whole_batch_engine import KeptAdapters, WholeBatchEngine
from torchrl_modules.weights.adapter_weights import AdapterWeights

_STUCK_S: Final = 600.0
"""An engine in this process shares its cores with training passes, and is slow meanwhile."""
_RANK: Final = 32
"""The largest one where nothing is said: Tinker's own."""


@dataclass(eq=False)
class _Kept:
    """Adapters that are at the engine."""

    adapters: KeptAdapters
    num_users: int = 0


class SamplingEngine:
    """Draws with vLLM, several sets of adapters at once. May be called from any thread.

    Adapters are sent when they are first drawn with, and let go when others need their place.

    Args:
        engine: draws; it was given no weights since it began.
        name: of it, for messages.
        held: within, it draws nothing.
        close: ends what was begun for it.

    Raises:
        ValueError: it takes no adapters.
    """

    def __init__(
        self,
        engine: WholeBatchEngine,
        name: str,
        *,
        held: Callable[[], AbstractContextManager[Any]] = nullcontext,
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self._engine: Any = engine
        self.name = name
        self.held = held
        """Within, nothing is drawn in this process: generators of random numbers may be set."""
        self._close = close
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        if not self._engine.max_adapters:
            raise ValueError(
                f"serve-training: {name} takes no adapters, which is all that is trained here. "
                "Start it with --enable-lora --max-lora-rank 32."
            )

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below it; ``None`` where it does not say."""
        return self._engine.vocab_size

    @property
    def quantization(self) -> str | None:
        """How its weights are quantised, by vLLM's name."""
        return getattr(self._engine, "quantization", None)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence."""
        return self._engine.max_model_len

    def check(self, weights: AdapterWeights) -> None:
        """Check that it can draw with adapters of these layers and ranks.

        Raises:
            UpdateRefused: it can't.
        """
        with self._lock:
            self._engine.drop_adapters(self._engine.keep_adapters(weights))

    def draw(
        self,
        weights: tuple[str, Callable[[], AdapterWeights]] | None,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        budgets: Sequence[int],
        seeds: Sequence[int | None],
    ) -> list[Generation]:
        """Draw a sequence for each prompt.

        Args:
            weights: the name of adapters, which no others have, and what makes them; ``None`` for
                the model as it is.
            prompts: token ids.
            params: one distribution for all.
            budgets: most new tokens of each.
            seeds: of each.

        Raises:
            ValueError: it can't draw so, or with these adapters.
            RuntimeError: it is gone or stuck.
        """
        with self._using(weights) as adapters:
            return self._engine.generate(
                prompts, params, max_new_tokens=budgets, seeds=seeds, adapters=adapters
            )

    @contextmanager
    def _using(
        self, weights: tuple[str, Callable[[], AdapterWeights]] | None
    ) -> Iterator[KeptAdapters | None]:
        """The adapters are at the engine within, whoever else comes."""
        if weights is None:
            yield None
            return
        name, make = weights
        with self._lock:
            if name not in self._kept:
                self._make_room()
                self._kept[name] = _Kept(self._engine.keep_adapters(make()))
            kept = self._kept[name]
            self._kept.move_to_end(name)
            kept.num_users += 1
        try:
            yield kept.adapters
        finally:
            with self._lock:
                kept.num_users -= 1

    def _make_room(self) -> None:
        """Let those go that were not used for longest, as far as others need their place."""
        for name in [name for name, kept in self._kept.items() if not kept.num_users]:
            if len(self._kept) < self._engine.max_adapters:
                return
            self._engine.drop_adapters(self._kept.pop(name).adapters)

    def close(self) -> None:
        """Let go of the adapters, and end the engine if it is in this process."""
        with self._lock, suppress(RuntimeError, ConnectionError):  # a server may be gone
            while self._kept:
                self._engine.drop_adapters(self._kept.popitem()[1].adapters)
        self._close()


def engine_of_server(url: str) -> SamplingEngine:
    """Draw with a vLLM server that runs, and stays.

    Args:
        url: of one that ``python -m torchrl_modules.vllm.server --enable-lora`` is.

    Raises:
        OSError: nobody answers there, or it asks for another token.
        RuntimeError: it is no vLLM server.
        ValueError: it takes no adapters.
    """
    from torchrl_modules.vllm.server_engine import VLLMServerEngine

    with ExitStack() as opened:
        engine = VLLMServerEngine(url)
        opened.callback(engine.close)
        made = SamplingEngine(engine, f"the vLLM server at {url}", close=engine.close)
        opened.pop_all()
        return made


def engine_here(model: str, settings: Mapping[str, Any]) -> SamplingEngine:
    """Build a vLLM engine in this process.

    Args:
        model: its folder, or its id on the hub.
        settings: of :class:`~torchrl_modules.VLLMEngine`.

    Raises:
        ImportError: vLLM is missing.
        RuntimeError: it can't run the model.
        ValueError: it takes no adapters.
    """
    from torchrl_modules.vllm.async_engine import AsyncVLLMEngine
    from torchrl_modules.vllm.bridges import BlockingVLLMEngine
    from torchrl_modules.vllm.engine import VLLMEngine

    with ExitStack() as opened:
        engine = VLLMEngine(model, **{"enable_lora": True, "max_lora_rank": _RANK, **settings})
        opened.callback(engine.close)
        stepped = AsyncVLLMEngine(engine, stall_timeout_s=_STUCK_S)
        opened.callback(stepped.close)
        blocking = BlockingVLLMEngine(stepped)
        opened.callback(blocking.close)
        loop = LoopThread("serve-training")
        opened.callback(loop.close)

        @contextmanager
        def held() -> Iterator[None]:
            loop.run(stepped.pause())
            try:
                yield
            finally:
                loop.run(stepped.resume())

        own = ExitStack()
        made = SamplingEngine(blocking, "vLLM in this process", held=held, close=own.close)
        own.push(opened.pop_all())
        return made
