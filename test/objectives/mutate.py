"""Mutation test of ``objectives``: change the code in small ways, see the tests fail.

    python test/objectives/mutate.py               # all mutants of objectives/functional
    python test/objectives/mutate.py segments.py   # those of one file
    python test/objectives/mutate.py packed_batch.py:_targets   # of one function or method

Files of ``batching`` and ``advantages`` are tested when they are named.

Each mutant is one change of one expression (an operator, a comparison, a number, a mask that is
not applied, a ``detach`` that is left out). It lives in a copy of the tree, and is tested by the
tests that enter its function, the quickest first, in a forked process, which has what is not
``objectives`` imported already; on as many processes as there are cores. Prints the mutants that no
test kills, and exits with their number. ``# mutate: equivalent (why)`` at the end of a line leaves
that line out, and ``# mutate: equivalent number (why)`` its changes of that kind only.
"""

import argparse
import ast
import contextlib
import copy
import importlib
import json
import os
import re
import resource
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import hypothesis.strategies
import pytest

ROOT = Path(__file__).parents[2]
FUNCTIONAL = (
    "functional/test_golden.py",
    "functional/test_functional_reference.py",
    "functional/test_advantages_reference.py",
    "functional/test_divergence_golden.py",
    "functional/test_no_mask.py",
)
# The tests of a file by folder; those of a file that is named here are its own.
TESTS = {
    "functional": FUNCTIONAL,
    "batching": ("test_grpo_loss.py", "test_micro_batches.py", "test_unfit_rows.py"),
    "advantages": (
        *("test_mc_advantage.py", "test_advantage_estimators.py", "test_unfit_rows.py"),
        "algorithms/test_roles_and_lengths.py",
    ),
    "preferences.py": ("functional/test_preferences.py",),
    "labelled_answers.py": ("functional/test_labelled_answers.py",),
    "streams.py": ("algorithms/test_streams.py",),
    "non_finite_gate.py": ("test_non_finite_gate.py",),
}
OPTIONS = [
    *("-x", "-q", "--assert=plain", "-p", "no:cacheprovider"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
    *("-o", "addopts=--import-mode=importlib"),
]
# What every fork has already: no part of ``objectives``, of which each imports its own.
IMPORTED = ("jaxtyping", "torchrl.data", "torchrl_modules.policies.transformers_wrapper")
PLUGINS = "pytest_timeout,_hypothesis_pytestplugin"
CPU_TIME_S = 300  # a mutant that loops for ever; not wall time, which a busy machine uses up
MARK = re.compile(r"# mutate: equivalent ?(?P<kind>[^(]*?) ?\(")
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
COMPARISONS = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
NAMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "minimum": "maximum"}
DROPPED_CALLS = ("masked_fill", "detach", "clamp", "exp", "square", "sqrt", "expm1")


