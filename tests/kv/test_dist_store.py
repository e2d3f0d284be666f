"""The distributed store: workers in threads, servers in threads, real sockets and shared memory; closed forms."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reigen import kv, optim
from reigen.errors import (
    ArgumentError,
    CollectiveError,
    DeadlineError,
    MismatchError,
    PeerLostError,
    UnsupportedError,
    UnsupportedTypeError,
    WireError,
)
from reigen.kv.client.dist_store import DistStore
from reigen.kv.client.requests import MAX_PENDING_PUSHES, BatchRequest
from reigen.kv.client.server_connection import ServerConnection
from reigen.kv.protocol import MessageFlag, MessageHeader, MessageKind
from reigen.kv.server.buffers import ValueBuffer
from reigen.kv.server.request_handler import RequestHandler
from reigen.kv.server.requests import WorkerConnection
from reigen.kv.server.server import KVServer
from tests.kv.threaded import SECONDS, Job, job, wait_until

pytestmark = pytest.mark.slow

#: A small bound and small shards, so that a few thousand elements are spread over servers in many shards.
CUT = {"kv_bigarray_bound": 1000, "kv_slice_bytes": 1 << 12}
KEYS = {
    "small": (5, "float32"),
    "other": (300, "float32"),
    "none": (0, "float32"),
    "large": (10_007, "float32"),
    "half": (5, "float16"),
    "other half": (300, "float16"),
    "large half": (9_999, "float16"),
}
UNRELIABLE = {"kv_resend": True, "kv_resend_timeout_ms": 30, "kv_drop_percent": 15.0}


def closed_form(store: DistStore, rate: float, rounds: int, step: str) -> set[float]:
    """Every worker pushes rank + 1 in each round; what is stored at the end."""
    store.set_optimizer(optim.create("test", rescale_grad=rate))
    names = list(KEYS)
    store.init(names, [np.ones(size, dtype) for size, dtype in KEYS.values()])
    values = [np.full(size, store.rank + 1, dtype) for size, dtype in KEYS.values()]
    outs = [np.empty(size, dtype) for size, dtype in KEYS.values()]
    for _ in range(rounds):
        if step == "pushpull":
            store.pushpull(names, values, outs)
        else:
            store.push(names, values)
    store.wait()
    store.barrier()
    store.pull(names, outs)
    return {element for out in outs for element in out.tolist()}


@pytest.mark.parametrize("comes_first", ["optimizer", "key"])
def test_a_key_that_no_optimizer_updates_can_be_stored_and_not_pushed(comes_first: str) -> None:
    def use(store: DistStore) -> str:
        if comes_first == "optimizer":
            store.set_optimizer(optim.create("test"))
        store.init(["w", "n"], [np.zeros(3, np.float32), np.full(3, 4 + store.rank, np.int32)])
        if comes_first == "key":
            store.set_optimizer(optim.create("test"))
        number, out = np.empty(3, np.int32), np.empty(3, np.float32)
        store.pull("n", number)
        with pytest.raises(UnsupportedTypeError, match="an optimizer cannot update int32 values"):
            store.pushpull("n", number, number)
        store.pushpull("w", np.ones(3, np.float32), out)
        return f"{number.tolist()} {out.tolist()}"

    with job(2, 2) as made:
        assert made.results(use) == ["[4, 4, 4] [2.0, 2.0, 2.0]"] * 2


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("staleness", [0, 2, None], ids=["sync", "ssp", "async"])
@pytest.mark.parametrize("step", ["push", "pushpull"])
def test_nothing_is_lost_or_counted_twice(servers: int, staleness: int | None, step: str) -> None:
    with job(3, servers, **CUT) as made:
        results = made.results(lambda store: closed_form(store, 0.5, 4, step), staleness=staleness)
    assert results == [{1 + 0.5 * 4 * 6}] * 3


@pytest.mark.parametrize("knobs", [{}, {"kv_shared_memory": False}], ids=["shared memory", "sockets"])
@pytest.mark.parametrize(("staleness", "step"), [(0, "push"), (None, "pushpull")], ids=["sync", "async"])
def test_nothing_is_lost_or_counted_twice_where_messages_are_dropped(
    knobs: dict[str, Any], staleness: int | None, step: str
) -> None:
    with job(2, 2, **CUT, **UNRELIABLE, **knobs) as made:
        results = made.results(lambda store: closed_form(store, 2.0, 6, step), staleness=staleness)
    assert results == [{1 + 2.0 * 6 * 3}] * 2


@pytest.mark.parametrize("large", [1 << 15, 1 << 20])
def test_values_travel_through_shared_memory_or_sockets_alike(large: int) -> None:
    results = []
    for shares in (True, False):
        with job(2, 2, kv_bigarray_bound=1000, kv_shared_memory=shares) as made:

            def work(store: DistStore) -> bytes:
                store.init("w", np.zeros(large, np.float32))
                value = np.random.default_rng(store.rank).standard_normal(large, np.float32)
                out = np.empty(large, np.float32)
                for _ in range(3):
                    store.pushpull("w", value, out)
                return out.tobytes()

            results += made.results(work)
    assert len(set(results)) == 1
    first, second = (np.random.default_rng(rank).standard_normal(large, np.float32) for rank in range(2))
    assert results[0] == (first + second).tobytes()


def test_bits_do_not_depend_on_servers_and_shards() -> None:
    seen = set()
    for servers, knobs in ((1, {}), (2, CUT), (3, {**CUT, "kv_slice_bytes": 1 << 14})):
        with job(3, servers, **knobs) as made:

            def work(store: DistStore) -> bytes:
                value = np.random.default_rng(store.rank).standard_normal(10_007, np.float32)
                store.set_optimizer(optim.create("adam", learning_rate=0.1, wd=0.01))
                store.init("w", np.ones(10_007, np.float32))
                out = np.empty(10_007, np.float32)
                for _ in range(3):
                    store.pushpull("w", value, out)
                return out.tobytes()

            seen |= set(made.results(work))
    assert len(seen) == 1


def test_without_an_optimizer_the_sum_takes_the_place_of_the_value() -> None:
    def work(store: DistStore) -> Any:
        store.set_gradient_compression({"type": "none", "threshold": 0.5})
        store.init(["w", "b"], [torch.full((3, 2), float(store.rank)), torch.zeros(2, dtype=torch.bfloat16)])
        first = torch.empty(2, 3).t()
        store.pull("w", first)
        store.push("w", [torch.ones(3, 2), torch.full((3, 2), 10.0 * store.rank)])
        outs = [torch.empty(3, 2), torch.empty(3, 2)]
        store.pull("w", outs)
        bfloat = torch.full((2,), 3.0, dtype=torch.bfloat16)
        store.pushpull("b", bfloat)
        return first.tolist(), [out.tolist() for out in outs], bfloat.tolist(), store.rounds("w")

    with job(2) as made:
        expected = ([[0.0] * 2] * 3, [[[12.0] * 2] * 3] * 2, [6.0, 6.0], 1)
        assert made.results(work) == [expected, expected]


def test_keys_below_zero_are_keys() -> None:
    keys = [-1, -(2**63), 1, 2**63 + 1]

    def work(store: DistStore) -> Any:
        store.init(keys[:: 1 - 2 * store.rank], [np.zeros(1, np.float32)] * 4)
        outs = [np.empty(1, np.float32) for _ in keys[:3]]
        store.push(keys[:3], [np.full(1, (1 + 9 * store.rank) * value, np.float32) for value in (1, 2, 3)])
        store.pull(keys[:3], outs)
        with pytest.raises(ArgumentError, match=r"the same number of 64 bits"):
            store.init(2**64 - 1, np.zeros(1, np.float32))
        return [out.item() for out in outs]

    with job(2, 2) as made:
        assert made.results(work) == [[11.0, 22.0, 33.0]] * 2


def test_asynchronous_calls_and_their_order() -> None:
    def work(store: DistStore) -> Any:
        store.set_optimizer(optim.create("test"))
        store.init(0, np.zeros(20_000, np.float32))
        outs = [np.empty(20_000, np.float32) for _ in range(40)]
        pendings = []
        value = np.ones(20_000, np.float32)
        for out in outs:
            store.push(0, value)
            pendings.append(store.pull(0, out, wait=False))
        for pending in reversed(pendings):
            pending.wait()
            assert pending.done()
        return [(out.min(), out.max()) for out in outs]

    with job(2, 2, **CUT) as made:
        expected = [(2.0 * k, 2.0 * k) for k in range(1, 41)]
        assert made.results(work) == [expected, expected]


def test_the_urgent_overtakes_what_was_begun_before(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[int] = []
    take = RequestHandler.arrived

    def noting(handler: RequestHandler, connection: Any, header: MessageHeader, body: Any) -> None:
        if header.kind == MessageKind.PUSHPULL:
            arrived.append(header.key)
        take(handler, connection, header, body)

    monkeypatch.setattr(RequestHandler, "arrived", noting)

    def work(store: DistStore) -> None:
        values = [np.ones(size, np.float32) for size in (200_000, 200_000, 4)]
        store.init([0, 1, 2], values)
        with monkeypatch.context() as full:  # as if the kernel took nothing
            full.setattr(ServerConnection, "flush", lambda _: None)
            pending = [store.pushpull(key, values[key], priority=key, wait=False) for key in (0, 1, 2)]
        for each in pending:
            each.wait()

    with job(1, **CUT, kv_shared_memory=False) as made:
        made.results(work)
    assert arrived == sorted(arrived, reverse=True)
    assert len(arrived) > 300, "the large ones are cut"


def test_row_sparse_values_are_spread_and_updated_by_row() -> None:
    def work(store: DistStore) -> Any:
        weight = np.arange(300 * 8, dtype=np.float32).reshape(300, 8)
        store.set_optimizer(optim.create("test"))
        store.init("e", kv.RowSparse(np.arange(300), weight, (300, 8)))
        rows = np.array([299, 3, 3, 150 + store.rank])
        store.push("e", kv.RowSparse(rows, np.ones((4, 8), np.float32), (300, 8)))
        out = kv.RowSparse.empty(weight)
        store.row_sparse_pull("e", out, row_ids=[[299, 3], [150, 151]])
        store.push("e", np.ones((300, 8), np.float32))
        whole = np.empty((300, 8), np.float32)
        store.pull("e", whole)
        return out.indices.tolist(), (out.values - weight[out.indices]).tolist(), (whole - weight)[[0, 3]].tolist()

    with job(2, 2, **CUT) as made:
        gained = [[4.0] * 8, [1.0] * 8, [1.0] * 8, [2.0] * 8]
        expected = ([3, 150, 151, 299], gained, [[2.0] * 8, [6.0] * 8])
        assert made.results(work) == [expected, expected]


def test_compressed_gradients_both_ways() -> None:
    first, second = np.array([[0.6, -0.7, 0.2, 0.5, -0.5], [0.4, -0.1, 0.2, 0, 0.1]], np.float32)

    def work(store: DistStore) -> Any:
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        weight, out = np.full(5, 0.1, np.float32), np.empty(5, np.float32)
        store.broadcast("w", weight, out)
        assert out.tolist() == weight.tolist()  # a first value is no sum, and loses nothing
        store.pushpull("w", first, out)
        store.push("w", second)
        then = np.empty(5, np.float32)
        store.pull("w", then)
        return out.tolist(), then.tolist()

    with job(2) as made:
        # sums of two workers, encoded with the threshold 1.0
        expected = ([1, -1, 0, 1, -1], [1, 0, 0, 0, 0])
        assert made.results(work) == [expected, expected]


def test_residuals_are_saved(tmp_path: Path) -> None:
    gradient = np.full(5000, 0.3, np.float32)

    def begin(store: DistStore) -> None:
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        store.set_optimizer(optim.create("test"))
        store.init("w", np.zeros(5000, np.float32))

    def save(store: DistStore) -> Any:
        begin(store)
        store.push("w", gradient)
        store.save_optimizer_states(tmp_path / f"states{store.rank}")

    def go_on(store: DistStore) -> Any:
        begin(store)
        store.load_optimizer_states(tmp_path / f"states{store.rank}")
        out = np.empty(5000, np.float32)
        store.pushpull("w", gradient, out)
        return set(out.tolist())

    with job(2, 2, **CUT) as made:
        made.results(save)
    with job(2, 1, **CUT) as made:
        assert made.results(go_on) == [{1.0}, {1.0}]


@pytest.mark.parametrize("name", ["sgd", "adam", "lamb"])
def test_states_are_loaded_by_another_number_of_servers(tmp_path: Path, name: str) -> None:
    file = tmp_path / "states"
    options = {"momentum": 0.9} if name == "sgd" else {}
    gradients = [np.random.default_rng(seed).standard_normal(5000, np.float32) for seed in range(2)]

    def work(store: DistStore, weight: np.ndarray[Any, Any], *, loads: bool, steps: int) -> Any:
        store.set_optimizer(optim.create(name, learning_rate=0.1, **options))
        store.init("w", weight)
        if loads:
            store.load_optimizer_states(file)
        out = weight.copy()
        for _ in range(steps):
            store.pushpull("w", gradients[store.rank], out)
        if not loads and store.rank == 0:
            store.save_optimizer_states(file, dump_optimizer=True)
        return out

    ones = np.ones(5000, np.float32)
    with job(2, 3, **CUT) as made:
        middle = made.results(lambda store: work(store, ones, loads=False, steps=2))[0]
    with job(2, 1, **CUT) as made:
        ends = made.results(lambda store: work(store, middle, loads=True, steps=2))
    with job(2, 2, **CUT) as made:
        whole = made.results(lambda store: work(store, ones, loads=False, steps=4))
    for end in [*ends, *whole]:
        assert end.tobytes() == whole[0].tobytes()


def test_a_layerwise_optimizer_sees_the_whole_layer_even_if_it_comes_late() -> None:
    def work(store: DistStore) -> Any:
        store.init("w", np.linspace(0, 1, 5000, dtype=np.float32))
        places = len(store._keys["w"].places)
        store.set_optimizer(optim.create("lars", learning_rate=0.1, eta=0.1))
        out = np.empty(5000, np.float32)
        store.pushpull("w", np.ones(5000, np.float32), out)
        return places, len(store._keys["w"].places), out.tobytes()

    local = kv.create("local")
    local.init("w", np.linspace(0, 1, 5000, dtype=np.float32))
    local.set_optimizer(optim.create("lars", learning_rate=0.1, eta=0.1))
    out = np.empty(5000, np.float32)
    local.pushpull("w", np.full(5000, 2, np.float32), out)
    with job(2, 2, **CUT) as made:
        assert made.results(work) == [(6, 1, out.tobytes())] * 2


def test_the_learning_rate_is_changed_on_the_servers() -> None:
    def work(store: DistStore) -> Any:
        store.set_optimizer(optim.create("sgd", learning_rate=1.0))
        store.init([3, 1], [np.zeros(2, np.float32), np.zeros(2, np.float32)])
        outs = [np.empty(2, np.float32), np.empty(2, np.float32)]
        store.pushpull([3, 1], [np.ones(2, np.float32)] * 2, outs)
        store.barrier()
        if store.rank == 1:
            store.set_learning_rate(0.5)
        store.barrier()
        store.pushpull([3, 1], [np.ones(2, np.float32)] * 2, outs)
        return [out.tolist() for out in outs]

    with job(2, 2) as made:
        assert made.results(work) == [[[-3.0, -3.0], [-3.0, -3.0]]] * 2


def test_a_worker_without_data_leaves() -> None:
    def work(store: DistStore) -> Any:
        store.set_optimizer(optim.create("test"))
        store.init("w", np.zeros(3, np.float32))
        out = np.empty(3, np.float32)
        for _ in range(2 + store.rank):
            store.pushpull("w", np.ones(3, np.float32), out)
        store.leave()
        with pytest.raises(ArgumentError, match="has left"):
            store.push("w", out)
        store.barrier()
        store.pull("w", out)
        return out.tolist()

    with job(3) as made:
        assert made.results(work) == [[3.0 * 2 + 2 + 1] * 3] * 3


def test_two_stores_of_one_job() -> None:
    with job(2, 2) as made:

        def work(store: DistStore) -> Any:
            with made.store(store.rank, number=1, staleness=None) as other:
                other.set_optimizer(optim.create("test"))
                for each in (store, other):
                    each.init("w", np.zeros(2, np.float32))
                    each.push("w", np.ones(2, np.float32)).wait()
                store.barrier()
                outs = [np.empty(2, np.float32), np.empty(2, np.float32)]
                store.pull("w", outs[0])
                other.pull("w", outs[1])
                store.push("w", np.full(2, 5, np.float32))
                store.pull("w", outs[0])
                return [out.tolist() for out in outs], other.type

        assert made.results(work) == [([[10.0, 10.0], [2.0, 2.0]], "dist_async")] * 2


# ---------------------------------------------------------------- wrong use


def errors(made: Job, work: Callable[[DistStore], Any], kind: type[BaseException], **options: Any) -> list[str]:
    results = made.run(work, **options)
    assert [type(each) for each in results] == [kind] * made.num_workers, results
    return [str(each) for each in results]


def test_shapes_and_dtypes_that_differ_are_an_error_on_all_workers() -> None:
    for values in (
        [np.ones(3, np.float32), np.ones(4, np.float32)],
        [np.ones(3, np.float32), np.ones(3, np.float16)],
        [np.ones((3, 1), np.float32), kv.RowSparse([0], np.ones((1, 1), np.float32), (3, 1))],
    ):
        with job(2) as made:
            told = errors(made, lambda store: store.init("w", values[store.rank]), MismatchError)  # noqa: B023
        for text in told:
            assert "'w'" in text
            assert "rank 0: " in text
            assert "rank 1: " in text


def test_keys_that_only_some_workers_initialise_are_an_error_by_the_deadline() -> None:
    done = threading.Event()

    def work(store: DistStore) -> None:
        if store.rank == 0:
            assert done.wait(SECONDS)
            return
        try:
            store.init("b", np.ones(1, np.float32))
        finally:
            done.set()

    with job(2, deadline_seconds=0.5) as made:
        results = made.run(work)
    assert isinstance(results[1], DeadlineError), results
    assert results[1].ranks == (0,)
    assert "'b'" in str(results[1])


def test_optimizers_that_differ_or_come_late() -> None:
    def differ(store: DistStore) -> None:
        store.set_optimizer(optim.create("sgd", learning_rate=1.0 + store.rank))

    def late(store: DistStore) -> None:
        store.init("w", np.ones(1, np.float32))
        store.push("w", np.ones(1, np.float32)).wait()
        store.set_optimizer(optim.create("sgd"))

    with job(2) as made:
        assert "learning_rate=2.0" in errors(made, differ, MismatchError)[0]
    with job(2) as made:
        assert "only before the first push" in errors(made, late, ArgumentError)[0]


def test_mistakes_of_one_worker_are_its_own() -> None:
    def work(store: DistStore) -> None:
        store.init("w", np.ones(2, np.float32))
        if store.rank == 1:
            for call, text in (
                (lambda: store.pull("v", np.ones(2, np.float32)), "'v' was never initialised"),
                (lambda: store.push(3, np.ones(2, np.float32)), "mixed key types"),
                (lambda: store.push("w", np.ones(3, np.float32)), "holds float32"),
                (lambda: store.init("w", np.ones(2, np.float32)), "initialised before"),
                (lambda: store.set_learning_rate(1.0), "no optimizer whose learning rate"),
                (lambda: store.save_optimizer_states("x"), "no optimizer"),
                (lambda: store.set_gradient_compression({"type": "3bit"}), "unknown type of compression"),
            ):
                with pytest.raises(ArgumentError, match=text):
                    call()
            with pytest.raises(UnsupportedError, match="set_optimizer"):
                store.set_updater(lambda key, value, stored: None)
            with pytest.raises(FileNotFoundError, match="'/nowhere/states'"):
                store.save_optimizer_states("/nowhere/states")  # before anything is collected
        out = np.empty(2, np.float32)
        store.pushpull("w", np.ones(2, np.float32), out)
        assert out.tolist() == [2, 2]

    with job(2) as made:
        made.results(work)


def test_a_push_without_an_optimizer_makes_no_sense_in_an_asynchronous_store() -> None:
    def work(store: DistStore) -> None:
        store.init("w", np.ones(2, np.float32))
        store.push("w", np.ones(2, np.float32))
        store.wait()

    with job(2) as made:
        assert "call set_optimizer() before" in errors(made, work, UnsupportedError, staleness=None)[0]


def test_an_error_that_nobody_waited_for_is_raised_by_the_next_call() -> None:
    def work(store: DistStore) -> Any:
        store.init("w", np.ones(2, np.float32))
        pending = store.push("w", np.ones(2, np.float32))
        wait_until(pending.done)
        with pytest.raises(UnsupportedError):
            store.pull("w", np.ones(2, np.float32))
        out = np.empty(2, np.float32)
        store.pull("w", out)
        return out.tolist()

    with job(2) as made:
        assert made.results(work, staleness=None) == [[1, 1]] * 2


def test_a_worker_that_does_not_push_is_named_by_the_deadline() -> None:
    done = [threading.Event() for _ in range(3)]

    def work(store: DistStore) -> None:
        store.init("fc.weight", np.ones(2, np.float32))
        if store.rank == 1:
            assert all(done[rank].wait(SECONDS) for rank in (0, 2)), "it stays: who has left is not waited for"
            return
        try:
            store.pushpull("fc.weight", np.ones(2, np.float32))
        finally:
            done[store.rank].set()

    with job(3, deadline_seconds=5.0) as made:  # the key must be there by then
        results = made.run(work)
    for rank in (0, 2):
        assert isinstance(results[rank], DeadlineError)
        assert 1 in results[rank].ranks
        assert "fc.weight" in str(results[rank])


def test_of_keys_that_travel_together_some_may_be_late_and_all_go_on() -> None:
    """Worker 1 pushes one key of those that worker 0 pushes together: the others are late."""
    meeting = threading.Barrier(2)

    def work(store: DistStore) -> tuple[str, list[float]]:
        names, outs = ["a", "b", "c"], [np.empty(4, np.float32) for _ in range(3)]
        store.init(names, [np.zeros(4, np.float32)] * 3)
        value = np.full(4, store.rank + 1, np.float32)
        text = ""
        if store.rank == 0:
            with pytest.raises(DeadlineError, match=r"waits for worker\(s\) 1") as raised:
                store.pushpull(names, [value] * 3, outs)
            text = str(raised.value)
        else:
            store.pushpull("b", value, outs[1])
            assert outs[1].tolist() == [3.0] * 4
        meeting.wait(SECONDS)
        assert [store.rounds(name) for name in names] == [0, 1, 0]
        for _ in range(3):
            store.pushpull(names, [value * 10] * 3, outs)
        assert [store.rounds(name) for name in names] == [3, 4, 3]
        return text, [float(out.sum()) for out in outs]

    with job(2, 1, deadline_seconds=3.0) as made:  # the keys must be there by then
        results = made.results(work)
    assert "'b'" not in results[0][0]
    assert [values for _, values in results] == [[120.0] * 3] * 2


@pytest.mark.parametrize("how", ["pushpull", "push, then pull"])
def test_keys_that_travel_together_do_not_wait_for_each_other(how: str) -> None:
    """Worker 1 needs the second round of one key before it pushes the other one."""

    def work(store: DistStore) -> None:
        store.init(["a", "b"], [np.zeros(4, np.float32)] * 2)
        value, outs = np.ones(4, np.float32), [np.empty(4, np.float32) for _ in range(3)]
        if store.rank == 0:
            if how == "pushpull":
                first = store.pushpull(["a", "b"], [value, value], outs[:2], wait=False)
            else:
                store.push(["a", "b"], [value, value])
                first = store.pull(["a", "b"], outs[:2], wait=False)
            second = store.pushpull("a", value, outs[2], wait=False)
            first.wait()
            second.wait()
        else:
            for key, out in zip(["a", "a", "b"], outs, strict=True):
                store.pushpull(key, value, out)
        assert {element for out in outs for element in out.tolist()} == {2.0}

    with job(2, 1, deadline_seconds=10.0) as made:
        made.results(work)


def test_lists_that_are_pushed_ahead_stay_in_the_order_of_each_key() -> None:
    """What one key waits for holds up no other key of its call: else workers whose lists differ wait for each other."""

    def work(store: DistStore) -> None:
        keys, chance = list(range(6)), random.Random(store.rank)
        store.set_optimizer(optim.create("test"))
        store.init(keys, [np.zeros(9, np.float32)] * 6)
        rounds, results = dict.fromkeys(keys, 0), []
        for step in range(60):
            chosen = chance.sample(keys, 4) if store.rank else keys[step % 3 : step % 3 + 4]
            chosen = [key for key in chosen if rounds[key] < 20]
            for key in chosen:
                rounds[key] += 1
            outs = [np.empty(9, np.float32) for _ in chosen]
            if chosen:
                pending = store.pushpull(chosen, [np.ones(9, np.float32) for _ in chosen], outs, wait=False)
                results += [(pending, out, 2.0 * rounds[key]) for key, out in zip(chosen, outs, strict=True)]
        rest = [key for key in keys for _ in range(20 - rounds[key])]
        for key in rest:
            store.push(key, np.ones(9, np.float32))
        for pending, out, value in results:
            pending.wait()
            assert (out == value).all()
        store.wait()

    with job(2, 2) as made:
        made.results(work)


def test_whoever_sees_that_a_call_is_done_finds_its_keys_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = BatchRequest.note

    def note(batch: BatchRequest) -> None:
        seen.append(batch.operation.done())
        original(batch)

    monkeypatch.setattr(BatchRequest, "note", note)

    def work(store: DistStore) -> None:
        store.init(["a", "b"], [np.zeros(4, np.float32)] * 2)
        store.pushpull(["a", "b"], [np.ones(4, np.float32) for _ in range(2)])

    with job(2, 1) as made:
        made.results(work)
    assert seen == [False, False]


@pytest.mark.parametrize("num_keys", [1, 3])
def test_what_was_held_back_goes_nowhere_after_the_deadline(monkeypatch: pytest.MonkeyPatch, num_keys: int) -> None:
    """The server stops for a while. The second pushpull waits for the first, and neither comes in time."""
    goes, stands = threading.Event(), threading.Event()
    goes.set()
    original = KVServer._turn

    def turn(server: KVServer) -> None:
        if not goes.is_set():
            stands.set()
            assert goes.wait(SECONDS)
        original(server)

    monkeypatch.setattr(KVServer, "_turn", turn)

    def work(store: DistStore) -> None:
        keys, value = list(range(num_keys)), [np.ones(4, np.float32)] * num_keys
        store.init(keys, value)
        outs = [np.full((num_keys, 4), -7, np.float32) for _ in range(2)]
        store.pushpull(keys, value, list(np.empty((num_keys, 4), np.float32)))
        goes.clear()
        try:
            assert stands.wait(SECONDS)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("reigen.kv.client.worker._TOLERANCE_SECONDS", 0.3 - SECONDS)
                pending = [store.pushpull(keys, value, list(out), wait=False) for out in outs]
                for each in pending:
                    with pytest.raises(DeadlineError):
                        each.wait()
        finally:
            goes.set()
        store.wait()
        assert [out.max() for out in outs] == [-7, -7]
        last = [np.empty(4, np.float32) for _ in keys]
        store.pushpull(keys, [np.full(4, 5, np.float32)] * num_keys, last)
        assert {element for out in last for element in out.tolist()} == {5.0}

    with job(1, 1) as made:
        made.results(work)


def test_small_keys_of_one_call_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[tuple[MessageKind, int]] = []
    original = RequestHandler.arrived

    def note(handler: RequestHandler, connection: Any, header: MessageHeader, received: Any) -> None:
        if header.kind in {MessageKind.PUSH, MessageKind.PULL, MessageKind.PUSHPULL}:
            arrived.append((MessageKind(header.kind), header.shard if header.flags & MessageFlag.BATCH else 0))
        original(handler, connection, header, received)

    monkeypatch.setattr(RequestHandler, "arrived", note)
    sizes = [5, 70_000, 300, 0, 12, 7, 9]

    def work(store: DistStore) -> None:
        keys, value = list(range(len(sizes))), float(store.rank + 1)
        dtypes = [np.float32] * 5 + [np.float16] * 2
        store.init(keys, [np.zeros(size, dtype) for size, dtype in zip(sizes, dtypes, strict=True)])
        values = [np.full(size, value, dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
        outs = [np.empty_like(each) for each in values]
        store.push(keys, values)
        store.pull(keys, outs)
        assert {element for out in outs for element in out.tolist()} == {3.0}
        store.pushpull(keys, values)
        assert {element for each in values for element in each.tolist()} == {3.0}

    with job(2, 1) as made:
        made.results(work)
    calls = [
        (kind, count) for kind in (MessageKind.PUSH, MessageKind.PULL, MessageKind.PUSHPULL) for count in (0, 2, 4)
    ]
    assert sorted(arrived) == sorted(calls * 2), "the large one, two halves, and the other four"


def test_the_error_of_a_deadline_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is answered after all makes nothing of the call that was told otherwise, nor of the next one."""
    has_ended = threading.Event()

    def work(store: DistStore) -> Any:
        store.init("w", np.zeros(2, np.float32))
        store.barrier()
        value = np.full(2, store.rank + 1, np.float32)
        if store.rank == 0:
            # before the server says who is late
            monkeypatch.setattr("reigen.kv.client.worker._TOLERANCE_SECONDS", 0.2 - SECONDS)
            with pytest.raises(DeadlineError, match="no answer"):
                store.pushpull("w", value)
            monkeypatch.undo()
            has_ended.set()
            store.wait()
        else:
            assert has_ended.wait(40)
            store.pushpull("w", value)
        store.pull("w", value)
        return value.tolist()

    with job(2, 1) as made:
        assert made.results(work) == [[3, 3]] * 2


