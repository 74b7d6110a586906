"""Runs of tests cost less, and have the settings that they would have."""

import copy
import sys
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException
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


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Composes what a folder and a store say."""
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", dict(store.repo))
    (tmp_path / "size").mkdir()
    defaults = "[{model: one}, {optional size: small}, _self_]"
    (tmp_path / "main.yaml").write_text(f"defaults: {defaults}\nnames: [a]\n")
    (tmp_path / "size/small.yaml").write_text("width: 3\n")
    (tmp_path / "size/large.yaml").write_text("width: 8\n")

    def composed(*overrides):
        with initialize_config_dir(version_base="1.3", config_dir=str(tmp_path)):
            return compose("main", list(overrides))

    return composed


def test_what_is_composed_again_is_what_files_and_schemas_say_now(given, tmp_path):
    store = ConfigStore.instance()
    for name, rate in (("one", 0.25), ("two", 0.75)):
        store.store(name=name, node=Inner(rate=rate), group="model")
    first = {"model": {"rate": 0.25, "names": ["a"]}, "size": {"width": 3}, "names": ["a"]}
    assert given() == first
    assert given("model.rate=1.5", "names=[b]") == first | {
        "model": {"rate": 1.5, "names": ["a"]},
        "names": ["b"],
    }
    taken = given()
    taken.names.append("mine")
    taken.model.rate = 2.5
    assert given() == first  # neither values that were given nor a user's changes stay
    assert OmegaConf.get_type(given().model) is Inner
    assert given("size=large") == first | {"size": {"width": 8}}
    assert given("size=large", "model=two").model.rate == 0.75
    store.store(name="one", node=Inner(rate=0.5), group="model")
    assert given().model.rate == 0.5
    (tmp_path / "size/large.yaml").write_text("width: 16\n")
    assert given("size=large").size.width == 16
    with pytest.raises(ConfigCompositionException, match=r"Could not override 'size\.depth'"):
        given("size.depth=1")
    for _ in range(2):
        with pytest.raises(ConfigCompositionException, match="Could not find 'model/none'"):
            given("model=none")
