"""Server of the dashboard: who gets what, and that nobody can hold it up, or the job."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest

from reigen.cli.launch import _parser as launch_parser
from reigen.cli.run_options import make_parser, parse_arguments
from reigen.errors import ConfigError
from reigen.launch.dashboard.feed import JobEnd
from reigen.launch.metrics import options
from reigen.launch.metrics.job_metrics import JobMetrics
from reigen.launch.metrics.options import DASHBOARD_TOKEN_VARIABLE, DashboardAddress, MetricsOptions
from reigen.launch.metrics.service import MetricsService, report_environ
from tests.multiprocess.launcher import until
from tests.unit.launch.test_live_table import lockstep

pytest.importorskip("plotly")  # an extra, and so are starlette and uvicorn
server_module = pytest.importorskip("reigen.launch.dashboard.server", exc_type=ImportError)
DashboardServer, is_allowed_host = server_module.DashboardServer, server_module.is_allowed_host
TOKEN = "a-token-of-enough-letters"
DATA_PATHS = ("/state", "/events")


@pytest.fixture(scope="module")
def served() -> Iterator[DashboardServer]:
    """One for tests that ask and change nothing."""
    server = DashboardServer(DashboardAddress("127.0.0.1", 0, TOKEN), lockstep(2), "train.py")
    server.start()
    fetch(server, "/state")  # it has all that it needs: what a test opens is counted
    yield server
    server.close()


@pytest.fixture
def server() -> Iterator[DashboardServer]:
    server = DashboardServer(DashboardAddress("127.0.0.1", 0, TOKEN), lockstep(2), "train.py")
    server.start()
    yield server
    server.close()
    assert not server._thread.is_alive()


def port_of(server: DashboardServer) -> int:
    return int(server.url.partition("/#")[0].rpartition(":")[2])


def fetch(
    server: DashboardServer, path: str, *, token: str | None = TOKEN, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=60)
    with closing(connection):
        given = {} if token is None else {"Authorization": f"Bearer {token}"}
        connection.request(method, path, headers={**given, **headers})
        answer = connection.getresponse()
        return answer.status, {name.lower(): text for name, text in answer.getheaders()}, answer.read()


def test_the_page_comes_with_all_that_it_needs(served: DashboardServer) -> None:
    for path, kind in (
        ("/", "text/html"),
        ("/dashboard.css", "text/css"),
        ("/dashboard.js", "javascript"),
        ("/plotly.min.js", "javascript"),
    ):
        status, headers, body = fetch(served, path, token=None)
        assert (status, len(body)) == (200, int(headers["content-length"]))
        assert kind in headers["content-type"]
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"
        assert "set-cookie" not in headers
        assert "server" not in headers
        assert TOKEN.encode() not in body


@pytest.mark.parametrize("path", DATA_PATHS)
def test_nothing_about_the_job_without_the_token(served: DashboardServer, path: str) -> None:
    for token in (None, "", "wrong", TOKEN[:-1], f"{TOKEN}x", "\u00e9"):
        status, headers, body = fetch(served, path, token=token)
        assert status == 403
        assert b"train.py" not in body
        assert "content-security-policy" in headers
    assert fetch(served, f"{path}?token={TOKEN}", token=None)[0] == 403, "a URL would be in histories and logs"


def test_the_state_is_for_those_who_know_the_token(served: DashboardServer) -> None:
    status, headers, body = fetch(served, "/state")
    assert status == 200
    assert headers["cache-control"] == "no-store"
    message = json.loads(body)
    assert message["job"]["program"] == "train.py"
    assert [row["name"] for row in message["rows"]] == ["rank 0", "rank 1"]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "localhost.evil.example", "", "a b", "[::1", "1.2.3", "127.0.0.1.x"]
)
def test_another_name_is_refused_whatever_token_there_is(served: DashboardServer, host: str) -> None:
    """DNS rebinding: a name of somebody else's that points here."""
    for path in ("/", "/state"):
        status, _, body = fetch(served, path, Host=host)
        assert status in {400, 421}
        assert b"train.py" not in body


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1:9999", "[::1]:80", "LOCALHOST:80"])
def test_addresses_and_localhost_are_served_whatever_port_a_tunnel_has(served: DashboardServer, host: str) -> None:
    assert fetch(served, "/state", Host=host)[0] == 200


def test_the_name_of_this_host_only_where_other_hosts_are_served() -> None:
    assert is_allowed_host("h1:80", frozenset({"localhost", "h1"}))
    assert not is_allowed_host("h1:80", frozenset({"localhost"}))
    assert not is_allowed_host("user@h1", frozenset({"h1"}))


