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
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyspark import InheritableThread
from pyspark.sql import SparkSession

import reigen.spark
from reigen.compat import DIRECTORY
from reigen.errors import LaunchError, RankFailedError

CONF = json.loads(sys.argv[1])
builder = SparkSession.builder.appName("tests")
for name, value in CONF.items():
    builder = builder.config(name, value)
session = builder.getOrCreate()
context = session.sparkContext
context.setLogLevel("ERROR")


class Stream(io.StringIO):
    """What ranks print; says when one of them has printed `ready`."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if "ready" in self.getvalue():
            self.ready.set()
        return written


def servers(tasks: int, timeline: str) -> list[Any]:
    """A sum on parameter servers, and a timeline."""

    def add() -> tuple[int, int, float, str]:
        import numpy as np

        import reigen

        reigen.init()
        reigen.start_timeline(timeline)
        reigen.allreduce(np.ones(2), name="seen")
        reigen.stop_timeline()
        with reigen.kv.create("dist_sync") as store:
            total = np.empty(4, np.float32)
            store.init("w", np.zeros(4, np.float32))
            store.push("w", np.full(4, store.rank + 1, np.float32))
            store.pull("w", total)
            return store.rank, store.num_workers, float(total[0]), os.environ["DMLC_NUM_SERVER"]

    return reigen.spark.run(add, num_proc=tasks, num_servers=2, stdout=Stream(), stderr=Stream())


def plain(tasks: int) -> list[Any]:
    """How long Spark itself needs for a barrier stage, and where its tasks are."""
    started = time.monotonic()

    def where(partition: Any) -> Any:
        yield socket.gethostname()

    found = context.parallelize(range(tasks), tasks).barrier().mapPartitions(where).collect()
    return [sorted(found), round(time.monotonic() - started, 3)]


def results(tasks: int) -> dict[str, Any]:
    """A closure in all ranks: what it returns, what it prints, its environment."""
    offset, stream = 7, Stream()

    def func(factor: int) -> list[Any]:
        import numpy as np

        import reigen

        reigen.init()
        total = reigen.allreduce(np.full(3, reigen.rank() + 1.0), op=reigen.Sum)
        print("from", socket.gethostname(), flush=True)
        seen = {name: os.environ.get(name) for name in ("OF_ALL", "OF_DRIVER", "SPARK_HOME", "RANK")}
        secret = any("FACTORY_SECRET" in name for name in os.environ)
        place = [reigen.rank(), reigen.local_rank(), reigen.local_size(), reigen.cross_rank()]
        return [socket.gethostname(), place, float(total[0]), factor * offset, seen, secret, str(Path.cwd())]

    os.environ["OF_DRIVER"] = "1"
    started = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = reigen.spark.run(func, (3,), num_proc=tasks, env={"OF_ALL": "x y"}, stdout=stream)
    seconds = round(time.monotonic() - started, 3)
    return {
        "results": found,
        "output": stream.getvalue(),
        "seconds": seconds,
        "warned": [str(w.message) for w in caught],
    }


def fail(how: str, tasks: int) -> dict[str, Any]:
    """What the driver gets when rank 1 ends in some way, and when."""

    def func() -> None:
        import reigen

        reigen.init()
        reigen.barrier()
        if reigen.rank() == 1:
            print(f"at {time.time()}", flush=True)
            if how == "raise":
                raise ValueError("oops", socket.gethostname())
            if how == "exit":
                os._exit(7)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "kill the agent":
                os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(300)

    return caught(lambda stream: reigen.spark.run(func, num_proc=tasks, stdout=stream, stderr=stream))


def caught(run: Callable[[Stream], Any]) -> dict[str, Any]:
    stream = Stream()
    try:
        run(stream)
    except RankFailedError as error:
        cause = repr(error.__cause__)
        found = {"rank": error.rank, "host": error.host, "code": error.exit_code, "cause": cause, "text": str(error)}
    except (LaunchError, TimeoutError, KeyboardInterrupt, ValueError, RuntimeError) as error:
        found = {"text": str(error)}
        found["kind"] = type(error).__name__
    else:
        found = {"text": "nothing was raised"}
    at = [float(line.rpartition("at ")[2]) for line in stream.getvalue().splitlines() if "at 1" in line]
    return {**found, "seconds": round(time.time() - at[0], 3) if at else None, "output": stream.getvalue()}


def elastic(least: int, most: int, directory: str) -> dict[str, Any]:
    """An elastic job."""
    from tests.elastic.engine_training import train_until

    found = reigen.spark.run_elastic(train_until, (directory,), min_num_proc=least, max_num_proc=most)
    return {"results": found}


def interrupted(how: str, tasks: int) -> dict[str, Any]:
    """What the driver gets when the job is ended from outside, once its ranks run."""

    def func() -> None:
        import reigen

        reigen.init()
        reigen.barrier()
        print("ready", flush=True)
        time.sleep(300)

    ended: list[float] = []

    def run(stream: Stream) -> None:
        def end() -> None:
            assert stream.ready.wait(60)
            ended.append(time.time())
            if how == "job group":
                groups = [f"reigen.run.{number}" for number in range(1, 1000)]
                for group in groups:
                    if context.statusTracker().getJobIdsForGroup(group):
                        context.cancelJobGroup(group)
            elif how == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
            else:
                Path(how).write_text("ready")

        thread = threading.Thread(target=end)
        thread.start()
        try:
            reigen.spark.run(func, num_proc=tasks, stdout=stream, stderr=stream)
        finally:
            thread.join()

    found = caught(run)
    return {**found, "seconds": round(time.time() - ended[0], 3)}


def refused(call: str) -> list[str]:
    """The error of a call that cannot be done."""
    try:
        return ["", repr(eval(call, {"reigen": reigen, "len": len}))]  # noqa: S307  the test's own
    except Exception as error:  # noqa: BLE001  the test looks at it
        return [type(error).__name__, str(error)]


def held(tasks: int) -> list[str]:
    """The error of a job whose slots another one holds."""

    def hold() -> None:
        context.setJobGroup("held", "holds all slots", interruptOnCancel=True)
        with suppress(Exception):
            context.parallelize(range(tasks), tasks).map(lambda _: time.sleep(60)).collect()

    thread = InheritableThread(target=hold)
    thread.start()
    try:
        return refused("reigen.spark.run(len, num_proc=2, start_timeout=1.5)")
    finally:
        context.cancelJobGroup("held")
        thread.join()


def repeat(times: int, tasks: int) -> list[float]:
    """Seconds of each of several runs in a row."""
    seconds = []
    for number in range(times):
        started = time.monotonic()
        found = reigen.spark.run(lambda: int(os.environ["REIGEN_RANK"]) * 2, num_proc=tasks, stdout=Stream())
        assert found == [2 * rank for rank in range(tasks)], (number, found)
        seconds.append(round(time.monotonic() - started, 3))
    return seconds


def horovod_names(tasks: int) -> Any:
    """The program of Horovod's documentation, with a sum."""
    sys.path.insert(0, DIRECTORY)
    import horovod.spark

    def train_fn(magic_number: int) -> list[Any]:
        import horovod.torch as hvd
        import torch

        hvd.init()
        print(
            "Hello, rank = %d, local_rank = %d, size = %d, local_size = %d, magic_number = %d"  # noqa: UP031  as typed
            % (hvd.rank(), hvd.local_rank(), hvd.size(), hvd.local_size(), magic_number)
        )
        total = hvd.allreduce(torch.ones(3), op=hvd.Sum)
        return [hvd.rank(), float(total[0]), horovod.spark.get_available_devices()]

    stream = Stream()
    found = horovod.spark.run(train_fn, args=(42,), num_proc=tasks, verbose=2, stdout=stream, stderr=Stream())
    return [found, stream.getvalue()]


