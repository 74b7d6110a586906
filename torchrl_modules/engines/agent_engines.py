"""Engines of several agents as one: what an agent says is drawn by its own."""

import asyncio
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.weights.agent_weights import AgentWeights
from torchrl_modules.weights.expected_weights import UpdateRefused, next_version

from .adapter_engine import AdapterEngine
from .checked_generation import seeded
from .engine import (
    AsyncEngine,
    ClosedOnLeaving,
    EngineLoad,
    Generation,
    VersionSpan,
    can_keep_caches,
    common_of,
    least_of,
    push_weights,
)
from .engine_load import tells_load
from .joined_engine import AsyncJoinedEngine, JoinedBatches, JoinedEngine, joined_groups
from .open_async import open_async
from .shared_weights import copies_of_shared, note_shared_weights
from .transformers import TransformersEngine


class _EnginesByAgent:
    """The engines of agents, and what all of them have in common.

    There is one version, of all weights together: a push of some agents' weights counts on, and
    the tokens of those whose weights stay are stamped with it, too.
    """

    def __init__(self, engines: Mapping[str, Any], otherwise: str | None = None) -> None:
        self.by_agent = dict(engines)
        """An engine for each agent; agents may share one."""
        self.otherwise = otherwise
        """The agent whose engine draws for agents that have none; ``None``: nobody does."""
        self._version = max(engine.version for engine in self.by_agent.values())
        self._lacking: set[str] = set()
        """Agents that a push did not reach which reached others."""
        self._pushes: dict[int, list[int]] = defaultdict(list)
        """The numbers of the updates of each engine, those under way included."""

    @property
    def version(self) -> int:
        """Version of the weights that serve; each push counts on, whosever weights it has."""
        return self._version

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below it, for every agent; ``None`` where no engine says."""
        return least_of(self._engines(), "vocab_size")

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of a prompt and its response, for every agent; ``None`` for no limit."""
        return least_of(self._engines(), "max_model_len")

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response by the models' own settings."""
        ends = (getattr(engine, "end_token_ids", ()) for engine in self._engines())
        return tuple(dict.fromkeys(chain.from_iterable(ends)))

    @property
    def update_dtype(self) -> Any:
        """In which type all of them take weights that are sent; ``None`` where they differ."""
        return common_of(self._engines(), "update_dtype")

    @property
    def images(self) -> Any:
        """The image processor; ``None`` where an agent's model reads no images."""
        found = [getattr(engine, "images", None) for engine in self.by_agent.values()]
        return None if None in found else found[0]

    def check_sampling(self, params: SamplingParameters) -> None:
        """Check that every engine can draw from a distribution.

        Raises:
            ValueError: one can't.
        """
        for engine in self._engines():
            if (check := getattr(engine, "check_sampling", None)) is not None:
                check(params)

    def name_of(self, agent: str) -> str | None:
        """The agent whose engine draws for an agent; ``None`` where there is none.

        Args:
            agent: the author of a row.
        """
        return agent if agent in self.by_agent else self.otherwise

    def _engines(self) -> Iterable[Any]:
        return {id(engine): engine for engine in self.by_agent.values()}.values()

    def _check_whole(self) -> None:
        if self._lacking:
            raise RuntimeError(
                f"AgentPolicies: {sorted(self._lacking)} lack the weights of a push that reached "
                "others. Push again."
            )

    def _nobody(self, agent: str) -> Generation:
        error = (
            f"no policy draws for the agent {agent!r}: there are {[*self.by_agent]}. Name the "
            "author of each request (the header x-agent-name), or give AgentPolicies(otherwise=)"
        )
        return Generation([], [], "error", error)

    def _stamped(self, engine: Any, generation: Generation) -> Generation:
        """The same, with the last version of all weights together that its own belong to."""
        spans = []
        for own, start, end in generation.drawn_by(engine.version).versions:
            pushes = self._pushes[id(engine)]  # in rising order
            at = bisect_right(pushes, own)
            last = pushes[at] - 1 if at < len(pushes) else max(own, self.version)
            spans.append(VersionSpan(last, start, end))
        return generation._replace(versions=spans)

    def _begin(self, weights: Any, version: int | None) -> int:
        """The number of new weights of agents, which every engine that gets some is to have.

        Raises:
            UpdateRefused: an agent is not known, two that share a policy are both given, or the
                version does not go up.
        """
        known = [*self.by_agent]
        if not isinstance(weights, AgentWeights) or not weights:
            raise UpdateRefused(
                f"AgentPolicies takes models by the names of agents, {{{known[0]!r}: model, ...}}, "
                f"got {weights!r:.60}."
            )
        if wrong := [name for name in weights if name not in known]:
            raise UpdateRefused(f"AgentPolicies: no policy for {wrong}, but for {known}.")
        owners: dict[int, str] = {}
        for name in weights:
            other = owners.setdefault(id(self.by_agent[name]), name)
            if other != name:
                raise UpdateRefused(
                    f"AgentPolicies: {other} and {name} have one policy: give its weights once."
                )
        new = next_version(version, self._version, who="AgentPolicies")
        for owner in owners:
            self._pushes[owner].append(new)
        return new

    @contextmanager
    def _handing(self, name: str, weights: AgentWeights, new: int) -> Iterator[Any]:
        """Hand an agent's engine its weights; where others had theirs before, failure is no choice.

        Raises:
            RuntimeError: the engine did not take them, and others have.
        """
        order = [*weights]
        left = order[order.index(name) :]
        engine = self.by_agent[name]
        try:
            yield engine
        except Exception as error:
            for each in left:
                self._pushes[id(self.by_agent[each])].remove(new)
            if len(left) == len(order):
                raise
            self._lacking = {*self._lacking, *left}
            raise RuntimeError(
                f"AgentPolicies: {order[: -len(left)]} have weights {new}, and {left} have not, "
                f"because {name} did not take its own: {error} Nothing is drawn until a push "
                "reaches these, too."
            ) from error
        self._version = new
        self._lacking = self._lacking - {name}


