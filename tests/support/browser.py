"""A headless Chromium, spoken to in its own protocol (CDP) over a WebSocket: nothing but the browser is needed."""

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
START_S = 30.0
ANSWER_S = 20.0
SETTINGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-extensions",
    "--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-port=0",
)  # fmt: skip


class Tab:
    """One page. `errors` are what its console would show in red, `urls` all that it asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self.urls: list[str] = []
        self._socket = socket
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._number = 0

    async def call(self, method: str, **params: Any) -> Any:
        """A method of the protocol; its result."""
        self._number += 1
        answer = self._calls[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        async with asyncio.timeout(ANSWER_S):
            return await answer

    async def listen(self) -> None:
        """Until the socket is closed."""
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" not in told:
                self._note(told["method"], told["params"])
            elif "error" in told:
                self._calls.pop(told["id"]).set_exception(RuntimeError(told["error"]["message"]))
            else:
                self._calls.pop(told["id"]).set_result(told["result"])

    async def js(self, expression: str) -> Any:
        """Its value, which has to fit into JSON."""
        told = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, condition: str, within_s: float = 20.0) -> None:
        """Wait until an expression is true."""
        try:
            async with asyncio.timeout(within_s):
                while not await self.js(f"Boolean({condition})"):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            seen = await self.js("document.body.innerText")
            raise AssertionError(f"not within {within_s} s: {condition}\n{seen}\n{self.errors}") from None

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def text(self, selector: str) -> list[str]:
        """Of all elements, as it stands in the page."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})].map(one => one.textContent)"
        return list(await self.js(found))

    async def type(self, text: str) -> None:
        """As if by a keyboard, into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int) -> None:
        more = {"text": {"Enter": "\r"}.get(key, key)} if key in ("Enter", " ") else {}
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    async def size(self, width: int, height: int, mobile: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )

    async def scheme(self, name: str) -> None:
        """`light` or `dark`."""
        await self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    async def picture(self) -> bytes:
        """The page as PNG, as much of it as the window shows."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(told["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.urls.append(told["request"]["url"])


@asynccontextmanager
async def tab(directory: Path) -> AsyncIterator[Tab]:
    """A page of a browser of its own, which is gone afterwards with all its processes."""
    assert BINARY is not None
    profile = directory / "chromium"
    profile.mkdir()
    with (directory / "chromium.log").open("wb") as log:
        command = [BINARY, *SETTINGS, f"--user-data-dir={profile}", "about:blank"]
        process = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        port = await _port(profile / "DevToolsActivePort", process, directory / "chromium.log")
        async with aiohttp.ClientSession() as client:
            async with client.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                where = (await answer.json(content_type=None))["webSocketDebuggerUrl"]
            async with client.ws_connect(where, max_msg_size=0) as socket:
                one = Tab(socket)
                listening = asyncio.get_running_loop().create_task(one.listen())
                for domain in ("Page", "Runtime", "Log", "Network"):
                    await one.call(f"{domain}.enable")
                yield one
            await listening
    finally:
        family = [*process.children(recursive=True), process] if process.is_running() else []
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        await asyncio.to_thread(psutil.wait_procs, family, timeout=START_S)


async def _port(file: Path, process: psutil.Popen, log: Path) -> int:
    """It writes down which port it listens on."""
    async with asyncio.timeout(START_S):
        while True:
            assert process.poll() is None, log.read_text()
            if file.exists() and (lines := file.read_text().split()):
                return int(lines[0])
            await asyncio.sleep(0.02)
