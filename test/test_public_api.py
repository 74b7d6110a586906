"""The public names and their signatures change only where someone means it."""

import difflib
import inspect
import pydoc
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "test/house"))

import public_api  # noqa: E402

from torchrl_data import Turn  # noqa: E402
from torchrl_envs import ChatEnv, DatasetChatEnv, EpisodeEnv, GSM8KEnv, LLMEnv  # noqa: E402


def test_public_names_and_signatures_are_those_of_the_snapshot():
    then = public_api.SNAPSHOT.read_text(encoding="utf-8").splitlines()
    difference = [
        line
        for line in difflib.unified_diff(then, public_api.lines(), "snapshot", "now", "", "", 0, "")
        if line[:2] not in ("@@", "--", "++")
    ]
    if difference:
        changed = "\n".join(difference)
        pytest.fail(
            f"The public API is not the one of test/house/public_api.txt:\n{changed}\n"
            "If that is meant, run `python test/house/public_api.py` and tell it in CHANGELOG.md."
        )


@pytest.mark.parametrize("kind", [ChatEnv, EpisodeEnv, DatasetChatEnv, GSM8KEnv, LLMEnv])
def test_help_shows_the_arguments_of_an_environment(kind):
    """Its own ones; a metaclass of TorchRL's takes ``(*args, **kwargs)``."""
    _, *own = inspect.signature(kind.__init__).parameters
    assert [*inspect.signature(kind).parameters] == own
    assert f"{kind.__name__}({'*, ' * (kind is not EpisodeEnv)}{own[0]}: " in pydoc.render_doc(kind)
    heir = type("Heir", (kind,), {"__init__": lambda _, size: size})
    assert [*inspect.signature(heir).parameters] == ["size"]


def test_help_shows_the_fields_of_a_turn():
    said = pydoc.render_doc(Turn, renderer=pydoc.plaintext)
    for field in Turn._fields:
        assert f" |      {field}: " in said


def test_snapshot_of_a_package_by_hand(tmp_path):
    """What a line says: overloads, bases, re-exports, fields, what is inherited and from where."""
    for package in public_api.PUBLIC:
        folder = tmp_path.joinpath(*package.split("."))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text("__all__ = []\n")
    (tmp_path / "collectors/__init__.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from torch import nn\n    from .parts import Child, Parent, run\n"
        "LIMIT: int = 3\n"
        "__all__ = ['Child', 'LIMIT', 'Parent', 'nn', 'run']\n"
    )
    (tmp_path / "collectors/weight_update/__init__.py").write_text(
        "from ..parts import Parent as Elder\n__all__ = ['Elder']\n"
    )
    (tmp_path / "collectors/parts.py").write_text(
        "from typing import NamedTuple\n"
        "class _Hidden:\n"
        "    def __init__(self, a, /, *, b: tuple[int, ...] = ()) -> None: ...\n"
        "    def kept(self) -> int: ...\n"
        "    def changed(self): ...\n"
        "    def _private(self): ...\n"
        "class Parent(_Hidden, NamedTuple):\n"
        "    size: int = 2\n"
        "    @property\n    def changed(self) -> str: ...\n"
        "class Child(Parent):\n"
        "    @staticmethod\n    async def make(x): ...\n"
        "def run(*args: int, flag=True) -> None: ...\n"
    )
    (tmp_path / "torchrl_agents/__init__.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from collectors import *\n"
    )
    assert public_api.lines(tmp_path) == [
        "collectors.Child [collectors.Parent]",
        "@staticmethod async collectors.Child.make(x)",
        "collectors.LIMIT: int = 3",
        "collectors.Parent(a, /, *, b: tuple[int, ...]=()) [typing.NamedTuple]",
        "@property collectors.Parent.changed() -> str",
        "collectors.Parent.kept() -> int",
        "collectors.Parent.size: int = 2",
        "collectors.nn is torch.nn",
        "collectors.run(*args: int, flag=True) -> None",
        "collectors.weight_update.Elder is collectors.Parent",
        "torchrl_agents.Child is collectors.Child",
        "torchrl_agents.LIMIT is collectors.LIMIT",
        "torchrl_agents.Parent is collectors.Parent",
        "torchrl_agents.nn is collectors.nn",
        "torchrl_agents.run is collectors.run",
    ]
