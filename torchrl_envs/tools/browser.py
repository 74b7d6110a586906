"""A headless Chromium as tools: started, driven, and read as text."""

import asyncio
import contextlib
import importlib.util
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchrl_data.tool_calls.records import ToolCall
from torchrl_envs.browser.proxy import (
    REFUSED_HEADER,
    AllowedHosts,
    FilteringProxy,
    SharedNetworkWarning,
    reason_against,
    write_launcher,
)
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.tool_source import Job, ToolSource
from torchrl_envs.tool_schemas import schema_tool

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Locator, Page


# What a policy can do in a browser: the schema, and each action on a page.

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


# One headless Chromium, driven by playwright: the only place that imports it.

_NAMES: Final = (
    *("chromium", "chromium-browser", "google-chrome-stable", "google-chrome"),
    "microsoft-edge-stable",
)
# No traffic of the browser's own, and none beside the proxy.
_FLAGS: Final = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-domain-reliability",
    "--disable-quic",
    "--disable-sync",
    "--dns-prefetch-disable",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--no-first-run",
    "--no-pings",
)


def find_chromium(executable_path: str | None = None) -> str:
    """A browser that is installed; nothing is ever downloaded."""
    if importlib.util.find_spec("playwright") is None:
        raise ValueError(
            "The browser is driven by playwright, which is not installed: `pip install playwright` "
            "(`playwright install` is not needed)."
        )
    if (reason := reason_against()) is not None:
        warnings.warn(
            f"The browser shares this machine's network ({reason}): that it reaches the allowed "
            "hosts only depends on Chromium's own settings. Install bubblewrap, and allow "
            "namespaces where this runs in a container.",
            SharedNetworkWarning,
            stacklevel=2,
        )
    if executable_path is not None:
        if not os.path.isfile(executable_path) or not os.access(executable_path, os.X_OK):
            raise ValueError(f"executable_path={executable_path!r} is no program that can be run.")
        return executable_path
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        raise ValueError(
            f"No browser: none of {', '.join(_NAMES)} is on the path. Install one (on Debian "
            "`apt-get install chromium`) or pass executable_path=."
        )
    return found


class Chromium:
    """A browser and its proxy; starts when it is first needed, again after a crash."""

    # It has a network of its own, where there is nothing but the proxy, if that works here. All
    # methods run on one event loop.

    def __init__(self, allowed: AllowedHosts, options: Mapping[str, Any]) -> None:
        self._allowed = allowed
        self._options = dict(options)
        self._starting = asyncio.Lock()
        self._browser: Browser | None = None
        self._parts = contextlib.AsyncExitStack()
        """What has been started of it, to be ended from the last to the first."""

    async def new_context(self) -> "BrowserContext":
        """A fresh profile: no cookies, no cache, no downloads, no service workers."""
        async with self._starting:
            if self._browser is None or not self._browser.is_connected():
                await self.close()
                self._browser = await self._start()
        return await self._browser.new_context(accept_downloads=False, service_workers="block")

    async def _start(self) -> "Browser":
        from playwright.async_api import async_playwright

        proxy = FilteringProxy(self._allowed)
        options = dict(self._options)
        if reason_against() is None:
            folder = tempfile.TemporaryDirectory(prefix="browser-")
            options["executable_path"], socket, url = write_launcher(
                Path(self._parts.enter_context(folder)), options["executable_path"]
            )
            await proxy.start(socket)
        else:
            await proxy.start()
            url = proxy.url
        self._parts.push_async_callback(proxy.close)
        playwright = await self._parts.enter_async_context(async_playwright())
        browser = await playwright.chromium.launch(
            **options,
            proxy={
                "server": url,
                "username": proxy.username,
                "password": proxy.password,
                "bypass": "<-loopback>",
            },
            # Signals belong to the program that this is a part of.
            handle_sigint=False,
            handle_sigterm=False,
            handle_sighup=False,
        )
        self._parts.push_async_callback(browser.close)
        return browser

    async def close(self) -> None:
        """End the browser, its driver and the proxy."""
        self._browser = None
        await self._parts.aclose()


# Gives each rollout a browser.
#
# Shape legend: B rows.

_START_S: Final = 60.0
_CLOSE_S: Final = 15.0
_MAX_PAGES: Final = 8
_MAX_RESULT_BYTES: Final = 16 * 1024
_MIN_RESULT_BYTES: Final = 256


