"""Actions of a policy in a browser: their schema, and what each does on a page."""

from collections.abc import Mapping
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
    needs = [("action", name, _REQUIRED[name]) for name in actions if _REQUIRED[name]]
    conditions = [
        {
            "if": {"properties": {key: {"const": value}}, "required": [key]},
            "then": {"required": required},
        }
        for key, value, required in [*needs, ("extract_type", "attribute", ["attribute"])]
    ]
    parameters = {
        "type": "object",
        "properties": {"action": action, **_PROPERTIES},
        "required": ["action"],
        "allOf": conditions,
    }
    about = "Open web pages, read them and act on them. What is open stays open between calls."
    function = {"name": "browser", "description": about, "parameters": parameters}
    return {"type": "function", "function": function}


async def act_on(
    page: "Page",
    arguments: Mapping[str, Any],
    allowed: AllowedHosts,
    *,
    timeout_ms: float,
    max_bytes: int,
    screenshot: Path | None = None,
) -> dict[str, Any] | str:
    """Do on a page what arguments that fit the schema say; a screenshot becomes a PNG."""
    element, more = page.locator(arguments.get("selector", "body")).first, dict[str, Any]()
    match arguments["action"]:
        case "screenshot":
            await page.screenshot(path=screenshot, timeout=timeout_ms)
            return {"path": str(screenshot)}
        case "extract":
            return await _extracted(element, arguments, timeout_ms, max_bytes)
        case "navigate":
            more["status"] = await _navigate(page, arguments["url"], allowed, timeout_ms)
        case "click":
            before = len(page.context.pages)
            await element.click(timeout=timeout_ms)
            for _ in range(_NUM_LOOKS):
                await page.wait_for_timeout(_LOOK_MS)
                if len(page.context.pages) > before:
                    page = page.context.pages[-1]
                    break
            await page.wait_for_load_state("domcontentloaded", timeout=timeout_ms)
        case "type":
            await element.fill(arguments["text"], timeout=timeout_ms)
        case "scroll":
            more["scrolled_to"] = await page.evaluate(
                "pixels => { window.scrollBy(0, pixels); return window.scrollY }",
                arguments["scroll_amount"],
            )
    return {"url": page.url, "title": (await page.title())[:200], **more}


async def _navigate(page: "Page", url: str, allowed: AllowedHosts, timeout_ms: float) -> int | None:
    """Open an address, and give the status that its server answered with."""
    if (refusal := allowed.refusal(url)) is not None:
        raise BrowserActionError(refusal)
    response = await page.goto(url, timeout=timeout_ms)
    if response is None:
        return None
    refused = (await response.all_headers()).get(REFUSED_HEADER)
    if refused is not None:
        raise BrowserActionError(
            f"{url!r:.200} leads to {refused}, which is not allowed; the allowed domains are "
            f"{list(allowed.domains)}"
        )
    return response.status


async def _extracted(
    element: "Locator", arguments: Mapping[str, Any], timeout_ms: float, max_bytes: int
) -> str:
    """The content of an element, cut with a mark where it is too long."""
    await element.wait_for(state="attached", timeout=timeout_ms)
    # Cut in the page, so that a huge one is never sent here.
    script = {
        "text": "(e, [n]) => e.innerText === undefined ? e.textContent : e.innerText",
        "html": "(e, [n]) => e.innerHTML",
        "attribute": "(e, [n, name]) => e.getAttribute(name)",
    }[arguments.get("extract_type", "text")]
    content = await element.evaluate(
        f"(e, a) => {{ const c = ({script})(e, a); "
        "return c === null ? null : [c.slice(0, a[0]), c.length] }",
        [max_bytes, arguments.get("attribute")],
        timeout=timeout_ms,
    )
    if content is None:
        raise BrowserActionError(f"the element has no attribute {arguments['attribute']!r}")
    text, length = content
    data = text.encode("utf-8", errors="replace")
    if length <= max_bytes and len(data) <= max_bytes:
        return text
    shown = data[: max_bytes - _MARK_BYTES].decode("utf-8", errors="ignore")
    return f"{shown}\n[... {length - len(shown)} more characters were cut]"
