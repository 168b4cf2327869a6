"""A headless Chromium: how wide pages are, their ground, what they ask of the network, and what they complain of.

Each page stands in a frame of its own, with a script that reports on it; one process looks at all of them.
"""

import html
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_LISTEN = """<script>{
  const complaints = [], note = one => complaints.push(String(one.message || one.target?.outerHTML || one));
  addEventListener('error', note, true);
  console.error = console.warn = note;
  addEventListener('load', () => setTimeout(() => {
    document.querySelectorAll('details').forEach(one => one.open = true);
    const root = document.documentElement, ground = getComputedStyle(document.body).backgroundColor;
    const requests = performance.getEntriesByType('resource').map(one => one.name);
    parent.postMessage([name, innerWidth, root.scrollWidth, ground, requests, complaints], '*');
  }, 200));
}</script>"""
_FRAMES = """<!doctype html><title></title><meta name="color-scheme" content="light dark"><script>
  const seen = {}; addEventListener('message', event => {
    seen[event.data[0]] = event.data.slice(1); document.title = JSON.stringify(seen);
  });
</script>"""


@dataclass(frozen=True)
class Page:
    """What was seen of a page; sizes in CSS pixels."""

    width: int
    scroll_width: int
    ground: str
    requests: list[str]
    complaints: list[str]


def find_browser() -> str | None:
    """The program, or None where there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


def look_at(paths: Sequence[Path], *, width: int, dark: bool = False) -> list[Page]:
    """Load files, open everything that can be opened, and measure."""
    program, frames = find_browser(), [_FRAMES]
    assert program is not None
    with ExitStack() as stack:
        for place, path in enumerate(paths):
            copy = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".html", dir=path.parent))
            page = re.sub(
                r"(?i)(<head>|<!doctype html>)", lambda m: m[0] + _LISTEN, path.read_text(), count=1
            )
            copy.write(page)
            copy.flush()
            source = html.escape(Path(copy.name).as_uri())
            frames.append(
                f'<iframe name="{place}" src="{source}" width={width} height=900 style="border:0"></iframe>'
            )
        with tempfile.NamedTemporaryFile("w", suffix=".html") as frame:
            frame.write("".join(frames))
            frame.flush()
            options = f"""--headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1400,900 --dump-dom
                --blink-settings=preferredColorScheme={int(not dark)} --virtual-time-budget=20000""".split()
            command = [program, *options, Path(frame.name).as_uri()]
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title, done.stderr
    seen = json.loads(html.unescape(title[1]))
    return [Page(*seen[str(place)]) for place in range(len(paths))]
