"""Metrics for Prometheus, over HTTP: read only, on loopback, or with a token.

Everything is bounded: how many connections there are, how long each may take, and how much of a request is read.
Whoever reads slowly, or never, has a thread of his own; the job has nothing to do with it.
"""

from __future__ import annotations

import contextlib
import hmac
import http.server
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from reigen.cluster.metrics import LAUNCHER_METRICS, PROCESS_METRICS
from reigen.errors import ConfigError
from reigen.launch.metrics.job_metrics import JobMetrics
from reigen.launch.metrics.options import REPORTS_PAGE, MetricsAddress

if TYPE_CHECKING:  # an extra: loaded where metrics are served
    from prometheus_client import Metric

_ENCODER = msgspec.json.Encoder()
_MAX_CONNECTIONS = 8
_CONNECTION_SECONDS = 10.0
#: How soon `close` is noticed.
_POLL_SECONDS = 0.1


class MetricsServer:
    """Server of a job's metrics, from the moment that it is made; it answers from `start` on.

    Args:
        address: where.
        metrics: of the job.

    Raises:
        ConfigError: the port is taken, or may not be used.
    """

    def __init__(self, address: MetricsAddress, metrics: JobMetrics) -> None:
        pages = {
            "/": lambda: format_metrics(metrics, time.monotonic()),
            "/metrics": lambda: format_metrics(metrics, time.monotonic()),
            REPORTS_PAGE: lambda: _ENCODER.encode(metrics.reports(time.monotonic())),
        }
        self._server = _open(address, pages)
        serve = partial(self._server.serve_forever, poll_interval=_POLL_SECONDS)
        self._thread = threading.Thread(target=serve, name="reigen-metrics-http", daemon=True)

    @property
    def port(self) -> int:
        """Return the port."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Begin to answer, in threads."""
        self._thread.start()

    def close(self) -> None:
        """Answer no more; connections that are open end with the process, or by themselves."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def _open(address: MetricsAddress, pages: Mapping[str, Callable[[], bytes]]) -> _Server:
    try:
        return _Server(address, pages)
    except OSError as error:
        raise ConfigError(
            f"--metrics-port: {address.host}:{address.port} cannot be used: {error.strerror}. Port 0 takes one that is "
            "free, and says which"
        ) from None


class _Server(http.server.ThreadingHTTPServer):
    """HTTP server of metrics."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = _MAX_CONNECTIONS

    def __init__(self, address: MetricsAddress, pages: Mapping[str, Callable[[], bytes]]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.pages, self.token = pages, address.token
        self._places = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        #: by connection, when it is to end
        self._due: dict[socket.socket, float] = {}
        super().__init__((address.host, address.port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, if there are not too many."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._due[request] = time.monotonic() + _CONNECTION_SECONDS
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve it."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._leave(request)

    def service_actions(self) -> None:
        """End connections that have taken too long, however often something has come."""
        now = time.monotonic()
        for request, due in list(self._due.items()):
            if now >= due:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def _leave(self, request: socket.socket) -> None:
        if self._due.pop(request, None) is not None:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client has gone, or takes too long."""

    def server_bind(self) -> None:
        """Bind, without a look at the name service."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request; HTTP/1.0: a connection carries one."""

    server: _Server
    timeout = _CONNECTION_SECONDS

    def do_GET(self) -> None:
        """Answer with the metrics."""
        token = self.server.token
        given = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if token and not hmac.compare_digest(given.encode(), token.encode()):
            self.send_error(401, "Bearer token needed")
        elif (page := self.server.pages.get(self.path.partition("?")[0])) is None:
            self.send_error(404)
        else:
            body = page()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


class _JobCollector:
    """Collector of prometheus-client's, of one moment."""

    def __init__(self, metrics: JobMetrics, now: float) -> None:
        self._metrics, self._now = metrics, now

    def collect(self) -> Iterable[Metric]:
        """Yield each metric with the samples of all processes."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families = {}
        for metric in (*PROCESS_METRICS, *LAUNCHER_METRICS):
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            families[metric.name] = kind(metric.name, metric.text, labels=["role", "rank", "host", *metric.labels])
        for process, (name, labels, value) in self._metrics.samples(self._now):
            report = process.report
            families[name].add_metric([report.kind, str(report.number), report.host, *labels], value)
        return [family for family in families.values() if family.samples]


def format_metrics(metrics: JobMetrics, now: float) -> bytes:
    """Return the metrics of all processes in Prometheus's text format."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_JobCollector(metrics, now))
    text: bytes = generate_latest(registry)
    return text
