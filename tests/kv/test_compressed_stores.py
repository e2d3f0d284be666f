"""Every compression through a distributed store: what is given arrives, on average, and alike at all workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reigen import optim
from reigen.kv.client.dist_store import DistStore
from tests.kv.threaded import job

pytestmark = pytest.mark.slow

#: Values are cut into shards on both servers.
CUT = {"kv_bigarray_bound": 1000, "kv_slice_bytes": 1 << 12}
SIZE, ROUNDS = 3000, 30
#: and how far the mean of all rounds may be from what was given
CODECS: list[tuple[dict[str, Any], float]] = [
    ({"type": "2bit", "threshold": 0.5}, 0.1),
    ({"type": "1bit", "threshold": 0.0, "scale": 0.5}, 0.15),
    ({"type": "fp16"}, 0.002),
    ({"type": "bf16"}, 0.01),
    ({"type": "int8"}, 0.01),
    ({"type": "topk", "ratio": 0.5, "values": "fp16"}, 0.15),
]


def pushed_and_pulled(store: DistStore, params: dict[str, Any], dtype: torch.dtype, step: str) -> tuple[bytes, Any]:
    """The last answer, and the mean of all rounds'."""
    store.set_gradient_compression(params)
    store.init("w", torch.zeros(SIZE, dtype=dtype))
    gradient = torch.linspace(-0.2, 0.2, SIZE).mul(store.rank + 1).to(dtype)  # below all thresholds
    out, total = torch.empty(SIZE, dtype=dtype), torch.zeros(SIZE, dtype=torch.float64)
    for _ in range(ROUNDS):
        if step == "pushpull":
            store.pushpull("w", gradient, out)
        else:
            store.push("w", gradient)
            store.pull("w", out)
        total += out
    return out.view(torch.uint8).numpy().tobytes(), (total / ROUNDS).numpy()


@pytest.mark.parametrize(("params", "tolerance"), CODECS, ids=[params["type"] for params, _ in CODECS])
@pytest.mark.parametrize(
    ("dtype", "step"),
    [(torch.float32, "pushpull"), (torch.float16, "push, pull"), (torch.bfloat16, "pushpull")],
    ids=["float32", "float16", "bfloat16"],
)
def test_what_is_given_arrives(params: dict[str, Any], tolerance: float, dtype: torch.dtype, step: str) -> None:
    with job(2, 2, **CUT) as made:
        results = made.results(lambda store: pushed_and_pulled(store, params, dtype, step))
    assert results[0][0] == results[1][0]
    truth = 3 * np.linspace(-0.2, 0.2, SIZE)
    rounding = 0.02 if dtype is torch.bfloat16 else 0.002
    np.testing.assert_allclose(results[0][1], truth, atol=tolerance + rounding)


def test_servers_with_an_optimizer_send_weights_as_they_are() -> None:
    def work(store: DistStore) -> Any:
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        store.set_optimizer(optim.create("test", rescale_grad=1 / 3))
        store.init("w", np.full(SIZE, 1 / 7, np.float32))
        out = np.empty(SIZE, np.float32)
        for _ in range(4):
            store.pushpull("w", np.full(SIZE, 0.25, np.float32), out)  # sent every second time, as 0.5
        return set(out.tolist())

    with job(2, 2, **CUT) as made:
        results = made.results(work)
    third = np.float32(1 / 3)
    weight = np.float32(1 / 7) + third  # twice 0.5 from two workers
    assert results[0] == results[1]
    assert list(results[0]) == pytest.approx([float(weight + third)], rel=1e-6)


@pytest.mark.parametrize("answered", [True, False], ids=["to both workers", "to one of them"])
def test_a_server_that_is_started_again_still_owes_what_it_did_not_send(tmp_path: Path, answered: bool) -> None:
    """Of two workers one gives a threshold in each round; servers send twice that in every other round."""

    def work(store: DistStore) -> Any:
        store.set_gradient_compression({"type": "2bit", "threshold": 1.0})
        store.init("w", np.zeros(SIZE, np.float32))
        gradient, out = np.full(SIZE, 1.0 - store.rank, np.float32), np.empty(SIZE, np.float32)
        received = np.zeros(SIZE)
        for number in range(6):
            store.push("w", gradient).wait()
            if store.rank == 0 or answered:
                store.pull("w", out)
            store.barrier()
            if store.rank == 0:
                made.replace_server(number % 2)
            store.barrier()
            if store.rank == 1 and not answered:
                store.pull("w", out)
            store.barrier()
            received += out
        return set(received.tolist())

    with job(2, 2, **CUT, kv_snapshot_dir=str(tmp_path), kv_snapshot_seconds=0.0) as made:
        assert made.results(work) == [{6.0}] * 2
