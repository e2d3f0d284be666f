"""`reigen top JOB`: live table of a job whose launcher serves its metrics."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import shutil
import sys
import time
from collections.abc import Sequence

import msgspec

from reigen.cli.tables import print_table
from reigen.cluster.membership.rendezvous import split_address
from reigen.cluster.metrics import MetricsReport
from reigen.errors import ConfigError, LaunchError
from reigen.launch.job_directory import job_directory, read_record
from reigen.launch.metrics.job_metrics import JobMetrics
from reigen.launch.metrics.live_table import HEADINGS, TopLines, draw_table, format_row
from reigen.launch.metrics.options import REPORTS_PAGE, TOKEN_VARIABLE, read_token
from reigen.launch.options import complain

_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 10.0
_MAX_ANSWER_BYTES = 256 << 20
_DECODER = msgspec.json.Decoder(list[tuple[str, float, MetricsReport]])


def main(arguments: Sequence[str]) -> int:
    """Show a job until it ends; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="reigen top",
        description="Show the ranks of a job of `reigen run --metrics-port` as a live table: steps, shares of time, "
        "and which rank the others wait for. If stdout is not a terminal: a line now and then.",
    )
    parser.add_argument(
        "job",
        metavar="JOB",
        help="[HOST:]PORT as given to --metrics-port, or the name of a `--on-launcher-loss continue` job; for "
        f"other hosts {TOKEN_VARIABLE} has the token",
    )
    parser.add_argument("--once", action="store_true", help="print the table once and exit")
    chosen = parser.parse_args(arguments)
    try:
        address = find_address(chosen.job)
        return _print_once(address) if chosen.once else _follow(address)
    except (ConfigError, LaunchError) as error:
        complain(str(error), "reigen top")
        return 1
    except KeyboardInterrupt:
        return 130


def find_address(job: str) -> tuple[str, int]:
    """Return where the metrics of a job are served.

    Args:
        job: a port, an address and a port, or the name of a job that goes on without its launcher.

    Raises:
        ConfigError: there is no such job, or it serves no metrics.
    """
    if job.isdigit():
        return "127.0.0.1", int(job)
    if ":" in job:
        return split_address(job)
    record = read_record(job_directory(job))
    if record is None:
        raise ConfigError(f"there is no job {job} of yours on this host; `reigen attach` lists them")
    if not record.metrics:
        raise ConfigError(f"job {job} serves no metrics: it was started without --metrics-port")
    return split_address(record.metrics)


def fetch_reports(address: tuple[str, int]) -> list[tuple[str, float, MetricsReport]]:
    """Return the latest reports of a job's processes, with their keys and ages in seconds.

    Raises:
        OSError: nobody answers.
        LaunchError: the answer is no job's.
    """
    connection = http.client.HTTPConnection(*address, timeout=_ANSWER_SECONDS)
    with contextlib.closing(connection):
        connection.request("GET", REPORTS_PAGE, headers={"Authorization": f"Bearer {read_token(os.environ)}"})
        try:
            answer = connection.getresponse()
            body = answer.read(_MAX_ANSWER_BYTES)
        except http.client.HTTPException as error:
            raise LaunchError(f"{address[0]}:{address[1]} is no launcher that serves metrics: {error!r}") from None
    if answer.status == http.client.UNAUTHORIZED:
        raise LaunchError(f"{address[0]}:{address[1]} wants another token than {TOKEN_VARIABLE} has")
    try:
        return _DECODER.decode(body)
    except msgspec.DecodeError:
        raise LaunchError(f"{address[0]}:{address[1]} is no launcher that serves metrics") from None


def _look(metrics: JobMetrics, address: tuple[str, int]) -> None:
    reports = fetch_reports(address)
    now = time.monotonic()
    for key, age, report in reports:
        metrics.take(key, report, now - age)


def _print_once(address: tuple[str, int]) -> int:
    metrics = JobMetrics()
    for _ in range(2):  # a rate needs two
        _first_look(metrics, address)
        time.sleep(_LOOK_SECONDS)
    _first_look(metrics, address)
    rows = metrics.status(time.monotonic())
    print_table(HEADINGS, [format_row(row) for row in rows], [n for n, row in enumerate(rows) if row.is_silent])
    return 0


def _first_look(metrics: JobMetrics, address: tuple[str, int]) -> None:
    try:
        _look(metrics, address)
    except OSError as error:
        problem = error.strerror or str(error)
        raise LaunchError(f"no job serves metrics at {address[0]}:{address[1]}: {problem}") from None


def _follow(address: tuple[str, int]) -> int:
    """Show the job until its launcher has gone."""
    metrics, lines, screen = JobMetrics(), TopLines(), _Screen()
    _first_look(metrics, address)
    while True:
        now = time.monotonic()
        rows = metrics.status(now)
        if sys.stdout.isatty():
            size = shutil.get_terminal_size()
            screen.draw(draw_table(rows, size.columns, size.lines - 2))
        else:
            for line in lines.take(rows, now):
                print(line, flush=True)
        time.sleep(_LOOK_SECONDS)
        try:
            _look(metrics, address)
        except OSError:
            print("the job has ended, or its launcher has gone")
            return 0


class _Screen:
    """Lines on the terminal that are drawn over."""

    def __init__(self) -> None:
        self._num_lines = 0

    def draw(self, lines: Sequence[bytes]) -> None:
        """Draw these in place of those before."""
        up = f"\x1b[{self._num_lines}A" if self._num_lines else ""
        sys.stdout.write(f"{up}\r\x1b[J" + "".join(f"{line.decode()}\n" for line in lines))
        sys.stdout.flush()
        self._num_lines = len(lines)