def leftovers() -> dict[str, Any]:
    """What Spark and this process still have of jobs that have ended."""
    until = time.monotonic() + 20.0
    while (jobs := context.statusTracker().getActiveJobsIds()) and time.monotonic() < until:
        pass
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("reigen")]
    return {"jobs": len(jobs), "threads": threads}


def torch_variables() -> list[str | None]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    return [os.environ.get(name) for name in names] + [str(int(os.environ["MASTER_PORT"]) > 0)]


def distributor(what: str, tasks: int, path: str) -> Any:
    """Functions and scripts in Distributor, and in pyspark's own."""
    from pyspark.ml.torch.distributor import TorchDistributor

    def train(factor: int) -> int:
        import reigen

        reigen.init()
        return (reigen.rank() + 1) * factor

    if what == "local":
        ours = reigen.spark.Distributor(tasks, local_mode=True, use_gpu=False)
        return [ours.run(train, 10), ours.run(torch_variables, collect="all")]
    ours = reigen.spark.Distributor(tasks, local_mode=False, use_gpu=False)
    if what == "torch":
        return ours.run(torch_variables, collect="all")
    if what == "function":
        return [ours.run(train, 10), ours.run(train, factor=5, collect="all")]
    if what == "script":
        return ours.run(path, "a b", 7)
    theirs = TorchDistributor(num_processes=tasks, local_mode=False, use_gpu=False)
    return theirs.run(path, "a b", 7)


def train_estimator(tasks: int, directory: str) -> Any:
    """A linear model, whose rows the workers write, and the ranks read: its history, and what it predicts."""
    import torch
    from pyspark.ml.linalg import Vectors

    from reigen.spark.store import Store
    from reigen.spark.torch import TorchEstimator

    rows = [(Vectors.dense(number / 50, 1.0), 3.0 * number / 50 - 1) for number in range(101)]
    frame = session.createDataFrame(rows, ["x", "y"])
    model = torch.nn.Linear(2, 1, bias=False)
    estimator = TorchEstimator(
        num_proc=tasks,
        store=Store.create(directory),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.2),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=5,
        epochs=15,
        validation=0.2,
        random_seed=1,
    )
    fitted = estimator.fit(frame)
    predicted = [abs(row["y__output"] - row["y"]) for row in fitted.transform(frame).collect()]
    return [len(fitted.getHistory()), len(predicted), max(predicted)]


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
