"""Every link inside the built site leads to a page that is there, and to a place on it."""

import os
import re
from pathlib import Path
from urllib.parse import unquote

from sphinx.application import Sphinx
from sphinx.util import logging

LINK = re.compile(r'\s(?:href|src)="([^"]*)"')
PLACE = re.compile(r'\s(?:id|name)="([^"]*)"')
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)
_log = logging.getLogger(__name__)


def broken(folder: Path) -> list[str]:
    """What leads nowhere: ``page: link``, each once."""
    there = {os.path.join(top, name) for top, _, names in os.walk(folder) for name in names}
    texts = {str(path): path.read_text("utf-8") for path in sorted(folder.rglob("*.html"))}
    places = {path: set(PLACE.findall(text)) for path, text in texts.items()}
    found: dict[str, None] = {}
    for path, text in texts.items():
        for link in dict.fromkeys(LINK.findall(text)):
            if ELSEWHERE.match(link):
                continue
            file, _, place = unquote(link.replace("&amp;", "&")).partition("#")
            file = file.partition("?")[0]
            target = os.path.normpath(os.path.join(os.path.dirname(path), file)) if file else path
            known = places.get(target)
            is_there = target in there or os.path.isdir(target)
            if not is_there or (place and known is not None and place not in known):
                found[f"{os.path.relpath(path, folder)}: {link}"] = None
    return list(found)


def _check(app: Sphinx, failure: Exception | None) -> None:
    if failure is None and app.builder.format == "html":
        for each in broken(Path(app.outdir)):
            _log.warning("a link leads nowhere: %s", each)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", _check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
