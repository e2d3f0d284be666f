"""Metrics for Prometheus, over HTTP."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress

import pytest

from reigen.cluster.metrics import MetricSample
from reigen.errors import ConfigError
from reigen.launch.metrics import exposition
from reigen.launch.metrics.exposition import MetricsServer, format_metrics
from reigen.launch.metrics.job_metrics import JobMetrics
from reigen.launch.metrics.options import TOKEN_VARIABLE, MetricsAddress, MetricsOptions
from reigen.launch.metrics.service import MetricsService
from tests.multiprocess.launcher import until
from tests.unit.launch.test_job_metrics import job, report

parser = pytest.importorskip("prometheus_client.parser")  # an extra


def test_prometheus_reads_the_text() -> None:
    bytes_sample: MetricSample = ("reigen_bytes_total", ("allreduce", 'net"work\n'), 12.0)
    metrics = job((0.0, "r0", report(0, steps=3, more=(bytes_sample,))), (0.0, "s0", report(0, kind="server")))
    families = {f.name: f for f in parser.text_string_to_metric_families(format_metrics(metrics, 1.0).decode())}
    (sample,) = families["reigen_bytes"].samples
    assert (sample.name, sample.value) == ("reigen_bytes_total", 12.0)
    labels = {"role": "rank", "rank": "0", "host": "host0", "operation": "allreduce", "way": 'net"work\n'}
    assert sample.labels == labels
    assert families["reigen_bytes"].type == "counter"
    assert families["reigen_report_age_seconds"].type == "gauge"
    assert {s.labels["role"] for s in families["reigen_steps"].samples} == {"rank", "server"}


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer(MetricsAddress("127.0.0.1", 0), job((0.0, "r0", report(0, steps=3))))
    server.start()
    yield server
    server.close()


def fetch(port: int, path: str = "/metrics", token: str = "") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def test_metrics_are_served(server: MetricsServer) -> None:
    assert 'reigen_steps_total{host="host0",rank="0",role="rank"} 3.0' in fetch(server.port)
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        fetch(server.port, "/etc/passwd")
    caught.value.close()


def test_scrapers_that_never_read_or_say_nothing_hold_up_nobody(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition._Handler, "timeout", 0.5)
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(exposition._MAX_CONNECTIONS)]
    try:
        refused = socket.create_connection(("127.0.0.1", server.port))
        refused.settimeout(60)
        with refused:
            assert refused.recv(1) == b"", "there is no place for one more"
        until(lambda: server._server._places._value == exposition._MAX_CONNECTIONS)  # their time is over
        assert "reigen_steps_total" in fetch(server.port)
    finally:
        for each in silent:
            each.close()


def drip(connection: socket.socket) -> None:
    """Send a byte often, for a minute at most, until the other end has closed."""
    connection.settimeout(0.05)
    begun = time.monotonic()
    while time.monotonic() < begun + 60:
        connection.sendall(b"G")
        with suppress(TimeoutError):
            if not connection.recv(1):
                raise ConnectionResetError("closed")


def test_a_connection_ends_in_time_however_often_something_comes(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "_CONNECTION_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", server.port)) as slow, pytest.raises(ConnectionError):
        drip(slow)


def test_with_a_token_nobody_is_served_without() -> None:
    server = MetricsServer(MetricsAddress("127.0.0.1", 0, "secret"), JobMetrics())
    server.start()
    try:
        for token in ("", "wrong", "secret2"):
            with pytest.raises(urllib.error.HTTPError, match="401") as caught:
                fetch(server.port, token=token)
            caught.value.close()
        assert fetch(server.port, token="secret") == ""
    finally:
        server.close()


@pytest.mark.parametrize("text", ["", "x", "65536", "-1", "host:80", "1.2.3.4:x", "[::1]:"])
def test_addresses_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match="--metrics-port"):
        MetricsAddress.parse(text, {})


def test_addresses() -> None:
    assert MetricsAddress.parse("9100", {}) == MetricsAddress("127.0.0.1", 9100)
    assert MetricsAddress.parse("[::1]:0", {}) == MetricsAddress("::1", 0)
    with pytest.raises(ConfigError, match=TOKEN_VARIABLE):
        MetricsAddress.parse("0.0.0.0:9100", {})
    found = MetricsAddress.parse("0.0.0.0:9100", {TOKEN_VARIABLE: "t0ken"})
    assert found.token == "t0ken"
    assert "t0ken" not in repr(found)


def test_without_the_package_its_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reigen.launch.metrics.options.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'reigen\[metrics\]'"):
        MetricsAddress.parse("9100", {})


def test_a_port_that_is_taken_is_an_error(server: MetricsServer) -> None:
    options = MetricsOptions(MetricsAddress("127.0.0.1", server.port))
    with pytest.raises(ConfigError, match=f"127.0.0.1:{server.port} cannot be used: Address already in use"):
        MetricsService(options, pytest.fail)
