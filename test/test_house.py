"""The house stays in order: short functions, one door for a heavy dependency, no circles.

Nothing bounds how large the library as a whole is. A part that is over its budget stands in
``test/house/exceptions.toml``. Layers are contracts of import-linter in ``pyproject.toml``.
"""

import ast
import importlib
import re
import runpy
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
EXCEPTIONS = tomllib.loads((ROOT / "test/house/exceptions.toml").read_text(encoding="utf-8"))
LIBRARY = ("torchrl_data", "torchrl_modules", "torchrl_envs", "objectives", "collectors")
SCRIPTS = ("torchrl_agents", "torchrl_tasks", "sota-implementations", "benchmarks")

FUNCTION_LINES = 75
CONSTRUCTOR_PARAMETERS = 12
FUNCTION_IMPORTS = 46
FILES_TO_THE_LOSS = 35
STAYS_OF_A_TURN = 25
STAYS_OF_A_STEP = 241
FUNCTIONS_OF_A_STEP = 109
DOORS = {
    "vllm": {"torchrl_modules.vllm.releases"},
    "ray": {
        "objectives.advantages.ray_mc_advantage",
        "collectors.cluster.ray_door",
    },
    "mcp": {"torchrl_envs.tools.mcp_connection"},
    "websockets": {"torchrl_envs.openenv.session"},
    "math_verify": {"torchrl_envs.graders.math_verify"},
    "openai": {"torchrl_envs.answerers.chat_completions", "torchrl_tasks.calculator_agent"},
    "starlette": {"torchrl_envs.agents.server"},
    "uvicorn": {"torchrl_envs.agents.http", "torchrl_envs.agents.server"},
    "datasets": {"torchrl_envs.datasets.loading"},
    "textarena": {"torchrl_envs.tasks.textarena"},
    "reasoning_gym": {"torchrl_envs.tasks.__init__"},
    "mlgym": {"torchrl_tasks.mlgym.wrapper"},
}
"""Where a dependency that is heavy, or that not everyone has, is imported when the code runs."""

MOST_BREACHES = {
    "seams": 0,
    "legends_outside_docstrings": 0,
    "names_defined_twice": 4,
}
"""Breaches of order, see ``test/house/measures.py``. These may only go down."""
SHARE_AWAY_FROM_HOME = 0.25
"""Public classes in a file whose name has no word of theirs. This may only go down."""
MOST_FIRST_WORDS = {"docstrings_that_ask": 0.03, "docstrings_that_lean": 0.01}
"""Shares of the docstrings that begin with a question word, or with ``it``, ``of``, ``nobody``: the
first word is a verb or a noun. These may only go down."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def sources(*folders: str) -> dict[str, tuple[str, ast.Module]]:
    """Text and syntax tree of each Python file, by its path."""
    if len(folders) != 1:
        return {name: source for folder in folders for name, source in sources(folder).items()}
    found = {}
    for path in sorted(ROOT.joinpath(*folders).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found[path.relative_to(ROOT).as_posix()] = (text, ast.parse(text))
    return found


def num_lines(node: Function) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def function_lines() -> Iterator[tuple[str, int]]:
    """Of the library, without docstrings: a script's loop stands in one place."""
    for name, (_, tree) in sources(*LIBRARY).items():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                docstring = ast.get_docstring(node, clean=False) or ""
                yield f"{name}::{node.name}", num_lines(node) - len(docstring.splitlines())


def constructor_parameters() -> Iterator[tuple[str, int]]:
    for name, (_, tree) in sources(*LIBRARY).items():
        for owner in ast.walk(tree):
            for node in owner.body if isinstance(owner, ast.ClassDef) else ():
                if isinstance(node, Function) and node.name == "__init__":
                    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                    yield f"{name}::{owner.name}", len(given) - 1  # without self


def function_imports() -> Iterator[tuple[str, int]]:
    hidden: set[int] = set()
    for _, tree in sources(*LIBRARY).values():
        functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
        hidden |= {id(node) for function in functions for node in imports_in(function)}
    yield "all", len(hidden)


