"""Adapters of several agents in one engine: each has an engine of its own to whoever asks."""

import threading
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.weights.adapter_weights import AdapterWeights
from torchrl_modules.weights.expected_weights import UpdateRefused, next_version

from .engine import ClosedOnLeaving, EngineLoad, EngineOver, Generation, VersionSpan
from .engine_load import tells_load
from .open_async import open_async
from .whole_batch_engine import KeptAdapters, Row, finished


def engines_over_one_base(
    engine: Any, names: Iterable[str], *, frozen: Collection[str] = ()
) -> dict[str, "AdapterEngine"]:
    """Engines with adapters of their own over one engine, which has the base once.

    Each draws with the base alone until adapters are pushed to it, and then with these. Nothing
    that one of them has read is found by another one.

    Args:
        engine: a :class:`~torchrl_modules.VLLMEngine` with ``enable_lora=True``, to which nothing
            else is pushed. Its ``max_loras`` is shared out.
        names: what each engine is asked for by.
        frozen: those of them that are pushed once at most, which take no part in that share.

    Returns:
        An engine for each name, such as :class:`~torchrl_modules.AgentPolicies` takes in policies.

    Raises:
        ValueError: the engine takes no adapters, or has had an update.

    Example:
        >>> engine = VLLMEngine("Qwen/Qwen3-0.6B", enable_lora=True)  # doctest: +SKIP
        >>> engines = engines_over_one_base(engine, ["first", "second"])  # doctest: +SKIP
        >>> policies = AgentPolicies(  # doctest: +SKIP
        ...     {name: vLLMWrapper(own, tokenizer=tokenizer) for name, own in engines.items()}
        ... )
    """
    who = "engines_over_one_base"
    if not getattr(engine, "max_adapters", 0):
        raise ValueError(
            f"{who}: {type(engine).__name__} takes no adapters. Build a VLLMEngine with "
            "enable_lora=True."
        )
    if engine.version:
        raise ValueError(
            f"{who}: the engine has weights {engine.version}, and all would be drawn over them. "
            "Give one to which nothing was pushed."
        )
    names = list(names)
    most = max(1, engine.max_adapters // max(1, len(names) - len(frozen)))
    shares = {name: engine.max_adapters if name in frozen else most for name in names}
    return {name: AdapterEngine(engine, share) for name, share in shares.items()}


class AdapterEngine(EngineOver, ClosedOnLeaving):
    """Draws with adapters of its own, over an engine that others draw from with theirs.

    :func:`engines_over_one_base` makes them.

    Args:
        engine: takes adapters beside each other.
        max_adapters: versions of these adapters that may be drawn from at once.
    """

    def __init__(self, engine: Any, max_adapters: int) -> None:
        self._inside = self.inside = engine
        self._max_adapters = max_adapters
        self._version = 0
        self._kept: KeptAdapters | None = None
        self._lock = threading.Lock()
        self._in_use: Counter[str] = Counter()
        self._old: list[KeptAdapters] = []

    @property
    def version(self) -> int:
        """How many updates these adapters have seen, or the number of the last one."""
        return self._version

    @property
    def max_adapters(self) -> int:
        """Versions of these adapters that can be drawn from at once."""
        return self._max_adapters

    @property
    def adapters(self) -> KeptAdapters | None:
        """Adapters that draw now; ``None`` for the base alone."""
        return self._kept

    @contextmanager
    def used(self) -> Iterator[tuple[KeptAdapters | None, int]]:
        """Within, the adapters that draw now are kept for a response; gives their version, too."""
        with self._lock:
            kept, version = self._kept, self._version
            if kept is not None:
                self._in_use[kept.name] += 1
        try:
            yield kept, version
        finally:
            if kept is not None:
                with self._lock:
                    self._in_use[kept.name] -= 1

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        *,
        max_new_tokens: Sequence[int] | None = None,
        seeds: Sequence[int | None] | None = None,
    ) -> list[Generation]:
        """Draw one response per prompt; see `WholeBatchEngine.generate`.

        Args:
            prompts: as there.
            params: as there.
            max_new_tokens: as there.
            seeds: as there.
        """
        return self.inside.generate(
            prompts, params, max_new_tokens=max_new_tokens, seeds=seeds, adapters=self._kept
        )

    def update_weights(self, state_dict: Any, *, version: int | None = None) -> None:
        """Draw with other adapters; an engine that sleeps is woken.

        Args:
            state_dict: adapters alone, an
                :class:`~torchrl_modules.weights.adapter_weights.AdapterWeights`.
            version: the number of these weights, above the present one; ``None`` counts on.

        Raises:
            UpdateRefused: the engine can't apply them; those before keep serving.
        """
        number = self._checked(state_dict, version)
        self.inside.wake()
        for old in self._serve(self.inside.keep_adapters(state_dict), number):
            self.inside.drop_adapters(old)

    def _checked(self, weights: Any, version: int | None) -> int:
        number = next_version(version, self._version, who="AdapterEngine.update_weights")
        if not isinstance(weights, AdapterWeights):
            raise UpdateRefused(
                "AdapterEngine.update_weights: one engine has the base of all agents, and takes "
                f"the adapters of each alone, got {type(weights).__name__}. Push a model with "
                "LoRA adapters."
            )
        return number

    def _serve(self, kept: KeptAdapters, number: int) -> list[KeptAdapters]:
        """Draw with other adapters from now on; gives older ones that nothing draws with."""
        with self._lock:
            before, self._kept, self._version = self._kept, kept, number
            every = self._old if before is None else [*self._old, before]
            self._old = [each for each in every if self._in_use[each.name]]
            unused = [each for each in every if each not in self._old]
            for each in unused:
                del self._in_use[each.name]
        return unused

    def close(self) -> None:
        """Close the engine inside, for all that draw from it. May be called twice."""
        self.inside.close()


