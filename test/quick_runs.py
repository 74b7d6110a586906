"""What a run does for the eye and for settings that no test has, done in less time."""

import copy
import os
from dataclasses import replace
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.defaults_list import Overrides, create_defaults_list
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
    that is stored again is read again. What a file has is parsed once, and what the same choices
    give is composed once; each time it is copied.
    """
    Hydra.get_mode = lambda *_, **__: None
    CachingConfigRepository.__init__ = _share_sources
    ConfigStore.store = _store_known()
    OmegaConf.load = staticmethod(_load_known())
    listed, composed = _compose_known()
    config_loader_impl.create_defaults_list = listed
    ConfigLoaderImpl._compose_config_from_defaults_list = composed


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


def _load_known():
    """Parse what an open file has once, as long as it is not written again."""
    known: dict[Any, Any] = {}
    load = OmegaConf.load

    def load_known(file):
        if not hasattr(file, "fileno"):
            return load(file)
        key = file.name, *_state(file.fileno())
        if key not in known:
            known[key] = load(file)
        return copy.deepcopy(known[key])

    return load_known


def _state(path):
    told = os.stat(path)
    return told.st_dev, told.st_ino, told.st_size, told.st_mtime_ns


def _compose_known():
    """List and compose choices as they were before, where schemas and files are those of then.

    Values are set in a copy of what the choices give, and are no part of what is known.
    """
    known: dict[Any, Any] = {}
    compose = ConfigLoaderImpl._compose_config_from_defaults_list

    def list_known(repo, config_name, overrides_list, prepend_hydra, skip_missing):
        given = [config_name, overrides_list, prepend_hydra, skip_missing]
        choices = [o.input_line for o in overrides_list if repo.group_exists(o.key_or_group)]
        key = (config_name, *choices, prepend_hydra, skip_missing, _sources(repo))
        if key not in known:
            known[key] = create_defaults_list(repo, *given)
        own = Overrides(repo, overrides_list).config_overrides
        return replace(known[key], config_overrides=own)

    def compose_known(loader, defaults, repo):
        key = id(defaults)  # of a list that is kept beside it
        if key not in known:
            known[key] = defaults, compose(loader, defaults, repo)
        return copy.deepcopy(known[key][1])

    return list_known, compose_known


def _sources(repo):
    """What settings are read from: folders by what is in them, schemas by themselves."""
    return tuple((each.provider, each.path, _content(each)) for each in repo.get_sources())


def _content(source):
    if source.scheme() == "structured":
        return _schemas(source.store.repo)
    if source.scheme() != "file":
        return ()
    found = ((folder, name) for folder, _, names in os.walk(source.path) for name in names)
    return tuple((path, *_state(path)) for path in sorted(os.path.join(*each) for each in found))


def _schemas(folder):
    return tuple(
        (name, _schemas(each)) if isinstance(each, dict) else (name, each.package, id(each.node))
        for name, each in folder.items()
    )
