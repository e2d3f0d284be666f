"""Who updates the weights: MXNet 1.9.1's table, line by line."""

from __future__ import annotations

import math

import pytest

from reigen.errors import ArgumentError
from reigen.kv.local_store import LocalStore
from reigen.kv.update_on_kvstore import (
    StoreKind,
    UpdateLocation,
    UpdateRequirements,
    choose_update_location,
    store_kind,
)

STORE = UpdateLocation(needs_store=True, on_store=True)
WORKER = UpdateLocation(needs_store=True, on_store=False)
ALONE = UpdateLocation(needs_store=False, on_store=False)
ERROR = None

NONE, LOCAL, SYNC = StoreKind.NONE, StoreKind.LOCAL, StoreKind.SYNCHRONOUS
ASYNC, RING, CUSTOM = StoreKind.ASYNCHRONOUS, StoreKind.ALLREDUCE, StoreKind.CUSTOM

# The columns: the user says None, True, False. Each is (by default on the store, by default not), where they differ.
TABLE = [
    # dense weights and gradients
    ({"kind": NONE, "is_capable": False}, ALONE, ERROR, ALONE),
    ({"kind": LOCAL, "by_name": True}, ALONE, STORE, ALONE),
    ({"kind": LOCAL}, (STORE, WORKER), STORE, WORKER),
    ({"kind": SYNC}, (STORE, WORKER), STORE, WORKER),
    ({"kind": SYNC, "by_name": True}, (STORE, WORKER), STORE, WORKER),
    ({"kind": ASYNC}, STORE, STORE, ERROR),
    ({"kind": RING}, WORKER, STORE, WORKER),
    ({"kind": CUSTOM, "is_capable": False}, WORKER, ERROR, WORKER),
    ({"kind": CUSTOM}, (STORE, WORKER), STORE, WORKER),
    # row-sparse gradients of dense weights
    ({"kind": NONE, "is_capable": False, "sparse_gradients": True}, ALONE, ERROR, ALONE),
    ({"kind": LOCAL, "by_name": True, "sparse_gradients": True}, ALONE, STORE, ALONE),
    ({"kind": LOCAL, "sparse_gradients": True}, WORKER, STORE, WORKER),
    ({"kind": SYNC, "sparse_gradients": True}, STORE, STORE, ERROR),
    ({"kind": ASYNC, "sparse_gradients": True}, STORE, STORE, ERROR),
    ({"kind": RING, "sparse_gradients": True}, WORKER, STORE, WORKER),
    ({"kind": CUSTOM, "sparse_gradients": True}, ERROR, ERROR, ERROR),
    ({"kind": CUSTOM, "sparse_gradients": True, "is_capable": False}, ERROR, ERROR, ERROR),
    # row-sparse weights
    ({"kind": NONE, "is_capable": False, "sparse_weights": True}, ERROR, ERROR, ERROR),
    ({"kind": LOCAL, "sparse_weights": True, "by_name": True}, STORE, STORE, ERROR),
    ({"kind": SYNC, "sparse_weights": True}, STORE, STORE, ERROR),
    ({"kind": ASYNC, "sparse_weights": True}, STORE, STORE, ERROR),
    ({"kind": CUSTOM, "sparse_weights": True}, ERROR, ERROR, ERROR),
]


@pytest.mark.parametrize("default", [True, False])
@pytest.mark.parametrize("line", TABLE, ids=lambda line: " ".join(f"{k}={v}" for k, v in line[0].items()))
def test_the_table(line, default):
    facts, *columns = line
    for wanted, column in zip((None, True, False), columns, strict=True):
        expected = column[0 if default else 1] if isinstance(column, tuple) else column
        question = UpdateRequirements(wanted=wanted, default=default, **facts)
        if expected is ERROR:
            with pytest.raises(ArgumentError):
                choose_update_location(question)
        else:
            place, reason = choose_update_location(question)
            assert place == expected, (question, reason)
            assert reason


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"kind": NONE, "wanted": True}, "needs a store, and kvstore is None"),
        ({"kind": ASYNC, "wanted": False}, "does not work with an asynchronous store"),
        ({"kind": SYNC, "wanted": False, "sparse_gradients": True}, "does not work with row-sparse gradients"),
        ({"kind": CUSTOM, "wanted": True, "is_capable": False}, "this store has no optimizers"),
        ({"kind": NONE, "sparse_weights": True}, "need a store of reigen.kv to hold them; there is no store"),
    ],
)
def test_errors_say_why(facts, words):
    with pytest.raises(ArgumentError, match=words):
        choose_update_location(UpdateRequirements(**facts))


@pytest.mark.parametrize(
    ("kind", "staleness", "expected"),
    [
        ("local", 0, LOCAL),
        ("device", 0, LOCAL),
        ("dist", 0, SYNC),
        ("dist_device_sync", 0, SYNC),
        ("byteps", 0, SYNC),
        ("dist_ssp", 0, SYNC),
        ("dist_ssp", 2, ASYNC),
        ("dist_ssp", math.inf, ASYNC),
        ("dist_async_device", math.inf, ASYNC),
        ("ring", 0, RING),
        ("horovod", 0, RING),
    ],
)
def test_what_a_store_is(kind, staleness, expected):
    store = LocalStore(kind)
    store.staleness = staleness
    assert store_kind(store) is expected


def test_stores_of_nobody_and_of_somebody_else():
    assert store_kind(None) is NONE
    assert store_kind(object()) is CUSTOM


def test_the_reason_names_what_decided():
    assert choose_update_location(UpdateRequirements(SYNC, wanted=False))[1] == "update_on_kvstore=False"
    assert choose_update_location(UpdateRequirements(SYNC, default=False))[1] == "REIGEN_KV_UPDATE_ON_KVSTORE is 0"