class AgentEngines(_EnginesByAgent):
    """Draws each row with the engine of its agent; rows of adapters over one base in one batch.

    Frozen weights that the models of several agents share are theirs together: an update of one
    has the others alone, its adapters.

    Args:
        engines: for each agent, one that draws batches.
        otherwise: see :class:`~torchrl_modules.AgentPolicies`.
    """

    def __init__(self, engines: Mapping[str, Any], otherwise: str | None = None) -> None:
        super().__init__(engines, otherwise)
        note_shared_weights(self._engines())
        self._joined = JoinedBatches()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        *,
        max_new_tokens: Sequence[int] | None = None,
        agents: Sequence[str] | None = None,
        seeds: Sequence[int] | None = None,
        images: Sequence[Sequence[str]] | None = None,
    ) -> list[Generation]:
        """Draw one response per prompt; see :meth:`torchrl_modules.Engine.generate`.

        Args:
            prompts: token ids of each row.
            params: the distribution.
            max_new_tokens: a budget per row.
            agents: the author of each row.
            seeds: one per row.
            images: those of each row.

        Raises:
            ValueError: nobody says whose turn it is.
        """
        self._check_whole()
        if agents is None:
            raise ValueError(
                "AgentPolicies: nobody says which agent takes a turn. The entry 'agent' of a batch "
                "does, which an AgentProgram writes."
            )
        drawn: dict[int, Generation] = {}
        takers: dict[int, Any] = {}
        batches: dict[int, tuple[Any, list[int]]] = {}
        joins = not params.routed_experts and not any(images or ())
        joined = self._joined.places(self._engines()) if joins else {}
        for row, agent in enumerate(agents):
            if (name := self.name_of(agent)) is None:
                drawn[row] = self._nobody(agent)
                continue
            takers[row] = engine = self.by_agent[name]
            one = joined[id(engine)][0] if id(engine) in joined else _drawer(engine)
            batches.setdefault(id(one), (one, []))[1].append(row)
        for engine, own in batches.values():
            its, further = seeded(engine, params, seeds and [seeds[i] for i in own])
            if isinstance(engine, JoinedEngine):
                further["models"] = [joined[id(takers[i])][1] for i in own]
            elif engine is not takers[own[0]]:
                further["adapters"] = [takers[i].adapters for i in own]
            if max_new_tokens is not None:
                further["max_new_tokens"] = [max_new_tokens[i] for i in own]
            if images is not None and any(images[i] for i in own):
                further["images"] = [images[i] for i in own]
            given = engine.generate([prompts[i] for i in own], its, **further)
            drawn |= {
                row: self._stamped(takers[row], generation)
                for row, generation in zip(own, given, strict=True)
            }
        return [drawn[row] for row in range(len(prompts))]

    def update_weights(self, state_dict: Any, *, version: int | None = None) -> None:
        """Replace the weights of some agents, or of all.

        Args:
            state_dict: an :class:`~torchrl_modules.weights.agent_weights.AgentWeights`.
            version: the number of these weights, above the present one; ``None`` counts on.

        Raises:
            UpdateRefused: an engine refuses its weights.
            RuntimeError: one does after others have taken theirs.
        """
        new = self._begin(state_dict, version)
        for name, weights in state_dict.items():
            with self._handing(name, state_dict, new) as engine:
                engine.update_weights(weights, version=new)

    def sleep(self) -> None:
        """Lend the memory of all engines to training, until the next update wakes them.

        An update has to reach each engine, of which several agents may have one.

        Raises:
            TypeError: an engine has no memory to lend.
        """
        for engine in {id(own): own for own in map(_drawer, self._engines())}.values():
            if (sleep := getattr(engine, "sleep", None)) is None:
                raise TypeError(f"{type(engine).__name__} has no memory that it could lend.")
            sleep()

    def close(self) -> None:
        """Close those engines that can be closed. May be called twice."""
        for engine in self._engines():
            if (close := getattr(engine, "close", None)) is not None:
                close()


