"""Directories that an estimator's driver and its training processes share: data, checkpoints and logs."""

from __future__ import annotations

import contextlib
import copy
import posixpath
import secrets
from collections.abc import Mapping
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from reigen.errors import ArgumentError

#: Beginnings of prefixes of file systems whose rename does not replace a file, and does not always say so.
_WITHOUT_REPLACEMENT = ("hdfs://", "webhdfs://", "swebhdfs://")


class Store:
    """Directories below a prefix, in a file system that all processes of a job reach: `Store.create` chooses the class.

    ``intermediate_train_data``, ``intermediate_val_data`` and ``intermediate_test_data`` have the rows as Parquet
    files, ``runs/<run_id>/checkpoint`` and ``runs/<run_id>/logs`` what training leaves. Spark writes the rows and the
    training processes read them, so both must know the prefix's file system: Spark by its Hadoop libraries, the
    processes by fsspec (``pip install s3fs``, ``gcsfs``, ``adlfs``).

    Args:
        prefix_path: a directory: ``/shared/dir``, ``hdfs://host:8020/dir``, ``s3a://bucket/dir``.
        train_path: of the rows for training, if they are not below the prefix.
        val_path: the same of those for validation.
        test_path: the same of those for tests.
        runs_path: of checkpoints and logs, if they are not below the prefix.
        save_runs: keep checkpoints and logs.
        storage_options: arguments for fsspec's file system, such as credentials. They travel to the training processes.
        checkpoint_filename: name of the checkpoint in a run's directory.

    Raises:
        ArgumentError: fsspec has no such file system.
    """

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        checkpoint_filename: str | None = None,
    ) -> None:
        self.prefix_path = self.get_full_path(prefix_path)
        self._train_path = self._choose_path(train_path, "intermediate_train_data")
        self._val_path = self._choose_path(val_path, "intermediate_val_data")
        self._test_path = self._choose_path(test_path, "intermediate_test_data")
        self._runs_path = self._choose_path(runs_path, "runs")
        self._save_runs = save_runs
        self._storage_options = dict(storage_options or {})
        self._checkpoint_filename = checkpoint_filename or "checkpoint"
        self._check_file_system()

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> Store:
        """Return a store for a prefix, of the class that its beginning says.

        ``hdfs://`` is an `HDFSStore`, ``dbfs:/`` and ``/dbfs/`` a `DBFSLocalStore`, a path without a scheme, or with
        ``file://``, a `LocalStore`, everything else a `FilesystemStore`. The other arguments are those of the class.
        """
        prefix = str(prefix_path)
        if HDFSStore.matches(prefix):
            return HDFSStore(prefix, *args, **kwargs)
        if DBFSLocalStore.matches(prefix):
            return DBFSLocalStore(prefix, *args, **kwargs)
        if LocalStore.matches(prefix):
            return LocalStore(prefix, *args, **kwargs)
        return FilesystemStore(prefix, *args, **kwargs)

    def get_full_path(self, path: str) -> str:
        """Return a path as Spark takes it, with its scheme."""
        return str(path).rstrip("/") or "/"

    def get_train_data_path(self, idx: int | str | None = None) -> str:
        """Return the directory of the rows for training."""
        return _with_index(self._train_path, idx)

    def get_val_data_path(self, idx: int | str | None = None) -> str:
        """Return the directory of the rows for validation."""
        return _with_index(self._val_path, idx)

    def get_test_data_path(self, idx: int | str | None = None) -> str:
        """Return the directory of the rows for tests."""
        return _with_index(self._test_path, idx)

    def saving_runs(self) -> bool:
        """Return whether checkpoints and logs are kept."""
        return self._save_runs

    def get_runs_path(self) -> str:
        """Return the directory of all runs."""
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        """Return the directory of a run.

        Raises:
            ArgumentError: the id cannot be the name of a directory.
        """
        if not run_id or "/" in run_id or run_id in {".", ".."}:
            raise ArgumentError(f"run_id must be the name of a directory, got {run_id!r}")
        return posixpath.join(self._runs_path, run_id)

    def get_checkpoint_path(self, run_id: str) -> str:
        """Return the path of a run's checkpoint."""
        return posixpath.join(self.get_run_path(run_id), self._checkpoint_filename)

    def get_checkpoint_filename(self) -> str:
        """Return the name of the checkpoint in a run's directory."""
        return self._checkpoint_filename

    def get_logs_path(self, run_id: str) -> str:
        """Return the directory of a run's logs."""
        return posixpath.join(self.get_run_path(run_id), self.get_logs_subdir())

    def get_logs_subdir(self) -> str:
        """Return the name of the directory of the logs in a run's directory."""
        return "logs"

    def exists(self, path: str) -> bool:
        """Return whether there is a file or directory."""
        return bool(self.fs.exists(self.local_path(path)))

    def read(self, path: str) -> bytes:
        """Return the content of a file.

        Raises:
            OSError: it cannot be read.
        """
        content: bytes = self.fs.cat_file(self.local_path(path))
        return content

    def write(self, path: str, content: bytes) -> None:
        """Replace a file as a whole: a reader, or a driver that dies, never leaves half of one.

        In HDFS there is none for a moment: a file there cannot be renamed to one that exists.

        Raises:
            OSError: it cannot be written.
        """
        target = self.local_path(path)
        self.fs.makedirs(posixpath.dirname(target), exist_ok=True)
        new = f"{target}.{secrets.token_hex(4)}.tmp"
        try:
            self.fs.pipe_file(new, content)
            if self.prefix_path.startswith(_WITHOUT_REPLACEMENT) and self.fs.exists(target):
                self.fs.rm_file(target)
            self.fs.mv(new, target)
        except BaseException:
            with contextlib.suppress(Exception):  # it may not be there
                self.fs.rm_file(new)
            raise

    def write_text(self, path: str, text: str) -> None:
        """Replace a file by a text in UTF-8; see `write`."""
        self.write(path, text.encode())

    def remove(self, path: str) -> None:
        """Remove a directory with all that is in it; it may be missing."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self.local_path(path), recursive=True)

    def is_parquet_dataset(self, path: str) -> bool:
        """Return whether a directory has Parquet files."""
        return bool(self.list_parquet_files(path))

    def list_parquet_files(self, path: str) -> list[str]:
        """Return the Parquet files in a directory and those below, in the order of their names, for `fs`."""
        self.fs.invalidate_cache()  # Spark has written there, and not this process
        found = self.fs.find(self.local_path(path)) if self.exists(path) else []
        base = self.local_path(path)
        return sorted(file for file in found if _is_data_file(posixpath.relpath(file, base)))

    @property
    def fs(self) -> Any:
        """Return fsspec's file system."""
        return fsspec.core.url_to_fs(self.prefix_path, **self._storage_options)[0]

    def local_path(self, path: str) -> str:
        """Return a path of this store as `fs` takes it, without its scheme."""
        return str(self.fs._strip_protocol(path))

    def without_options(self) -> Store:
        """Return the same store without ``storage_options``, which may have credentials."""
        same = copy.copy(self)
        same._storage_options = {}
        return same

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.prefix_path!r})"  # not storage_options, which have credentials

    def _choose_path(self, given: str | None, name: str) -> str:
        return posixpath.join(self.prefix_path, name) if given is None else self.get_full_path(given)

    def _check_file_system(self) -> None:
        try:
            _ = self.fs
        except (ImportError, ValueError) as error:
            raise ArgumentError(f"no file system for {self.prefix_path}: {error}") from error


