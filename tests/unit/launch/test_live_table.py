"""The live table: cells, which rows there is room for, lines where there is no terminal, and how it is drawn."""

from __future__ import annotations

import os
import re
from typing import Self

import pytest

from reigen.cluster.metrics import MetricSample
from reigen.launch.metrics.job_metrics import JobMetrics
from reigen.launch.metrics.live_table import (
    HEADINGS,
    LINE_SECONDS,
    TopLines,
    choose_rows,
    draw_table,
    format_row,
)
from reigen.launch.metrics.top import ComplaintQueue, LiveTable
from reigen.launch.output.line_prefix import LineSplitter, TerminalSink
from reigen.launch.output.nonblocking_writer import NonblockingWriter
from tests.unit.launch.test_job_metrics import job, report


def lockstep(size: int, late: int = -1) -> JobMetrics:
    """A job of two seconds, in which all wait for one rank."""
    more: tuple[MetricSample, ...] = (
        ("reigen_goal_steps", (), 100.0),
        ("reigen_memory_bytes", ("resident",), 3 * 2.0**30),
    )
    metrics = job(*((0.0, f"r{rank}", report(rank, more=more)) for rank in range(size)))
    for rank in range(size):
        times = (1.8, 0.2, 0.0) if rank == late else (0.6, 0.2, 1.2)
        samples: tuple[MetricSample, ...] = (("reigen_samples_total", (), 640.0),)
        metrics.take(f"r{rank}", report(rank, steps=20, times=times, more=(*more, *samples)), 2.0)
    return metrics


def test_cells_of_a_rank() -> None:
    rows = lockstep(2, late=1).status(2.5)
    cells = [dict(zip(HEADINGS, format_row(row), strict=True)) for row in rows]
    assert cells[0] == {
        "rank": "0", "host": "host0", "step": "20", "steps/s": "10.0", "samples/s": "320", "compute": "30%",
        "transfer": "10%", "wait": "60%", "memory": "3.0 GiB", "seen": "0 s ago", "left": "8 s", "": "",
    }  # fmt: skip
    assert (cells[1]["compute"], cells[1]["wait"], cells[1][""]) == ("90%", "0%", "the others wait")


def test_cells_of_a_server_and_of_a_rank_that_has_left() -> None:
    server, rank = report(0, kind="server"), report(0, is_last=True)
    first, second = (format_row(row) for row in job((0.0, "r", rank), (0.0, "s", server)).status(1.0))
    assert dict(zip(HEADINGS, first, strict=True))["seen"] == "ended"
    assert second[0] == "server 0"


def test_a_warm_spare_is_named() -> None:
    more: tuple[MetricSample, ...] = (("reigen_warm_spare", (), 1.0),)
    (row,) = job((0.0, "r", report(3, more=more))).status(1.0)
    assert format_row(row)[-1] == "spare"


def test_who_is_in_trouble_is_shown_where_there_is_little_room() -> None:
    rows = lockstep(6, late=4).status(2.5)
    shown, num_left_out = choose_rows(rows, 3)
    assert [row.process.report.number for row in shown] == [0, 1, 4]
    assert num_left_out == 3
    assert choose_rows(rows, 6) == (rows, 0)


@pytest.mark.parametrize(("num_columns", "num_lines"), [(40, 5), (80, 20), (200, 50)])
def test_a_table_is_no_larger_than_its_room(num_columns: int, num_lines: int) -> None:
    lines = draw_table(lockstep(8, late=7).status(2.5), num_columns, num_lines)
    assert len(lines) <= num_lines
    plain = [re.sub(rb"\x1b\[[\d;]*m", b"", line).decode() for line in lines]
    assert max(map(len, plain)) < num_columns
    if num_columns == 200:
        (marked,) = [line for line in plain if "the others wait" in line]
        assert marked.startswith("7 ")
        assert b"\x1b[1;33m" in lines[plain.index(marked)], "marked"


def test_lines_come_now_and_then_and_at_once_when_a_rank_falls_silent() -> None:
    metrics, lines = lockstep(2, late=1), TopLines()
    summary = "step 20 (10.0/s); 2 ranks; 640 samples/s; compute 60%, transfer 10%, wait 30%; "
    assert lines.take(metrics.status(2.0), 2.0) == [f"{summary}the others wait for rank 1 (host host1); 8 s left"]
    assert lines.take(metrics.status(2.5), 2.5) == []
    metrics.take("r0", report(0, steps=20, times=(0.6, 0.2, 3.7)), 4.5)
    assert lines.take(metrics.status(4.6), 4.6) == ["rank 1 (host host1) has said nothing for 3 s"]
    assert lines.take(metrics.status(4.7), 4.7) == []
    metrics.take("r1", report(1, steps=21, times=(4.3, 0.2, 0.0)), 5.0)
    assert lines.take(metrics.status(5.0), 5.0) == ["rank 1 (host host1) is heard again"]
    assert len(lines.take(metrics.status(5.0), 2.0 + LINE_SECONDS)) == 1