def imports_in(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


@cache
def code_paths() -> str:
    """What the house's script says of a rollout and of a policy's turn, with either engine."""
    script = [sys.executable, ROOT / "test/house/code_paths.py"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files_to_the_loss() -> Iterator[tuple[str, int]]:
    for engine, count in re.findall(r"(\w+): (\d+) files to the loss", code_paths()):
        yield engine, int(count)


def stays_of_a_turn() -> Iterator[tuple[str, int]]:
    for engine, count in re.findall(r"(\w+): one turn (\d+) stays", code_paths()):
        yield engine, int(count)


def of_a_step(number: int) -> Iterator[tuple[str, int]]:
    """Stays, or functions, of a step of an environment in which a tool is called."""
    found = re.search(r"tool: one step (\d+) stays in \d+ files, (\d+) functions", code_paths())
    assert found is not None
    yield "tool", int(found[number])


BUDGETS: dict[str, tuple[Callable[[], Iterable[tuple[str, float]]], float]] = {
    "function_lines": (function_lines, FUNCTION_LINES),
    "constructor_parameters": (constructor_parameters, CONSTRUCTOR_PARAMETERS),
    "function_imports": (function_imports, FUNCTION_IMPORTS),
    "files_to_the_loss": (files_to_the_loss, FILES_TO_THE_LOSS),
    "stays_of_a_turn": (stays_of_a_turn, STAYS_OF_A_TURN),
    "stays_of_a_step": (lambda: of_a_step(1), STAYS_OF_A_STEP),
    "functions_of_a_step": (lambda: of_a_step(2), FUNCTIONS_OF_A_STEP),
}


@pytest.mark.parametrize("budget", BUDGETS)
def test_budget(budget):
    measure, limit = BUDGETS[budget]
    excused = EXCEPTIONS.get(budget, {})
    found = dict(measure())
    assert found
    over = {n: v for n, v in found.items() if v > excused.get(n, limit)}
    assert not over, f"more than {limit} {budget}, or than exceptions.toml allows: {over}"
    unneeded = {name for name in excused if found.get(name, 0) <= limit}
    assert not unneeded, f"take these out of [{budget}] in test/house/exceptions.toml: {unneeded}"


@cache
def measures():
    return runpy.run_path(str(ROOT / "test/house/measures.py"))


@cache
def order() -> dict[str, list[str]]:
    return measures()["order"]()


@cache
def library_and_recipes() -> dict[str, str]:
    house = measures()
    return house["_sources"](*house["LIBRARY"], house["RECIPES"])


@pytest.mark.parametrize("kind", MOST_BREACHES)
def test_order(kind):
    breaches = order()[kind]
    message = f"{len(breaches)} {kind}: mend one of\n" + "\n".join(breaches)
    assert len(breaches) <= MOST_BREACHES[kind], message


def test_public_classes_are_in_a_file_of_their_name():
    away, classes = order()["public_classes_away_from_home"], public_classes()
    message = f"{len(away)} of {len(classes)}: move one of\n" + "\n".join(away)
    assert len(away) <= SHARE_AWAY_FROM_HOME * len(classes), message


@pytest.mark.parametrize("kind", MOST_FIRST_WORDS)
def test_docstrings_begin_with_a_verb_or_a_noun(kind):
    words = measures()["first_words"]
    count = sum(1 for text in library_and_recipes().values() for _ in words(text))
    breaches = order()[kind]
    message = f"{len(breaches)} of {count}: reword one of\n" + "\n".join(breaches)
    assert len(breaches) <= MOST_FIRST_WORDS[kind] * count, message


def public_classes() -> list[str]:
    code = library_and_recipes()
    exported = measures()["_exported"](code)
    classes = [n for s in code.values() for n in ast.parse(s).body if isinstance(n, ast.ClassDef)]
    return [node.name for node in classes if node.name in exported]


def test_seams_and_legends_by_hand():
    text = """# A licence.

x = 1  # beside
# Of y.
y = 2


# What another file's docstring was.
#
# Shape legend: B rows.


def f():
# inside
    pass
# fmt: off
# Parts ----

"""
    seams, legends = measures()["seams"], measures()["legends"]
    assert seams(text) == ["# A licence.", "# What another file's docstring was."]
    assert seams("z = 1\n\n# Last.") == ["# Last."]
    assert legends(text) == ["# Shape legend: B rows."]


@pytest.mark.parametrize(
    ("name", "path", "is_home"),
    [
        ("TextHistory", "a/text_history.py", True),
        ("Drop", "a/policies.py", False),
        ("StalenessPolicy", "a/policies.py", True),
        ("VLLMEngine", "a/engine.py", True),
        ("ChatEnv", "a/episode_env.py", True),
        ("ImageProcessor", "a/encoder.py", False),
        ("Ticket", "tickets/__init__.py", True),
    ],
)
def test_a_class_is_at_home_where_the_file_has_a_word_of_its_name(name, path, is_home):
    assert measures()["is_at_home"](name, path) == is_home


def test_heavy_dependencies_are_imported_behind_one_door():
    """By statement or by name, imports for types alone left out."""
    importers = defaultdict(set)
    for name, (_, tree) in sources(*LIBRARY, "torchrl_tasks").items():
        for module in imported_when_run(tree):
            importers[module.partition(".")[0]].add(name.removesuffix(".py").replace("/", "."))
    assert {name: importers[name] for name in DOORS} == DOORS


def imported_when_run(tree: ast.AST) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                for other in node.orelse:
                    yield from imported_when_run(other)
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(level=0, module=str(module)):
                yield module
            case ast.Call(func=function, args=[ast.Constant(value=str(module)), *_]) if ast.unparse(
                function
            ).endswith(("import_module", "run_module", "import_package")):
                yield module
                yield from imported_when_run(node)
            case _:
                yield from imported_when_run(node)


@pytest.fixture(scope="module")
def graph():
    """Who imports whom, imports for types included."""
    return grimp.build_graph(*LIBRARY, cache_dir=None)


def test_names_that_tests_and_benchmarks_import_are_there():
    """Their types are not checked, and a benchmark runs seldom."""
    imports = {
        (node.module, name.name)
        for _, tree in sources("test", "benchmarks", "sota-implementations").values()
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        if node.module.partition(".")[0] in (*LIBRARY, "torchrl_agents", "torchrl_tasks")
        for name in node.names
    }
    assert len(imports) > 500
    for module, name in sorted(imports):
        if not hasattr(importlib.import_module(module), name):
            importlib.import_module(f"{module}.{name}")  # raises where it is no module either


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Sets of nodes that all reach each other (Tarjan), of two nodes and more."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in sorted(arrows.get(node, ())):
            if other not in order:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], order[other])
        if low[node] == order[node]:
            circle = set(stack[stack.index(node) :])
            del stack[stack.index(node) :]
            found.extend([circle] if len(circle) > 1 else [])

    for node in sorted(arrows):
        if node not in order:
            visit(node)
    return found