class FilesystemStore(Store):
    """Store in a file system of fsspec's: S3, Google Cloud Storage, Azure, memory."""


class LocalDirectoryStore(FilesystemStore):
    """Store in a directory of this host, or in one that all hosts mount at the same place."""

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether a path has no scheme but ``file``."""
        return "://" not in path or path.startswith("file://")

    def get_full_path(self, path: str) -> str:
        """Return ``file://`` and the absolute path."""
        plain = LocalFileSystem._strip_protocol(str(path))
        return f"file://{plain}"


#: Horovod's name of it.
LocalStore = LocalDirectoryStore


class HDFSStore(FilesystemStore):
    """Store in HDFS. The training processes need Hadoop's client libraries: ``CLASSPATH`` and ``libhdfs``.

    Args:
        prefix_path: ``hdfs://host:8020/dir``; without a host, ``host`` or that of Hadoop's configuration.
        host: name node.
        port: its port.
        user: as whom to read and write.
        kerb_ticket: path of a cache of Kerberos tickets.
        extra_conf: Hadoop's settings.
        args: those of `Store`, after the prefix.
        kwargs: those of `Store`.
    """

    def __init__(
        self,
        prefix_path: str,
        *args: Any,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        extra_conf: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        self._authority = "" if host is None else host if port is None else f"{host}:{port}"
        options = {"user": user, "kerb_ticket": kerb_ticket, "extra_conf": extra_conf}
        given = {name: value for name, value in options.items() if value is not None}
        kwargs["storage_options"] = {**(kwargs.get("storage_options") or {}), **given}
        super().__init__(prefix_path, *args, **kwargs)

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether a path is one of HDFS."""
        return path.startswith("hdfs://")

    def get_full_path(self, path: str) -> str:
        """Return a path with ``hdfs://`` and the name node."""
        path = str(path).rstrip("/")
        if not self.matches(path):
            path = f"hdfs://{'' if path.startswith('/') else '/'}{path}"
        if path.startswith("hdfs:///") and self._authority:
            path = f"hdfs://{self._authority}{path.removeprefix('hdfs://')}"
        return path

    def _check_file_system(self) -> None:
        """Leave it to the first use: connecting needs Hadoop's libraries, which a driver may not have."""


class DBFSLocalStore(LocalDirectoryStore):
    """Store in the file system of Databricks, which Python sees below ``/dbfs`` and Spark as ``dbfs:/``."""

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether a path is one of that file system."""
        return path.startswith(("dbfs:/", "/dbfs/", "file:///dbfs/"))

    def get_full_path(self, path: str) -> str:
        """Return ``dbfs:/`` and the path in it."""
        path = str(path).removeprefix("file://").removeprefix("dbfs://").removeprefix("dbfs:")
        return "dbfs:/" + path.removeprefix("/dbfs/").strip("/")

    @property
    def fs(self) -> Any:
        """Return fsspec's file system of this host."""
        return fsspec.filesystem("file", **self._storage_options)

    def local_path(self, path: str) -> str:
        """Return a path below ``/dbfs``."""
        return "/dbfs/" + path.removeprefix("dbfs:/") if path.startswith("dbfs:/") else path


def _with_index(path: str, idx: int | str | None) -> str:
    return path if idx is None else f"{path}.{idx}"


def _is_data_file(name: str) -> bool:
    """Return True for Parquet files but those that Spark takes as hidden, or is still writing."""
    hidden = any(part.startswith(("_", ".")) for part in name.split("/"))
    return name.endswith((".parquet", ".parq")) and not hidden
