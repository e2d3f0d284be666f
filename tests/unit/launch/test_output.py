"""What ranks print becomes what the launcher prints. Terminals are judged by a small one of our own."""

import os
from types import SimpleNamespace

import pytest

from reigen.launch.output.line_prefix import MAX_LINE_BYTES, LineSplitter, LogSink, TerminalSink, visible_text
from reigen.launch.output.nonblocking_writer import NonblockingWriter
from reigen.launch.output.output_mux import OutputMux

OUT, ERR = 0, 1


def streams(screen, *sources):
    return [LineSplitter(screen, source) for source in sources]


class Glass:
    """Shows bytes as a terminal would: carriage return, newline, erase to the end of the line."""

    def __init__(self):
        self.rows, self.column = [""], 0

    def write(self, data):
        text = data.decode()
        while text:
            if text.startswith("\x1b[K"):
                self.rows[-1] = self.rows[-1][: self.column]
                text = text[3:]
                continue
            char, text = text[0], text[1:]
            if char == "\n":
                self.rows.append("")
                self.column = 0
            elif char == "\r":
                self.column = 0
            else:
                row = self.rows[-1].ljust(self.column)
                self.rows[-1] = row[: self.column] + char + row[self.column + 1 :]
                self.column += 1


@pytest.fixture
def glass():
    return Glass()


@pytest.fixture
def terminal():
    return TerminalSink(prefix=True, num_columns=40)


def test_lines_carry_their_rank_and_come_whole():
    zero, one = streams(LogSink(prefix=True), (0, OUT), (1, OUT))
    assert zero.feed(b"half") == b""
    assert one.feed(b"a\nb\n\n") == b"[1] a\n[1] b\n[1] \n"
    assert zero.feed(b" line\nnext") == b"[0] half line\n"
    assert zero.end() == b"[0] next\n"
    assert zero.end() == b""


def test_without_prefix():
    (one,) = streams(LogSink(prefix=False), (1, OUT))
    assert one.feed(b"a\nb") == b"a\n"
    assert one.end() == b"b\n"


def test_bytes_that_are_no_text_pass_unchanged():
    (zero,) = streams(LogSink(prefix=True), (0, OUT))
    data = bytes(byte for byte in range(256) if byte != 10)
    assert zero.feed(data + b"\n") == b"[0] " + data + b"\n"


def test_an_endless_line_comes_in_pieces_and_none_of_it_is_lost():
    (zero,) = streams(LogSink(prefix=True), (0, OUT))
    shown = b"".join(zero.feed(b"x" * 1000) for _ in range(1000)) + zero.end()
    assert shown.replace(b"[0] ", b"").replace(b"\n", b"") == b"x" * 1_000_000
    assert max(map(len, shown.split(b"\n"))) <= MAX_LINE_BYTES + 4


def test_the_tail_holds_the_last_twenty_lines_and_is_bounded():
    (zero,) = streams(LogSink(prefix=True), (0, ERR))
    zero.feed(b"".join(b"%d\n" % number for number in range(100)))
    zero.feed(b"last words")
    zero.end()
    assert list(zero.tail) == [b"%d" % number for number in range(81, 100)] + [b"last words"]
    zero.feed(b"y" * 5000 + b"\n")
    assert len(zero.tail[-1]) == 1024


@pytest.mark.parametrize(
    ("line", "shown"),
    [(b"plain", b"plain"), (b"\r10%\r20%", b"20%"), (b"10%\r20%\r", b"20%"), (b"dos\r", b"dos"), (b"\r\r", b"")],
)
def test_visible(line, shown):
    assert visible_text(line) == shown


