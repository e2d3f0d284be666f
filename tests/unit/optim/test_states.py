"""Optimizer states as bytes, in files, cut anew; and the updater of local stores."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reigen.errors import ArgumentError, ConfigError, UnsupportedTypeError
from reigen.optim import (
    OPTIMIZERS,
    Optimizer,
    Piece,
    Slot,
    States,
    Updater,
    check_can_be_written,
    create,
    packed,
    piece_of,
    slot_of,
    write_atomically,
)
from reigen.types import dtype_named

FLOAT32 = dtype_named("float32")


def normal(seed: int, size: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def piece(begin: int, end: int, **more: Any) -> Piece:
    facts: dict[str, Any] = {"key": "w", "num_elements": 100, "dtype": "float32", "count": 3, "rate": 0.1, **more}
    return Piece(begin=begin, end=end, arrays={"m": np.arange(begin, end, dtype=np.float32)}, **facts)


@pytest.mark.parametrize("name", [name for name, kind in OPTIMIZERS.items() if kind.is_elementwise])
def test_states_of_some_servers_go_on_on_others(name: str, tmp_path: Path) -> None:
    """Training stops on two servers and goes on on three: the same bits as on one that never stopped."""
    optimizer, size = create(name, wd=0.01), 1000
    whole, weight = normal(1, size), normal(1, size)
    reference = Slot(optimizer, whole, FLOAT32)
    before = [(0, 640), (640, size)]
    slots = [Slot(optimizer, weight[a:b], FLOAT32) for a, b in before]
    for t in range(3):
        reference.update(optimizer, whole, normal(10 + t, size))
        for slot, (a, b) in zip(slots, before, strict=True):
            slot.update(optimizer, weight[a:b], normal(10 + t, size)[a:b])
    for number, (slot, (a, _)) in enumerate(zip(slots, before, strict=True)):
        States([piece_of(slot, "w", size, a)], optimizer).save(tmp_path / f"states.{number}")
    states = States.load(tmp_path / "states.1", tmp_path / "states.0")
    assert states.optimizer == optimizer
    after = [(0, 320), (320, 672), (672, size)]
    moved = [slot_of(states.cut("w", a, b), optimizer, weight[a:b]) for a, b in after]
    for t in range(3, 6):
        reference.update(optimizer, whole, normal(10 + t, size))
        for slot, (a, b) in zip(moved, after, strict=True):
            slot.update(optimizer, weight[a:b], normal(10 + t, size)[a:b])
    np.testing.assert_array_equal(weight, whole)
    assert [slot.count for slot in moved] == [6, 6, 6]


def test_bytes_are_read_as_they_were_written() -> None:
    arrays = {
        "a": np.array([1.5, -2.0]),
        "b": np.array([7, 2**63 - 1]),
        "c": np.array([0x3F80, 0], np.uint16),
        "d": np.array([True, False]),
    }
    pieces = [
        Piece(2**63 - 1, 9, 3, 5, "bfloat16", 12, None, arrays),
        Piece("ü", 0, 0, 0, "float32", 0, 1e-300, {"empty": np.empty(0)}),
        Piece(-4, 5, 0, 5, "float64", 1, 0.5, {}),
    ]
    data = States(pieces, create("adam"), {"round": 7, "host": "a", "x": 0.5, "y": None, "z": True}).to_bytes()
    again = States.from_bytes(data)
    assert (again.optimizer, dict(again.facts)) == (
        create("adam"),
        {"round": 7, "host": "a", "x": 0.5, "y": None, "z": True},
    )
    assert set(again.keys) == {2**63 - 1, "ü", -4}
    for one in pieces:
        (other,) = again.of(one.key)
        assert replace(other, arrays={}) == replace(one, arrays={})
        for name, array in one.arrays.items():
            np.testing.assert_array_equal(other.arrays[name], array)
            assert other.arrays[name].dtype == array.dtype
    assert States.from_bytes(data).to_bytes() == data
    assert States.from_bytes(States(()).to_bytes()).keys == ()


def test_no_changed_or_missing_byte_goes_unnoticed() -> None:
    data = States([piece(0, 10)], create("sgd")).to_bytes()
    for length in (*range(0, len(data), 7), len(data) - 1):
        with pytest.raises(ConfigError):
            States.from_bytes(data[:length])
    for position in range(0, len(data), 11):
        changed = bytearray(data)
        changed[position] ^= 1
        with pytest.raises(ConfigError):
            States.from_bytes(changed)
    with pytest.raises(ConfigError, match="checksum"):
        States.from_bytes(data + b"x")
    with pytest.raises(ConfigError, match="pickled code"):
        States.from_bytes(b"\x80\x04" + bytes(100))
    with pytest.raises(ConfigError, match="layout 3"):
        States.from_bytes(data[:8] + struct.pack("<I", 3) + data[12:])


def test_what_a_consistent_file_claims_is_checked() -> None:
    """A right checksum proves nothing about who wrote it."""

    def forged(pieces: Any, optimizer: Any = None, arrays: Any = None) -> bytes:
        return b"".join(packed({"optimizer": optimizer, "facts": {}, "pieces": pieces}, arrays or {}))

    four = np.zeros(4, np.float32)
    wrong: list[tuple[Any, Any, Any, str]] = [
        ([["w", 10, 0, 10**15, "float32", 0, None]], None, None, "no range"),
        ([["w", 10**15, 0, 10**15, "float32", 0, None]], None, {"0 m": four}, "m is no flat array"),
        ([["w", 4, 0, 4, "float32", 0, None]], None, {"1 m": four}, "no piece among the states: '1 m'"),
        ([["w", 4, 0, 4, "float32", 0, None]], None, {"-1 m": four}, "no piece among the states"),
        ([["w", 4, 0, 4, "float32", 0, None]], None, {"m": four}, "no piece among the states"),
        ([["w", 4, 0, 4, "float32", 0, None]], None, {"0 m": four.reshape(2, 2)}, "m is no flat array"),
        ([["w", 4, 0, 4, "object", 0, None]], None, None, "unknown element type"),
        ([["w", 4, 4, 0, "float32", 0, None]], None, {"0 m": four}, "no range"),
        ([["w", 4, 0]], None, None, "makes no sense"),
        ([[["w"], 4, 0, 4, "float32", 0, None]], None, None, "makes no sense"),
        ([], {"name": "os.system"}, None, "no optimizer is called 'os.system'"),
    ]
    for pieces, optimizer, arrays, words in wrong:
        with pytest.raises(ConfigError, match=words):
            States.from_bytes(forged(pieces, optimizer, arrays))


def test_ranges_are_put_together_and_gaps_named() -> None:
    states = States([piece(0, 32), piece(32, 64, count=5, rate=0.2)]).merged([States([piece(96, 100)])])
    assert states.cut("w", 0, 32).arrays["m"].tolist() == list(range(32))
    middle = states.cut("w", 30, 40)
    assert (middle.arrays["m"].tolist(), middle.count, middle.rate) == (list(range(30, 40)), 5, 0.2)
    assert states.cut("w", 98, 100).arrays["m"].tolist() == [98, 99]
    assert states.cut("w", 7, 7).arrays["m"].tolist() == []
    for begin, end in ((0, 100), (60, 70), (64, 96), (90, 97)):
        with pytest.raises(ConfigError, match=f"lack the elements from {max(begin, 64)} on"):
            states.cut("w", begin, end)
    with pytest.raises(ConfigError, match="no states of key 'v'"):
        states.cut("v", 0, 1)


def test_pieces_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="overlap"):
        States([piece(0, 33), piece(32, 64)])
    with pytest.raises(ConfigError, match="disagree"):
        States([piece(0, 32), piece(32, 64, dtype="float64")])
    with pytest.raises(ConfigError, match="no flat array"):
        Piece("w", 4, 0, 4, "float32", 0, None, {"m": np.zeros((2, 2))})
    with pytest.raises(ConfigError, match="no flat array"):
        Piece("w", 4, 0, 4, "float32", 0, None, {"m": np.zeros(4, ">f4")})
    mixed = States([piece(0, 32), Piece("w", 100, 32, 64, "float32", 0, None, {"n": np.zeros(32, np.float32)})])
    with pytest.raises(ConfigError, match="different arrays"):
        mixed.cut("w", 0, 64)
    with pytest.raises(ConfigError, match="needs mean, variance, too"):
        slot_of(piece(0, 4), create("adam"), np.zeros(4, np.float32))
    with pytest.raises(ConfigError, match="4 elements of key 'w' for a weight of 5"):
        slot_of(piece(0, 4), create("sgd"), np.zeros(5, np.float32))


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "states"
    States([piece(0, 100)]).save(path)
    before = path.read_bytes()

    def broken() -> Any:
        yield b"half of it"
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write_atomically(path, broken())
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["states"]
    path.write_bytes(before[:-1])
    with pytest.raises(ConfigError, match=str(path)):
        States.load(path)


def test_a_file_may_be_private_and_a_directory_is_no_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "states", [b"new", bytearray(b" one")], mode=0o600)
    assert (tmp_path / "states").read_bytes() == b"new one"
    assert (tmp_path / "states").stat().st_mode & 0o777 == 0o600
    (tmp_path / "directory").mkdir()
    missing = tmp_path / "nowhere" / "states"
    for check in (lambda path: write_atomically(path, [b"x"]), check_can_be_written):
        with pytest.raises(IsADirectoryError, match=f"directory: '{tmp_path / 'directory'}'"):
            check(tmp_path / "directory")
        with pytest.raises(FileNotFoundError, match=f"'{missing}'$"):  # and not a temporary file
            check(missing)
    check_can_be_written(tmp_path / "new")
    check_can_be_written(tmp_path / "states")
    assert (tmp_path / "states").read_bytes() == b"new one"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["directory", "states"]


# ---------------------------------------------------------------- the updater


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_loaded_updater_goes_on_with_the_same_bits(name: str, dtype: str, tmp_path: Path) -> None:
    optimizer = create(name, multi_precision=True)
    steady, stopped = Updater(optimizer), Updater(optimizer)
    weights = {key: normal(len(key), 60).astype(dtype).reshape(6, 10) for key in ("a", "bc")}
    others = {key: value.copy() for key, value in weights.items()}
    for t in range(4):
        if t == 2:
            stopped.save(tmp_path / "states")
            stopped = Updater(optimizer)
            stopped.load(tmp_path / "states")
        for key, weight in weights.items():
            gradient = normal(t, 60).astype(dtype).reshape(6, 10)
            steady(key, gradient, weight)
            if (t, key) != (2, "bc"):
                stopped(key, gradient, others[key])
        if t == 2:  # a key that is not updated between loading and saving keeps its states
            stopped.save(tmp_path / "again")
            stopped.load(tmp_path / "again")
            stopped("bc", normal(t, 60).astype(dtype).reshape(6, 10), others["bc"])
    for key, weight in weights.items():
        np.testing.assert_array_equal(others[key], weight)


def test_a_dumped_optimizer_is_taken_over(tmp_path: Path) -> None:
    trained = Updater(create("sgd", learning_rate=0.125, momentum=0.5))
    trained(1, np.ones(2), np.ones(2))
    for dump, expected in ((True, 0.125), (False, 0.5)):
        trained.save(tmp_path / "states", dump_optimizer=dump)
        other = Updater(create("sgd", learning_rate=0.5, momentum=0.5))
        other.load(tmp_path / "states")
        assert other.optimizer.learning_rate == expected


def test_weights_of_any_shape_are_updated_where_they_are() -> None:
    updater = Updater(create("sgd", learning_rate=1.0))
    scalar = np.array(3.0)
    updater("scalar", np.array(1.0), scalar)
    assert scalar == 2.0
    square = np.arange(9.0).reshape(3, 3)
    updater("strided", np.ones((3, 3)).T, square.T)
    assert square.tolist() == (np.arange(9.0).reshape(3, 3) - 1).tolist()
    deep = np.zeros((4, 2, 2))
    updater.update_rows("deep", np.array([1, 3]), np.ones((2, 2, 2)), deep)
    assert deep.sum(axis=(1, 2)).tolist() == [0, -4, 0, -4]
    updater.update_rows("deep", np.array([], np.int64), np.ones((0, 2, 2)), deep)
    assert deep.sum() == -8
    updater.update_rows("flat", np.array([2]), np.ones(1), flat := np.zeros(3))
    assert flat.tolist() == [0, 0, -1]


def test_the_rate_can_change_and_the_states_stay() -> None:
    updater, weight = Updater(create("sgd", learning_rate=1.0, momentum=0.5)), np.zeros(1)
    updater("w", np.ones(1), weight)
    updater.set_optimizer(updater.optimizer.with_learning_rate(0.0))
    updater("w", np.ones(1), weight)
    assert weight[0] == -1.5
    with pytest.raises(ConfigError, match="keeps mean, variance"):
        updater.set_optimizer(create("adam"))


def test_what_does_not_fit_is_refused() -> None:
    def loaded_with(optimizer: Optimizer) -> Updater:
        source = Updater(optimizer)
        source("w", np.ones(4, np.float32), np.ones(4, np.float32))
        result = Updater(optimizer)
        result.set_states(source.get_states())
        return result

    updater = loaded_with(create("sgd", momentum=0.9))
    with pytest.raises(ConfigError, match="of 4 elements of float32; the weight has 5"):
        updater("w", np.ones(5, np.float32), np.ones(5, np.float32))
    with pytest.raises(ArgumentError, match="gradient of shape"):
        updater("w", np.ones(3, np.float32), np.ones(4, np.float32))
    updater("w", np.ones(4, np.float32), np.ones(4, np.float32))
    with pytest.raises(ArgumentError, match="has been updated as 4 elements of float32; now it has 4 of float64"):
        updater("w", np.ones(4), np.ones(4))
    with pytest.raises(UnsupportedTypeError, match="int64"):
        updater("i", np.ones(4, np.int64), np.ones(4, np.int64))
    with pytest.raises(ConfigError, match="lack mean, variance of adam"):
        Updater(create("adam")).set_states(updater.get_states())
    with pytest.raises(ArgumentError, match=r"1 rows of shape \(3,\) and a gradient \(1, 2\)"):
        updater.update_rows("r", np.array([0]), np.ones((1, 2)), np.ones((4, 3)))
    with pytest.raises(ArgumentError, match="must have rows"):
        updater.update_rows("s", np.array([0]), np.ones(1), np.array(1.0))
