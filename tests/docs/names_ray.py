"""Functions for the programs of docs/ray.md, which run on the cluster of tests/engines/ray."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

Names = dict[str, Any]


def train(learning_rate: float) -> tuple[float, int]:
    import numpy as np

    import reigen

    reigen.init()
    return float(reigen.allreduce(np.full(1, learning_rate))[0]), reigen.size()


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


def train_loop() -> None:
    import ray.train

    import reigen

    rate, size = train(0.5)
    with tempfile.TemporaryDirectory() as directory:  # Ray keeps what is reported with a checkpoint
        checkpoint = ray.train.Checkpoint.from_directory(directory) if reigen.rank() == 0 else None
        ray.train.report({"rate": rate, "size": size}, checkpoint=checkpoint)


def given_ray() -> Names:
    return {"train": train}


def check_ray(names: Names) -> None:
    assert names["losses"] == [(0.1, 2)] * 2
    assert names["executor"].num_workers == 2


def given_ray_train() -> Names:
    import reigen.ray

    return {"reigen": reigen, "train_loop": train_loop}


def check_ray_train(names: Names) -> None:
    names["trainer"].run_config.storage_path = str(Path("ray_train").resolve())
    assert names["trainer"].fit().metrics == {"rate": 0.5, "size": 2}


def given_ray_elastic() -> Names:
    import reigen.ray

    return {"reigen": reigen, "train": train_elastic}


def check_ray_elastic(names: Names) -> None:
    names["executor"].shutdown()
    assert [size for _, size in names["losses"]] == [2, 2]
    assert all(abs(total - 0.3) < 1e-9 for total, _ in names["losses"])
