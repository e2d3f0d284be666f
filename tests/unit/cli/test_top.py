"""`reigen top`: finds a job, shows it, and says what is wrong where there is none."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator

import pytest

from reigen.cli import top
from reigen.errors import ConfigError
from reigen.launch.job_directory import JobFile
from reigen.launch.metrics.exposition import MetricsServer
from reigen.launch.metrics.options import TOKEN_VARIABLE, MetricsAddress
from tests.unit.launch.test_job_metrics import job, report


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "_LOOK_SECONDS", 0.0)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    metrics = job((0.0, "r0", report(0, steps=3)), (0.0, "r1", report(1, steps=4)))
    server = MetricsServer(MetricsAddress("127.0.0.1", 0, "t0ken"), metrics)
    server.start()
    yield server
    server.close()


def test_a_job_is_shown_once(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "t0ken")
    assert top.main([f"127.0.0.1:{server.port}", "--once"]) == 0
    headings, first, second = capsys.readouterr().out.splitlines()
    assert headings.startswith("rank  host   step")
    assert first.split()[:3] == ["0", "host0", "3"]
    assert second.split()[:3] == ["1", "host1", "4"]
    assert "silent" in first, "its report is of long ago"


def test_a_job_is_followed_until_its_end(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "t0ken")
    looks = iter([True, True])
    fetch = top.fetch_reports

    def fetch_twice(address: tuple[str, int]) -> object:
        if next(looks, None) is None:
            raise ConnectionRefusedError
        return fetch(address)

    monkeypatch.setattr(top, "fetch_reports", fetch_twice)
    assert top.main([str(server.port)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("rank 0 (host host0) has said nothing for" in line for line in lines)
    assert lines[-1] == "the job has ended, or its launcher has gone"


def test_the_wrong_token_is_said(server: MetricsServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main([str(server.port)]) == 1
    assert f"wants another token than {TOKEN_VARIABLE} has" in capsys.readouterr().err


def test_where_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert top.main([str(port)]) == 1
    assert f"reigen top: no job serves metrics at 127.0.0.1:{port}: Connection refused" in capsys.readouterr().err


def test_another_server_is_no_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"not": "reports"}')

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as other:
        thread = threading.Thread(target=other.serve_forever, daemon=True)
        thread.start()
        try:
            assert top.main([str(other.server_port)]) == 1
        finally:
            other.shutdown()
            thread.join()
    assert "is no launcher that serves metrics" in capsys.readouterr().err


def test_jobs_that_go_on_without_their_launcher_have_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("state")
    directory.chmod(0o700)
    monkeypatch.setenv("XDG_STATE_HOME", str(directory))
    file = JobFile.create(("run",), {}, bytes(32))
    try:
        name = file.record.job
        with pytest.raises(ConfigError, match="it was started without --metrics-port"):
            top.find_address(name)
        file.update(metrics="127.0.0.1:4711")
        assert top.find_address(name) == ("127.0.0.1", 4711)
    finally:
        file.close()
    with pytest.raises(ConfigError, match="there is no job nosuch"):
        top.find_address("nosuch")
    assert top.find_address("9100") == ("127.0.0.1", 9100)
    assert top.find_address("[::1]:9100") == ("::1", 9100)
