"""The reference: every public name from its docstring, read from the source without importing it.

Each public class has a page, ``api/classes/<package>.<name>``, which is written before the site is
built. ``.. entry:: <package>.<name>`` stands for such a name, with its signature, members and links
to the source; ``.. package:: <package>`` for all public names of a package: a list of its classes,
and its functions and constants. Names and members are those of ``test/house/public_api.txt``, which
the same code writes.
"""

import ast
import copy
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import public_api
import reference
from docutils import nodes
from public_api import PUBLIC, Function, Module, public_names
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.util.docutils import SphinxDirective

NAPOLEON = Config(napoleon_use_rtype=False, napoleon_use_ivar=True, napoleon_google_docstring=True)
CLASS_PAGES = "api/classes"
NAMES = public_names()
HOMES: dict[str, str] = {}
ALSO: dict[str, list[str]] = {}
PLACES: dict[str, str] = {}
for _name, _definitions in NAMES.items():
    _place = _definitions[0].place
    if HOMES.setdefault(_place, _name) != _name:
        ALSO.setdefault(HOMES[_place], []).append(_name)
    else:
        PLACES[_name] = _place
SHOWN = {(name.rpartition(".")[0], place.rpartition(".")[0]) for name, place in PLACES.items()}


class Package(SphinxDirective):
    """All public names of a package."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        package = self.arguments[0]
        for name, definitions in NAMES.items():
            if name.rpartition(".")[0] == package and definitions[0].module is not None:
                module = definitions[0].module
                self.env.note_dependency(str(public_api.ROOT / _file_of(module)))
        return _made(self, package, "\n".join(_page(package)))


class Entry(SphinxDirective):
    """A public name of a package."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        package = name.rpartition(".")[0]
        module = NAMES[name][0].module
        if module is not None:
            self.env.note_dependency(str(public_api.ROOT / _file_of(module)))
        return _made(
            self, package, f".. py:currentmodule:: {package}\n\n" + "\n".join(_entry(name))
        )


def _made(directive: SphinxDirective, package: str, text: str) -> list[nodes.Node]:
    """Nodes of descriptions, which links by all of their names lead to."""
    directive.env.note_dependency(__file__)
    made = directive.parse_text_to_nodes(text, allow_section_headings=True)
    for signature in itertools.chain(*(node.findall(addnodes.desc_signature) for node in made)):
        # Links back from a source lead to the first package that shows some of it.
        home = _home_module(None, package, signature.get("fullname", ""))
        shared = {each for each, place in SHOWN if place == home and each != package}
        signature["ids"] += [f"{each}.{signature['fullname']}" for each in sorted(shared)]
    domain = directive.env.domains.python_domain
    for home, others in ALSO.items():
        own = home.rpartition(".")[0] == package and home in domain.objects
        if own and domain.objects[home].docname == directive.env.docname:
            entry = domain.objects[home]
            for other in others:
                domain.note_object(other, entry.objtype, entry.node_id, aliased=True)
    return made


def write_class_pages(app: Sphinx) -> None:
    """Write the page of each class into the sources of the site, and remove those of others."""
    folder = Path(app.srcdir) / CLASS_PAGES
    folder.mkdir(exist_ok=True)
    classes = [name for package in public_api.PUBLIC for name in _groups(package)["Classes"]]
    pages = {f"{name}.rst": _class_page(name) for name in classes}
    for path in folder.iterdir():
        if path.name not in pages:
            path.unlink()
    for file, text in pages.items():
        path = folder / file
        if not path.exists() or path.read_text("utf-8") != text:  # others are not built again
            path.write_text(text, "utf-8")


def _class_page(name: str) -> str:
    # Outside the tree of pages, whose sidebar each page repeats: it would take twice the time.
    package, _, short = name.rpartition(".")
    lead = f"A class of :doc:`{package} </api/{package}>`."
    return f":orphan:\n\n{short}\n{'=' * len(short)}\n\n{lead}\n\n.. entry:: {name}\n"


def _file_of(module: Module) -> str:
    base = module.name.replace(".", "/")
    init = f"{base}/__init__.py"
    return init if (public_api.ROOT / init).is_file() else f"{base}.py"


