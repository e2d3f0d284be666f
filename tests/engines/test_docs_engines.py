"""The Python blocks of the pages about engines run, on clusters of this host; those about Ray: tests/engines/ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.groups import DEADLINE_SECONDS, check_group
from tests.engines.spark.cluster import why_no_spark


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_SECONDS + 20)
def test_blocks_about_dask_run(tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    check_group("dask", tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_spark()), reason=why_no_spark())
@pytest.mark.timeout(DEADLINE_SECONDS + 20)
def test_blocks_about_spark_run(tmp_path: Path) -> None:
    check_group("spark", tmp_path)