class AsyncAdapterEngine(EngineOver, ClosedOnLeaving):
    """Draws for each caller with adapters of its own, over an engine that others draw from.

    Responses in flight are drawn to their ends by the adapters that they began with.

    Args:
        engine: knows the adapters, and goes on with them when this is closed.
        opened: the engine inside, served to asyncio; opened here when not given.
    """

    can_keep_caches = True
    """`update_weights` takes ``recompute=False``."""

    def __init__(self, engine: AdapterEngine, opened: Any = None) -> None:
        self._inside = self._adapters = engine
        self.opened: Any = open_async(engine.inside) if opened is None else opened
        """What serves the engine inside to asyncio, for all that draw from it."""

    async def respond(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        *,
        max_new_tokens: int | None = None,
        session: Hashable = None,
    ) -> Generation:
        """Draw one response; see :meth:`torchrl_modules.AsyncEngine.respond`.

        Args:
            prompt: token ids.
            params: the distribution.
            max_new_tokens: overrides the budget in ``params``.
            session: changes nothing: what was read is found by its tokens.
        """
        del session
        self.check_sampling(params)
        budget = params.max_new_tokens if max_new_tokens is None else max_new_tokens
        with self._adapters.used() as (kept, version):
            row = Row(prompt, budget, params.row_seeds(1)[0], adapters=kept)
            drawn: Generation = await self.opened.draw(row, params)
        spans = [VersionSpan(version, 0, len(drawn.ids))] if drawn.ids else []
        return finished(drawn._replace(versions=spans), params)

    async def update_weights(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        version: int | None = None,
        recompute: bool = True,
    ) -> None:
        """Draw responses that begin from now on with other adapters.

        Args:
            state_dict: as for :meth:`AdapterEngine.update_weights`.
            version: as there.
            recompute: changes nothing: no response is drawn with two versions.

        Raises:
            UpdateRefused: the engine can't apply them; those before keep serving.
        """
        del recompute
        weights: Any = state_dict
        number = self._adapters._checked(weights, version)
        kept = await self.opened.keep_adapters(weights)
        for old in self._adapters._serve(kept, number):
            await self.opened.drop_adapters(old)

    async def pause(self) -> None:
        """Draw no more tokens, for any that draw from the engine."""
        await self.opened.pause()

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self.opened.resume()

    def end_session(self, session: Hashable) -> None:
        """Nothing: what was not used for the longest time is forgotten."""

    @property
    def tells_load(self) -> bool:
        """Whether the engine inside tells how full it is."""
        return tells_load(self.opened)

    async def measure_load(self) -> EngineLoad:
        """Return how full the engine inside is, of the responses of all that draw from it."""
        return await self.opened.measure_load()

    def close(self) -> None:
        """Give the engine inside back, which others draw from as well. May be called twice."""
        self.opened.close()
