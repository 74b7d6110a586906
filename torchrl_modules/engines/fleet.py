"""Several engines that are one to whoever asks, with one version of the weights for all."""

import asyncio
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Self, cast

from torch import Tensor

from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import POSITIVE, check_counts, check_numbers
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.weights.adapter_weights import AdapterWeights, mapped
from torchrl_modules.weights.expected_weights import UpdateRefused, next_version
from torchrl_modules.weights.lazy_weights import copied_weights

from .engine import (
    ClosedOnLeaving,
    EngineDied,
    EngineLoad,
    Generation,
    can_keep_caches,
    common_of,
    least_of,
)
from .engine_load import tells_load
from .fleet_member import SERVING, FleetMember, as_opener, close_engine
from .loop_thread import LoopThread
from .open_async import open_async
from .process_state import EngineHealth
from .session_router import SessionRouter
from .supervision import EngineState


class EngineFleet(ChecksAttributes, ClosedOnLeaving):
    """Several engines behind one :class:`~torchrl_modules.AsyncEngine`.

    A conversation stays with its engine, which keeps what it has read of it; a new one goes to the
    engine that has the fewest tokens to read and to draw. When an engine dies, what it had in
    flight raises :class:`~torchrl_modules.EngineDied`, and the others go on; it is opened again,
    and serves once it has completed an update to the weights that the others have::

        HEALTHY <-> SUSPECT -> DEAD -> RESTARTING -> STALE -> HEALTHY

    An engine that does not answer is suspected, and gets nothing new until it does. An update goes
    to all engines that serve. If none takes it, it is refused as a whole; if some do, one that does
    not is stale and serves nothing until it takes a later one.

    Calls may come from any event loop. The engines belong to the fleet, which closes them.

    Args:
        engines: each a URL of a vLLM server; a function that opens an engine, which is called again
            when it dies, such as ``partial(open_async, policy.engine)``; or whatever
            :func:`~torchrl_modules.open_async` takes, which nobody opens again. All serve the same
            model.
        max_restarts: engines in a row that may die in one place without finishing a response before
            the place is given up.
        probe_interval_s: between two looks at an engine that is well.
        suspect_timeout_s: an engine that does not answer for so long is dead. One that answers and
            draws no token is found by its own ``stall_timeout_s``.

    Raises:
        ValueError: there is no engine, one stands there twice, they have vocabularies of different
            sizes, or a number is out of range.
        TypeError: one is nothing that can be served.
        Exception: what opening the first engine that can't be opened raised.

    Example:
        >>> from functools import partial
        >>> from torchrl_modules import TransformersEngine, open_async
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> engine = TransformersEngine(tiny_qwen3(len(tokenizer)))
        >>> fleet = EngineFleet([partial(open_async, engine) for _ in range(2)])  # or two URLs
        >>> len(fleet.health())  # vLLMWrapper(fleet, ...), StreamingCollector(..., engine=fleet)
        2
        >>> fleet.close()
    """

    def __init__(
        self,
        engines: Sequence[object],
        *,
        max_restarts: int = 3,
        probe_interval_s: float = 1.0,
        suspect_timeout_s: float = 30.0,
    ) -> None:
        if isinstance(engines, str) or not engines:
            raise ValueError(f"EngineFleet takes a list of engines or URLs, got {engines!r}.")
        for i, engine in enumerate(engines):  # The same function opens another one each time.
            if engine in engines[:i] and (isinstance(engine, str) or as_opener(engine) is None):
                raise ValueError(f"EngineFleet: {engine!r} stands there twice.")
        self.max_restarts: int = self._checked_change("max_restarts", max_restarts)
        self.probe_interval_s: float = self._checked_change("probe_interval_s", probe_interval_s)
        self.suspect_timeout_s: float = self._checked_change("suspect_timeout_s", suspect_timeout_s)
        self.weights: Mapping[str, Tensor] | None = None
        """What was pushed last, for engines that come back."""
        self.is_paused = False
        self._router = SessionRouter()
        self._updating = asyncio.Lock()
        self._changed = asyncio.Event()
        self._members = self._opened(engines)
        self._version = max(member.engine.version for member in self._members)
        self._drawn = 0
        self._loop = LoopThread("EngineFleet")
        for member in self._members:
            known = member.known.wants(self._version)
            member.known = known.acknowledged(known.incarnation, member.engine.version)
        for member in self._members:
            self._loop.submit(member.run())

    changeable = frozenset({"max_restarts", "probe_interval_s", "suspect_timeout_s"})

    def _checked_change(self, name: str, value: Any) -> Any:
        if name == "max_restarts":
            check_counts("EngineFleet", 0, max_restarts=value)
        else:
            check_numbers("EngineFleet", POSITIVE, **{name: value})
        return value

    def _opened(self, engines: Sequence[object]) -> list[FleetMember]:
        openers = [as_opener(engine) for engine in engines]
        with ThreadPoolExecutor(len(engines), thread_name_prefix="open-engine") as pool:
            calls = [
                pool.submit(open_async, engine) if opener is None else pool.submit(opener)
                for engine, opener in zip(engines, openers, strict=True)
            ]
        errors = [error for call in calls if (error := call.exception()) is not None]
        opened = [call.result() for call in calls if call.exception() is None]
        sizes = {size for each in opened if (size := getattr(each, "vocab_size", None)) is not None}
        if not errors and len(sizes) > 1:
            what = f"but these have vocabularies of {sorted(sizes)} tokens"
            errors.append(ValueError(f"EngineFleet: all engines serve the same model, {what}."))
        adapters = {getattr(each, "max_adapters", 0) > 0 for each in opened}
        if not errors and len(adapters) > 1:
            how = "some take adapters alone (enable_lora) and others whole weights. Start all alike"
            errors.append(ValueError(f"EngineFleet: {how}."))
        reads = {getattr(each, "images", None) is not None for each in opened}
        if not errors and len(reads) > 1:
            how = "some read images and others do not. Give all of them the processor, or none"
            errors.append(ValueError(f"EngineFleet: {how}."))
        if errors:
            for engine in opened:
                close_engine(engine)
            raise errors[0]
        return [
            FleetMember(
                self,
                self._notify,
                getattr(engine, "name", "") or f"engine {number}",
                engine,
                opener,
            )
            for number, (engine, opener) in enumerate(zip(opened, openers, strict=True))
        ]

    # What is known of it ------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the weights that serve: the one of all engines that do, or take an update.

        No token that was handed out is of a later one: an engine draws with new weights before
        its acknowledgement of them has come.
        """
        served = (member.known.served or 0 for member in self._members)
        now = (each.engine.version for each in self._members if each.known.state in SERVING)
        return max(self._version, self._drawn, *served, *now)

    def note_drawn(self, response: Generation) -> None:
        """Take note of the versions of a response, which is about to be handed out."""
        self._drawn = max(self._drawn, *(span.version for span in response.versions), 0)

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below it, where an engine knows it."""
        return least_of(self._engines, "vocab_size")

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of a prompt and its response, where an engine knows it."""
        return least_of(self._engines, "max_model_len")

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response by the model's own settings, where an engine says so."""
        ends = (getattr(member.engine, "end_token_ids", ()) for member in self._members)
        return next((tuple(each) for each in ends if each), ())

    @property
    def update_dtype(self) -> Any:
        """In which type all take weights that are sent; ``None`` where they differ."""
        return common_of(self._engines, "update_dtype")

    @property
    def quantization(self) -> Any:
        """How all quantise their weights; ``None``: not at all, or not alike."""
        return common_of(self._engines, "quantization")

    @property
    def max_adapters(self) -> int:
        """Sets of adapters that every engine draws with at once; 0: they take whole weights."""
        return least_of(self._engines, "max_adapters") or 0

    @property
    def images(self) -> Any:
        """What images become; ``None`` where rows with images are refused."""
        return getattr(self._members[0].engine, "images", None)

    @property
    def _engines(self) -> list[Any]:
        return [member.engine for member in self._members]

    @property
    def takes_seeds(self) -> bool:
        """True where a seed makes a row repeat, with every engine."""
        return all(getattr(member.engine, "takes_seeds", True) for member in self._members)

    def check_sampling(self, params: SamplingParameters) -> None:
        """Check that every engine can draw from a distribution.

        Raises:
            ValueError: one can't.
        """
        for member in self._members:
            if (check := getattr(member.engine, "check_sampling", None)) is not None:
                check(params)

    @property
    def model(self) -> Any:
        """The model that an engine of this process draws from, if there is one."""
        models = (getattr(member.engine, "model", None) for member in self._members)
        return next((model for model in models if model is not None), None)

    @property
    def can_keep_caches(self) -> bool:
        """Whether every engine's `update_weights` takes ``recompute=False``."""
        return all(can_keep_caches(member.engine) for member in self._members)

    @property
    def tells_load(self) -> bool:
        """Whether every engine tells how full it is."""
        return all(tells_load(member.engine) for member in self._members)

    def health(self) -> list[EngineHealth]:
        """Return what is known of each engine, in the order in which they were given."""
        return [
            EngineHealth(
                one.name,
                one.known.state,
                one.known.served,
                len(one.requests),
                one.outstanding,
                one.num_restarts,
                one.reason,
            )
            for one in self._members
        ]

    def beside(self) -> Self:
        """Another fleet of engines that the same functions open: clients of the same servers.

        Over servers with ``enable_lora`` each fleet has adapters of its own. One that is started
        for both is a :class:`~torchrl_modules.engines.shared_server.SharedServer`.

        Raises:
            ValueError: an engine was given as it is, and nothing opens another one.
            Exception: what opening the first engine that can't be opened raised.
        """
        openers = [member.opener for member in self._members]
        if None in openers:
            raise ValueError(
                "EngineFleet.beside: it was given engines that are open. Give it URLs, or "
                "functions that open an engine."
            )
        return type(self)(
            openers,
            max_restarts=self.max_restarts,
            probe_interval_s=self.probe_interval_s,
            suspect_timeout_s=self.suspect_timeout_s,
        )

    # For callers, in any event loop -------------------------------------------------------------

    async def respond(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        *,
        max_new_tokens: int | None = None,
        session: Hashable = None,
        images: Sequence[str] = (),
    ) -> Generation:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.respond`.

        While no engine serves it waits for one that comes back.

        Raises:
            EngineDied: the engine that drew it died; or none serves, and none will.
        """
        budget = params.max_new_tokens if max_new_tokens is None else max_new_tokens
        further: dict[str, Any] = {"images": images} if images else {}

        async def respond() -> Generation:
            serving = await self._serving()
            tokens = {i: one.outstanding for i, one in serving.items()}
            chosen = serving[self._router.choose(session, tokens)]
            return await chosen.respond(prompt, params, budget, session=session, **further)

        return await self._loop.call(respond())

    async def update_weights(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        version: int | None = None,
        recompute: bool = True,
    ) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.update_weights`.

        A copy is kept in memory, for engines that come back. Where all engines die over it, it is
        made with those that come back. ``recompute=False`` takes engines that `can_keep_caches`.

        Raises:
            EngineDied: no engine serves, and none will.
            UpdateRefused: no engine takes it; the old weights keep serving.
        """
        await self._loop.call(self._update(state_dict, version, recompute))

    async def measure_load(self) -> EngineLoad:
        """Return how full the fullest engine is that serves, and the preemptions of all.

        Raises:
            EngineDied: an engine died, or none serves, and none will.
            ConnectionError: one did not answer.
        """
        return await self._loop.call(self._measure_load())

    async def pause(self) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.pause`."""
        await self._loop.call(self._set_paused(True))

    async def resume(self) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.resume`."""
        await self._loop.call(self._set_paused(False))

    def sleep(self) -> None:
        """Lend the memory of all engines, which draw nothing now, until the next update wakes them.

        Raises:
            EngineDied: no engine serves, and none will.
            RuntimeError: one can't sleep.
        """

        async def sleep(member: FleetMember) -> None:
            try:
                await asyncio.to_thread(cast("Any", member.engine).sleep)
            except ConnectionError as error:
                member.die(f"it was to sleep: {error}")

        async def sleep_all() -> None:
            await asyncio.gather(*map(sleep, (await self._serving()).values()))

        self._loop.run(sleep_all())

    def end_session(self, session: Hashable) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.end_session`."""

        async def end() -> None:
            index = self._router.end(session)
            if index is not None and self._members[index].known.state is not EngineState.DEAD:
                self._members[index].engine.end_session(session)

        with suppress(RuntimeError):  # It is closed, and keeps nothing.
            self._loop.submit(end())

    def close(self) -> None:
        """Abort what is in flight, and close the engines. May be called twice."""
        self._loop.close()
        with ThreadPoolExecutor(len(self._members), thread_name_prefix="close-engine") as pool:
            list(pool.map(lambda member: close_engine(member.engine), self._members))

    # In the fleet's event loop ------------------------------------------------------------------

    def _notify(self) -> None:
        """Everybody who waits for an engine looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _serving(self) -> dict[int, FleetMember]:
        """The engines that serve, as soon as there is one."""
        while True:
            serving = {i: each for i, each in enumerate(self._members) if each.known.may_serve}
            if serving:
                return serving
            if not any(member.may_return for member in self._members):
                raise EngineDied(
                    "EngineFleet: no engine serves any more: "
                    + "; ".join(f"{each.name}: {each.reason}" for each in self._members)
                )
            await self._changed.wait()

    async def _measure_load(self) -> EngineLoad:
        serving = (await self._serving()).values()
        asked = (cast("Any", member.engine).measure_load() for member in serving)
        loads: list[EngineLoad] = await asyncio.gather(*asked)
        for member, load in zip(serving, loads, strict=True):
            # One that was replaced counts from 0 again.
            member.num_preemptions += int(max(0, load.num_preemptions - member.preemptions_told))
            member.preemptions_told = load.num_preemptions
        total = sum(member.num_preemptions for member in self._members)
        return EngineLoad(max(load.cache_use for load in loads), total)

    async def _update(
        self, state_dict: Mapping[str, Tensor], version: int | None, recompute: bool
    ) -> None:
        async with self._updating:
            number = next_version(version, self._version, who="EngineFleet.update_weights")
            keep: Callable[[], Mapping[str, Tensor]] = partial(
                copied_weights, state_dict, device="cpu"
            )
            if isinstance(state_dict, AdapterWeights):
                keep = partial(mapped, state_dict, lambda x: x.detach().to("cpu", copy=True))
            copying = asyncio.create_task(asyncio.to_thread(keep))
            serving: Collection[FleetMember] = ()
            try:
                while not any(member.known.served == number for member in serving):
                    serving = (await self._serving()).values()
                    pushes = (one.push(state_dict, number, recompute=recompute) for one in serving)
                    for refusal in await asyncio.gather(*pushes):
                        if refusal is not None and all(m.known.served != number for m in serving):
                            raise UpdateRefused(str(refusal)) from refusal
            finally:
                weights = await copying
            self.weights, self._version = weights, number
            for member in self._members:
                member.become(member.known.wants(number))

    async def _set_paused(self, paused: bool) -> None:
        self.is_paused = paused
        members = [member for member in self._members if member.known.state in SERVING]
        await asyncio.gather(*(member.set_paused(paused) for member in members))
