"""The documentation site in a real browser: `make docs` builds it, and what it has built is looked at here."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml

from tests.lab.browser import DEADLINE_SECONDS, Page, browser_page, find_browser
from tests.lab.page_faults import SETTLE, page_faults

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"
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


class _QuietWithoutIndex(_Quiet):
    """With nothing to be found: every page reads the index of the search, which takes longer than all else."""

    def do_GET(self) -> None:
        if not self.path.endswith("/search_index.json"):
            super().do_GET()
            return
        index = json.loads((SITE / "search" / "search_index.json").read_text())
        content = json.dumps({"config": index["config"], "docs": []}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def served(directory: Path = SITE, handler: type[_Quiet] = _Quiet) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(directory)))
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


def listed(entries: object) -> Iterator[str]:
    """The pages of the navigation, as files of the site."""
    if isinstance(entries, str):
        yield entries.removesuffix(".md") + ".html"
    elif isinstance(entries, list | dict):
        for each in entries.values() if isinstance(entries, dict) else entries:
            yield from listed(each)


@pytest.mark.timeout(600)
def test_every_page_is_whole_on_narrow_and_wide_screens_light_and_dark(tmp_path: Path) -> None:
    pages = list(listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(pages) > 80
    found = {}
    with served(handler=_QuietWithoutIndex) as root, browser_page(tmp_path) as page:
        for name in pages:
            faults = page_faults(page, root + name, (1600, 400))
            if faults:
                found[name] = faults
        grounds = set()
        for is_dark in (False, True):
            page.set_dark(is_dark)
            page.evaluate(SETTLE)
            grounds.add(page.evaluate(BACKGROUND))
    assert found == {}
    assert len(grounds) == 2, "light and dark are not the same"


_HEAD = '<!doctype html><meta name="viewport" content="width=device-width"><title>a</title><body>'


def test_faults_of_a_page_are_found(tmp_path: Path) -> None:
    shutil.copy(SITE / "assets" / "images" / "favicon.png", tmp_path / "favicon.ico")
    (tmp_path / "good.html").write_text(f"{_HEAD}<article><h1>a</h1><h2>b</h2><p>c</p></article>")
    (tmp_path / "bad.html").write_text(
        f"{_HEAD}<article><h1>a</h1><h3>b</h3><h2></h2>"
        '<p style="color: #999">pale</p><img src="none.png"><div style="width: 900px">wide</div>'
        '<pre style="overflow: hidden">' + "x" * 200 + "</pre></article><script>console.error('bad')</script>"
    )
    with served(tmp_path) as root, browser_page(tmp_path / "profile") as page:
        assert page_faults(page, root + "good.html", (1600, 400)) == []
        faults = page_faults(page, root + "bad.html", (1600, 400))
    for expected in (
        "an image is not there: ",
        "h1 is followed by h3: b",
        "an empty h2",
        "contrast 2.85: ",
        "400 pixels: the page is ",
        "400 pixels: cut off: pre",
        '["bad"]',
        "404",
    ):
        assert any(expected in fault for fault in faults), (expected, faults)
    assert not any("1600 pixels: the page" in fault for fault in faults), faults


def test_search_by_keyboard_finds_a_page(tmp_path: Path) -> None:
    with served() as root, browser_page(tmp_path) as page:
        page.open(root + "index.html")
        press_until(page, ["/"], "document.activeElement.classList.contains('md-search__input')")
        page.call("Input.insertText", text="sparse_allreduce_async")
        page.until(f"{RESULTS}.some(target => target.includes('reference/reigen.torch.html'))")
        press_until(page, ["Enter"], "!location.pathname.endsWith('/index.html')")
        page.until("document.body?.innerText.includes('sparse_allreduce_async')")
        assert page.errors == []
