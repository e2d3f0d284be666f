"""Log of autotuning: CSV whose first columns are Horovod's, and the last line of which is the best point.

Columns of parameters that there are none of here are 0, ``score`` is steps a second, ``tensor_fusion_threshold`` MiB.
A log that exists is continued, and its best point is where the next job looks first.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TextIO

from reigen.autotune.search_space import ParameterPoint
from reigen.autotune.tuner import TunedBlock
from reigen.errors import ConfigError
from reigen.files import open_to_append

_log = logging.getLogger(__name__)

HEADER = (
    "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,tensor_fusion_threshold,"
    "score,bucket_bytes,tcp_algorithm,tcp_sockets,phase,ranks,samples_ms"
)
_BEST = "best"
_MIB = 1 << 20


class TuningLog:
    """Log that this job writes. An error while it is written ends the log and not the job.

    Args:
        path: of the file.
        num_ranks: of the job, for a column.

    Attributes:
        warm_start: the best point that an earlier job has written; None: there is none.

    Raises:
        ConfigError: the file is something else, or a log of another version.
    """

    def __init__(self, path: str, num_ranks: int) -> None:
        self._path, self._num_ranks = path, num_ranks
        self.warm_start = read_best_point(path)
        self._file: TextIO | None = None
        try:
            self._file = os.fdopen(open_to_append(path), "a", encoding="utf-8")
            if not Path(path).stat().st_size:
                self._write(HEADER)
            elif not _ends_with_line(path):
                self._write("")
        except OSError as error:
            self._give_up(error)

    def add(self, block: TunedBlock) -> None:
        """Write a block."""
        samples = " ".join(f"{1000 * sample:.3f}" for sample in block.samples)
        self._write_point(block.point, 1 / block.seconds, block.phase, samples)

    def close(self, best: ParameterPoint, seconds: float) -> None:
        """Write the best point, as the last line, and the seconds of a step there. Does nothing the second time."""
        self._write_point(best, 1 / seconds if seconds else 0.0, _BEST, "")
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._give_up(error)

    def _write_point(self, point: ParameterPoint, score: float, phase: str, samples: str) -> None:
        fusion = f"{point.fusion_threshold_bytes / _MIB:g}"
        network = f"{point.tcp_algorithm},{point.tcp_sockets}"
        self._write(
            f"0,0,0,1,0,{fusion},{score:.6g},{point.bucket_bytes},{network},{phase},{self._num_ranks},{samples}"
        )

    def _write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._file = None
        _log.warning("the log of autotuning, %s, cannot be written: %s", self._path, error.strerror or error)


def read_best_point(path: str) -> ParameterPoint | None:
    """Return the best point of the last job that wrote one into a log; None: there is no such log, or none in it.

    Raises:
        ConfigError: the file is something else, or a log of another version.
    """
    try:
        text = Path(path).read_text("utf-8", errors="replace") if Path(path).is_file() else ""
    except OSError:
        return None  # who cannot read it cannot write it, and says so
    lines = text.splitlines()
    if not lines:
        return None
    if lines[0] != HEADER:
        raise ConfigError(
            f"{path} is no log of autotuning of this version (it begins with {lines[0][:60]!r}), and is not written "
            "over: name another file for --autotune-log-file (HOROVOD_AUTOTUNE_LOG), or remove it"
        )
    for line in reversed(lines[1:]):
        values = dict(zip(HEADER.split(","), line.split(","), strict=False))
        if values.get("phase") == _BEST and (point := _parse_point(values)) is not None:
            return point
    return None


def _parse_point(values: dict[str, str]) -> ParameterPoint | None:
    try:
        fusion = round(float(values["tensor_fusion_threshold"]) * _MIB)
        bucket, sockets = int(values["bucket_bytes"]), int(values["tcp_sockets"])
    except (ValueError, OverflowError):
        return None
    return ParameterPoint(fusion, bucket, values["tcp_algorithm"], sockets)


def _ends_with_line(path: str) -> bool:
    """Return whether the last line is whole: a job that was killed may have left a part of one."""
    with Path(path).open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