@pytest.mark.parametrize("style", [b"\r%d%%", b"%d%%\r"])
def test_progress_of_rank_0_redraws_in_place_under_the_lines_of_others(glass, terminal, style):
    zero, one = streams(terminal, (0, ERR), (1, OUT))
    for percent in range(0, 60, 10):
        glass.write(zero.feed(style % percent))
        assert glass.rows[-1] == f"[0] {percent}%"
        if percent == 30:
            glass.write(one.feed(b"hello\npart"))
            assert glass.rows == ["[1] hello", "[0] 30%"]
    glass.write(one.feed(b"ial\n"))
    assert glass.rows == ["[1] hello", "[1] partial", "[0] 50%"]
    glass.write(zero.feed(b"\rdone\n"))
    assert glass.rows == ["[1] hello", "[1] partial", "[0] done", ""]


def test_a_shorter_progress_line_leaves_nothing_of_the_longer_one(glass, terminal):
    (zero,) = streams(terminal, (0, OUT))
    glass.write(zero.feed(b"\rlong progress"))
    glass.write(zero.feed(b"\rshort"))
    assert glass.rows == ["[0] short"]


def test_other_streams_of_rank_0_do_not_disturb_its_progress(glass, terminal):
    out, err = streams(terminal, (0, OUT), (0, ERR))
    glass.write(err.feed(b"\r50%"))
    glass.write(out.feed(b"epoch 1\n"))
    assert glass.rows == ["[0] epoch 1", "[0] 50%"]
    glass.write(err.end())
    assert glass.rows == ["[0] epoch 1", "[0] 50%", ""]


def test_progress_of_other_ranks_is_shown_when_its_line_ends(glass, terminal):
    (one,) = streams(terminal, (1, OUT))
    assert one.feed(b"\r1%\r2%") == b""
    glass.write(one.feed(b"\r100%\n"))
    assert glass.rows == ["[1] 100%", ""]


def test_a_question_of_rank_0_is_seen_before_its_line_ends(glass, terminal):
    (zero,) = streams(terminal, (0, OUT))
    glass.write(zero.feed(b"name? "))
    assert glass.rows == ["[0] name? "]
    assert glass.column == len("[0] name? ")


def test_a_progress_line_never_wraps(glass, terminal):
    (zero,) = streams(terminal, (0, OUT))
    glass.write(zero.feed(b"\r" + "█".encode() * 100))
    assert glass.rows == ["[0] " + "█" * 35]


def test_hours_of_progress_do_not_pile_up(terminal):
    (zero,) = streams(terminal, (0, OUT))
    shown = b"".join(zero.feed(b"\r%5d of 100000" % step) for step in range(20_000))
    assert b"\n" not in shown


def test_an_outlet_never_waits_for_its_reader():
    reader, writer = os.pipe()
    outlet = NonblockingWriter(writer, LogSink(prefix=False))
    data = os.urandom(3 << 20)
    outlet.put(data)
    outlet.flush()
    assert outlet.is_full
    received = bytearray()
    while len(received) < len(data):
        received += os.read(reader, 1 << 16)
        outlet.flush()
    assert bytes(received) == data
    assert not outlet.pending
    os.close(reader)
    outlet.put(b"nobody reads this")
    outlet.flush()
    assert outlet.broken
    assert not outlet.pending
    os.close(writer)


@pytest.mark.parametrize("style", [b"\r%d%%", b"%d%%\r"])
def test_progress_in_a_pipe_appears_at_once(glass, style):
    zero, one = streams(LogSink(prefix=True), (0, ERR), (1, ERR))
    for percent in range(0, 50, 10):
        glass.write(zero.feed(style % percent))
        assert glass.rows == [f"[0] {percent}%"]
    glass.write(one.feed(b"\r7%"))
    assert glass.rows == ["[0] 40%", "[1] 7%"]
    glass.write(zero.feed(style % 50))
    assert glass.rows == ["[0] 40%", "[1] 7%", "[0] 50%"]
    glass.write(zero.feed(b"\n") + one.feed(b"\r99%\n"))
    assert glass.rows == ["[0] 40%", "[1] 7%", "[0] 50%", "[1] 99%", ""]


