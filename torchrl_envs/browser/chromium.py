"""One headless Chromium, driven by playwright: the only place that imports it."""

import asyncio
import importlib.util
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .allowed_hosts import AllowedHosts
from .filtering_proxy import FilteringProxy
from .own_network import SharedNetworkWarning, reason_against, write_launcher

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Playwright

_NAMES: Final = (
    "chromium",
    "chromium-browser",
    "google-chrome-stable",
    "google-chrome",
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
    warn_of_shared_network()
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


def check_chromium_sandbox(chromium_sandbox: bool) -> None:
    """Chromium's own sandbox does not work for root."""
    if chromium_sandbox and os.geteuid() == 0:
        raise ValueError(
            "Chromium's own sandbox does not work for root. Run as an ordinary user, or pass "
            "chromium_sandbox=False if you accept that a page that breaks the renderer can do what "
            "root can do."
        )


def warn_of_shared_network() -> None:
    """Say so if a browser can't have a network of its own here."""
    reason = reason_against()
    if reason is not None:
        warnings.warn(
            f"The browser shares this machine's network ({reason}): that it reaches the allowed "
            "hosts only depends on Chromium's own settings. Install bubblewrap, and allow "
            "namespaces where this runs in a container.",
            SharedNetworkWarning,
            stacklevel=3,
        )


class Chromium:
    """A browser and its proxy; starts when it is first needed, again after a crash."""

    # It has a network of its own, where there is nothing but the proxy, if that works here. All
    # methods run on one event loop.

    def __init__(
        self,
        allowed: AllowedHosts,
        *,
        executable_path: str,
        headless: bool,
        chromium_sandbox: bool,
        start_timeout_s: float,
    ) -> None:
        self._allowed = allowed
        self._options: dict[str, Any] = {
            "executable_path": executable_path,
            "headless": headless,
            "chromium_sandbox": chromium_sandbox,
            "args": list(_FLAGS),
            "timeout": start_timeout_s * 1000,
        }
        self._starting: asyncio.Lock | None = None
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self._proxy: FilteringProxy | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    async def new_context(self) -> "BrowserContext":
        """A fresh profile: no cookies, no cache, no downloads, no service workers."""
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._browser is None or not self._browser.is_connected():
                await self.close()
                await self._start()
        assert self._browser is not None
        return await self._browser.new_context(accept_downloads=False, service_workers="block")

    async def _start(self) -> None:
        from playwright.async_api import async_playwright

        self._proxy = FilteringProxy(self._allowed)
        options = dict(self._options)
        if reason_against() is None:
            self._folder = tempfile.TemporaryDirectory(prefix="browser-")
            options["executable_path"], socket, url = write_launcher(
                Path(self._folder.name), options["executable_path"]
            )
            await self._proxy.start(socket)
        else:
            await self._proxy.start()
            url = self._proxy.url
        self._playwright = await async_playwright().start()
        self._browser = await self._playwright.chromium.launch(
            **options,
            proxy={
                "server": url,
                "username": self._proxy.username,
                "password": self._proxy.password,
                "bypass": "<-loopback>",
            },
            # Signals belong to the program that this is a part of.
            handle_sigint=False,
            handle_sigterm=False,
            handle_sighup=False,
        )

    async def close(self) -> None:
        """End the browser, its driver and the proxy."""
        browser, self._browser = self._browser, None
        playwright, self._playwright = self._playwright, None
        proxy, self._proxy = self._proxy, None
        folder, self._folder = self._folder, None
        try:
            if browser is not None:
                await browser.close()
        finally:
            if playwright is not None:
                await playwright.stop()
            if proxy is not None:
                await proxy.close()
            if folder is not None:
                folder.cleanup()
