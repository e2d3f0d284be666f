"""A cluster of this host for docs/dask.md."""

from __future__ import annotations

from typing import Any

from distributed import LocalCluster

Names = dict[str, Any]


def given_dask() -> Names:
    options: Names = {"host": "127.0.0.1", "dashboard_address": None, "worker_dashboard_address": None}
    return {"cluster": LocalCluster(n_workers=2, threads_per_worker=1, memory_limit=0, **options), "loss": 0.5}


def check_dask(names: Names) -> None:
    assert names["losses"] == [0.5, 0.5]
    names["client"].close()
    names["cluster"].close()
