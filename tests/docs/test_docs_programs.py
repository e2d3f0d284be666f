"""The Python blocks of the documentation run: on two ranks of a real job, or in one process that starts it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reigen
from reigen.testing import RankPool
from tests.docs.blocks import blocks_of
from tests.docs.groups import DEADLINE_SECONDS, check_group


def groups_here() -> list[str]:
    """Groups of the environment whose tests these are."""
    if importlib.util.find_spec("mxnet"):
        return ["mxnet"]
    if importlib.util.find_spec("tensorflow"):
        return ["jax", "keras", "tensorflow"]  # those of engines: tests/engines/test_docs_engines.py
    if importlib.util.find_spec("lightning"):
        return ["integrations"]
    return ["torch", "servers", "elastic", "alone"]


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_SECONDS + 20)
@pytest.mark.parametrize("group", groups_here())
def test_blocks_run(group: str, tmp_path: Path) -> None:
    check_group(group, tmp_path)


@pytest.mark.skipif("torch" not in groups_here(), reason="run in the environment of PyTorch")
def test_the_test_in_contributing_passes(rank_pool: Callable[[int], RankPool]) -> None:
    [block] = blocks_of("CONTRIBUTING.md", "python")
    names: dict[str, Any] = {"reigen": reigen, "np": np, "__name__": "__main__"}  # what travels is pickled by value
    exec(compile(block.text, block.page, "exec"), names)  # noqa: S102
    names["test_average"](rank_pool)
