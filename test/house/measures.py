"""How large the library is, and how much a reader has to enter.

    python test/house/measures.py

Of the library and its recipes: lines of code (those with a token that is neither a comment nor of a
docstring), files, classes, functions and methods, files that a single other file imports, and
functions whose body is one call. Nothing bounds these figures: they are there to be looked at.
"""

import ast
import io
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).parents[2]
LIBRARY = (
    "torchrl_data",
    "torchrl_modules",
    "torchrl_envs",
    "objectives",
    "collectors",
    "torchrl_agents",
)
RECIPES = "sota-implementations"
_SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def _sources(*folders: str) -> dict[str, str]:
    """Text of each Python file, by its path."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in paths}


def lines_of_code(text: str) -> int:
    """Lines with a token that is neither a comment nor of a docstring.

    Args:
        text: of a module.
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for statement in ast.walk(ast.parse(text)):
        if _is_text(statement):
            lines.difference_update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return len(lines)


def _is_text(node: ast.AST) -> TypeGuard[ast.Expr]:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.JoinedStr)


def _imported(name: str, text: str, modules: set[str]) -> Iterator[str]:
    """Modules of the library that a module names in an import, wherever it stands."""
    parts = name.removesuffix(".py").split("/")
    package = parts[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            for alias in node.names:
                deeper = ".".join([*base, alias.name])
                found = deeper if deeper in modules else ".".join(base)
                if found in modules:
                    yield found


def _is_one_call(function: Function) -> bool:
    body = [statement for statement in function.body if not _is_text(statement)]
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    value = body[0].value
    return isinstance(value.value if isinstance(value, ast.Await) else value, ast.Call)


def measure() -> dict[str, int]:
    """The figures, by their names."""
    code = _sources(*LIBRARY, RECIPES)
    by_module = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in code
    }
    importers = defaultdict(set)
    for name, text in code.items():
        for module in _imported(name, text, set(by_module)):
            importers[by_module[module]].add(name)
    nodes = [node for text in code.values() for node in ast.walk(ast.parse(text))]
    functions = [node for node in nodes if isinstance(node, Function)]
    lonely = [
        name
        for name, found in importers.items()
        if len(found - {name}) == 1 and not name.endswith("__init__.py")
    ]
    return {
        "lines_of_code": sum(map(lines_of_code, code.values())),
        "files": len(code),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "functions": len(functions),
        "files_that_one_file_imports": len(lonely),
        "functions_that_are_one_call": sum(map(_is_one_call, functions)),
    }


def main() -> None:
    for name, value in measure().items():
        sys.stdout.write(f"{name:<30} {value:>9,}\n")


if __name__ == "__main__":
    main()
