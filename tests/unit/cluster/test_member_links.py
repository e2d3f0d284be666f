"""Links between members: made once, made again where they are cut, and evidence of who is dead and who is not."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from reigen.cluster.membership.elastic import links as links_module
from reigen.cluster.membership.elastic.links import MAX_MESH_SIZE, MemberLinks
from reigen.cluster.membership.elastic.messages import FinishNoted, LinkFrame, ProgramFinished, ToMember
from reigen.cluster.membership.elastic.node import ElasticNode
from reigen.cluster.membership.views.events import Evidence, Verdict
from reigen.cluster.membership.views.messages import BehindView, ViewGo
from reigen.cluster.membership.views.record import MemberId, StepBase, View, ViewHost, ViewMember
from reigen.net.event_loop import EventLoop
from reigen.net.tls import TlsContext
from tests.silence import fall_silent

SECRET = b"l" * 32


class Owner:
    """Notes what happens."""

    def __init__(self) -> None:
        self.frames: list[tuple[MemberId, LinkFrame]] = []
        self.linked: list[tuple[MemberId, bool]] = []
        self.evidence: list[Evidence] = []

    def on_frame(self, sender: MemberId, frame: LinkFrame) -> None:
        self.frames.append((sender, frame))

    def on_linked(self, member: MemberId, *, is_finished: bool) -> None:
        self.linked.append((member, is_finished))

    def on_evidence(self, evidence: Evidence) -> None:
        self.evidence.append(evidence)


class End:
    """One process, of which there are several in this one."""

    def __init__(self, loop: EventLoop, slot: int, voter_fd: int, **options: Any) -> None:
        self.owner = Owner()
        self.node = ElasticNode(MemberId(slot, 0), "h", "127.0.0.1", SECRET, voter_fd, **options)
        self.links = MemberLinks(loop, self.node, self.owner)
        self.id = self.node.me

    def close(self) -> None:
        self.links.close()
        self.node.close()


class Ends:
    """Several on one loop."""

    def __init__(self, loop: EventLoop, ends: list[End]) -> None:
        self.loop, self.ends = loop, ends

    def view(self, epoch: int = 1) -> View:
        members = tuple(ViewMember(*each.id, 1, each.node.port) for each in self.ends)
        return View.make(epoch, [ViewHost("h", 1, "127.0.0.1", members)], base=StepBase(), sizes=(1, 1000))

    def until(self, condition: Callable[[], object], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline
            self.loop.wait(0.05)

    def meet(self) -> None:
        for each in self.ends:
            each.links.enter(self.view(), is_member=True)
        # a link may be made twice, where a machine is busy
        self.until(lambda: all(len({*each.owner.linked}) == len(self.ends) - 1 for each in self.ends))


@contextmanager
def linked(count: int, **options: Any) -> Iterator[Ends]:
    with ExitStack() as stack:
        fd = os.memfd_create("voter")
        stack.callback(os.close, fd)
        loop = EventLoop()
        stack.callback(loop.close)
        ends = [End(loop, slot, fd, **options) for slot in range(count)]
        for each in ends:
            stack.callback(each.close)
        yield Ends(loop, ends)


@pytest.mark.parametrize("has_tls", [False, True])
def test_one_link_for_two_members(has_tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reigen.cluster.membership.elastic.links._FIRST_TURN_SECONDS", 60.0)  # on a busy machine, too
    with linked(3, tls=TlsContext() if has_tls else None) as job:
        job.meet()
        zero, one, two = job.ends
        zero.links.send(one.id, ToMember(ViewGo(1)))
        two.links.send(one.id, ProgramFinished())
        job.until(lambda: len(one.owner.frames) == 2)
        assert sorted(one.owner.frames, key=lambda each: each[0]) == [
            (zero.id, ToMember(ViewGo(1))),
            (two.id, ProgramFinished()),
        ]
        assert [len(peer.links) for each in job.ends for peer in each.links._peers.values()] == [1] * 6


def test_frames_wait_until_there_is_a_link() -> None:
    with linked(2) as job:
        zero, one = job.ends
        zero.links.enter(job.view(), is_member=False)
        for epoch in range(3):
            zero.links.send(one.id, ToMember(BehindView(epoch, 0)))
        job.until(lambda: len(one.owner.frames) == 3)
        assert [frame.message.epoch for _, frame in one.owner.frames] == [0, 1, 2]


def test_cut_link_of_a_living_process_is_made_again() -> None:
    with linked(2) as job:
        job.meet()
        zero, one = job.ends
        for connection in zero.links._peers[one.id].links:
            connection.socket.shutdown(socket.SHUT_RDWR)
        job.until(lambda: len(zero.owner.linked) > 1 and len(one.owner.linked) > 1)
        zero.links.send(one.id, FinishNoted())
        job.until(lambda: one.owner.frames)
        assert zero.owner.evidence == one.owner.evidence == []


def test_process_that_does_not_listen_is_dead() -> None:
    with linked(3) as job:
        job.meet()
        zero, one, two = job.ends
        two.links.send(zero.id, ProgramFinished())
        two.close()
        job.until(lambda: zero.owner.evidence and one.owner.evidence)
        assert {(each.member, each.verdict) for each in zero.owner.evidence} == {(two.id, Verdict.DEAD)}
        assert zero.owner.frames == [(two.id, ProgramFinished())], "its last words have come"
        assert zero.links.dead().keys() == {two.id}
        zero.links.send(two.id, FinishNoted())  # it is lost


@pytest.mark.parametrize("is_of_another_job", [False, True])
def test_another_process_at_its_port_is_not_the_member(is_of_another_job: bool) -> None:
    """A process of another job, or a later incarnation."""
    with linked(2) as job:
        zero, one = job.ends
        if is_of_another_job:
            zero.links._options = replace(zero.links._options, secret=b"x" * 32)
        members = (ViewMember(0, 0, 1, zero.node.port), ViewMember(1, 0 if is_of_another_job else 7, 1, one.node.port))
        view = View.make(1, [ViewHost("h", 1, "127.0.0.1", members)], base=StepBase(), sizes=(1, 9))
        zero.links.enter(view, is_member=True)
        zero.links.send(view.members[1], FinishNoted())
        job.until(lambda: zero.owner.evidence)
        assert zero.owner.evidence[0].verdict is Verdict.DEAD
        assert one.owner.frames == []


def test_silent_process_cannot_be_reached() -> None:
    """It accepts connections, as a stopped one does, and says nothing."""
    with linked(1, peer_timeout_seconds=0.3) as job, socket.create_server(("127.0.0.1", 0)) as silent:
        (zero,) = job.ends
        members = (ViewMember(0, 0, 1, zero.node.port), ViewMember(1, 0, 1, silent.getsockname()[1]))
        view = View.make(1, [ViewHost("h", 1, "127.0.0.1", members)], base=StepBase(), sizes=(1, 9))
        zero.links.enter(view, is_member=True)
        job.until(lambda: zero.owner.evidence)
        assert zero.owner.evidence[0].verdict is Verdict.UNREACHABLE
        assert zero.links.dead() == {}


@pytest.mark.parametrize("silent_seconds", [0.1, 5.0])
def test_a_silent_host_is_lost_with_all_of_its_processes(
    monkeypatch: pytest.MonkeyPatch, silent_seconds: float
) -> None:
    """But not with those that answer."""
    with linked(4, peer_timeout_seconds=4.0) as job:
        for each in job.ends:  # of other hosts, as far as pidfds are concerned
            each.node.namespace = f"of {each.id}"
        job.meet()
        zero, one, two, three = job.ends
        monkeypatch.setattr(links_module, "silent_seconds", lambda _: silent_seconds)
        peer = zero.links._peers[one.id]
        for link in list(peer.links):
            zero.links._close(peer, link)
        zero.links._on_link_lost(peer, TimeoutError(errno.ETIMEDOUT, "timed out"))
        lost = {one.id, two.id, three.id} if silent_seconds > 2 else {one.id}
        assert {each.member for each in zero.owner.evidence} == lost
        assert {each.verdict for each in zero.owner.evidence} == {Verdict.UNREACHABLE}


def test_what_is_sent_to_a_silent_process_gives_it_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's time, 60 seconds, begins anew with what is sent."""
    with linked(2, peer_timeout_seconds=60.0) as job:
        for each in job.ends:  # of other hosts, as far as pidfds are concerned
            each.node.namespace = f"of {each.id}"
        job.meet()
        zero, one = job.ends
        peer = zero.links._peers[one.id]
        monkeypatch.setattr(links_module, "_ANSWER_SECONDS", 0.05)

        def send(heard_before_seconds: float) -> None:
            monkeypatch.setattr(links_module, "silent_seconds", lambda _: heard_before_seconds)
            if peer.silence_timer is not None:  # of what was sent before
                peer.silence_timer.cancel()
                peer.silence_timer = None
            zero.links.send(one.id, FinishNoted())

        send(61.0)
        job.until(lambda: one.owner.frames and peer.silence_timer is None)
        assert zero.owner.evidence == [], "it has answered"
        for link in one.links._peers[zero.id].links:
            fall_silent(link.socket)
        send(59.95)
        timer = peer.silence_timer
        job.until(lambda: peer.silence_timer is not timer)
        assert zero.owner.evidence == [], "it may still answer"
        send(61.0)
        job.until(lambda: zero.owner.evidence)
        detail = "nothing was heard of its host for 60 s"
        assert zero.owner.evidence == [Evidence(one.id, Verdict.UNREACHABLE, detail)]


