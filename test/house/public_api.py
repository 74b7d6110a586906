"""All public names with their signatures, read from the source without importing it.

    python test/house/public_api.py         # rewrites public_api.txt
    python test/house/public_api.py ROOT    # prints those of another checkout

One line for a name, and one for each public method, property and field of a class. What a class
inherits from a public class stands there alone, what it inherits from a private one of ours here.
"""

import ast
import copy
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SNAPSHOT = Path(__file__).with_suffix(".txt")
PUBLIC = (
    "torchrl_data",
    "torchrl_data.chat",
    "torchrl_modules",
    "torchrl_modules.policies",
    "torchrl_envs",
    "torchrl_envs.transforms",
    "torchrl_envs.openenv",
    "torchrl_envs.sandbox",
    "objectives",
    "objectives.functional",
    "collectors",
    "collectors.ledger",
    "collectors.record",
    "collectors.verification",
    "collectors.weight_update",
    "torchrl_agents",
    "torchrl_agents.explain",
)
UMBRELLA = "torchrl_agents"
"""Has all names of the packages that it star-imports, and no ``__all__``."""
OURS = {package.partition(".")[0] for package in PUBLIC} | {"torchrl_tasks"}
SPECIAL = {"__init__", "__call__", "__len__", "__iter__", "__enter__", "__aenter__", "__getitem__"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Definition:
    """Where a name leads: a node of one of our modules, or the name of something foreign."""

    def __init__(self, node: ast.AST | None, module: "Module | None", place: str) -> None:
        self.node = node
        self.module = module
        self.place = place


class Module:
    """A module's names."""

    def __init__(self, name: str, path: Path, root: Path) -> None:
        self.name = name
        self.root = root
        self.package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        self.names: dict[str, list[ast.AST]] = {}
        self.starred: list[str] = []
        self.own: list[str] = []
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self._read(self.tree.body)

    def _read(self, body: list[ast.stmt]) -> None:
        for node in body:
            match node:
                case ast.If():
                    self._read(node.body)
                    self._read(node.orelse)
                case ast.ImportFrom(module=str(source), names=[ast.alias(name="*")]):
                    module = load(source, self.root)
                    assert module is not None, f"{source}, of which {self.name} takes *, is missing"
                    for name in module.constant("__all__"):
                        self.names[name] = [_Imported(self, node, ast.alias(name))]
                        self.starred.append(name)
                case ast.ImportFrom() | ast.Import():
                    for alias in node.names:
                        self.names[alias.asname or alias.name] = [_Imported(self, node, alias)]
                        self.own += [alias.name] if alias.asname == alias.name else []
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    self.names.setdefault(node.name, []).append(node)
                case ast.Assign(targets=[ast.Name(id=name)]):
                    self.names[name] = [node]
                case ast.AnnAssign(target=ast.Name(id=name)):
                    self.names[name] = [node]

    def constant(self, name: str) -> list[str]:
        """A list of words; ``__all__``, where there is none, of what is imported to be exported.

        That is what is imported by a star, or under its own name (``X as X``).
        """
        if name == "__all__" and name not in self.names and (exported := self.starred + self.own):
            return exported
        (node,) = self.names[name]
        assert isinstance(node, ast.Assign)
        return ast.literal_eval(node.value)

    def find(self, name: str) -> list[Definition]:
        """What a name stands for, through all re-exports; overloads are several."""
        found = []
        for node in self.names.get(name, []):
            if isinstance(node, _Imported):
                found += node.find(self.root)
            else:
                found.append(Definition(node, self, f"{self.name}.{name}"))
        return found


class _Imported(ast.AST):
    """A name that a module takes from another one."""

    def __init__(self, module: Module, node: ast.Import | ast.ImportFrom, alias: ast.alias) -> None:
        super().__init__()
        if isinstance(node, ast.Import):
            self.source, self.name = alias.name, ""
            return
        above = module.package.split(".")
        above = above[: len(above) - (node.level - 1)] if node.level else []
        self.source = ".".join([*above, *filter(None, [node.module])])
        self.name = alias.name

    def find(self, root: Path) -> list[Definition]:
        if self.source.partition(".")[0] in OURS:
            whole = f"{self.source}.{self.name}" if self.name else self.source
            if module := load(whole, root):
                return [Definition(module.tree, module, whole)]
            if (module := load(self.source, root)) and (found := module.find(self.name)):
                return found
            raise LookupError(f"{self.source} has no {self.name!r}")
        return [Definition(None, None, f"{self.source}.{self.name}".rstrip("."))]


@cache
def load(name: str, root: Path) -> Module | None:
    """A module of ours, if there is one of this name."""
    base = root.joinpath(*name.split("."))
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if path.is_file():
            return Module(name, path, root)
    return None


def public_names(root: Path = ROOT) -> dict[str, list[Definition]]:
    """Every public name to what it stands for."""
    names = {}
    for package in PUBLIC:
        module = load(package, root)
        assert module is not None, f"{package} is missing"
        for name in sorted(set(module.constant("__all__"))):
            names[f"{package}.{name}"] = module.find(name)
            assert names[f"{package}.{name}"], f"{package} exports {name}, which it does not import"
    return names


def lines(root: Path = ROOT) -> list[str]:
    """The snapshot."""
    told = []
    homes: dict[str, str] = {}
    names = public_names(root)
    for name, definitions in names.items():
        homes.setdefault(definitions[0].place, name)
    for name, definitions in names.items():
        if (home := homes[definitions[0].place]) != name:
            told.append(f"{name} is {home}")
        else:
            for definition in definitions:
                told += _described(name, definition, homes)
    return told


def _described(name: str, definition: Definition, homes: dict[str, str]) -> Iterator[str]:
    node, module = definition.node, definition.module
    if node is None or module is None:
        yield f"{name} is {definition.place}"
    elif isinstance(node, Function):
        yield _signature(name, node)
    elif isinstance(node, ast.ClassDef):
        yield from _class(name, node, module, homes)
    elif isinstance(node, ast.Module):
        yield f"{name} (module)"
        for key in sorted(n for n in module.names if not n.startswith("_")):
            for found in module.find(key):
                if found.module is module:
                    yield from _described(f"{name}.{key}", found, homes)
    else:
        yield f"{name}{_assigned(node)}"


def _assigned(node: ast.AST) -> str:
    assert isinstance(node, ast.Assign | ast.AnnAssign)
    kind = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
    return f"{kind} = {ast.unparse(node.value)}" if node.value else kind


def _signature(name: str, node: Function, *, bound: bool = False) -> str:
    arguments = copy.copy(node.args)
    if bound and arguments.posonlyargs:
        arguments.posonlyargs = arguments.posonlyargs[1:]
    elif bound:
        arguments.args = arguments.args[1:]
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    start = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{start}{name}({ast.unparse(arguments)}){returned}"


def _class(name: str, node: ast.ClassDef, module: Module, homes: dict[str, str]) -> Iterator[str]:
    members: dict[str, list[ast.AST]] = {}
    outside = []
    for owner, foreign in _lineage(node, module, homes):
        outside += foreign
        members = _members(owner) | members
    constructor = members.pop("__init__", [])
    bases = f" [{', '.join(dict.fromkeys(outside))}]" if outside else ""
    made = [
        _signature("", function, bound=True).removesuffix(" -> None")
        for function in constructor
        if isinstance(function, Function)
    ]
    yield f"{name}{' | '.join(made)}{bases}"
    for key in sorted(members):
        if not key.startswith("_") or key in SPECIAL:
            for member in members[key]:
                yield _member(f"{name}.{key}", member)


def _members(owner: ast.ClassDef) -> dict[str, list[ast.AST]]:
    """What a class says itself; overloads are several."""
    own: dict[str, list[ast.AST]] = {}
    for member in owner.body:
        match member:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                own.setdefault(member.name, []).append(member)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                own.setdefault(name, []).append(member)
    return own


def _member(name: str, member: ast.AST) -> str:
    if not isinstance(member, Function):
        return f"{name}{_assigned(member)}"
    marks = [ast.unparse(d) for d in member.decorator_list]
    told = _signature(name, member, bound="staticmethod" not in marks)
    return " ".join([*(f"@{mark}" for mark in marks), told])


def _lineage(
    node: ast.ClassDef, module: Module, homes: dict[str, str]
) -> Iterator[tuple[ast.ClassDef, list[str]]]:
    """A class and the private ones of ours that it builds on, nearest first; each one's others."""
    foreign: list[str] = []
    above: list[tuple[ast.ClassDef, Module]] = []
    for base in node.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base
        found = module.find(plain.id) if isinstance(plain, ast.Name) else []
        if found and found[0].place in homes:
            foreign.append(homes[found[0].place])
        elif found and isinstance(found[0].node, ast.ClassDef) and found[0].module is not None:
            above.append((found[0].node, found[0].module))
        else:
            foreign.append(found[0].place if found else ast.unparse(base))
    yield node, foreign
    for parent, home in above:
        yield from _lineage(parent, home, homes)


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.stdout.write("\n".join(lines(Path(sys.argv[1]))) + "\n")
    else:
        SNAPSHOT.write_text("\n".join(lines()) + "\n", encoding="utf-8")