def test_waiting_with_a_timeout_can_go_on() -> None:
    may_push = threading.Event()

    def work(store: DistStore) -> Any:
        store.init("w", np.ones(2, np.float32))
        out = np.empty(2, np.float32)
        if store.rank == 1:
            assert may_push.wait(SECONDS)
        pending = store.pushpull("w", np.ones(2, np.float32), out, wait=False)
        if store.rank == 0:
            with pytest.raises(DeadlineError, match="pushpull of key 'w': no answer from server 0 on host here"):
                pending.wait(timeout=0.05)
            may_push.set()
        pending.wait()
        return out.tolist()

    with job(2) as made:
        assert made.results(work) == [[2, 2]] * 2


def test_a_server_that_has_gone_is_named() -> None:
    def work(store: DistStore) -> None:
        store.init("w", np.ones(2, np.float32))
        store.barrier()
        if store.rank == 0:
            made.stop_server(0)
        store.pushpull("w", np.ones(2, np.float32))

    with job(2, peer_timeout_seconds=0.5) as made:
        for text in errors(made, work, PeerLostError):
            assert "server 0 on host here is lost" in text


@pytest.mark.parametrize("size", [3, 200_000])
@pytest.mark.parametrize("num_keys", [1, 3])
def test_a_server_that_answers_nonsense_ends_the_store(
    monkeypatch: pytest.MonkeyPatch, size: int, num_keys: int
) -> None:
    original = WorkerConnection.answer_value

    def halve(connection: WorkerConnection, request: Any, value: ValueBuffer, dtype: int) -> None:
        half = ValueBuffer(value.array[: len(value.array) // 2], value.block)
        original(connection, request, half, dtype)

    monkeypatch.setattr(WorkerConnection, "answer_value", halve)
    keys = list(range(num_keys))

    def work(store: DistStore) -> None:
        store.init(keys, [np.zeros(size, np.float32)] * num_keys)
        values = [np.ones(size, np.float32)] * num_keys
        for _ in range(2):  # it does not get better
            with pytest.raises(WireError, match="bytes"):
                store.pushpull(keys, values, [np.empty_like(value) for value in values])
        store.abandon()

    with job(2, 1) as made:
        made.results(work)


@pytest.mark.parametrize("num_keys", [1, 2])
def test_a_push_that_waits_for_earlier_ones_ends_with_the_job(num_keys: int) -> None:
    """Nobody else pushes, and the scheduler says that the job is over."""
    keys, value = list(range(num_keys)), [np.ones(4, np.float32)] * num_keys

    def push_too_much(store: DistStore) -> None:
        for _ in range(MAX_PENDING_PUSHES + 1):
            pending = store.push(keys, value)
        pending.wait()

    def work(store: DistStore) -> None:
        store.init(keys, value)
        if store.rank == 0:
            with pytest.raises(CollectiveError, match="the test wants it"):
                push_too_much(store)
            ended.set()
        else:
            wait_until(lambda: 0 in stores[0]._keys)
            track = stores[0]._keys[0].order
            wait_until(lambda: track.num_pushes == MAX_PENDING_PUSHES and stores[0]._worker._driving._lock.locked())
            made.stop_job("the test wants it")
            assert ended.wait(SECONDS)

    stores: list[DistStore] = []
    ended = threading.Event()
    with job(2, 1) as made:
        meeting = threading.Barrier(2)

        def collect(store: DistStore) -> None:
            if store.rank == 0:
                stores.append(store)
            meeting.wait(SECONDS)
            work(store)

        results = made.run(collect)
    assert not [each for each in results if not isinstance(each, CollectiveError | None)]
    assert ended.is_set()


def test_a_closed_store_says_so() -> None:
    with job(1) as made:
        store = made.store(0)
        store.init("w", np.ones(2, np.float32))
        store.close()
        store.close()
        with pytest.raises(ArgumentError, match="closed"):
            store.pull("w", np.ones(2, np.float32))


def test_staleness_bounds_how_far_a_worker_is_ahead() -> None:
    ahead = threading.Event()

    def work(store: DistStore) -> Any:
        store.set_optimizer(optim.create("test"))
        store.init("w", np.zeros(1, np.float32))
        out = np.empty(1, np.float32)
        if store.rank == 1:
            assert ahead.wait(SECONDS)
            store.push("w", np.ones(1, np.float32)).wait()
            return None
        for _ in range(2):
            store.pushpull("w", np.ones(1, np.float32), out)
        third = store.pushpull("w", np.ones(1, np.float32), out, wait=False)
        with pytest.raises(DeadlineError):
            third.wait(timeout=0.05)
        ahead.set()
        third.wait()
        return out.tolist()

    with job(2) as made:
        assert made.results(work, staleness=2)[0] == [4.0]


def test_who_attends_is_interrupted_and_told() -> None:
    """`attend` returns when it is interrupted, and when the oldest operation is done; callbacks come once."""
    may_push, called = threading.Event(), []

    def use(store: DistStore) -> list[float]:
        store.init(["w", "v"], [np.zeros(2, np.float32), np.zeros(30_000, np.float32)])
        value, out = np.full(2, store.rank + 1, np.float32), np.zeros(2, np.float32)
        if store.rank:
            assert may_push.wait(SECONDS)
            store.pushpull("w", value, out)
            store.pull("v", out := np.zeros(30_000, np.float32))
            return [float(out[0])]
        wants_in = threading.Event()
        with store.attention():
            pending = store.pushpull("w", value, out, wait=False)
            pending.add_done_callback(lambda: called.append("w"))

            def interrupt() -> None:
                wants_in.set()
                store.interrupt()

            thread = threading.Thread(target=interrupt)
            thread.start()
            store.attend(pending, wants_in.is_set)
            thread.join(SECONDS)
            assert not pending.done()
            assert called == []
            may_push.set()
            store.attend(pending, lambda: False)
            assert pending.done()
            assert called == ["w"]
            pending.add_done_callback(lambda: called.append("again"))
        return out.tolist()

    with job() as made:
        assert made.results(use) == [[3, 3], [0]]
    assert called == ["w", "again"]


def test_what_is_begun_under_attention_leaves_at_its_end() -> None:
    has_pushed = threading.Barrier(2)

    def use(store: DistStore) -> list[float]:
        store.init("w", np.zeros(2, np.float32))
        with store.attention():
            store.push("w", np.full(2, store.rank + 1, np.float32))
        has_pushed.wait(SECONDS)  # nobody calls a store here: its thread sends, and hears that it is done
        wait_until(lambda: not store._worker._num_outstanding)
        out = np.zeros(2, np.float32)
        store.pull("w", out)
        return out.tolist()

    with job() as made:
        assert made.results(use) == [[3, 3]] * 2
