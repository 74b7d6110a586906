"""The sidebar of pages outside the tree of pages, made once for each folder of them.

The theme makes the sidebar of each page anew, from all pages of the tree. On a page that is in no
tree (a class, a source) none of its lines is that page, and its links are those of the folder.
"""

from collections.abc import Callable
from functools import cache, partial
from posixpath import dirname
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

OUTSIDE = ("api/classes/", "_modules/")


def share(
    made: dict[str, Callable[..., str]],
    app: Sphinx,
    page: str,
    template: str,
    context: dict[str, Any],
    tree: nodes.document | None,
) -> None:
    """Let the pages of a folder outside the tree have the sidebar that the first one was given."""
    del template, tree
    if page.startswith(OUTSIDE) and page not in app.env.files_to_rebuild:  # is in no tree
        context["toctree"] = made.setdefault(dirname(page), cache(context["toctree"]))


def setup(app: Sphinx) -> dict[str, bool]:
    """Come before the theme, which asks for the sidebar."""
    app.connect("html-page-context", partial(share, {}), priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
