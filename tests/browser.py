"""A headless Chromium driven over its DevTools protocol: open a page, ask it, point, click, type.

Nothing but aiohttp, which the collector needs anyway, and the browser that chromium/install.sh
finds or installs. One page at a time; every call waits for the browser's answer.
"""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp

T = TypeVar("T")

INSTALL = Path(__file__).parent / "chromium" / "install.sh"
START_S = 30
FLAGS = [
    "--headless",
    "--no-sandbox",  # root in a container has no other way
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
]


def find_chromium() -> Path:
    """The browser, installed first where there is none."""
    done = subprocess.run([INSTALL], check=True, stdout=subprocess.PIPE, text=True)
    return Path(done.stdout.strip())


class Browser:
    """`errors` are uncaught exceptions, console errors and refused resources of the page;
    `requests` every URL that it asked for."""

    def __init__(self, width: int = 1200, height: int = 900) -> None:
        self.size = (width, height)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self._scripts = True
        self._sent = 0

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        command = [
            str(find_chromium()),
            *FLAGS,
            f"--user-data-dir={self._folder.name}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # it is a script with children: they end with it
        )
        try:
            self._run(self._connect())
        except BaseException:
            self._end_process()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._run(self._disconnect())
        self._end_process()

    def _end_process(self) -> None:
        self._loop.close()
        os.killpg(self._process.pid, signal.SIGKILL)  # or its children still write to the folder
        self._process.wait(timeout=20)
        self._folder.cleanup()

    def open(self, path: Path) -> float:
        """Load a file; seconds until it is drawn, its scripts having run."""
        self.errors.clear()
        self.requests.clear()
        self._loaded.clear()
        start = time.monotonic()
        went = self.send("Page.navigate", url=path.resolve().as_uri())
        if "errorText" in went:
            raise RuntimeError(f"{path}: {went['errorText']}")
        self._run(asyncio.wait_for(self._loaded.wait(), START_S))
        if self._scripts:
            self.ask("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        return time.monotonic() - start

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression; what it throws is raised."""
        got = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in got:
            raise RuntimeError(f"{expression}: {got['exceptionDetails']}")
        return got["result"].get("value")

    def text(self, selector: str) -> str:
        """What a reader sees of an element."""
        return str(self.ask(f"document.querySelector({selector!r}).innerText"))

    def hover(self, selector: str) -> None:
        self._mouse("mouseMoved", selector)

    def click(self, selector: str) -> None:
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._mouse(kind, selector)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def choose(self, selector: str, value: str) -> None:
        """Set a select or an input, as a user would."""
        self.ask(
            f"(() => {{ const e = document.querySelector({selector!r}); e.value = {value!r}; "
            "e.dispatchEvent(new Event('input', {bubbles: true})); "
            "e.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    def prefer(self, scheme: str) -> None:
        """`light` or `dark`."""
        wanted = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=wanted)

    def run_scripts(self, allowed: bool) -> None:
        """Whether pages opened from now on may run scripts."""
        self._scripts = allowed
        self.send("Emulation.setScriptExecutionDisabled", value=not allowed)

    def screenshot(self, path: Path, scale: float = 1) -> None:
        """What is in the window, as PNG."""
        width, height = self.size
        x, y = self.ask("scrollX"), self.ask("scrollY")
        clip = {"x": x, "y": y, "width": width, "height": height, "scale": scale}
        got = self.send("Page.captureScreenshot", format="png", clip=clip)
        path.write_bytes(base64.b64decode(got["data"]))

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol."""
        return self._run(self._send(method, parameters))

    def _mouse(self, kind: str, selector: str) -> None:
        x, y = self.ask(
            f"(() => {{ const e = document.querySelector({selector!r}); "
            "const seen = () => e.getClientRects()[0]; const r = seen(); "
            "if (r.top < 0 || r.bottom > innerHeight) "
            "e.scrollIntoView({block: 'center', behavior: 'instant'}); "
            "const s = seen(); return [s.x + s.width / 2, s.y + s.height / 2]; })()"
        )
        held = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **held)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    async def _connect(self) -> None:
        address = Path(self._folder.name) / "DevToolsActivePort"
        deadline = time.monotonic() + START_S
        while not (address.exists() and address.read_text().count("\n")):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("Chromium did not start")
            await asyncio.sleep(0.02)
        port = address.read_text().split("\n")[0]
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as reply:
            (page,) = [target for target in await reply.json() if target["type"] == "page"]
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
        self._listener = asyncio.create_task(self._listen())
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self._send(f"{domain}.enable", {})
        width, height = self.size  # the window's own size counts frames that are not there
        viewport = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self._send("Emulation.setDeviceMetricsOverride", viewport)

    async def _disconnect(self) -> None:
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)
        await self._session.close()

    async def _send(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._sent += 1
        number = self._sent
        answered = self._answers[number] = self._loop.create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        answer = await asyncio.wait_for(answered, START_S)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    async def _listen(self) -> None:
        async for message in self._socket:
            event = message.json()
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
                continue
            self._note(event["method"], event["params"])

    def _note(self, method: str, event: dict[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Runtime.exceptionThrown":
                self.errors.append(str(event["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if event["type"] in ("error", "warning"):
                self.errors.append(str(event["args"]))
            case "Log.entryAdded" if event["entry"]["level"] in ("error", "warning"):
                self.errors.append(event["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(event["request"]["url"])
