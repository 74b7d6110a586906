"""What a policy can do in a browser: the schema, and each action on a page."""

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .allowed_hosts import AllowedHosts
from .filtering_proxy import REFUSED_HEADER

if TYPE_CHECKING:
    from playwright.async_api import Locator, Page

_PROPERTIES: Final[dict[str, dict[str, Any]]] = {
    "url": {"type": "string", "description": "Address to open, for navigate."},
    "selector": {
        "type": "string",
        "description": "CSS selector of an element, for click, type and extract.",
    },
    "text": {"type": "string", "description": "Text to put into a field, for type."},
    "scroll_amount": {
        "type": "integer",
        "description": "Pixels to scroll down, negative for up, for scroll.",
    },
    "extract_type": {
        "type": "string",
        "enum": ["text", "html", "attribute"],
        "description": "What to read, for extract: text (default), html or attribute.",
    },
    "attribute": {
        "type": "string",
        "description": "Name of the attribute, for extract with extract_type attribute.",
    },
}
_REQUIRED: Final = {
    "navigate": ["url"],
    "click": ["selector"],
    "type": ["selector", "text"],
    "extract": [],
    "scroll": ["scroll_amount"],
    "screenshot": [],
}


_MARK_BYTES: Final = 64
"""Room for the mark where content was cut."""


_NUM_LOOKS: Final = 5
_LOOK_MS: Final = 50.0
"""A click's effects, a new page above all, come a moment after it."""


class BrowserActionError(Exception):
    """An action could not be done; the message is for the model."""


def browser_schema(*, screenshots: bool) -> dict[str, Any]:
    """The tool ``browser`` as chat templates show it."""
    actions = [name for name in _REQUIRED if screenshots or name != "screenshot"]
    action = {"type": "string", "enum": actions, "description": "What to do."}
    conditions = [
        {
            "if": {"properties": {"action": {"const": name}}, "required": ["action"]},
            "then": {"required": _REQUIRED[name]},
        }
        for name in actions
        if _REQUIRED[name]
    ]
    conditions.append(
        {
            "if": {
                "properties": {"extract_type": {"const": "attribute"}},
                "required": ["extract_type"],
            },
            "then": {"required": ["attribute"]},
        }
    )
    return {
        "type": "function",
        "function": {
            "name": "browser",
            "description": "Open web pages, read them and act on them. "
            "What is open stays open between calls.",
            "parameters": {
                "type": "object",
                "properties": {"action": action, **_PROPERTIES},
                "required": ["action"],
                "allOf": conditions,
            },
        },
    }


class PageActions:
    """Acts on a page."""

    def __init__(
        self, page: "Page", allowed: AllowedHosts, *, timeout_s: float, max_bytes: int
    ) -> None:
        self._page = page
        self._allowed = allowed
        self._timeout_ms = timeout_s * 1000
        self._max_bytes = max_bytes

    async def run(self, arguments: Mapping[str, Any]) -> dict[str, Any] | str:
        """Do what arguments that fit the schema say."""
        actions: dict[str, Callable[[Mapping[str, Any]], Awaitable[dict[str, Any] | str]]] = {
            "navigate": self._navigate,
            "click": self._click,
            "type": self._type,
            "extract": self._extract,
            "scroll": self._scroll,
        }
        return await actions[arguments["action"]](arguments)

    async def screenshot(self, path: Path) -> dict[str, Any]:
        """Write what is visible as a PNG."""
        await self._page.screenshot(path=path, timeout=self._timeout_ms)
        return {"path": str(path)}

    async def _navigate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        url = arguments["url"]
        refusal = self._allowed.refusal(url)
        if refusal is not None:
            raise BrowserActionError(refusal)
        response = await self._page.goto(url, timeout=self._timeout_ms)
        if response is not None:
            refused = (await response.all_headers()).get(REFUSED_HEADER)
            if refused is not None:
                raise BrowserActionError(
                    f"{url!r:.200} leads to {refused}, which is not allowed; the allowed domains "
                    f"are {list(self._allowed.domains)}"
                )
        return {**await self._where(), "status": response.status if response else None}

    async def _click(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        before = len(self._page.context.pages)
        await self._find(arguments).click(timeout=self._timeout_ms)
        for _ in range(_NUM_LOOKS):
            await self._page.wait_for_timeout(_LOOK_MS)
            if len(self._page.context.pages) > before:
                self._page = self._page.context.pages[-1]
                break
        await self._page.wait_for_load_state("domcontentloaded", timeout=self._timeout_ms)
        return await self._where()

    async def _type(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        await self._find(arguments).fill(arguments["text"], timeout=self._timeout_ms)
        return await self._where()

    async def _scroll(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        top = await self._page.evaluate(
            "pixels => { window.scrollBy(0, pixels); return window.scrollY }",
            arguments["scroll_amount"],
        )
        return {**await self._where(), "scrolled_to": top}

    async def _extract(self, arguments: Mapping[str, Any]) -> str:
        element = self._find(arguments)
        kind = arguments.get("extract_type", "text")
        await element.wait_for(state="attached", timeout=self._timeout_ms)
        # Cut in the page, so that a huge one is never sent here.
        script = {
            "text": "(e, [n]) => e.innerText === undefined ? e.textContent : e.innerText",
            "html": "(e, [n]) => e.innerHTML",
            "attribute": "(e, [n, name]) => e.getAttribute(name)",
        }[kind]
        content = await element.evaluate(
            f"(e, a) => {{ const c = ({script})(e, a); "
            "return c === null ? null : [c.slice(0, a[0]), c.length] }",
            [self._max_bytes, arguments.get("attribute")],
            timeout=self._timeout_ms,
        )
        if content is None:
            raise BrowserActionError(f"the element has no attribute {arguments['attribute']!r}")
        text, length = content
        data = text.encode("utf-8", errors="replace")
        if length <= self._max_bytes and len(data) <= self._max_bytes:
            return text
        shown = data[: self._max_bytes - _MARK_BYTES].decode("utf-8", errors="ignore")
        return f"{shown}\n[... {length - len(shown)} more characters were cut]"

    def _find(self, arguments: Mapping[str, Any]) -> "Locator":
        return self._page.locator(arguments.get("selector", "body")).first

    async def _where(self) -> dict[str, Any]:
        return {"url": self._page.url, "title": (await self._page.title())[:200]}
