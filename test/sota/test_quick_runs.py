"""Runs of tests cost less, and have the settings that they would have."""

import copy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf

sys.path.append(str(Path(__file__).parents[1]))
import quick_runs


@dataclass
class Inner:
    rate: float = 0.5
    names: list[str] = field(default_factory=lambda: ["a"])


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    steps: int = 3


@pytest.fixture
def repo():
    """What a store holds that was told of two classes twice, and of one record."""
    store = SimpleNamespace(repo={})
    record = Inner(rate=0.25)

    def plain(self, name, node, group, package, provider):
        assert node is record
        self.repo["plain"] = (name, group, package, provider)

    tell = quick_runs._store_known(plain)
    tell(store, "schema", Outer)
    tell(store, name="tiny.yaml", node=Inner, group="model/size", package="model", provider="us")
    tell(store, name="again", node=Inner, group="model/size")
    tell(store, name="given", node=record, group="model")
    return store.repo


def test_a_class_is_stored_where_and_as_hydra_stores_it(repo):
    assert repo["plain"] == ("given", "model", None, None)
    assert {*repo} == {"plain", "schema.yaml", "model"}
    assert {*repo["model"]} == {"size"}
    tiny, again = (repo["model"]["size"][f"{name}.yaml"] for name in ("tiny", "again"))
    assert (tiny.name, tiny.group, tiny.package) == ("tiny.yaml", "model/size", "model")
    assert (tiny.provider, again.package) == ("us", None)
    assert tiny.node is again.node
    for node, kind in ((repo["schema.yaml"].node, Outer), (tiny.node, Inner)):
        assert OmegaConf.get_type(node) is kind
        assert node == OmegaConf.structured(kind)
    with pytest.raises(ValueError, match="could not be converted to Integer"):
        repo["schema.yaml"].node.steps = "many"


def test_sources_of_a_composition_are_its_own(tmp_path):
    Plugins.instance()  # what reads a folder is one of them
    before = ConfigSearchPathImpl()
    before.append("before", f"file://{tmp_path}/before")
    after = copy.deepcopy(before)
    after.append("after", f"file://{tmp_path}/after")
    shared = ConfigRepository(before)
    repository = SimpleNamespace()
    quick_runs._share_sources(repository, shared)
    CachingConfigRepository.initialize_sources(repository, after)
    assert [each.provider for each in repository.delegate.get_sources()] == ["before", "after"]
    assert [each.provider for each in shared.get_sources()] == ["before"]
    assert repository.cache == {}
