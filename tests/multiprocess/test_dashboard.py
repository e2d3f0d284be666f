"""`reigen run --dashboard` with real ranks, and in a real browser."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.lab.browser import Page, browser_page, find_browser
from tests.multiprocess.launcher import Launcher, launched, run, until
from tests.multiprocess.test_metrics_launch import complaints, program, read_lines

pytest.importorskip("uvicorn")  # an extra, and so are starlette and plotly

needs_browser = pytest.mark.skipif(
    find_browser() is None, reason="there is no Chromium here (Debian: chromium-headless-shell)"
)
_URL = re.compile(r"reigen run: the dashboard is at (http://127\.0\.0\.1:(\d+)/#([\w-]+))\n")
#: The rows' states by name, as the page shows them.
STATES = (
    "Object.fromEntries([...document.querySelectorAll('#rows tr')]"
    ".map(row => [row.cells[0].innerText, row.cells[1].innerText]))"
)
STEP = "Number(document.querySelector('#job-step').firstChild.textContent.replaceAll(',', ''))"
COLORS = "['body', '#state', 'figure'].map(s => getComputedStyle(document.querySelector(s)).backgroundColor)"


def read_url(launcher: Launcher) -> re.Match[str]:
    assert launcher.process.stderr is not None
    line = launcher.process.stderr.readline().decode()
    found = _URL.fullmatch(line)
    assert found is not None, line
    return found


def fetch_state(url: re.Match[str]) -> dict[str, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", int(url[2]), timeout=60)) as connection:
        connection.request("GET", "/state", headers={"Authorization": f"Bearer {url[3]}"})
        answer = connection.getresponse()
        assert answer.status == 200
        return dict(json.loads(answer.read()))


@contextmanager
def stopped(pid: int) -> Iterator[float]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        os.kill(pid, signal.SIGCONT)


def seconds_until_shown(page: Page, pid: int) -> float:
    """How long it takes until the page shows that rank 1 is stopped; it runs again afterwards."""
    with stopped(pid) as begun:
        page.until(f"{STATES}['rank 1']?.startsWith('silent')")
        seconds = time.monotonic() - begun
        assert page.evaluate("document.querySelector('#trouble').innerText").startswith("rank 1 (host ")
    page.until(f"!{STATES}['rank 1'].startsWith('silent')")
    return seconds


def check_layout(page: Page) -> None:
    """Both widths, light and dark: nothing is wider than the page, and the colours are others."""
    found = {}
    for is_dark in (False, True):
        page.set_dark(is_dark)
        for width in (400, 1600):
            page.resize(width, 900)
            page.until(f"document.querySelector('.main-svg').getBoundingClientRect().width < {width}")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate("[...document.querySelectorAll('dd')].every(e => e.scrollWidth <= e.clientWidth)")
        found[is_dark] = page.evaluate(COLORS)
    assert found[False][0] != found[True][0]
    assert found[False][2] != found[True][2]


def check_accessibility(page: Page) -> None:
    """By keyboard alone: the link to the table, the button, the table; and names for screen readers."""
    page.evaluate("document.activeElement.blur()")
    seen = []
    for _ in range(3):
        page.press("Tab")
        seen.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert seen == ["skip", "pause", "processes"]
    page.evaluate("document.querySelector('#pause').focus()")
    page.press("Enter")
    assert page.evaluate("document.querySelector('#pause').getAttribute('aria-pressed')") == "true"
    page.press("Enter")
    names = page.accessible_names("image")
    assert any(name.startswith("Steps a second, over ") and "now: steps/s " in name for name in names)
    assert {"rank", "state", "host", "step"} <= set(page.accessible_names("columnheader"))
    assert {"rank 0", "rank 1"} <= set(page.accessible_names("rowheader"))


@pytest.mark.slow
@needs_browser
def test_a_browser_sees_the_job_and_its_going_away_changes_nothing(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    with launched("-np", "2", "--dashboard", *program(flag)) as launcher:
        url = read_url(launcher)
        pids = dict(line.removeprefix("[").split("] pid ") for line in launcher.lines(2))
        with browser_page(tmp_path / "profile") as page:
            page.resize(1600, 900)
            page.open(url[1].partition("#")[0])
            page.until("document.activeElement.id === 'token'")
            assert page.evaluate("document.querySelector('table').checkVisibility()") is False
            page.open("about:blank")
            page.open(url[1])
            page.until(f"document.querySelectorAll('.main-svg').length && {STEP} > 0")
            step = page.evaluate(STEP)
            page.until(f"{STEP} > {step}")
            assert page.evaluate("location.href") == url[1].partition("#")[0], "the token is not where others see it"
            page.call("Page.reload")
            page.until(f"document.readyState === 'complete' && document.querySelector('.main-svg') && {STEP} > {step}")
            check_layout(page)
            check_accessibility(page)
            # a busy host may be late once
            assert any(seconds_until_shown(page, int(pids["1"])) < 3.0 for _ in range(3))
            page.until("[...document.querySelectorAll('#events li')].some(e => e.innerText.includes('is heard again'))")
            # of Plotly's, a style for maps that are not here is refused
            assert [error for error in page.errors if "inline style" not in error] == []
        now = fetch_state(url)["job"]["step"]
        until(lambda: fetch_state(url)["job"]["step"] > now + 20)
        flag.touch()
        status, _, err = launcher.finish()
    assert (status, complaints(err)) == (0, [])


@pytest.mark.slow
@needs_browser
def test_changes_of_members_and_the_end_are_shown(tmp_path: Path) -> None:
    code = """
