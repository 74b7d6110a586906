"""Runs of tests cost less, and have the settings that they would have."""

import copy
import sys
from dataclasses import dataclass, field, make_dataclass
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


def made(**defaults):
    """A class that is made of fields, as those of tasks are."""
    return make_dataclass(
        "Made", [(name, type(x), field(default=x)) for name, x in defaults.items()]
    )


@pytest.fixture
def repo():
    """What a store holds that was told of classes and records."""
    store = SimpleNamespace(repo={})
    tell = quick_runs._store_known()
    tell(store, "schema", Outer)
    tell(store, name="tiny.yaml", node=Inner, group="model/size", package="model", provider="us")
    tell(store, name="again", node=Inner, group="model/size")
    for rate in (0.25, 0.25, 0.75):
        tell(store, name=f"given-{len(store.repo['model'])}", node=Inner(rate=rate), group="model")
    for number, each in enumerate((made(a=1), made(a=1), made(a=2), made(a=1.0), made(b=1))):
        tell(store, name=f"{number}", node=each, group="task")
    return store.repo


def test_a_class_is_stored_where_and_as_hydra_stores_it(repo):
    assert {*repo} == {"schema.yaml", "model", "task"}
    assert {*repo["model"]} == {"size", *(f"given-{i}.yaml" for i in (1, 2, 3))}
    tiny, again = (repo["model"]["size"][f"{name}.yaml"] for name in ("tiny", "again"))
    assert (tiny.name, tiny.group, tiny.package) == ("tiny.yaml", "model/size", "model")
    assert (tiny.provider, again.package) == ("us", None)
    assert tiny.node is again.node
    for node, kind in ((repo["schema.yaml"].node, Outer), (tiny.node, Inner)):
        assert OmegaConf.get_type(node) is kind
        assert node == OmegaConf.structured(kind)
    with pytest.raises(ValueError, match="could not be converted to Integer"):
        repo["schema.yaml"].node.steps = "many"


def test_what_has_the_same_in_it_is_read_once_and_what_differs_by_itself(repo):
    first, second, third = (repo["model"][f"given-{i}.yaml"].node for i in (1, 2, 3))
    assert first is second
    assert (first.rate, third.rate) == (0.25, 0.75)
    one, same, *others = (repo["task"][f"{number}.yaml"].node for number in range(5))
    assert one is same
    assert [dict(each) for each in (one, *others)] == [{"a": 1}, {"a": 2}, {"a": 1.0}, {"b": 1}]
    assert type(others[1].a) is float


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
