"""The Python blocks of the pages about engines run, on clusters of this host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.groups import DEADLINE_SECONDS, check_group


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_SECONDS + 20)
def test_blocks_about_dask_run(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    check_group("dask", tmp_path)