@pytest.mark.parametrize(
    "path",
    ["/../server.py", "/page/../feed.py", "/%2e%2e/server.py", "//etc/passwd", "/..%2fserver.py", "/index.html", "/x",
     "/static/../../options.py", "/dashboard.js/../server.py", "/%00", "/plotly/package_data/plotly.min.js"],
)  # fmt: skip
def test_there_are_no_other_files(served: DashboardServer, path: str) -> None:
    status, headers, body = fetch(served, path)
    assert status == 404
    assert b"import" not in body
    assert "content-security-policy" in headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_there_is_nothing_to_be_done(served: DashboardServer, method: str) -> None:
    for path in ("/", "/state", "/events"):
        status, headers, _ = fetch(served, path, method=method, Origin="http://evil.example")
        assert status == 405
        assert "access-control-allow-origin" not in headers


def test_heads_alone(served: DashboardServer) -> None:
    for path in ("/", *DATA_PATHS):
        status, _, body = fetch(served, path, method="HEAD")
        assert (status, body) == (200, b"")


def raw(server: DashboardServer, *parts: bytes) -> bytes:
    """What comes back for bytes, until the connection ends; the server may end it while they are sent."""
    with socket.create_connection(("127.0.0.1", port_of(server)), 60) as client:
        client.settimeout(60)
        answer = b""
        with suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                client.sendall(part)
            while data := client.recv(1 << 16):
                answer += data
        return answer


@pytest.mark.parametrize(
    "request_bytes",
    [b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 20) + b"\r\n\r\n", b"GET /" + b"a" * (1 << 20),
     b"\x16\x03\x01\x00\xa5" * 100 + b"\r\n\r\n",
     b"GET / HTTP/9.9\r\nConnection: close\r\n\r\n", b"\r\n" * 10 + b"nonsense\r\n\r\n",
     b"GET / HTTP/1.1\r\nHost: a\r\nHost: localhost\r\nConnection: close\r\n\r\n"],
)  # fmt: skip
def test_huge_and_broken_requests_are_refused(served: DashboardServer, request_bytes: bytes) -> None:
    answer = raw(served, request_bytes)
    assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
    assert fetch(served, "/state")[0] == 200


def test_a_body_is_not_read_into_memory(served: DashboardServer) -> None:
    head = f"GET /state HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n"
    with socket.create_connection(("127.0.0.1", port_of(served)), 60) as client:
        client.settimeout(60)
        client.sendall(f"{head}Content-Length: 99999999999\r\n\r\n".encode())
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
    assert fetch(served, "/state")[0] == 200


class Stream:
    """A browser that follows the job."""

    def __init__(self, server: DashboardServer) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=60)
        self.connection.request("GET", "/events", headers={"Authorization": f"Bearer {TOKEN}"})
        self.answer = self.connection.getresponse()

    def next(self) -> dict[str, Any] | None:
        while line := self.answer.readline():
            if line.startswith(b"data: "):
                return dict(json.loads(line[6:]))
        return None

    def close(self) -> None:
        self.answer.close()
        self.connection.close()


def test_a_browser_gets_messages_until_the_end(server: DashboardServer) -> None:
    with closing(Stream(server)) as stream:
        assert stream.answer.status == 200
        assert stream.answer.headers["Content-Type"].startswith("text/event-stream")
        first = stream.next()
        assert first is not None
        assert first["has_all_points"]
        server.note("note", "view 2")
        found: list[dict[str, Any]] = []
        until(lambda: found.append(stream.next() or {}) or "view 2" in [e["text"] for e in found[-1].get("events", ())])
        server.finish(JobEnd(7, "why", "verdict"))
        closing_thread = threading.Thread(target=server.close)
        closing_thread.start()
        messages = iter(stream.next, None)
        last = list(messages)[-1]
        closing_thread.join(60)
    assert last is not None
    assert last["end"] == {"exit_code": 7, "text": "why", "verdict": "verdict"}
    assert last["events"][-1]["kind"] == "end"


def test_too_many_browsers_are_refused_and_places_become_free(
    server: DashboardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_STREAMS", 2)
    with ExitStack() as stack:
        first, second = (stack.enter_context(closing(Stream(server))) for _ in range(2))
        assert (first.answer.status, second.answer.status) == (200, 200)
        assert fetch(server, "/events")[0] == 503
        assert fetch(server, "/state")[0] == 200
        first.close()
        until(lambda: server._num_streams == 1)
        assert stack.enter_context(closing(Stream(server))).answer.status == 200


@pytest.mark.slow
def test_connections_are_bounded_and_those_without_a_request_end(
    server: DashboardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(server_module, "IDLE_SECONDS", 1000.0)
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port_of(server)), 60)) for _ in range(4)]
        until(lambda: len(server._server.server_state.connections) == 4)
        assert raw(server, b"GET / HTTP/1.1\r\n") == b"", "one too many"
        monkeypatch.setattr(server_module, "IDLE_SECONDS", 1.5)
        idle[0].sendall(b"GET / HTTP/1.1\r\nX: ")
        for client in idle:
            client.settimeout(60)
            with suppress(ConnectionResetError):
                assert client.recv(100) == b""
        until(lambda: fetch_or_nothing(server) == 200)


