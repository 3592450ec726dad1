"""Open a page in Debian's Chromium without a window, over the DevTools protocol on a pipe, and say what happened."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
HOW_TO_INSTALL = "there is no Chromium; `make test-pages` installs it, or: apt-get install chromium"
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-extensions", "--disable-component-update", "--remote-debugging-pipe",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip


CUT = """
(()=>{const broken=[];for(const box of document.querySelectorAll('.wide'))
 if(box.scrollWidth>box.clientWidth+1)broken.push('scrolls: '+box.innerText.slice(0,40));
for(const cell of document.querySelectorAll('td,th,h1,h2,.fact b,.fact span,.when')){
 const walker=document.createTreeWalker(cell,NodeFilter.SHOW_TEXT);
 for(let node=walker.nextNode();node;node=walker.nextNode())
  for(const word of node.data.matchAll(/[^\\s\\/.,=_[-]+/g)){const range=document.createRange();
   range.setStart(node,word.index);range.setEnd(node,word.index+word[0].length);
   const tops=new Set([...range.getClientRects()].map(r=>Math.round(r.top)));
   if(tops.size>1)broken.push('broken: '+word[0])}}
return broken})()
"""
"""Tables that scroll sideways, and words that stand on two lines."""


@dataclass
class Opened:
    """Behaviour of one page in one width and colour scheme."""

    errors: list[str] = field(default_factory=list)
    """Console errors, exceptions, and refusals by the page's policy."""
    requests: list[str] = field(default_factory=list)
    """Addresses that were asked for, but for the page itself and data."""
    drawn: list[str] = field(default_factory=list)
    """For each chart `yes` or what else it says of itself."""
    marks: list[int] = field(default_factory=list)
    """Shapes in each chart."""
    scroll_px: int = 0
    """By how much the page is wider than the window."""
    scrolled_px: float = 0.0
    """Place in the page that it was scrolled to."""
    unfolded: int = 0
    """Parts of the page that are unfolded."""
    cut: list[str] = field(default_factory=list)
    """Texts of table cells and headings that do not fit into their box, or whose words are broken."""
    chart_width: float = 0.0
    """Width of the widest chart."""
    text: str = ""
    title: str = ""
    background: str = ""
    screenshot: bytes = b""


class Chromium:
    """A browser for as long as the block lasts. Raises: FileNotFoundError with what to install."""

    def __enter__(self) -> Chromium:
        program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
        if program is None:
            raise FileNotFoundError(HOW_TO_INSTALL)
        self._home = tempfile.TemporaryDirectory(prefix="chromium")
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        flags = [*FLAGS, f"--user-data-dir={self._home.name}", "about:blank"]
        script = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", program, *flags],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": self._home.name},
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._number, self._rest, self._events = 0, b"", []
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask("Browser.close")
            self._process.wait(20)
        except Exception:  # a browser that no longer answers, for whatever reason, must not outlive the test
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._home.cleanup()

    def open(
        self,
        page: Path,
        width: int = 1280,
        height: int = 900,
        scheme: str = "light",
        script: str = "",
        before_looking: Callable[[], object] = lambda: None,
    ) -> Opened:
        """Open a file, wait until its charts are drawn, run a script in it, and take its picture, whole.

        before_looking: called after the script.
        """
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

        def ask(method: str, **values: Any) -> dict[str, Any]:
            return self._ask(method, session, **values)

        self._events.clear()
        for domain in ("Page", "Runtime", "Network", "Log"):
            ask(f"{domain}.enable")
        is_phone = width < 600
        ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone)
        ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        url = page.resolve().as_uri()
        ask("Page.navigate", url=url)

        def value(expression: str) -> Any:
            return ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

        deadline = time.monotonic() + 60
        done = "document.readyState=='complete'&&![...document.querySelectorAll('.chart')].some(c=>!c.dataset.drawn)"
        while not value(done) and time.monotonic() < deadline:
            time.sleep(0.1)
        if script:
            value(script)
        before_looking()
        time.sleep(0.3)  # for the fitting of charts to their boxes
        opened = Opened(
            drawn=value("[...document.querySelectorAll('.chart')].map(c=>c.dataset.drawn||'no')"),
            marks=value(
                "[...document.querySelectorAll('.chart')].map(c=>c.querySelectorAll('svg path,svg rect').length)"
            ),
            scroll_px=value("document.documentElement.scrollWidth-document.documentElement.clientWidth"),
            chart_width=value("Math.max(0,...[...document.querySelectorAll('.chart svg')].map(s=>s.clientWidth))"),
            scrolled_px=value("scrollY"),
            unfolded=value("document.querySelectorAll('details[open]').length"),
            cut=value(CUT),
            text=value("document.body.innerText"),
            title=value("document.title"),
            background=value("getComputedStyle(document.body).backgroundColor"),
        )
        tall = value("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": tall, "scale": 1}
        shot = ask("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        opened.screenshot = base64.b64decode(shot["data"])
        self._sort_events(opened, url)
        self._ask("Target.closeTarget", targetId=target)
        return opened

    def _sort_events(self, opened: Opened, url: str) -> None:
        for event in self._events:
            method, values = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                details = values["exceptionDetails"]
                opened.errors.append(str(details.get("exception", {}).get("description", details))[:500])
            elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning"):
                opened.errors.append(json.dumps(values["args"])[:500])
            elif method == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
                opened.errors.append(values["entry"]["text"])
            elif method == "Network.requestWillBeSent":
                asked = values["request"]["url"]
                if asked != url and not asked.startswith(("data:", "blob:", "about:")):
                    opened.requests.append(asked)

    def _ask(self, method: str, session: str | None = None, **values: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": values}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") != self._number:
                self._events.append(answer) if "method" in answer else None
                continue
            if "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            result: dict[str, Any] = answer["result"]
            return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], 60)[0]:
                raise TimeoutError("Chromium has not answered for a minute")
            piece = os.read(self._from, 1 << 20)
            if not piece:
                raise RuntimeError("Chromium has ended")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer
