"""The timeline's file: a JSON array after every single write, whatever goes wrong."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path

import pytest

from reigen.observe.trace_writer import TraceFile

PAGE = 4096


def crosses(offset: int, nbytes: int) -> bool:
    return offset // PAGE != (offset + nbytes - 1) // PAGE


def record(number: int, nbytes: int) -> bytes:
    return json.dumps({"number": number, "padding": "x" * nbytes}).encode()


def test_every_write_leaves_a_valid_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "t.json", os.pwrite
    lengths: list[int] = []

    def checked(fd: int, data: bytes, offset: int) -> int:
        nbytes_before = os.fstat(fd).st_size
        num_written = write(fd, data, offset)
        if lengths:  # the first one goes to the file that then takes the place
            assert num_written == len(data)
            numbers = [value["number"] for value in json.loads(path.read_bytes())]
            assert numbers == list(range(len(numbers)))
            if data.strip() and crosses(offset, len(data)):
                assert len(numbers) - lengths[-1] == 1, "more than one record crosses the border of a page"
                assert offset + len(data) == nbytes_before, "the file grows while it is not valid"
            if data.strip():
                lengths.append(len(numbers))
        return num_written

    monkeypatch.setattr(os, "pwrite", checked)
    rng = random.Random(1)
    file = TraceFile(path, record(0, 10))
    lengths.append(1)
    for size in (0, 1, 300, 7):
        first = lengths[-1]
        file.append([record(first + i, rng.choice((1, 50, 200, 5000))) for i in range(size)])
    file.close()
    assert lengths[-1] == 309
    assert 30 < len(lengths) < 309, "several records go together"


def test_what_does_not_fit_is_left_out_and_the_file_stays_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "t.json", os.pwrite
    left = [9000]

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        """A disk with room for so many bytes more."""
        growth = offset + len(data) - os.fstat(fd).st_size
        if growth > left[0]:
            if left[0] == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            data, growth = data[: len(data) - growth + left[0]], left[0]
        left[0] -= max(0, growth)
        return write(fd, data, offset)

    file = TraceFile(path, record(0, 10))
    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space left"):
        file.append([record(number, 50 if number % 5 else 3000) for number in range(1, 40)])
    file.close()
    numbers = [value["number"] for value in json.loads(path.read_bytes())]
    assert numbers == list(range(len(numbers)))
    assert 3 < len(numbers) < 20


def test_a_file_is_replaced_by_a_valid_one_at_once(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("something else")
    TraceFile(path, b"{}").close()
    assert json.loads(path.read_bytes()) == [{}]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["missing/t.json", ".", "file/t.json"])
def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"No such file|Is a directory|Not a directory|resource busy"):
        TraceFile(tmp_path / name, b"{}")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize("nbytes", [10, 5000])
def test_another_process_continues_a_file_wherever_it_breaks_off(tmp_path: Path, nbytes: int) -> None:
    path = tmp_path / "t.json"
    file = TraceFile(path, record(0, 10))
    file.append([record(1, nbytes), record(2, nbytes)])
    file.close()
    whole = path.read_bytes()
    last = len(whole.removesuffix(b"\n]\n"))
    for cut in (*range(last - 30, len(whole) + 1), last - 8000 if nbytes > 10 else last - 40):
        path.write_bytes(whole[:cut] + b" " * (cut % 3))
        file, first = TraceFile.resume(path, 0.0)
        assert first["number"] == 0
        file.append([record(9, 0)])
        file.close()
        numbers = [value["number"] for value in json.loads(path.read_bytes())]
        assert numbers[-1] == 9
        assert numbers[:-1] == ([0, 1, 2] if cut >= last else [0, 1] if nbytes == 10 or cut > last - 5000 else [0]), cut


def test_a_file_is_continued_when_its_writer_has_closed_it(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    file = TraceFile(path, record(0, 10))
    with pytest.raises(TimeoutError, match="another process still writes it"):
        TraceFile.resume(path, 0.05)
    file.close()
    TraceFile.resume(path, 0.0)[0].close()
    path.write_bytes(b"")
    resumed, first = TraceFile.resume(path, 0.0)
    assert first == {}
    resumed.close()
