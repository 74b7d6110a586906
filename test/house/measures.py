"""How large the library is, and how much a reader has to enter.

    python test/house/measures.py

Of the library and its recipes: lines of code (those with a token that is neither a comment nor of a
docstring), files, classes, functions and methods, files that a single other file imports, and
functions whose body is one call. Nothing bounds these figures: they are there to be looked at.

Order is what a good change can't worsen, and ``test/test_house.py`` holds it: seams (comments that
stand alone between the definitions of a file, as the docstring of another file would), shape
legends outside the docstring of a file, public names that several files define, public classes
away from home: in a file whose name has no word of theirs, and docstrings that begin with a
question word, or with a word that leans on its neighbours (``it``, ``of``, ``nobody``). The option
``-v`` lists them.
"""

import ast
import io
import re
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
    "torchrl_tasks",
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
QUESTION_WORDS = frozenset(
    {"what", "who", "whoever", "whose", "which", "when", "where", "whether", "why", "how"}
)
LEANING_WORDS = frozenset({"it", "its", "he", "she", "they", "nobody", "one", "of", "as"})
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


def seams(text: str) -> list[str]:
    """First lines of the comments that stand alone on the top level of a module.

    Args:
        text: of a module. A comment right above a statement belongs to it, and is none.
    """
    lines = text.splitlines()
    inside = {
        number
        for node in ast.parse(text).body
        for number in range(_first_line(node), (node.end_lineno or 0) + 1)
    }
    found = []
    for number, line in enumerate(lines, 1):
        if not line.startswith("#") or number in inside or lines[number - 2][:1] == "#":
            continue
        after = next((i for i in range(number, len(lines)) if lines[i][:1] != "#"), len(lines))
        if not "".join(lines[after : after + 1]).strip() and not line.startswith("# fmt:"):
            found.append(line)
    return found


def _first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(mark.lineno for mark in getattr(node, "decorator_list", ()))])


def legends(text: str) -> list[str]:
    """Comments of a module that give a shape legend, whose place is its docstring.

    Args:
        text: of a module.
    """
    return [line for line in text.splitlines() if re.match(r"#.*\bShape legend\b", line)]


def _words(name: str) -> set[str]:
    """Words of a name in snake case or camel case, small and in the singular."""
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)
    return {re.sub(r"ies$", "y", word.lower()).removesuffix("s") for word in found} - {""}


def first_words(text: str) -> Iterator[tuple[str, str]]:
    """The first word of each docstring of a module, in lower case, with its first line.

    Args:
        text: of the module.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function | ast.ClassDef | ast.Module):
            docstring = ast.get_docstring(node) or ""
            if found := re.match(r"[A-Za-z']+", docstring):
                yield found[0].lower(), docstring.splitlines()[0]


def is_at_home(name: str, path: str) -> bool:
    """Whether a file's name has a word of a class' name, such as ``text_history.py: TextHistory``.

    Args:
        name: of the class.
        path: of the file that defines it.
    """
    file = Path(path)
    home = file.parent.name if file.stem == "__init__" else file.stem
    return bool(_words(name) & _words(home)) or home.replace("_", "") in name.lower()


def _exported(code: dict[str, str]) -> set[str]:
    """Names that the packages import for their users."""
    return {
        alias.asname
        for name, text in code.items()
        if name.endswith("__init__.py")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is not None
    }


def order() -> dict[str, list[str]]:
    """Breaches of order in the library and its recipes, by their kind."""
    code = _sources(*LIBRARY, RECIPES)
    exported = _exported(code)
    places: dict[str, list[str]] = defaultdict(list)
    away = []
    for path, text in code.items():
        for node in ast.parse(text).body:
            if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
                continue
            if path not in places[node.name]:  # overloads are several in one
                places[node.name].append(path)
            is_public = isinstance(node, ast.ClassDef) and node.name in exported
            if is_public and not is_at_home(node.name, path):
                away.append(f"{path}: {node.name}")
    words = [(path, *words) for path, text in code.items() for words in first_words(text)]
    return {
        "docstrings_that_ask": [
            f"{p}: {line}" for p, word, line in words if word in QUESTION_WORDS
        ],
        "docstrings_that_lean": [
            f"{p}: {line}" for p, word, line in words if word in LEANING_WORDS
        ],
        "seams": [f"{path}: {line}" for path, text in code.items() for line in seams(text)],
        "legends_outside_docstrings": [
            f"{path}: {line}" for path, text in code.items() for line in legends(text)
        ],
        "names_defined_twice": [
            f"{name}: {', '.join(paths)}"
            for name, paths in sorted(places.items())
            if len(paths) > 1 and name != "main"
        ],
        "public_classes_away_from_home": away,
    }


def main() -> None:
    for name, value in measure().items():
        sys.stdout.write(f"{name:<30} {value:>9,}\n")
    for name, breaches in order().items():
        sys.stdout.write(f"{name:<30} {len(breaches):>9,}\n")
        if "-v" in sys.argv:
            sys.stdout.writelines(f"    {breach}\n" for breach in breaches)


if __name__ == "__main__":
    main()