def _page(package: str) -> Iterator[str]:
    module = public_api.load(package, public_api.ROOT)
    assert module is not None
    yield from [_doc(module.tree), "", f".. py:currentmodule:: {package}", ""]
    groups = _groups(package)
    if classes := groups.pop("Classes"):
        yield from ["Classes", "-------", ""]
        for name in classes:
            told = reference._first_line(name, NAMES[name][0]).replace("`", "``")
            yield f"- :py:obj:`{name.rpartition('.')[2]} <{name}>`: {told}"
        yield ""
    elsewhere = groups.pop("Also here")
    for title, names in groups.items():
        if names:
            yield from [title, "-" * len(title), ""]
            yield from itertools.chain.from_iterable(_entry(name) for name in names)
    if package == public_api.UMBRELLA:
        yield from _by_package(elsewhere)
    elif elsewhere:
        yield from ["Also here", "---------", ""]
        for name in elsewhere:
            home = HOMES[NAMES[name][0].place]
            package, _, short = home.rpartition(".")
            yield f"- :py:obj:`{short} <{home}>`, of ``{package}``"
        yield ""


def _groups(package: str) -> dict[str, list[str]]:
    """The public names of a package by the heading of its page under which they stand."""
    titles = ("Classes", "Functions", "Constants and types", "Also here")
    groups: dict[str, list[str]] = {title: [] for title in titles}
    for name in (name for name in NAMES if name.rpartition(".")[0] == package):
        definition = NAMES[name][0]
        if HOMES[definition.place] != name:
            groups["Also here"].append(name)
        elif isinstance(definition.node, ast.ClassDef) or definition.node is None:
            groups["Classes"].append(name)
        elif isinstance(definition.node, Function):
            groups["Functions"].append(name)
        else:
            groups["Constants and types"].append(name)
    return groups


def _by_package(names: list[str]) -> Iterator[str]:
    """Names that other packages have, each with the first line of its docstring."""
    of_home: dict[str, list[str]] = {}
    for name in names:
        home = HOMES[NAMES[name][0].place]
        package, _, short = home.rpartition(".")
        told = reference._first_line(name, NAMES[name][0]).replace("`", "``")
        of_home.setdefault(package, []).append(f"- :py:obj:`{short} <{home}>`: {told}")
    for package, lines in sorted(of_home.items(), key=lambda each: PUBLIC.index(each[0])):
        yield from [f"Of {package}", "-" * (3 + len(package)), "", *lines, ""]


def _entry(name: str) -> Iterator[str]:
    definitions = NAMES[name]
    node, module = definitions[0].node, definitions[0].module
    also = ""
    if name in ALSO:
        packages = [other.rpartition(".")[0] for other in ALSO[name]]
        told = ", ".join(f"``{each}``" for each in packages if each != public_api.UMBRELLA)
        also = f"Also in {told}." if told else ""
    if node is None or module is None:
        told = reference.OF_TORCHRL[definitions[0].place]
        yield from _described(
            "class", name, [""], f"{told} It is ``{definitions[0].place}``.\n\n{also}"
        )
    elif isinstance(node, ast.ClassDef):
        yield from _class(name, node, module, also)
    elif isinstance(node, Function):
        yield from _function(name, [d.node for d in definitions], "function", also)
    elif isinstance(node, ast.Module):
        yield from _module(name, module)
    else:
        told = _below(module.tree.body, node) or _first(node)
        yield from _described("data", name, [""], f"{told}\n\n{also}", _value(node))


def _first(node: ast.AST) -> str:
    assert isinstance(node, ast.Assign | ast.AnnAssign)
    assert node.value is not None
    return f"``{ast.unparse(node.value)}``"


def _described(
    kind: str, name: str, signatures: list[str], text: str, options: list[str] = ()
) -> Iterator[str]:
    short = name.rpartition(".")[2]
    start = f".. py:{kind}:: "
    yield start + f"{short}{signatures[0]}"
    yield from (" " * len(start) + f"{short}{each}" for each in signatures[1:])
    yield from (f"   {option}" for option in options)
    yield ""
    yield textwrap.indent(text.strip("\n"), "   ")
    yield ""


def _function(name: str, found: list, kind: str, also: str = "", *, bound: bool = False):
    last = found[-1]
    marks = [ast.unparse(d) for d in last.decorator_list]
    overloads = [
        f for f in found if any(ast.unparse(d).endswith("overload") for d in f.decorator_list)
    ]
    options = [":async:"] * isinstance(last, ast.AsyncFunctionDef)
    if kind == "method":
        options += [f":{mark}:" for mark in ("classmethod", "staticmethod") if mark in marks]
        options += [":abstractmethod:"] * any(mark.endswith("abstractmethod") for mark in marks)
    bound = bound and "staticmethod" not in marks
    if any(mark.endswith("property") for mark in marks):
        kind, options = "property", []
        returned = [f":type: {_annotation(last.returns)}"] if last.returns else []
        yield from _described(kind, name, [""], _doc(last), returned)
        return
    signatures = [_signature(f, bound=bound) for f in overloads or [last]]
    yield from _described(kind, name, signatures, f"{_doc(last)}\n\n{also}", options)


