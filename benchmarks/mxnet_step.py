"""A training step of MXNet 1.9.1 on two ranks, beside one rank alone and beside MXNet's own dist_sync (ps-lite).

make .venv-mxnet/.stamp
.venv-mxnet/bin/python -m benchmarks.mxnet_step              about ten minutes; leave the machine alone meanwhile

The models are an MLP of 25 M parameters (batch 32) and ResNet-18 (batch 8, images of 64 x 64), trained by SGD with
momentum in float32, with one thread for a rank. The ways are started one after the other, again and again; each
measures single steps, from the forward pass to the last updated weight, and says its median. `reigen` is a
DistributedTrainer, `ps-lite` a gluon.Trainer with kvstore="dist_sync" and one server, which updates the weights;
`reigen kv` is the same program with Reigen's store, under `reigen run --as-mxnet -s 1`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MODELS = ("mlp", "resnet18")
WARM_UP_STEPS, RANKS = 4, 2


# -- a rank -----------------------------------------------------------------------------------------------------------


def make_model(name: str) -> tuple[Any, Any]:
    """The network, and a batch for it."""
    import mxnet as mx

    if name == "resnet18":
        return mx.gluon.model_zoo.vision.resnet18_v1(classes=10), mx.nd.random.uniform(shape=(8, 3, 64, 64))
    net = mx.gluon.nn.HybridSequential()
    for _ in range(5):
        net.add(mx.gluon.nn.Dense(2200, activation="relu"))
    net.add(mx.gluon.nn.Dense(10))
    return net, mx.nd.random.uniform(shape=(32, 2200))


def make_trainer(way: str, parameters: Any) -> tuple[Any, int]:
    """What trains, and this rank's number."""
    import mxnet as mx

    options = {"learning_rate": 1e-4, "momentum": 0.9}
    if way == "reigen":
        import reigen.mxnet as hvd

        hvd.init()
        hvd.broadcast_parameters(parameters)
        return hvd.DistributedTrainer(parameters, "sgd", options), hvd.rank()
    store = mx.kv.create("dist_sync") if way == "store" else None
    return mx.gluon.Trainer(parameters, "sgd", options, kvstore=store), store.rank if store else 0


def train(way: str, model: str, steps: int) -> None:
    """Rank 0 prints the median of its steps, in seconds."""
    import mxnet as mx

    net, batch = make_model(model)
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    labels, loss = mx.nd.zeros((len(batch),)), mx.gluon.loss.SoftmaxCrossEntropyLoss()
    net(batch).wait_to_read()
    trainer, rank = make_trainer(way, net.collect_params())
    seconds = []
    for _ in range(WARM_UP_STEPS + steps):
        began = time.perf_counter()
        with mx.autograd.record():
            value = loss(net(batch), labels)
        value.backward()
        trainer.step(len(batch))
        mx.nd.waitall()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        print(statistics.median(seconds[WARM_UP_STEPS:]), flush=True)


# -- the ways to start it ---------------------------------------------------------------------------------------------


def output(command: list[str], environ: dict[str, str] | None = None) -> str:
    """What it prints."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
    return subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True, timeout=600).stdout


def with_ps_lite(program: list[str]) -> str:
    """MXNet's own scheduler, server and workers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "DMLC_INTERFACE": "lo"}
    shared |= {"DMLC_NODE_HOST": "127.0.0.1", "DMLC_NUM_WORKER": str(RANKS), "DMLC_NUM_SERVER": "1"}
    environ = {**os.environ, **shared, "OMP_NUM_THREADS": "1"}
    others = [
        subprocess.Popen([sys.executable, "-c", "import mxnet"], env={**environ, "DMLC_ROLE": role})
        for role in ("scheduler", "server")
    ]
    environ["DMLC_ROLE"] = "worker"
    workers = [subprocess.Popen(program, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(RANKS)]
    try:
        return "".join(worker.communicate(timeout=600)[0] for worker in workers)
    finally:
        for process in (*workers, *others):
            process.kill()
            process.wait()


def ways(model: str, steps: int) -> dict[str, Callable[[], str]]:
    """Each starts ranks and returns what they print."""

    def program(way: str) -> list[str]:
        return [sys.executable, __file__, "--rank", way, "--model", model, "--steps", str(steps)]

    launcher = [sys.executable, "-m", "reigen", "run", "--no-prefix", "-np", str(RANKS)]
    return {
        "alone": lambda: output(program("alone")),
        "reigen": lambda: output([*launcher, *program("reigen")]),
        "ps-lite": lambda: with_ps_lite(program("store")),
        "reigen kv": lambda: output([*launcher, "--as-mxnet", "-s", "1", *program("store")]),
    }


def save(measured: Mapping[str, Mapping[str, list[float]]], file: Path, rounds: int) -> None:
    """Write seconds by model and way, as other benchmarks do."""
    from importlib.metadata import version

    from benchmarks.harness.figures import summarize
    from benchmarks.harness.report import Document, Row

    document = Document(shlex.join(["python", "-m", "benchmarks.mxnet_step", *sys.argv[1:]]), RANKS, rounds)
    document.versions["mxnet"] = version("mxnet")
    for model, ways in measured.items():
        modes = {way: summarize([[each] for each in seconds]) for way, seconds in ways.items()}
        document.rows.append(Row(model, 0, modes, "alone"))
    document.save(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--rank", metavar="WAY", help="internal: be a rank")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found there, too")
    options = parser.parse_args()
    if options.rank:
        train(options.rank, options.model, options.steps)
        return
    everything: dict[str, dict[str, list[float]]] = {}
    for model in [options.model] if options.model else MODELS:
        measured = everything[model] = {}
        for _ in range(options.rounds):
            for name, start in ways(model, options.steps).items():
                measured.setdefault(name, []).append(float(start()))
        print(f"\n{model}, {RANKS} ranks, medians of {options.rounds} runs of {options.steps} steps")
        for name, seconds in measured.items():
            ratios = [mine / alone for mine, alone in zip(seconds, measured["alone"], strict=True)]
            spread = f"{1e3 * min(seconds):.0f}-{1e3 * max(seconds):.0f}"
            median = 1e3 * statistics.median(seconds)
            print(f"  {name:10} {median:7.0f} ms ({spread:>9})   {statistics.median(ratios):.2f} x alone")
    if options.json is not None:
        save(everything, options.json, options.rounds)


if __name__ == "__main__":
    main()
