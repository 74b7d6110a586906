"""Words of the glossary and public names lead to what they mean, once on each page.

Pages are written without these links, as a reader of the files has none of them in the way.
"""

import re
from functools import cache

from docutils import nodes
from public_api import public_names
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

GLOSSARY = "glossary"
# These say too much in plain English to be taken for the word of the glossary wherever they stand.
PLAIN = {
    "actor", "adapter", "age", "batch", "bucket", "checkpoint", "completion", "control",
    "conversation", "demonstration", "draw", "engine", "entry", "environment", "example",
    "frontier", "gap", "generator", "group", "index", "metric", "mode", "owed", "policy",
    "program", "prompt", "push", "query", "rank", "recipe", "record", "reference", "response",
    "return", "reward", "room", "row", "seed", "segment", "sequence", "shard", "signal", "slot",
    "streaming", "teacher", "ticket", "trainer", "transform", "turn", "view", "window",
}  # fmt: skip
CODE = re.compile(r"[A-Za-z_][\w.]*")


def terms(source: str) -> dict[str, str]:
    """The words of the glossary's table to their anchors."""
    rows = re.findall(r"^\| ([^|]+) \| .+ \|$", source, re.MULTILINE)
    return {word: "term-" + word.replace(" ", "-") for word in rows if word not in ("word", "---")}


@cache
def _short_names() -> dict[str, str]:
    homes: dict[str, str] = {}
    for name, definitions in public_names().items():
        homes.setdefault(definitions[0].place, name)
    found: dict[str, str] = {}
    for name, definitions in public_names().items():
        home = homes[definitions[0].place]
        found.setdefault(name, home)
        found.setdefault(name.rpartition(".")[2], home)
    return found


class Links(SphinxTransform):
    """The first time that a page says a word or a public name."""

    default_priority = 700

    def apply(self, **kwargs: object) -> None:  # noqa: ARG002
        page = self.env.docname
        if page.startswith("api/"):
            return
        with open(self.env.doc2path(GLOSSARY), encoding="utf-8") as file:
            words = terms(file.read())
        self._link_names(every=page == "reference")
        if page == GLOSSARY:
            self._mark(words)
        else:
            self.env.note_dependency(str(self.env.doc2path(GLOSSARY)))
            self._link_words({w: a for w, a in words.items() if w not in PLAIN})

    def _mark(self, words: dict[str, str]) -> None:
        for row in self.document.findall(nodes.row):
            if (anchor := words.get(row[0].astext().strip())) is not None:
                row["ids"].append(anchor)
        for word in list(self.document.findall(nodes.emphasis)):
            text = word.astext()
            stems = [text.removesuffix(end) for end in ("", "s", "es", "'s")]
            known = next((stem for stem in stems if stem in words), None)
            if known is not None:
                word.replace_self(
                    nodes.reference("", "", word.deepcopy(), internal=True, refid=words[known])
                )

    def _link_names(self, *, every: bool) -> None:
        names, seen = _short_names(), set()
        for literal in list(self.document.findall(nodes.literal)):
            found = CODE.match(literal.astext())
            home = names.get(found[0].rstrip(".")) if found else None
            rest = literal.astext()[found.end() :] if found else ""
            if home is None or (rest and not rest.startswith("(")):
                continue
            if (home in seen and not every) or _inside_link(literal):
                continue
            seen.add(home)
            link = addnodes.pending_xref(
                "", refdomain="py", reftype="obj", reftarget=home, refexplicit=True,
                refdoc=self.env.docname,
            )  # fmt: skip
            literal.replace_self(link)
            link += literal

    def _link_words(self, words: dict[str, str]) -> None:
        left = list(self.document.findall(nodes.Text))[::-1]
        while words and left:
            text = left.pop()
            if _inside_link(text) or not _in_prose(text):
                continue
            pattern = "|".join(sorted(map(re.escape, words), key=len, reverse=True))
            found = re.search(rf"(?<![\w-])({pattern})s?(?![\w-])", text.astext())
            if found is None:
                continue
            anchor = words.pop(found[1])
            before, after = text.astext()[: found.start()], text.astext()[found.end() :]
            link = addnodes.pending_xref(
                "", nodes.inline("", found[0], classes=["term"]), refdomain="std",
                reftype="term-of-glossary", reftarget=anchor, refdoc=self.env.docname,
            )  # fmt: skip
            rest = nodes.Text(after)
            text.parent.replace(text, [nodes.Text(before), link, rest])
            left.append(rest)


def _inside_link(node: nodes.Node) -> bool:
    while (node := node.parent) is not None:
        if isinstance(node, nodes.reference | addnodes.pending_xref | nodes.title):
            return True
    return False


def _in_prose(text: nodes.Text) -> bool:
    parent = text.parent
    return isinstance(parent, nodes.paragraph) and not isinstance(parent.parent, nodes.entry)


def resolve(app: Sphinx, env: object, node: addnodes.pending_xref, content: nodes.Node) -> object:
    """The glossary's line of a word."""
    del env
    if node.get("reftype") != "term-of-glossary":
        return None
    uri = app.builder.get_relative_uri(node["refdoc"], GLOSSARY)
    return nodes.reference("", "", content, internal=True, refuri=f"{uri}#{node['reftarget']}")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(Links)
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