def test_before_there_are_rates_nothing_is_said() -> None:
    assert TopLines().take(job((0.0, "a", report())).status(0.0), 0.0) == []


# -- on the terminal --------------------------------------------------------------------------------------------------


def screen(data: bytes) -> list[str]:
    """What a terminal shows: lines, of which some were written over."""
    lines, row, column = [""], 0, 0
    for token in re.findall(rb"\x1b\[\d*[A-Za-z]|\r|\n|[^\x1b\r\n]", data):
        if token == b"\n":
            row, column = row + 1, 0  # a terminal of ours maps it to \r\n
        elif token == b"\r":
            column = 0
        elif token.endswith(b"A") and token.startswith(b"\x1b"):
            row -= int(token[2:-1] or 1)
            assert row >= 0
        elif token == b"\x1b[J":
            lines = [*lines[:row], lines[row][:column]]
        elif token == b"\x1b[K":
            lines[row] = lines[row][:column]
        else:
            lines[row] = lines[row][:column] + token.decode() + lines[row][column + 1 :]
            column += 1
        lines += [""] * (row + 1 - len(lines))
    return lines


class Terminal:
    """Writer to a pipe in the place of a terminal."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self.sink = TerminalSink(prefix=True, num_columns=80)
        self.writer = NonblockingWriter(self._write, self.sink)
        self.ranks = [LineSplitter(self.sink, (rank, 1)) for rank in range(2)]
        self._data = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._read)
        os.close(self._write)

    def prints(self, rank: int, text: str) -> None:
        self.writer.put(self.ranks[rank].feed(text.encode()))

    def shows(self) -> list[str]:
        self.writer.draw_footer()
        self.writer.flush()
        self._data += os.read(self._read, 1 << 16)
        return screen(self._data)


def test_the_table_stays_below_the_output() -> None:
    with Terminal() as terminal:
        terminal.prints(0, "one\n")
        terminal.writer.set_footer([b"table", b"row"])
        assert terminal.shows() == ["[0] one", "table", "row"]
        terminal.prints(1, "two\nthree\n")
        assert terminal.shows() == ["[0] one", "[1] two", "[1] three", "table", "row"]
        terminal.writer.set_footer([b"larger", b"table", b"now"])
        assert terminal.shows() == ["[0] one", "[1] two", "[1] three", "larger", "table", "now"]
        terminal.writer.set_footer([b"small"])
        assert terminal.shows() == ["[0] one", "[1] two", "[1] three", "small"]
        terminal.writer.put(terminal.sink.say(b"reigen run: something\n"))
        terminal.writer.set_footer([])
        assert terminal.shows() == ["[0] one", "[1] two", "[1] three", "reigen run: something", ""]


def test_an_unfinished_line_stays_above_the_table() -> None:
    with Terminal() as terminal:
        terminal.prints(0, "10 %")
        terminal.writer.set_footer([b"table", b"row"])
        assert terminal.shows() == ["[0] 10 %", "table", "row"]
        terminal.prints(0, "\r20 %")
        assert terminal.shows() == ["[0] 20 %", "table", "row"]
        terminal.prints(1, "other\n")
        assert terminal.shows() == ["[1] other", "[0] 20 %", "table", "row"]
        terminal.prints(0, "\r30 %\n")
        assert terminal.shows() == ["[1] other", "[0] 30 %", "table", "row"]
        terminal.writer.set_footer([])
        assert terminal.shows() == ["[1] other", "[0] 30 %", ""]


class Display:
    """Output that a live table stands below."""

    def __init__(self, size: tuple[int, int] | None) -> None:
        self.footer_size = size
        self.footers: list[list[bytes]] = []
        self.said: list[bytes] = []

    def set_footer(self, lines: list[bytes]) -> None:
        self.footers.append(lines)

    def say(self, message: bytes) -> None:
        self.said.append(message)


def test_a_terminal_gets_a_table_twice_a_second_and_a_log_gets_lines() -> None:
    metrics, terminal, log = lockstep(2), Display((120, 20)), Display(None)
    told: list[str] = []
    complaints = ComplaintQueue(told.append, is_held=True)
    table = LiveTable(metrics, terminal, complaints)
    assert [table.turn(now) for now in (2.0, 2.25, 2.5)] == [0.5, 0.25, 0.5]
    assert [len(lines) for lines in terminal.footers] == [3, 3]
    complaints("the disk is full")
    assert terminal.said == [], "other threads may complain"
    table.turn(2.6)
    assert terminal.said == [b"reigen run: the disk is full\n"]
    complaints("and so is the other one")
    table.close()
    assert terminal.footers[-1] == []
    assert terminal.said[1:] == [b"reigen run: and so is the other one\n"]
    complaints("there is no table any more")
    assert told == ["there is no table any more"]
    lines = LiveTable(metrics, log, complaints)
    lines.turn(2.0)
    lines.turn(2.5)
    lines.close()
    assert len(log.said) == 1
    assert log.said[0].startswith(b"reigen run: step 20 (10.0/s); 2 ranks;")
    assert log.footers == []