def test_garbage_ends_one_link() -> None:
    with linked(3) as job:
        job.meet()
        zero, one, two = job.ends
        zero.links._peers[one.id].links[-1].post(b"\xc1 is no message")
        zero.links._peers[one.id].links[-1].flush()
        job.until(lambda: len(one.owner.linked) > 2)
        two.links.send(one.id, FinishNoted())
        job.until(lambda: one.owner.frames)
        assert one.owner.evidence == []


def test_others_than_members_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "MAX_OTHERS", 2)
    with linked(5) as job:
        member, *others = job.ends
        alone = View.make(1, [member.node.card()], base=StepBase(), sizes=(1, 9))
        member.links.enter(alone, is_member=True)
        for other in others:
            other.links.enter(alone, is_member=False)
            other.links.send(member.id, FinishNoted())
        job.until(lambda: len(member.owner.frames) == 2 and member.links._listener.num_refused >= 2)
        assert len(member.links.linked) == 2


def test_large_jobs_have_few_links() -> None:
    with linked(1) as job, socket.create_server(("127.0.0.1", 0)) as silent:
        (zero,) = job.ends
        port = silent.getsockname()[1]
        hosts = [ViewHost(f"h{n}", 1, "127.0.0.1", (ViewMember(n, 0, 1, port),)) for n in range(MAX_MESH_SIZE * 2)]
        zero.links.enter(View.make(1, hosts, base=StepBase(), sizes=(1, 999)), is_member=True)
        assert sum(peer.is_watched for peer in zero.links._peers.values()) == 2 * 6 + 1