def _signature(node: ast.AST, *, bound: bool) -> str:
    assert isinstance(node, Function)
    node = _Unquoted().visit(ast.parse(ast.unparse(node)).body[0])
    return public_api._signature("", node, bound=bound).removeprefix("async ")


class _Unquoted(ast.NodeTransformer):
    """Annotations without the quotes of forward references; the shapes of jaxtyping keep theirs."""

    SHAPED = frozenset({"Float", "Bool", "Int", "Integer", "Shaped", "Num", "Literal", "Real"})

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = self._plain(node.annotation)
        return node

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        node.returns = self._plain(node.returns)
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def _plain(self, node: ast.expr | None) -> ast.expr | None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self._plain(ast.parse(node.value, mode="eval").body)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) not in self.SHAPED:
            node.slice = self._plain(node.slice)
        elif isinstance(node, ast.Tuple | ast.List):
            node.elts = [self._plain(each) for each in node.elts]
        elif isinstance(node, ast.BinOp):
            node.left, node.right = self._plain(node.left), self._plain(node.right)
        return node


def _annotation(node: ast.expr) -> str:
    plain = _Unquoted()._plain(ast.parse(ast.unparse(node), mode="eval").body)
    assert plain is not None
    return ast.unparse(plain)


def _class(name: str, node: ast.ClassDef, module: Module, also: str) -> Iterator[str]:
    members: dict[str, list[ast.AST]] = {}
    told: dict[str, str] = {}
    outside: list[str] = []
    for owner, foreign in public_api._lineage(node, module, HOMES):
        outside += foreign
        own = public_api._members(owner)
        told = {key: _below(owner.body, own[key][-1]) for key in own} | told
        members = own | members
    constructor = [f for f in members.pop("__init__", []) if isinstance(f, Function)]
    records = [_record(f, module) for f in constructor]
    signatures = [
        _signature(_spelt_out(f, given) if given else f, bound=True).removesuffix(" -> None")
        for f, given in zip(constructor, records, strict=True)
    ]
    signatures = signatures or [_fields_as_arguments(node, members, outside)]
    bases = [f":py:obj:`~{base}`" for base in dict.fromkeys(outside) if base not in ("object",)]
    parts = [_doc(node), also]
    parts += [_arguments_of(given) for given in records if given]
    parts += [f"Bases: {', '.join(bases)}"] if bases else []
    text = "\n\n".join(part for part in parts if part)
    yield from _described("class", name, signatures, text)
    for key in sorted(members, key=lambda k: (isinstance(members[k][-1], Function), k)):
        if key.startswith("_") and key not in public_api.SPECIAL:
            continue
        found = members[key]
        if isinstance(found[-1], Function):
            made = _function(f"{name}.{key}", found, "method", bound=True)
        else:
            made = _described("attribute", f"{name}.{key}", [""], told[key], _value(found[-1]))
        yield textwrap.indent("\n".join(made), "   ")
    yield ""


class _Record(NamedTuple):
    """The data class whose fields a constructor takes: ``@takes(record)``."""

    fields: dict[str, ast.AnnAssign]
    told: dict[str, str]
    """The descriptions below the fields that have one."""


def _record(function: ast.AST, module: Module) -> _Record | None:
    assert isinstance(function, Function)
    for mark in function.decorator_list:
        match mark:
            case ast.Call(func=ast.Name(id="takes"), args=[ast.Name(id=name)]):
                (found,) = module.find(name)
                assert isinstance(found.node, ast.ClassDef)
                assert found.module is not None
                return _fields(found.node, found.module)
    return None


def _fields(node: ast.ClassDef, module: Module) -> _Record:
    """The fields of a data class and of those that it comes from, in their order."""
    record = _Record({}, {})
    for owner, _ in reversed(list(public_api._lineage(node, module, {}))):
        for key, (field, *_) in public_api._members(owner).items():
            if isinstance(field, ast.AnnAssign):
                record.fields[key] = field
                if told := _string_below(owner.body, field):
                    record.told[key] = told
    return record


def _spelt_out(function: ast.AST, record: _Record) -> ast.AST:
    """A function with each field as an argument of its own."""
    function = copy.deepcopy(function)
    assert isinstance(function, Function)
    function.args.kwarg = None
    arguments = function.args
    named = {each.arg for each in (*arguments.args, *arguments.kwonlyargs)}
    for key, node in record.fields.items():
        if key not in named:
            arguments.kwonlyargs.append(ast.arg(key, node.annotation))
            arguments.kw_defaults.append(node.value)
    return function


def _arguments_of(record: _Record) -> str:
    """A section with what the fields mean."""
    lines = [f"    {key}: {' '.join(text.split())}" for key, text in record.told.items()]
    return _told("\n".join(["Keyword Args:", *lines]))


