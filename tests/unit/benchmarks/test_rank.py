"""One rank of a benchmark: its place, its core, its loop, and what it says to the controller."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.arrays import SumOf
from benchmarks.harness.peers import find_peer
from benchmarks.harness.rank import core_of, load_program, measure, place, serve
from benchmarks.harness.turns import ANSWERS, Line, Open, Shut, Spans, Turn
from benchmarks.harness.work import Case, WrongResultError


class _Work:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def prepare(self) -> None:
        self.log.append("prepare")

    def operate(self) -> None:
        self.log.append("operate")

    def check(self) -> None:
        self.log.append("check")

    def close(self) -> None:
        self.log.append("close")


class _Program:
    def __init__(self) -> None:
        self.versions: dict[str, str] = {}
        self.log: list[str] = []

    def open(self, case: Case) -> _Work:
        self.log.append(f"open {case.name} {case.nbytes}")
        return _Work(self.log)

    def close(self) -> None:
        self.log.append("leave")


@pytest.fixture
def ends() -> Iterator[tuple[Line, Line]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        theirs.settimeout(10)
        yield Line(ours), Line(theirs)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
        ({"REIGEN_RANK": "1", "REIGEN_SIZE": "2"}, (1, 2)),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, (3, 4)),
        ({"RANK": "1"}, (0, 1)),
    ],
)
def test_place_is_what_the_launcher_says(environ: Mapping[str, str], expected: tuple[int, int]) -> None:
    assert place(environ) == expected


def test_ranks_have_cores_in_turn() -> None:
    assert [core_of(rank, [7, 2, 5]) for rank in range(5)] == [2, 5, 7, 2, 5]


def test_every_operation_is_prepared_and_those_that_settle_do_not_count() -> None:
    log: list[str] = []
    spans = measure(_Work(log), 2, 3)
    assert log == ["prepare", "operate"] * 5
    assert len(spans) == 3
    times = [time for span in spans for time in span]
    assert times == sorted(times)


def test_a_rank_does_what_it_is_told_until_the_socket_is_closed(ends: tuple[Line, Line]) -> None:
    controller, rank = ends
    for command in (Open("k", Case("sum", 64), 2), Turn("k", 1, 2), Shut("k")):
        controller.send(command)
    controller.connection.shutdown(socket.SHUT_WR)
    program = _Program()
    serve(rank, program)
    step = ["prepare", "operate"]
    assert program.log == ["open sum 64", *step * 2, "check", *step * 3, "close"]
    answers = [ANSWERS.decode(controller.receive()) for _ in range(3)]
    assert [len(answer.spans) for answer in answers if isinstance(answer, Spans)] == [2, 2, 0]


def test_messages_are_found_in_any_pieces(ends: tuple[Line, Line]) -> None:
    left, right = ends
    for piece in (b'{"a"', b":1}\n{", b"}\n"):
        left.connection.sendall(piece)
    assert [right.receive(), right.receive()] == [b'{"a":1}', b"{}"]
    left.connection.sendall(b"half a message")
    left.connection.shutdown(socket.SHUT_WR)
    with pytest.raises(EOFError):
        right.receive()


def test_a_sum_is_checked_against_the_closed_form() -> None:
    array = np.zeros(8, np.float32)
    work = SumOf([array], 1, 3, lambda: array.fill(6.0))
    work.prepare()
    assert (array == 2).all()
    work.operate()
    work.check()
    array[5] = 7
    with pytest.raises(WrongResultError, match="array 0: the sum is 6, not 7"):
        work.check()


def test_a_program_is_a_file_or_a_module(tmp_path: Path) -> None:
    file = tmp_path / "some_peer.py"
    file.write_text("def start(rank, size):\n    return rank, size\n")
    assert load_program(str(file)).start(1, 2) == (1, 2)
    assert load_program("benchmarks.programs.copying").start(0, 1).versions


def test_a_peer_without_its_file_is_left_out_with_a_reason(tmp_path: Path) -> None:
    assert "the peers come with a checkout" in str(find_peer("gloo", 2, tmp_path))


def test_mpi_without_mpirun_is_left_out_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mpi_allreduce.py").touch()
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    assert "there is no mpirun" in str(find_peer("mpi", 2, tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "mpi4py is not installed" in str(find_peer("mpi", 2, tmp_path))
