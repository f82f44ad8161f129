"""Drives a headless Chromium, without a network, through the DevTools protocol on two pipes."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager

BINARIES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-extensions",
    ),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--hide-scrollbars", "--remote-debugging-pipe"),
)


def binary():
    """Path of a Chromium on this machine; None where there is none."""
    return next((path for name in BINARIES if (path := shutil.which(name))), None)


class Tab:
    """One page of the browser.

    Attributes:
        complaints: Errors and warnings of the console, and exceptions.
        requests: Addresses that were asked for, besides that of the page itself.
    """

    def __init__(self, to, of):
        self._to = to
        self._of = of
        self._held = b""
        self._last = 0
        self._session = None
        self.complaints = []
        self.requests = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=0,
            uploadThroughput=0,
        )

    def call(self, method, **params):
        """The result of a command."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._last:
                assert "error" not in found, found
                return found["result"]

    def _next(self, patience=300):
        until = time.monotonic() + patience
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._of], [], [], max(0, until - time.monotonic()))
            assert ready, "Chromium does not answer"
            self._held += os.read(self._of, 1 << 20)
        text, _, self._held = self._held.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method, params):
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(params["entry"]))
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("data:", "blob:")):
                self.requests.append(url)

    def open(self, path, width=1280, height=900):
        """Open a file; returns the seconds until everything was loaded and laid out."""
        self.size(width, height)
        self._loaded = False
        self.requests.clear()
        began = time.monotonic()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._next()
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
        seconds = time.monotonic() - began
        assert self.requests.pop(0) == path.resolve().as_uri()
        return seconds

    def size(self, width, height):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def run(self, script):
        """The value of an expression of JavaScript."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def move(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def shot(self, path, whole=False):
        """Write a picture of the page, or of all of it."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def browsing():
    """A tab of its own Chromium, which ends with the block."""
    there, to = os.pipe()
    of, back = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        # The browser reads from its file descriptor 3 and writes to 4.
        command = ["bash", "-c", f'exec 3<&{there} 4>&{back}; exec "$0" "$@"', binary()]
        process = subprocess.Popen(
            [*command, *FLAGS, f"--user-data-dir={home}", "about:blank"],
            pass_fds=(there, back),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(back)
        try:
            yield Tab(to, of)
        finally:
            os.close(to)
            os.close(of)
            process.terminate()
            process.wait(timeout=120)
