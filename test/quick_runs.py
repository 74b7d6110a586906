"""What a run does for the eye and for settings that no test has, done in less time."""

import copy
from typing import Any

from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import OmegaConf


def quicken_runs() -> None:
    """Make runs of this process, and of its forks, cost a third less; for tests alone."""
    quicken_settings()
    _quicken_pictures()


def quicken_settings() -> None:
    """Make commands of this process, and of its forks, read their settings in half the time.

    Hydra composes all settings once more to find ``hydra.mode``, which no recipe sets: what it
    finds is none. Each time it copies all schemas, of which it gives out copies only, and a schema
    that is stored again is read again.
    """
    Hydra.get_mode = lambda *_, **__: None
    CachingConfigRepository.__init__ = _share_sources
    ConfigStore.store = _store_known()


def _quicken_pictures() -> None:
    """Draw them in few pixels and without a search for the best margins."""
    from matplotlib.figure import Figure

    save = Figure.savefig

    def save_small(figure, *to, **options):
        figure.set_layout_engine("none")
        save(figure, *to, **options | {"dpi": 20})

    Figure.savefig = save_small


def _share_sources(repository, delegate) -> None:
    """Copy the list of sources, which is made anew, and not what is in them."""
    repository.delegate = copy.copy(delegate)
    repository.cache = {}


def _store_known():
    """Store a class or a record that was stored before as it was read then."""
    known: dict[Any, Any] = {}

    def store_known(self, name, node, group=None, package=None, provider=None):
        key = _key(node)
        if key not in known:
            known[key] = OmegaConf.structured(node)
        folder, file = self.repo, f"{name.removesuffix('.yaml')}.yaml"
        for part in group.split("/") if group else ():
            folder = folder.setdefault(part, {})
        folder[file] = ConfigNode(file, known[key], group, package, provider)

    return store_known


def _key(node):
    """What it is known by: itself, or what is in a record or in a class that was made of fields."""
    if not isinstance(node, type):
        return type(node), repr(node)
    return (repr(node()), repr(node.__annotations__)) if node.__module__ == "types" else node
