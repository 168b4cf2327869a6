"""A headless Chromium over its debugging pipe: what a page looks like, asks of the network and complains of."""

import base64
import fcntl
import json
import os
import shutil
import signal
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
    "--hide-scrollbars",
)


def find_browser() -> str | None:
    """The program, or None where there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@dataclass
class Page:
    """What was seen of a page: sizes in CSS pixels, requests beside the page itself, complaints."""

    width: int
    scroll_width: int
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    screenshot: bytes = b""
    ground: str = ""


class Browser:
    """A context manager; one process, one page at a time."""

    def __enter__(self) -> Self:
        program = find_browser()
        assert program is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # Away from 3 and 4, which the browser reads and writes.
        high_in, high_out = (fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (theirs_in, theirs_out))
        nothing = os.open(os.devnull, os.O_RDWR)
        actions = [
            *((os.POSIX_SPAWN_DUP2, nothing, place) for place in (0, 1, 2)),
            (os.POSIX_SPAWN_DUP2, high_in, 3),
            (os.POSIX_SPAWN_DUP2, high_out, 4),
        ]
        arguments = [program, *_ARGUMENTS, f"--user-data-dir={self._profile.name}"]
        self._pid = os.posix_spawn(program, arguments, os.environ, file_actions=actions, setpgroup=0)
        for fd in (theirs_in, theirs_out, high_in, high_out, nothing):
            os.close(fd)
        self._rest = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def look_at(
        self, path: Path, *, width: int, height: int = 900, dark: bool = False, picture: bool = True
    ) -> Page:
        """Load a file, open everything that can be opened, and measure; a picture of a long page takes seconds."""
        target = self._tab()
        sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", sizes)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", {"features": [scheme]})
        self._load(path)
        self._value("document.querySelectorAll('details').forEach(d => d.open = true)")
        page = Page(self._value("innerWidth"), self._value("document.documentElement.scrollWidth"))
        if picture:
            shot = self._ask("Page.captureScreenshot", {"captureBeyondViewport": True})
            page.screenshot = base64.b64decode(shot["data"])
        page.ground = self._value("getComputedStyle(document.body).backgroundColor")
        for event in self._events:
            _note(event, page, path.as_uri())
        self._close(target)
        return page

    def _tab(self) -> str:
        target: str = self._ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._ask("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")
        return target

    def _load(self, path: Path) -> None:
        self._events.clear()
        self._ask("Page.navigate", {"url": path.as_uri()})
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._read()

    def _close(self, target: str) -> None:
        self._session = ""
        self._ask("Target.closeTarget", {"targetId": target})

    _session = ""

    def _value(self, expression: str) -> Any:
        return self._ask("Runtime.evaluate", {"expression": expression})["result"].get("value")

    def _ask(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        self._number += 1
        request: dict[str, Any] = {"id": self._number, "method": method, "params": parameters or {}}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._out, json.dumps(request).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == self._number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._in, 1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._events.append(message)
        return message


def _note(event: dict[str, Any], page: Page, own: str) -> None:
    given = event["params"]
    if event["method"] == "Network.requestWillBeSent" and given["request"]["url"] != own:
        page.requests.append(given["request"]["url"])
    elif event["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
        page.complaints.append(json.dumps(given))
