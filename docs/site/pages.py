"""Pages that stand elsewhere in the repository, links that lead there, and drawings.

A page of the site whose text is a file outside ``docs/`` is a file here with the path of that file
in a comment, and what the site has below it. Links of all pages are those of a checkout; on the
site a link to such a file leads to its page, and a link to other files of the repository to their
text. An SVG drawing becomes part of the page, so that its colours follow the page's light or dark.
"""

import os
import posixpath
import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).parents[2]
STUB = re.compile(r"^<!-- the text of (\S+) -->\n")
LINK = re.compile(r"(?<!!)\[([^][]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r"(!\[[^][]*\]\()(?!https?:)([^)\s]+)(\))")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def stubs(docs: Path) -> dict[str, str]:
    """The page of each file outside ``docs/``: paths in the repository to names of pages."""
    found = {}
    for path in docs.rglob("*.md"):
        with path.open(encoding="utf-8") as file:
            if said := STUB.match(file.readline()):
                found[said[1]] = path.relative_to(docs).with_suffix("").as_posix()
    return {"README.md": "index", **found}


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the text of a stub in its place, and make links those of the site."""
    path = Path(app.env.doc2path(docname))
    if path.suffix != ".md":
        return
    folder = path.parent
    if said := STUB.match(source[0]):
        source[0] = (ROOT / said[1]).read_text("utf-8") + source[0][said.end() :]
        folder = (ROOT / said[1]).parent
        app.env.note_dependency(str(ROOT / said[1]))
    pages = stubs(Path(app.srcdir))

    here = posixpath.dirname(docname)

    def inside(written: str) -> str | None:
        """The path in the repository, if there is such a file."""
        target = Path(os.path.normpath(folder / written))
        there = target.is_relative_to(ROOT) and target.exists()
        return target.relative_to(ROOT).as_posix() if there else None

    def linked(found: re.Match) -> str:
        words, written, place = found[1], found[2], found[3] or ""
        name = inside(written)
        if name is None:
            return found[0]
        page = pages.get(name) or pages.get(f"{name}/README.md")
        if page is None and (ROOT / name).is_dir():
            return words
        target = f"docs/{page}.md" if page else name
        return f"[{words}]({posixpath.relpath(target, posixpath.join('docs', here))}{place})"

    def shown(found: re.Match) -> str:
        name = inside(found[2])
        if name is None:
            return found[0]
        return f"{found[1]}{posixpath.relpath(name, posixpath.join('docs', here))}{found[3]}"

    source[0] = "".join(
        part if part.startswith("```") else IMAGE.sub(shown, LINK.sub(linked, part))
        for part in FENCE.split(source[0])
    )


class Drawings(SphinxTransform):
    """SVG files stand in the page itself."""

    default_priority = 100

    def apply(self, **kwargs: object) -> None:  # noqa: ARG002
        for image in list(self.document.findall(nodes.image)):
            if not image["uri"].endswith(".svg"):
                continue
            path, _ = self.env.relfn2path(image["uri"], self.env.docname)
            file = Path(self.env.srcdir) / path
            self.env.note_dependency(str(file))
            svg = file.read_text("utf-8")
            label = image.get("alt", "").replace('"', "&quot;")
            start = f'<div class="drawing" role="img" aria-label="{label}" tabindex="0">'
            image.replace_self(nodes.raw("", f"{start}{svg}</div>", format="html"))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", read)
    app.add_transform(Drawings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
