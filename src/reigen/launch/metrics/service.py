"""Receiver of the reports of a job's processes, for Prometheus and files."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from reigen.cluster.metrics import (
    METRICS_PREFIX,
    METRICS_SECRET_VARIABLE,
    METRICS_SERVICE_VARIABLE,
    METRICS_VARIABLE,
    REPORT_CODEC,
)
from reigen.errors import WireError
from reigen.launch.metrics.job_metrics import JobMetrics
from reigen.launch.metrics.options import TOKEN_VARIABLES, DashboardAddress, MetricsAddress, MetricsOptions
from reigen.launch.metrics.waiting import describe_waiting
from reigen.launch.options import complain as tell_user  # at once: a listener shows what it gets when all is over
from reigen.net.listener import join_address

if TYPE_CHECKING:  # loaded where they are wanted
    from reigen.launch.dashboard.server import DashboardServer
    from reigen.launch.metrics.exposition import MetricsServer
    from reigen.launch.metrics.lines_file import MetricsFile

#: Seconds between two reports of a process.
REPORT_SECONDS = 1.0
#: More processes than this have no place: keys are made up by whoever reports.
_MAX_PROCESSES = 1 << 16
#: Variables that are this launcher's to set: its job may be started from another one.
_OWN_VARIABLES = frozenset({METRICS_VARIABLE, METRICS_SERVICE_VARIABLE, METRICS_SECRET_VARIABLE}) | TOKEN_VARIABLES
_log = logging.getLogger(__name__)


class MetricsService:
    """Receiver of reports, in the launcher.

    Args:
        options: of the job.
        complain: tells the user what is wrong.
        program: of the job, by name.

    Raises:
        ConfigError: the port is taken, or the file cannot be written.
    """

    def __init__(self, options: MetricsOptions, complain: Callable[[str], None], program: str = "") -> None:
        self.metrics = JobMetrics()
        #: where they are served; empty: nowhere
        self.address = ""
        self._server: MetricsServer | None = None
        self._file: MetricsFile | None = None
        self._dashboard: DashboardServer | None = None
        if options.file is not None:
            from reigen.launch.metrics.lines_file import MetricsFile

            self._file = MetricsFile(options.file, complain)
        if options.address is not None:
            self._serve(options.address)
        if options.dashboard is not None:
            self._serve_dashboard(options.dashboard, program)

    def _serve(self, address: MetricsAddress) -> None:
        from reigen.launch.metrics.exposition import MetricsServer

        try:
            self._server = MetricsServer(address, self.metrics)
        except BaseException:
            self.close()
            raise
        self.address = join_address(address.host, self._server.port)
        if not address.port:
            tell_user(f"metrics are at http://{self.address}/metrics")

    def _serve_dashboard(self, address: DashboardAddress, program: str) -> None:
        from reigen.launch.dashboard.server import DashboardServer

        try:
            self._dashboard = DashboardServer(address, self.metrics, program)
        except BaseException:
            self.close()
            raise
        tell_user(f"the dashboard is at {self._dashboard.url}")
        if not address.is_loopback:
            tell_user(
                "the dashboard is served to other hosts, without encryption: whoever has this URL, or can read along, "
                "sees the names of hosts and of the program, rates, memory, and the launcher's messages"
            )

    def note(self, text: str) -> None:
        """Show a message of the launcher's on the dashboard, if there is one."""
        if self._dashboard is not None:
            self._dashboard.note("note", text)

    def finish(self, exit_code: int, text: str) -> None:
        """Show the end of the job on the dashboard, and write it to the file; ``text``: why it has failed."""
        verdict = describe_waiting(self.metrics.current())
        if self._file is not None:
            self._file.finish(exit_code, text, verdict)
        if self._dashboard is not None:
            from reigen.launch.dashboard.feed import JobEnd

            self._dashboard.finish(JobEnd(exit_code, text, verdict))

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
        if self._dashboard is not None:
            self._dashboard.start()

    def close(self) -> None:
        """Stop serving, and write the last lines."""
        if self._file is not None:
            self._file.close()
        if self._server is not None:
            self._server.close()
        if self._dashboard is not None:
            self._dashboard.close()


def report_environ(options: MetricsOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a job's processes: they report to their own launcher, if it wants that."""
    kept = {name: text for name, text in environ.items() if name not in _OWN_VARIABLES}
    return kept | ({METRICS_VARIABLE: f"{REPORT_SECONDS:g}"} if options.is_wanted else {})
