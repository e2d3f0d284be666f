"""Copies of servers in the memory of others: which server is the backup, and when a copy can be taken up."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from typing import Any

import pytest

from reigen.cluster.membership.messages import ServerInfo
from reigen.cluster.membership.rendezvous import split_address
from reigen.errors import PeerLostError, WireError
from reigen.kv.connection import KVConnection
from reigen.kv.protocol import MessageHeader, MessageKind
from reigen.kv.server.replicas import (
    COPIES_PURPOSE,
    CopyHolder,
    CopyItem,
    CopyProgress,
    ServerCopies,
    check_owner,
    choose_backup,
)
from reigen.kv.server.snapshots import StoreSnapshot
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import Connection, ConnectionOptions, open_connection
from reigen.net.event_loop import Callback, EventLoop, wait_ready
from reigen.net.listener import Listener, open_listening_socket

W, V, FACTS = (0, (7, 0)), (0, (8, 0)), (0, None)


@pytest.mark.parametrize(
    ("hosts", "backups"),
    [
        ("aa", [1, 0]),
        ("aaa", [1, 2, 0]),
        ("aabb", [2, 2, 0, 0]),
        ("abab", [1, 2, 3, 0]),
        ("aab", [2, 2, 0]),
    ],
)
def test_the_backup_is_the_next_server_on_another_host_if_there_is_one(hosts: str, backups: list[int]) -> None:
    assert [choose_backup(server, hosts) for server in range(len(hosts))] == backups


def test_the_first_copy_is_complete_from_the_beginning() -> None:
    progress = CopyProgress()
    assert progress.connect(5)
    assert progress.becomes_complete()
    assert progress.is_stale(W)
    progress.add(W)
    assert not progress.is_stale(W)
    assert not progress.becomes_complete(), "that is said once"
    assert not progress.connect(5), "another connection changes nothing"


def test_a_backup_that_is_another_process_has_to_get_everything() -> None:
    progress = CopyProgress()
    progress.connect(5)
    progress.becomes_complete()
    progress.add(W)
    progress.add(FACTS)
    progress.expect(6, [W, FACTS])
    assert progress.is_stale(W)
    assert progress.connect(6)
    progress.add(FACTS)
    assert not progress.becomes_complete()
    progress.add(V)
    progress.add(W)
    assert progress.becomes_complete()


def test_what_was_copied_before_it_is_known_how_much_there_is_counts() -> None:
    progress = CopyProgress()
    progress.connect(5)
    progress.add(W)
    assert progress.connect(6)
    progress.add(W)
    assert progress.is_stale(W), "it is copied once more: nobody knows yet what else is missing"
    assert not progress.becomes_complete()
    progress.expect(6, [W])
    assert not progress.is_stale(W)
    assert progress.becomes_complete()


def test_a_shard_that_is_gone_is_not_waited_for() -> None:
    progress = CopyProgress()
    progress.connect(5)
    progress.expect(6, [W, V])
    progress.connect(6)
    progress.add(W)
    progress.drop(V)
    assert progress.becomes_complete()


def test_a_server_that_was_restored_goes_on_with_the_copy() -> None:
    progress = CopyProgress()
    progress.adopt(5, [W])
    assert not progress.connect(5)
    assert not progress.is_stale(W)
    assert not progress.becomes_complete(), "it is"


def test_a_complete_copy_has_everything_whatever_happens() -> None:
    """Random schedules beside a model: a process of the backup that was told that its copy is complete has all."""
    for seed in range(300):
        rng, progress, items = random.Random(seed), CopyProgress(), set[CopyItem]()
        processes: dict[int, set[CopyItem]] = {1: set()}
        newest, complete, connected = 1, set[int](), 0
        for _ in range(60):
            action = rng.random()
            if action < 0.1:  # another process of the backup; news of it come later
                newest += 1
                processes[newest] = set()
            elif action < 0.3:
                if progress.incarnation != newest and progress.has_nothing(newest):
                    complete.add(newest)
                if progress.connect(newest):
                    processes[newest].clear()
                connected = newest
            elif action < 0.4 and newest > 1:
                progress.expect(newest, items)
            elif action < 0.5 and items:
                gone = rng.choice(sorted(items, key=str))
                items.discard(gone)
                progress.drop(gone)
            elif connected == newest:  # a new item is acknowledged when it has been copied; others are copied again
                item = (0, (rng.randrange(6), 0))
                processes[connected].add(item)
                progress.add(item)
                items.add(item)
                if progress.becomes_complete():
                    complete.add(connected)
            if newest in complete:
                assert items <= processes[newest], seed


# ---- a backup in a thread, and servers that have it

SECRET, SECONDS, FACTS_OF_A_STORE = b"s" * 32, 20.0, StoreSnapshot(0, {}, [], (), (), {})


class Backup:
    """Process of server 1, which is the backup of server 0."""

    def __init__(self, incarnation: int, *, num_broken: int = 0) -> None:
        self._num_broken = num_broken
        self.confirmed: list[Connection] = []
        listening, address = open_listening_socket("127.0.0.1")
        self.info = ServerInfo(1, address, incarnation, "here")
        self.loop, self._is_over = EventLoop(), False
        me = Identity(ProcessRole.RANK, 1, "kv")
        self._listener = Listener(self.loop, listening, ConnectionOptions(SECRET, me, 1 << 12), self._accept)
        self.holder = CopyHolder(self.loop, self._confirm, is_restarted=incarnation > 1)
        self._thread = threading.Thread(target=self._run, name="backup")
        self._thread.start()

    def _accept(self, connection: Connection) -> Callback | None:
        if self._num_broken:
            self._num_broken -= 1
            connection.close()
            return None
        return self.holder.accept(connection)

    def _confirm(self, connection: Connection) -> None:
        self.confirmed.append(connection)
        self._listener.confirm(connection)

    def _run(self) -> None:
        while not self._is_over:
            self.loop.wait(1.0)

    def close(self) -> None:
        self._is_over = True
        self.loop.wake()
        self._thread.join()
        self.holder.close()
        self._listener.close()
        self.loop.close()


class Member:
    """Place of server 0 in a job of two."""

    number, num_servers, secret, tls = 0, 2, SECRET, None

    def __init__(self, incarnation: int, backup: Backup) -> None:
        self.incarnation, self.backup = incarnation, backup

    def servers(self, deadline: float) -> list[ServerInfo]:
        return [ServerInfo(0, "", self.incarnation, "here"), self.backup.info]


def copies_of(member: Any) -> AbstractContextManager[ServerCopies]:
    return closing(ServerCopies(member, 10.0))


@pytest.fixture
def backup() -> Iterator[Backup]:
    with closing(Backup(1)) as one:
        yield one


def in_a_thread(call: Callable[[], None]) -> tuple[threading.Thread, queue.SimpleQueue[BaseException | None]]:
    """The thread, and where its outcome will be."""
    outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def perform() -> None:
        try:
            call()
        except OSError as error:
            outcome.put(error)
        else:
            outcome.put(None)

    thread = threading.Thread(target=perform)
    thread.start()
    return thread, outcome


def test_a_copy_is_begun_until_the_backup_has_answered() -> None:
    with closing(Backup(1, num_broken=2)) as backup, copies_of(Member(5, backup)) as copies:
        copies.save_store(0, FACTS_OF_A_STORE)
        assert list(backup.holder.held[0].snapshots) == [FACTS]


def test_a_process_that_was_replaced_does_not_change_the_copy_of_its_successor(backup: Backup) -> None:
    with copies_of(Member(5, backup)) as old, copies_of(Member(6, backup)) as new:
        old.save_store(0, FACTS_OF_A_STORE)
        new.fetch()
        assert [number for number, _, _ in new.load()] == [0]
        thread, outcome = in_a_thread(lambda: old.save_store(1, FACTS_OF_A_STORE))
        new.save_store(2, FACTS_OF_A_STORE)
        with pytest.raises(queue.Empty):
            outcome.get(timeout=0.5)
        old.give_up()
        assert isinstance(outcome.get(timeout=SECONDS), ConnectionAbortedError)
        thread.join()
        assert set(backup.holder.held[0].snapshots) == {FACTS, (2, None)}


def test_who_was_replaced_or_uses_an_earlier_connection_is_not_heard() -> None:
    loop = EventLoop()
    holder = CopyHolder(loop, lambda connection: None, is_restarted=False)
    for kind, incarnation, line in [("BEGIN_COPY", 5, 1), ("COPY_STORE", 5, 2), ("FETCH_COPY", 6, 1)]:
        holder.check(0, MessageHeader(MessageKind[kind], request=incarnation, round=line))
    holder.check(2, MessageHeader(MessageKind.BEGIN_COPY, request=7, round=1))
    for kind, incarnation, line in [("COPY_STORE", 5, 3), ("FETCH_COPY", 5, 4), ("COPY_STORE", 6, 0)]:
        with pytest.raises(WireError):
            holder.check(0, MessageHeader(MessageKind[kind], request=incarnation, round=line))
    loop.close()


def test_an_answer_is_not_waited_for_when_the_backup_is_another_process() -> None:
    with closing(Backup(1)) as first, closing(Backup(2)) as second, copies_of(member := Member(5, first)) as copies:
        copies.save_store(0, FACTS_OF_A_STORE)
        stands, release = threading.Event(), threading.Event()
        first.loop.call_at(0.0, lambda: (stands.set(), release.wait()))
        first.loop.wake()
        assert stands.wait(SECONDS)
        thread, outcome = in_a_thread(lambda: copies.save_store(0, FACTS_OF_A_STORE))
        try:
            with pytest.raises(queue.Empty):
                outcome.get(timeout=0.2)
            member.backup = second
            assert outcome.get(timeout=SECONDS) is None
            assert list(second.holder.held[0].snapshots) == [FACTS]
        finally:
            copies.give_up()
            release.set()
            thread.join()


def test_nothing_is_lost_with_a_backup_that_had_nothing(backup: Backup) -> None:
    with closing(Backup(2)) as second:
        with copies_of(Member(5, second)) as copies:
            copies.copy_anew(2, [])
            copies.announce(2)
        with copies_of(Member(6, second)) as copies:
            copies.fetch()
            assert list(copies.load()) == []
        with copies_of(Member(7, backup)) as copies:
            copies.save_store(0, FACTS_OF_A_STORE)
    with closing(Backup(3)) as third, copies_of(Member(8, third)) as copies, pytest.raises(PeerLostError):
        copies.fetch()


def test_only_other_servers_are_copied() -> None:
    check_owner(Identity(ProcessRole.RANK, 0), 1, 2)
    for role, rank in [("AGENT", 0), ("RANK", 1), ("RANK", 2), ("LAUNCHER", 0)]:
        with pytest.raises(WireError, match=f"{role.lower()} {rank} wants to be copied"):
            check_owner(Identity(ProcessRole[role], rank), 1, 2)


@pytest.mark.parametrize("kind", ["COMPLETE_COPY", "BEGIN_COPY", "PUSH", "COPY_SHARD"])
def test_a_message_that_makes_no_sense_ends_its_connection_alone(
    backup: Backup, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with copies_of(Member(5, backup)) as copies:
        copies.save_store(0, FACTS_OF_A_STORE)
        me = Identity(ProcessRole.RANK, 0, COPIES_PURPOSE)
        address, until = split_address(backup.info.address), time.monotonic() + SECONDS
        stream, session = open_connection(address, SECRET, me, 1 << 12, until).detach()
        num_confirmed = len(backup.confirmed)
        with closing(KVConnection(stream, session, None, "the backup")) as line:  # type: ignore[arg-type]
            assert not wait_ready(line, 0.2)
            assert len(backup.confirmed) == num_confirmed, "it has said nothing"
            if kind == "COPY_SHARD":
                monkeypatch.setattr(backup.holder, "change", lambda *arguments: 1 / 0)
            line.send(MessageHeader(MessageKind[kind], request=5, round=9, body_bytes=8), bytes(8))
            line.advance_sends()
            assert wait_ready(line, SECONDS)
            with pytest.raises(ConnectionError):
                line.receive()
        monkeypatch.undo()
        assert list(backup.holder.held[0].snapshots) == [FACTS]