def variants(node):
    """Ways to change one node, each as (what, new node)."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        new = copy.copy(node)
        new.op = OPERATORS[type(node.op)]()
        yield "operator", new
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        new = copy.copy(node)
        new.ops = [COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
        yield "comparison", new
    elif isinstance(node, ast.UnaryOp):
        # The last dimension of two is dimension 1 as well; its number is changed anyway.
        if not (isinstance(node.operand, ast.Constant) and node.operand.value == 1):
            yield "sign or not", node.operand
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "number", ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in DROPPED_CALLS:
            yield f"no {node.func.attr}", node.func.value
        if node.func.attr in NAMES:
            new = copy.copy(node)
            new.func = ast.Attribute(node.func.value, NAMES[node.func.attr], ast.Load())
            yield "name", new
    elif isinstance(node, ast.keyword) and node.arg in ("min", "max"):
        yield "bound", ast.keyword(NAMES[node.arg], node.value)


class Change(ast.NodeTransformer):
    """Applies the n-th variant of a tree, or counts them all."""

    def __init__(self, skip_lines, wanted=None):
        self.skip_lines, self.wanted = skip_lines, wanted
        self.found = []

    def visit(self, node):
        line = getattr(node, "lineno", None)
        if isinstance(node, ast.Raise | ast.arg | ast.JoinedStr):
            return node
        for what, new in variants(node):
            if self.skip_lines.get(line, "none") in (what, ""):
                continue
            self.found.append((line, what))
            if len(self.found) - 1 == self.wanted:
                return ast.copy_location(new, node) if line else new
        if isinstance(node, ast.FunctionDef):
            return self.visit_function(node)
        return self.generic_visit(node)

    def visit_function(self, node):
        """Bodies and defaults, not annotations."""
        node.body = [self.visit(child) for child in node.body]
        node.args.defaults = [self.visit(child) for child in node.args.defaults]
        node.args.kw_defaults = [child and self.visit(child) for child in node.args.kw_defaults]
        return node


def lines_of(source, function):
    """The lines of a function or method of a file; of all of it without a name."""
    if not function:
        return range(1, len(source.splitlines()) + 1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == function:
            return range(node.lineno, node.end_lineno + 1)
    sys.exit(f"No function {function!r} in the file.")


def mutants(source, function=""):
    """Every (line, what, new source) of a file, or of one of its functions."""
    lines = source.splitlines()
    marks = {i: MARK.search(line) for i, line in enumerate(lines, 1)}
    skip = {i: mark["kind"] for i, mark in marks.items() if mark}
    counter = Change(skip)
    counter.visit(ast.parse(source))
    wanted = lines_of(source, function)
    for index, (line, what) in enumerate(counter.found):
        if line not in wanted:
            continue
        tree = Change(skip, index).visit(ast.parse(source))
        yield line, what, ast.unparse(ast.fix_missing_locations(tree))


def copy_tree(where):
    """A tree with our own copy of the functions, and the rest of the project by reference."""
    shutil.copytree(ROOT / "objectives", where / "objectives")
    shutil.copytree(ROOT / "test" / "objectives", where / "test" / "objectives")
    shutil.copy(ROOT / "pyproject.toml", where)
    for name in ("torchrl_data", "torchrl_modules"):
        (where / name).symlink_to(ROOT / name)


class Entered:
    """Which functions of a file each test enters, by their first lines, and its seconds."""

    def __init__(self, target):
        self.target, self.tests = str(target), []

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item):
        lines, begin = set(), time.process_time()

        def note(frame, event, _):
            if event == "call" and frame.f_code.co_filename == self.target:
                lines.add(frame.f_code.co_firstlineno)

        sys.setprofile(note)
        yield
        sys.setprofile(None)
        self.tests.append((time.process_time() - begin, item.nodeid, sorted(lines)))


def in_fork(function):
    """Whether a function gives 0 in a forked process, its output thrown away."""
    child = os.fork()
    if child == 0:
        used = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + CPU_TIME_S,) * 2)
        with Path(os.devnull).open("w") as sink:
            os.dup2(sink.fileno(), 1)
            os.dup2(sink.fileno(), 2)
        code = 1
        with contextlib.suppress(BaseException):
            code = function()
        os._exit(int(code))
    _, status = os.waitpid(child, 0)
    return os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0


def survives(where, tests):
    """Whether some tests pass in a tree."""
    return in_fork(lambda: run_tests(where, tests))


def run_tests(where, tests, plugins=()):
    os.chdir(where)
    sys.path.insert(0, str(where))
    os.environ["PYTHONPATH"] = str(where)  # for processes of the tests, too
    sys.dont_write_bytecode = True
    # A failure is enough: no search for the smallest one.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", phases=phases, report_multiple_bugs=False)
    hypothesis.settings.load_profile("mutants")
    return pytest.main([*tests, *OPTIONS], plugins)


def tests_of(where, target, tests):
    """Of each function of a file, by its first line, the tests that enter it; of 0, all."""
    kept = where / "entered.json"

    def note():
        entered = Entered(target)
        code = run_tests(where, tests, [entered])
        kept.write_text(json.dumps(sorted(entered.tests)))
        return code

    if not in_fork(note):
        sys.exit("The tests fail without any mutant.")
    entered = {0: tests}
    for _, name, lines in json.loads(kept.read_text()):
        for line in lines:
            entered.setdefault(line, []).append(name)
    return entered


def function_around(source, line):
    """The first line of the innermost function whose body has a line; 0 outside of all."""
    around = [
        min([node.lineno, *(each.lineno for each in node.decorator_list)])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        if node.body[0].lineno <= line <= node.end_lineno
    ]
    return max(around, default=0)


def survivors_of(path, function, share, num_shares):
    """Which mutants of a file no test kills, of every so manieth; and how many there were."""
    source = path.read_text()
    found, total = [], 0
    with tempfile.TemporaryDirectory() as name:
        where = Path(name).resolve()
        copy_tree(where)
        target = where / path.relative_to(ROOT)
        names = TESTS.get(path.name, TESTS[path.parent.name])
        entered = tests_of(where, target, [f"test/objectives/{name}" for name in names])
        for line, what, mutant in list(mutants(source, function))[share::num_shares]:
            target.write_text(mutant)
            total += 1
            tests = entered.get(function_around(source, line), ())
            if not tests or survives(where, tests):
                found.append(f"{path.name}:{line} {what}")
                print("survived:", found[-1], flush=True)  # noqa: T201
    return found, total


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="names of files, with :function for a part")
    chosen = dict(name.partition(":")[::2] for name in parser.parse_args().files)

    paths = [
        path
        for folder in ("functional", "batching", "advantages")
        for path in sorted((ROOT / "objectives" / folder).glob("*.py"))
    ]
    if unknown := chosen.keys() - {path.name for path in paths}:
        sys.exit(f"No file {sorted(unknown)} in functional, batching or advantages.")
    wanted = [
        (path, chosen.get(path.name, ""))
        for path in paths
        if path.name != "__init__.py"
        if (path.name in chosen if chosen else path.parent.name == "functional")
    ]
    for name in IMPORTED:
        importlib.import_module(name)
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": PLUGINS}
    num_shares = os.cpu_count() or 1
    shares = [(*each, i, num_shares) for each in wanted for i in range(num_shares)]
    with ProcessPoolExecutor(num_shares, get_context("fork")) as pool:
        done = []
        for share, (found, num) in zip(
            shares, pool.map(survivors_of, *zip(*shares, strict=True)), strict=True
        ):
            done.append((num, len(found)))
            print(f"{share[0].name}, part {share[2] + 1}: {num - len(found)} of {num}", flush=True)  # noqa: T201
    total, num_survivors = map(sum, zip(*done, strict=True))
    print(f"{total - num_survivors} of {total} mutants killed.")  # noqa: T201
    sys.exit(min(num_survivors, 255))


if __name__ == "__main__":
    main()
