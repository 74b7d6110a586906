"""The API reference: each public name with the first line of its docstring.

python test/house/reference.py    # rewrites docs/reference.md
"""

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from public_api import PUBLIC, ROOT, UMBRELLA, Definition, load, public_names

PAGE = ROOT / "docs/reference.md"
INTRODUCTION = """\
# Reference

Every public name, with the first line of its docstring. `help(name)` shows the rest, with shapes,
units and what raises, and so do the pages of the [packages](api/index.md) on the site. Each name is
imported from the package that it stands under; those of the five packages without a dot are in
`torchrl_agents`, too. The guides are listed on the [first page](index.md), words in the
[glossary](glossary.md).

Written by `python test/house/reference.py`.
"""
OF_TORCHRL = {
    "torchrl.envs.LLMHashingEnv": "An action is the next token; `hashing` names what it leads to.",
    "torchrl.envs.transforms.StepCounter": "Ends an episode after a number of turns.",
}


def page(root: Path = ROOT) -> str:
    """The whole page."""
    homes: dict[str, str] = {}
    others: dict[str, list[str]] = {}
    names = public_names(root)
    for name, definitions in names.items():
        place = definitions[0].place
        if homes.setdefault(place, name) != name and not name.startswith(f"{UMBRELLA}."):
            others.setdefault(homes[place], []).append(name.rpartition(".")[0])
    parts = [INTRODUCTION]
    for package in PUBLIC:
        module = load(package, root)
        assert module is not None
        rows = [
            f"| `{name.removeprefix(package + '.')}` | {told}{_also(others.get(name, []))} |"
            for name, definitions in names.items()
            if name.rpartition(".")[0] == package and homes[definitions[0].place] == name
            for told in [_first_line(name, definitions[0])]
        ]
        heading = f"## {package}\n\n{_sentence(ast.get_docstring(module.tree))}\n"
        table = ["| name | |", "|---|---|", *rows] if rows else ["All of its names stand above."]
        parts.append("\n".join([heading, *table]) + "\n")
    return "\n".join(parts)


def _also(packages: list[str]) -> str:
    return f" Also in {', '.join(f'`{package}`' for package in packages)}." if packages else ""


def _first_line(name: str, definition: Definition) -> str:
    node, module = definition.node, definition.module
    if node is None or module is None:
        return f"{OF_TORCHRL[definition.place]} It is `{definition.place}`."
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
        return _sentence(ast.get_docstring(node), name)
    for said, text in _with_text_below(module.tree.body):
        if said is node:
            return _sentence(text, name)
    assert isinstance(node, ast.Assign | ast.AnnAssign)
    assert node.value is not None
    return f"`{ast.unparse(node.value)}`".replace("|", "\\|")


def _with_text_below(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """Assignments that a docstring follows."""
    for node, below in itertools.pairwise(body):
        match below:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node, inspect.cleandoc(text)


def _sentence(docstring: str | None, name: str = "a package") -> str:
    assert docstring, f"{name} has no docstring"
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    plain = re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"`\1`", paragraph)
    return plain.replace("|", "\\|").replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
