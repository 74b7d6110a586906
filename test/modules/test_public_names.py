"""What the packages promise is what they give."""

import importlib
import pkgutil
import re

import pytest

import collectors
import torchrl_agents
import torchrl_data
from torchrl_data import import_package


@pytest.mark.parametrize("package", ["torchrl_modules", "torchrl_envs", "collectors"])
def test_a_public_name_is_no_module_once_every_module_is_imported(package):
    package = importlib.import_module(package)
    for module in pkgutil.iter_modules(package.__path__):
        if "vllm" not in module.name:
            importlib.import_module(f"{package.__name__}.{module.name}")
    named = [name for name in package.__all__ if "vllm" not in name.lower()]
    assert all(callable(getattr(package, name)) for name in named)
    with pytest.raises(AttributeError, match="has no attribute 'Missing'"):
        package.Missing  # noqa: B018


@pytest.mark.parametrize(
    ("package", "name", "words"),
    [
        ("torchrl_envs", "RewardFunction", "Did you mean RewardFunctions?"),
        ("torchrl_agents", "GRPOLos", "Did you mean GRPOLoss?"),
        ("objectives", "MCAdvantages", "MCAdvantage"),
        ("torchrl_modules", "TransformerWrapper", "Did you mean TransformersWrapper"),
        ("collectors", "LLMColector", "Did you mean LLMCollector"),
        ("torchrl_data", "TopKRewardSelector", "from objectives import TopKRewardSelector"),
    ],
)
def test_a_name_that_is_nearly_right_is_guessed_in_both_ways_to_ask(package, name, words):
    words = re.escape(words)
    module = importlib.import_module(package)
    with pytest.raises(
        ImportError, match=rf"cannot import name '{name}' from '{package}'\. .*{words}"
    ):
        exec(f"from {package} import {name}")
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'. .*{words}"):
        getattr(module, name)
    assert not hasattr(module, name)
    with pytest.raises(ImportError, match=f"cannot import name 'zzz' from '{package}'.$"):
        exec(f"from {package} import zzz")


def test_what_an_optional_package_lacks_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "wanted_a.py").write_text("import missing_b")
    (tmp_path / "wanted_c.py").write_text("from json import nothing")
    how = {"who": "This", "install": "pip install it"}
    assert import_package("json.decoder", **how).__name__ == "json.decoder"
    for name, words in (
        (
            "nowhere_d.part",
            "This needs the package nowhere_d, which is not installed: pip install it",
        ),
        ("wanted_a", "package wanted_a, .* because the module missing_b .*: pip install missing_b"),
        ("wanted_c", "package wanted_c, .* can't be imported .cannot import name 'nothing'"),
    ):
        with pytest.raises(ImportError, match=words):
            import_package(name, **how)


def test_the_version_is_there():
    assert torchrl_agents.__version__ == torchrl_data.__version__ == collectors.__version__
