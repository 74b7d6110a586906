"""Engines over adapters of one base as one: rows of all of them are drawn in one batch."""

import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.scoring.trial import run_trial
from torchrl_modules.scoring.wrapped_models import (
    acting_adapters,
    adapter_settings,
    evaluation_mode,
    has_hooks,
    is_sharded,
)
from torchrl_modules.weights.expected_weights import weights_fingerprint

from .async_transformers import AsyncTransformersEngine
from .engine import ClosedOnLeaving, EngineOver, Generation
from .joined_model import CannotJoinError, JoinedModel
from .readers import read_trial
from .slot_reader import SlotReader
from .transformers import TransformersEngine


class JoinedEngine(TransformersEngine):
    """Draws rows of several models in one batch, see :class:`~.joined_model.JoinedModel`.

    Args:
        engines: over adapters of one base, alike in all but their adapters. One may be there
            several times, for other adapters of one model.
        acting: see there.
        alone: within what it gives for the number of a model, that one's adapters alone act in it;
            for ``acting``.

    Raises:
        CannotJoinError: they have to draw one by one.
    """

    def __init__(
        self,
        engines: Sequence[TransformersEngine],
        *,
        acting: Sequence[Collection[str]] | None = None,
        alone: Callable[[int], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.engines = list(engines)
        """Each with its own weights and version."""
        self._acting, self._alone = acting, alone
        self._joined = JoinedModel([engine.inside for engine in engines], acting)
        super().__init__(self._joined.model, **engines[0].settings())
        # What one of them keeps for its steps, another one would draw over.
        for engine in engines:
            engine.share_steps(self)
        self._try_models()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        *,
        max_new_tokens: Sequence[int] | None = None,
        seeds: Sequence[int | None] | None = None,
        images: Sequence[Sequence[str]] | None = None,
        models: Sequence[int] = (),
    ) -> list[Generation]:
        """Draw one response per prompt; see :meth:`torchrl_modules.TransformersEngine.generate`.

        Args:
            prompts: as there.
            params: as there.
            max_new_tokens: as there.
            seeds: as there.
            images: none.
            models: the number of the model that draws each row; the first one when not given.
        """
        for number in set(models):
            self.engines[number].check_whole()
        return self._generate(
            prompts,
            params,
            max_new_tokens=max_new_tokens,
            seeds=seeds,
            images=images,
            marks=[self.mark(number) for number in models] or None,
        )

    def mark(self, number: int) -> int:
        """See :meth:`.JoinedModel.mark`."""
        return self._joined.mark(number)

    def drawing_model(self) -> PreTrainedModel:
        """See :meth:`torchrl_modules.TransformersEngine.drawing_model`."""
        self._joined.refresh()
        return super().drawing_model()

    def weights_state(self) -> Hashable:
        """See :meth:`torchrl_modules.TransformersEngine.weights_state`."""
        models = nn.ModuleList({engine.inside: None for engine in self.engines})
        acting = acting_adapters(models) if self._acting is None else None  # always the same ones
        return weights_fingerprint(models), acting  # the base is read once

    def drawn_with(self) -> list[Tensor]:
        """The weights that it draws with, each once."""
        every = (x for engine in self.engines for x in engine.drawn_with())
        return list({id(x): x for x in every}.values())

    def version_of(self, mark: int) -> int:
        """See :meth:`torchrl_modules.TransformersEngine.version_of`."""
        return self.engines[mark // self.mark(1)].version

    def copied(self, shared: Mapping[int, Tensor] | None = None) -> "JoinedEngine":
        """See :meth:`torchrl_modules.TransformersEngine.copied`."""
        return JoinedEngine([engine.copied(shared) for engine in self.engines])

    @torch.no_grad()
    def _try_models(self) -> None:
        """Let each model read a few rows, by itself and joined.

        Raises:
            CannotJoinError: the log-probs are others.
        """
        if not issubclass(self.reader, SlotReader):
            raise CannotJoinError("the model keeps more than plain keys and values")
        for number, engine in enumerate(self.engines):
            with self._alone(number):
                trial = run_trial(engine.inside, who="TransformersEngine")
            try:
                with evaluation_mode(self.inside):
                    read = read_trial(self.reader, self.inside, trial, self.mark(number))
            except (IndexError, RuntimeError, ValueError) as error:
                raise CannotJoinError(f"{type(error).__name__}: {str(error)[:200]}") from error
            if not trial.allows(trial.difference(read)):
                raise CannotJoinError(f"joined, log-probs are off by {trial.difference(read)}")


class JoinedBatches:
    """Draws for several engines at once; made when it is first asked for.

    It is made anew when models have got other adapters, or were moved.
    """

    def __init__(self) -> None:
        self._joined: list[JoinedEngine] = []
        self._state: Hashable = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has nothing: it is for copies of the engines."""
        return type(self), ()

    def places(self, engines: Iterable[object]) -> dict[int, tuple[JoinedEngine, int]]:
        """Find the engines whose rows are drawn with those of others.

        Args:
            engines: each once.

        Returns:
            By the ``id`` of such an engine, what draws, and the number of its model.
        """
        groups = _alike(engines)
        state = tuple(map(_state_of, groups))
        if state != self._state:
            self._joined, self._state = _joined(groups), state
        return {
            id(engine): (joined, number)
            for joined in self._joined
            for number, engine in enumerate(joined.engines)
        }


def joined_groups(engines: Iterable[object]) -> list[JoinedEngine]:
    """Join engines whose models have one base, and which draw alike otherwise.

    Engines of one base that can't be joined are warned of.

    Args:
        engines: any, each once.

    Returns:
        Of each base that several engines have.
    """
    return _joined(_alike(engines))


def _joined(groups: Iterable[list[TransformersEngine]]) -> list[JoinedEngine]:
    found = []
    for group in groups:
        try:
            found.append(JoinedEngine(group))
        except CannotJoinError as error:
            warnings.warn(
                f"AgentPolicies: {len(group)} agents have one base, but their rows are drawn one "
                "agent after the other, which reads the base once for each of them for every "
                f"token: {error}.",
                stacklevel=2,
            )
    return found


def _alike(engines: Iterable[object]) -> list[list[TransformersEngine]]:
    """Engines of one base, where that has several."""
    groups: dict[Hashable, list[TransformersEngine]] = {}
    for engine in engines:
        if type(engine) is not TransformersEngine or engine.images is not None:
            continue
        base = engine.inside.get_input_embeddings()
        if engine.batch_invariant or is_sharded(engine.model) or not isinstance(base, nn.Module):
            continue
        weight = next(base.parameters(), base)
        groups.setdefault((id(weight), *engine.settings().values()), []).append(engine)
    return [group for group in groups.values() if len(group) > 1]


def _state_of(engines: Iterable[TransformersEngine]) -> Hashable:
    """Another one once models have other parts, or other adapters act; whatever their weights."""
    return tuple(
        (
            adapter_settings(engine.inside),
            has_hooks(engine.inside),
            tuple((id(x), x.device, x.dtype) for x in engine.drawn_with()),
        )
        for engine in engines
    )


class AsyncJoinedEngine(AsyncTransformersEngine):
    """Serves a :class:`JoinedEngine` to asyncio; its callers are :attr:`members`.

    Args:
        engine: which draws.
        copy_model: see :class:`~torchrl_modules.AsyncTransformersEngine`.
        shared: the same.
    """

    def __init__(
        self,
        engine: JoinedEngine,
        *,
        copy_model: bool = True,
        shared: Mapping[int, Tensor] | None = None,
    ) -> None:
        super().__init__(engine, copy_model=copy_model, shared=shared)
        assert isinstance(self._engine, JoinedEngine)
        self.joined = self._engine
        """The engine, or its copy."""
        self.members = [_Member(self, number) for number in range(len(engine.engines))]
        """An engine for each model."""


class _Member(EngineOver, ClosedOnLeaving):
    """The engine of one model, of several that one thread draws with.

    Args:
        over: which draws.
        number: of the model.
    """

    can_keep_caches = True

    def __init__(self, over: AsyncJoinedEngine, number: int) -> None:
        self._over, self._number = over, number
        self._inside = over.joined.engines[number]

    @property
    def model(self) -> nn.Module:
        """The model that it draws from."""
        return self._inside.model

    async def respond(
        self,
        prompt: Sequence[int],
        params: SamplingParameters,
        *,
        max_new_tokens: int | None = None,
        session: Hashable = None,
    ) -> Generation:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.respond`."""
        mark = self._over.joined.mark(self._number)
        key = self._key(session)
        return await self._over._respond(prompt, params, max_new_tokens, key, mark)

    async def update_weights(
        self,
        state_dict: Mapping[str, Tensor],
        *,
        version: int | None = None,
        recompute: bool = True,
    ) -> None:
        """See :meth:`torchrl_modules.AsyncTransformersEngine.update_weights`."""
        await self._over._load(self._inside, state_dict, version, recompute)

    def check_sampling(self, params: SamplingParameters) -> None:
        """See :meth:`torchrl_modules.AsyncTransformersEngine.check_sampling`."""
        self._over.check_sampling(params)

    async def pause(self) -> None:
        """Draw no more tokens, with any of the models."""
        await self._over.pause()

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._over.resume()

    async def check_health(self) -> None:
        """See :meth:`torchrl_modules.AsyncTransformersEngine.check_health`."""
        await self._over.check_health()

    def end_session(self, session: Hashable) -> None:
        """See :meth:`torchrl_modules.engines.engine.AsyncEngine.end_session`."""
        self._over.end_session(self._key(session))

    def close(self) -> None:
        """Close the engine of all the models. May be called twice."""
        self._over.close()

    def _key(self, session: Hashable) -> Hashable:
        """A conversation with one model is another one than that with another model."""
        return None if session is None else (self._number, session)
