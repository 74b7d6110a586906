"""Headless Chromium, driven by playwright: this module alone imports it."""

import asyncio
import contextlib
import importlib.util
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torchrl_envs.concurrency.event_loop import import_aside

from .allowed_hosts import AllowedHosts
from .filtering_proxy import FilteringProxy
from .own_network import SharedNetworkWarning, reason_against, write_launcher

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext


_NAMES: Final = (
    *("chromium", "chromium-browser", "google-chrome-stable", "google-chrome"),
    "microsoft-edge-stable",
)
# No traffic of the browser's own, and none beside the proxy.
CHROMIUM_FLAGS: Final = (
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
        await import_aside("playwright.async_api")
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
