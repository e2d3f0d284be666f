"""Jobs with servers and workers in threads of the test, and a scheduler that is the test."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from reigen.cluster.membership.messages import JobEnded, MemberLost, MemberReturned, MembershipEvent, ServerInfo
from reigen.config import Config
from reigen.errors import DeadlineError
from reigen.kv.client.dist_store import DistStore
from reigen.kv.counters import StoreCounters
from reigen.kv.membership.scheduler_client import EventFeed
from reigen.kv.server.server import KVServer
from reigen.net.listener import open_listening_socket

SECRET = b"s" * 32
SECONDS = 40.0


class Member:
    """A place in a job whose scheduler is the test."""

    tls = None
    host = "here"
    secret = SECRET
    is_recovery = is_elastic = servers_move = False

    def __init__(self, job: Job, role: Any, number: int, incarnation: int = 1) -> None:
        self._job, self.job = job, 1
        self.role, self.number, self.incarnation = role, number, incarnation
        self.num_workers, self.num_servers = job.num_workers, job.num_servers
        self._lock = threading.Lock()
        self._feed = EventFeed(self._lock)
        self.counters = StoreCounters()
        self.keys = ""

    def tell(self, event: MembershipEvent) -> None:
        with self._lock:
            if self._feed.fileno() >= 0:
                self._feed.put([event])

    def feed(self) -> EventFeed:
        return self._feed

    def servers(self, deadline: float) -> Sequence[ServerInfo]:
        return list(self._job.peers)

    def place(self) -> tuple[int, int]:
        return self.number, self.num_workers

    def barrier(self, name: str, deadline: float) -> None:
        try:
            self._job.barrier.wait(deadline - time.monotonic())
        except threading.BrokenBarrierError:
            raise DeadlineError(f"barrier {name}") from None

    def num_dead_nodes(self, timeout: float) -> int:
        return 0

    def leave(self) -> None:
        pass

    def move(self) -> None:
        pass

    def report_keys(self, text: str) -> None:
        self.keys = text

    def close(self) -> None:
        self._feed.close()


class Job:
    """Servers in threads. ``run`` has workers do something, each in a thread and with a store of its own."""

    def __init__(self, num_workers: int = 2, num_servers: int = 1, **knobs: Any) -> None:
        self.num_workers, self.num_servers = num_workers, num_servers
        self.config = Config(**{"deadline_seconds": SECONDS, **knobs})
        self.barrier = threading.Barrier(num_workers)
        self.peers: list[ServerInfo] = []
        self._places: dict[int, tuple[Member, threading.Thread]] = {}
        self.members: list[Member] = []
        self.servers: dict[int, KVServer] = {}
        for number in range(num_servers):
            self.peers.append(self.start_server(number))

    def start_server(self, number: int, incarnation: int = 1, handover: str = "") -> ServerInfo:
        member = Member(self, "server", number, incarnation)
        member.is_recovery = incarnation > 1
        listener, address = open_listening_socket("127.0.0.1")
        server = self.servers[number] = KVServer(member, self.config, listener, handover)
        thread = threading.Thread(target=server.serve, name=f"server-{number}")
        thread.start()
        self._places[number] = member, thread
        return ServerInfo(number, address, incarnation, "here")

    def stop_server(self, number: int, exit_code: int = 0) -> None:
        member, thread = self._places.pop(number)
        self.servers.pop(number)
        member.tell(JobEnded(exit_code, "the test wants it"))
        thread.join(SECONDS)
        assert not thread.is_alive()
        member.close()

    def replace_server(self, number: int) -> None:
        """A server dies and is started again; everybody hears of both."""
        self.stop_server(number, exit_code=1)
        self.tell(MemberLost("server", number, "here", "its process ended", will_return=True))
        self.peers[number] = self.start_server(number, self.peers[number].incarnation + 1)
        peer = self.peers[number]
        self.tell(MemberReturned("server", number, peer.host, peer.incarnation, peer.address))

    def move_server(self, number: int, handover: str) -> None:
        """A server moves to another process, with what it holds; everybody hears of it."""
        member, thread = self._places.pop(number)
        server = self.servers.pop(number)
        server._handover = handover
        server.release()
        thread.join(SECONDS)
        assert not thread.is_alive()
        assert server.is_released
        member.close()
        self.tell(MemberLost("server", number, "here", "its process ended", will_return=True, is_move=True))
        self.peers[number] = self.start_server(number, self.peers[number].incarnation + 1, handover)
        peer = self.peers[number]
        self.tell(MemberReturned("server", number, peer.host, peer.incarnation, peer.address))

    def lose_worker(self, store: DistStore) -> None:
        """A worker dies; everybody hears of it."""
        store.abandon()
        incarnation = max(member.incarnation for member in self.members if member.number == store.rank)
        self.tell(MemberLost("worker", store.rank, "there", "its process ended", incarnation=incarnation))

    def stop_job(self, reason: str) -> None:
        """The scheduler tells everybody that the job is over."""
        self.tell(JobEnded(1, reason))

    def tell(self, event: MembershipEvent) -> None:
        """Everybody hears of something."""
        for member in [*self.members, *(member for member, _ in self._places.values())]:
            member.tell(event)

    def member(self, rank: int, **facts: Any) -> Member:
        member = Member(self, "worker", rank, facts.pop("incarnation", 1))
        for name, value in facts.items():
            setattr(member, name, value)
        self.members.append(member)
        return member

    def store(self, rank: int, *, staleness: int | None = 0, number: int = 0, **facts: Any) -> DistStore:
        kind = {0: "dist_sync", None: "dist_async"}.get(staleness, "dist_ssp")
        return DistStore(kind, self.member(rank, **facts), self.config, number, staleness)

    def run(self, work: Callable[[DistStore], Any], **options: Any) -> list[Any]:
        """What ``work`` returned, or the error that it raised, for every worker."""
        results: list[Any] = [None] * self.num_workers

        def perform(rank: int) -> None:
            try:
                with self.store(rank, **options) as store:
                    results[rank] = work(store)
            except BaseException as error:  # noqa: BLE001  looked at by the test
                results[rank] = error

        threads = [
            threading.Thread(target=perform, args=(rank,), name=f"worker-{rank}") for rank in range(self.num_workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * SECONDS)
        assert not any(thread.is_alive() for thread in threads), "a worker hangs"
        return results

    def results(self, work: Callable[[DistStore], Any], **options: Any) -> list[Any]:
        """What ``work`` returned on every worker."""
        results = self.run(work, **options)
        for each in results:
            if isinstance(each, BaseException):
                raise each
        return results

    def close(self) -> None:
        for number in list(self._places):
            self.stop_server(number)
        for member in self.members:
            member.close()


@contextlib.contextmanager
def job(*args: Any, **options: Any) -> Iterator[Job]:
    made = Job(*args, **options)
    try:
        yield made
    finally:
        made.close()


def wait_until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Returns when the condition holds; fails if it does not in time."""
    pause, deadline = threading.Event(), time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        pause.wait(0.001)
