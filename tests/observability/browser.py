"""A real headless Chromium, driven over its DevTools protocol: open a page, run scripts in it, take pictures."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 120


def find_browser() -> str | None:
    """The path of an installed Chromium, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Tab:
    """One page of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session: str):
        self._socket, self._session, self._numbers = socket, session, itertools.count(100)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol and its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "sessionId": self._session, "method": method, "params": parameters})
        return await answer_to(self._socket, number)

    async def evaluate(self, script: str) -> Any:
        """The value of `script`, the body of an async function, run in the page. Raises what it throws."""
        wrapped = f"(async () => {{ {script} }})()"
        done = await self.call("Runtime.evaluate", expression=wrapped, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"])
        return done["result"].get("value")

    async def open(self, page: Path, script: str = "") -> None:
        """Go to a file; returns when it is loaded. `script` runs in it before anything of its own."""
        await self.call("Page.enable")
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=script)
        await self.call("Page.navigate", url=page.resolve().as_uri())
        while (await self._socket.receive_json()).get("method") != "Page.loadEventFired":
            pass

    async def screenshot(self, picture: Path) -> None:
        """The window's content as a PNG file."""
        done = await self.call("Page.captureScreenshot", format="png")
        picture.write_bytes(base64.b64decode(done["data"]))


async def answer_to(socket: aiohttp.ClientWebSocketResponse, number: int) -> dict[str, Any]:
    """The result of command `number`; events in between are passed over."""
    while True:
        message = await socket.receive_json()
        if message.get("id") == number:
            if "error" in message:
                raise RuntimeError(message["error"])
            return message["result"]


@contextlib.asynccontextmanager
async def tab(profile: Path, *, width: int = 1500, height: int = 1400) -> AsyncIterator[Tab]:
    """A fresh browser with an empty page; `profile` is a folder for what it writes."""
    browser = find_browser()
    assert browser, f"the report is looked at in Chromium, and there is none here (one of {', '.join(NAMES)})"
    switches = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0")
    process = await asyncio.create_subprocess_exec(
        browser, *switches, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(SECONDS), aiohttp.ClientSession() as client:
            assert process.stderr
            while b"DevTools listening on " not in (line := await process.stderr.readline()):
                assert line, "Chromium ended before it listened"
            address = line.decode().split()[-1]
            async with client.ws_connect(address, max_msg_size=0) as socket:
                await socket.send_json({"id": 1, "method": "Target.getTargets"})
                targets = (await answer_to(socket, 1))["targetInfos"]
                target = next(target["targetId"] for target in targets if target["type"] == "page")
                attach = {"targetId": target, "flatten": True}
                await socket.send_json({"id": 2, "method": "Target.attachToTarget", "params": attach})
                yield Tab(socket, (await answer_to(socket, 2))["sessionId"])
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
