"""The examples of docstrings run and print what they say.

An example has the names of its module, those of its package, ``torch``, ``TensorDict`` and a
``tokenizer``. What needs a model or a server that is not here is marked ``# doctest: +SKIP``, and
has to compile.
"""

import ast
import doctest
import inspect
import re
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
# What users type most: names in the Python code of at least two of these: the README, the pages and
# tutorials of docs/, the examples. And five of those that stand most often in one of them.
MOST_USED = [
    *("ChatHistory", "ConversationEncoder", "History", "Tokens", "Turn"),
    *("conversation_html", "encode_demonstrations", "pack", "read_conversations"),
    *("row_tensordicts", "show_conversation"),
    *("EngineFleet", "TransformersWrapper", "VLLMServerEngine", "make_vllm_worker", "open_async"),
    *("start_server", "vLLMWrapper"),
    *("AgentProgram", "Answer", "ChatEnv", "DataLoadingPrimer", "EnvironmentTools"),
    *("EpisodeTransform", "FunctionTools", "KLRewardTransform", "MCPToolTransform"),
    *("PythonInterpreter", "RetrieveKL", "RewardFunctions", "Sandbox", "StepCounter"),
    *("TokenBudget", "check_env", "load_rows", "make_mlgym", "row_reward"),
    *("BNPO", "DAPO", "DrGRPO", "GRPO", "GRPOLoss", "GRPOLossOutput", "MCAdvantage"),
    *("NonFiniteGate", "OriginalGRPO", "SFTLoss", "TokenFilters", "write_streams"),
    *("CheckpointStore", "Drop", "LLMCollector", "OnPolicy", "RolloutFunctionCollector"),
    *("RunState", "StreamingCollector", "Wait", "contribute_weights", "identity_of", "vLLMUpdater"),
]
SHAPE = re.compile(r"``\[[^`]*\]``")


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


def public(name):
    """The object of a public name, in whichever package it is."""
    packages = [import_module(package) for package in LIBRARY]
    return next(getattr(package, name) for package in packages if name in package.__all__)


def is_ours(obj):
    return getattr(obj, "__module__", "").partition(".")[0] in LIBRARY


def own_docstrings(obj):
    """Its docstring and, of a class, those of its bases here: a preset tells what is its own."""
    owners = inspect.getmro(obj) if inspect.isclass(obj) else [obj]
    return "\n".join(owner.__doc__ or "" for owner in owners if is_ours(owner))


def tells_of_tensors(obj):
    """Whether its signature, or that of what it is called for, takes or gives tensors.

    What it inherits from TorchRL is told there, and a model's weights by name have no one shape.
    """
    calls = [getattr(obj, name, None) for name in ("__init__", "forward", "collect")]
    calls = [call for call in calls if is_ours(call)] if inspect.isclass(obj) else [obj]
    hints = [vars(obj).get("__annotations__", {}), *(call.__annotations__ for call in calls)]
    text = " ".join(str(hint) for each in hints for hint in each.values())
    text = re.sub(r"Mapping\[str, (torch\.)?Tensor\]", "", text)
    return bool(re.search(r"\bTensor(Dict(Base)?)?\b", text))


@pytest.mark.parametrize("name", MOST_USED)
def test_what_users_type_most_shows_an_example(name):
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(public(name)) or "")
    typed = {
        node.id
        for example in examples
        for node in ast.walk(ast.parse(example.source))
        if isinstance(node, ast.Name)
    }
    assert name in typed, "no example uses it"


@pytest.mark.parametrize("name", MOST_USED)
def test_what_takes_or_gives_tensors_says_their_shapes(name):
    obj = public(name)
    assert not tells_of_tensors(obj) or SHAPE.search(own_docstrings(obj))


def test_the_names_are_sixty():
    assert len(set(MOST_USED)) == len(MOST_USED) == 60
