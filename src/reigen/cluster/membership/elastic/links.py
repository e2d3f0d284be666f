"""Links between the processes of an elastic job, and evidence of their ends.

a. Every process listens. A member has a link to each other member of a small job, and otherwise to those that it tells
   of a change first (`revoke_neighbours`) and to those of its host; more are made when there is something to say. The
   later one of two connects; the other one does so, too, if that takes too long.
b. The end of a local process is seen by its pidfd. What it has said before is read first.
c. Where a link ends, this end connects again. That is refused: the process is dead, for it listens until its end. It is
   accepted: nothing has happened. Nobody answers: the host cannot be reached, until the kernel says otherwise.
d. A link whose other end is silent for too long is ended by the kernel (keepalive), which is no proof of a death; or
   here, if something was sent meanwhile: with that the kernel's time begins anew.

Everything is bounded: what waits to be sent to one end, and how many links processes may have that are in no view.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from reigen.cluster.membership.elastic.messages import LINK_CODEC, LinkFrame, LinkHello
from reigen.cluster.membership.elastic.node import ElasticNode, identify_member
from reigen.cluster.membership.elastic.process_identity import LocalProcess
from reigen.cluster.membership.rendezvous import split_address
from reigen.cluster.membership.views.events import Evidence, Verdict
from reigen.cluster.membership.views.member import revoke_neighbours
from reigen.cluster.membership.views.record import MemberId, View
from reigen.errors import AuthenticationError, ConfigError, WireError
from reigen.net.connection import Connection
from reigen.net.event_loop import EventLoop, Timer, wait_ready
from reigen.net.fork_safety import close_in_children
from reigen.net.listener import MAX_UNREAD_BYTES, SILENCE_ERRNOS, Listener, join_address
from reigen.net.sockets import num_undelivered_bytes, silent_seconds
from reigen.resources.limits import explain_limit

_log = logging.getLogger(__name__)

#: Up to this size, each member of a job has a link to each other one.
MAX_MESH_SIZE = 64
#: Processes with links that are in no view: candidates, and former members.
MAX_OTHERS = 256
#: Frames that wait until a link is made; they are all asked again.
_MAX_WAITING = 64
#: How long the earlier one of two waits for the other to connect.
_FIRST_TURN_SECONDS = 0.2
#: Between tries to connect to a process that ends connections, and to one that cannot be reached.
_AGAIN_SECONDS, _SILENT_SECONDS = 0.02, 1.0
#: An answer to what was sent to a silent process is waited for at least so long: three transmissions.
_ANSWER_SECONDS = 0.5
#: How long the end of a local process may take behind that of its links.
_EXIT_SECONDS = 0.1
#: Connections in a row that came to nothing: then a process cannot be reached.
_MAX_FAILURES = 20
#: Errors of a process that may open no more files, or of its host.
LIMIT_ERRNOS = (errno.EMFILE, errno.ENFILE)


class LinkOwner(Protocol):
    """Owner of links. It is called by the thread of the loop."""

    def on_frame(self, sender: MemberId, frame: LinkFrame) -> None:
        """Take a frame; not the hello."""

    def on_linked(self, member: MemberId, *, is_finished: bool) -> None:
        """Take note of a link to a process; its program may be done."""

    def on_evidence(self, evidence: Evidence) -> None:
        """Take evidence about a process."""


@dataclass(eq=False)
class _Peer:
    """Another process.

    Attributes:
        id: who it is.
        address: where it listens; None: not known yet.
        links: to it, authenticated; the latest is used.
        connecting: the one that is being made.
        waiting: frames for it.
        process, pidfd: of a local process; None and -1: of none, or not known yet.
        is_watched: this process wants to know of its end.
        is_member: it is in the present view, or was in the one before.
        num_failures: connections in a row that came to nothing.
        timer: of the next try.
        silence_timer: of the next look whether it has answered.
    """

    id: MemberId
    address: tuple[str, int] | None = None
    links: list[Connection] = field(default_factory=list)
    connecting: Connection | None = None
    waiting: list[bytes] = field(default_factory=list)
    process: LocalProcess | None = None
    pidfd: int = -1
    is_watched: bool = False
    is_member: bool = False
    num_failures: int = 0
    timer: Timer | None = None
    silence_timer: Timer | None = None


class MemberLinks:
    """Links of one process. One thread uses it, that of the loop.

    Args:
        loop: of the owner, who closes it after the links.
        node: this process.
        owner: who is told.
    """

    def __init__(self, loop: EventLoop, node: ElasticNode, owner: LinkOwner) -> None:
        self._loop, self._node, self._owner = loop, node, owner
        self._options = node.connection_options()
        self._peers: dict[MemberId, _Peer] = {}
        #: processes of the present view and the one before, and candidates, that have ended, and how that is known
        self._dead: dict[MemberId, str] = {}
        self._view: View | None = None
        self._is_closed = False
        #: its program is done
        self.is_finished = False
        self._listener = Listener(loop, node.listening, self._options, self._on_accepted)
        close_in_children(self)

    def enter(self, view: View, *, is_member: bool) -> None:
        """Learn of a view that was decided; a member of it watches others from now on.

        Evidence of deaths that were known before is not told again: see `dead`.
        """
        before, self._view = self._view, view
        present = {*view.members, *(() if before is None else before.members)} - {self._node.me}
        for peer in list(self._peers.values()):
            peer.is_member, peer.is_watched = peer.id in present, False
            if not peer.is_member and not peer.links:
                self._forget(peer)
        for member in self._dead.keys() - present:
            del self._dead[member]
        for host in view.hosts:
            for each in host.members:
                if each.id != self._node.me and each.id not in self._dead:
                    peer = self._peers.setdefault(each.id, _Peer(each.id))
                    peer.is_member, peer.address = True, (host.address, each.port)
        if is_member:
            self._watch_members(view)

    def dead(self) -> dict[MemberId, str]:
        """Return processes that have ended, and how that is known."""
        return dict(self._dead)

    @property
    def linked(self) -> list[MemberId]:
        """Return processes to which there is a link."""
        return [peer.id for peer in self._peers.values() if peer.links]

    def send(self, member: MemberId, frame: LinkFrame) -> None:
        """Send a frame, which is lost where the process cannot be reached."""
        peer = self._peers.get(member)
        if peer is None or self._is_closed:
            return
        data = LINK_CODEC.encode(frame)
        if peer.links:
            self._post(peer, peer.links[-1], data)
            return
        if len(peer.waiting) < _MAX_WAITING:
            peer.waiting.append(data)
        if peer.timer is None or peer.num_failures == 0:
            self._connect(peer)

    def kill(self, member: MemberId) -> bool:
        """Send SIGKILL to a local process; returns whether that was possible. Its end is evidence."""
        peer = self._peers.get(member)
        if peer is None or peer.pidfd < 0:
            return False
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(peer.pidfd, signal.SIGKILL)
        return True

    def find_stopped(self, members: Iterable[MemberId], reason: str) -> Iterator[Evidence]:
        """Yield evidence about processes of this host that are stopped by a signal, and doubted for another reason."""
        for member in members:
            peer = self._peers.get(member)
            if peer is not None and peer.process is not None and peer.process.is_stopped:
                yield Evidence(member, Verdict.STUCK, f"its process is stopped, and {reason}")

    def close(self) -> None:
        """End all links, and stop listening. May be called twice."""
        self._is_closed = True
        self._listener.close()
        for peer in list(self._peers.values()):
            for link in peer.links:
                with suppress(OSError):
                    link.flush()
            self._forget(peer)

    def close_descriptors(self) -> None:
        """Close the descriptors only; see `reigen.net.fork_safety`."""
        for peer in self._peers.values():
            for link in (*peer.links, *([peer.connecting] if peer.connecting else [])):
                link.close()
            if peer.pidfd >= 0:
                os.close(peer.pidfd)
                peer.pidfd = -1

    # -- whom to watch ------------------------------------------------------------------------------------------------

    def _watch_members(self, view: View) -> None:
        me = self._node.me
        members = view.members
        if view.size > MAX_MESH_SIZE:
            near = [members[rank] for rank in revoke_neighbours(view.ranks[me], view.size)]
            members = tuple(dict.fromkeys((members[0], *near, *view.neighbours(me))))
        for member in members:
            peer = self._peers.get(member)
            if peer is None or member == me:
                continue
            peer.is_watched = True
            if not peer.links and peer.connecting is None:
                if me > member:
                    self._connect(peer)
                else:
                    self._later(peer, _FIRST_TURN_SECONDS)

    def _later(self, peer: _Peer, seconds: float) -> None:
        """Connect in a while, unless there is a link then."""
        if peer.connecting is None:
            self._cancel_timer(peer)
            peer.timer = self._loop.call_at(time.monotonic() + seconds, partial(self._connect, peer))

    @staticmethod
    def _cancel_timer(peer: _Peer) -> None:
        if peer.timer is not None:
            peer.timer.cancel()
            peer.timer = None

    # -- making links -------------------------------------------------------------------------------------------------

    def _connect(self, peer: _Peer) -> None:
        if self._is_closed or peer.links or peer.connecting or not peer.address or self._peers.get(peer.id) is not peer:
            return
        self._cancel_timer(peer)
        try:
            peer.connecting = self._options.start_connecting(peer.address)
        except OSError as error:
            if error.errno in LIMIT_ERRNOS and peer.num_failures + 1 >= _MAX_FAILURES:  # it is not the other's fault
                raise explain_limit(error) from None
            self._fail(peer, error)
            return
        deadline = time.monotonic() + self._node.peer_timeout_seconds
        peer.timer = self._loop.call_at(deadline, partial(self._give_up, peer, peer.connecting))
        self._advance(peer, peer.connecting)

    def _advance(self, peer: _Peer, connection: Connection) -> None:
        try:
            is_proven = connection.advance()
            if is_proven and identify_member(connection.peer) != peer.id:
                raise AuthenticationError("another process listens there")
        except (OSError, AuthenticationError, WireError) as error:
            self._end_attempt(peer)
            self._fail(peer, error)
            return
        if not is_proven:
            step = partial(self._advance, peer, connection)
            self._loop.watch(connection, step, step if connection.num_unsent_bytes else None)
            return
        peer.connecting = None
        self._add(peer, connection)

    def _give_up(self, peer: _Peer, connection: Connection) -> None:
        if peer.connecting is connection:
            self._end_attempt(peer)
            self._fail(peer, TimeoutError(errno.ETIMEDOUT, "it accepts connections and says nothing"))

    def _end_attempt(self, peer: _Peer) -> None:
        self._cancel_timer(peer)
        if peer.connecting is not None:
            self._loop.unwatch(peer.connecting)
            peer.connecting.close()
            peer.connecting = None

    def _fail(self, peer: _Peer, error: Exception) -> None:
        """Take in that a connection could not be made."""
        if peer.links:
            return
        peer.num_failures += 1
        where = join_address(*peer.address) if peer.address else "an unknown address"
        if isinstance(error, ConnectionRefusedError | AuthenticationError):
            self._died(peer, f"nothing answers for it at {where} ({getattr(error, 'strerror', None) or error})")
            return
        is_silent = isinstance(error, OSError) and error.errno in SILENCE_ERRNOS
        if is_silent or peer.num_failures >= _MAX_FAILURES:
            peer.waiting.clear()
            self._tell(peer, Verdict.UNREACHABLE, f"no link to {where} ({getattr(error, 'strerror', None) or error})")
        if peer.is_watched or peer.waiting or not peer.is_member:
            self._later(peer, _SILENT_SECONDS if is_silent or peer.num_failures >= _MAX_FAILURES else _AGAIN_SECONDS)
        if not peer.is_member and peer.num_failures >= _MAX_FAILURES:
            self._forget(peer)

    def _on_accepted(self, connection: Connection) -> None:
        member = identify_member(connection.peer)
        if member is None or member == self._node.me:
            self._listener.refuse(f"comes from {connection.peer}, and is no link of a member")
            connection.close()
            return
        peer = self._peers.get(member)
        if peer is None:
            num_others = sum(not each.is_member for each in self._peers.values())
            if num_others >= MAX_OTHERS:
                self._listener.refuse(f"comes from one of more than {MAX_OTHERS} processes that are no members")
                connection.close()
                return
            self._dead.pop(member, None)
            peer = self._peers[member] = _Peer(member)
        while len(peer.links) > 1:  # one that it has made, and one that this process has made
            self._close(peer, peer.links[0])
        self._add(peer, connection)

    def _add(self, peer: _Peer, connection: Connection) -> None:
        if peer.connecting is None:
            self._cancel_timer(peer)
        peer.links.append(connection)
        self._post(peer, connection, LINK_CODEC.encode(self._node.hello(is_finished=self.is_finished)))
        waiting, peer.waiting = peer.waiting, []
        for data in waiting:
            self._post(peer, connection, data)

    # -- links in use -------------------------------------------------------------------------------------------------

    def _post(self, peer: _Peer, connection: Connection, data: bytes) -> None:
        if connection.num_unsent_bytes <= MAX_UNREAD_BYTES:  # beyond, it does not read: nothing is added
            connection.post(data)
        self._serve(peer, connection, self._flush)
        self._await_answer(peer)

    def _serve(self, peer: _Peer, connection: Connection, step: Callable[[_Peer, Connection], None]) -> None:
        if connection not in peer.links:
            return
        try:
            step(peer, connection)
        except (OSError, AuthenticationError, WireError) as error:
            if connection in peer.links:
                self._close(peer, connection)
                self._on_link_lost(peer, error)

    def _flush(self, peer: _Peer, connection: Connection) -> None:
        is_empty = connection.flush()
        write = None if is_empty else partial(self._serve, peer, connection, self._flush)
        self._loop.watch(connection, partial(self._serve, peer, connection, self._read), write)

    def _read(self, peer: _Peer, connection: Connection) -> None:
        for data in connection.read():
            frame = LINK_CODEC.decode(data)
            if isinstance(frame, LinkHello):
                self._on_hello(peer, frame)
            else:
                peer.num_failures = 0
                self._owner.on_frame(peer.id, frame)
            if connection not in peer.links:
                return

    def _on_hello(self, peer: _Peer, hello: LinkHello) -> None:
        with suppress(ConfigError):
            peer.address = peer.address or split_address(hello.address)
        if hello.namespace == self._node.namespace and peer.pidfd < 0:
            process = LocalProcess(hello.pid, hello.started)
            pidfd = process.open()
            if pidfd is not None:  # otherwise its link ends, too
                peer.process, peer.pidfd = process, pidfd
                self._loop.watch(pidfd, partial(self._on_exit, peer))
        self._owner.on_linked(peer.id, is_finished=hello.is_finished)

    def _close(self, peer: _Peer, connection: Connection) -> None:
        peer.links.remove(connection)
        self._loop.unwatch(connection)
        connection.close()

    # -- the end of others --------------------------------------------------------------------------------------------

    def _on_exit(self, peer: _Peer) -> None:
        """Take a local process's last frames, and note its end."""
        for link in list(peer.links):
            while link in peer.links and wait_ready(link, 0.0, select.POLLIN):
                self._serve(peer, link, self._read)
        if peer.id not in self._dead:
            self._died(peer, "its process has ended")

    def _on_link_lost(self, peer: _Peer, error: Exception) -> None:
        if peer.links or self._is_closed or peer.id in self._dead:
            return
        if peer.pidfd >= 0 and wait_ready(peer.pidfd, 0.0, select.POLLIN):
            self._died(peer, "its process has ended")
        elif isinstance(error, OSError) and error.errno in SILENCE_ERRNOS:
            detail = f"nothing was heard of its host for {self._node.peer_timeout_seconds:g} s"
            self._tell(peer, Verdict.UNREACHABLE, detail)
            self._later(peer, _SILENT_SECONDS)
            if peer.address is not None:
                self._end_silent_links(peer.address[0], detail)
        elif peer.address is None:
            self._forget(peer)
        elif peer.connecting is None:
            _log.debug("the link to %s has ended: %s", peer.id, error)
            peer.num_failures += 1
            self._later(peer, _EXIT_SECONDS if peer.pidfd >= 0 else _AGAIN_SECONDS * (peer.num_failures - 1))

    def _await_answer(self, peer: _Peer) -> None:
        """Have a look when the time is over in which a process that was sent something must be heard.

        It is counted from what was heard of it last, and that is why the kernel's time is not enough: where a host is
        cut off, one member notices first and tells the others, which ask all; and so they send to the silent processes
        just before they would have noticed, too. The kernel waits for an answer to that as long as from the beginning.
        """
        if peer.silence_timer is None and peer.links:
            seconds = max(self._node.peer_timeout_seconds - _silent_seconds(peer), _ANSWER_SECONDS)
            peer.silence_timer = self._loop.call_at(time.monotonic() + seconds, partial(self._look_for_answer, peer))

    def _look_for_answer(self, peer: _Peer) -> None:
        peer.silence_timer = None
        if not any(num_undelivered_bytes(link.socket) for link in peer.links):
            return
        if _silent_seconds(peer) < self._node.peer_timeout_seconds:
            self._await_answer(peer)
            return
        for link in list(peer.links):
            self._close(peer, link)
        self._on_link_lost(peer, TimeoutError(errno.ETIMEDOUT, "nothing was heard of it"))

    def _end_silent_links(self, host: str, detail: str) -> None:
        """Give up the other links to a host that is silent, if nothing comes by them either.

        Each would be given up by itself, but later: what is sent to such a process meanwhile, because another one of
        its host is lost, begins the kernel's time anew.
        """
        enough = self._node.peer_timeout_seconds / 2  # an idle link is probed after a fifth of the whole
        for peer in list(self._peers.values()):
            if peer.address is None or peer.address[0] != host or peer.pidfd >= 0 or not peer.links:
                continue
            if _silent_seconds(peer) >= enough:
                for link in list(peer.links):
                    self._close(peer, link)
                self._tell(peer, Verdict.UNREACHABLE, detail)
                self._later(peer, _SILENT_SECONDS)

    def _died(self, peer: _Peer, detail: str) -> None:
        self._dead[peer.id] = detail
        self._forget(peer)
        self._tell(peer, Verdict.DEAD, detail)

    def _tell(self, peer: _Peer, verdict: Verdict, detail: str) -> None:
        self._owner.on_evidence(Evidence(peer.id, verdict, detail))

    def _forget(self, peer: _Peer) -> None:
        """End everything that concerns a process."""
        self._end_attempt(peer)
        if peer.silence_timer is not None:
            peer.silence_timer.cancel()
        for link in list(peer.links):
            self._close(peer, link)
        if peer.pidfd >= 0:
            self._loop.unwatch(peer.pidfd)
            pidfd, peer.pidfd = peer.pidfd, -1
            os.close(pidfd)
        if self._peers.get(peer.id) is peer:
            del self._peers[peer.id]


def _silent_seconds(peer: _Peer) -> float:
    """Return for how long nothing has come from a process's kernel by any link to it, of which there is one."""
    return min(silent_seconds(link.socket) for link in peer.links)


def first_reachable(members: Iterable[MemberId], linked: Iterable[MemberId]) -> list[MemberId]:
    """Return members in order, those first to which there is a link."""
    known = set(linked)
    return sorted(members, key=lambda member: member not in known)
