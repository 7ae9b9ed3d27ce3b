"""A headless Chromium for tests, driven by its own DevTools protocol over aiohttp: no driver and no further package."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

START_S = 60.0
CALL_S = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. ``errors``: what the console or the program complained about."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future] = {}
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            document = json.loads(message.data)
            if "id" in document:
                self._answers.pop(document["id"]).set_result(document)
            elif document["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(document["params"]["exceptionDetails"]))
            elif document["method"] == "Log.entryAdded" and document["params"]["entry"]["level"] == "error":
                self.errors.append(document["params"]["entry"]["text"])
            elif document["method"] == "Runtime.consoleAPICalled" and document["params"]["type"] in ("error", "assert"):
                self.errors.append(str(document["params"]["args"]))
            elif document["method"] == "Network.requestWillBeSent":
                self.requests.append(document["params"]["request"]["url"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(self._answers[number], CALL_S)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    async def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, condition: str) -> None:
        """Waits until a JavaScript condition holds."""
        deadline = asyncio.get_running_loop().time() + CALL_S
        while not await self.run(f"Boolean({condition})"):
            assert asyncio.get_running_loop().time() < deadline, f"never: {condition}; errors {self.errors}"
            await asyncio.sleep(0.05)

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.body && document.body.dataset.ready === 'true'")

    async def size(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    async def prefer(self, scheme: str) -> None:
        """`light` or `dark`, before the page is opened; nothing moves by itself, so that clicks hit."""
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        named = [{"name": name, "value": value} for name, value in features.items()]
        await self.call("Emulation.setEmulatedMedia", features=named)

    async def click(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """A real click at a place within the first element that matches, given as shares of its size."""
        place = await self.run(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            " node.scrollIntoView({block: 'center', behavior: 'instant'}); const box = node.getBoundingClientRect();"
            f" return [box.left + {x} * box.width, box.top + {y} * box.height]; }})()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            await self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    async def screenshot(self, path: Path, *, whole: bool = True) -> None:
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextlib.asynccontextmanager
async def browser_page(executable: str) -> AsyncIterator[Page]:
    """A tab of a browser of its own, which ends with it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        arguments = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-breakpad"),
            *("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
        ]
        process = await asyncio.create_subprocess_exec(
            executable, *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            port = await _port(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    targets = await answer.json()
                url = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
                async with session.ws_connect(url, max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await page.call(f"{domain}.enable")
                    await page.prefer("light")
                    yield page
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _port(path: Path) -> int:
    deadline = asyncio.get_running_loop().time() + START_S
    while not (path.exists() and path.read_text().strip()):
        assert asyncio.get_running_loop().time() < deadline, "the browser did not start"
        await asyncio.sleep(0.05)
    return int(path.read_text().splitlines()[0])
