"""What of a distribution's metadata follows from the project's address: its links.

``address`` of ``[tool.hatch.metadata.hooks.custom]`` in ``pyproject.toml`` is where the repository
is shown, as GitHub, GitLab and Gitea show one: files below ``/blob/<tag>/``, what they hold below
``/raw/<tag>/``. With it a distribution has URLs, and its description, the README, whole links;
without it neither.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK_OR_CODE = re.compile(
    r"^```.*?^```$|`(?:[^`\n]|\n(?!\n))+`"
    r"|(!?)\[((?:[^][]|\[[^]]*\]\([^)]*\))*)\]\((?![a-z]+:|#)([^)\s]+)\)",
    re.MULTILINE | re.DOTALL,
)
"""``[text](path)`` and ``![text](path)`` of a checkout, whose text may hold an image or code; or
code, which holds no link."""


class Address(MetadataHookInterface):
    """Sets ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Write both into the metadata, which has the version.

        Raises:
            ValueError: the address is no URL.
        """
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        if address := self.config["address"].rstrip("/"):
            if not re.fullmatch(r"https?://[^/\s]+(/[^/\s?#]+)+", address):
                raise ValueError(
                    f"pyproject.toml: address={address!r} is no place of a repository, such as "
                    "https://host/owner/name. Leave it empty until there is one."
                )
            tag = f"v{metadata['version']}"
            text = absolute(text, address, tag)
            metadata["urls"] = {
                "Homepage": address,
                "Documentation": f"{address}/blob/{tag}/docs/index.md",
                "Changelog": f"{address}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, address: str, tag: str) -> str:
    """Markdown whose links to files of the repository are whole.

    Args:
        text: the Markdown, with paths as in the repository's own folder.
        address: of the repository.
        tag: names the commit that is shown.
    """

    def whole(found: re.Match[str]) -> str:
        if found[3] is None:  # code
            return found[0]
        kind = "raw" if found[1] else "blob"
        inside = LINK_OR_CODE.sub(whole, found[2])
        return f"{found[1]}[{inside}]({address}/{kind}/{tag}/{found[3]})"

    return LINK_OR_CODE.sub(whole, text)
