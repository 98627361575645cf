"""A headless Chromium, spoken to over its DevTools protocol: just what tests of a page need."""

import asyncio
import contextlib
import itertools
import shutil
import tempfile
from base64 import b64decode
from pathlib import Path

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-sync",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--mute-audio",
    "--remote-debugging-port=0",
)
START_S = 60.0
CALL_S = 60.0
STOP_S = 10.0
WAIT_S = 30.0
MODIFIERS = {"Shift": 8}
KEYS = {
    "Tab": (9, ""),
    "Enter": (13, "\r"),
    "Escape": (27, ""),
    "Space": (32, " "),
}


def find_chromium():
    """The program, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class BrowserError(Exception):
    """The browser cannot be started, or a script on a page has failed."""


class Browser:
    """One process with a profile of its own; pages come from `page`."""

    def __init__(self, program):
        self._program = program
        self._numbers = itertools.count(1)
        self._answers = {}
        self._pages = {}

    async def __aenter__(self):
        self._folder = tempfile.mkdtemp(prefix="chromium-")
        try:
            self._process = await asyncio.create_subprocess_exec(
                self._program, *FLAGS, f"--user-data-dir={self._folder}", "about:blank",
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            port, path = await self._address()
            self._session = aiohttp.ClientSession()
            self._socket = await self._session.ws_connect(
                f"ws://127.0.0.1:{port}{path}", max_msg_size=0, timeout=aiohttp.ClientWSTimeout(ws_close=STOP_S)
            )
        except BaseException:
            await self._end()
            raise
        self._reading = asyncio.create_task(self._read(), name="browser")
        return self

    async def __aexit__(self, *_):
        with contextlib.suppress(Exception):
            async with asyncio.timeout(STOP_S):
                await self.call("Browser.close")
        self._reading.cancel()
        await asyncio.wait([self._reading])
        await self._socket.close()
        await self._session.close()
        await self._end()

    async def _address(self):
        async with asyncio.timeout(START_S):
            while True:
                if self._process.returncode is not None:
                    raise BrowserError(f"{self._program} ended with status {self._process.returncode}")
                with contextlib.suppress(OSError, ValueError):
                    return self._told()
                await asyncio.sleep(0.05)

    def _told(self):
        port, path = Path(self._folder, "DevToolsActivePort").read_text().split()
        return int(port), path

    async def _end(self):
        process = getattr(self, "_process", None)
        if process is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _read(self):
        async for message in self._socket:
            body = message.json()
            if "id" in body:
                answer = self._answers.pop(body["id"], None)
                if answer is not None and not answer.done():
                    answer.set_result(body)
            elif page := self._pages.get(body.get("sessionId")):
                page.heard(body["method"], body["params"])

    async def call(self, method, session=None, **params):
        """One command; its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self._socket.send_json(message | ({"sessionId": session} if session else {}))
        async with asyncio.timeout(CALL_S):
            body = await answer
        if "error" in body:
            raise BrowserError(f"{method}: {body['error']['message']}")
        return body["result"]

    @contextlib.asynccontextmanager
    async def page(self, *, width=1360, height=900, scheme="light", still=True):
        """A new window, without anything of those before it. `scheme`: what its user prefers."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = (await self.call("Target.createTarget", url="about:blank", browserContextId=context))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = self._pages[session] = Page(self, session)
        try:
            for domain in ("Page", "Runtime", "Network", "Log", "Accessibility", "DOM"):
                await page.call(f"{domain}.enable")
            await page.call(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
            )
            await page.prefer(scheme, still=still)
            yield page
        finally:
            del self._pages[session]
            with contextlib.suppress(BrowserError):
                await self.call("Target.disposeBrowserContext", browserContextId=context)


class Page:
    """One page.

    Attributes:
        requests: addresses that it asked for.
        complaints: errors and warnings of the console, of scripts, and of the browser about the page.
    """

    def __init__(self, browser, session):
        self._browser = browser
        self._session = session
        self.requests = []
        self.complaints = []

    def heard(self, method, params):
        """An event of the browser."""
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(one.get("value", one)) for one in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    async def call(self, method, **params):
        """One command about this page."""
        return await self._browser.call(method, self._session, **params)

    async def prefer(self, scheme, *, still=True):
        """Have the user prefer light or dark, and no motion."""
        motion = "reduce" if still else "no-preference"
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": motion},
        ]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def open(self, url):
        """Go there."""
        result = await self.call("Page.navigate", url=url)
        if result.get("errorText"):
            raise BrowserError(f"{url}: {result['errorText']}")

    async def run(self, script):
        """The value of an expression on the page; a promise is waited for."""
        result = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return result["result"].get("value")

    async def wait(self, script, within_s=WAIT_S):
        """Wait until an expression is true; returns its value."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    with contextlib.suppress(BrowserError):
                        if value := await self.run(script):
                            return value
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"never true: {script}; complaints: {self.complaints}") from None

    async def press(self, key, *modifiers):
        """Press and let go of one key: a name of `KEYS`, or a character."""
        code, text = KEYS.get(key, (ord(key.upper()[0]), key))
        bits = sum(MODIFIERS[one] for one in modifiers)
        given = {"key": " " if key == "Space" else key, "windowsVirtualKeyCode": code, "modifiers": bits}
        await self.call(
            "Input.dispatchKeyEvent",
            type="keyDown" if text else "rawKeyDown",
            **given,
            **({"text": text} if text else {}),
        )
        await self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    async def write(self, text):
        """Type into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def move(self, x, y):
        """Put the pointer there."""
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def click(self, selector):
        """Click into the middle of the first element that fits."""
        where = f"document.querySelector({selector!r})"
        await self.run(f"{where}.scrollIntoView({{block: 'center'}})")
        box = await self.run(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({where}.getBoundingClientRect())")
        await self.move(*box)
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", buttons=1, clickCount=1
            )

    async def nodes(self):
        """What assistive technology is given: role, name and properties of each node that is not ignored."""
        found = (await self.call("Accessibility.getFullAXTree"))["nodes"]
        return [
            {
                "role": node["role"]["value"],
                "name": node.get("name", {}).get("value", ""),
                **{one["name"]: one["value"].get("value") for one in node.get("properties", [])},
            }
            for node in found
            if not node["ignored"] and "role" in node
        ]

    async def screenshot(self, *, whole=True):
        """A PNG of the page."""
        return b64decode((await self.call("Page.captureScreenshot", captureBeyondViewport=whole))["data"])
