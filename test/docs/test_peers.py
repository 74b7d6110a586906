"""The pages for people who come from TorchRL or TRL leave no name and no argument out."""

import importlib
import inspect
import re
import warnings
from collections import defaultdict
from pathlib import Path

import pytest

from torchrl_data.torchrl_arguments import torchrl_arguments

ROOT = Path(__file__).parents[2]
HERE = ("torchrl_data", "torchrl_modules", "torchrl_envs", "objectives", "collectors")
TORCHRL = (
    "torchrl.data.llm",
    "torchrl.modules.llm",
    "torchrl.envs.llm",
    "torchrl.envs.llm.transforms",
    "torchrl.objectives.llm",
    "torchrl.collectors.llm",
    "torchrl.weight_update.llm",
)
PASSED_ON = {
    "DatasetChatEnv": ("ChatEnv",),
    "CountdownEnv": ("ChatEnv",),
    "GSM8KEnv": ("ChatEnv",),
    "IFEvalEnv": ("ChatEnv",),
    "MATHEnv": ("ChatEnv",),
    "RayMCAdvantage": ("MCAdvantage",),
    "RetrieveKL": ("KLComputation",),
    "make_gsm8k_env": ("GSM8KEnv", "ChatEnv"),
    "make_mlgym": ("MLGymWrapper",),
}
"""Where arguments that are not named go."""


def ours(name):
    """The public thing of a name, or None."""
    for package in map(importlib.import_module, HERE):
        if name in package.__all__:
            return getattr(package, name)
    return None


def parameters(thing):
    """Names of what a class or a function takes, through constructors that pass the rest on."""
    makers = [thing]
    if inspect.isclass(thing):
        makers = [k.__init__ for k in thing.__mro__ if "__init__" in vars(k) and k is not object]
    names = set()
    for maker in makers:
        given = inspect.signature(maker).parameters.values()
        names |= {p.name for p in given if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        if not any(p.kind is p.VAR_KEYWORD for p in given):
            break
    return names - {"self"}


def theirs():
    """TorchRL's public names to their parameters."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in map(importlib.import_module, TORCHRL):
            for name in getattr(module, "__all__", ()):
                thing = getattr(module, name)
                maker = thing.__init__ if inspect.isclass(thing) else thing
                found[name] = [p for p in inspect.signature(maker).parameters if p != "self"]
    return found


def table_rows(page):
    """Cells of a page's tables, as sets of what stands in backticks."""
    for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("| "):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            yield [set(re.findall(r"`([^`]+)`", cell)) for cell in cells]


def test_every_name_and_argument_of_torchrl_is_here_or_in_a_table():
    names, arguments = set(), defaultdict(set)
    for cells in table_rows("torchrl-arguments.md"):
        if len(cells) == 2:
            names |= cells[0]
        else:
            for name in cells[0]:
                arguments[name] |= cells[1]
    missing = []
    for name, wanted in theirs().items():
        thing = ours(name)
        if thing is None:
            missing += [name] if name not in names else []
            continue
        taken = parameters(thing).union(*(parameters(ours(n)) for n in PASSED_ON.get(name, ())))
        unknown = set(wanted) - taken - arguments[name] - {"args", "kwargs"}
        missing += [f"{name}({argument}=)" for argument in sorted(unknown)]
    assert missing == []


def test_tables_name_only_what_torchrl_has_and_nothing_that_is_taken_here():
    known = theirs()
    for cells in table_rows("torchrl-arguments.md"):
        if len(cells) == 2:
            assert cells[0] <= set(known), cells[0] - set(known)
            assert {name for name in cells[0] if ours(name) is not None} == set()
            continue
        assert cells[0] <= set(known), cells[0] - set(known)
        for argument in cells[1]:
            users = {name for name in cells[0] if argument in known[name]}
            assert users, f"no class of {sorted(cells[0])} has {argument!r} in TorchRL"
            taken = {name for name in users if argument in parameters(ours(name))}
            assert taken == set(), f"{sorted(taken)} takes {argument!r}: drop the row"


def test_arguments_of_torchrl_alone_are_answered_with_what_to_write():
    """Each argument of the tables, of each class that is here."""
    asked = 0
    for name, arguments in torchrl_arguments().items():
        thing = ours(name)
        for argument in arguments if inspect.isclass(thing) else ():
            if argument in ("args", "kwargs"):
                continue
            with pytest.raises(TypeError) as refused:
                thing(**{argument: None})
            words = f"{argument}= is an argument of TorchRL's. Here: {arguments[argument]}. See "
            assert str(refused.value).startswith(f"{thing.__name__}: {words}")
            asked += 1
    assert asked > 150
    with pytest.raises(TypeError, match="unexpected keyword argument 'nobodys'"):
        ours("ChatEnv")(nobodys=1)
    with pytest.raises(TypeError, match=r"^GSM8KEnv.* unexpected keyword argument 'nobodys'"):
        ours("GSM8KEnv")(dataset=[{"question": "2 + 2?", "answer": "#### 4"}], nobodys=1)

    own = type("Own", (ours("ChatEnv"),), {})
    with pytest.raises(TypeError, match="Own: data_key= is an argument of TorchRL's"):
        own(data_key="text")
    assert inspect.signature(ours("LLMCollector")).parameters["env"]


@pytest.mark.parametrize("page", ["from-torchrl.md", "torchrl-arguments.md"])
def test_pages_speak_of_the_installed_version(page):
    import torchrl

    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert set(re.findall(r"0\.\d+\.\d+", text)) <= {torchrl.__version__}
