"""Creation of keys on servers: all workers declare them, rank 0 places their shards and sends their values.

The steps stand in `reigen.kv.protocol` (c); those of a worker that takes another's place in (h).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence

from reigen.api.adapter import Array
from reigen.config import Config
from reigen.errors import ArgumentError
from reigen.kv.client.key_table import KeyState, RequestFactory
from reigen.kv.client.requests import ClientRequest, KVOperation
from reigen.kv.client.sharding import ShardPlacer, choose_slice_bytes, home_server
from reigen.kv.client.worker import KVWorker
from reigen.kv.protocol import (
    COUNT_UNKNOWN,
    DECLARE_CODEC,
    DECLARED_CODEC,
    DeclareKey,
    KeyDeclared,
    KeySpec,
    MessageFlag,
    MessageHeader,
    MessageKind,
    ShardRange,
    pack_counts,
    unpack_counts,
)
from reigen.kv.values import ROW_SPARSE

_log = logging.getLogger(__name__)


class KeyInitializer:
    """Declares the keys of one store.

    Attributes:
        is_whole: keys that are placed from now on are not cut.
    """

    def __init__(self, worker: KVWorker, factory: RequestFactory, config: Config) -> None:
        self._worker = worker
        self._factory = factory
        self._is_elastic = worker.member.is_elastic
        self._is_first = worker.member.number == 0 and not self._is_elastic
        num_processes = worker.member.num_workers + worker.num_servers
        slice_bytes, reason = choose_slice_bytes(
            config.kv_slice_bytes, worker.server_hosts, num_processes, os.cpu_count() or 1
        )
        if self._is_first:
            _log.info("keys are cut into shards of at most %d bytes (%s)", slice_bytes, reason)
        self._placer = ShardPlacer(worker.num_servers, config.kv_bigarray_bound, slice_bytes)
        self.is_whole = False

    def declare(
        self, entries: Sequence[KeyState], values: Mapping[int, Array], keep: Callable[[], None] = lambda: None
    ) -> None:
        """Create keys, or take part in what others have created. Returns when they can be used.

        Args:
            entries: where the shards are noted.
            values: (rank 0, in an elastic job all) by key id, the first values, flat.
            keep: called when the keys are there; from then on servers hear of them after a reconnection.

        Raises:
            MismatchError: the workers do not mean the same by a key.
            DeadlineError: not all workers came; names them.
        """
        incarnations = self._worker.server_incarnations
        places = self._is_first or self._is_elastic
        placed = {entry.id: self._place(entry) for entry in entries} if places else {}
        answers = self._at_home(entries, placed)
        for entry, answer in zip(entries, answers, strict=True):
            entry.set_placement(answer.places)
            entry.first_workers = answer.workers
            if places:
                self._placer.adopt(entry.id, answer.places, entry.spec.dtype.itemsize)
        new = [entry for entry, answer in zip(entries, answers, strict=True) if not answer.was_initialised]
        if self._is_elastic:
            first = [entry for entry, answer in zip(entries, answers, strict=True) if answer.is_first]
            self._initialise(first, values, incarnations)
            keep()
            self._join(entries)
            return
        if self._is_first and new:
            self._initialise(new, values, incarnations)
        keep()
        # a server that was restarted waits until each worker has said how far it is with each key
        is_same = incarnations == self._worker.server_incarnations
        self._recover([entry for entry in entries if entry not in new or not is_same])

    def _initialise(self, new: Sequence[KeyState], values: Mapping[int, Array], incarnations: Sequence[int]) -> None:
        """Have all servers hold their shards of new keys, and their home servers know that they do.

        What a server has agreed to is in no snapshot before it has the value: one that was started again in between may
        have forgotten it. Workers that wait there say it once more by themselves; worker 0, which had its answer, says
        everything again until no server has been another process on the way. What is there already stays.

        ``incarnations`` are those of the servers before they first heard of the keys.
        """
        while new:
            try:
                self._elsewhere(new)
                self._fill(new, values)
                self._at_home(new, {entry.id: entry.places for entry in new}, is_initialised=True)
            except ArgumentError:
                if incarnations == self._worker.server_incarnations:
                    raise
            if incarnations == self._worker.server_incarnations:
                return
            incarnations = self._worker.server_incarnations
            answers = self._at_home(new, {entry.id: entry.places for entry in new})
            for entry, answer in zip(new, answers, strict=True) if self._is_elastic else ():
                entry.set_placement(answer.places)  # of another worker, if that is to send the values now
                entry.first_workers = answer.workers
            new = [entry for entry, answer in zip(new, answers, strict=True) if not answer.was_initialised]

    def _place(self, entry: KeyState) -> tuple[ShardRange, ...]:
        spec = entry.spec
        row_length = spec.row_length if spec.stype == ROW_SPARSE else 1
        return self._placer.place(entry.id, spec.num_elements, spec.dtype.itemsize, row_length, self.is_whole)

    def _at_home(
        self, entries: Sequence[KeyState], placed: Mapping[int, tuple[ShardRange, ...]], *, is_initialised: bool = False
    ) -> list[KeyDeclared]:
        """Declare keys at their home servers; return the answers."""
        operation, requests = self._operation(entries), []
        for entry in entries:
            body = _encode_declaration(entry, placed.get(entry.id), is_initialised)
            header = MessageHeader(MessageKind.DECLARE, key=entry.id, flags=int(MessageFlag.HOME))
            requests.append(ClientRequest(header, self._home(entry), operation, body))
        self._worker.ask(requests)
        return [DECLARED_CODEC.decode(bytes(each.answer or b"")) for each in requests]

    def _elsewhere(self, entries: Sequence[KeyState]) -> None:
        """Declare keys at the other servers that hold shards."""
        operation, requests = self._operation(entries), []
        for entry in entries:
            body = _encode_declaration(entry, entry.places)
            for server in sorted({place.server for place in entry.places} - {self._home(entry)}):
                header = MessageHeader(MessageKind.DECLARE, key=entry.id)
                requests.append(ClientRequest(header, server, operation, body))
        self._worker.ask(requests)

    def _home(self, entry: KeyState) -> int:
        return home_server(entry.id, self._worker.num_servers)

    def _operation(self, entries: Sequence[KeyState]) -> KVOperation:
        return KVOperation(self._worker.wait_for, "init", keys=[entry.name for entry in entries])

    def _fill(self, entries: Sequence[KeyState], values: Mapping[int, Array]) -> None:
        operation = self._operation(entries)
        for entry in entries:
            for place in entry.places:
                part = values[entry.id][place.begin : place.end]
                self._worker.submit([self._factory.put(MessageKind.INIT, operation, entry, place, part)])
        operation.wait()

    def _recover(self, entries: Sequence[KeyState]) -> None:
        """Go on where this worker, or the one whose place it takes, had come to."""
        self._ask_rounds(entries)
        for entry in entries:
            entry.round = min(entry.done, default=0)

    def rejoin(self, entries: Sequence[KeyState]) -> None:
        """Take part in rounds again that have not begun: of keys that this worker had joined before it left."""
        self._join(entries)

    def _join(self, entries: Sequence[KeyState]) -> None:
        """Take part in rounds that have not begun, in the same ones of all shards of a key."""
        self._ask_rounds(entries)
        for entry in entries:
            entry.round = max(entry.done, default=0)
        if others := [entry for entry in entries if min(entry.done, default=0) != entry.round]:
            self._ask_rounds(others, {entry.id: entry.round for entry in others})

    def _ask_rounds(self, entries: Sequence[KeyState], rounds: Mapping[int, int] | None = None) -> None:
        """Ask how many rounds of each shard are over for this worker; in an elastic job, at least those ``rounds``."""
        by_server: dict[int, list[tuple[int, int, int]]] = {}
        for entry in entries:
            count = COUNT_UNKNOWN if rounds is None else rounds[entry.id]
            for place in entry.places:
                by_server.setdefault(place.server, []).append((entry.id, place.index, count))
        what = "asking how far this worker had come"
        requests = self._worker.ask_servers(
            MessageKind.RESUME, what, lambda server: pack_counts(by_server[server]), by_server
        )
        known = {entry.id: entry for entry in entries}
        for request in requests:
            for key, shard, count in unpack_counts(request.answer or b""):
                if key in known and shard < len(known[key].done):
                    known[key].done[shard] = count


def _encode_declaration(entry: KeyState, places: tuple[ShardRange, ...] | None, is_initialised: bool = False) -> bytes:
    spec = KeySpec(entry.name, entry.spec.shape, entry.spec.dtype.name, entry.spec.stype, entry.generation)
    return DECLARE_CODEC.encode(DeclareKey(spec, places, is_initialised, entry.first_workers))
