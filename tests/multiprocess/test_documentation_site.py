"""The documentation site in a real browser: `make docs` builds it, and what it has built is looked at here."""

from __future__ import annotations

import functools
import http.server
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.lab.browser import DEADLINE_SECONDS, Page, browser_page, find_browser

SITE = Path(__file__).parents[2] / "build" / "site"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SITE / "index.html").is_file(), reason="there is no site: make docs"),
    pytest.mark.skipif(find_browser() is None, reason="there is no Chromium here (Debian: chromium-headless-shell)"),
]
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
RESULTS = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.getAttribute('href'))"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(SITE)))
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()


def press_until(page: Page, keys: list[str], expression: str) -> None:
    """Press keys until an expression is true: before its scripts are there, a page hears none, and has no answer."""
    end = time.monotonic() + DEADLINE_SECONDS
    while True:
        for key in keys:
            page.press(key)
        with suppress(AssertionError):  # the page is left in this moment
            page.until(expression, seconds=2.0)
            return
        assert time.monotonic() < end, (keys, expression, page.errors)


def look_at(page: Page, url: str) -> set[str]:
    """Open a page light and dark, narrow and wide: nothing is wider than the window. Returns the backgrounds."""
    found = set()
    for is_dark in (False, True):
        page.set_dark(is_dark)
        for width in (400, 1600):
            page.resize(width, 900)
            page.open(url)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (url, width)
            found.add(page.evaluate(BACKGROUND))
    return found


def test_the_site_in_a_browser(tmp_path: Path) -> None:
    with served() as root, browser_page(tmp_path) as page:
        for name in ("concepts/gradients.html", "reference/reigen.torch.html"):
            assert len(look_at(page, root + name)) == 2, "light and dark are not the same"
        loaded = page.evaluate("performance.getEntriesByType('resource').map(entry => entry.name)")
        assert [url for url in loaded if not url.startswith(root)] == [], "nothing comes from other hosts"

        page.open(root + "index.html")
        press_until(page, ["/"], "document.activeElement.classList.contains('md-search__input')")
        page.call("Input.insertText", text="sparse_allreduce_async")
        page.until(f"{RESULTS}.some(target => target.includes('reference/reigen.torch.html'))")
        press_until(page, ["Enter"], "!location.pathname.endsWith('/index.html')")
        page.until("document.body.innerText.includes('sparse_allreduce_async')")
        assert page.errors == []
