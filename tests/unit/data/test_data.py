"""Which samples a worker uses, and how a batch is cut."""

from __future__ import annotations

import doctest
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

import reigen.data.partition
import reigen.data.slices
from reigen.data import ShuffleSplitSampler, SplitSampler, share, share_length, split_and_load, split_data
from reigen.errors import ArgumentError, UnsupportedTypeError

SIZES = [(0, 1), (1, 1), (7, 1), (7, 2), (7, 7), (100, 3), (1797, 4)]


def test_importing_it_loads_no_framework():
    code = "import sys, reigen.data; assert not {'torch', 'tensorflow', 'reigen.context'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("module", [reigen.data.partition, reigen.data.slices])
def test_the_examples_in_the_docstrings(module):
    result = doctest.testmod(module, extraglobs={"np": np})
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize(("length", "parts"), [*SIZES, (2, 5)])
def test_keep_divides_exactly(length, parts):
    # MXNet's MNISTIter: [int(n / parts * i), int(n / parts * (i + 1)))
    shares = [share(length, parts, index, remainder="keep") for index in range(parts)]
    assert [position for part in shares for position in part] == list(range(length))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("length", "parts"), SIZES)
def test_drop_gives_equal_counts_and_leaves_out_the_fewest(length, parts):
    shares = [share(length, parts, index) for index in range(parts)]
    assert {len(part) for part in shares} == {length // parts}
    assert len({position for part in shares for position in part}) == length - length % parts


@pytest.mark.parametrize(("length", "parts"), [*SIZES[1:], (2, 5)])
def test_pad_gives_equal_counts_and_leaves_out_none(length, parts):
    samplers = [SplitSampler(length, parts, index, remainder="pad") for index in range(parts)]
    assert {len(sampler) for sampler in samplers} == {-(-length // parts)}
    used = Counter(position for sampler in samplers for position in sampler)
    assert set(used) == set(range(length))
    assert sum(used.values()) == -(-length // parts) * parts
    assert max(used.values()) <= max(2, -(-parts // length))


def test_length():
    assert share_length(10, 4, 3) == 2
    assert share_length(10, 4, 3, remainder="keep") == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((-1, 1, 0), "cannot be negative"),
        ((10, 0, 0), "num_parts must be at least 1"),
        ((10, 2, 2), "from 0 to 1, got 2"),
        ((10, 2, -1), "from 0 to 1, got -1"),
        ((3, 4, 0), 'each would be empty; use fewer parts, or remainder="pad"'),
    ],
)
def test_numbers_that_make_no_sense(arguments, words):
    for function in (share, SplitSampler, ShuffleSplitSampler):
        with pytest.raises(ArgumentError, match=words):
            function(*arguments)


def test_an_unknown_remainder():
    with pytest.raises(ArgumentError, match="one of drop, pad, keep, got 'most'"):
        share(10, 2, 0, remainder="most")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="cannot be negative"):
        SplitSampler(3).set_epoch(-1)


def test_split_sampler_stays_in_its_part():
    sampler = SplitSampler(100, num_parts=4, part_index=2)
    first, second = list(sampler), list(sampler)
    assert sorted(first) == sorted(second) == list(range(50, 75))
    assert len({tuple(first), tuple(second), tuple(range(50, 75))}) == 3
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(sampler) == second
    assert list(SplitSampler(100, 4, 2, shuffle=False)) == list(range(50, 75))
    assert list(SplitSampler(100, 4, 2, seed=1)) != first


@pytest.mark.parametrize("remainder", ["drop", "keep"])
def test_shuffle_split_uses_a_sample_once_an_epoch(remainder):
    samplers = [ShuffleSplitSampler(103, 4, index, seed=5, remainder=remainder) for index in range(4)]
    epochs = []
    for _ in range(3):
        parts = [list(sampler) for sampler in samplers]
        assert [len(part) for part in parts] == [len(sampler) for sampler in samplers]
        used = [position for part in parts for position in part]
        assert len(used) == len(set(used)) == (103 if remainder == "keep" else 100)
        assert set(used) <= set(range(103))
        epochs.append(parts)
    # Other parts each epoch, and over time every sample.
    assert set(epochs[0][0]) != set(epochs[1][0])
    assert {position for parts in epochs for part in parts for position in part} == set(range(103))


def test_the_orders_are_the_same_wherever_and_whenever():
    # MT19937 seeded by an array: NumPy promises never to change what follows.
    assert list(ShuffleSplitSampler(8, 2, 0, seed=1)) == np.random.RandomState([1, 0, 0, 0]).permutation(8)[:4].tolist()
    large = ShuffleSplitSampler(8, 2, 0, seed=2**40 + 1)
    assert list(large) == np.random.RandomState([1, 256, 0, 0]).permutation(8)[:4].tolist()
    assert all(type(position) is int for position in SplitSampler(4))


def test_split_data():
    data = np.arange(24).reshape(4, 6)
    for part, expected in zip(split_data(data, 2), (data[:2], data[2:]), strict=True):
        assert np.shares_memory(part, data)
        np.testing.assert_array_equal(part, expected)
    assert [part.shape for part in split_data(data, 3, batch_axis=1)] == [(4, 2)] * 3
    assert [part.shape for part in split_data(data, 3, batch_axis=-1)] == [(4, 2)] * 3
    assert [len(part) for part in split_data(np.arange(11), 4, even_split=False)] == [3, 3, 3, 2]
    assert [part.tolist() for part in split_data([1, 2, 3], 3)] == [[1], [2], [3]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((np.zeros((5, 2)), 2), r"\(5, 2\) cannot be cut evenly into 2 slices along axis 0; use a batch size that"),
        ((np.zeros(3), 4, 0, False), "3 samples .* are too few for 4 slices"),
        ((np.zeros(3), 0), "num_slice must be at least 1"),
        ((np.zeros(3), 1, 1), "has no axis 1"),
        ((1.0, 1), "has no axis 0"),
    ],
)
def test_batches_that_cannot_be_cut(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        split_data(*arguments)


class Movable:
    """What a framework's tensor does."""

    def __init__(self, values, device="cpu"):
        self.values, self.device, self.shape = values, device, np.shape(values)

    def __getitem__(self, index):
        return Movable(np.asarray(self.values)[index], self.device)

    def to(self, device):
        return Movable(self.values, device)


def test_split_and_load():
    parts = split_and_load(Movable([1, 2, 3]), ["gpu:0", "gpu:1"], even_split=False)
    assert [(part.device, list(part.values)) for part in parts] == [("gpu:0", [1, 2]), ("gpu:1", [3])]
    parts = split_and_load(np.arange(4), ["cpu", "cpu"])
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3]]
    with pytest.raises(UnsupportedTypeError, match="ndarray cannot be moved to cuda:0; give a tensor"):
        split_and_load(np.arange(4), ["cuda:0", "cpu"])
