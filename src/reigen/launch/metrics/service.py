"""Receiver of the reports of a job's processes, for Prometheus and files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from reigen.cluster.metrics import METRICS_PREFIX, METRICS_VARIABLE, REPORT_CODEC
from reigen.errors import WireError
from reigen.launch.metrics.job_metrics import JobMetrics
from reigen.launch.metrics.options import TOKEN_VARIABLE, MetricsAddress, MetricsOptions
from reigen.net.listener import join_address

if TYPE_CHECKING:  # loaded where they are wanted
    from reigen.launch.metrics.exposition import MetricsServer
    from reigen.launch.metrics.lines_file import MetricsFile

#: Seconds between two reports of a process.
REPORT_SECONDS = 1.0
#: More processes than this have no place: keys are made up by whoever reports.
_MAX_PROCESSES = 1 << 16
_log = logging.getLogger(__name__)


class MetricsService:
    """Receiver of reports, in the launcher.

    Args:
        options: of the job.
        complain: tells the user what is wrong.

    Raises:
        ConfigError: the port is taken, or the file cannot be written.
    """

    def __init__(self, options: MetricsOptions, complain: Callable[[str], None]) -> None:
        self.metrics = JobMetrics()
        #: where they are served; empty: nowhere
        self.address = ""
        self._server: MetricsServer | None = None
        self._file: MetricsFile | None = None
        if options.file is not None:
            from reigen.launch.metrics.lines_file import MetricsFile

            self._file = MetricsFile(options.file, complain)
        if options.address is not None:
            self._serve(options.address, complain)

    def _serve(self, address: MetricsAddress, complain: Callable[[str], None]) -> None:
        from reigen.launch.metrics.exposition import MetricsServer

        try:
            self._server = MetricsServer(address, self.metrics)
        except BaseException:
            self.close()
            raise
        self.address = join_address(address.host, self._server.port)
        if not address.port:
            complain(f"metrics are at http://{self.address}/metrics")

    def receive(self, key: str, value: bytes) -> bool:
        """Take in a value that a process has put into the control service; returns whether it is a report."""
        if not key.startswith(METRICS_PREFIX):
            return False
        try:
            report = REPORT_CODEC.decode(value)
        except WireError as error:
            _log.debug("%s: %s", key, error)
            return True
        if key in self.metrics.processes or len(self.metrics.processes) < _MAX_PROCESSES:
            self.metrics.take(key, report, time.monotonic())
            if self._file is not None:
                self._file.add(key, report)
        return True

    def start(self) -> None:
        """Serve, and write: threads are started."""
        if self._file is not None:
            self._file.start()
        if self._server is not None:
            self._server.start()

    def close(self) -> None:
        """Stop serving, and write the last lines."""
        if self._file is not None:
            self._file.close()
        if self._server is not None:
            self._server.close()


def report_environ(options: MetricsOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a job's processes: they report to their own launcher, if it wants that."""
    kept = {name: text for name, text in environ.items() if name not in {METRICS_VARIABLE, TOKEN_VARIABLE}}
    return kept | ({METRICS_VARIABLE: f"{REPORT_SECONDS:g}"} if options.is_wanted else {})
