"""The log of autotuning: written, continued, damaged, of something else."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from reigen.autotune.log_file import HEADER, TuningLog, read_best_point
from reigen.autotune.search_space import ParameterPoint
from reigen.autotune.tuner import TunedBlock
from reigen.errors import ConfigError

MIB = 1 << 20
BEST = ParameterPoint(32 * MIB, 2 * MIB, "direct", 4)
#: What Horovod writes first.
HOROVOD = (
    "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,tensor_fusion_threshold,"
    "score"
)


def test_the_columns_begin_with_those_of_horovod() -> None:
    assert HEADER.startswith(HOROVOD + ",")


def write(path: Path, best: ParameterPoint = BEST) -> None:
    log = TuningLog(str(path), 4)
    log.add(TunedBlock(best, "search", (0.01, 0.02, 0.03), 0.5, 1e6, 1.0, 2.0))
    log.close(best, 0.02)
    log.close(ParameterPoint(1, 1), 1.0)


def test_the_last_line_is_the_best_point(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    write(path)
    assert path.read_text().splitlines() == [
        HEADER,
        "0,0,0,1,0,32,50,2097152,direct,4,search,4,10.000 20.000 30.000",
        "0,0,0,1,0,32,50,2097152,direct,4,best,4,",
    ]
    log = TuningLog(str(path), 4)
    log.close(BEST, 1.0)
    assert log.warm_start == BEST


def test_another_job_continues_it(tmp_path: Path) -> None:
    path, other = tmp_path / "log.csv", ParameterPoint(3 * MIB // 2, 5, "", 0)
    write(path)
    write(path, other)
    assert path.read_text().count(HEADER) == 1
    assert read_best_point(str(path)) == other


def test_lines_that_are_damaged_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    write(path)
    with path.open("a") as file:
        file.write("0,0,0,1,0,many,1,1,direct,1,best,4,\n0,0,0,1,0,3")
    assert read_best_point(str(path)) == BEST
    write(path)
    assert path.read_text().splitlines()[-3] == "0,0,0,1,0,3", "and what comes next begins a line"


@pytest.mark.parametrize("text", [HOROVOD + "\n0,0,0,1,5,64,12.5\n", "a,b\n", "\0\xff"])
def test_a_log_of_something_else_is_refused_and_not_written_over(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"log\.csv is no log of autotuning of this version"):
        TuningLog(str(path), 2)
    assert path.read_text() == text


def test_there_need_be_none_yet(tmp_path: Path) -> None:
    assert read_best_point(str(tmp_path / "none")) is None
    (tmp_path / "empty").touch()
    assert read_best_point(str(tmp_path / "empty")) is None


def test_a_place_that_cannot_be_written_is_said_once_and_does_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        write(tmp_path / "no" / "log.csv")
        write(tmp_path)
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "No such file or directory",
        "Is a directory",
    ]