def test_circles_of_a_graph_by_hand():
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"e"}, "e": {"f"}, "f": {"d", "g"}}
    assert circles(arrows) == [{"d", "e", "f"}, {"b", "c"}]
    assert circles({"a": {"b", "c"}, "b": {"c"}}) == []


@pytest.mark.parametrize("level", ["modules", "rooms"])
def test_nothing_imports_in_circles(level, graph):
    """Neither modules nor rooms, the folders right below a package."""
    arrows = defaultdict(set)
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            ends = (module, other) if level == "modules" else (room(module), room(other))
            if ends[0] != ends[1] and not LIBRARY_SET & set(ends):
                arrows[ends[0]].add(ends[1])
    found = circles(arrows)
    excused = [set(circle) for circle in EXCEPTIONS["circles"][level]]
    new = [sorted(circle) for circle in found if not any(circle <= known for known in excused)]
    assert not new, f"these import each other in a circle: {new}"
    mended = [sorted(known) for known in excused if not any(circle & known for circle in found)]
    assert not mended, f"take these circles out of test/house/exceptions.toml: {mended}"


LIBRARY_SET = set(LIBRARY)


def room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_mutants_made_by_hand_have_their_place(monkeypatch):
    """What stands in the code once can be changed there, and tests that exist can notice."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # which the script changes
    mutants = runpy.run_path(str(ROOT / "test/mutants/by_hand.py"))["read_mutants"]()
    names = [mutant.name for mutant in mutants]
    assert len(set(names)) == len(names)
