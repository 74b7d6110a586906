"""What engines are served to asyncio, and by what."""

import pytest

from torchrl_modules import AsyncEngine, open_async


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
    with pytest.raises(TypeError, match=r"takes one of .*'VLLMEngine'.*AsyncEngine.*got object"):
        open_async(object())
