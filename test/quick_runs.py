"""What a run does for the eye and for settings that no test has, done in less time."""

import copy
from typing import Any

from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigNode, ConfigStore
from matplotlib.figure import Figure
from omegaconf import OmegaConf


def quicken_runs() -> None:
    """Make runs of this process, and of its forks, cost a third less; for tests alone.

    Hydra composes all settings once more to find ``hydra.mode``, which no recipe sets: what it
    finds is none. Each time it copies all schemas, of which it gives out copies only, and a schema
    that is stored again is read again. Pictures are drawn, in few pixels and without a search for
    the best margins.
    """
    save = Figure.savefig

    def save_small(figure, *to, **options):
        figure.set_layout_engine("none")
        save(figure, *to, **options | {"dpi": 20})

    Hydra.get_mode = lambda *_, **__: None
    Figure.savefig = save_small
    CachingConfigRepository.__init__ = _share_sources
    ConfigStore.store = _store_known(ConfigStore.store)


def _share_sources(repository, delegate) -> None:
    """Copy the list of sources, which is made anew, and not what is in them."""
    repository.delegate = copy.copy(delegate)
    repository.cache = {}


def _store_known(store):
    """Store a class that was stored before as it was read then."""
    known: dict[type, Any] = {}

    def store_known(self, name, node, group=None, package=None, provider=None):
        place = {"group": group, "package": package, "provider": provider}
        if not isinstance(node, type):
            store(self, name, node, **place)
            return
        if node not in known:
            known[node] = OmegaConf.structured(node)
        folder, file = self.repo, f"{name.removesuffix('.yaml')}.yaml"
        for part in group.split("/") if group else ():
            folder = folder.setdefault(part, {})
        folder[file] = ConfigNode(file, known[node], **place)

    return store_known
