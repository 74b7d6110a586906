"""The examples of docstrings run and print what they say.

An example has the names of its module, those of its package, ``torch``, ``TensorDict`` and a
``tokenizer``. What needs a model or a server that is not here is marked ``# doctest: +SKIP``, and
has to compile.
"""

import doctest
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

ROOT = Path(__file__).parents[2]
LIBRARY = ("torchrl_data", "torchrl_modules", "torchrl_envs", "objectives", "collectors")
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in LIBRARY
    for path in sorted((ROOT / package).rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_a_module_print_what_they_say(module, chatml_tokenizer):
    module = import_module(module.removesuffix(".__init__"))
    package = import_module(module.__name__.partition(".")[0])
    names = {name: getattr(package, name) for name in package.__all__ if "vllm" not in name.lower()}
    names |= vars(module) | {"torch": torch, "TensorDict": TensorDict}
    names["tokenizer"] = chatml_tokenizer
    found = [test for test in doctest.DocTestFinder().find(module, globs=names) if test.examples]
    assert found, "the module has examples where doctest does not look for them"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    said: list[str] = []
    for test in found:
        runner.run(test, out=said.append, clear_globs=False)
        for example in test.examples:
            compile(example.source, test.name, "single")
    assert not runner.failures, "".join(said)
