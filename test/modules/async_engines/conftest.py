"""A model in double precision, and an asynchronous engine over it."""

import asyncio
import threading

import pytest

from torchrl_modules import TransformersEngine, open_async


@pytest.fixture(scope="session", name="exact_model")
def exact_model_fixture(build_model):
    """In double precision, so that kernels of another shape do not count."""
    return build_model(0).double()


@pytest.fixture(scope="session", name="other_model")
def other_model_fixture(build_model):
    return build_model(1).double()


@pytest.fixture(scope="session", name="run")
def run_fixture(exact_model):
    """Run a coroutine function on an asynchronous engine; its thread ends with it."""

    def run_on_engine(function, model=None, **options):
        async def with_engine():
            async with open_async(TransformersEngine(model or exact_model), **options) as engine:
                return await asyncio.wait_for(function(engine), timeout=60)

        result = asyncio.run(with_engine())
        assert not [one for one in threading.enumerate() if one.name == "AsyncTransformersEngine"]
        return result

    return run_on_engine
