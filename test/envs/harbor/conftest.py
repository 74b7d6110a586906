import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[2]))

from container_engines import engine, have_base


@pytest.fixture(scope="module")
def engines():
    """Gives an engine of containers, with the image of the tests, for a module's tests."""
    with pytest.MonkeyPatch.context() as patch:
        entered, had = [], set()

        def have(program):
            if program not in had:
                manager = engine(program)
                for name, value in manager.__enter__().items():
                    patch.setenv(name, value)
                entered.append(manager)
                have_base(program)
                had.add(program)
            return program

        try:
            yield have
        finally:
            for manager in reversed(entered):
                manager.__exit__(None, None, None)