def _fields_as_arguments(node: ast.ClassDef, members: dict, bases: list[str]) -> str:
    """What a data class or a named tuple is made with."""
    marks = " ".join(ast.unparse(d) for d in node.decorator_list)
    if "dataclass" not in marks and not any(base.endswith("NamedTuple") for base in bases):
        return ""
    fields = [
        f"{key}: {_annotation(field.annotation)}"
        + (f" = {ast.unparse(field.value)}" if field.value else "")
        for key, (*_, field) in members.items()
        if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation)
    ]
    star = "*, " if "kw_only=True" in marks else ""
    return f"({star}{', '.join(fields)})" if fields else ""


def _module(name: str, module: Module) -> Iterator[str]:
    yield from _described("data", name, [""], _doc(module.tree))
    for key in sorted(n for n in module.names if not n.startswith("_")):
        for found in module.find(key):
            if found.module is module and isinstance(found.node, ast.Assign | ast.AnnAssign):
                told = _below(module.tree.body, found.node)
                options = _value(found.node)
                made = _described("data", f"{name}.{key}", [""], told, options)
                first, *rest = made
                short = name.rpartition(".")[2]
                yield "\n".join([first.replace(f":: {key}", f":: {short}.{key}"), *rest])


def _value(node: ast.AST) -> list[str]:
    assert isinstance(node, ast.Assign | ast.AnnAssign)
    options = []
    if isinstance(node, ast.AnnAssign):
        options.append(f":type: {_annotation(node.annotation)}")
    if node.value is not None and len(value := " ".join(ast.unparse(node.value).split())) < 100:
        options.append(f":value: {value}")
    return options


def _below(body: list[ast.stmt], node: ast.AST) -> str:
    """What the string below an assignment says."""
    return _told(_string_below(body, node))


def _string_below(body: list[ast.stmt], node: ast.AST) -> str:
    for first, second in itertools.pairwise(body):
        match second:
            case ast.Expr(value=ast.Constant(value=str(text))) if first is node:
                return inspect.cleandoc(text)
    return ""


class _Docstring(GoogleDocstring):
    """Here ``Returns:`` has sentences, and a colon in one of them is no type."""

    def _consume_returns_section(self, preprocess_types: bool = False) -> list:
        del preprocess_types
        lines = self._dedent(self._consume_to_next_section())
        return [("", "", lines)] if lines else []


def _doc(node: ast.AST) -> str:
    return _told(ast.get_docstring(node) or "")  # type: ignore[arg-type]


def _told(docstring: str) -> str:
    # Bars that are no substitution: |pi - mu|.
    plain = "".join(
        part if part.startswith("`") else part.replace("|", "\\|")
        for part in re.split(r"(``[^`]+``)", docstring)
    )
    return "\n".join(_Docstring(plain, NAPOLEON).lines())


def _home_module(app: Sphinx | None, module: str, name: str) -> str:
    """Where viewcode finds a name."""
    del app
    place = PLACES.get(f"{module}.{name.partition('.')[0]}")
    return place.rpartition(".")[0] if place else module


def _source(app: Sphinx, module: str) -> tuple[str, dict] | None:
    del app
    return _text_and_tags(module)


@cache
def _text_and_tags(module: str) -> tuple[str, dict] | None:
    """What viewcode asks for: a module's text, and where each name of it begins and ends."""
    found = public_api.load(module, public_api.ROOT)
    if found is None:
        return None
    code = (public_api.ROOT / _file_of(found)).read_text("utf-8")
    return code, dict(_tags(found.tree.body, ""))


def _tags(body: list[ast.stmt], above: str) -> Iterator[tuple[str, tuple[str, int, int]]]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            kind = "class" if isinstance(node, ast.ClassDef) else "def"
            start = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
            assert node.end_lineno is not None
            yield above + node.name, (kind, start, node.end_lineno)
            if isinstance(node, ast.ClassDef):
                yield from _tags(node.body, f"{above}{node.name}.")


def _forget_others(app: Sphinx) -> list[tuple]:
    """The index of modules has those with a page: names of others have none, as of ``torchrl``."""
    modules = getattr(app.env, "_viewcode_modules", {})
    for name in [name for name, found in modules.items() if not found]:
        del modules[name]
    return []


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directive, and tell viewcode where names are defined."""
    app.add_directive("package", Package)
    app.add_directive("entry", Entry)
    app.connect("builder-inited", write_class_pages)
    app.connect("viewcode-follow-imported", _home_module)
    app.connect("viewcode-find-source", _source)
    app.connect("html-collect-pages", _forget_others, priority=100)  # before viewcode writes them
    return {"parallel_read_safe": True, "parallel_write_safe": True}