def _drawer(engine: Any) -> Any:
    """What draws for an engine: the one inside, which draws with the adapters of several."""
    return engine.inside if isinstance(engine, AdapterEngine) else engine


class AsyncAgentEngines(_EnginesByAgent, ClosedOnLeaving):
    """Draws for each caller with the engine of its agent; adapters over one base with one thread.

    Args:
        engines: of the agents, each served to asyncio; it belongs to this until this is closed.
        copy_model: draw from copies of Transformers models, see
            :class:`~torchrl_modules.AsyncTransformersEngine`; frozen weights that they share are
            copied once.
    """

    def __init__(self, engines: AgentEngines, *, copy_model: bool = True) -> None:
        opened: dict[int, Any] = {}
        inside: dict[int, AsyncEngine] = {}
        options: dict[str, Any] = {"copy_model": copy_model}
        if copy_model:
            options["shared"] = copies_of_shared(engines._engines())
        try:
            for group in joined_groups(engines._engines()):
                over = AsyncJoinedEngine(group, **options)
                opened |= {id(e): m for e, m in zip(group.engines, over.members, strict=True)}
            for engine in engines._engines():
                if id(engine) in opened:
                    continue
                own = options if isinstance(engine, TransformersEngine) else {}
                if isinstance(engine, AdapterEngine):
                    of_all = _drawer(engine)
                    if id(of_all) not in inside:
                        inside[id(of_all)] = open_async(of_all)
                    own = {"opened": inside[id(of_all)]}
                opened[id(engine)] = open_async(engine, **own)
        except BaseException:
            for engine in opened.values():
                engine.close()
            raise
        by_agent = {name: opened[id(engine)] for name, engine in engines.by_agent.items()}
        super().__init__(by_agent, engines.otherwise)

    @property
    def can_keep_caches(self) -> bool:
        """Whether responses in flight can go on with what the old weights have read."""
        return all(map(can_keep_caches, self._engines()))

    @property
    def tells_load(self) -> bool:
        """Whether every engine tells how full it is."""
        return all(map(tells_load, self._engines()))

    async def measure_load(self) -> EngineLoad:
        """Return how full the fullest engine is, and the preemptions of all.

        Raises:
            EngineDied: an engine died.
            ConnectionError: one did not answer.
        """
        apart = {id(getattr(own, "opened", own)): own for own in self._engines()}
        asked = (engine.measure_load() for engine in apart.values())
        loads: list[EngineLoad] = await asyncio.gather(*asked)
        total = sum(load.num_preemptions for load in loads)
        return EngineLoad(max(load.cache_use for load in loads), total)

    async def respond(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        *,
        max_new_tokens: int | None = None,
        session: Hashable = None,
        agent: str = "",
        images: Sequence[str] | None = None,
    ) -> Generation:
        """Draw one response; see :meth:`torchrl_modules.AsyncEngine.respond`.

        Args:
            prompt: token ids.
            params: the distribution.
            max_new_tokens: overrides the budget in ``params``.
            session: the same for all calls of one conversation.
            agent: the author of the row.
            images: those of the prompt.
        """
        self._check_whole()
        name = self.name_of(agent)
        if name is None:
            return self._nobody(agent)
        engine, further = self.by_agent[name], {"images": images} if images else {}
        given: Generation = await engine.respond(
            prompt, params, max_new_tokens=max_new_tokens, session=session, **further
        )
        return self._stamped(engine, given)

    async def update_weights(
        self, state_dict: Any, *, version: int | None = None, recompute: bool = True
    ) -> None:
        """Replace the weights of some agents, or of all, one engine after the other.

        Args:
            state_dict: an :class:`~torchrl_modules.weights.agent_weights.AgentWeights`.
            version: the number of these weights, above the present one; ``None`` counts on.
            recompute: what responses in flight have so far is read again.

        Raises:
            UpdateRefused: an engine refuses its weights.
            RuntimeError: one does after others have taken theirs.
        """
        new = self._begin(state_dict, version)
        for name, weights in state_dict.items():
            with self._handing(name, state_dict, new) as engine:
                await push_weights(engine, weights, version=new, recompute=recompute)

    async def pause(self) -> None:
        """Draw no more tokens."""
        await asyncio.gather(*(engine.pause() for engine in self._engines()))

    async def resume(self) -> None:
        """Go on after `pause`."""
        await asyncio.gather(*(engine.resume() for engine in self._engines()))

    def end_session(self, session: Hashable) -> None:
        """Drop what the engines keep for a conversation.

        Args:
            session: as for `respond`.
        """
        for engine in self._engines():
            engine.end_session(session)

    def close(self) -> None:
        """Close the engines. May be called twice."""
        for engine in self._engines():
            engine.close()
