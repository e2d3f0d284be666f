"""ElasticSampler: each index once in an epoch, whoever comes and goes; and what it counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from reigen.torch.elastic import ElasticSampler, sampler  # noqa: E402


@pytest.fixture(scope="module")
def place() -> Any:
    """Sets the rank and the number of ranks of samplers that are made or reset."""
    patch = pytest.MonkeyPatch()

    def be(rank: int, size: int) -> None:
        patch.setattr(sampler, "rank", lambda: rank)
        patch.setattr(sampler, "size", lambda: size)

    be(0, 1)
    yield be
    patch.undo()


def test_the_order_is_that_of_the_seed_and_the_epoch(place: Any) -> None:
    place(1, 2)
    one = ElasticSampler(range(10), shuffle=False)
    assert list(one) == [1, 3, 5, 7, 9]
    assert len(one) == 5
    shuffled = ElasticSampler(range(10), seed=3)
    first = list(shuffled)
    assert first == list(ElasticSampler(range(10), seed=3)) != list(ElasticSampler(range(10), seed=4))
    shuffled.set_epoch(1)
    assert list(shuffled) == list(ElasticSampler(range(10), seed=4)) != first
    assert shuffled.get_indices(1, 2) == list(shuffled)[2:4]


def test_true_samples_are_counted(place: Any) -> None:
    place(0, 3)
    one = ElasticSampler(range(11), shuffle=False)
    assert len(one) == 4  # 12, with one again
    assert list(one) == [0, 3, 6, 9]
    one.record_batch(0, 3)
    assert one.processed_num == 9
    one.record_batch(1, 3)  # the last batch has one index on each rank, and none is left to one of them
    assert one.processed_num == 11
    assert one.state_dict() == {"epoch": 0, "processed_num": 11}
    one.reset()
    assert list(one) == [] == one.remaining_indices
    one.set_epoch(1)
    assert (one.processed_num, len(one)) == (0, 4)


def test_a_state_of_another_dataset_or_fewer_left_than_ranks(place: Any) -> None:
    place(2, 3)
    one = ElasticSampler(range(4), shuffle=False)
    one.load_state_dict({"epoch": 2, "processed_num": 3})
    assert list(one) == [3]  # of which each rank gets one
    one.load_state_dict({"epoch": 2, "processed_num": 9})
    assert (list(one), one.processed_num) == ([], 4)


@given(
    length=st.integers(0, 60),
    batch=st.integers(1, 5),
    stages=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=6),
)
def test_a_ledger_of_an_epoch(place: Any, length: int, batch: int, stages: list[tuple[int, int]]) -> None:
    """In each stage there are so many ranks, which process so many batches, before the members change."""
    ledger: Counter[int] = Counter()
    state = {"epoch": 4, "processed_num": 0}
    for size, count in [*stages, (2, 1000)]:
        ranks = []
        for rank in range(size):
            place(rank, size)
            ranks.append(ElasticSampler(range(length), seed=1))
            ranks[-1].load_state_dict(state)
        padding = ranks[0].total_size - len(ranks[0].remaining_indices)
        assert 0 <= padding < size
        for number in range(count):
            dealt = [one.get_indices(number, batch) for one in ranks]
            if not dealt[0]:
                break
            for one, indices in zip(ranks, dealt, strict=True):
                ledger.update(indices)
                one.record_batch(number, batch)
        assert len({str(one.state_dict()) for one in ranks}) == 1
        state = ranks[0].state_dict()
        if state["processed_num"] == length:
            if count and padding and size > 1:
                assert sum(ledger.values()) <= length + padding
            break
        assert sum(ledger.values()) == len(ledger) == state["processed_num"]  # none twice
    assert sorted(ledger) == list(range(length))