def test_lines_of_other_ranks_do_not_tear_progress_in_a_pipe(glass):
    zero, one = streams(LogSink(prefix=True), (0, ERR), (1, OUT))
    glass.write(zero.feed(b"\r10% of a "))
    glass.write(one.feed(b"hello\nunfinished"))
    glass.write(zero.feed(b"hundred"))
    assert glass.rows == ["[0] 10% of a ", "[1] hello", "[0] 10% of a hundred"]
    glass.write(one.feed(b" line\n"))
    assert zero.end() == b"", "a line that is written is not written again"
    assert glass.rows == ["[0] 10% of a ", "[1] hello", "[0] 10% of a hundred", "[1] unfinished line", ""]


def test_a_log_of_one_rank_without_prefix_has_the_bytes_that_were_printed():
    (zero,) = streams(LogSink(prefix=False), (0, OUT))
    printed = [b"\r1", b"0%", b"\r20%", b"\r", b"\nplain", b" line\ndos\r", b"\n50%\r", b"60%\r\r70%", b"\n", b"last\r"]
    assert b"".join(zero.feed(data) for data in printed) + zero.end() == b"".join(printed) + b"\n"


def test_hours_of_progress_in_a_pipe_do_not_pile_up_and_are_written_once():
    (zero,) = streams(LogSink(prefix=False), (0, OUT))
    steps = [b"\r%5d of 100000" % step for step in range(20_000)]
    assert b"".join(map(zero.feed, steps)) == b"".join(steps)


@pytest.mark.parametrize("style", [b"\r%d%%", b"%d%%\r"])
def test_messages_of_the_launcher_do_not_tear_progress(glass, terminal, style):
    (zero,) = streams(terminal, (0, ERR))
    glass.write(terminal.say(b"reigen run: 1\n") + zero.feed(style % 10))
    glass.write(terminal.say(b"reigen run: 2\n"))
    assert glass.rows == ["reigen run: 1", "reigen run: 2", "[0] 10%"]
    glass.write(zero.feed(b"\rdone\n") + terminal.say(b"reigen run: 3\n"))
    assert glass.rows == ["reigen run: 1", "reigen run: 2", "[0] done", "reigen run: 3", ""]


@pytest.mark.parametrize("style", [b"\r%d%%", b"%d%%\r"])
def test_messages_of_the_launcher_do_not_tear_progress_in_a_pipe(glass, style):
    log = LogSink(prefix=True)
    (zero,) = streams(log, (0, ERR))
    glass.write(log.say(b"reigen run: 1\n") + zero.feed(style % 10))
    glass.write(log.say(b"reigen run: 2\n") + log.say(b"reigen run: 3\n"))
    assert glass.rows == ["reigen run: 1", "[0] 10%", "reigen run: 2", "reigen run: 3", ""]
    glass.write(zero.feed(style % 20))
    assert glass.rows[4:] == ["[0] 20%"]


def test_an_empty_message_of_the_launcher_writes_nothing(terminal):
    for screen in (LogSink(prefix=True), terminal):
        (zero,) = streams(screen, (0, ERR))
        zero.feed(b"\r10%")
        assert screen.say(b"") == b""


def test_the_multiplexer_ends_a_progress_line_before_a_message(monkeypatch):
    writer = NonblockingWriter(2, LogSink(prefix=True))
    monkeypatch.setattr("reigen.launch.output.output_mux.open_std_writers", lambda **_: [writer, writer])
    options = SimpleNamespace(
        num_ranks=1, first_ps_number=1, servers=None, prefix=True, timestamps=False, output_directory=None
    )
    mux = OutputMux(options, None, list, None)
    mux.printed(0, ERR, b"\r10%")
    mux.say(b"reigen run: message\n")
    assert writer.pending.endswith(b"10%\nreigen run: message\n")


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_progress_with_a_return_at_its_end_is_not_written_again_below_another_line(end):
    zero, one = streams(LogSink(prefix=True), (0, ERR), (1, ERR))
    assert zero.feed(b"50%\r") == b"[0] 50%"
    assert one.feed(b"hello\n") == b"\n[1] hello\n"
    assert zero.feed(end) == b""
    assert zero.feed(b"\r\n") == b"\r\n", "nothing of it was written"
