"""The store without servers, in real ranks: the same values as with servers, from the all-reduce of the job."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch

import reigen
from reigen import kv, optim
from reigen.errors import MismatchError, NotInitializedError
from reigen.testing import RankPool


def closed_form() -> None:
    n, total = reigen.size(), reigen.size() * (reigen.size() + 1) // 2
    with kv.create("horovod") as store:
        assert (store.type, store.rank, store.num_workers) == ("horovod", reigen.rank(), n)
        store.set_optimizer(optim.create("test", rescale_grad=0.5))
        keys, values = ["w", "b"], [np.full(5, store.rank + 1, np.float32), torch.full((3,), store.rank + 1.0)]
        store.init(keys, [np.full(5, 1 + store.rank, np.float32), torch.full((3,), 1.0 + store.rank)])
        outs = [np.empty(5, np.float32), torch.empty(3)]
        for _ in range(3):
            store.push(keys, values)
            store.pushpull(keys, values, outs)
        pending = store.pushpull(keys, values, outs, wait=False)
        pending.wait()
        assert pending.done()
        assert {*outs[0].tolist(), *outs[1].tolist()} == {1 + 0.5 * 7 * total}
        assert store.rounds("w") == 7
        store.barrier()


def without_an_optimizer() -> None:
    n = reigen.size()
    with kv.create("ring") as store:
        store.init(1, np.zeros(4, np.float16))
        out = np.empty(4, np.float16)
        store.push(1, [np.ones(4, np.float16), np.ones(4, np.float16)])
        store.pull(1, out)
        assert out.tolist() == [2 * n] * 4
        store.init(2, kv.RowSparse([0, 1, 2], np.ones((3, 2), np.float32), (3, 2)))
        store.push(2, kv.RowSparse([2, store.rank % 2], np.ones((2, 2), np.float32), (3, 2)))
        whole = np.empty((3, 2), np.float32)
        store.pull(2, whole)
        assert whole[:, 0].tolist() == [(n + 1) // 2, n // 2, n]


def waiting_for_all() -> list[float]:
    """Of calls whose `Pending` nobody keeps; each out holds what was stored when it was asked for."""
    with kv.create("ring") as store:
        store.init("w", np.zeros(2, np.float32))
        outs = np.zeros((3, 2), np.float32)
        for step, out in enumerate(outs[:2]):
            store.pushpull("w", np.full(2, step + 1, np.float32), out, wait=False)
        store.push("w", np.full(2, 3, np.float32))
        store.pull("w", outs[2], wait=False)
        store.wait()
        return outs[:, 0].tolist()


def forked_children() -> list[str]:
    """What a child is told that uses the store of its parent; and what the parent's rounds come to after it."""
    told: list[str] = []
    with kv.create("ring") as store:
        store.init("w", np.zeros(2, np.float32))
        out = np.zeros(2, np.float32)
        store.pushpull("w", np.ones(2, np.float32), out)
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            for call in (store.barrier, lambda: store.push("w", np.ones(2, np.float32))):
                try:
                    call()
                except NotInitializedError as error:
                    os.write(writing, f"{error}\n".encode())
            store.close()
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answers:
            told += answers.read().splitlines()
        assert os.waitpid(child, 0)[1] == 0
        store.pushpull("w", np.full(2, 2, np.float32), out)
        return [*told, str(out.tolist())]


def disagreement() -> str:
    with kv.create("ring") as store:
        with pytest.raises(MismatchError) as caught:
            store.init("w", np.ones(2 + store.rank, np.float32))
        store.init("w", np.ones(2, np.float32))
        return str(caught.value)


def leaving() -> list[float]:
    with kv.create("ring") as store:
        store.set_optimizer(optim.create("test"))
        store.init("w", np.zeros(2, np.float32))
        for _ in range(1 + store.rank):
            store.push("w", np.ones(2, np.float32))
        store.leave()
        out = np.empty(2, np.float32)
        store.pull("w", out)
        return out.tolist()


@pytest.mark.slow
def test_rings_of_workers(rank_pool: Callable[[int], RankPool]) -> None:
    pool = rank_pool(2)
    pool.run(closed_form, init=True)
    pool.run(without_an_optimizer, init=True)
    assert pool.run(waiting_for_all, init=True) == [[2.0, 4.0, 6.0]] * 2
    for said in pool.run(forked_children, init=True):
        assert len(said) == 3
        assert all("is no rank of the job" in each for each in said[:2])
        assert said[2] == "[4.0, 4.0]"
    told = pool.run(disagreement, init=True)
    assert len(set(told)) == 1
    assert "rank 0: 'w': float32 (2,)" in told[0]
    assert "rank 1: 'w': float32 (3,)" in told[0]
    # every worker holds what it has taken part in: the last one all of it
    assert pool.run(leaving, init=True)[-1] == [3.0] * 2
