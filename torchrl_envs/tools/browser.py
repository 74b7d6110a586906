"""Browser for each rollout, with its actions as a tool.

Shape legend: B rows.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchrl_data.tool_calls.records import ToolCall
from torchrl_envs.browser.actions import BrowserActionError, act_on, browser_schema
from torchrl_envs.browser.allowed_hosts import AllowedHosts
from torchrl_envs.browser.chromium import CHROMIUM_FLAGS, Chromium, find_chromium
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.tool_source import Job, ToolSource
from torchrl_envs.tool_schemas import schema_tool

if TYPE_CHECKING:
    from playwright.async_api import BrowserContext, Page


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
        allowed_domains: hosts, see :class:`~torchrl_envs.browser.allowed_hosts.AllowedHosts`:
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
            "args": list(CHROMIUM_FLAGS),
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
        """Return where the call writes a screenshot, if it does."""
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