import os, sys, time
import numpy as np, reigen
from reigen import elastic
reigen.init()
print("pid", os.getpid(), flush=True)
state = elastic.ObjectState(reigen.broadcast_object, reigen.rank, step=0)
@elastic.run
def train(state):
    while True:
        time.sleep(0.02)
        ends = reigen.allreduce(np.array([float(os.path.exists(sys.argv[1]))]), op=reigen.Max, name="ends")[0]
        state.step += 1
        reigen.report_progress(steps=1)
        state.commit()
        if ends:
            return
train(state)
"""
    flag = tmp_path / "flag"
    options = ("-np", "2", "--min-np", "1", "--max-np", "2", "--dashboard")
    with launched(*options, *program(flag, code)) as launcher, browser_page(tmp_path / "profile") as page:
        url = read_url(launcher)
        pids = dict(line.removeprefix("[").split("] pid ") for line in launcher.lines(2))
        page.open(url[1])
        page.until(f"{STEP} > 5")
        os.kill(int(pids["1"]), signal.SIGKILL)
        page.until("[...document.querySelectorAll('#events li')].some(e => /rank 1|slot 1|view/.test(e.innerText))")
        flag.touch()
        page.until("document.querySelector('#state').innerText === 'ended'")
        assert "exit code 0" in page.evaluate("document.querySelector('#events').innerText")
        status, _, err = launcher.finish()
    assert status == 0, err


@pytest.mark.slow
def test_servers_are_shown_beside_their_workers(tmp_path: Path) -> None:
    code = """
import os, sys, time
import numpy as np, reigen
kv = reigen.kv.create("dist_sync")
kv.init("w", np.zeros(1000, np.float32))
while not os.path.exists(sys.argv[1]):
    kv.push("w", np.ones(1000, np.float32))
    time.sleep(0.05)
kv.close()
"""
    flag = tmp_path / "flag"
    with launched("-np", "1", "-s", "1", "--dashboard", *program(flag, code)) as launcher:
        url = read_url(launcher)
        until(lambda: {row["name"] for row in fetch_state(url)["rows"]} == {"rank 0", "server 0"})
        assert fetch_state(url)["job"]["servers"] == 1
        flag.touch()
        status, _, err = launcher.finish()
    assert status == 0, err


@pytest.mark.slow
def test_the_dashboard_and_the_metrics_of_a_function(tmp_path: Path) -> None:
    code = """
import reigen, sys
def work():
    import reigen
    reigen.init()
    return reigen.rank()
assert reigen.run(work, num_proc=2, dashboard=True, metrics_file=sys.argv[1]) == [0, 1]
"""
    command, path = [sys.executable, "-c", code], tmp_path / "m.jsonl"
    ended = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert _URL.fullmatch(ended.stderr), "a line, and nothing else"
    assert {each["rank"] for each in read_lines(path) if each["final"]} == {0, 1}


@pytest.mark.slow
def test_a_port_that_is_taken_is_said_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, out, err = run("-np", "1", "--dashboard", str(port), sys.executable, "-c", "print('started')")
    assert (status, out) == (1, "")
    assert f"--dashboard: 127.0.0.1:{port} cannot be used: Address already in use" in err
