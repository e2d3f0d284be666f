"""Words of a server about its keys."""

from __future__ import annotations

import pytest

from reigen.kv.server.store import describe_keys


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], "0 keys"),
        (["w"], "1 key: 'w'"),
        ([3, 1, "b", "a"], "4 keys: 1, 3, 'a', 'b'"),
        (["e", "d", "c", "b", "a"], "5 keys: 'a', 'b', 'c' and 2 others"),
    ],
)
def test_keys_are_described_by_their_number_and_a_few_names(names: list[int | str], text: str) -> None:
    assert describe_keys(names) == text


def test_a_long_name_is_cut() -> None:
    assert len(describe_keys(["x" * 1000])) < 100
