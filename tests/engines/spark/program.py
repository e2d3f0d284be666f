"""A driver of Spark: calls functions of this file as its standard input says, and prints their results."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any

from pyspark.sql import SparkSession

CONF = json.loads(sys.argv[1])
builder = SparkSession.builder.appName("tests")
for name, value in CONF.items():
    builder = builder.config(name, value)
session = builder.getOrCreate()
context = session.sparkContext
context.setLogLevel("ERROR")


def plain(tasks: int) -> list[list[Any]]:
    """What Spark itself needs to run a barrier stage."""
    started = time.monotonic()

    def where(partition: Any) -> Any:
        yield socket.gethostname()

    found = context.parallelize(range(tasks), tasks).barrier().mapPartitions(where).collect()
    return [sorted(found), round(time.monotonic() - started, 3)]


def main() -> None:
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = ["result", globals()[name](**arguments)]
        except BaseException:  # noqa: BLE001  the test reads it
            answer = ["error", traceback.format_exc()]
        sys.stdout.write(f"\nANSWER {json.dumps(answer)}\n")
        sys.stdout.flush()
    session.stop()


if __name__ == "__main__":
    main()
