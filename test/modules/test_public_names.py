"""What the packages promise is what they give."""

import importlib
import pkgutil

import pytest


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
