"""Paths of stores, and their files."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from reigen.spark.store import DBFSLocalStore, FilesystemStore, HDFSStore, LocalStore, Store
from tests.engines.spark.webhdfs import serve_webhdfs


@pytest.mark.parametrize(
    ("prefix", "kind", "full"),
    [
        ("/shared/dir/", LocalStore, "file:///shared/dir"),
        ("file:///shared/dir", LocalStore, "file:///shared/dir"),
        ("memory://bucket/dir", FilesystemStore, "memory://bucket/dir"),
        ("hdfs://name:8020/dir", HDFSStore, "hdfs://name:8020/dir"),
        ("hdfs:///dir", HDFSStore, "hdfs:///dir"),
        ("dbfs:/dir", DBFSLocalStore, "dbfs:/dir"),
        ("/dbfs/dir", DBFSLocalStore, "dbfs:/dir"),
        ("dbfs:///dir", DBFSLocalStore, "dbfs:/dir"),
    ],
)
def test_the_beginning_of_the_prefix_chooses_the_class(prefix: str, kind: type, full: str) -> None:
    store = Store.create(prefix)
    assert type(store) is kind
    assert store.prefix_path == full
    assert store.get_train_data_path() == f"{full}/intermediate_train_data"
    assert store.get_val_data_path(3) == f"{full}/intermediate_val_data.3"
    assert store.get_test_data_path("a") == f"{full}/intermediate_test_data.a"
    assert store.get_run_path("one") == f"{full}/runs/one"
    assert store.get_checkpoint_path("one") == f"{full}/runs/one/checkpoint"
    assert store.get_logs_path("one") == f"{full}/runs/one/logs"
    assert store.saving_runs()
    assert pickle.loads(pickle.dumps(store)).get_runs_path() == store.get_runs_path()


def test_paths_can_be_given() -> None:
    store = Store.create(
        "/a",
        train_path="/t",
        val_path="/v",
        test_path="/s",
        runs_path="/r",
        save_runs=False,
        checkpoint_filename="c.pt",
    )
    assert store.get_train_data_path() == "file:///t"
    assert store.get_val_data_path(1) == "file:///v.1"
    assert store.get_test_data_path() == "file:///s"
    assert store.get_checkpoint_path("x") == "file:///r/x/c.pt"
    assert not store.saving_runs()


def test_a_name_node_is_put_into_paths_without_one() -> None:
    store = HDFSStore("/dir", host="name", port=8020, user="me")
    assert store.prefix_path == "hdfs://name:8020/dir"
    assert HDFSStore("dir").prefix_path == "hdfs:///dir"
    assert HDFSStore("hdfs://other/dir", host="name").prefix_path == "hdfs://other/dir"


def test_databricks_files_are_below_dbfs_for_python() -> None:
    assert Store.create("dbfs:/dir").local_path("dbfs:/dir/runs") == "/dbfs/dir/runs"


@pytest.mark.parametrize("scheme", ["", "memory://reigen-test-store", "webhdfs"])
def test_files_are_written_as_a_whole(tmp_path: Path, scheme: str) -> None:
    if scheme == "webhdfs":  # whose rename replaces nothing
        pytest.importorskip("requests", reason="fsspec needs requests for WebHDFS")
        with serve_webhdfs(tmp_path) as (url, _):
            check_files(Store.create(f"{url}/store"))
        return
    check_files(Store.create(f"{scheme}{tmp_path}"))


def check_files(store: Store) -> None:
    path = store.get_checkpoint_path("one")
    assert not store.exists(path)
    store.write(path, b"first")
    store.write(path, b"second")
    store.write_text(store.get_logs_path("one") + "/history.json", "{}")
    assert store.read(path) == b"second"
    found = [str(file).rsplit("/", 1)[-1] for file in store.fs.find(store.local_path(store.get_runs_path()))]
    assert sorted(found) == ["checkpoint", "history.json"]
    store.remove(store.get_runs_path())
    store.remove(store.get_runs_path())
    assert not store.exists(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    store.write(f"{store.prefix_path}/file", b"old")
    with pytest.raises(TypeError):
        store.write(f"{store.prefix_path}/file", "no bytes")  # type: ignore[arg-type]
    assert store.read(f"{store.prefix_path}/file") == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_only_parquet_files_of_a_finished_job_count(tmp_path: Path) -> None:
    store = Store.create(str(tmp_path))
    for name in (
        "b.snappy.parquet",
        "a.parquet",
        "_SUCCESS",
        ".b.parquet.crc",
        "_temporary/0/c.parquet",
        "d/e.parquet",
    ):
        store.write(f"{store.prefix_path}/data/{name}", b"x")
    found = store.list_parquet_files(f"{store.prefix_path}/data")
    assert [file.removeprefix(f"{tmp_path}/data/") for file in found] == [
        "a.parquet",
        "b.snappy.parquet",
        "d/e.parquet",
    ]
    assert not store.is_parquet_dataset(f"{store.prefix_path}/nothing")


@pytest.mark.parametrize("run_id", ["", "..", "a/b"])
def test_a_run_id_is_the_name_of_a_directory(run_id: str) -> None:
    with pytest.raises(ValueError, match="run_id must be the name of a directory"):
        Store.create("/a").get_run_path(run_id)


def test_an_unknown_file_system_is_named() -> None:
    with pytest.raises(ValueError, match="no file system for nothing://bucket"):
        Store.create("nothing://bucket/dir")


def test_credentials_are_not_shown() -> None:
    store = Store.create("memory://bucket/dir", storage_options={"token": "geheim"})
    assert "geheim" not in repr(store)