def fetch_or_nothing(server: DashboardServer) -> int:
    try:
        return fetch(server, "/state")[0]
    except OSError:
        return 0


@pytest.mark.slow
def test_who_reads_nothing_is_cut_off_and_holds_up_nobody(
    server: DashboardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "IDLE_SECONDS", 1.5)
    slow = socket.socket()
    with slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", port_of(server)))
        slow.sendall(b"GET /plotly.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with closing(Stream(server)) as stream:
            for _ in range(3):
                assert stream.next() is not None
            until(lambda: len(server._server.server_state.connections) == 1)


def test_a_slow_browser_does_not_hold_up_the_end() -> None:
    server = DashboardServer(DashboardAddress("127.0.0.1", 0, TOKEN), lockstep(2), "train.py")
    server.start()
    with closing(Stream(server)):
        begun = time.monotonic()
        server.finish(JobEnd(0, "", ""))
        server.close()
        assert time.monotonic() - begun < 30
    assert not server._thread.is_alive()


def test_one_that_was_never_started_can_be_closed() -> None:
    server = DashboardServer(DashboardAddress("127.0.0.1", 0, TOKEN), JobMetrics(), "x")
    server.note("note", "text")
    server.close()


# -- the options ------------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_an_error_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = DashboardAddress.parse(str(taken.getsockname()[1]), {})
        with pytest.raises(ConfigError, match=r"--dashboard: 127\.0\.0\.1:\d+ cannot be used: Address already in use"):
            MetricsService(MetricsOptions(dashboard=address), print)


@pytest.mark.parametrize(
    ("text", "host", "port", "is_loopback"),
    [("", "127.0.0.1", 0, True), ("8080", "127.0.0.1", 8080, True), ("0.0.0.0:80", "0.0.0.0", 80, False),
     ("[::1]:80", "::1", 80, True)],
)  # fmt: skip
def test_addresses(text: str, host: str, port: int, is_loopback: bool) -> None:
    address = DashboardAddress.parse(text, {})
    assert (address.host, address.port, address.is_loopback) == (host, port, is_loopback)
    assert len(address.token) >= 32
    assert address.token not in repr(address)
    assert address.token != DashboardAddress.parse(text, {}).token


@pytest.mark.parametrize("text", ["x", "70000", "h1:80", "-1", "127.0.0.1:"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="--dashboard"):
        DashboardAddress.parse(text, {})


def test_the_token_may_be_the_users_and_is_for_no_rank() -> None:
    environ = {DASHBOARD_TOKEN_VARIABLE: TOKEN, "X": "1"}
    address = DashboardAddress.parse("", environ)
    assert address.token == TOKEN
    assert DASHBOARD_TOKEN_VARIABLE not in report_environ(MetricsOptions(dashboard=address), environ)
    for bad in ("short", "a b" * 10, "x" * 300, "\u00e4" * 20):
        with pytest.raises(ConfigError, match=DASHBOARD_TOKEN_VARIABLE):
            DashboardAddress.parse("", {DASHBOARD_TOKEN_VARIABLE: bad})


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_spec", lambda name: None if name == "uvicorn" else object())
    with pytest.raises(ConfigError, match=r"--dashboard needs uvicorn: pip install 'reigen\[dashboard\]'"):
        DashboardAddress.parse("", {})


def test_other_hosts_are_served_with_a_word_about_it(capfd: pytest.CaptureFixture[str]) -> None:
    for text, is_said in (("0.0.0.0:0", True), ("", False)):
        service = MetricsService(MetricsOptions(dashboard=DashboardAddress.parse(text, {})), print)
        service.close()
        err = capfd.readouterr().err
        assert err.count("/#") == 1
        assert ("without encryption" in err) == is_said


@pytest.mark.parametrize(
    ("words", "dashboard", "command"),
    [
        ("-np 2 --dashboard python x.py --top", "", "python x.py --top"),
        ("--dashboard -np 2 ./x --dashboard 80", "", "./x --dashboard 80"),
        ("-np 2 --dashboard 8080 python x.py", "8080", "python x.py"),
        ("-np 2 --dashboard [::]:80 -- python x.py", "[::]:80", "-- python x.py"),
        ("-np 2 --dashboard=10.0.0.1:80 python --dashboard", "10.0.0.1:80", "python --dashboard"),
        ("-np 2 --dashboard", "", ""),
        ("-np 2 python --dashboard x", None, "python --dashboard x"),
    ],
)
def test_the_port_may_be_left_out_before_a_command(words: str, dashboard: str | None, command: str) -> None:
    chosen = parse_arguments(make_parser(), words.split())
    assert (chosen.dashboard, " ".join(chosen.command)) == (dashboard, command)
    launch_words = words.replace("-np 2", "-n 2") if "-np" in words else f"-n 2 {words}"
    chosen = parse_arguments(launch_parser(), launch_words.split())
    assert (chosen.dashboard, " ".join(chosen.command)) == (dashboard, command)
