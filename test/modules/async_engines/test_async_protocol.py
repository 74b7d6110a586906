"""What engines are served to asyncio, and by what."""

import asyncio
from types import SimpleNamespace

import pytest

from torchrl_modules import AsyncEngine, Generation, SamplingParameters, VersionSpan, open_async
from torchrl_modules.engines.responding_engine import RespondingEngine


class Scripted:
    """An engine of somebody else's that is asynchronous itself."""

    version = 0

    async def respond(self, prompt, params, *, max_new_tokens=None, session=None): ...

    async def update_weights(self, state_dict, *, version=None): ...

    async def pause(self): ...

    async def resume(self): ...

    def end_session(self, session): ...

    def close(self): ...


def test_an_asynchronous_engine_is_taken_as_it_is():
    engine = Scripted()
    assert isinstance(engine, AsyncEngine)
    assert open_async(engine) is engine
    with pytest.raises(TypeError, match=r"takes no options, got \['max_running'\]"):
        open_async(engine, max_running=4)


def test_what_cannot_be_served_is_told_with_what_can():
    with pytest.raises(TypeError, match=r"an Engine \(version, .*an AsyncEngine.*got object"):
        open_async(object())


class Drew(RespondingEngine):
    """An engine that drew a response before it was asked."""

    _inside = SimpleNamespace(version=1)

    def __init__(self, response):
        self._response = response

    async def draw(self, row, params):
        return self._response


def test_versions_end_where_a_stop_string_ends(chatml_tokenizer):
    """A step may draw tokens behind it, by other weights; they are left out everywhere."""
    hello, stop, beyond = (chatml_tokenizer.encode(text) for text in ("hello", "!", "more"))
    ids = hello + stop + beyond
    spans = [VersionSpan(0, 0, len(hello)), VersionSpan(1, len(hello), len(ids))]
    engine = Drew(Generation(ids, [-0.5] * len(ids), "stop", versions=spans))
    params = SamplingParameters(stop=("!",)).with_tokenizer(chatml_tokenizer)
    kept = [VersionSpan(0, 0, len(hello)), VersionSpan(1, len(hello), len(hello + stop))]
    responded = asyncio.run(engine.respond([5], params))
    generation, versions = asyncio.run(engine.generate([5], params))
    assert generation.ids == responded.ids == hello + stop
    assert versions == responded.versions == kept