class BrowserTransform(ToolSource):
    """The tool ``browser``: open pages, click, type, read, scroll, in a headless Chromium.

    All rows share one browser; each has a context of its own, with its own cookies and storage,
    from its first call to the end of its episode. Calls of a row run in order, those of different
    rows at once. A link that opens a new page makes it the one that is acted on.

    The browser reaches the allowed hosts only, whatever a page does: all its traffic goes through a
    proxy of this process, which connects to nobody else.

    Args:
        allowed_domains: hosts, see :class:`~torchrl_envs.browser.proxy.AllowedHosts`:
            ``"example.com"`` with its subdomains, ``"127.0.0.1:8000"``, ``"*"`` for all that are
            public.
        headless: without a window.
        timeout_s: deadline of one action, in seconds.
        executable_path: the browser; the first that is installed by default. None is downloaded.
        chromium_sandbox: whether Chromium isolates what renders pages. Root has to say ``False``,
            and then trusts the pages not to break the browser.
        screenshot_dir: where the action ``screenshot`` writes; there is none without it.
        max_result_bytes: longer content of a page is cut, with a mark; bytes of UTF-8.
        show_schemas: whether the chat template shows the tool to the model.

    Raises:
        ValueError: a domain is no host, no browser is installed, playwright is missing, or root
            asks for Chromium's own sandbox.

    Example:
        >>> browser = BrowserTransform(allowed_domains=["example.com"])  # doctest: +SKIP
        >>> env = ChatEnv(batch_size=(8,)).append_transform(browser)  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        allowed_domains: Sequence[str],
        headless: bool = True,
        timeout_s: float = 30.0,
        executable_path: str | None = None,
        chromium_sandbox: bool = True,
        screenshot_dir: str | Path | None = None,
        max_result_bytes: int = _MAX_RESULT_BYTES,
        show_schemas: bool = True,
    ) -> None:
        super().__init__(
            timeout_s=timeout_s, max_result_bytes=max_result_bytes, show_schemas=show_schemas
        )
        if max_result_bytes < _MIN_RESULT_BYTES:
            raise ValueError(
                f"BrowserTransform: max_result_bytes must be at least {_MIN_RESULT_BYTES}, got "
                f"{max_result_bytes!r}."
            )
        self.allowed = AllowedHosts(allowed_domains)
        if chromium_sandbox and os.geteuid() == 0:
            raise ValueError(
                "Chromium's own sandbox does not work for root. Run as an ordinary user, or pass "
                "chromium_sandbox=False if you accept that a page that breaks the renderer can do "
                "what root can do."
            )
        self.screenshot_dir = None if screenshot_dir is None else Path(screenshot_dir)
        self._options: dict[str, Any] = {
            "executable_path": find_chromium(executable_path),
            "headless": headless,
            "chromium_sandbox": chromium_sandbox,
            "args": list(_FLAGS),
            "timeout": _START_S * 1000,
        }
        schema = browser_schema(screenshots=screenshot_dir is not None)
        self._offered = {"browser": schema_tool(schema)}
        self._num_screenshots = 0
        self._browser: Chromium | None = None

    # Tool ---------------------------------------------------------------------------------------

    def begin(self, episode: Episode) -> None:
        """Have a context for the episode, which is opened when it is first needed."""
        visit = _Visit()
        episode.resources.add(self, visit, close=visit.close, timeout_s=_START_S)

    def bind(self, episode: Episode, call: ToolCall) -> Job:
        """A call of ``browser``."""
        visit: _Visit = episode.resources.get(self)

        async def act() -> dict[str, Any] | str:
            try:
                page = await self._page(visit)
                try:
                    async with asyncio.timeout(self.timeout_s):
                        # What an action waits for ends before the deadline that closes the page.
                        return await act_on(
                            page,
                            call.arguments,
                            self.allowed,
                            timeout_ms=800 * self.timeout_s,
                            max_bytes=self.max_result_bytes,
                            screenshot=self._next_screenshot(episode.row, call),
                        )
                except TimeoutError as error:
                    await visit.close()
                    late = f"the page did not answer within {self.timeout_s:g} s and was closed"
                    raise BrowserActionError(late) from error
            except BrowserActionError:
                raise
            except Exception as error:
                # Without playwright's log of what it tried.
                text = str(error).split("\nCall log:")[0].strip()
                raise BrowserActionError(text or type(error).__name__) from error

        job = self.job(call, act, lane=episode.id)
        return job._replace(timeout_s=self.timeout_s + _START_S + _CLOSE_S)

    def _next_screenshot(self, row: int, call: ToolCall) -> Path | None:
        """Where the call writes a screenshot, if it does."""
        if call.arguments["action"] != "screenshot":
            return None
        assert self.screenshot_dir is not None
        self.screenshot_dir.mkdir(parents=True, exist_ok=True)
        self._num_screenshots += 1
        return self.screenshot_dir / f"{self._num_screenshots:06d}-row{row}.png"

    async def _page(self, visit: "_Visit") -> "Page":
        """The page that an episode sees: the one that was opened last."""
        if self._browser is None:
            self._browser = Chromium(self.allowed, self._options)
        context = visit.context
        if context is None or not _is_alive(context):
            context = visit.context = await self._browser.new_context()
        pages = context.pages
        for extra in pages[1 : len(pages) - _MAX_PAGES + 1]:
            await extra.close()
        return pages[-1] if pages else await context.new_page()

    # Lifecycle ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the browser."""
        browser, self._browser = self._browser, None
        if browser is not None:
            ((outcome,),) = self.calls.run([[browser.close]], _START_S)
            if outcome.error is not None:
                raise RuntimeError("The browser could not be closed") from outcome.error


@dataclass(eq=False)
class _Visit:
    """The context of one episode, while there is one."""

    context: "BrowserContext | None" = None

    async def close(self) -> None:
        context, self.context = self.context, None
        if context is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_S):
                await context.close()
        except Exception:
            if _is_alive(context):  # else it went with its browser
                raise


def _is_alive(context: "BrowserContext") -> bool:
    return context.browser is not None and context.browser.is_connected()
