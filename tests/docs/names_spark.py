"""A session of Spark's within this host, and what is trained in it, for the pages about Spark and YARN."""

from __future__ import annotations

import atexit
import tempfile
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

Names = dict[str, Any]

SCRIPT = """
import sys
import numpy as np
import reigen
reigen.init()
with open(f"{__file__}.{reigen.rank()}", "w") as file:
    file.write(f"{sys.argv[1:]} {reigen.allreduce(np.ones(1), op=reigen.Sum)[0]:g}")
"""


@cache
def session() -> Any:
    """The session of all programs; it ends with the process."""
    from tests.engines.spark.local import local_session

    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(local_session())


def train_elastic(learning_rate: float) -> tuple[float, int]:
    import numpy as np

    import reigen
    from reigen.elastic import ObjectState, run

    reigen.init()

    @run
    def loop(state: ObjectState) -> None:
        while state.step < 3:
            state.total += float(reigen.allreduce(np.full(1, learning_rate))[0])
            state.step += 1
            state.commit()

    loop(state := ObjectState(reigen.broadcast_object, reigen.rank, step=0, total=0.0))
    return state.total, reigen.size()


def given_spark() -> Names:
    session()
    directory = tempfile.mkdtemp(dir=".")
    (Path(directory) / "train.py").write_text(SCRIPT)
    return {"loss": 0.5, "directory": str(Path(directory).resolve())}


def check_spark(names: Names) -> None:
    assert names["losses"] == [0.5, 0.5]
    written = [Path(f"{names['directory']}/train.py.{rank}").read_text() for rank in range(2)]
    assert written == ["['--lr', '0.1'] 2"] * 2


def given_spark_elastic() -> Names:
    import reigen.spark

    session()
    return {"reigen": reigen, "train": train_elastic}


def check_spark_elastic(names: Names) -> None:
    assert {size for _, size in names["losses"]} == {2}
    assert all(abs(total - 0.3) < 1e-9 for total, _ in names["losses"])


def given_yarn() -> Names:
    session()
    return {}


def given_estimator() -> Names:
    import torch
    from pyspark.ml.linalg import Vectors

    torch.manual_seed(0)
    rows = [(Vectors.dense([x, x * x]), 3.0 * x) for x in (number / 20 for number in range(40))]
    df = session().createDataFrame(rows, ["features", "y"])
    directory = str(Path(tempfile.mkdtemp(dir=".")).resolve())
    return {"torch": torch, "model": torch.nn.Linear(2, 1), "df": df, "directory": directory}


def check_estimator(names: Names) -> None:
    history = names["fitted"].getHistory()
    assert len(history) == 5
    assert len(names["fitted"].transform(names["df"]).select("y__output").collect()) == 40
