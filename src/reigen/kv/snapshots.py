"""What a server keeps on disk so that another process can take its place: one file for each cell, one for each store.

``DIRECTORY/JOB/server-NUMBER/``, where JOB is a hash of the job's secret, so that no job finds the snapshots of
another. Files are those of `reigen.optim.files` and are replaced as a whole. Cells are saved at different times:
each is as it was after some round, which its file says.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from numpy.typing import NDArray

from reigen.errors import ConfigError, WireError
from reigen.kv.cells import CellId, CellSnapshot, KeyFacts
from reigen.kv.protocol import Place
from reigen.optim import packed, unpacked, write_atomically
from reigen.optim.files import Buffer

_CELL = re.compile(r"store-(\d+)-([0-9a-f]{16})-(\d+)\.cell")
_STORE = re.compile(r"store-(\d+)\.store")


class StoreSnapshot(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """What a snapshot says of a store beside its cells.

    Attributes:
        staleness: None is infinite.
        settings: of `reigen.kv.settings.Settings.state`.
        keys: that have their home here: id, facts, places.
        left: workers that have left.
        missed: workers that were lost, and the others go on without.
        incarnations: of all workers' processes that have been here.
    """

    staleness: int | None
    settings: dict[str, Any]
    keys: list[tuple[int, KeyFacts, tuple[Place, ...]]]
    left: tuple[int, ...]
    missed: tuple[int, ...]
    incarnations: dict[int, int]


class Snapshots:
    """The files of one server. Different cells may be saved by different threads.

    Args:
        directory: of all jobs (REIGEN_KV_SNAPSHOT_DIR).
        secret: the job's.
        number: the server's.

    Raises:
        ConfigError: the directory cannot be made.
    """

    def __init__(self, directory: str, secret: bytes, number: int) -> None:
        job = hashlib.blake2b(b"snapshots of a parameter server\0" + secret, digest_size=8).hexdigest()
        self.directory = Path(directory) / f"job-{job}" / f"server-{number}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"snapshots cannot be kept in {directory}: {error.strerror}") from None

    def clear(self) -> None:
        """Remove all of them."""
        for path in self.directory.iterdir():
            path.unlink()

    def remove(self) -> None:
        """Remove all of them and the directory; the job's, too, if this was its last server here."""
        self.clear()
        self.remove_if_empty()

    def remove_if_empty(self) -> bool:
        """Remove the directory, and the job's, if nothing was kept there; returns whether this server's is gone."""
        with contextlib.suppress(OSError):  # the user has put something there, or other servers are not through yet
            self.directory.rmdir()
            self.directory.parent.rmdir()
        return not self.directory.exists()

    def save_store(self, store: int, facts: StoreSnapshot) -> None:
        """Replace what is kept of a store.

        Raises:
            OSError: it cannot be written.
        """
        write_atomically(self.directory / f"store-{store}.store", packed(facts, {}), mode=0o600)

    def save_cell(self, store: int, cell: CellId, contents: list[Buffer]) -> None:
        """Replace what is kept of a cell.

        Raises:
            OSError: it cannot be written.
        """
        write_atomically(self._cell(store, cell), contents, mode=0o600)

    def forget_cell(self, store: int, cell: CellId) -> None:
        """A cell is not there any more."""
        with contextlib.suppress(FileNotFoundError):
            self._cell(store, cell).unlink()

    def stores(self) -> Iterator[tuple[int, StoreSnapshot]]:
        """The stores that were saved.

        Raises:
            WireError: a file is damaged; names it.
        """
        for path in sorted(self.directory.iterdir()):
            if match := _STORE.fullmatch(path.name):
                yield int(match[1]), _read(path, StoreSnapshot)[0]

    def cells(self, store: int) -> Iterator[tuple[CellSnapshot, dict[str, NDArray[Any]]]]:
        """The cells of a store that were saved, with their arrays.

        Raises:
            WireError: a file is damaged; names it.
        """
        for path in sorted(self.directory.iterdir()):
            match = _CELL.fullmatch(path.name)
            if match and int(match[1]) == store:
                yield _read(path, CellSnapshot)

    def _cell(self, store: int, cell: CellId) -> Path:
        return self.directory / f"store-{store}-{cell[0]:016x}-{cell[1]}.cell"


def _read(path: Path, facts: Any) -> tuple[Any, dict[str, NDArray[Any]]]:
    try:
        return unpacked(path.read_bytes(), facts)
    except ConfigError as error:
        raise WireError(f"{path}: {error}") from None
