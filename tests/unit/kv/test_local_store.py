"""Stores in one process: MXNet's semantics, and what it says of wrong arguments."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reigen
from reigen import kv, optim
from reigen.errors import ArgumentError, ConfigError, UnsupportedError, UnsupportedTypeError
from reigen.kv.factory import STORE_TYPES

SHAPE = (3, 2)


def ones(value: float = 1.0) -> np.ndarray[Any, Any]:
    return np.full(SHAPE, value, np.float32)


def pulled(store: kv.KVStore, key: int | str) -> list[list[float]]:
    out = np.empty(SHAPE, np.float32)
    store.pull(key, out)
    return out.tolist()


@pytest.fixture(params=["local", "device", "ring"])
def store(request: pytest.FixtureRequest) -> Any:
    with kv.create(request.param) as made:
        yield made
    reigen.shutdown()


def test_there_is_a_store_for_every_name_of_mxnet() -> None:
    names = "local LOCAL local_update_cpu local_allreduce_cpu device local_allreduce_device nccl"
    for name in names.split():
        made = kv.create(name)
        assert (made.type, made.rank, made.num_workers, made.is_recovery) == (name.lower(), 0, 1, False)
    assert kv.create().type == "local"
    assert {"dist", "dist_sync", "dist_async", "dist_sync_device", "dist_device_sync", "dist_async_device"} < set(
        STORE_TYPES
    )
    assert {"ring", "horovod", "byteps", "dist_ssp"} < set(STORE_TYPES)


def test_other_names_are_errors_that_list_the_names() -> None:
    with pytest.raises(ArgumentError, match=r"type of store 'dist_synk' \(did you mean 'dist_sync'\?\); there "):
        kv.create("dist_synk")
    with pytest.raises(ArgumentError, match=r"there are: .*dist_async.*local.*ring"):
        kv.create("?")
    with pytest.raises(TypeError, match="must be a string, got int"):
        kv.create(3)  # type: ignore[arg-type]


def test_staleness_belongs_to_ssp() -> None:
    with pytest.raises(ArgumentError, match="dist_ssp needs staleness="):
        kv.create("dist_ssp")
    for wrong in (-1, 1.5, True, math.nan):
        with pytest.raises(ArgumentError, match="staleness is a whole number"):
            kv.create("dist_ssp", staleness=wrong)
    with pytest.raises(ArgumentError, match="'dist_sync' takes no staleness"):
        kv.create("dist_sync", staleness=1)
    with pytest.raises(ArgumentError, match="has no knobs, got kv_threads"):
        kv.create("local", kv_threads=3)


def test_a_distributed_store_without_servers_says_how_to_start_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="reigen run -np 4 -s 2"):
        kv.create("dist_sync")
    with pytest.raises(ArgumentError, match="there is no knob kv_thread;"):
        kv.create("dist_sync", kv_thread=3)


def test_pull_gives_what_was_stored_and_push_assigns(store: kv.KVStore) -> None:
    store.init(3, ones(2))
    assert pulled(store, 3) == ones(2).tolist()
    assert store.rounds(3) == 0
    pending = store.push(3, ones(8))
    pending.wait()
    assert pending.done()
    assert pulled(store, 3) == ones(8).tolist()
    store.push(3, [ones(1), ones(2), ones(4)])
    assert pulled(store, 3) == ones(7).tolist()
    assert store.rounds(3) == 2


def test_what_was_pushed_may_be_changed_afterwards(store: kv.KVStore) -> None:
    store.init("w", ones())
    value = ones(5)
    store.push("w", value)
    value[:] = 9
    assert pulled(store, "w") == ones(5).tolist()


def test_lists_of_keys_and_of_devices(store: kv.KVStore) -> None:
    store.init([5, 7], [ones(), torch.ones(4)])
    store.push([5, 7, 5], [[ones(), ones()], torch.full((4,), 3.0), ones()])
    outs = [np.empty(SHAPE, np.float32), np.empty(SHAPE, np.float32)]
    of_7 = torch.empty(4)
    store.pull([5, 7], [outs, of_7])
    assert [out.tolist() for out in outs] == [ones(3).tolist()] * 2
    assert of_7.tolist() == [3.0] * 4


def test_pushpull_and_broadcast(store: kv.KVStore) -> None:
    out = torch.empty(2, 3).t()
    store.broadcast("w", torch.ones(SHAPE), out)
    assert out.tolist() == ones().tolist()
    value = torch.full(SHAPE, 4.0)
    store.pushpull("w", value, out=out)
    assert out.tolist() == ones(4).tolist()
    values = [torch.full(SHAPE, 1.0), torch.full(SHAPE, 2.0)]
    pending = store.pushpull("w", values, priority=-3, wait=False)
    pending.wait()
    assert [each.tolist() for each in values] == [ones(3).tolist()] * 2


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8"])
def test_types_of_elements(store: kv.KVStore, name: str) -> None:
    dtype = getattr(torch, name)
    store.init(0, torch.zeros(5, dtype=dtype))
    out = torch.empty(5, dtype=dtype)
    store.pushpull(0, [torch.full((5,), 2, dtype=dtype), torch.full((5,), 3, dtype=dtype)], out)
    assert out.tolist() == [5] * 5


def test_an_updater_gets_tensors_of_the_keys_framework(store: kv.KVStore) -> None:
    def update(key: int | str, value: Any, stored: Any) -> None:
        assert key == "w"
        assert type(value) is type(stored) is torch.Tensor
        stored += 2 * value

    store.set_updater(update)
    store.init("w", torch.ones(SHAPE))
    store.push("w", [torch.ones(SHAPE), torch.ones(SHAPE)])
    store.push("w", torch.ones(SHAPE))
    assert pulled(store, "w") == ones(7).tolist()


def test_an_optimizer_updates_what_is_stored(store: kv.KVStore) -> None:
    store.init(0, ones())
    store.set_optimizer(optim.create("sgd", learning_rate=0.5))
    store.push(0, ones())
    assert pulled(store, 0) == ones(0.5).tolist()
    store.set_learning_rate(0.25)
    store.push(0, ones())
    assert pulled(store, 0) == ones(0.25).tolist()


def test_an_optimizer_comes_before_the_first_push(store: kv.KVStore) -> None:
    store.init(0, ones())
    with pytest.raises(ArgumentError, match="no optimizer; call set_optimizer"):
        store.set_learning_rate(1.0)
    with pytest.raises(ArgumentError, match=r"an optimizer of reigen\.optim is needed"):
        store.set_optimizer("sgd")  # type: ignore[arg-type]
    store.push(0, ones())
    with pytest.raises(ArgumentError, match="before the first push"):
        store.set_optimizer(optim.create("sgd"))


def test_states_go_to_a_file_and_back(store: kv.KVStore, tmp_path: Path) -> None:
    momentum = optim.create("sgd", learning_rate=1.0, momentum=0.5)
    with pytest.raises(ArgumentError, match="no optimizer"):
        store.save_optimizer_states(tmp_path / "states")
    store.init("w", ones(0))
    store.set_optimizer(momentum)
    store.push("w", ones())
    store.save_optimizer_states(tmp_path / "states", dump_optimizer=True)
    store.push("w", ones())
    assert pulled(store, "w") == ones(-2.5).tolist()
    with kv.create("local") as other:
        other.init("w", ones(-1))
        other.set_optimizer(momentum)
        other.load_optimizer_states(tmp_path / "states")
        other.push("w", ones())
        assert pulled(other, "w") == ones(-2.5).tolist()
    with kv.create("local") as stranger:
        stranger.init("other", ones())
        stranger.set_optimizer(momentum)
        with pytest.raises(ArgumentError, match="of key 'w', which this store does not have"):
            stranger.load_optimizer_states(tmp_path / "states")
        (tmp_path / "junk").write_bytes(b"\x80\x04")
        with pytest.raises(ArgumentError, match="no states of Reigen: too short"):
            stranger.load_optimizer_states(tmp_path / "junk")


def test_row_sparse_values(store: kv.KVStore) -> None:
    store.init("e", kv.RowSparse([0, 1, 2], ones(1), SHAPE))
    out = kv.RowSparse.empty(ones())
    store.row_sparse_pull("e", out, row_ids=[2, 0, 2])
    assert (out.indices.tolist(), out.values.tolist()) == ([0, 2], [[1, 1], [1, 1]])
    store.push("e", [kv.RowSparse([2, 2], ones(3)[:2], SHAPE), kv.RowSparse([0], ones(1)[:1], SHAPE)])
    assert pulled(store, "e") == [[1, 1], [0, 0], [6, 6]]
    store.pull("e", out)
    assert out.indices.tolist() == [0, 2], "sparse outs are ignored"
    store.pull("e", out, ignore_sparse=False)
    assert out.values.tolist() == [[1, 1], [0, 0], [6, 6]]
    store.row_sparse_pull("e", [out, out], row_ids=[torch.tensor([1]), torch.tensor([], dtype=torch.int64)])
    assert out.indices.tolist() == []
    with pytest.raises(ArgumentError, match="is a RowSparse, got a dense tensor"):
        store.row_sparse_pull("e", ones(), row_ids=[1])
    with pytest.raises(ArgumentError, match="takes dense tensors only"):
        store.pushpull("e", kv.RowSparse([0], ones(1)[:1], SHAPE))


def test_an_optimizer_updates_only_rows_that_were_pushed(store: kv.KVStore) -> None:
    store.init("e", kv.RowSparse([0, 1, 2], ones(1), SHAPE))
    store.set_optimizer(optim.create("sgd", learning_rate=1.0, wd=0.5))
    store.push("e", kv.RowSparse([1], ones(0)[:1], SHAPE))
    assert pulled(store, "e") == [[1, 1], [0.5, 0.5], [1, 1]]


def test_mistakes_are_named_and_change_nothing(store: kv.KVStore) -> None:
    with pytest.raises(ArgumentError, match="key 'w' was never initialised"):
        store.pull("w", ones())
    store.init("w", ones())
    for call, text in (
        (lambda: store.init("w", ones()), "initialised before"),
        (lambda: store.init(3, ones()), "mixed key types"),
        (lambda: store.init(["a", "a"], [ones(), ones()]), "given 2 times"),
        (lambda: store.push("v", ones()), "'v' was never initialised"),
        (lambda: store.push(3, ones()), "mixed key types"),
        (lambda: store.push("w", np.ones(4, np.float32)), r"holds float32 \(3, 2\), got float32 \(4,\)"),
        (lambda: store.push("w", np.ones(SHAPE)), "got float64"),
        (lambda: store.push("w", kv.RowSparse([0], ones()[:1], SHAPE)), "dense tensors only"),
        (lambda: store.pull("w"), "needs out="),
        (lambda: store.pull("w", np.broadcast_to(np.float32(1), SHAPE)), "key 'w': out= .* is read-only: give one"),
        (
            lambda: store.pushpull("w", np.broadcast_to(np.float32(1), SHAPE)),
            "key 'w': out= .* is read-only: give one",
        ),
        (lambda: store.rounds("v"), "never initialised"),
        (lambda: store.is_capable("flying"), "unknown capability"),
    ):
        with pytest.raises(ArgumentError, match=text):
            call()
    with pytest.raises(UnsupportedTypeError, match="complex64"):
        store.init("c", np.ones(2, np.complex64))
    with pytest.raises(UnsupportedTypeError, match=r"key 'w': out= .* got float"):
        store.pull("w", 1.0)
    assert pulled(store, "w") == ones().tolist()
    assert store.is_capable("optimizer")
    assert store.num_dead_nodes() == 0


def test_compression_is_for_devices(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="'local'"):
        kv.create("local").set_gradient_compression({"type": "2bit"})
    kv.create("local").set_gradient_compression({"type": "none"})
    device = kv.create("device")
    with pytest.raises(ArgumentError, match="unknown type of compression '3bit'"):
        device.set_gradient_compression({"type": "3bit"})
    device.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    device.init("w", np.zeros(5, np.float32))
    first, second = np.array([[0.6, -0.7, 0.2, 0.5, -0.5], [0.4, -0.1, 0.2, 0, 0.1]], np.float32)
    out = np.empty(5, np.float32)
    device.pushpull("w", first, out)
    assert out.tolist() == [0.5, -0.5, 0, 0.5, -0.5]
    device.save_optimizer_states(tmp_path / "residuals")
    for store in (device, kv.create("device")):
        if store is not device:
            store.init("w", np.zeros(5, np.float32))
            store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
            store.load_optimizer_states(tmp_path / "residuals")
        store.pushpull("w", [second, first], out)
        assert out.tolist() == [1.0, -0.5, 0, 0.5, -0.5], "the residual of the first push counts"


def test_mxnets_private_names() -> None:
    store = kv.create("local")
    store._barrier()
    store._set_updater(lambda key, value, stored: None)
    with pytest.raises(UnsupportedError, match="command 0 is not sent: set_optimizer"):
        store._send_command_to_servers(0, "")
    with pytest.raises(UnsupportedError, match="command 9 is not sent: there is no such"):
        store._send_command_to_servers(9, "")


@pytest.mark.parametrize("priority", ["high", 0.5, None, 2**31, -(2**31) - 1])
def test_a_priority_is_an_int_that_fits_into_a_message(store: kv.KVStore, priority: Any) -> None:
    store.init("w", ones())
    rows = kv.RowSparse([0], np.ones((1, 2), np.float32), SHAPE)
    for call in (
        lambda: store.push("w", ones(), priority),
        lambda: store.pull("w", ones(), priority),
        lambda: store.pushpull("w", ones(), priority=priority),
        lambda: store.broadcast("v", ones(), ones(), priority),
        lambda: store.row_sparse_pull("w", rows, priority, [0]),
    ):
        with pytest.raises(ArgumentError, match="priority is an int"):
            call()
    assert store.rounds("w") == 0
    store.push("w", ones(), np.int64(-3))
    store.init("v", ones())  # broadcast() has not created it


def test_a_store_that_was_closed_says_so() -> None:
    store = kv.create("local")
    store.init("w", ones())
    store.close()
    for call in (lambda: store.push("w", ones()), lambda: store.init("v", ones())):
        with pytest.raises(ArgumentError, match="this store was closed"):
            call()
    store.close()
